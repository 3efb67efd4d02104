"""A function of tensors, traced for one signature, whose derivatives are computed again.

The function is the order 0; the transposed derivative of one order is the next. Each order is
traced from the function itself, under as many nested tapes, and made repeatable. All that is
recorded of a call are its inputs; its derivative is a call of the next order on these and the
cotangents, of which again the inputs are recorded. So derivatives exist to any order, and none
keeps what is inside.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import tensorflow as tf

from hvp._derivatives.doubts import (
    Doubt,
    derivative_errors,
    find_doubts,
    refuse_missing_derivatives,
)
from hvp._derivatives.exact import exact_functions
from hvp._derivatives.gradient import densify
from hvp._derivatives.replace import replace_operations
from hvp._errors import RecomputeError
from hvp._graphs.concrete import (
    captured_resources,
    captures,
    concrete_function,
    is_read,
    is_written,
)
from hvp._graphs.dataflow import Dataflow
from hvp._graphs.inline import KEPT_WHOLE, inline_calls
from hvp._graphs.parts import import_part, without_names
from hvp._recompute.recorded import Recorded, apart, is_watched, run_unseen
from hvp._recompute.replay import (
    draw_from_seeds,
    names_of_kept,
    order_after,
    read_from_inputs,
    replay,
    same_nodes,
    with_effects,
)
from hvp._recompute.schedule import in_order
from hvp._runtime.interrupts import Uninterrupted
from hvp._vectors.resources import Resource

# The scope of the function's operations.
_SCOPE = "recomputed"

# Finds missing derivatives by some inputs of an order, given by their places; by all, if None.
_Doubts = Callable[[Optional[frozenset[int]]], list[Doubt]]


class Segment:
    """A traced function of tensors, to be called and differentiated as often as wanted.

    The inputs of a call are the function's arguments, the values of the variables it reads, tensors
    it uses from outside, and what is kept of its first run (the *base*); in the call of an order
    the cotangents of each order up to it follow.

    Parameters
    ----------
    function : callable
        Takes tensors, returns a list of tensors.
    specs : sequence of tf.TensorSpec
        Of its arguments.
    """

    def __init__(
        self, function: Callable[..., Sequence[tf.Tensor]], specs: Sequence[tf.TensorSpec]
    ) -> None:
        self._function = function
        self._specs = list(specs)
        self._lock = threading.RLock()
        self._variables: list[_Variable] = []
        self._closed: list[tf.Tensor] = []
        self._first: tuple[Any, list[str], list[str]]
        self._made: list[str] = []
        self._kept: list[str] = []
        self._kept_specs: list[tf.TensorSpec] = []
        self._orders: list[_Order] = []
        self._certain: set[tuple[int, frozenset[int] | None]] = set()
        self._order(0)

    def __call__(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Call the function; of what it computes on the way nothing stays."""
        first = self._order(0)
        inputs = [*arguments, *(variable.read() for variable in self._variables), *self._closed]
        made = run_unseen(first.run, inputs)
        results, kept = made[: len(first.results)], made[len(first.results) :]
        return first.recorded(lambda *_: results, [*inputs, *kept])

    @property
    def depends_on_graph(self) -> bool:
        """Whether the function uses tensors of a graph that was traced around it."""
        return any(tf.is_symbolic_tensor(tensor) for tensor in self._closed)

    @property
    def _base(self) -> int:
        return len(self._specs) + len(self._variables) + len(self._closed) + len(self._kept)

    def _gradient(
        self,
        order: int,
        tensors: Sequence[tf.Tensor],
        cotangents: Sequence[Any],
        watched: frozenset[int] | None,
    ) -> list[Any]:
        """Apply the transposed derivative of an order, at the inputs of a call of it."""
        given = [
            tf.convert_to_tensor(c)
            for c, spec in zip(cotangents, self._order(order).results)
            if _has_derivatives(spec)
        ]
        if not given:
            return [None] * len(tensors)
        if order > 0:
            self._refuse_missing(order, watched)
        following = self._order(order + 1)
        inputs = [*tensors, *given]
        # By which of these someone may want the next derivative.
        note = frozenset(i for i, tensor in enumerate(tensors) if is_watched(tensor)) or None
        found = iter(following.recorded(following.run, inputs, note))
        return [next(found) if i in following.present else None for i in range(len(tensors))]

    def _order(self, order: int) -> _Order:
        with self._lock:
            while len(self._orders) <= order:
                self._orders.append(self._make(len(self._orders)))
            return self._orders[order]

    def _make(self, order: int) -> _Order:
        """Trace an order and make it ready to be run."""
        present: list[int] = []

        def whole(*tensors: tf.Tensor) -> list[tf.Tensor]:
            _refuse_if_nothing_is_recorded()
            made = self._derivative(order, list(tensors))
            present[:] = [i for i, tensor in enumerate(made) if tensor is not None]
            return [tf.identity(made[i]) for i in present]

        cotangents = [spec for o in self._orders for spec in o.cotangents]
        with exact_functions():
            concrete = apart(lambda: concrete_function(whole, *self._specs, *cotangents))
        graph_def = concrete.graph.as_graph_def()
        flow = Dataflow(graph_def, concrete.graph)
        if order == 0:
            self._find_outside(concrete, flow)
        results = [_spec(tensor) for tensor in concrete.outputs]
        run = self._repeatable(order, concrete, graph_def, cotangents, present)
        recorded = Recorded(len(results), functools.partial(self._gradient, order))
        return _Order(results, present, run, recorded, self._doubts(order, concrete, flow, present))

    def _derivative(self, order: int, tensors: list[tf.Tensor]) -> list[Any]:
        """Run the Python code of an order on arguments and cotangents; None is zero.

        The result of an order above 0 has an entry for each input of the order below.
        """
        if order == 0:
            with tf.name_scope(_SCOPE):
                made = list(self._function(*tensors))
            self._made = [tensor.name for tensor in made]
            return made
        count = len(tensors) - len(self._orders[order - 1].cotangents)
        inner, cotangents = tensors[:count], tensors[count:]
        arguments, earlier = inner[: len(self._specs)], inner[len(self._specs) :]
        variables = [variable.source for variable in self._variables]
        inputs = [*arguments, *variables, *self._closed, *(None for _ in self._kept), *earlier]
        differentiable = [source is not None and _has_derivatives(source) for source in inputs]
        sources = list(itertools.compress(inputs, differentiable))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            made = self._derivative(order - 1, inner)
            targets = [t for t in made if t is not None and _has_derivatives(t)]
        with derivative_errors():
            found = tape.gradient(targets, sources, cotangents)
        gradients = iter([densify(g, s.shape) for g, s in zip(found, sources)])
        return [next(gradients) if there else None for there in differentiable]

    def _find_outside(self, concrete: Any, flow: Dataflow) -> None:
        """Find what the function uses besides its arguments: variables and tensors."""
        known = {id(variable.handle): variable for variable in concrete.variables}
        targets = [flow.vertex(tensor.name) for tensor in concrete.outputs]
        reaching = flow.reachable(targets, backward=True)
        for resource, vertex in captured_resources(concrete, flow, ()):
            if not is_read(flow, vertex, reaching):
                continue
            variable = known.get(id(resource.handle))
            if not is_written(flow, vertex):
                self._variables.append(_Variable(resource, variable))
            elif variable is not None and variable.trainable and _has_derivatives(variable):
                raise RecomputeError(
                    f"the function changes a variable that it is to be differentiated by: "
                    f"{resource.name!r}",
                    "a function that changes no trainable variable that it reads",
                    "update it outside, or create it with trainable=False",
                )
        for _, outside in captures(concrete):
            if outside.dtype == tf.variant and tf.is_symbolic_tensor(outside):
                raise RecomputeError(
                    "the function uses a TensorArray or list of tensors from outside",
                    "tensors",
                    "stack it, and pass the tensor",
                )
        self._closed = [
            outside
            for _, outside in captures(concrete)
            if outside.dtype not in (tf.resource, tf.variant)
        ]

    def _repeatable(
        self,
        order: int,
        concrete: Any,
        graph_def: Any,
        cotangents: Sequence[tf.TensorSpec],
        present: Sequence[int],
    ) -> Any:
        """Compile the graph of an order as a function of all inputs of its calls."""
        flat, rename = inline_calls(replace_operations(graph_def))
        results = [rename(tensor.name) for tensor in concrete.outputs]
        own = [rename(tensor.name) for tensor in concrete.inputs]
        arguments, own = own[: len(self._specs)], own[len(self._specs) :]
        later, own = own[: len(cotangents)], own[len(cotangents) :]
        captured = dict(zip(own, concrete.captured_inputs))
        by_tensor = {id(tensor): name for name, tensor in captured.items()}
        values = [f"value_{i}:0" for i in range(len(self._variables))]
        closed = [by_tensor.get(id(t), f"unused_{i}:0") for i, t in enumerate(self._closed)]
        read_from_inputs(
            flat,
            {
                by_tensor[id(variable.handle)]: (value, variable.dtype)
                for value, variable in zip(values, self._variables)
                if id(variable.handle) in by_tensor
            },
        )
        draw_from_seeds(flat)
        inputs = [*arguments, *values, *closed]
        others = {name: t for name, t in captured.items() if name not in closed}
        pure = replay(flat, results, [*inputs, *later, *others])
        specs = [_spec(x) for x in (*self._specs, *self._variables, *self._closed)]
        made = [rename(name) for name in self._made]
        if order == 0:
            self._first = (flat, made, inputs)
            self._kept = pure.kept
            part = with_effects(flat, pure, results, [*inputs, *others])
            run = _compiled(part, others, inputs, specs, [*results, *pure.kept], whole=False)
            self._kept_specs = [_spec(tensor) for tensor in run.outputs[len(results) :]]
            return run
        first, made_first, inputs_first = self._first
        pairs = same_nodes(first, made_first, flat, made, dict(zip(inputs, inputs_first)))
        kept = names_of_kept(flat, pure, self._kept, pairs)
        part = pure.part
        if order == 2:
            # Results for the cotangents of order 1 are tangents of the function's results: on the
            # way up. What order 1 computes on the way down can wait until they are there.
            tangents = [name for name, i in zip(results, present) if i >= self._base]
            held = {n: spec.dtype for n, spec in zip(later, self._orders[0].cotangents)}
            part = order_after(part, held, tangents)
        names, specs = [*inputs, *kept, *later], [*specs, *self._kept_specs, *cotangents]
        return _compiled(part, others, names, specs, results, whole=True)

    def _refuse_missing(self, order: int, watched: frozenset[int] | None) -> None:
        """Refuse a second or higher derivative that TensorFlow would leave out."""
        if (order, watched) not in self._certain:
            for lower in (0, 1) if order == 1 else (order,):
                refuse_missing_derivatives(self._order(lower).missing(watched))
            self._certain.add((order, watched))

    def _doubts(self, order: int, concrete: Any, flow: Dataflow, present: Sequence[int]) -> _Doubts:
        """Return what finds the missing derivatives between inputs of an order and its results."""
        inside = {id(outside): tensor for tensor, outside in captures(concrete)}
        outside = [*(variable.handle for variable in self._variables), *self._closed]
        count = len(self._specs)
        tensors = [*concrete.inputs[:count], *(inside.get(id(tensor)) for tensor in outside)]
        sources = [None if tensor is None else flow.vertex(tensor.name) for tensor in tensors]
        cotangents = sum(len(lower.cotangents) for lower in self._orders[:order])
        always = [flow.vertex(t.name) for t in concrete.inputs[count : count + cotangents]]
        results = [flow.vertex(tensor.name) for tensor in concrete.outputs]
        # Above order 0 a result is a derivative by an input: of no use if that is not watched.
        inputs = present if order else [self._base] * len(results)

        def missing(watched: frozenset[int] | None) -> list[Doubt]:
            used = frozenset(range(len(sources))) if watched is None else watched
            starts = [s for i, s in enumerate(sources) if s is not None and i in used]
            targets = [r for i, r in zip(inputs, results) if i in used or i >= self._base]
            doubts = find_doubts(flow, starts + always, targets)
            return doubts.missing + doubts.wrong_at_values

        # The graph is let go where it is known by now that nothing is missing.
        return missing if missing(None) else _nothing_is_missing


def _nothing_is_missing(watched: frozenset[int] | None) -> list[Doubt]:
    del watched
    return []


@dataclass(frozen=True, eq=False)
class _Order:
    """One order of derivative of a function.

    Attributes
    ----------
    results : list of tf.TensorSpec
        Of what a call returns.
    present : list of int
        Above order 0: which inputs of the order below the results are derivatives by.
    run : ConcreteFunction
        Takes all inputs of a call.
    recorded : Recorded
        What a call is to those who record derivatives.
    missing : callable
        Finds operations without a derivative between inputs and results.
    """

    results: list[tf.TensorSpec]
    present: list[int]
    run: Any
    recorded: Recorded
    missing: _Doubts

    @property
    def cotangents(self) -> list[tf.TensorSpec]:
        """The results that have cotangents."""
        return [spec for spec in self.results if _has_derivatives(spec)]


@dataclass(frozen=True)
class _Variable:
    """A variable that a function reads and does not change.

    Attributes
    ----------
    resource : Resource
        Its buffer.
    variable : tf.Variable or None
        Itself, if it is known.
    """

    resource: Resource
    variable: tf.Variable | None

    @property
    def handle(self) -> tf.Tensor:
        return self.resource.handle

    @property
    def dtype(self) -> tf.DType:
        return self.resource.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(None) if self.variable is None else self.variable.shape

    @property
    def source(self) -> Any:
        """What tapes watch."""
        return self.handle if self.variable is None else self.variable

    def read(self) -> tf.Tensor:
        """Return the value, in the sight of tapes."""
        return self.resource.read() if self.variable is None else self.variable.read_value()


# By what they compute: layers that are alike share a function, which TensorFlow prepares once.
_shared: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def _compiled(
    part: Any,
    others: dict[str, tf.Tensor],
    inputs: Sequence[str],
    specs: Sequence[tf.TensorSpec],
    wanted: Sequence[str],
    *,
    whole: bool,
) -> Any:
    """Make a part of a graph a function of some of its tensors.

    Parameters
    ----------
    part : GraphDef
        The part.
    others : dict of str to tf.Tensor
        What it takes from outside.
    inputs : sequence of str
        The tensors it is to be a function of.
    specs : sequence of tf.TensorSpec
        Their types and shapes.
    wanted : sequence of str
        Its results.
    whole : bool
        Whether it is put in an order, and graphs that call it may not dissolve it. So it begins
        when all of its inputs are there, cotangents too, and nobody merges what it computes with
        what was computed before, or takes it for something to be computed once.
    """
    taken = {*wanted, *(tensor for node in part.node for tensor in node.input)}
    others = {name: tensor for name, tensor in others.items() if name in taken}
    key = (whole, without_names(part, inputs, wanted), tuple(specs))
    found = None if others else _shared.get(key)
    if found is not None:
        return found
    if whole:
        part = in_order(part, {**_specs_of(others), **dict(zip(inputs, specs))}, wanted)

    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return import_part(part, {**others, **dict(zip(inputs, tensors))}, wanted)

    # TensorFlow names a graph's function after the Python one.
    def hvp_recomputed(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return run(*tensors)

    assert hvp_recomputed.__name__ == KEPT_WHOLE
    function = tf.function(
        hvp_recomputed if whole else run,
        autograph=False,
        experimental_attributes={"_noinline": True} if whole else None,
    )
    with Uninterrupted():
        made = function.get_concrete_function(*specs)
    if not others:
        _shared[key] = made
    return made


def _specs_of(tensors: dict[str, tf.Tensor]) -> dict[str, tf.TensorSpec]:
    return {name: _spec(tensor) for name, tensor in tensors.items()}


def _spec(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _has_derivatives(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _refuse_if_nothing_is_recorded() -> None:
    """Refuse to trace where derivatives would come out zero.

    TensorFlow can be told to record nothing in a thread, and a trace made then keeps to that.
    """
    with tf.GradientTape() as tape:
        probe = tf.zeros([])
        tape.watch(probe)
        copy = tf.identity(probe)
    if tape.gradient(copy, probe) is None:
        raise RecomputeError(
            "the function is called where TensorFlow records no derivatives, as inside "
            "tf.recompute_grad or keras.remat",
            "a call that can be differentiated",
            "use hvp.recompute in place of those",
        )
