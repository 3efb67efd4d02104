"""The batches of a rule: traced once for each of their shapes, and cut to fit into memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvp._data.batches import Batch, Batches
from hvp._data.budget import Budget
from hvp._data.elements import Elements
from hvp._data.pool import Task
from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap
from hvp._engines.options import Options
from hvp._engines.rule import Rule
from hvp._engines.single_plan import SinglePlan
from hvp._engines.summary import TraceSummary
from hvp._errors import HvpError
from hvp._graphs.target import LOCAL, ExecutionTarget
from hvp._runtime.progress import progress_bar
from hvp._vectors.tensor_cell import TensorCell
from hvp._vectors.variables import VariableNest

# This many shapes of batches get a trace of their own. All others share a trace, in which the
# lengths of axes that differ are not known.
_MAX_SHAPES = 3
# The number of examples from which the memory for larger batches is estimated.
_PROBE_EXAMPLES = 32


class TracedBatches:
    """A rule on many batches, in pieces that fit into memory.

    `budget` is the memory that one device may take, and `weights` are those of the batches seen so
    far. `evaluations` counts evaluations of batches, or of pieces of batches; `cuts` tells whether
    there have been pieces.
    """

    def __init__(self, rule: Rule, nest: VariableNest, batches: Batches, options: Options) -> None:
        self.rule, self.nest, self.data, self.options = rule, nest, batches, options
        self.budget = Budget(options.memory_limit)
        self.weights: dict[int, float] = {}
        self.evaluations, self.cuts = 0, False
        self._plans: dict[Any, ShapePlan] = {}
        # An estimate, and the number of examples in the batch that it comes from.
        self._bytes_per_example, self._examples = 0.0, 0
        examples, devices = batches.examples, len(options.devices or ())
        if examples is not None:
            if self.budget.limited:
                self._divide(examples, at_least=max(1, devices))
            elif devices:
                batches.cut(-(-examples // devices))

    @property
    def plans(self) -> list[ShapePlan]:
        """The plans for the shapes of batches seen so far."""
        return list(self._plans.values())

    @property
    def facts(self) -> TraceSummary:
        """The summary of all these plans."""
        every = [shape_plan.plan.facts for shape_plan in self.plans]
        examples = self.data.examples or self._examples
        expected = int(self._bytes_per_example * examples)
        return dataclasses.replace(TraceSummary.union(every), expected_nbytes=expected)

    def tasks(
        self, wanted: set[int] | None, kept: Iterable[Task], *, alone: bool
    ) -> Iterator[Task]:
        """Iterate over batches, starting with those whose data are on a device already, `kept`.

        `wanted` are the numbers of the batches, None for all. With `alone`, only one batch is
        worked on at a time.
        """
        there = [task for task in kept if wanted is None or task.indices <= wanted]
        yield from there
        done = frozenset().union(*(task.indices for task in there))
        if wanted is not None and wanted <= done:
            return
        left = self.data.select(lambda i: i not in done and (wanted is None or i in wanted))
        for batch in self._with_progress(left):
            with self._scope():
                traced = len(self._plans)
                pieces = list(self._pieces(batch))
                plans = [self.plan_of(elements) for elements, _ in pieces]
                is_first = len(self._plans) > traced
            self.weights[batch.index] = sum(weight for _, weight in pieces)
            # Tapes run Python, which reads and writes variables that all share.
            on_tapes = any(one.plan.facts.engine == "tape" for one in plans)
            yield Task(frozenset([batch.index]), pieces, alone=alone or is_first or on_tapes)

    def plan_of(self, elements: Elements) -> ShapePlan:
        """Return the plan for batches with the shapes of these elements."""
        kind = self.data.kind_of(elements)
        shapes = tuple(tuple(tensor.shape) for tensor in elements.tensors)
        shape_plan = self._plans.get((kind, shapes))
        alike = [others for other_kind, others in self._plans if other_kind == kind]
        if shape_plan is None and len(alike) >= _MAX_SHAPES:
            shapes = _common(shapes, alike)
            shape_plan = self._plans.get((kind, shapes))
        if shape_plan is None:
            with self._scope():
                shape_plan = ShapePlan(self.rule, self.nest, self.options, elements, shapes)
            self._plans[kind, shapes] = shape_plan
        return shape_plan

    def learn(self, elements: Elements, nbytes: int) -> None:
        """Record how many bytes a batch needs, with its data."""
        self.budget.record(nbytes)
        # In smaller batches the bytes that do not depend on the examples would weigh too much.
        if elements.examples >= self._examples:
            self._examples = elements.examples
            self._bytes_per_example = max(self._bytes_per_example, nbytes / elements.examples)

    def refuse_draws(self) -> None:
        """Refuse a loss that would draw other numbers when batches are evaluated again."""
        if self.facts.draws:
            raise HvpError(
                "the loss draws random numbers, and not all batches fit in memory: a batch that is "
                "evaluated again for each product would draw other numbers each time",
                "a loss that is the same in every evaluation",
                "raise memory_limit, or draw with a Keras seed generator or tf.random.stateless_*",
            )

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the weights, of all batches and of the loss."""
        # Any shape of the batches tells what each loss does.
        of_kinds = {kind: plan for (kind, _), plan in reversed(self._plans.items())}
        each = [plan.plan.fingerprint() for _, plan in sorted(of_kinds.items())]
        names = dict.fromkeys(name for one in each for name in one)
        digests = {name: " ".join(one.get(name, "") for one in each) for name in names}
        digests["data"] = f"{digests.get('data', '')} {self.data.fingerprint()}"
        return digests

    def pieces_of_all(self) -> Iterator[tuple[Elements, float]]:
        """Iterate over all pieces of all batches, with their weights."""
        for batch in self.data:
            yield from self._pieces(batch)

    def _divide(self, examples: int, at_least: int) -> None:
        """Divide arrays into batches that fit into memory.

        The loss is traced for two small batches. Their expected sizes determine both unknowns of
        `bytes = shared + examples * per_example`.
        """
        probe = min(_PROBE_EXAMPLES, examples)
        sizes, expected = (max(1, probe // 2), probe), []
        for size in sizes:
            elements = self.data.head(size)
            expected.append(self.plan_of(elements).plan.facts.expected_nbytes + elements.nbytes)
        self._plans.clear()
        per_example = (expected[1] - expected[0]) / max(1, sizes[1] - sizes[0])
        if sizes[0] == sizes[1]:  # there is only one example
            per_example = expected[0]
        shared = expected[0] - per_example * sizes[0]
        # Both quotients are rounded up, so that the batches have nearly equal sizes.
        count = -(-examples // self.budget.batch_size(shared, per_example))
        count = max(count, min(at_least, examples))
        self.data.cut(-(-examples // count))

    def _pieces(self, batch: Batch) -> Iterator[tuple[Elements, float]]:
        """Divide a batch into pieces that fit into memory, with their weights."""
        if not self._plans:  # the trace of the first batch gives a first estimate
            facts = self.plan_of(batch.elements).plan.facts
            self._examples = batch.elements.examples
            nbytes = facts.expected_nbytes + batch.elements.nbytes
            self._bytes_per_example = nbytes / self._examples
        examples = batch.elements.examples
        expected = round(self._bytes_per_example * examples)
        count = self.budget.pieces(expected)
        if count <= 1:
            yield batch.elements, batch.weight
            return
        if examples < count:
            raise self.budget.too_small(expected, examples)
        self.cuts = True
        # All pieces but the last have the same size, because each shape needs a trace.
        size = -(-examples // count)
        for start in range(0, examples, size):
            piece = batch.elements.part(start, min(start + size, examples))
            yield piece, self.data.weight_of(piece, batch.index)

    def _scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which to trace; with devices, traces serve all of them."""
        return tf.device(None) if self.options.devices else contextlib.nullcontext()

    def _with_progress(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches with a progress bar, if the options ask for one."""
        with progress_bar(self.options.progress, total=self.data.count, unit="batch") as bar:
            for batch in batches:
                yield batch
                bar.update()


def _common(shapes: Any, others: Iterable[Any]) -> Any:
    """Return what shapes have in common with others, None for axes whose length differs."""
    each = zip(shapes, *others)
    return tuple(
        tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*several))
        for several in each
    )


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
        """Evaluate on a batch that is at a place.

        The tape engine runs Python, and reads the batch from the variables of this process.
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
