"""Kronecker-factored approximations of the Gauss-Newton and Fisher matrices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import tensorflow as tf

from hvp._data.batches import Batches
from hvp._derivatives.exact import exact_functions
from hvp._engines.gauss_newton import GaussNewtonRule
from hvp._engines.options import Options, declared
from hvp._engines.prediction_rule import PredictionRule
from hvp._errors import (
    HvpError,
    InvalidDataError,
    InvalidLossError,
    StaleOperatorError,
    line_of,
    quoted,
)
from hvp._graphs.compiled import Compiled
from hvp._keras.compiled_loss import CompiledModel
from hvp._keras.from_keras import FromKeras
from hvp._keras.losses import preserved_losses
from hvp._kronecker.block import Block, eigen, exact
from hvp._kronecker.factored import FactoredOperator
from hvp._kronecker.factors import Factors
from hvp._kronecker.layers import Layer
from hvp._kronecker.penalty import Penalty, penalty_diagonal
from hvp._kronecker.rule import Arrangement, StatisticsRule
from hvp._kronecker.traced_model import TracedModel
from hvp._operators.fisher import fisher_rule
from hvp._operators.matrix import evaluated
from hvp._operators.predictions import checked_model, checked_output_loss, refuse_dict
from hvp._operators.symmetric import SymmetricOperator
from hvp._runtime.arguments import check_count, check_number, check_seed
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies
from hvp._snapshots.problem import Problem
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.resources import Resource, restored
from hvp._vectors.space import Space
from hvp._vectors.variables import all_variables, collect_variables
from hvp._vectors.watch import Watch

Fisher = Literal["type-2", "monte-carlo", "empirical"]
Sharing = Literal["expand", "reduce"]

# With more classes one target is drawn for each prediction, instead of a backward pass for each.
_MANY_CLASSES = 64
# Weights that belong to no layer have an exact block, computed from products, up to this number.
_MOST_UNCOVERED = 1024


class BlockDescription(NamedTuple):
    """One block of a Kronecker-factored matrix.

    Attributes
    ----------
    names : tuple of str
        The names of its variables.
    kind : {"kronecker", "exact", "diagonal"}
        How it is approximated.
    shape : tuple of int
        The number of groups, of rows and of columns of its weights: a Kronecker-factored block has
        factors of the sizes of these rows and columns for each group.
    """

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]


_OPTIONS = (
    *("batch_size", "memory_limit", "weight", "progress", "on_stale"),
    *("devices", "device_timeout"),
)


@declared(_OPTIONS)
class KFAC(FromKeras, FactoredOperator):
    """The K-FAC approximation of a Gauss-Newton or Fisher matrix, as a scipy `LinearOperator`.

    Each layer has a block of its own, and all entries between different layers are zero. The block
    of a layer that multiplies by a matrix is approximated by a Kronecker product `A x G`, where `A`
    is the second moment of the layer's inputs, and `G` that of the gradients with respect to its
    outputs (Martens and Grosse 2015 [MG]_). The inverse requires only the eigenvalues of these two
    small matrices, and no linear solve.

    Layers are found in the graph of the model by the operations that read weights: matrix products,
    einsums, embeddings, and convolutions with any stride, dilation, padding and groups. A bias that
    is added to the result belongs to the same block. Weights that multiply or are added entry by
    entry, such as those of normalization layers, have exact blocks.

    Parameters
    ----------
    model, output_loss, variables, data
        As for `FisherOperator`. Recurrent Keras layers are unrolled.
    fisher : {"type-2", "monte-carlo", "empirical"}, optional
        Which matrix to approximate, as `kind` for `FisherOperator`. ``"type-2"`` takes one backward
        pass for each class, ``"monte-carlo"`` one for each sample. The default is ``"type-2"``, or
        ``"monte-carlo"`` if there are more than 64 classes and the likelihood is known.
    likelihood : str or nest of str, optional
        As for `FisherOperator`. Without one, ``"type-2"`` stands for the Gauss-Newton matrix of any
        convex output loss with up to 256 predictions for each example.
    samples : int, optional
        If `fisher` is ``"monte-carlo"``, the number of targets to draw for each prediction. If it
        is ``"type-2"`` and an example has several predictions, like a sequence of tokens, the
        number of random signs to draw for each of them: all share one backward pass, and the signs
        make the products of different predictions vanish on average. The cost is proportional to
        this number.
    seed
        As for `FisherOperator`.
    sharing : {"expand", "reduce"}, optional
        How to treat weights that several positions share, such as those of convolutions and those
        that all tokens of a sequence pass: as if they were independent of each other, or averaged
        first (Eschenhagen et al. 2023 [Esch]_).
    largest : int, optional
        Kronecker factors with more rows are kept as diagonals. The factor for the rows of an
        embedding is always diagonal.
    largest_exact : int, optional
        Exact blocks with more rows are kept as diagonals.
    regularization : callable, optional
        A function that takes nothing and returns a penalty to be added to the loss, such as that of
        a Keras model's regularizers. To each block a multiple of the identity is added: the mean of
        the second derivatives of the penalty, so that a penalty which is the same for all weights
        of a block is exact. Blocks that are diagonals have each its own.
    **options
        As for `HessianOperator`: {option_names}. With ``on_stale="ignore"`` the old factors remain
        in use, which is what optimizers do for many steps.

    Raises
    ------
    StaleOperatorError
        If the matrix is used after a variable changed, depending on `on_stale`.
    HvpError
        If a weight is used in two ways, for example if an embedding is also the last layer; if
        weights belong to no layer and are too many for an exact block; or for the same reasons as
        `FisherOperator`.

    Notes
    -----
    The operator belongs to the values that the weights had at its last evaluation, until `refresh`
    evaluates it again. Whatever is made from it (`inverse`, `damped`, `sqrt`, `block`, and
    functions that were compiled with these) then follows.

    K-FAC is an approximation, whose error `distance` estimates. It is exact for one layer and one
    example, and, in expectation, for deep linear networks. As a preconditioner of an exact solve it
    does little: what slows conjugate gradients down are directions that several layers share.

    References
    ----------
    .. [MG] J. Martens and R. Grosse, "Optimizing neural networks with Kronecker-factored
       approximate curvature", ICML 2015. https://proceedings.mlr.press/v37/martens15.html
    .. [Esch] R. Eschenhagen et al., "Kronecker-factored approximate curvature for modern neural
       network architectures", NeurIPS 2023. https://arxiv.org/abs/2311.00636

    Examples
    --------
    A linear layer and one example, for which the approximation is exact:

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> W = tf.Variable(np.eye(2, dtype="float32"))
    >>> square = lambda predictions, y: tf.reduce_mean(tf.reduce_sum((predictions - y) ** 2, 1)) / 2
    >>> data = np.array([[1.0, 2.0]], "float32"), np.zeros((1, 2), "float32")
    >>> K = hvp.KFAC(lambda x: x @ W, square, W, data)
    >>> K.to_dense().round(4)
    array([[1., 0., 2., 0.],
           [0., 1., 0., 2.],
           [2., 0., 4., 0.],
           [0., 2., 0., 4.]], dtype=float32)
    >>> K.inverse(damping=1.0) @ np.array([1.0, 0.0, 2.0, 0.0], "float32")
    array([0.16666667, 0.        , 0.33333334, 0.        ], dtype=float32)
    """

    @outside_strategies
    @Uninterrupted()
    def __init__(
        self,
        model: Callable[..., Any],
        output_loss: Callable[..., Any],
        variables: Any,
        data: Any,
        *,
        fisher: Fisher | None = None,
        likelihood: Any = None,
        samples: int = 1,
        seed: int = 0,
        sharing: Sharing = "expand",
        largest: int = 8192,
        largest_exact: int = 1024,
        regularization: Penalty | None = None,
        **options: Any,
    ) -> None:
        checked = Options.of(type(self).__name__, options, _OPTIONS, _INSTEAD)
        weight, on_stale = checked.weight, checked.on_stale
        refuse_dict(data)
        if data is None:
            raise InvalidDataError(
                "there are no data", "examples, over which the matrix is a mean", "pass data=(x, y)"
            )
        for name, value, choices in (
            ("fisher", fisher, (None, *get_args(Fisher))),
            ("sharing", sharing, get_args(Sharing)),
        ):
            if value not in choices:
                names = ", ".join(map(repr, choices))
                raise HvpError(f"the argument {name} is {value!r}", f"one of {names}")
        if not (regularization is None or callable(regularization)):
            kind = type(regularization).__name__
            raise HvpError(f"the argument regularization is {kind}", "a function, or None")
        check_count(largest, "largest", 0)
        check_count(largest_exact, "largest_exact", 0)
        nest = collect_variables(variables)
        # A function has no layers of its own.
        own = getattr(model, "keras_model", model)
        source = [nest.source, own] if hasattr(own, "trainable_variables") else [nest.source]
        functions = checked_model(model), checked_output_loss(output_loss)
        if fisher is None:
            with restored([Resource.of(v) for v in all_variables(source)]):
                classes = 0 if likelihood is None else _class_count(functions, data)
            fisher = "monte-carlo" if classes > _MANY_CLASSES else "type-2"
        self.fisher = fisher
        matrix: PredictionRule
        if fisher == "type-2" and likelihood is None:
            matrix = GaussNewtonRule(*functions, weight)
        else:
            matrix = fisher_rule(
                functions, weight, fisher, likelihood, samples, seed, argument="fisher"
            )
        space = Space.of_variables(nest)
        self._options = dataclasses.replace(checked, on_stale="ignore")
        self._data, self._matrix, self._penalty = data, matrix, regularization
        arrangement = Arrangement(sharing == "reduce", largest, largest_exact, space.dtype)
        check_count(samples, "samples")
        self._rule = StatisticsRule(matrix, nest, arrangement, source, samples)
        self._nest, self._space = nest, space
        self._find_layers()
        self._snapshot: Snapshot | None = None
        if self._stand_ins:
            self._snapshot = self._evaluated(self._rule, self._stand_ins)
        self._averages = self._statistics()
        reads = [Resource.of(variable) for variable in nest.variables]
        self._watch = Watch(reads if self._snapshot is None else self._snapshot.facts.reads)
        self._on_stale = on_stale
        looks = on_stale != "ignore"
        factors = Factors(
            self._blocks_of(self._averages),
            watch=self._watch if looks else None,
            check=self._make_sure if looks else None,
        )
        self._watch.set()
        super().__init__(space, nest, factors)

    @classmethod
    def _of_compiled(cls, compiled: CompiledModel, variables: Any) -> Sequence[Any]:
        model, data, options = compiled.keras_model, compiled.data, compiled.options
        options["regularization"] = compiled.regularization
        fisher = options.get("fisher")
        # With weights of examples the loss is not a log-likelihood, but it is still convex.
        is_weighted = isinstance(data, tuple) and len(data) > 2 and fisher in (None, "type-2")
        if options.get("likelihood") is None and fisher != "empirical" and not is_weighted:
            options["likelihood"] = compiled.likelihoods
        return with_layers(compiled.model, model), compiled.output_loss, variables

    @property
    def value(self) -> float:
        """The loss at the values of the last evaluation."""
        return self._value if self._snapshot is None else float(self._snapshot.value())

    @property
    def blocks(self) -> list[BlockDescription]:
        """A description of the approximation of each block."""
        return [BlockDescription(b.names, b.kind, b.entries.shape) for b in self._blocks]

    @property
    def factors(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The factors `A` and `G` of each Kronecker-factored block, by the name of its kernel.

        Their shapes are `(K, I, I)` and `(K, O, O)` for `K` groups, or `(K, I)` and `(K, O)` where
        only the diagonal is kept. If there is a bias, it is the last row and column of `A`.
        """
        pairs = zip(self._layers, self._averages)
        return {
            layer.names[0]: (means[0], means[1]) for layer, means in pairs if not layer.is_entrywise
        }

    @outside_strategies
    @Uninterrupted()
    def refresh(self, decay: float = 0.0) -> None:
        """Evaluate the matrix again, at the current values of the variables.

        Parameters
        ----------
        decay : float, optional
            The weight of the previous factors in an exponential moving average, for use during
            training: at least 0, and less than 1. The eigenvalues of an `EKFAC` are those at the
            current weights, along the eigenvectors of the averages.

        Raises
        ------
        HvpError
            If `decay` is not between 0 and 1. The operator stays as it was.
        """
        check_number(decay, "decay", below=1)
        if self._snapshot is not None:
            self._snapshot.refresh()
        new = self._statistics()
        pairs = zip(self._averages, new)
        means = [
            [decay * old + (1 - decay) * now if decay else now for old, now in zip(*both)]
            for both in pairs
        ]
        blocks = self._blocks_of(means)
        self._averages = means
        self._watch.set()
        self._factors.replace(blocks)

    def _make_sure(self) -> None:
        """Follow `on_stale` if weights have changed since the last evaluation."""
        changed = self._watch.changed()
        if changed and self._on_stale == "refresh":
            self.refresh()
        elif changed:
            raise _stale(changed)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}{', stale' if self._watch.changed() else ''})"

    @Uninterrupted()
    def distance(self, probes: int = 16, *, seed: int = 0) -> dict[str, float]:
        """Estimate the relative error of each block, in the Frobenius norm.

        Parameters
        ----------
        probes : int, optional
            Number of random vectors that each block is multiplied by.
        seed : int, optional
            Seed of the random vectors.

        Returns
        -------
        dict of str to float
            The error ``|K - F| / |F|`` of each block, by the name of its first variable, where `F`
            is the exact block. The estimate has a relative standard error of at most about one over
            the square root of ``probes / 2``.

        Raises
        ------
        StaleOperatorError
            If weights have changed since the last evaluation.

        Notes
        -----
        It takes `probes` products with the matrix for each block.
        """
        check_count(probes, "probes")
        changed = self._watch.changed()
        if changed:
            raise _stale(changed)
        blocks = self._factors.held()
        own = FactoredOperator(self._space, self._nest, Factors(lambda: blocks))
        true = self._true_operator()
        random = np.random.default_rng(check_seed(seed))
        distances = {}
        for block in blocks:
            places = block.entries.reshape(-1)
            vectors = np.zeros((self.shape[0], probes), self.dtype)
            vectors[places] = random.standard_normal((len(places), probes))
            expected = (true @ vectors)[places].astype(np.float64)
            error = (own @ vectors)[places] - expected
            norm = np.linalg.norm(expected)
            distances[block.names[0]] = float(np.linalg.norm(error) / norm) if norm else 0.0
        return distances

    def _true_operator(self) -> SymmetricOperator:
        """Return the matrix that this one approximates."""
        options = dataclasses.replace(self._options, regularization=self._penalty)
        evaluation = evaluated(self._matrix, self._nest.source, self._data, options)
        return SymmetricOperator(evaluation)

    def _find_layers(self) -> None:
        """Trace the model once, and create variables that stand for the statistics."""
        problem = self._problem(self._rule, list(self._nest.variables))
        batch = problem.first_batch()
        traced, rows = self._traced(batch.part(0, min(2, batch.examples)))
        self._layers, self._uncovered = traced.graph.layers, traced.graph.uncovered
        if batch.examples > 1:
            _, alone = self._traced(batch.first(), backward=False)
            self._refuse_mixed(rows, alone)
        self._refuse_uncovered()
        shapes = [self._rule.arrangement.shapes(layer) for layer in self._layers]
        self._counts = [len(several) for several in shapes]
        self._stand_ins = [
            _stand_in(shape, self._space.dtype, layer)
            for layer, several in zip(self._layers, shapes)
            for shape in several
        ]

    def _traced(
        self, batch: Any, *, backward: bool = True
    ) -> tuple[TracedModel, dict[str, np.ndarray]]:
        """Trace the model, and evaluate the inputs of the matrices of each layer."""
        found: list[TracedModel] = []

        def rows() -> dict[str, tf.Tensor]:
            found.append(self._rule.traced(batch, backward=backward))
            return found[-1].rows()

        try:
            with exact_functions(), preserved_losses(self._rule.source):
                compiled = Compiled(rows, [], False)
        except HvpError:
            raise
        except Exception as error:  # the user's code may raise anything at a symbolic tensor
            raise InvalidLossError(
                "the model or the loss cannot be traced, so that layers cannot be found "
                f"({type(error).__name__}: {line_of(error, -1)})",
                "functions that tf.function can trace",
                "write them with TensorFlow operations only (no .numpy(), no Python numbers made "
                "from tensors)",
            ) from error
        written = [Resource.of(v) for v in all_variables(self._rule.source)]
        with restored(written):
            made = {key: tensor.numpy() for key, tensor in compiled().items()}
        with restored(written):
            again = compiled()
        # Predictions that draw other numbers each time tell nothing.
        is_same = {key: np.array_equal(made[key], again[key], equal_nan=True) for key in made}
        return found[-1], {k: v for k, v in made.items() if is_same[k] or k[0] != " "}

    def _refuse_mixed(self, rows: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> None:
        """Refuse layers whose rows do not belong to one example after the other."""
        for key, both in rows.items():
            one, name = alone.get(key, np.empty(0)), key.rpartition(" ")[0]
            if not name and key not in alone:  # of predictions whose number is not known
                continue
            within = both[:, :1].astype(np.float64)
            scale = np.abs(within).max(initial=0.0)
            if within.shape != one.shape or np.abs(within - one).max(initial=0.0) > 1e-2 * scale:
                what = f"what enters the layer of {name!r} does" if name else "the predictions do"
                raise HvpError(
                    f"{what} not belong to one example after the other",
                    "layers that treat examples independently, with the examples along the first "
                    "axis",
                    "pass training=False where layers normalize over the batch, or draw numbers",
                )

    def _refuse_uncovered(self) -> None:
        sizes = dict(zip(self._nest.names, self._space.sizes))
        total = sum(sizes[name] for name in self._uncovered)
        if total > _MOST_UNCOVERED:
            raise HvpError(
                f"the weights {quoted(self._uncovered)} enter no operation that has Kronecker "
                f"factors, and are too many ({total}) for an exact block",
                "products of matrices, convolutions, einsums, embeddings, and entrywise sums and "
                f"products; or at most {_MOST_UNCOVERED} other weights",
                "leave these variables out",
            )

    def _problem(self, rule: StatisticsRule, variables: Any) -> Problem:
        return Problem.of(rule, variables, self._data, self._options)

    def _evaluated(self, rule: StatisticsRule, variables: Any) -> Snapshot:
        return self._problem(rule, variables).snapshot(products=False)

    def _statistics(self) -> list[list[np.ndarray]]:
        """Return the means of each layer."""
        if self._snapshot is None:
            return []
        parts = iter(self._snapshot.gradient())
        means = [[next(parts).numpy() for _ in range(count)] for count in self._counts]
        self._snapshot.release_gradient()
        return means

    def _blocks_of(self, means: Sequence[Sequence[np.ndarray]]) -> Callable[[], list[Block]]:
        """Compute what depends on the current weights, and return a function for the rest."""
        uncovered, penalty = self._uncovered_blocks(), self._penalty_diagonal()
        return lambda: [*self._penalized(self._of_layers(means), penalty), *uncovered]

    def _penalty_diagonal(self) -> np.ndarray | None:
        return None if self._penalty is None else penalty_diagonal(self._penalty, self._nest)

    def _penalized(self, blocks: list[Block], diagonal: np.ndarray | None) -> list[Block]:
        """Add the second derivatives of the penalty."""
        if diagonal is None:
            return blocks
        own = [diagonal[block.entries] for block in blocks]
        added = [d if block.kind == "diagonal" else d.mean() for block, d in zip(blocks, own)]
        pairs = zip(blocks, added)
        return [block.with_scales(block.scales + d, self._space.dtype) for block, d in pairs]

    def _of_layers(self, means: Sequence[Sequence[np.ndarray]]) -> list[Block]:
        """Compute the eigenvalues and eigenvectors of the factors of each layer."""
        blocks = []
        dtype, arrangement = self._space.dtype, self._rule.arrangement
        for layer, own in zip(self._layers, means):
            if layer.is_entrywise:
                full = arrangement.is_exact(layer)
                values, vectors = eigen(own[0], full=full)
                kind = "exact" if full else "diagonal"
                entries, scales = exact(layer.entries), values[:, :, np.newaxis]
                bases = [vectors, None]
            else:
                pairs = [eigen(m, full=f) for m, f in zip(own, arrangement.full(layer))]
                (left, _), (right, _) = pairs
                kind, entries, bases = "kronecker", layer.entries, [pair[1] for pair in pairs]
                scales = left[:, :, np.newaxis] * right[:, np.newaxis]
            blocks.append(Block.of(layer.names, kind, entries, bases, scales, dtype))
        return blocks

    def _uncovered_blocks(self) -> list[Block]:
        """Return the exact block of weights that belong to no layer."""
        names = [name for name in self._nest.names if name in self._uncovered]
        if not names:
            return []
        places = [self._nest.names.index(name) for name in names]
        starts = np.cumsum([0, *self._space.sizes])
        entries = np.concatenate([np.arange(starts[p], starts[p + 1]) for p in places])
        # With all variables, because these may have no curvature at all.
        operator = self._true_operator()
        self._value = operator.value
        block = operator.block([self._nest.variables[place] for place in places])
        values, vectors = eigen(block.to_dense()[np.newaxis], full=True)
        bases, scales = [vectors, None], values[:, :, np.newaxis]
        return [Block.of(tuple(names), "exact", exact(entries), bases, scales, self._space.dtype)]


class EKFAC(KFAC):
    """The EK-FAC approximation of a Gauss-Newton or Fisher matrix, as a scipy `LinearOperator`.

    It has the eigenvectors of `KFAC`. The eigenvalue of each is the exact second moment of the
    gradients along it, which K-FAC approximates by a product of two moments (George et al. 2018
    [George]_). Of all matrices with these eigenvectors, it is the closest to the block in the
    Frobenius norm.

    Parameters
    ----------
    model, output_loss, variables, data, **options
        As for `KFAC`. The second moments require a second pass over the data.

    References
    ----------
    .. [George] T. George et al., "Fast approximate natural gradient descent in a Kronecker-factored
       eigenbasis", NeurIPS 2018. https://arxiv.org/abs/1806.03884

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import hvp
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    >>> model.compile(loss="mse")
    >>> E = hvp.EKFAC.from_keras(model, (np.eye(3), np.ones((3, 1))))
    >>> (E.inverse(damping=0.1) @ np.ones(3)).round(4)
    array([1.3043, 1.3043, 1.3043], dtype=float32)
    """

    _scales_snapshot: Snapshot | None = None

    def _blocks_of(self, means: Sequence[Sequence[np.ndarray]]) -> Callable[[], list[Block]]:
        own = self._with_scales(self._of_layers(means))
        blocks = [*self._penalized(own, self._penalty_diagonal()), *self._uncovered_blocks()]
        return lambda: blocks

    def _with_scales(self, blocks: list[Block]) -> list[Block]:
        """Evaluate the scales along the eigenvectors, at the variables' current values."""
        kronecker = [place for place, block in enumerate(blocks) if block.kind == "kronecker"]
        if not kronecker:
            return blocks
        if self._scales_snapshot is None:
            self._bases: list[Any] = [None] * len(blocks)
            for place in kronecker:
                pair = blocks[place].left, blocks[place].right
                self._bases[place] = [
                    None if basis is None else tf.Variable(basis, trainable=False) for basis in pair
                ]
            rule = dataclasses.replace(self._rule, bases=self._bases)
            stand_ins = [
                _stand_in(self._layers[i].entries.shape, self._space.dtype, self._layers[i])
                for i in kronecker
            ]
            self._scales_snapshot = self._evaluated(rule, stand_ins)
        else:
            for place in kronecker:
                pair = blocks[place].left, blocks[place].right
                for variable, basis in zip(self._bases[place], pair):
                    if variable is not None:
                        variable.assign(basis)
            self._scales_snapshot.refresh()
        scales = iter(self._scales_snapshot.gradient())
        complete = list(blocks)
        for place in kronecker:
            array = next(scales).numpy().astype(np.float64)
            complete[place] = blocks[place].with_scales(array, self._space.dtype)
        self._scales_snapshot.release_gradient()
        return complete


def _class_count(functions: tuple[Callable[..., Any], Callable[..., Any]], data: Any) -> int:
    """Return the largest size of a last axis among the predictions of one example."""
    batches = Batches(data, 1 if isinstance(data, (tuple, dict)) else None, None)
    first = next(iter(batches)).elements.part(0, 1)
    try:
        predictions = first.call(GaussNewtonRule(*functions, None).predict)
    except (TypeError, ValueError, tf.errors.OpError):
        return 0  # the evaluation explains what is wrong
    return max(int(part.shape[-1] or 0) for part in tf.nest.flatten(predictions) if part.shape.rank)


def _stale(changed: Sequence[str]) -> StaleOperatorError:
    return StaleOperatorError(
        f"variables that the loss reads have changed: {quoted(changed)}",
        "the values at which the factors were evaluated",
        "call refresh(), or pass on_stale='refresh' to KFAC or EKFAC; or on_stale='ignore', to go "
        "on with the factors of the old values",
    )


_INSTEAD = {
    "damping": "pass it to inverse(damping) or damped(damping)",
    "kind": "call it fisher",
}


def with_layers(function: Callable[..., Any], model: Any) -> Any:
    """Return a function of a Keras model that carries the model, so that its layers are known."""
    carrying: Any = functools.partial(function)
    carrying.keras_model = model
    return carrying


def _stand_in(shape: Sequence[int], dtype: tf.DType, layer: Layer) -> tf.Variable:
    return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=layer.names[0].split(":")[0])
