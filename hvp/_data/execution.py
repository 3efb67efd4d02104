"""The plan for many batches, here or on several devices.

The loss is the weighted mean `sum_b w_b L_b / sum_b w_b` over batches `b`, or the sum
`sum_b w_b L_b`, plus the regularization. Its Hessian is the same combination of the batches'
Hessians. Batches are dealt out to the places of a pool, which hold the linear maps that fit into
their memory. If a strategy connects several processes, each does this with its own share of the
data, and sums extend over all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._data.batched_map import BatchedMap
from hvp._data.batches import Batches
from hvp._data.pool import Pool
from hvp._data.reduction import Mean, PartialSum, Stack
from hvp._data.traced_batches import TracedBatches
from hvp._devices.membership import leave_lost
from hvp._devices.processes import digest_of, processes_of
from hvp._devices.replica import VariableValues
from hvp._devices.statistics import DeviceStatistics
from hvp._engines.finite import check_finite
from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap
from hvp._engines.options import Options
from hvp._engines.plan import Plan, WideGradient
from hvp._engines.rule import Rule
from hvp._engines.single_plan import SinglePlan
from hvp._engines.summary import TraceSummary
from hvp._errors import HvpError, InvalidLossError
from hvp._graphs.target import LOCAL
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.resources import Resource
from hvp._vectors.space import Space
from hvp._vectors.strategies import strategy_of
from hvp._vectors.variables import VariableNest

_STREAMS = "does not hold all batches, and evaluates the others again for each product"
_SCALAR = tf.TensorSpec([], tf.float64)


class Execution(Plan):
    """The weighted mean, or sum, of a rule over batches, plus a regularization; or its values.

    If the rule stacks, the values of batches are stacked instead of added up. `regularization` is
    added once, regardless of batching, and evaluated in each process. With `total`, the loss is a
    sum over examples instead of a mean.
    """

    divides = True

    def __init__(
        self,
        rule: Rule,
        nest: VariableNest,
        batches: Batches,
        options: Options,
        *,
        regularization: Rule | None,
        total: bool,
    ) -> None:
        self.nest, self.space = nest, Space.of_variables(nest)
        self._total, devices = total, options.devices or ()
        seconds = options.device_timeout
        processes = processes_of(strategy_of(nest.variables), seconds) if devices else None
        self.pool = Pool(devices, seconds, processes)
        self._reduction: Stack | Mean = Stack(self.space) if rule.stacks else Mean(self.space)
        with tf.device(None) if devices else contextlib.nullcontext():
            self._regularization: SinglePlan | None = None
            if regularization is not None:
                self._regularization = SinglePlan(regularization, nest, options)
            self._batches = TracedBatches(rule, nest, batches, options)
        self._moment = VariableValues()
        self.last: BatchedMap | None = None

    @property
    def batches(self) -> int | None:  # type: ignore[override]
        """The number of batches; None until the first pass has ended."""
        return self._batches.data.count

    @property
    def evaluations(self) -> int:  # type: ignore[override]
        """How often a batch, or a piece of one, was evaluated."""
        return self._batches.evaluations

    @property
    def facts(self) -> TraceSummary:
        """The summary of all shapes of batches so far, and of the regularization."""
        facts = of_batches = self._batches.facts
        if self._regularization is not None:
            facts = TraceSummary.union([of_batches, self._regularization.facts])
        note = _STREAMS if self.last is not None and self.last.streams else ""
        return dataclasses.replace(
            facts,
            traces=of_batches.traces,
            expected_nbytes=of_batches.expected_nbytes,
            note="; ".join(filter(None, [facts.note, note])),
        )

    @property
    def cuts(self) -> bool:  # type: ignore[override]
        """Whether batches of the caller's own have been divided further."""
        return self._batches.cuts

    @property
    def devices(self) -> tuple[DeviceStatistics, ...]:  # type: ignore[override]
        """Counts for each device."""
        found = []
        for device in self.pool.devices:
            site = self.pool.replica(device)
            terms = self.last.held.get(site, {}) if self.last and site else {}
            found.append(
                DeviceStatistics(
                    device.name,
                    len(terms),
                    sum(term.nbytes for term in terms.values()),
                    site.sent if site else 0,
                    site.received if site else 0,
                    device.lost,
                )
            )
        return tuple(found)

    @outside_strategies
    def at_point(self) -> tuple[Results, LinearMap]:
        """Evaluate all batches at the current values of the variables; hold the maps that fit."""
        data = self._batches.data
        data.forget()
        self._moment = VariableValues(self._moment)
        self.pool.open(data.count)
        held = BatchedMap(self._batches, self.pool, self._reduction, self._moment)
        with contextlib.ExitStack() as on_error:
            on_error.callback(leave_lost)
            on_error.callback(held.close)
            count = data.count
            state = self._evaluate(held, None if count is None else set(range(count)))
            added = None
            if self._regularization is not None:
                added, held.regularization = self._regularization.at_point()
                check_finite(added, self.nest)
                if added.gradient is not None and all(g is None for g in added.gradient):
                    raise InvalidLossError(
                        "the regularization depends on none of the variables",
                        "a function of the variables",
                    )
            results = self._reduction.results(state, held.scale, added)
            held.domain = self._reduction.domain
            on_error.pop_all()
        leave_lost()
        self.last = held
        return results, held

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the weights, of all batches and of the loss."""
        digests = self._batches.fingerprint()
        digests["reduction"] = "sum" if self._total else "mean"
        if self._regularization is not None:
            for name, digest in self._regularization.fingerprint().items():
                digests[f"{name} of the regularization"] = digest
        return digests

    def in_float64(self) -> WideGradient | None:
        """Return a function for the gradient in float64; None if a batch has none."""
        gradients = {id(one): one.plan.in_float64(one.inputs) for one in self._batches.plans}
        plan = self._regularization
        added = None if plan is None else plan.in_float64()
        if None in gradients.values() or (plan is not None and added is None):
            return None
        mean = Mean(self.space, tf.float64)

        def of_batches(values: Sequence[tf.Tensor]) -> tuple[PartialSum, float]:
            state, total = None, 0.0
            for elements, weight in self._batches.pieces_of_all():
                batch_gradient = gradients[id(self._batches.plan_of(elements))]
                assert batch_gradient is not None
                inputs = [
                    t if t.dtype != tf.float32 else tf.cast(t, tf.float64) for t in elements.tensors
                ]
                results = Results(tf.zeros([]), batch_gradient([*values, *inputs]))
                state, total = mean.add(state, 0, weight, results, LOCAL), total + weight
            assert state is not None
            return state, total

        def gradient(values: Sequence[tf.Tensor]) -> list[Any]:
            state, weight = self._over_processes(mean, lambda: of_batches(values), "float64")
            extra = None if added is None else Results(tf.zeros([]), added(values))
            found = mean.results(state, self._scale(weight), extra).gradient
            assert found is not None
            return found

        return gradient

    def _evaluate(self, held: BatchedMap, wanted: set[int] | None) -> Any:
        """Evaluate all batches, also those of other processes, and set the scale of the map."""
        if isinstance(self._reduction, Stack):
            return held.evaluate(wanted)

        def here() -> tuple[PartialSum, float]:
            state = held.evaluate(wanted)
            return state, sum(self._batches.weights.values())

        state, weight = self._over_processes(self._reduction, here, "evaluate")
        held.scale, held.unit = self._scale(weight), self._batches.weights[0] or 1.0
        return state

    def _scale(self, weight: float) -> float:
        """Return what weights are multiplied by, given their sum."""
        if self._total:
            return 1.0
        if weight == 0:
            raise HvpError("the weights of all batches are zero", "at least one positive weight")
        return 1 / weight

    def _over_processes(
        self, mean: Mean, here: Callable[[], tuple[PartialSum, float]], kind: str
    ) -> tuple[PartialSum, float]:
        """Return the sum over batches, and the sum of their weights, over all processes.

        The variables must have the same values in all of them.
        """
        if self.pool.processes is None:
            return here()
        found: list[tuple[PartialSum, float]] = []

        def tensors() -> list[tf.Tensor]:
            found.append(here())
            state, weight = found[0]
            return [tf.constant(weight, tf.float64), state.value, *state.gradient]

        same = [Resource.of(variable).read() for variable in self.nest.variables]
        weight, value, *gradient = self.pool.processes.sum(
            tensors, [_SCALAR, *mean.specs], digest_of(kind, *same)
        )
        return PartialSum(value, gradient, found[0][0].connected), float(weight)
