"""What is held of all batches at one moment, and products with it.

Each place holds the linear maps of as many batches as its memory allows. The other batches are
evaluated again for each product. What a lost device held is evaluated again once, at the values
that variables had.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Optional

import numpy as np
import scipy.sparse
import tensorflow as tf

from hvp._data.elements import Elements
from hvp._data.joint import can_join
from hvp._data.pool import Pool, Task, warn_of_loss
from hvp._data.reduction import Mean, Stack
from hvp._data.traced_batches import TracedBatches
from hvp._devices.membership import leave_lost
from hvp._devices.processes import digest_of
from hvp._devices.replica import DeviceReplica, Values, VariableValues
from hvp._devices.work import Work
from hvp._engines.finite import check_finite
from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap, Terms, added, scaled
from hvp._engines.summary import TraceSummary
from hvp._errors import DeviceError, HvpError
from hvp._graphs.target import ExecutionTarget
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.resources import restored


class Term(NamedTuple):
    """The linear map of a batch, the weight of the batch, and the bytes of the map and its data."""

    weight: float
    map: LinearMap
    nbytes: int


# What a place has computed so far: the state of the reduction; and of the last batch, unless it was
# divided, the linear map and the data that are there; and the bytes of that batch or its largest
# piece.
_State = tuple[Any, Optional[LinearMap], Optional[Elements], int]


class BatchedMap(LinearMap):
    """The linear map of a rule over all batches, at one moment.

    `moment` holds the values of the variables, where they are needed elsewhere.

    Attributes
    ----------
    held
        For each place, its terms by the number of the batch.
    streamed
        The batches that no place holds.
    unit, scale
        Weights are divided by `unit`, to be 1 where all are alike, and the sum over batches is
        multiplied by `scale`, once: on a remote device an operation takes as long as a hundred
        here.
    regularization
        The map of what is added once.
    """

    def __init__(
        self, batches: TracedBatches, pool: Pool, reduction: Mean | Stack, moment: VariableValues
    ) -> None:
        self._batches, self._pool, self._reduction, self._moment = batches, pool, reduction, moment
        self.codomain = self.domain = reduction.codomain
        self.held: dict[ExecutionTarget, dict[int, Term]] = {site: {} for site in pool.sites}
        self._used: dict[ExecutionTarget, int] = dict.fromkeys(pool.sites, 0)
        self.streamed = set[int]()
        self.unit = self.scale = 1.0
        self.regularization: LinearMap | None = None

    @property
    def streams(self) -> bool:  # type: ignore[override]
        """Whether a batch is held nowhere; after a loss, devices may have no room for some."""
        return bool(self.streamed)

    @property
    def batches_held(self) -> int:  # type: ignore[override]
        """The number of batches that are held."""
        return sum(map(len, self.held.values()))

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of what is held, including the data of its batches."""
        return sum(self._used.values())

    def pattern(self) -> Any:
        """Return the patterns of all batches together, if they are held in this process."""
        if self.streamed or not self._pool.is_local:
            return None
        [terms] = self.held.values()
        maps = [terms[index].map for index in sorted(terms)]
        patterns = [one.pattern() for one in maps]
        if self.regularization is not None:
            patterns.append(self.regularization.pattern())
        if any(pattern is None for pattern in patterns):
            return None
        if self._batches.rule.stacks:
            # Vectors have the values of all batches for one output after the other.
            ends = [np.cumsum([0, *one.domain.sizes]) for one in maps]
            parts = [
                pattern.tocsc()[:, own[output] : own[output + 1]]
                for output in range(len(self.domain.sizes))
                for pattern, own in zip(patterns, ends)
            ]
            return scipy.sparse.hstack(parts, format="csr")
        return sum(patterns[1:], patterns[0])

    def close(self) -> None:
        """Release what is held; what a lost device holds is gone anyway."""
        for terms in self.held.values():
            for term in terms.values():
                term.map.close()
            terms.clear()
        self._used = dict.fromkeys(self._used, 0)
        if self.regularization is not None:
            self.regularization.close()

    def evaluate(self, wanted: set[int] | None) -> Any:
        """Evaluate batches, hold the maps that fit, and return the state of the reduction.

        `wanted` are the numbers of the batches; None stands for all.
        """
        home = self._batches.nest.variables[0].device

        def bring(site: ExecutionTarget, state: _State) -> Any:
            return self._reduction.bring(state[0], site, home)

        states = self._pool.fold(
            self._tasks, wanted, self._evaluation, bring, self._hold, self._forget
        )
        return self._reduction.merge(states)

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout."""
        domain, codomain = self.domain, self.codomain
        if isinstance(vector, (list, tuple)):
            domain, codomain = (codomain, domain) if adjoint else (domain, codomain)
            return codomain.split(self.apply(domain.join(vector), adjoint=adjoint))
        processes = self._pool.processes
        if processes is None:
            product = self._multiply(vector, adjoint)
        else:
            specs = [tf.TensorSpec(vector.shape, vector.dtype)]
            digest = digest_of(f"product {len(vector.shape)}", vector)
            [product] = processes.sum(lambda: [self._multiply(vector, adjoint)], specs, digest)
        if self.regularization is None:
            return product
        return added(product, self.regularization.apply(vector, adjoint=adjoint))

    def _multiply(self, v: tf.Tensor, adjoint: bool) -> tf.Tensor:
        """Multiply by all batches of this process."""
        if self._pool.is_local and not self.streamed:
            [terms] = self.held.values()
            states = [self._with_held(None, terms, v, adjoint)]
        else:
            states = self._multiply_everywhere(v, adjoint)
        return scaled(self._reduction.product(states, adjoint=adjoint), self.scale * self.unit)

    def _with_held(self, state: Any, terms: dict[int, Term], v: tf.Tensor, adjoint: bool) -> Any:
        """Add the products with what one place holds to a state of the reduction."""
        for index, term in terms.items():
            maps = [(term.weight / self.unit, term.map)]
            state = self._reduction.multiply(state, index, maps, v, adjoint=adjoint)
        return state

    @outside_strategies
    def _multiply_everywhere(self, v: tf.Tensor, adjoint: bool) -> list[Any]:
        """Multiply at all places, and return what they computed.

        What is held is multiplied where it is, and what is not held is evaluated. Remote devices
        can multiply together; if that fails, each reports by itself what is wrong.
        """
        pool, every = self._pool, self.streamed.union(*self.held.values())
        try:
            joined = {site: terms for site, terms in self.held.items() if self._joins(site, v)}
            maps = {site: self._weighted(terms) for site, terms in joined.items()}
            wait = pool.joint.start(maps, v, self.codomain, pool.seconds)
            together = set().union(*joined.values()) if wait else set[int]()
            states = self._multiply_alone(every - together, v, adjoint)
            if wait is None:
                return states
            product = wait()
            for site in joined:
                if isinstance(site, DeviceReplica) and site.device.lost:
                    warn_of_loss(site, site.device.lost)
            if product is not None:
                return [*states, product]
            return [*states, *self._multiply_alone(together, v, adjoint)]
        finally:
            leave_lost()

    def _multiply_alone(self, wanted: set[int], v: tf.Tensor, adjoint: bool) -> list[Any]:
        """Multiply by some batches, at each place by itself."""
        if not wanted:
            return []
        sent = self._send(v)

        def step(site: ExecutionTarget, task: Task, state: Any) -> Callable[[], Any]:
            uses = len(task.indices) if state is None and not task.pieces else 2
            add = (self._with_streamed if task.pieces else self._with_some_held)(site, task, v)

            def multiply() -> Any:
                there = sent[site] if site in sent else site.take(v, uses=uses)
                return add(state, there, adjoint)

            return multiply

        def tasks(todo: set[int] | None) -> Iterator[Task]:
            assert todo is not None
            self._replace_lost()
            for site, terms in list(self.held.items()):
                there = {index: term for index, term in terms.items() if index in todo}
                if there:  # the first call of a function makes it, for all devices
                    alone = not _functions(v, there) <= self._pool.prepared
                    yield Task(frozenset(there), [], site, alone=alone)
            streamed = todo & self.streamed
            if streamed:
                yield from self._tasks(streamed)

        def bring(site: ExecutionTarget, product: Any) -> Any:
            return site.give(product, v.device)

        with self._at_moment():
            return self._pool.fold(tasks, wanted, step, bring)

    def _with_some_held(
        self, site: ExecutionTarget, task: Task, v: tf.Tensor
    ) -> Callable[[Any, tf.Tensor, bool], Any]:
        """Return a function that adds the products with what a place holds of some batches."""
        terms = {index: self.held[site][index] for index in task.indices}
        self._pool.prepared |= _functions(v, terms)

        def add(state: Any, there: tf.Tensor, adjoint: bool) -> Any:
            return self._with_held(state, terms, there, adjoint)

        return add

    def _with_streamed(
        self, site: ExecutionTarget, task: Task, v: tf.Tensor
    ) -> Callable[[Any, tf.Tensor, bool], Any]:
        """Return a function that evaluates a batch, and adds the product with it."""
        del v
        _, pieces = self._evaluators(site, task)
        [index] = task.indices
        self._batches.evaluations += len(pieces)

        def maps() -> Iterator[tuple[float, LinearMap]]:
            for evaluate_at, weight in pieces:
                with contextlib.closing(evaluate_at()[2]) as term:
                    yield weight / self.unit, term

        def add(state: Any, there: tf.Tensor, adjoint: bool) -> Any:
            return self._reduction.multiply(state, index, maps(), there, adjoint=adjoint)

        return add

    def _joins(self, site: ExecutionTarget, v: tf.Tensor) -> bool:
        terms = self.held[site]
        known = _functions(v, terms) <= self._pool.prepared
        return site.is_there and known and can_join(site, self._weighted(terms))

    def _weighted(self, terms: dict[int, Term]) -> Terms:
        return [(term.weight / self.unit, term.map) for term in terms.values()]

    def _send(self, v: tf.Tensor) -> dict[ExecutionTarget, tf.Tensor]:
        """Move a large vector to remote devices, before any of them computes.

        While one computes, TensorFlow would not let another one fetch it.
        """
        works = [
            (site, Work(site, functools.partial(site.fetch, v)))
            for site in self._pool.sites
            if isinstance(site, DeviceReplica) and site.fetches(v)
        ]
        results = [(site, self._pool.result(site, work)) for site, work in works]
        return {site: result[0] for site, result in results if result is not None}

    def _replace_lost(self) -> None:
        """Evaluate what lost devices held on the others, at the values that variables had."""
        while lost := [site for site in self.held if not site.is_there]:
            for site in self._pool.sites:
                self.held.setdefault(site, {})
                self._used.setdefault(site, 0)
            there = [terms for site, terms in self.held.items() if site.is_there]
            gone = set[int]().union(*(self.held[site] for site in lost))
            gone -= self.streamed.union(*there)
            if gone and self._batches.facts.draws:
                raise DeviceError(
                    "the loss draws random numbers, and a device is lost: batches that are "
                    "evaluated again would draw other numbers",
                    "a loss that is the same in every evaluation, or devices that stay",
                    "call refresh(), or draw with a Keras seed generator or tf.random.stateless_*",
                )
            if gone:
                self.evaluate(gone)
            # Not before: if that fails, the next product must miss them again.
            for site in lost:
                del self.held[site], self._used[site]

    def _tasks(self, wanted: set[int] | None) -> Iterator[Task]:
        pool = self._pool
        kept = [task for task in pool.kept.values() if task.site and task.site.is_there]
        return self._batches.tasks(wanted, kept, alone=pool.is_local)

    def _evaluation(
        self, site: ExecutionTarget, task: Task, state: _State | None
    ) -> Callable[[], _State]:
        """Return a function that evaluates one batch at a place."""
        on_graphs, pieces = self._evaluators(site, task)

        def evaluate() -> _State:
            total = None if state is None else state[0]
            sizes = []
            [index] = task.indices
            for evaluate_at, weight in pieces:
                there, results, term = evaluate_at()
                sizes.append((term.nbytes or 0) + there.nbytes)
                total = self._reduction.add(total, index, weight, results, site)
                if len(pieces) > 1:
                    term.close()
            if len(pieces) > 1:
                return total, None, None, max(sizes)
            return total, term, there if on_graphs else None, sizes[0]

        return evaluate

    def _evaluators(
        self, site: ExecutionTarget, task: Task
    ) -> tuple[bool, list[tuple[Callable[[], tuple[Elements, Results, LinearMap]], float]]]:
        """Return whether a batch is evaluated in graphs, and a function and weight for each piece.

        A function evaluates one piece, and returns its data where they are used, its results and
        its linear map.
        """
        batches = self._batches
        plans = [batches.plan_of(elements) for elements, _ in task.pieces]
        facts = TraceSummary.union([one.plan.facts for one in plans])
        on_graphs = facts.engine == "graph"
        values: Values = []
        if isinstance(site, DeviceReplica):
            self._refuse_foreign(facts)
            values = self._moment.of(facts.captured) if on_graphs else []

        def evaluate(elements: Elements, plan: Any) -> tuple[Elements, Results, LinearMap]:
            site.sync(values)
            if on_graphs and task.site is None and not self._pool.is_local:
                elements = elements.with_tensors([site.take(t) for t in elements.tensors])
            results, term = plan.at(elements, site)
            with contextlib.ExitStack() as on_error:
                on_error.callback(term.close)
                if self._reduction.of_losses:
                    check_finite(results, batches.nest, batch=min(task.indices))
                on_error.pop_all()
            return elements, results, term

        return on_graphs, [
            (functools.partial(evaluate, elements, plan), weight)
            for plan, (elements, weight) in zip(plans, task.pieces)
        ]

    def _refuse_foreign(self, facts: TraceSummary) -> None:
        """Refuse a function that remote devices cannot run."""
        remote = next((device.name for device in self._pool.devices if device.is_remote), "")
        if remote and facts.foreign and facts.engine == "graph":
            raise HvpError(
                f"the loss uses {facts.foreign}, which only this process has, and {remote} belongs "
                "to another one",
                "a loss of variables, tensors and TensorFlow's operations",
                "do this part beforehand, and pass what it gives as data; or name local devices",
            )

    def _hold(self, site: ExecutionTarget, task: Task, state: _State) -> None:
        """Hold a linear map and its data, if they fit."""
        batches, products, [index] = self._batches, self._batches.options.products, task.indices
        _, term, elements, nbytes = state
        batches.evaluations += len(task.pieces)
        batches.learn(task.pieces[0][0], nbytes)
        if products and term is not None and self._fits(site, nbytes):
            self.held[site][index] = Term(task.pieces[0][1], term, nbytes)
            self._used[site] += nbytes
            self.streamed.discard(index)
        else:
            if term is not None:
                term.close()
            if products:
                self.streamed.add(index)
                batches.refuse_draws()
                return
        if elements is not None and not self._pool.is_local:
            data = [(elements, task.pieces[0][1])]
            self._pool.kept[index] = Task(task.indices, data, site)

    def _fits(self, site: ExecutionTarget, nbytes: int) -> bool:
        """Return whether a place can hold `nbytes` more."""
        budget = self._batches.budget
        # Without a limit, what memory is left on another machine is not known.
        looks = budget.limited or not site.is_remote
        return not looks or budget.can_hold(self._used[site] + nbytes)

    def _forget(self, site: ExecutionTarget, indices: Iterable[int]) -> None:
        """Forget what a lost device holds of batches that others will get."""
        for index in indices:
            term = self.held[site].pop(index, None)
            self._used[site] -= 0 if term is None else term.nbytes
            self.streamed.discard(index)

    @contextlib.contextmanager
    def _at_moment(self) -> Iterator[None]:
        """Give variables the values of the moment while tapes run, which read the variables."""
        facts = self._batches.facts
        if facts.engine == "graph" or self._pool.is_local:
            yield
            return
        values = self._moment.of(facts.captured)
        with restored([resource for resource, _ in values]):
            for resource, value in values:
                resource.write(value)
            yield


def _functions(v: tf.Tensor, terms: dict[int, Term]) -> set[Any]:
    """Return keys of the functions that a product calls."""
    return {(len(v.shape), id(getattr(term.map, "program", None))) for term in terms.values()}
