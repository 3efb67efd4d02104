"""Functions recorded on a tape, and products with their Jacobians.

Everything here works both where TensorFlow runs eagerly, for the tape engine, and where it traces a
graph, which the graph engine takes apart afterwards.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.corrections import corrected_derivatives
from hvp._derivatives.gradient import densify, value_and_gradient
from hvp._derivatives.suspects import (
    derivative_errors,
    find_suspects,
    refuse_missing_derivatives,
)
from hvp._errors import SecondDerivativeError
from hvp._graphs.dataflow import Dataflow
from hvp._runtime.context import assigned
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies

# The collection of a graph that lists what is differentiated by what in it: pairs of lists of
# variables and names of tensors. The trace looks for missing derivatives between the two. Tensors
# would keep the graph in memory, because graphs that are traced inside it copy its collections.
DIFFERENTIATED = "hvp_differentiated"

_none_is_doubtful = contextvars.ContextVar("hvp_none_is_doubtful", default=False)


def doubtful_nones() -> contextlib.AbstractContextManager[None]:
    """Let functions taped in this context refuse a derivative for which TensorFlow returns None.

    It may be a zero, or a derivative that does not exist; only a trace of the function tells.
    """
    return assigned(_none_is_doubtful, True)


class TapedFunction:
    """A function evaluated on a persistent tape, so that its Jacobian `J` can be multiplied.

    `function` takes nothing and is called once, here; it reads the very objects in `inputs`. It
    returns a list of tensors, `outputs`, with None where a result is identically zero. `once` says
    that a rule multiplies by the Jacobian or its transpose a single time. The tape then need not be
    persistent where a graph is traced; under a persistent tape, TensorFlow would trace functions of
    the loss for derivatives of every order, and fail at those it does not have.
    """

    def __init__(
        self,
        function: Callable[[], Sequence[tf.Tensor | None]],
        inputs: Sequence[tf.Variable | tf.Tensor],
        *,
        once: bool = False,
    ) -> None:
        self._inputs = list(inputs)
        self._refuses_none = _none_is_doubtful.get()
        self._transposed: tuple[tf.GradientTape, list[Any], list[tf.Tensor]] | None = None
        # Without watch_accessed_variables=False a frozen layer's part would be recorded too.
        persistent = tf.executing_eagerly() or not once
        with tf.GradientTape(persistent, watch_accessed_variables=False) as tape:
            tape.watch(self._inputs)
            self.outputs = list(function())
        self._tape = tape
        _note_differentiated(self._inputs, self.outputs)

    def vjp(self, cotangents: Sequence[Any]) -> list[tf.Tensor | None]:
        """Return `J^T u`, shaped and typed like the inputs, with None for zeros.

        Cotangents are shaped and typed like `outputs`, or None for zeros; those of a None output
        are ignored.
        """
        gradient = _differentiate(self._tape, self.outputs, self._inputs, cotangents)
        return self._dense(gradient, self._inputs)

    def jvp(self, tangents: Sequence[Any]) -> list[tf.Tensor | None]:
        """Return `J v`, by differentiating `J^T u` with respect to `u`.

        `J^T u` is linear in `u`, so that its derivative is the same at every `u`: the first call
        records it at zero on a second tape, which later calls share. Among tangents and results,
        None stands for zeros.
        """
        if self._transposed is None:
            with Uninterrupted():
                self._transposed = self._record_transposed()
        tape, transposed, cotangents = self._transposed
        gradient = _differentiate(tape, transposed, cotangents, tangents)
        results = iter(self._dense(gradient, cotangents))
        return [None if output is None else next(results) for output in self.outputs]

    def _record_transposed(self) -> tuple[tf.GradientTape, list[Any], list[tf.Tensor]]:
        outputs = [output for output in self.outputs if output is not None]
        cotangents = [tf.zeros_like(output) for output in outputs]

        def transposed(*cotangents: tf.Tensor) -> list[Any]:
            gradient = _differentiate(self._tape, outputs, self._inputs, cotangents)
            return [densify(g, x.shape) for g, x in zip(gradient, self._inputs)]

        if tf.executing_eagerly() and not self._refuses_none:
            refuse_missing_in(transposed, cotangents)
        with (
            corrected_derivatives(),
            tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape,
        ):
            tape.watch(cotangents)
            results = transposed(*cotangents)
        _note_differentiated(cotangents, results)
        return tape, results, cotangents

    def _dense(self, gradient: Sequence[Any], like: Sequence[Any]) -> list[tf.Tensor | None]:
        if self._refuses_none and any(g is None for g in gradient):
            raise SecondDerivativeError(
                "TensorFlow returns None for a derivative, which may be a true zero or a "
                "derivative it does not have; the function could not be traced to tell",
                "a derivative, or a function that can be traced by tf.function",
                "write the loss with TensorFlow operations only (no .numpy(), no Python numbers "
                "made from tensors)",
            )
        return [densify(g, x.shape) for g, x in zip(gradient, like)]


class TapedGradient(TapedFunction):
    """The gradient of a scalar on a tape: its Jacobian is the Hessian.

    `loss` takes nothing and returns a real scalar, which becomes `value`; `outputs` is its
    gradient.
    """

    def __init__(
        self,
        loss: Callable[[], Any],
        inputs: Sequence[tf.Variable | tf.Tensor],
        *,
        once: bool = False,
    ) -> None:
        def gradient() -> list[tf.Tensor | None]:
            self.value, parts = value_and_gradient(loss, inputs)
            return parts

        super().__init__(gradient, inputs, once=once)
        _note_differentiated(inputs, [self.value])


def refuse_missing_in(linear: Callable[..., Sequence[Any]], vectors: Sequence[tf.Tensor]) -> None:
    """Raise SecondDerivativeError if TensorFlow would get the transpose of a linear function wrong.

    The operations between the vectors and the result differ from those of the function whose
    derivative it is: the gradient of an image resize is the operation TensorFlow cannot
    differentiate, not the resize.
    """
    specs = [tf.TensorSpec(vector.shape, vector.dtype) for vector in vectors]
    concrete = tf.function(linear, autograph=False).get_concrete_function(*specs)
    flow = Dataflow(concrete.graph.as_graph_def(), concrete.graph)
    sources = [flow.vertex(tensor.name) for tensor in concrete.inputs[: len(specs)]]
    targets = [flow.vertex(tensor.name) for tensor in concrete.outputs]
    suspects = find_suspects(flow, sources, targets)
    refuse_missing_derivatives(suspects.missing + suspects.wrong_at_values)


def _note_differentiated(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Note in the graph being traced, if any, what is differentiated with respect to what."""
    if not tf.executing_eagerly():
        pair = tuple(
            [end if isinstance(end, tf.Variable) else end.name for end in ends if end is not None]
            for ends in (inputs, outputs)
        )
        tf.compat.v1.get_default_graph().add_to_collection(DIFFERENTIATED, pair)


def _differentiate(
    tape: tf.GradientTape, targets: Sequence[Any], sources: Sequence[Any], weights: Sequence[Any]
) -> list[Any]:
    """Call `tape.gradient`, with None among targets and weights taken as zero."""
    pairs = [(t, w) for t, w in zip(targets, weights) if t is not None and w is not None]
    if not pairs:
        return [None] * len(sources)
    with Uninterrupted(), derivative_errors(), corrected_derivatives():
        gradient = outside_strategies(tape.gradient)
        return gradient([t for t, _ in pairs], list(sources), [w for _, w in pairs])
