"""The plan for many batches: a sum of which as many terms are held as memory allows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvp._data.batches import Batch, Batches
from hvp._data.budget import Budget
from hvp._data.elements import Elements
from hvp._engines.finite import check_finite
from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap, Sum
from hvp._engines.plan import Facts, Plan, WideGradient
from hvp._engines.rule import Rule
from hvp._engines.settings import Settings
from hvp._engines.single_plan import SinglePlan
from hvp._errors import HvpError, InvalidLossError
from hvp._runtime.progress import progress_bar
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.slot import Slot
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest

# Shapes of batches that get a trace of their own; others share one, their lengths left open.
_SHAPES = 3
# Examples in a batch from which the memory of larger ones is estimated.
_PROBE = 32
_STREAMS = "keeps some batches and evaluates the others for each product"


class BatchedPlan(Plan):
    """The weighted mean of a rule over batches, plus what is added once.

    Parameters
    ----------
    rule : Rule
        What to evaluate on each batch.
    nest : VariableNest
        What to differentiate with respect to.
    batches : Batches
        The data.
    settings : Settings
        How to evaluate each; how much memory to use; whether to show a bar.
    added : Rule or None
        What is added once, whatever the batches: the regularization.
    total : bool
        Whether to sum over examples, not to average.

    Attributes
    ----------
    evaluations : int
        How often a batch, or a piece of one, was evaluated.
    """

    divides = True

    def __init__(
        self,
        rule: Rule,
        nest: VariableNest,
        batches: Batches,
        settings: Settings,
        *,
        added: Rule | None,
        total: bool,
    ) -> None:
        self.nest, self.space = nest, Space.of_variables(nest)
        self._rule, self._batches, self._settings = rule, batches, settings
        self._budget, self._total = Budget(settings.memory_limit), total
        self._shaped: dict[Any, _Shaped] = {}
        self._added = None if added is None else SinglePlan(added, nest, settings)
        self._all_held = True
        self._nbytes_each, self._examples = 0.0, 0
        self.evaluations = 0
        if self._budget.limited and batches.examples is not None:
            self._cut(batches.examples)

    @property
    def batches(self) -> int | None:  # type: ignore[override]
        """How many batches there are; None before the end of the first pass."""
        return self._batches.count

    @property
    def facts(self) -> Facts:
        """What is known from all shapes of batches met so far, and from the regularization."""
        plans = [shaped.plan for shaped in self._shaped.values()]
        plans += [] if self._added is None else [self._added]
        facts = Facts.union([plan.facts for plan in plans])
        examples = self._batches.examples or self._examples
        note = "" if self._all_held else _STREAMS
        return dataclasses.replace(
            facts,
            traces=facts.traces - (self._added is not None),
            expected_nbytes=int(self._nbytes_each * examples),
            note="; ".join(filter(None, [facts.note, note])),
        )

    @outside_strategies
    def at_point(self) -> tuple[Results, LinearMap]:
        """Go through the batches, at the variables' values now; hold the maps that fit."""
        self._batches.forget()
        mean = _Mean(self.space)
        held: list[tuple[float, LinearMap]] = []
        used, self._all_held = 0, True
        with contextlib.ExitStack() as on_error:
            on_error.callback(_close, held)
            for batch in self._shown(self._batches):
                for elements, weight in self._pieces(batch):
                    results, term, nbytes = self._evaluated(elements, batch.index)
                    mean.add(weight, results)
                    self._budget.saw(nbytes)
                    whole = elements is batch.elements
                    fits = whole and self._budget.holds(used + nbytes)
                    self._all_held = self._all_held and (fits or not self._settings.products)
                    if self._all_held and self._settings.products:
                        held.append((weight, term))
                        used += nbytes
                    else:
                        term.close()
                if not self._all_held:
                    self._refuse_draws()
            scale = 1.0 if self._total else mean.divide()
            terms = [(weight * scale, term) for weight, term in held]
            if self._added is not None:
                results, term = self._added.at_point()
                if results.gradient is not None and all(g is None for g in results.gradient):
                    raise InvalidLossError(
                        "the regularization depends on none of the variables",
                        "a function of the variables",
                    )
                mean.add(1.0, results)
                terms.append((1.0, term))
            on_error.pop_all()
        streamed = None
        if not self._all_held:
            first = len(held)

            def streamed() -> Iterator[tuple[float, LinearMap]]:
                return self._streamed(first, scale)

        total = BatchSum(terms, self.space, streamed, used, len(held))
        return mean.results, total

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the weights, of all batches and of the function."""
        first = next(iter(self._shaped.values()))
        digests = first.plan.fingerprint()
        digests["data"] = f"{digests.get('data', '')} {self._batches.fingerprint()}"
        digests["reduction"] = "sum" if self._total else "mean"
        if self._added is not None:
            added = self._added.fingerprint()
            digests.update({f"{name} of the regularization": text for name, text in added.items()})
        return digests

    def in_float64(self) -> WideGradient | None:
        """Return the gradient over all batches in float64, if it can be had of each."""
        wide = {id(s): s.plan.in_float64(s.inputs) for s in self._shaped.values()}
        added = None if self._added is None else self._added.in_float64()
        if None in wide.values() or (self._added is not None and added is None):
            return None

        def gradient(values: Sequence[tf.Tensor]) -> list[Any]:
            mean = _Mean(self.space, tf.float64)
            for batch in self._batches:
                for elements, weight in self._pieces(batch):
                    evaluate = wide[id(self._of(elements))]
                    assert evaluate is not None
                    inputs = [
                        t if t.dtype != tf.float32 else tf.cast(t, tf.float64)
                        for t in elements.tensors
                    ]
                    mean.add(weight, Results(tf.zeros([]), evaluate([*values, *inputs])))
            if not self._total:
                mean.divide()
            if added is not None:
                mean.add(1.0, Results(tf.zeros([]), added(values)))
            return mean.gradient

        return gradient

    def _cut(self, examples: int) -> None:
        """Cut arrays into batches that fit: two small ones, traced, tell how large they may be."""
        sizes, expected = (max(1, min(_PROBE, examples) // 2), min(_PROBE, examples)), []
        for size in sizes:
            elements = self._batches.head(size)
            expected.append(self._of(elements).plan.facts.expected_nbytes + elements.nbytes)
        self._shaped.clear()
        each = (expected[1] - expected[0]) / max(1, sizes[1] - sizes[0])
        if sizes[0] == sizes[1]:
            each = expected[0]
        fits = self._budget.fitting(expected[0] - each * sizes[0], each)
        count = -(-examples // fits)
        self._batches.cut(-(-examples // count))

    def _pieces(self, batch: Batch) -> Iterator[tuple[Elements, float]]:
        """Cut a batch into pieces that fit, with their weights."""
        if not self._shaped:  # the first batch of all: its trace tells what one example takes
            facts = self._of(batch.elements).plan.facts
            self._examples = batch.elements.examples
            self._nbytes_each = (facts.expected_nbytes + batch.elements.nbytes) / self._examples
        examples = batch.elements.examples
        expected = round(self._nbytes_each * examples)
        count = self._budget.pieces(expected)
        if count <= 1:
            yield batch.elements, batch.weight
            return
        if examples < count:
            raise self._budget.too_small(expected, examples)
        size = -(-examples // count)  # all alike but the last: other shapes are other traces
        for start in range(0, examples, size):
            part = batch.elements.part(start, min(start + size, examples))
            yield part, self._batches.weight_of(part, batch.index)

    def _streamed(self, first: int, scale: float) -> Iterator[tuple[float, LinearMap]]:
        """Evaluate the batches that are not held, one after the other, for one product."""
        for batch in self._shown(self._batches.after(first)):
            for elements, weight in self._pieces(batch):
                term = self._evaluated_outside(elements, batch.index)
                with contextlib.closing(term):
                    yield weight * scale, term

    @outside_strategies
    def _evaluated_outside(self, elements: Elements, index: int) -> LinearMap:
        return self._evaluated(elements, index)[1]

    def _shown(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Show a bar, if one is wanted."""
        progress = self._settings.progress
        if not progress:
            return batches
        return progress_bar(progress, batches, total=self._batches.count, unit="batch")

    def _evaluated(self, elements: Elements, index: int) -> tuple[Results, LinearMap, int]:
        shaped = self._of(elements)
        results, term = shaped.at(elements)
        self.evaluations += 1
        with contextlib.ExitStack() as on_error:
            on_error.enter_context(contextlib.closing(term))
            check_finite(results, self.nest.names, batch=index)
            on_error.pop_all()
        nbytes = (term.nbytes or 0) + elements.nbytes
        if elements.examples >= self._examples:  # smaller ones would count what they share
            self._examples = elements.examples
            self._nbytes_each = max(self._nbytes_each, nbytes / elements.examples)
        return results, term, nbytes

    def _of(self, elements: Elements) -> _Shaped:
        """Return the plan for batches of a shape."""
        shapes = tuple(tuple(tensor.shape) for tensor in elements.tensors)
        shaped = self._shaped.get(shapes)
        if shaped is None and len(self._shaped) >= _SHAPES:
            shapes = tuple((None,) * len(shape) for shape in shapes)
            shaped = self._shaped.get(shapes)
        if shaped is None:
            shaped = _Shaped(self._rule, self.nest, self._settings, elements, shapes)
            self._shaped[shapes] = shaped
        return shaped

    def _refuse_draws(self) -> None:
        if self.facts.draws:
            raise HvpError(
                "the loss draws random numbers, and not all batches fit in memory: those that are "
                "evaluated for each product would be of another function each time",
                "the same loss each time",
                "raise memory_limit, or draw with a Keras seed generator or tf.random.stateless_*",
            )


def _close(terms: Iterable[tuple[float, LinearMap]]) -> None:
    for _, term in terms:
        term.close()


class BatchSum(Sum):
    """The linear map over all batches.

    Parameters
    ----------
    terms : sequence of (float, LinearMap)
        The maps of the batches that are held, and of the regularization.
    space : Space
        The vectors' space.
    streamed : callable or None
        Returns an iterator over the other batches.
    nbytes : int
        What is held takes, the batches' data included.
    batches : int
        Of how many batches the maps are held.
    """

    def __init__(self, terms: Any, space: Space, streamed: Any, nbytes: int, batches: int) -> None:
        super().__init__(terms, space, space, streamed)
        self._nbytes, self.batches_held = nbytes, batches

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """What is held takes, the batches' data included."""
        return self._nbytes


class _Shaped:
    """A rule traced for batches of one shape, which it reads from variables."""

    def __init__(
        self,
        rule: Rule,
        nest: VariableNest,
        settings: Settings,
        elements: Elements,
        shapes: Sequence[Sequence[int | None]],
    ) -> None:
        tensors = elements.tensors
        self._slots = [Slot(t, tf.TensorShape(shape)) for t, shape in zip(tensors, shapes)]

        def batch() -> Elements:
            # What a graph is told of a variable's shape is forgotten with the graph.
            read = [tf.ensure_shape(s.read(), shape) for s, shape in zip(self._slots, shapes)]
            return elements.with_tensors(read)

        self.inputs = [slot.variable for slot in self._slots]
        self.plan = SinglePlan(rule, nest, settings, batch, self.inputs)
        self._empty()

    def at(self, elements: Elements) -> tuple[Results, LinearMap]:
        """Evaluate at a batch."""
        for slot, tensor in zip(self._slots, elements.tensors):
            slot.assign(tensor)
        try:
            return self.plan.at_point()
        finally:
            self._empty()

    def _empty(self) -> None:
        for slot in self._slots:
            slot.empty()


class _Mean:
    """Weighted sums of values and gradients, and their means."""

    def __init__(self, space: Space, dtype: tf.DType | None = None) -> None:
        self._value = tf.zeros([], tf.float64)
        self._gradient: list[Any] = [None] * len(space.dtypes)
        self._dtypes = space.dtypes if dtype is None else [dtype] * len(space.dtypes)
        self._wide = dtype or space.dtype
        self._weight = 0.0

    def add(self, weight: float, results: Results) -> None:
        """Add those of a batch."""
        self._value += weight * tf.cast(results.value, tf.float64)
        self._weight += weight
        for i, part in enumerate(results.gradient or ()):
            if part is not None:
                part = tf.cast(part, self._wide) * tf.constant(weight, self._wide)
                self._gradient[i] = part if self._gradient[i] is None else self._gradient[i] + part

    def divide(self) -> float:
        """Divide by the sum of the weights; return what that means for each."""
        if self._weight == 0:
            raise HvpError("the weights of all batches are zero", "at least one that counts")
        scale = 1 / self._weight
        self._value *= scale
        self._gradient = [
            g if g is None else g * tf.constant(scale, g.dtype) for g in self._gradient
        ]
        return scale

    @property
    def gradient(self) -> list[Any]:
        """The gradient, in the variables' types."""
        pairs = zip(self._gradient, self._dtypes)
        return [g if g is None else tf.cast(g, dtype) for g, dtype in pairs]

    @property
    def results(self) -> Results:
        """Value and gradient."""
        return Results(self._value, self.gradient)
