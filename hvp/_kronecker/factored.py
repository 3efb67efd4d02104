"""Block-diagonal operators whose eigenvectors are known, so that functions of them are cheap."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._derivatives.belonging import belonging_to
from hvp._errors import HvpError, TooLargeError
from hvp._graphs.compiled import Compiled
from hvp._graphs.private import is_for_xla
from hvp._kronecker.block import Block
from hvp._kronecker.factors import Factors, with_tensors
from hvp._operators.arithmetic import DtypePreserving
from hvp._operators.damping import check_damping
from hvp._runtime.arguments import check_count
from hvp._runtime.guard import OneProcess
from hvp._runtime.interrupts import Uninterrupted
from hvp._vectors.arrays import check_array
from hvp._vectors.nests import flattened, unflattened
from hvp._vectors.selection import select
from hvp._vectors.space import Space, as_tensor
from hvp._vectors.variables import VariableNest

# Columns in one block when a dense matrix is assembled.
_DENSE_BLOCK = 64
# An eigenvalue counts as zero up to this many rounding errors of the largest.
_ROUNDING_ERRORS = 8.0


class FactoredOperator(OneProcess, DtypePreserving):
    """A symmetric block-diagonal matrix that is held as eigenvalues and eigenvectors.

    Parameters
    ----------
    space : Space
        The space of the vectors.
    nest : VariableNest
        The variables.
    factors : Factors
        The blocks, which together have all entries of the vectors.
    compiled : dict, optional
        Compiled functions of matrices with blocks of the same forms.
    origin : FactoredOperator, optional
        The matrix that this one is made from, which it keeps alive.
    """

    def __init__(
        self,
        space: Space,
        nest: VariableNest,
        factors: Factors,
        compiled: dict[str, Compiled] | None = None,
        origin: FactoredOperator | None = None,
    ) -> None:
        self._space, self._nest, self._factors = space, nest, factors
        self._origin = origin
        # Functions of the same matrix share them: they differ in eigenvalues only.
        self._compiled: dict[str, Compiled] = {} if compiled is None else compiled
        super().__init__(np.dtype(space.dtype.as_numpy_dtype), (space.size, space.size))

    @property
    def _blocks(self) -> list[Block]:
        return self._factors.current()

    __signature__: inspect.Signature

    def __init_subclass__(cls, **options: Any) -> None:
        """Show the signature of `__init__`; scipy's `__new__` would show `(*args, **kwargs)`."""
        super().__init_subclass__(**options)
        signature = inspect.signature(cls.__init__)
        cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def flatten(self, nest: Any) -> Any:
        """Concatenate a nest shaped like the variables, as `HessianOperator.flatten` does."""
        return flattened(self._space, nest)

    def unflatten(self, vector: Any) -> Any:
        """Split a vector, or a block of columns, as `HessianOperator.unflatten` does."""
        return unflattened(self._space, vector)

    def __repr__(self) -> str:
        kinds = [block.kind for block in self._factors.held()]
        counts = {kind: kinds.count(kind) for kind in _KINDS}
        blocks = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        size = self.shape[0]
        return f"{type(self).__name__}({size} x {size}, {self.dtype.name}, blocks: {blocks})"

    def is_of(self, nest: VariableNest) -> bool:
        """Whether these are its variables, in this order."""
        pairs = zip(self._nest.variables, nest.variables)
        same = len(self._nest.variables) == len(nest.variables)
        return same and all(own.handle is other.handle for own, other in pairs)

    @property
    def nbytes(self) -> int:
        """The bytes that eigenvectors and eigenvalues take."""
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
            How many vectors to draw.
        damping : float, optional
            The precision of an independent prior: a multiple of the identity that is added.
        examples : int, optional
            A factor that the precision is multiplied by. For the Laplace approximation of a
            posterior, pass the number of examples, because this matrix belongs to a mean over them;
            and as `damping` pass the precision of the prior, divided by the number of examples.
        seed : int, optional
            What the draws depend on.

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
        normal = np.random.default_rng(seed).standard_normal((self.shape[0], count))
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
            If they share a block with variables that are left out, as a kernel does with its bias.
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

    def to_dense(self, *, max_size: int = 4096) -> np.ndarray:
        """Return the whole matrix.

        Parameters
        ----------
        max_size : int, optional
            The largest `n` to accept.

        Raises
        ------
        TooLargeError
            If `n` is larger than `max_size`.
        """
        size = self.shape[0]
        if size > max_size:
            raise TooLargeError(
                f"a dense matrix of {size} x {size} numbers was asked for",
                f"at most {max_size} x {max_size}",
                f"pass max_size={size} if {size**2 * self.dtype.itemsize / 2**30:.2g} GiB are what "
                "you want",
            )
        columns = [np.eye(size, _DENSE_BLOCK, -i, self.dtype) for i in range(0, size, _DENSE_BLOCK)]
        return np.concatenate([self.matmat(block) for block in columns], axis=1)[:, :size]

    def product(self, v: Any) -> Any:
        """Multiply by a vector of tensors: a nest like the variables, or a flat tensor.

        Parameters
        ----------
        v : nest of tensors, or tf.Tensor
            As for `HessianOperator.product`.

        Returns
        -------
        nest of tf.Tensor, or tf.Tensor
            The product in the form of `v`.
        """
        space = self._space
        is_flat = space.is_flat(v)
        if is_flat:
            vector = as_tensor(v, space.dtype)
        else:
            parts = space.parts_of_nest(v)
            vector = space.join(
                [as_tensor(part, dtype) for part, dtype in zip(parts, space.dtypes)]
            )
        product = belonging_to(self._rows(vector[tf.newaxis])[0], self._nest.variables)
        return product if is_flat else space.nest_of_parts(space.split(product))

    def product_of_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply by each row of a tensor of shape `(k, n)`."""
        return self._rows(rows)

    def rotate(self, rows: tf.Tensor) -> tf.Tensor:
        """Write each row, of shape `(k, n)`, in terms of the eigenvectors, block by block."""
        return self._run("rotate", lambda block, piece: block.rotate(piece), rows)

    def scales(self) -> np.ndarray:
        """Return the eigenvalues in the order of what `rotate` returns; shape `(n,)`."""
        return np.concatenate([block.scales.reshape(-1) for block in self._blocks])

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._matmat(x.reshape(-1, 1)).reshape(x.shape)

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        X = check_array(X, self.shape[0], self.dtype, ndims=(2,))
        return self._rows(tf.constant(np.ascontiguousarray(X.T))).numpy().T

    def _adjoint(self) -> FactoredOperator:
        return self

    def _transpose(self) -> FactoredOperator:
        return self

    def _rows(self, rows: tf.Tensor) -> tf.Tensor:
        return self._run("multiply", lambda block, piece: block.multiply(piece), rows, back=True)

    @Uninterrupted()
    def _run(
        self,
        name: str,
        function: Callable[[Block, tf.Tensor], tf.Tensor],
        rows: tf.Tensor,
        *,
        back: bool = False,
    ) -> tf.Tensor:
        if tf.executing_eagerly():
            blocks = self._blocks
            tensors = [tensor for block in blocks for tensor in block.tensors]
            return self._compiled_for(name, function, blocks, back)(rows, *tensors)
        tensors, is_stale = self._factors.in_graph()
        with tf.init_scope():
            compiled = self._compiled_for(name, function, self._factors.held(), back)
        result = (compiled.inline if is_for_xla() else compiled)(rows, *tensors)
        return tf.where(is_stale, tf.cast(float("nan"), result.dtype), result)

    def _compiled_for(
        self,
        name: str,
        function: Callable[[Block, tf.Tensor], tf.Tensor],
        blocks: Sequence[Block],
        back: bool,
    ) -> Compiled:
        if name in self._compiled:
            return self._compiled[name]
        forms = [block.without_numbers() for block in blocks]
        order = np.concatenate([block.entries.reshape(-1) for block in forms])
        is_sorted = bool(np.all(order[1:] > order[:-1]))
        places = np.argsort(order)

        def run(rows: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
            own = with_tensors(forms, iter(tensors))
            rows = rows if is_sorted else tf.gather(rows, order, axis=1)
            sizes = [block.size for block in own]
            pieces = tf.split(rows, sizes, axis=1) if len(sizes) > 1 else [rows]
            done = [function(block, piece) for block, piece in zip(own, pieces)]
            whole = tf.concat(done, axis=1) if len(done) > 1 else done[0]
            return whole if is_sorted or not back else tf.gather(whole, places, axis=1)

        rows = tf.TensorSpec([None, self._space.size], self._space.dtype)
        tensors = [tf.TensorSpec(t.shape, t.dtype) for block in blocks for t in block.tensors]
        self._compiled[name] = Compiled(run, [rows, *tensors], False)
        return self._compiled[name]

    def _of_scales(self, function: Callable[[np.ndarray], np.ndarray]) -> FactoredOperator:
        return self._function(lambda block: block.scaled(function, self._space.dtype))

    def _function(self, function: Callable[[Block], Block]) -> FactoredOperator:
        factors = Factors(lambda blocks: [*map(function, blocks)], self._factors)
        factors.current()  # so that what cannot be computed is refused now
        return FactoredOperator(self._space, self._nest, factors, self._compiled, self)

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


_KINDS = ("kronecker", "exact", "diagonal")


def _not_negative(damping: Any) -> float:
    damping = check_damping(damping)
    if damping < 0:
        raise HvpError(f"the damping is {damping:g}", "a number that is not negative")
    return damping
