"""The plan for several devices: batches are dealt out, and each device holds its own linear maps.

The loss is the same combination of batches as in `BatchedPlan`. A batch is sent to a device once,
and stays there with its linear map. What a lost device held is evaluated again on the others, at
the values that variables had at that moment. Of several processes that a strategy connects, each
does this with its own share of the data, and sums go over all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._data.batched_plan import BatchedPlan
from hvp._data.batches import Batches
from hvp._data.dealt_sum import DealtSum
from hvp._data.device_evaluation import (
    REGULARIZATION,
    BatchTask,
    DeviceEvaluation,
    DeviceShard,
    Term,
    no_device_left,
)
from hvp._data.elements import NO_DATA, Elements
from hvp._data.joint import JointProducts
from hvp._data.partial_sum import Adding, PartialSum
from hvp._data.weighted_mean import WeightedMean
from hvp._devices.device import Device
from hvp._devices.membership import leave_lost, take_back
from hvp._devices.processes import digest_of, processes_of
from hvp._devices.replica import DeviceReplica, VariableValues
from hvp._devices.statistics import DeviceStatistics
from hvp._engines.finite import check_finite
from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap, Sum
from hvp._engines.options import Options
from hvp._engines.plan import TraceSummary
from hvp._engines.rule import Rule
from hvp._errors import DeviceError, HvpError, InvalidLossError
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.resources import Resource, restored
from hvp._vectors.strategies import strategy_of
from hvp._vectors.variables import VariableNest


@dataclass(frozen=True)
class BatchResult:
    """What a device has computed so far.

    Attributes
    ----------
    batches, regularization : PartialSum or None
        The sums of losses and gradients of its batches, and of the regularization.
    term : LinearMap or None
        The linear map of the last batch, unless it was divided.
    elements : Elements or None
        The data of that batch, there.
    """

    batches: PartialSum | None = None
    regularization: PartialSum | None = None
    term: LinearMap | None = None
    elements: Elements | None = None


@dataclass(frozen=True)
class Sums:
    """What one evaluation gives.

    Attributes
    ----------
    batches : PartialSum
        The sum over batches.
    weight : tf.Tensor
        The sum of their weights, in float64.
    added : PartialSum or None
        The regularization.
    """

    batches: PartialSum
    weight: tf.Tensor
    added: PartialSum | None

    def tensors(self, share: float) -> list[tf.Tensor]:
        """Return its tensors for a sum over processes, each with a share of the regularization."""
        tensors = [self.batches.value, self.weight, self.batches.gradient]
        if self.added is not None:
            value, gradient = self.added.value, self.added.gradient
            tensors += [part * tf.constant(share, part.dtype) for part in (value, gradient)]
        return tensors

    def replaced(self, tensors: Sequence[tf.Tensor]) -> Sums:
        """Return the same with other tensors, in the order of `tensors`."""
        value, weight, gradient, *rest = tensors
        batches, added = PartialSum(value, gradient, self.batches.connected), self.added
        if added is not None:
            added = PartialSum(rest[0], rest[1], added.connected)
        return Sums(batches, weight, added)


_SCALAR = tf.TensorSpec([], tf.float64)


class DealtPlan(BatchedPlan):
    """The weighted mean, or sum, of a rule over batches on several devices, plus a regularization.

    Parameters
    ----------
    rule, nest, batches, options, added, total
        As for `BatchedPlan`. The options name the devices, and `memory_limit` holds for each.
    """

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
        self._devices: Sequence[Device] = options.devices
        self._processes = processes_of(strategy_of(nest.variables), options.device_timeout)
        self._least_batches = len(self._devices)
        self._sites: dict[str, DeviceReplica] = {}
        # Batches whose data are on a device, by their number; and the weights of all.
        self._kept: dict[int, BatchTask] = {}
        self._weights: dict[int, float] = {}
        self._moment = VariableValues()
        self._deal: DeviceEvaluation | None = None
        self._prepared: set[Any] = set()
        self._joint = JointProducts()
        with tf.device(None):  # what is traced serves all devices
            super().__init__(rule, nest, batches, options, added=added, total=total)
            if batches.examples is not None:
                batches.cut(-(-batches.examples // len(self._devices)))
            self._adding = Adding(self.space)

    @property
    def deal(self) -> DeviceEvaluation | None:
        """What devices held after the last evaluation."""
        return self._deal

    @property
    def sites(self) -> list[DeviceReplica]:
        """The devices, and what stands there."""
        return list(self._sites.values())

    @property
    def devices(self) -> tuple[DeviceStatistics, ...]:  # type: ignore[override]
        """Counts for each device."""
        shares = {share.site: share for share in (self._deal.shares if self._deal else ())}
        found = []
        for device in self._devices:
            site = self._sites.get(device.name)
            share = None if site is None else shares.get(site)
            found.append(
                DeviceStatistics(
                    device.name,
                    0 if share is None else share.batches,
                    0 if share is None else share.nbytes,
                    0 if site is None else site.sent,
                    0 if site is None else site.received,
                    device.lost,
                )
            )
        return tuple(found)

    @outside_strategies
    def at_point(self) -> tuple[Results, LinearMap]:
        """Evaluate all batches at the current values of the variables, on all devices at once."""
        self._batches.forget()
        self._moment = VariableValues(self._moment)
        limit, seconds = self._options.memory_limit, self._options.device_timeout
        deal = DeviceEvaluation(
            self._moment,
            self._find_sites(),
            self._devices,
            limit,
            seconds,
            self._items,
            self._evaluate_again,
            self._prepared,
            self._joint,
        )
        with contextlib.ExitStack() as on_error:
            on_error.callback(leave_lost)
            on_error.callback(deal.close)
            count = self._batches.count
            wanted = None if count is None else set(range(count))
            if wanted is not None and self._added is not None:
                wanted.add(REGULARIZATION)
            self._forget_surplus(deal.shares)
            kept = list(self._kept.values())
            sums = self._sums(lambda: self._evaluate_on_all(deal, wanted, kept))
            results = self._results(deal, sums)
            on_error.pop_all()
        leave_lost()
        self._all_held, self._deal = not deal.streamed, deal
        return results, DealtSum(deal, self.space, self._multiply_streamed, self._processes)

    def _find_sites(self) -> list[DeviceReplica]:
        """Take devices back that were lost, and forget what is gone."""
        take_back()
        for device in self._devices:
            site = self._sites.get(device.name)
            if site is None or not (device.lost or site.is_there):
                self._sites[device.name] = DeviceReplica(device)
        live = [site for site in self.sites if site.is_there]
        if not live:
            raise no_device_left(self._devices)
        return live

    def _forget_surplus(self, shares: Sequence[DeviceShard]) -> None:
        """Forget data that are gone, and enough others that devices without any get a share."""
        sites = [share.site for share in shares]
        self._kept = {i: item for i, item in self._kept.items() if item.site in sites}
        loads: dict[DeviceReplica | None, int] = dict.fromkeys(sites, 0)
        for item in self._kept.values():
            loads[item.site] += item.nbytes
        if not self._kept or all(loads.values()) or len(self._kept) < len(self._weights):
            return
        for index, item in list(self._kept.items()):
            lightest = min(loads.values())
            if loads[item.site] - item.nbytes >= lightest + item.nbytes:
                loads[item.site] -= item.nbytes
                loads[min(loads, key=lambda site: loads[site])] += item.nbytes
                del self._kept[index]

    def _evaluate_on_all(
        self, deal: DeviceEvaluation, wanted: set[int] | None, kept: Sequence[BatchTask] = ()
    ) -> list[tuple[PartialSum | None, PartialSum | None]]:
        home = self.nest.variables[0].device

        def give(share: DeviceShard, state: BatchResult) -> Callable[[], Any]:
            def bring() -> Any:
                sums = state.batches, state.regularization
                return [None if s is None else s.at(share.site, home) for s in sums]

            return bring

        def take(share: DeviceShard, item: BatchTask, state: BatchResult) -> BatchResult:
            self._hold(deal, share, item, state)
            return state

        def step(
            share: DeviceShard, item: BatchTask, state: BatchResult | None
        ) -> Callable[[], BatchResult]:
            return self._evaluation(deal, share.site, item, state or BatchResult())

        return deal.gather(wanted, step, give, take, deal.forget, kept)

    def _evaluate_again(self, deal: DeviceEvaluation, wanted: set[int]) -> None:
        """Evaluate batches that were lost, at the values that the variables had."""
        if self.facts.draws:
            raise DeviceError(
                "the loss draws random numbers, and a device is lost: batches that are evaluated "
                "again would draw other numbers",
                "a loss that is the same in every evaluation, or devices that stay",
                "call refresh(), or draw with a Keras seed generator or tf.random.stateless_*",
            )
        with self._at(deal.moment):
            self._evaluate_on_all(deal, wanted)

    def _evaluation(
        self, deal: DeviceEvaluation, site: DeviceReplica, item: BatchTask, state: BatchResult
    ) -> Callable[[], BatchResult]:
        """Return a function that evaluates one batch on its device."""
        plans = [self._plan_of(item, elements) for elements, _ in item.pieces]
        facts = TraceSummary.union([facts for facts, _ in plans])
        values = deal.moment.of(facts.captured)
        graph = facts.engine == "graph"

        def evaluate() -> BatchResult:
            sums = {REGULARIZATION: state.regularization, None: state.batches}
            kind = REGULARIZATION if item.index == REGULARIZATION else None
            term, there = None, None
            if graph:
                site.sync(values)
            for (elements, weight), (_, at) in zip(item.pieces, plans):
                there = elements
                if graph and item.site is None:
                    there = elements.with_tensors([site.take(t) for t in elements.tensors])
                results, term = at(there, site)
                self._check(results, item.index)
                sums[kind] = self._adding(sums[kind], weight, results, site)
            whole = len(item.pieces) == 1
            kept = there if whole and graph else None
            return BatchResult(sums[None], sums[REGULARIZATION], term if whole else None, kept)

        return evaluate

    def _plan_of(
        self, item: BatchTask, elements: Elements
    ) -> tuple[TraceSummary, Callable[..., Any]]:
        """Return the facts about a batch, and the function that evaluates it at a place."""
        added = self._added
        if item.index == REGULARIZATION:
            assert added is not None
            return self._portable(added.facts), lambda _, place: added.at_point(place)
        with tf.device(None):
            shape_plan = self._shape_plan(elements)
        return self._portable(shape_plan.plan.facts), shape_plan.at

    def _portable(self, facts: TraceSummary) -> TraceSummary:
        """Refuse a function that remote devices cannot run."""
        remote = next((device.name for device in self._devices if device.is_remote), "")
        if remote and facts.foreign and facts.engine == "graph":
            raise HvpError(
                f"the loss uses {facts.foreign}, which only this process has, and {remote} belongs "
                "to another one",
                "a loss of variables, tensors and TensorFlow's operations",
                "do this part beforehand, and pass what it gives as data; or name local devices",
            )
        return facts

    def _check(self, results: Results, index: int) -> None:
        if index != REGULARIZATION:
            check_finite(results, self.nest.names, batch=index)
            return
        check_finite(results, self.nest.names)
        if results.gradient is not None and all(g is None for g in results.gradient):
            raise InvalidLossError(
                "the regularization depends on none of the variables", "a function of the variables"
            )

    def _hold(
        self, deal: DeviceEvaluation, share: DeviceShard, item: BatchTask, state: BatchResult
    ) -> None:
        """Hold a linear map, and the data that it is of, if they fit."""
        self.evaluations += len(item.pieces) if item.index != REGULARIZATION else 0
        if not self._options.products:
            if state.elements is not None and item.index != REGULARIZATION and item.site is None:
                self._keep(share, item, state)
            return
        nbytes = 0 if state.term is None else (state.term.nbytes or 0)
        if state.elements is not None and item.index != REGULARIZATION:
            nbytes += state.elements.nbytes
            self._learn(state.elements, nbytes)
        if state.term is not None:
            weight = sum(weight for _, weight in item.pieces)
            if share.hold(item.index, Term(weight, state.term, nbytes)):
                deal.streamed.discard(item.index)
                self._keep(share, item, state)
                return
            state.term.close()
        deal.streamed.add(item.index)
        self._refuse_draws()

    def _keep(self, share: DeviceShard, item: BatchTask, state: BatchResult) -> None:
        if state.elements is not None and item.index != REGULARIZATION:
            pieces = [(state.elements, item.pieces[0][1])]
            self._kept[item.index] = BatchTask(item.index, pieces, share.site)

    def _items(self, wanted: set[int] | None) -> Iterator[BatchTask]:
        """Iterate over batches, and the regularization, which comes first."""
        if self._added is not None and (wanted is None or REGULARIZATION in wanted):
            graph = self._added.facts.engine == "graph"
            yield BatchTask(REGULARIZATION, [(NO_DATA, 1.0)], alone=not graph)
        if wanted is not None and not wanted - {REGULARIZATION}:
            return
        batches = self._batches.select(lambda index: wanted is None or index in wanted)
        for batch in self._with_progress(batches):
            with tf.device(None):
                traced = len(self._shape_plans)
                pieces = list(self._pieces(batch))
            plans = [
                self._plan_of(BatchTask(batch.index, []), elements)[0] for elements, _ in pieces
            ]
            self._weights[batch.index] = sum(weight for _, weight in pieces)
            # Tapes run Python, which reads and writes variables that all share.
            first = len(self._shape_plans) > traced
            alone = first or any(facts.engine == "tape" for facts in plans)
            yield BatchTask(batch.index, pieces, alone=alone)

    def _sums(self, evaluate: Callable[[], Sequence[Any]]) -> Sums:
        """Add up what devices evaluated, and what other processes did."""

        def sums_here() -> Sums:
            collected = evaluate()
            batches = self._adding.sum([sums for sums, _ in collected if sums is not None])
            weight = tf.constant(sum(self._weights.values()), tf.float64)
            return Sums(batches, weight, next((a for _, a in collected if a is not None), None))

        if self._processes is None:
            return sums_here()
        here: list[Sums] = []

        def tensors_here() -> list[tf.Tensor]:
            here.append(sums_here())
            return here[0].tensors(1.0 / count)

        count, scalar, flat = self._processes.count, _SCALAR, self.space.flat_spec
        specs = [scalar, scalar, flat, *([] if self._added is None else [scalar, flat])]
        values = [Resource.of(variable).read() for variable in self.nest.variables]
        tensors = self._processes.sum(tensors_here, specs, digest_of("evaluate", *values))
        return here[0].replaced(tensors)

    def _complete(self, mean: WeightedMean, add_batches: Callable[[], None]) -> None:
        if self._processes is None:
            add_batches()
            return

        def tensors_here() -> list[tf.Tensor]:
            add_batches()
            return mean.tensors()

        mean.replace(self._processes.sum(tensors_here, mean.specs, digest_of("float64")))

    def _results(self, deal: DeviceEvaluation, sums: Sums) -> Results:
        total, weight, added = sums.batches, float(sums.weight), sums.added
        if self._processes is not None:
            deal.scale_of_regularization = 1.0 / self._processes.count
        if not self._total:
            if weight == 0:
                raise HvpError(
                    "the weights of all batches are zero", "at least one positive weight"
                )
            deal.scale = 1.0 / weight
        value, gradient = total.value * deal.scale, total.parts(self.space)
        if deal.scale != 1:
            scale = tf.constant(deal.scale, self.space.dtype)
            gradient = [g if g is None else tf.cast(scale, g.dtype) * g for g in gradient]
        if added is not None:
            value += added.value
            pairs = zip(gradient, added.parts(self.space))
            gradient = [a if b is None else b if a is None else a + b for a, b in pairs]
        return Results(value, gradient)

    def _multiply_streamed(
        self, deal: DeviceEvaluation, wanted: set[int], v: tf.Tensor
    ) -> list[tf.Tensor]:
        """Evaluate batches that no device holds, multiply, and return the products to add."""
        home = v.device

        def step(share: DeviceShard, item: BatchTask, product: Any) -> Callable[[], Any]:
            site = share.site
            plans = [self._plan_of(item, elements) for elements, _ in item.pieces]
            values = deal.moment.of(TraceSummary.union([facts for facts, _ in plans]).captured)
            graph = all(facts.engine == "graph" for facts, _ in plans)
            self.evaluations += len(item.pieces)

            def multiply() -> Any:
                if graph:
                    site.sync(values)
                there, total = site.take(v), product
                for (elements, weight), (_, at) in zip(item.pieces, plans):
                    if graph:
                        elements = elements.with_tensors([site.take(t) for t in elements.tensors])
                    results, term = at(elements, site)
                    with contextlib.closing(term):
                        self._check(results, item.index)
                        weighted = Sum(
                            [(deal.weight_of(item.index, weight), term)], self.space, self.space
                        )
                        part = weighted.apply(there)
                    total = part if total is None else total + part
                return total

            return multiply

        def give(share: DeviceShard, product: tf.Tensor) -> Callable[[], tf.Tensor]:
            return lambda: share.site.give(product, home)

        with self._at(deal.moment):
            return deal.gather(wanted, step, give)

    @contextlib.contextmanager
    def _at(self, moment: VariableValues) -> Iterator[None]:
        """Give variables the values of a moment while tapes run, which read the variables."""
        facts = self.facts
        if facts.engine == "graph":
            yield
            return
        values = moment.of(facts.captured)
        with restored([resource for resource, _ in values]):
            for resource, value in values:
                resource.write(value)
            yield
