"""Snapshots: the results of one evaluation, and whether they are still valid.

This is the one place that decides whether a linear map may be used: whether it was closed, whether
variables have changed, whether another thread is using it, and whether to multiply now or in a
graph that is being traced.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hvp._data.budget import out_of_memory
from hvp._derivatives.belonging import Check, watched
from hvp._derivatives.gradient import without_dependence
from hvp._engines.finite import check_finite
from hvp._engines.graph_map import GraphMap
from hvp._engines.graph_program import Results
from hvp._engines.in_graph import InGraph
from hvp._engines.linear_map import LinearMap, Source, apply_in_python, evaluated_again
from hvp._engines.options import ROUNDING, OnStale
from hvp._engines.plan import Plan
from hvp._engines.rule import Rule
from hvp._engines.summary import TraceSummary
from hvp._errors import (
    ClosedOperatorError,
    GraphModeError,
    HvpError,
    SecondDerivativeError,
    StaleOperatorError,
    quoted,
)
from hvp._graphs.private import copies_of, resumed
from hvp._graphs.python_calls import check_can_wait_for_python
from hvp._runtime.collector import no_collections
from hvp._runtime.guard import Guard, OneProcess, refuse_forks
from hvp._runtime.interrupts import Uninterrupted
from hvp._snapshots.statistics import Statistics
from hvp._taylor.products import gradient_of_products
from hvp._vectors.resources import Resource, differ, restored
from hvp._vectors.strategies import copies
from hvp._vectors.watch import Watch

Result = TypeVar("Result")
Slopes = Callable[[Any, Any, Sequence[int]], "list[tf.Tensor]"]

# By how many times the root of a rounding error two products may differ from symmetry.
_ASYMMETRY = 3


class Snapshot(OneProcess, LinearMap):
    """The results of a plan for one set of values of the variables, and its linear map.

    `on_stale` says what to do when the snapshot is used after a variable that was read has changed:
    "raise", "refresh" or "ignore". `is_hessian` tells whether the matrix is the derivative of the
    gradient. `function` is the loss, or the function that a Jacobian belongs to, on all data.
    """

    def __init__(
        self,
        make_plan: Callable[[], Plan],
        on_stale: OnStale,
        *,
        rule: Rule | None = None,
        function: Callable[[], Any] | None = None,
    ) -> None:
        self.on_stale = on_stale
        self._function = function
        self._slopes: dict[tuple[int, ...], Callable[..., list[tf.Tensor]]] = {}
        self._evaluates = "the gradient" if rule is None else rule.evaluates
        self.is_hessian = rule is None or rule.is_hessian
        # Without a cycle: what is dropped is to be freed at once.
        self._guard = Guard(functools.partial(_no_memory, weakref.ref(self)))
        self._doing = "tracing the loss"
        self._counts = Statistics()
        self._results: Results | None = None
        self._map: LinearMap | None = None
        self._store: InGraph | None = None
        self._compares_in_product = False
        self._gradient_is_released = self._is_symmetric = self._probes_symmetry = False
        self._absent = "the operator is closed"
        with self._guard, Uninterrupted(), no_collections():
            self.plan = make_plan()
        self._watch = _watch(self.plan.facts.reads)
        self.domain = self.codomain = self.plan.space
        self._evaluations = 0
        self.refresh()

    def another(self) -> Snapshot:
        """Return a snapshot of the same plan for another point; it is empty until a `refresh`.

        Both share their counts. The new snapshot remains valid for its point even if variables
        change.
        """
        twin = copy.copy(self)
        twin.on_stale = "ignore"
        twin._results = twin._map = twin._store = None
        twin._compares_in_product = False
        twin._absent = "nothing was evaluated yet"
        twin._watch = _watch(self.plan.facts.reads)
        return twin

    @property
    def facts(self) -> TraceSummary:
        """What is known about the plan so far."""
        return self.plan.facts

    @property
    def held(self) -> LinearMap | None:
        """The current linear map, or None. Use `apply` to multiply."""
        return self._map

    @property
    def products_eager(self) -> int:
        """Number of products outside graphs, including those of snapshots made by `another`."""
        return self._counts.products

    @property
    def products_in_graphs(self) -> int:
        """Number of products inside graphs, of this snapshot alone."""
        return self._store.products if self._store else 0

    @property
    def made_of(self) -> list[LinearMap]:  # type: ignore[override]
        """The linear map, if there is one."""
        return [] if self._map is None else [self._map]

    @property
    def sources(self) -> Sequence[Source]:
        """The variables of vectors, and then other variables and tensors that the loss reads.

        They are those of real or complex numbers. Variables alone if the loss could not be traced.
        """
        own = self.plan.nest.variables
        seen = {id(own_copy.handle) for variable in own for own_copy in copies(variable)}
        reads = [r for r in self.facts.reads if r.dtype.is_floating or r.dtype.is_complex]
        others = [r.variable for r in reads if id(r.handle) not in seen]
        known = [variable for variable in others if variable is not None]
        return [*own, *known, *self.facts.tensors]

    @property
    def version(self) -> int:  # type: ignore[override]
        """How often this snapshot was evaluated."""
        return self._evaluations

    def same_point(self) -> Check:
        """Return a function that refuses tensors, if the point is another then.

        In a graph they are NaN then if `on_stale` is "refresh". If it is "raise", the product that
        they come from has raised an error when the graph runs.
        """
        version, in_graph = self.version, not tf.executing_eagerly()
        follows, looks = self.on_stale == "refresh", self.on_stale != "ignore"
        values = [_value(source) for source in self.sources] if follows and in_graph else []

        def check(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            with tf.init_scope():
                changed = self.changed() if looks and not in_graph else []
            if self.version != version or changed:
                raise evaluated_again(changed)
            return _or_nan(tensors, self.sources, values)

        return check

    @property
    def calls_python(self) -> bool:
        """Whether products inside graphs call Python."""
        return not isinstance(self._map, GraphMap)

    @property
    def statistics(self) -> Statistics:
        """A copy of the current counts."""
        facts = self.facts
        held = 0 if self._map is None else self._map.batches_held
        return dataclasses.replace(
            self._counts,
            batches=self.plan.batches,
            batches_kept=held if self.plan.divides else None,
            batch_evaluations=self.plan.evaluations,
            products=self.products_eager + self.products_in_graphs,
            residual_bytes=self.nbytes,
            traces=facts.traces,
            engine=facts.engine,
            jit_compile=facts.uses_xla,
            precision=facts.precision or self.plan.space.dtype.name,
            devices=self.plan.devices,
            note=facts.note,
        )

    @property
    def status(self) -> str:
        """Why the snapshot cannot be used: "closed" or "stale"; empty if it can."""
        if self._map is None:
            return "closed"
        looks = self.on_stale != "ignore" and tf.executing_eagerly()
        return "stale" if looks and self._watch.changed() else ""

    def changed(self) -> list[str]:
        """Return the names of variables that have changed since the evaluation."""
        return list(self._watch.changed())

    def refresh(self) -> None:
        """Evaluate at the current values of the variables.

        The old linearization is released first, so that the two never have to fit in memory
        together. If this raises an error, the snapshot stays empty until a `refresh` succeeds.
        """
        self._refuse_graphs("refresh")
        with self._guard, self._guard.lock, Uninterrupted():
            self._evaluate()

    def close(self) -> None:
        """Release the results and the linear map."""
        with self._guard, self._guard.lock:
            self._release("the operator is closed")

    def exclusively(self) -> AbstractContextManager[Any]:
        """Return a context in which other threads wait."""
        refuse_forks()
        return self._guard.lock

    def preserving(self) -> AbstractContextManager[None]:
        """Return a context that restores the variables that the function writes."""
        return restored(self.facts.writes)

    @contextlib.contextmanager
    def with_seeds(self) -> Iterator[None]:
        """Set seeds and counters to their values at the evaluation; restore them on exit."""
        with self.preserving():
            for resource, value in zip(self.facts.seeds, self._seeds):
                resource.write(value)
            yield

    def value(self) -> Any:
        """Return the loss, which is a scalar, or the values of a function."""
        self._refuse_graphs("value")
        with self._guard, self._guard.lock:
            return self._current(to_multiply=False)[0].value

    def gradient(self) -> list[tf.Tensor]:
        """Return the gradient, one tensor for each variable."""
        return self.plan.space.with_zeros(self.gradient_parts())

    def gradient_parts(self) -> list[tf.Tensor | None]:
        """Return the gradient, with None for variables that the loss does not depend on."""
        self._refuse_graphs("gradient")
        with self._guard, self._guard.lock:
            results = self._current(to_multiply=False)[0]
            if self._gradient_is_released:
                raise HvpError(
                    "the gradient was released",
                    "an operator that has its gradient",
                    "call refresh(), which evaluates it again",
                )
            return list(results.gradient or ())

    def release_gradient(self) -> None:
        """Release the gradient, until the next evaluation."""
        with self._guard, self._guard.lock:
            if self._results is not None and self._results.gradient is not None:
                self._results = self._results._replace(gradient=None)
                self._gradient_is_released = True

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout, after checking that the map is current.

        Outside of graphs, each product checks this. Products in a graph being traced check it when
        the graph runs: within the graph if the engine allows that, otherwise in Python.
        """
        if not tf.executing_eagerly():
            return self._apply_in_graph(vector, adjoint)
        is_flat, count = False, 1
        if not isinstance(vector, (list, tuple)):
            is_flat = len(vector.shape) == 1
            count = 1 if is_flat else int(vector.shape[0])
        with self._guard, self._guard.lock:
            if self._probes_symmetry:
                self._probe_symmetry()
            product: Any = None
            if is_flat and self._compares_in_product and not adjoint:
                # In the same call, or not at all: None if something has changed.
                product = self._map.apply_if_current(vector)  # type: ignore[union-attr]
            if product is None:
                with resumed() if self.facts.engine == "tape" else contextlib.nullcontext():
                    product = self._current()[1].apply(vector, adjoint=adjoint)
            self._counts.products += count
        return product

    def _apply_in_graph(self, vector: Any, adjoint: bool) -> Any:
        with self._guard, self._guard.lock:
            with tf.init_scope():
                if self._probes_symmetry:
                    self._probe_symmetry()
                held = self._current()[1]
            if self._store is None and isinstance(held, GraphMap):
                watch, looks = self._watch, self.on_stale != "ignore"
                resources = watch.resources if looks else ()
                copies = len(resources) - len(watch.read) if looks else 0
                ask = self.make_sure_in_graph
                self._store = InGraph(held, ask, resources, watch.values, copies)
        if self._store is not None:
            return self._store.map().apply(vector, adjoint=adjoint)
        # TensorFlow keeps the function for as long as the process lives: it must not keep the
        # residuals, so it has a weak reference.
        space = held.domain if adjoint else held.codomain
        find = functools.partial(_alive, weakref.ref(self))
        return apply_in_python(find, vector, space, adjoint)

    def pattern(self) -> Any:
        """Return where the matrix may be nonzero at the current point; None if unknown."""
        self._refuse_graphs("pattern")
        with self._guard, self._guard.lock:
            return self._current()[1].pattern()

    def slopes(self) -> Slopes | None:
        """Return what returns gradients in variables at this point; None if they are not known.

        It takes directions, cotangents and places in `sources`. See `gradient_of_products`.
        """
        facts, own = self.facts, self.plan.nest
        # The function is evaluated again, with the same random numbers if seeds can be put back.
        draws = facts.draws or (facts.seeds and not tf.executing_eagerly())
        function = None if facts.remarks is None else self._function  # which cannot be traced
        if function is None or draws or self._is_of_old_values():
            return None
        sources, count = self.sources, len(own.variables)
        in_graph = not tf.executing_eagerly()
        places = {*range(count), *(range(len(sources)) if in_graph else watched(sources)[1])}
        values = {place: _value(sources[place]) for place in sorted(places)}

        def gradient(directions: Any, upstream: Any, wanted: Sequence[int]) -> list[tf.Tensor]:
            if facts.seeds and not tf.executing_eagerly():
                raise SecondDerivativeError(
                    "a gradient was asked for while TensorFlow traces a graph, of a product whose "
                    "loss draws random numbers",
                    "eager execution, where they can be drawn again",
                    "pass experimental_use_pfor=False to tape.jacobian",
                )
            others = tuple(place for place in wanted if place >= count)
            if others not in self._slopes:
                further = [sources[place] for place in others]
                self._slopes[others] = gradient_of_products(function, own, further)
            moving = [*range(count), *others]
            cast = [[tf.cast(p, values[i].dtype) for i, p in enumerate(d)] for d in directions]
            if tf.executing_eagerly():
                changed = self.changed()
                if changed:
                    raise evaluated_again(changed)
                self.make_sure()
            with self.with_seeds() if tf.executing_eagerly() else contextlib.nullcontext():
                found = self._slopes[others](cast, upstream, [values[place] for place in moving])
            slopes = [found[moving.index(place)] for place in wanted]
            return _or_nan(slopes, sources, [values[i] for i in sorted(places)] if in_graph else [])

        return gradient

    def _is_of_old_values(self) -> bool:
        """Whether variables may have changed since the evaluation, although that is ignored."""
        return self.on_stale == "ignore" and not (tf.executing_eagerly() and not self.changed())

    def _probe_symmetry(self) -> None:
        """Check symmetry with two products, if the loss has user-defined gradients.

        A Hessian is symmetric; the derivative of a `tf.custom_gradient` need not be.
        """
        remarks, held = self.facts.remarks, self._current()[1]
        custom = [] if remarks is None else remarks.custom
        space = held.domain
        seeds = [(1, 2), (3, 4)]
        u, v = (tf.random.stateless_normal([space.size], seed, dtype=space.dtype) for seed in seeds)
        Hu, Hv = held.apply(u), held.apply(v)
        difference = float(tf.abs(tf.tensordot(u, Hv, 1) - tf.tensordot(v, Hu, 1)))
        scale = float(tf.norm(u) * tf.norm(Hv) + tf.norm(v) * tf.norm(Hu))
        low = ROUNDING.get(self.facts.precision, 0.0)
        rounding = max(low, float(np.finfo(space.dtype.as_numpy_dtype).eps) ** 0.5)
        if difference > _ASYMMETRY * rounding * scale:
            raise SecondDerivativeError(
                f"products are not those of a symmetric matrix: u'Hv and v'Hu differ by "
                f"{difference / scale:.2g} of their size, for random u and v; the loss has "
                f"gradients of its own: {', '.join(map(str, custom[:5]))}",
                "gradients that are the derivatives of their functions, and can be differentiated",
                "replace these functions, or write their gradients with TensorFlow operations; "
                "hvp.check shows which derivatives are wrong",
            )
        self._is_symmetric, self._probes_symmetry = True, False

    def make_sure(self) -> None:
        """Check that the map is current; evaluate again or raise an error, as `on_stale` says."""
        with self._guard, self._guard.lock:
            self._current()

    def make_sure_in_graph(self) -> None:
        """Do what `make_sure` does, for a running graph that waits for it."""
        if self.on_stale == "refresh":
            check_can_wait_for_python(f"evaluating {self._evaluates} again")
        self.make_sure()

    def no_memory(self, error: Exception) -> HvpError:
        """Return the error to raise if TensorFlow could not allocate memory."""
        plan = self.__dict__.get("plan")  # there is none, if it was being traced
        nbytes = None if plan is None else plan.facts.expected_nbytes
        return out_of_memory(error, self._doing, nbytes)

    def _evaluate(self) -> None:
        self._release("the last refresh failed")
        self._doing = f"evaluating {self._evaluates}"
        results, held = self.plan.at_point()
        facts = self.facts
        # Which puts them back; and of batches only now all are known.
        self._seeds = [resource.read() for resource in facts.seeds]
        if facts.reads != self._watch.read:
            self._watch = _watch(facts.reads)
        self._doing = "a product"
        self._counts.gradient_evaluations += 1
        self._evaluations += 1
        if facts.engine == "tape":  # the loss was called again, with other Python values perhaps
            self._slopes = {}
        self._check(results)
        self._watch.set(results.watched)
        self._refuse_disagreeing_copies()
        self._results, self._map = results, held
        self._gradient_is_released = False
        self.domain, self.codomain = held.domain, held.codomain
        looks = self.on_stale != "ignore" and not self._watch.has_copies
        self._compares_in_product = looks and isinstance(held, GraphMap)
        has_custom = facts.remarks is not None and bool(facts.remarks.custom)
        self._probes_symmetry = self.is_hessian and has_custom and not self._is_symmetric
        if self._store is not None and isinstance(held, GraphMap):
            self._store.fill(held, self._watch.values)

    def _refuse_graphs(self, what: str) -> None:
        if not tf.executing_eagerly():
            raise GraphModeError(
                f"the operator's {what} is asked for while TensorFlow traces a graph",
                "eager execution",
                "ask outside of the tf.function: inside, an operator has products only",
            )

    def _current(self, *, to_multiply: bool = True) -> tuple[Results, LinearMap]:
        """Return the results and the map, after checking that they exist and are valid.

        If changes are ignored, the results of the old point are still valid, and so are products
        unless they evaluate batches again.
        """
        streams = to_multiply and self._map is not None and self._map.streams
        if self._map is not None and (self.on_stale != "ignore" or streams):
            changed = self._watch.changed()
            if changed and self.on_stale == "refresh":
                self.refresh()
            elif changed:
                raise self._stale(changed)
        if self._map is None or self._results is None:
            raise ClosedOperatorError(
                self._absent, "an operator that is open", "call refresh() or make a new one"
            )
        return self._results, self._map

    def _stale(self, changed: Sequence[str]) -> HvpError:
        problem = f"variables that the loss reads have changed: {quoted(changed)}"
        remedy = "call refresh(), or pass on_stale='refresh'"
        if self.on_stale == "ignore" and self._map is not None and self._map.streams:
            problem += "; and not all batches are kept"
            remedy = "call refresh(), or raise memory_limit"
        expected = "the values at which the operator was evaluated"
        return StaleOperatorError(problem, expected, remedy)

    def _release(self, reason: str) -> None:
        self._absent = reason
        if self._map is not None:
            self._map.close()
        self._map = self._results = None
        self._compares_in_product = False
        if self._store is not None:
            self._store.empty()
        self._watch.release()

    def _refuse_disagreeing_copies(self) -> None:
        names = self._watch.disagreeing()
        if names:
            raise HvpError(
                f"the copies that a strategy keeps of variables differ: {quoted(names)}",
                "the same values on all replicas",
                "assign to the variable as a whole, which gives all copies the same value",
            )

    def _check(self, results: Results) -> None:
        nest = self.plan.nest
        if results.gradient is not None and all(part is None for part in results.gradient):
            raise without_dependence(nest.names)
        if results.gradient is not None:  # a function may have values that are not finite
            check_finite(results, nest)


def _watch(resources: Sequence[Resource]) -> Watch:
    """Watch variables, including all copies of them that a strategy keeps."""
    copies = []
    for number, resource in enumerate(resources):
        for index, variable in enumerate(copies_of(resource.handle)):
            if variable.handle is not resource.handle:
                name = f"{resource.name} on replica {index}"
                copies.append((number, Resource.of(variable, name)))
    return Watch(resources, copies)


def _value(source: Source) -> tf.Tensor:
    return source.read_value() if isinstance(source, tf.Variable) else source


def _or_nan(
    tensors: Sequence[tf.Tensor], sources: Sequence[Source], values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return tensors, or NaN unless variables have these values when the graph runs."""
    if not values or not tensors:
        return list(tensors)
    pairs = [pair for pair in zip(sources, values) if isinstance(pair[0], tf.Variable)]
    changed = tf.reduce_any([differ(_value(source), value) for source, value in pairs])
    return [tf.where(changed, tf.cast(math.nan, x.dtype), x) for x in tensors]


def _alive(reference: Callable[[], Snapshot | None]) -> Snapshot:
    snapshot = reference()
    if snapshot is None:
        raise ClosedOperatorError("the operator no longer exists")
    return snapshot


def _no_memory(reference: Callable[[], Snapshot | None], error: Exception) -> HvpError:
    snapshot = reference()
    if snapshot is None:
        return out_of_memory(error, "an operator", None)
    return snapshot.no_memory(error)
