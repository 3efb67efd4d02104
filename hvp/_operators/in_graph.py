"""Products inside somebody's graph, without Python.

A graph that used the residuals as they are would hold those of today as constants, and answer for
an old point after a refresh. So the residuals of the moment are put in variables, which share
their buffers, and the graph reads those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

# There is no public way to know that a graph is being traced for XLA, which cannot call Python,
# not even in a branch that is never taken.
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvp._linearize.compiled import Compiled
from hvp._linearize.graph import GraphEngine
from hvp._linearize.trace import differ
from hvp._operators.staleness import Watch


class InGraph:
    """What products inside graphs read: an evaluation's residuals, as they are now.

    Parameters
    ----------
    current : callable
        Makes sure, in Python, that there is an evaluation and that it is true: raises, or evaluates
        again. Called when the graph finds that something is amiss.
    watch : Watch or None
        Of the variables the loss reads; None if it does not matter whether they change.
    engine : GraphEngine
        The linearization of now.
    """

    def __init__(
        self, current: Callable[[], Any], watch: Watch | None, engine: GraphEngine
    ) -> None:
        # TensorFlow keeps functions it calls for as long as the process lives: they must keep no
        # residuals.
        self._current = weakref.WeakMethod(current)
        self._resources = () if watch is None else watch.resources
        self._specs = engine.program.residual_specs
        # A tf.function being traced takes every variable made meanwhile in its thread for its own,
        # also those made in an init_scope, and is traced again.
        with ThreadPoolExecutor(1) as elsewhere:
            elsewhere.submit(self._make, engine).result()

    def _make(self, engine: GraphEngine) -> None:
        self._there = tf.Variable(True, trainable=False)
        self._residuals = [_slot(tensor) for tensor in engine.residuals]
        self._watched = [_slot(value) for value in self._values(engine)]
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def products(self) -> int:
        """How many there were so far."""
        return int(self._count)

    def fill(self, engine: GraphEngine) -> None:
        """Take the residuals of a new point."""
        tensors = [*engine.residuals, *self._values(engine)]
        for slot, tensor in zip([*self._residuals, *self._watched], tensors):
            _assign(slot, tensor)
        self._there.assign(True)

    def empty(self) -> None:
        """Let go of the residuals; products raise until there are others."""
        self._there.assign(False)
        for slot in [*self._residuals, *self._watched]:
            _assign(slot, _nothing(slot.dtype))

    def run(self, count: int | tf.Tensor, function: Compiled, *tensors: tf.Tensor) -> Any:
        """Add a product to the graph being traced.

        Parameters
        ----------
        count : int or tf.Tensor
            How many products it is.
        function : Compiled
            Takes the tensors, and then the residuals.
        *tensors : tf.Tensor
            Vectors.
        """
        with tf.init_scope():
            function.choose_for(tensors, [slot.read_value() for slot in self._residuals])
        amiss = self._amiss()
        xla = GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
        checks = [] if xla else [tf.cond(amiss, self._ask, lambda: tf.constant(True))]
        with tf.control_dependencies(checks):
            self._count.assign_add(tf.cast(count, tf.int64), read_value=False)
            residuals = [_read(slot, spec) for slot, spec in zip(self._residuals, self._specs)]
        result = function(*tensors, *residuals)
        if not xla:
            return result
        # XLA can neither raise nor call Python.
        return tf.nest.map_structure(
            lambda tensor: tf.where(amiss, tf.cast(float("nan"), tensor.dtype), tensor), result
        )

    def _amiss(self) -> tf.Tensor:
        """Whether there is nothing to multiply with, or variables have changed since."""
        changed = [
            differ(resource.read(), slot.read_value())
            for resource, slot in zip(self._resources, self._watched)
        ]
        return tf.reduce_any([~self._there.read_value(), *changed])

    def _ask(self) -> tf.Tensor:
        current = self._current

        def ask() -> bool:
            evaluation = current()
            if evaluation is None:
                raise RuntimeError("the operator no longer exists")
            evaluation()
            return True

        return tf.py_function(ask, [], tf.bool)

    def _values(self, engine: GraphEngine) -> list[tf.Tensor]:
        return list(engine.watched or []) if self._resources else []


def _slot(tensor: tf.Tensor) -> tf.Variable:
    # Of any shape, so that it can be emptied.
    return tf.Variable(tensor, shape=tf.TensorShape(None), trainable=False)


def _assign(slot: tf.Variable, tensor: tf.Tensor) -> None:
    # A variable's own method costs several times as much.
    tf.raw_ops.AssignVariableOp(resource=slot.handle, value=tensor)


def _read(slot: tf.Variable, spec: tf.TensorSpec) -> tf.Tensor:
    value = slot.read_value()
    value.set_shape(spec.shape)
    return value


def _nothing(dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=-1, element_dtype=tf.float32
        )
    return tf.zeros([0], dtype)
