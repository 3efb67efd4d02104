"""The plan for many batches: holds the linear maps of as many batches as memory allows.

The loss is the weighted mean `sum_b w_b L_b / sum_b w_b` over batches `b`, or the sum
`sum_b w_b L_b`, plus the regularization. Its Hessian is the same combination of the batches'
Hessians. The batches whose linear maps do not fit into memory are evaluated again for each product.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvp._data.batches import Batch, Batches
from hvp._data.budget import Budget
from hvp._data.elements import Elements
from hvp._data.weighted_mean import WeightedMean
from hvp._engines.finite import check_finite
from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap, Sum
from hvp._engines.options import Options
from hvp._engines.plan import Plan, TraceSummary, WideGradient
from hvp._engines.rule import Rule
from hvp._engines.single_plan import SinglePlan
from hvp._errors import HvpError, InvalidLossError
from hvp._graphs.target import LOCAL, ExecutionTarget
from hvp._runtime.progress import progress_bar
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.space import Space
from hvp._vectors.tensor_cell import TensorCell
from hvp._vectors.variables import VariableNest

# This many shapes of batches get a trace of their own. All others share a trace, in which the
# lengths of axes that differ are not known.
_MAX_SHAPES = 3
# The number of examples from which the memory for larger batches is estimated.
_PROBE_EXAMPLES = 32
_STREAMS = "does not hold all batches, and evaluates the others again for each product"


class BatchedPlan(Plan):
    """The weighted mean, or sum, of a rule over batches, plus a regularization.

    Parameters
    ----------
    rule : Rule
        What to evaluate on each batch.
    nest : VariableNest
        What to differentiate with respect to.
    batches : Batches
        The data.
    options : Options
        How to evaluate each batch, how much memory to use and whether to show a progress bar.
    added : Rule or None
        The regularization, which is added once, regardless of batching.
    total : bool
        Whether to sum over examples instead of averaging.

    Attributes
    ----------
    evaluations : int
        The number of evaluations of batches, or pieces of batches.
    """

    divides = True
    # Into how many batches arrays are divided at least.
    _least_batches = 1

    def __init__(
        self,
        rule: Rule,
        nest: VariableNest,
        batches: Batches,
        options: Options,
        *,
        added: Rule | None,
        total: bool,
    ) -> None:
        self.nest, self.space = nest, Space.of_variables(nest)
        self._rule, self._batches, self._options = rule, batches, options
        self._budget, self._total = Budget(options.memory_limit), total
        self._shape_plans: dict[Any, ShapePlan] = {}
        self._added = None if added is None else SinglePlan(added, nest, options)
        self._all_held = True
        # An estimate, and the number of examples in the batch that it comes from.
        self._bytes_per_example, self._examples = 0.0, 0
        self.evaluations = 0
        if self._budget.limited and batches.examples is not None:
            self._divide_arrays(batches.examples)

    @property
    def batches(self) -> int | None:  # type: ignore[override]
        """The number of batches; None until the first pass has ended."""
        return self._batches.count

    @property
    def facts(self) -> TraceSummary:
        """The facts from all shapes of batches so far, and from the regularization."""
        plans = [shape_plan.plan for shape_plan in self._shape_plans.values()]
        plans += [] if self._added is None else [self._added]
        facts = TraceSummary.union([plan.facts for plan in plans])
        examples = self._batches.examples or self._examples
        note = "" if self._all_held else _STREAMS
        return dataclasses.replace(
            facts,
            traces=sum(shape_plan.plan.facts.traces for shape_plan in self._shape_plans.values()),
            expected_nbytes=int(self._bytes_per_example * examples),
            note="; ".join(filter(None, [facts.note, note])),
        )

    def averages(self, examples: int | None) -> bool:
        """Whether the graph of the loss shows that it is a mean over the examples of a batch."""
        return all(s.plan.averages(shapes[0][0]) for shapes, s in self._shape_plans.items())

    @outside_strategies
    def at_point(self) -> tuple[Results, LinearMap]:
        """Evaluate all batches at the current values of the variables; hold the maps that fit."""
        mean = WeightedMean(self.space)
        with self._evaluated(mean.add) as (held, used):
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
        stream = None
        if not self._all_held:
            first = len(held)

            def stream() -> Iterator[tuple[float, LinearMap]]:
                return self._stream(first, scale)

        total = Sum(terms, self.space, self.space, stream, used, len(held))
        return mean.results, total

    @contextlib.contextmanager
    def _evaluated(
        self, take: Callable[[float, Results], None]
    ) -> Iterator[tuple[list[tuple[float, LinearMap]], int]]:
        """Evaluate all batches; give their weights and results away, and hold the maps that fit.

        Yields the maps, with their weights, and the bytes that they take. If an error leaves the
        context, they are closed.
        """
        self._batches.forget()
        held: list[tuple[float, LinearMap]] = []
        used, self._all_held = 0, True
        with contextlib.ExitStack() as on_error:
            on_error.callback(_close, held)
            for batch in self._with_progress(self._batches):
                for elements, weight in self._pieces(batch):
                    results, term, nbytes = self._evaluate(elements, batch.index)
                    take(weight, results)
                    self._budget.record(nbytes)
                    undivided = elements is batch.elements
                    fits = undivided and self._budget.can_hold(used + nbytes)
                    # Once a batch does not fit, no later one is held: the batches to evaluate again
                    # are then all those from some index on.
                    self._all_held = self._all_held and (fits or not self._options.products)
                    if self._all_held and self._options.products:
                        held.append((weight, term))
                        used += nbytes
                    else:
                        term.close()
                if not self._all_held:
                    self._refuse_draws()
            yield held, used
            on_error.pop_all()

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the weights, of all batches and of the loss."""
        first = next(iter(self._shape_plans.values()))
        digests = first.plan.fingerprint()
        digests["data"] = f"{digests.get('data', '')} {self._batches.fingerprint()}"
        digests["reduction"] = "sum" if self._total else "mean"
        if self._added is not None:
            added = self._added.fingerprint()
            for name, digest in added.items():
                digests[f"{name} of the regularization"] = digest
        return digests

    def in_float64(self) -> WideGradient | None:
        """Return a function for the gradient in float64; None if a batch has none."""
        shape_plans = self._shape_plans.values()
        gradients = {id(s): s.plan.in_float64(s.inputs) for s in shape_plans}
        added = None if self._added is None else self._added.in_float64()
        if None in gradients.values() or (self._added is not None and added is None):
            return None

        def add_batches(mean: WeightedMean, values: Sequence[tf.Tensor]) -> None:
            for batch in self._batches:
                for elements, weight in self._pieces(batch):
                    batch_gradient = gradients[id(self._shape_plan(elements))]
                    assert batch_gradient is not None
                    inputs = [
                        t if t.dtype != tf.float32 else tf.cast(t, tf.float64)
                        for t in elements.tensors
                    ]
                    mean.add(weight, Results(tf.zeros([]), batch_gradient([*values, *inputs])))

        def gradient(values: Sequence[tf.Tensor]) -> list[Any]:
            mean = WeightedMean(self.space, tf.float64)
            self._complete(mean, lambda: add_batches(mean, values))
            if not self._total:
                mean.divide()
            if added is not None:
                mean.add(1.0, Results(tf.zeros([]), added(values)))
            return mean.gradient

        return gradient

    def _complete(self, mean: WeightedMean, add_batches: Callable[[], None]) -> None:
        """Add all batches to a mean."""
        add_batches()

    def _divide_arrays(self, examples: int) -> None:
        """Divide arrays into batches that fit into memory.

        The loss is traced for two small batches. Their expected sizes determine both unknowns of
        `bytes = shared + examples * per_example`.
        """
        probe = min(_PROBE_EXAMPLES, examples)
        sizes, expected = (max(1, probe // 2), probe), []
        for size in sizes:
            elements = self._batches.head(size)
            facts = self._shape_plan(elements).plan.facts
            expected.append(facts.expected_nbytes + elements.nbytes)
        self._shape_plans.clear()
        per_example = (expected[1] - expected[0]) / max(1, sizes[1] - sizes[0])
        if sizes[0] == sizes[1]:  # there is only one example
            per_example = expected[0]
        shared = expected[0] - per_example * sizes[0]
        # Both quotients are rounded up, so that the batches have nearly equal sizes.
        count = -(-examples // self._budget.batch_size(shared, per_example))
        count = max(count, min(self._least_batches, examples))
        self._batches.cut(-(-examples // count))

    def _pieces(self, batch: Batch) -> Iterator[tuple[Elements, float]]:
        """Divide a batch into pieces that fit into memory, with their weights."""
        if not self._shape_plans:  # the trace of the first batch gives a first estimate
            facts = self._shape_plan(batch.elements).plan.facts
            self._examples = batch.elements.examples
            nbytes = facts.expected_nbytes + batch.elements.nbytes
            self._bytes_per_example = nbytes / self._examples
        examples = batch.elements.examples
        expected = round(self._bytes_per_example * examples)
        count = self._budget.pieces(expected)
        if count <= 1:
            yield batch.elements, batch.weight
            return
        if examples < count:
            raise self._budget.too_small(expected, examples)
        # All pieces but the last have the same size, because each shape needs a trace.
        size = -(-examples // count)
        for start in range(0, examples, size):
            piece = batch.elements.part(start, min(start + size, examples))
            yield piece, self._batches.weight_of(piece, batch.index)

    def _stream(self, first: int, scale: float) -> Iterator[tuple[float, LinearMap]]:
        """Evaluate the batches that are not held, one after the other, for one product."""
        for batch in self._with_progress(self._batches.after(first)):
            for elements, weight in self._pieces(batch):
                term = self._evaluate_outside(elements, batch.index)
                with contextlib.closing(term):
                    yield weight * scale, term

    @outside_strategies
    def _evaluate_outside(self, elements: Elements, index: int) -> LinearMap:
        return self._evaluate(elements, index)[1]

    def _with_progress(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Wrap batches in a progress bar, if the options ask for one."""
        progress = self._options.progress
        if not progress:
            return batches
        return progress_bar(progress, batches, total=self._batches.count, unit="batch")

    def _evaluate(self, elements: Elements, index: int) -> tuple[Results, LinearMap, int]:
        """Return the results, the linear map and its size in bytes, with the data."""
        results, term = self._shape_plan(elements).at(elements)
        self.evaluations += 1
        with contextlib.ExitStack() as on_error:
            on_error.enter_context(contextlib.closing(term))
            self._check(results, index)
            on_error.pop_all()
        nbytes = (term.nbytes or 0) + elements.nbytes
        self._learn(elements, nbytes)
        return results, term, nbytes

    def _check(self, results: Results, index: int) -> None:
        check_finite(results, self.nest.names, batch=index)

    def _learn(self, elements: Elements, nbytes: int) -> None:
        """Learn how many bytes a batch needs."""
        # In smaller batches the bytes that do not depend on the examples would weigh too much.
        if elements.examples >= self._examples:
            self._examples = elements.examples
            self._bytes_per_example = max(self._bytes_per_example, nbytes / elements.examples)

    def _shape_plan(self, elements: Elements) -> ShapePlan:
        """Return the plan for batches with the shapes of these elements."""
        shapes = tuple(tuple(tensor.shape) for tensor in elements.tensors)
        shape_plan = self._shape_plans.get(shapes)
        if shape_plan is None and len(self._shape_plans) >= _MAX_SHAPES:
            shapes = _common(shapes, self._shape_plans)
            shape_plan = self._shape_plans.get(shapes)
        if shape_plan is None:
            shape_plan = ShapePlan(self._rule, self.nest, self._options, elements, shapes)
            self._shape_plans[shapes] = shape_plan
        return shape_plan

    def _refuse_draws(self) -> None:
        if self.facts.draws:
            raise HvpError(
                "the loss draws random numbers, and not all batches fit in memory: a batch that is "
                "evaluated again for each product would draw other numbers each time",
                "a loss that is the same in every evaluation",
                "raise memory_limit, or draw with a Keras seed generator or tf.random.stateless_*",
            )


def _common(shapes: Any, others: Iterable[Any]) -> Any:
    """Return what shapes have in common with others, None for axes whose length differs."""
    each = zip(shapes, *others)
    return tuple(
        tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*several))
        for several in each
    )


def _close(terms: Iterable[tuple[float, LinearMap]]) -> None:
    for _, term in terms:
        term.close()


class ShapePlan:
    """The plan for batches of one shape, traced once; the batch is passed in variables."""

    def __init__(
        self,
        rule: Rule,
        nest: VariableNest,
        options: Options,
        elements: Elements,
        shapes: Sequence[Sequence[int | None]],
    ) -> None:
        tensors = elements.tensors
        self._slots = [TensorCell(t, tf.TensorShape(shape)) for t, shape in zip(tensors, shapes)]

        def batch() -> Elements:
            # Shapes from `set_shape` are not stored in the graph, whereas this operation is.
            tensors = [tf.ensure_shape(s.read(), shape) for s, shape in zip(self._slots, shapes)]
            return elements.with_tensors(tensors)

        self.inputs = [slot.variable for slot in self._slots]
        self.plan = SinglePlan(rule, nest, options, batch, self.inputs)
        self._empty()

    def at(self, elements: Elements, place: ExecutionTarget = LOCAL) -> tuple[Results, LinearMap]:
        """Evaluate on a batch.

        Parameters
        ----------
        elements : Elements
            The batch, where it is to be evaluated.
        place : ExecutionTarget, optional
            Where that is. The tape engine runs Python, which reads the data themselves.
        """
        place_of_data = place if self.plan.facts.engine == "graph" else LOCAL
        for slot, tensor in zip(self._slots, elements.tensors):
            place_of_data.put(slot, tensor)
        try:
            return self.plan.at_point(place)
        finally:
            self._empty(place_of_data)

    def _empty(self, place: ExecutionTarget = LOCAL) -> None:
        for slot in self._slots:
            place.put(slot, slot.nothing)
