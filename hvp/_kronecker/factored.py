"""Block-diagonal operators whose eigenvectors are known, so that functions of them are cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import HvpError
from hvp._graphs.compiled import Compiled
from hvp._kronecker.block import Block
from hvp._kronecker.factored_map import FactoredMap
from hvp._kronecker.factors import Factors
from hvp._operators.damping import check_damping
from hvp._operators.operator import Operator
from hvp._runtime.arguments import check_count, check_seed
from hvp._vectors.selection import select
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest

# An eigenvalue counts as zero up to this many rounding errors of the largest.
_ROUNDING_ERRORS = 8.0


class FactoredOperator(Operator):
    """A symmetric block-diagonal matrix that is held as eigenvalues and eigenvectors.

    Parameters
    ----------
    space : Space
        The space of the vectors.
    nest : VariableNest
        The variables.
    factors : Factors
        The blocks, which together cover all entries of the vectors.
    compiled : dict, optional
        Compiled functions of matrices with blocks of the same forms.
    origin : object, optional
        What this one is made from, which it keeps alive.
    """

    is_symmetric = True

    def __init__(
        self,
        space: Space,
        nest: VariableNest,
        factors: Factors,
        compiled: dict[str, Compiled] | None = None,
        origin: Any = None,
    ) -> None:
        self._space, self._nest, self._factors = space, nest, factors
        self._origin = origin
        # Functions of the same matrix share what is compiled: they differ in eigenvalues only.
        compiled = {} if compiled is None else compiled
        self._factored = FactoredMap(space, factors, compiled, nest.variables)
        super().__init__(self._factored)

    @property
    def _blocks(self) -> list[Block]:
        return self._factors.current()

    def __repr__(self) -> str:
        kinds = [block.kind for block in self._factors.held()]
        counts = {kind: kinds.count(kind) for kind in _KINDS}
        blocks = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        size = self.shape[0]
        return f"{type(self).__name__}({size} x {size}, {self.dtype.name}, blocks: {blocks})"

    def is_of(self, nest: VariableNest) -> bool:
        """Whether these are the variables of the matrix, in this order."""
        pairs = zip(self._nest.variables, nest.variables)
        same = len(self._nest.variables) == len(nest.variables)
        return same and all(own.handle is other.handle for own, other in pairs)

    @property
    def nbytes(self) -> int:
        """The memory of eigenvectors and eigenvalues, in bytes."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def trace(self) -> float:
        """The trace."""
        return float(sum(block.scales.sum() for block in self._blocks))

    @property
    def eigenvalues(self) -> np.ndarray:
        """All eigenvalues, in increasing order; shape `(n,)`, in float64."""
        return np.sort(np.concatenate([block.scales.reshape(-1) for block in self._blocks]))

    @property
    def logdet(self) -> float:
        """The logarithm of the determinant; minus infinity if the matrix is singular."""
        with np.errstate(divide="ignore"):
            return float(sum(np.log(block.scales).sum() for block in self._blocks))

    def damped(self, damping: float) -> FactoredOperator:
        """Return the matrix plus a multiple of the identity.

        Parameters
        ----------
        damping : float
            The multiple, which is not negative.
        """
        damping = _not_negative(damping)
        return self._of_scales(lambda scales: scales + damping)

    def inverse(self, damping: float = 0.0) -> FactoredOperator:
        """Return the inverse of the matrix plus a multiple of the identity.

        Parameters
        ----------
        damping : float, optional
            The multiple, which is not negative.

        Returns
        -------
        FactoredOperator
            The exact inverse of ``K.damped(damping)``, which costs no products. It can be passed as
            a preconditioner `M`, and has the same methods as this operator.

        Raises
        ------
        HvpError
            If the damped matrix is singular, up to rounding.
        """
        damping = _not_negative(damping)

        def inverted(block: Block) -> Block:
            self._refuse_singular(block, damping)
            return block.scaled(lambda scales: 1 / (scales + damping), self._space.dtype)

        return self._function(inverted)

    def sqrt(self, damping: float = 0.0) -> FactoredOperator:
        """Return the symmetric square root of the matrix plus a multiple of the identity.

        Parameters
        ----------
        damping : float, optional
            The multiple, which is not negative.
        """
        damping = _not_negative(damping)
        return self._of_scales(lambda scales: np.sqrt(scales + damping))

    def sample(
        self, count: int, damping: float = 0.0, *, examples: int = 1, seed: int = 0
    ) -> np.ndarray:
        """Draw from the normal distribution whose precision matrix this is.

        Parameters
        ----------
        count : int
            Number of vectors to draw.
        damping : float, optional
            The precision of an independent prior: a multiple of the identity that is added.
        examples : int, optional
            A factor of the precision. For the Laplace approximation of a posterior, pass the number
            of examples, because this matrix belongs to a mean over them, and as `damping` the
            precision of the prior, divided by the number of examples.
        seed : int, optional
            Seed of the draws.

        Returns
        -------
        ndarray
            Vectors of mean zero and covariance ``K.inverse(damping) / examples``, as the columns of
            an array of shape `(n, count)`. Add the weights to get samples of the weights.

        Raises
        ------
        HvpError
            If the damped matrix is singular, up to rounding.
        """
        check_count(count, "count")
        check_count(examples, "examples")
        root = self.inverse(damping).sqrt()
        normal = np.random.default_rng(check_seed(seed)).standard_normal((self.shape[0], count))
        return root @ (normal / np.sqrt(examples)).astype(self.dtype)

    def block(self, variables: Any) -> FactoredOperator:
        """Return the diagonal block of some of the variables.

        Parameters
        ----------
        variables : str, variable, layer, module or list of these
            The variables, as for `HessianOperator.block`.

        Returns
        -------
        FactoredOperator

        Raises
        ------
        HvpError
            If they share a block with other variables, as a kernel does with its bias.
        """
        places = select(variables, self._space.paths, self._nest.variables)
        chosen = {self._nest.names[place] for place in places}
        for block in self._blocks:
            if set(block.names) & chosen and set(block.names) - chosen:
                raise HvpError(
                    f"the variables {', '.join(sorted(block.names))} share a block",
                    "all variables of a block, or none",
                    "choose the layer, which has all of them",
                )
        starts = np.cumsum([0, *self._space.sizes])
        entries = np.concatenate([np.arange(starts[p], starts[p + 1]) for p in places])
        moved = np.full(self._space.size, -1)
        moved[entries] = np.arange(len(entries))
        nest = VariableNest(
            [0] * len(places),
            tuple(self._nest.variables[p] for p in places),
            tuple(self._nest.names[p] for p in places),
            self._nest.source,
        )

        def own(blocks: Sequence[Block]) -> list[Block]:
            chosen_blocks = [block for block in blocks if set(block.names) & chosen]
            return [replace(block, entries=moved[block.entries]) for block in chosen_blocks]

        factors = Factors(own, self._factors)
        return FactoredOperator(self._space.subspace(places), nest, factors, origin=self)

    def diagonal(self, *, max_size: int | None = None) -> np.ndarray:
        """Return the diagonal, which is computed from the eigenvectors without products.

        Parameters
        ----------
        max_size : int, optional
            Not used, as there is no limit.

        Returns
        -------
        ndarray
            The diagonal, of shape `(n,)`, in the operator's dtype.
        """
        del max_size
        diagonal = np.empty(self.shape[0], self.dtype)
        for block in self._blocks:
            diagonal[block.entries] = block.diagonal()
        return diagonal

    def _known_diagonal(self, most: int) -> tuple[np.ndarray | None, int]:
        return self.diagonal(), 0

    def parts(self) -> list[tuple[tuple[str, ...], np.ndarray, np.ndarray]]:
        """Return the variables' names, the entries and the eigenvalues of each block, all flat."""
        return [(b.names, b.entries.reshape(-1), b.scales.reshape(-1)) for b in self._blocks]

    def rescaled(self, functions: Sequence[Callable[[np.ndarray], np.ndarray]]) -> FactoredOperator:
        """Return the matrix with a function of its own applied to the eigenvalues of each block."""
        dtype = self._space.dtype

        def make(blocks: Sequence[Block]) -> list[Block]:
            return [block.scaled(own, dtype) for block, own in zip(blocks, functions)]

        factors = Factors(make, self._factors)
        return FactoredOperator(self._space, self._nest, factors, self._factored.compiled, self)

    def frozen(self) -> FactoredOperator:
        """Return the matrix as it is now, whatever becomes of the weights."""
        blocks = self._blocks
        factors = Factors(lambda: blocks)
        return FactoredOperator(self._space, self._nest, factors, self._factored.compiled)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the blocks as arrays with names, to save them."""
        return {
            f"{number} {field}": np.asarray(getattr(block, field))
            for number, block in enumerate(self._blocks)
            for field in _FIELDS
            if getattr(block, field) is not None
        }

    @staticmethod
    def blocks_from(arrays: Mapping[str, np.ndarray], dtype: tf.DType) -> list[Block]:
        """Return the blocks whose `arrays` were saved."""
        blocks, number = [], 0
        while f"{number} kind" in arrays:
            fields: list[Any] = [arrays.get(f"{number} {field}") for field in _FIELDS]
            names, kind, entries, *bases, scales = fields
            blocks.append(Block.of(tuple(names.tolist()), str(kind), entries, bases, scales, dtype))
            number += 1
        return blocks

    def output_variances(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return the variances of a dense layer's outputs, as a function of its inputs.

        The layer's kernel, and its bias if it has one, have this covariance; return None if it is
        not known to which of its entries these belong. No Jacobian is formed.
        """
        blocks, width = self._blocks, self._space.shapes[0][-1]
        # A row of the kernel, or the bias, for each of the layer's inputs; the bias has a one.
        rows = np.arange(self.shape[0] // width)
        if all(block.kind == "diagonal" for block in blocks):
            diagonal = self.diagonal().reshape(-1, width)
            variances = lambda x: x**2 @ diagonal  # noqa: E731
        elif len(blocks) == 1 and blocks[0].kind == "exact":
            whole = self.to_dense().reshape(len(rows), width, len(rows), width)
            own = np.einsum("iojo->oij", whole)
            variances = lambda x: np.einsum("omi,mi->mo", x @ own, x)  # noqa: E731
        elif [block.kind for block in blocks] == ["kronecker"]:
            rows, variances = blocks[0].entries[0, :, 0] // width, blocks[0].output_variances()
        else:
            return None
        return lambda inputs: variances(np.insert(inputs, inputs.shape[1], 1, axis=1)[:, rows])

    def rotate(self, rows: tf.Tensor) -> tf.Tensor:
        """Write each row, of shape `(k, n)`, in terms of the eigenvectors, block by block."""
        return self._factored.run("rotate", rows)

    def scales(self) -> np.ndarray:
        """Return the eigenvalues in the order of what `rotate` returns; shape `(n,)`."""
        return np.concatenate([block.scales.reshape(-1) for block in self._blocks])

    def _of_scales(self, function: Callable[[np.ndarray], np.ndarray]) -> FactoredOperator:
        return self._function(lambda block: block.scaled(function, self._space.dtype))

    def _function(self, function: Callable[[Block], Block]) -> FactoredOperator:
        factors = Factors(lambda blocks: [*map(function, blocks)], self._factors)
        factors.current()  # so that what cannot be computed is refused now
        return FactoredOperator(self._space, self._nest, factors, self._factored.compiled, self)

    def _refuse_singular(self, block: Block, damping: float) -> None:
        scales = block.scales + damping
        least, largest = float(scales.min()), float(scales.max())
        unit = np.finfo(self.dtype).eps * _ROUNDING_ERRORS
        if not least > unit * largest:
            raise HvpError(
                f"the damped block of {', '.join(block.names)} is singular up to rounding: its "
                f"eigenvalues go from {least:.3g} to {largest:.3g}",
                "a positive definite matrix",
                f"pass damping > {unit * largest:.1g}",
            )


# What a block is saved as.
_FIELDS = ("names", "kind", "entries", "left", "right", "scales")
_KINDS = ("kronecker", "exact", "diagonal", "low-rank")


def _not_negative(damping: Any) -> float:
    damping = check_damping(damping)
    if damping < 0:
        raise HvpError(f"the damping is {damping:g}", "a number that is not negative")
    return damping
