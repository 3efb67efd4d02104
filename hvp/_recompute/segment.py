"""A function of tensors, traced for one signature, whose derivatives recompute its values.

Order 0 is the function itself. Each further order is the transposed derivative (vjp) of the one
before. With the function f, its Jacobian J, and cotangents u, v, ... of the results of each order:

    order 0:  f(x)
    order 1:  J(x)ᵀ u                                   (derivative by x)
    order 2:  d/dx <J(x)ᵀ u, v>  and  J(x) v            (derivatives by x and by u)

and so on. A Hessian-vector product runs order 2, the vjp of a vjp: J(x) v is the tangent of the
results, and the derivative by x is the second reverse sweep.

Each order is traced from the Python function under one nested tape for each order, and compiled as
a repeatable program. Tapes record only the inputs of a call. Its derivative is a call of the next
order on these inputs and the cotangents, of which tapes again record only the inputs. Derivatives
therefore exist to any order, and no order keeps intermediate values.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.exact import exact_functions
from hvp._derivatives.gradient import densify
from hvp._derivatives.suspects import (
    SuspectOperation,
    derivative_errors,
    find_suspects,
    refuse_missing_derivatives,
)
from hvp._errors import RecomputeError
from hvp._graphs.concrete import captures, concrete_function
from hvp._graphs.dataflow import Dataflow
from hvp._graphs.low_precision import dtype_of_recomputed
from hvp._graphs.sizes import graph_def_with_shapes
from hvp._recompute.captured import CapturedVariable, captured_tensors, captured_variables
from hvp._recompute.order import FindMissing, Order, has_derivatives, spec_of
from hvp._recompute.programs import OrderTrace, Programs
from hvp._recompute.recorded import Recorded, apart, is_watched, run_unseen

# The name scope of the function's operations.
_SCOPE = "recomputed"


class Segment:
    """A traced function of tensors that can be called and differentiated any number of times.

    The inputs of a call are the function's arguments, the values of the variables it reads, the
    tensors it uses from outside, and the state of its first run. Together they are the *base*. The
    cotangents of each order, from the first on, follow the base. A function that cannot be made
    repeatable is refused.
    """

    def __init__(
        self, function: Callable[..., Sequence[tf.Tensor]], specs: Sequence[tf.TensorSpec]
    ) -> None:
        self._function = function
        self._specs = list(specs)
        self._lock = threading.RLock()
        self._variables: list[CapturedVariable] = []
        self._tensors: list[tf.Tensor] = []
        self._programs: Programs
        # Names of the function's own results in the latest trace.
        self._function_results: list[str] = []
        self._orders: list[Order] = []
        # The derivatives that products use, in low precision.
        self._low: dict[tuple[int, tf.DType], Order] = {}
        # Orders and watched inputs for which no derivative is missing.
        self._complete: set[tuple[int, frozenset[int] | None]] = set()
        self._order(0)

    def __call__(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Call the function, without keeping its intermediate values."""
        first = self._order(0)
        inputs = [*arguments, *(variable.read() for variable in self._variables), *self._tensors]
        outputs = run_unseen(first.run, inputs)
        results, state = outputs[: len(first.results)], outputs[len(first.results) :]
        return first.recorded(lambda *_: results, [*inputs, *state])

    @property
    def depends_on_graph(self) -> bool:
        """Whether the function uses tensors of a graph that was traced around it."""
        return any(tf.is_symbolic_tensor(tensor) for tensor in self._tensors)

    def _gradient(
        self,
        order: int,
        tensors: Sequence[tf.Tensor],
        cotangents: Sequence[Any],
        watched: frozenset[int] | None,
    ) -> list[Any]:
        """Apply the transposed derivative of an order at the inputs of a call of that order."""
        upstream = [
            tf.convert_to_tensor(cotangent)
            for cotangent, spec in zip(cotangents, self._order(order).results)
            if has_derivatives(spec)
        ]
        if not upstream:
            return [None] * len(tensors)
        if order > 0:
            self._refuse_missing(order, watched)
        following = self._order(order + 1)
        inputs = [*tensors, *upstream]
        # The next derivative can only be requested by inputs that a tape watches now.
        note = frozenset(i for i, tensor in enumerate(tensors) if is_watched(tensor)) or None
        gradients = iter(following.recorded(following.run, inputs, note))
        return [next(gradients) if i in following.present else None for i in range(len(tensors))]

    def _order(self, order: int) -> Order:
        with self._lock:
            precision = dtype_of_recomputed()
            is_low = precision is not None and order in (1, 2)
            while len(self._orders) <= order - is_low:
                self._orders.append(self._make_order(len(self._orders)))
            if precision is None or not is_low:
                return self._orders[order]
            if (order, precision) not in self._low:
                self._low[order, precision] = self._make_order(order, precision)
            return self._low[order, precision]

    def _make_order(self, order: int, precision: tf.DType | None = None) -> Order:
        """Trace and compile an order; the orders below exist already."""
        present: list[int] = []

        def traced(*tensors: tf.Tensor) -> list[tf.Tensor]:
            _refuse_if_nothing_is_recorded()
            results = self._evaluate(order, list(tensors))
            present[:] = [i for i, tensor in enumerate(results) if tensor is not None]
            return [tf.identity(results[i]) for i in present]

        cotangents = [spec for lower in self._orders[:order] for spec in lower.cotangents]
        with exact_functions():
            concrete = apart(lambda: concrete_function(traced, *self._specs, *cotangents))
        graph_def = graph_def_with_shapes(concrete.graph)
        flow = Dataflow(graph_def, concrete.graph)
        trace = OrderTrace(concrete, graph_def, self._function_results, cotangents)
        if order == 0:
            self._variables = captured_variables(concrete, flow)
            self._tensors = captured_tensors(concrete)
            self._programs = Programs(self._specs, self._variables, self._tensors)
            run = self._programs.compile_first(trace)
        elif order == 2:
            # The results J(x) v (the derivatives by the cotangents u, which follow the base) are
            # computed by a forward sweep that does not need u. The reverse sweep of order 1, which
            # computes with u, can wait for them. Otherwise both sweeps would run at once, and the
            # values of both would be in memory together.
            base = self._programs.base_count
            tangents = [place for place, i in enumerate(present) if i >= base]
            count = len(self._orders[0].cotangents)
            run = self._programs.compile_derivative(
                trace, tangents=tangents, held_back=count, precision=precision
            )
        else:
            run = self._programs.compile_derivative(trace, precision=precision)
        results = [spec_of(tensor) for tensor in concrete.outputs]
        recorded = Recorded(len(results), functools.partial(self._gradient, order))
        return Order(results, present, run, recorded, self._missing(order, concrete, flow, present))

    def _evaluate(self, order: int, tensors: list[tf.Tensor]) -> list[Any]:
        """Run the Python code of an order on arguments and cotangents, in the current trace.

        Above order 0, the result has an entry for each input of the order below, None if it is
        zero.
        """
        if order == 0:
            with tf.name_scope(_SCOPE):
                results = list(self._function(*tensors))
            self._function_results = [tensor.name for tensor in results]
            return results
        count = len(tensors) - len(self._orders[order - 1].cotangents)
        lower, cotangents = tensors[:count], tensors[count:]
        arguments, earlier = lower[: len(self._specs)], lower[len(self._specs) :]
        variables = [variable.source for variable in self._variables]
        # The state of the first run is not differentiated: in a trace it is not an input.
        state = itertools.repeat(None, self._programs.state_count)
        inputs = [*arguments, *variables, *self._tensors, *state, *earlier]
        differentiable = [source is not None and has_derivatives(source) for source in inputs]
        sources = list(itertools.compress(inputs, differentiable))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            results = self._evaluate(order - 1, lower)
            targets = [t for t in results if t is not None and has_derivatives(t)]
        with derivative_errors():
            raw = tape.gradient(targets, sources, cotangents)
        gradients = iter([densify(g, s.shape) for g, s in zip(raw, sources)])
        return [next(gradients) if is_source else None for is_source in differentiable]

    def _refuse_missing(self, order: int, watched: frozenset[int] | None) -> None:
        """Refuse a second or higher derivative that TensorFlow would leave out."""
        if (order, watched) not in self._complete:
            for lower in (0, 1) if order == 1 else (order,):
                refuse_missing_derivatives(self._order(lower).missing(watched))
            self._complete.add((order, watched))

    def _missing(
        self, order: int, concrete: Any, flow: Dataflow, present: Sequence[int]
    ) -> FindMissing:
        """Return the function that finds missing derivatives between inputs and results."""
        inside = {id(outside): tensor for tensor, outside in captures(concrete)}
        outside = [*(variable.handle for variable in self._variables), *self._tensors]
        count = len(self._specs)
        tensors = [*concrete.inputs[:count], *(inside.get(id(tensor)) for tensor in outside)]
        sources = [None if tensor is None else flow.vertex(tensor.name) for tensor in tensors]
        cotangent_count = sum(len(lower.cotangents) for lower in self._orders[:order])
        cotangents = [flow.vertex(t.name) for t in concrete.inputs[count : count + cotangent_count]]
        results = [flow.vertex(tensor.name) for tensor in concrete.outputs]
        base = self._programs.base_count
        # Above order 0, a result is the derivative by an input, and is not used if that input is
        # not watched. Results of the function, and derivatives by cotangents, are always used.
        inputs = present if order else [base] * len(results)

        def missing(watched: frozenset[int] | None) -> list[SuspectOperation]:
            used = frozenset(range(len(sources))) if watched is None else watched
            starts = [s for i, s in enumerate(sources) if s is not None and i in used]
            targets = [r for i, r in zip(inputs, results) if i in used or i >= base]
            suspects = find_suspects(flow, starts + cotangents, targets)
            return suspects.missing + suspects.wrong_at_values

        # If nothing is missing for any input, later calls do not need the graph.
        return missing if missing(None) else _nothing_is_missing


def _nothing_is_missing(watched: frozenset[int] | None) -> list[SuspectOperation]:
    del watched
    return []


def _refuse_if_nothing_is_recorded() -> None:
    """Refuse to trace while recording is stopped in this thread: derivatives would be zero."""
    with tf.GradientTape() as tape:
        probe = tf.zeros([])
        tape.watch(probe)
        copy = tf.identity(probe)
    if tape.gradient(copy, probe) is None:
        raise RecomputeError(
            "the function is called where TensorFlow records no derivatives, as it does inside "
            "tf.recompute_grad or keras.remat",
            "a call that can be differentiated",
            "use hvp.recompute instead of tf.recompute_grad or keras.remat",
        )
