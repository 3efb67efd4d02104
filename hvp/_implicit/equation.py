"""The solution of an equation as a function of everything that the equation depends on.

For `F(w, t) = 0` the implicit function theorem says `dw = -A^-1 B dt`, where `A` and `B` are the
derivatives of `F` in `w` and `t`. A tape that asks for the gradient of something that depends on
the solution `w` passes the cotangent `g`, and gets `-B^T A^-T g`: one linear system with `A^T`, and
one product with `B^T`. Both are functions of `w`, `t` and `g` again, so that tapes around tapes get
derivatives of any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._derivatives.belonging import may_be_recorded
from hvp._derivatives.exact import pulled_back
from hvp._errors import StaleOperatorError, quoted
from hvp._graphs.private import record
from hvp._runtime.strategies import in_another_thread

Tensors = Sequence[tf.Tensor]


@dataclass(frozen=True)
class Equation:
    """An equation `F(w, t) = 0`, whose derivatives are taken at a solution.

    `sources` are what the equation reads: variables, or tensors. `pullback` takes the values of
    `w`, those of `t`, and a cotangent `v`, and returns the parts of `A^T v` and then those of
    `B^T v`, as a tape can differentiate them. `solve` takes the values of `w`, a right-hand side,
    and whether the matrix is `A^T` or `A`, and returns the solution, which no tape needs to follow.
    """

    sources: Sequence[Any]
    pullback: Callable[[Tensors, Tensors, Tensors], Tensors]
    solve: Callable[[Tensors, Tensors, bool], Tensors]

    def solution(self, find: Callable[[], Tensors]) -> list[tf.Tensor]:
        """Return the solution that `find` finds, as a function of the sources."""
        outer = [tf.convert_to_tensor(source) for source in self.sources]
        found: list[tf.Tensor] = []  # the tensors that tapes know, not those that were computed

        @tf.custom_gradient
        def solution(*outer: tf.Tensor) -> Any:
            values = _apart(find)

            def backward(*upstream: tf.Tensor, variables: Any = None) -> Any:
                # A forward accumulator asks before tapes know the result.
                w = found or self.solution(lambda: values)
                adjoint = self._linear(w, outer, upstream, transposed=True)
                pulled = self.pullback(w, outer, adjoint)[len(w) :]
                return _slopes([-slope for slope in pulled], variables)

            return values, backward

        found += solution(*outer)
        return found

    def _linear(
        self,
        w: Tensors,
        outer: Tensors,
        right: Tensors,
        *,
        transposed: bool,
        known: Tensors | None = None,
    ) -> list[tf.Tensor]:
        """Solve with `A^T` or `A`; a function of all three, whose value may be `known`."""
        found: list[tf.Tensor] = []
        count = len(w) + len(outer)

        @tf.custom_gradient
        def solution(*all_of: tf.Tensor) -> Any:
            own = all_of[: len(w)], all_of[len(w) : count]
            values = known or _apart(self.solve, own[0], all_of[count:], transposed)

            def backward(*upstream: tf.Tensor, variables: Any = None) -> Any:
                x = found or self._linear(*own, right, transposed=transposed, known=values)
                other = self._linear(*own, upstream, transposed=not transposed)
                points = [*own[0], *own[1]]
                if _no_tape_records():
                    nan = tf.add_n([math.nan * tf.reduce_sum(part) for part in upstream])
                    slopes = [tf.fill(tf.shape(p), tf.cast(nan, p.dtype)) for p in points]
                    return _slopes([*slopes, *other], variables)
                # The derivative of the matrix, between the solution and that of the other system.
                left, inner = (other, x) if transposed else (x, other)
                slopes = pulled_back(
                    lambda: self.pullback(*own, inner)[: len(w)],
                    points,
                    [-part for part in left],
                )
                return _slopes([*slopes, *other], variables)

            return values, backward

        found += solution(*w, *outer, *right)
        return found


def _no_tape_records() -> bool:
    """Whether a forward accumulator asks for a gradient, while tapes record nothing.

    The derivative of a matrix is not known then. Only an accumulator around a tape needs it.
    """
    probe = tf.constant(0.0)
    with tf.GradientTape() as tape:
        tape.watch(probe)
        recorded = tf.identity(probe)
    return tape.gradient(recorded, probe) is None


def at_tensors(
    function: Callable[..., Tensors],
    sources: Sequence[Any],
    values: Tensors,
    arguments: Tensors,
) -> list[tf.Tensor]:
    """Return `function(*arguments)`, which reads `sources`, as a function of their `values`.

    A variable has to have the value that is passed for it: StaleOperatorError is raised otherwise,
    and in a graph, which cannot raise errors if XLA compiles it, the result is NaN.
    """
    count = len(values)

    @tf.custom_gradient
    def evaluated(*both: tf.Tensor) -> Any:
        own = both[count:]

        def backward(*upstream: tf.Tensor, variables: Any = None) -> Any:
            pulled = _gradient_function(function, sources, len(own))
            slopes = at_tensors(pulled, sources, both[:count], [*own, *upstream])
            return _slopes(slopes, variables)

        return _if_current(sources, both[:count], _apart(function, *own)), backward

    return list(evaluated(*values, *arguments))


def _apart(function: Callable[..., Tensors], *arguments: Any) -> list[tf.Tensor]:
    """Call a function without the tapes of the caller, which would record each of its steps.

    In a graph it becomes a function of its own: beside two tapes, TensorFlow prepares the gradient
    of every loop, in a form that XLA cannot compile.
    """
    if not may_be_recorded():
        return list(function(*arguments))
    if tf.executing_eagerly():
        return list(in_another_thread(function, *arguments))
    graph = tf.compat.v1.get_default_graph()
    whole = tf.function(lambda: function(*arguments), autograph=False)

    def traced() -> Any:
        with graph.as_default():
            return whole.get_concrete_function()

    concrete = in_another_thread(traced)
    with record.stop_recording():
        return list(concrete())


def _gradient_function(
    function: Callable[..., Tensors], sources: Sequence[Any], count: int
) -> Callable[..., Tensors]:
    """Return the gradients in sources and `count` arguments; they take these and cotangents."""

    def gradients(*both: tf.Tensor) -> Tensors:
        own, upstream = both[:count], both[count:]
        return pulled_back(lambda: function(*own), [*sources, *own], list(upstream))

    return gradients


def _slopes(slopes: Sequence[Any], variables: Any) -> Any:
    """Return gradients as `tf.custom_gradient` takes them: none in variables that were read."""
    dense = [tf.convert_to_tensor(slope) for slope in slopes]
    return dense if variables is None else (dense, [None] * len(variables))


def _if_current(sources: Sequence[Any], values: Tensors, results: Tensors) -> list[tf.Tensor]:
    """Return the results if variables still have the values that are passed for them."""
    pairs = [(s, v) for s, v in zip(sources, values) if isinstance(s, tf.Variable)]
    same = [tf.reduce_all(tf.equal(variable, value)) for variable, value in pairs]
    if not tf.executing_eagerly():
        is_current = tf.reduce_all(same)
        return [tf.where(is_current, x, tf.cast(math.nan, x.dtype)) for x in results]
    refuse_changes([variable.name for (variable, _), is_same in zip(pairs, same) if not is_same])
    return list(results)


def refuse_changes(changed: Sequence[str]) -> None:
    """Raise `StaleOperatorError` if any variables have changed since the solution was found."""
    if changed:
        raise StaleOperatorError(
            f"variables have changed since the solution was found: {quoted(changed)}",
            "a gradient at the values that the solution belongs to",
            "take the gradient before you assign, or solve again",
        )
