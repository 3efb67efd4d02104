"""Runs a function so that tapes and graphs record it as a single operation."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from hvp._errors import RecomputeError
from hvp._graphs.dataflow import RECOMPUTED_GRADIENT
from hvp._graphs.private import record
from hvp._keras.scope import carried_over

_serials = itertools.count()

# Takes the tensors of a call, the cotangents of its results (None or zeros for results that are not
# used), and the note of the call. Returns the cotangents of the tensors.
Gradient = Callable[[Sequence[tf.Tensor], Sequence[Any], Any], list[Any]]


class Recorded:
    """An operation of `count` results with a custom derivative.

    `gradient` returns None for cotangents that are zero, and takes None for a note that is unknown.
    """

    def __init__(self, count: int, gradient: Gradient) -> None:
        self._count = count
        self._gradient = gradient

    @functools.cached_property
    def _name(self) -> str:
        """The gradient's own type, created for graphs only, because TensorFlow never removes it."""
        name, weak = f"{RECOMPUTED_GRADIENT}{next(_serials)}", weakref.ref(self)

        @tf.RegisterGradient(name)
        def registered(operation: Any, *cotangents: Any) -> list[Any]:
            recorded = weak()
            if recorded is None or operation is None:
                raise RecomputeError(
                    "a graph calls a recomputed function that no longer exists, and cannot be "
                    "differentiated",
                    "a graph in the process where the recomputed function was made, while the "
                    "function exists",
                    "keep a reference to the recomputed function; to export a model, use the "
                    "model without recomputation",
                )
            return recorded.graph_gradient(operation, *cotangents)

        return name

    def __call__(
        self,
        run: Callable[..., Sequence[tf.Tensor]],
        tensors: Sequence[tf.Tensor],
        note: Any = None,
    ) -> list[tf.Tensor]:
        """Return the results of `run`, recorded as one call of this operation.

        The `note` is passed to the gradient, unless TensorFlow differentiates a graph by its
        operations.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if tf.executing_eagerly():
            with record.stop_recording():
                results = [tf.identity(result) for result in run(*tensors)]
            backward = lambda *c: self._gradient(tensors, c, note)  # noqa: E731
            record.record_operation(RECOMPUTED_GRADIENT, results, tensors, backward)
            return results
        with record.stop_recording():
            results = list(run(*tensors))
            # Without a tape, TensorFlow differentiates a graph by its operations. So the call
            # ends in an IdentityN over results and inputs, whose registered gradient passes the
            # cotangents of the results to the inputs.
            graph = tf.compat.v1.get_default_graph()
            graph.add_to_collection(RECOMPUTED_GRADIENT, self)  # keeps it alive with the graph
            with graph.gradient_override_map({"IdentityN": self._name}):
                copies = tf.raw_ops.IdentityN(input=[*results, *tensors])
        operation = copies[0].op
        record.record_operation(
            self._name,
            copies,
            list(operation.inputs),
            lambda *c: self.graph_gradient(operation, *c, note=note),
        )
        return list(copies[: len(results)])

    def graph_gradient(self, operation: Any, *cotangents: Any, note: Any = None) -> list[Any]:
        """Return the gradient of the `IdentityN` that represents a call in a graph."""
        tensors = list(operation.inputs)[self._count :]
        return [None] * self._count + self._gradient(tensors, cotangents[: self._count], note)


def run_unseen(
    run: Callable[..., Sequence[tf.Tensor]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the results of `run`, without recording anything on a tape."""
    with record.stop_recording():
        return list(run(*tensors))


def apart(function: Callable[[], Any]) -> Any:
    """Call a function so that no tape or accumulator outside of it records what it does.

    Outer tapes would otherwise keep symbolic tensors of a trace, and outer accumulators would add
    operations to its graph. If recording is switched off outside, tapes in the function would
    record nothing. TensorFlow keeps all of these per thread, so the function runs in another one.
    """
    if tf.distribute.has_strategy():  # replicas are identified by their threads
        return function()
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def work() -> Any:
        with graph.as_default() if graph is not None else contextlib.nullcontext():
            return function()

    with carried_over() as there, ThreadPoolExecutor(1) as executor:
        return executor.submit(contextvars.copy_context().run, there, work).result()


def is_watched(tensor: tf.Tensor) -> bool:
    """Whether a tape that is recording watches a tensor."""
    return bool(record.should_record_backprop([tensor]))
