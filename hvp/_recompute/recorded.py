"""Running something so that all that records derivatives takes it for one operation."""

from __future__ import annotations

import contextlib
import contextvars
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

# From tensors, cotangents of the results (None or zero where there are none), and what was noted at
# the call, to cotangents of the tensors.
Gradient = Callable[[Sequence[tf.Tensor], Sequence[Any], Any], list[Any]]


class Recorded:
    """An operation with a derivative of its own.

    Parameters
    ----------
    count : int
        How many results it has.
    gradient : callable
        Takes the tensors the operation was called with, the cotangents of its results, and the
        note of the call, None if that is not known; returns cotangents of the tensors, None for
        zero.
    """

    def __init__(self, count: int, gradient: Gradient) -> None:
        self._count = count
        self._gradient = gradient
        self._name = f"{RECOMPUTED_GRADIENT}{next(_serials)}"
        weak = weakref.ref(self)  # what is registered stays for ever

        @tf.RegisterGradient(self._name)
        def registered(operation: Any, *cotangents: Any) -> list[Any]:
            recorded = weak()
            if recorded is None or operation is None:
                raise RecomputeError(
                    "a derivative is asked for of a recomputed function that is gone",
                    "a graph in the process and as long as the function lives",
                    "keep the recomputed function; to export a model, use the one without",
                )
            return recorded.graph_gradient(operation, *cotangents)

    def __call__(
        self,
        run: Callable[..., Sequence[tf.Tensor]],
        tensors: Sequence[tf.Tensor],
        note: Any = None,
    ) -> list[tf.Tensor]:
        """Return what `run` makes of the tensors; the derivative is this operation's."""
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if tf.executing_eagerly():
            with record.stop_recording():
                results = [tf.identity(result) for result in run(*tensors)]
            record.record_operation(
                self._name, results, tensors, lambda *c: self._gradient(tensors, c, note)
            )
            return results
        with record.stop_recording():
            results = list(run(*tensors))
            # Where there is no tape, derivatives are found by the operations of the graph.
            graph = tf.compat.v1.get_default_graph()
            graph.add_to_collection(RECOMPUTED_GRADIENT, self)  # to live as long as the graph
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
        """Return the gradient of the operation of a graph that stands for a call."""
        tensors = list(operation.inputs)[self._count :]
        return [None] * self._count + self._gradient(tensors, cotangents[: self._count], note)


def run_unseen(
    run: Callable[..., Sequence[tf.Tensor]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return what `run` makes of the tensors, without a trace on any tape."""
    with record.stop_recording():
        return list(run(*tensors))


def apart(function: Callable[[], Any]) -> Any:
    """Call a function where nothing that records derivatives outside of it sees what it does.

    What is traced would be seen otherwise: tapes would keep symbolic tensors, and accumulators add
    to the graph what they make of it. And where recording is switched off, tapes in the function
    would record nothing either. All that is a thread's own, so that another thread is free of it.
    """
    if tf.distribute.has_strategy():  # which tells replicas apart by their threads
        return function()
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def work() -> Any:
        with graph.as_default() if graph is not None else contextlib.nullcontext():
            return function()

    with carried_over() as there, ThreadPoolExecutor(1) as executor:
        return executor.submit(contextvars.copy_context().run, there, work).result()


def is_watched(tensor: tf.Tensor) -> bool:
    """Whether a tape that is recording now watches a tensor."""
    return bool(record.should_record_backprop([tensor]))
