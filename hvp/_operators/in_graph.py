"""Products inside somebody's graph, without Python.

A graph that used the residuals as they are would hold those of today as constants, and answer for
an old point after a refresh. So the residuals of the moment are put in variables, which share
their buffers, and the graph reads those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

# There is no public way to know that a graph is being traced for XLA, which cannot call Python,
# not even in a branch that is never taken.
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvp._errors import ClosedOperatorError
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
        self._program = engine.program
        # Of the residuals one by one, where they are packed: XLA would take them apart each time.
        self._parts: list[Slot] = []
        self._unpack = tf.function(self._program.unpack, autograph=False)
        # A tf.function being traced takes every variable made meanwhile in its thread for its own,
        # also those made in an init_scope, and is traced again.
        self._elsewhere(self._make, engine)

    @staticmethod
    def _elsewhere(make: Callable[..., None], *arguments: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(make, *arguments).result()

    def _make_parts(self) -> None:
        parts = self._program.unpack(_read(self._residuals))
        self._parts = [Slot(tensor, tensor.shape) for tensor in parts]

    def _make(self, engine: GraphEngine) -> None:
        self._there = tf.Variable(True, trainable=False)
        specs = engine.program.residual_specs
        self._residuals = [Slot(t, spec.shape) for t, spec in zip(engine.residuals, specs)]
        self._watched = [Slot(value, tf.TensorShape(None)) for value in self._values(engine)]
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def products(self) -> int:
        """How many there were so far."""
        return int(self._count)

    def fill(self, engine: GraphEngine) -> None:
        """Take the residuals of a new point."""
        slots = [*self._residuals, *self._watched]
        tensors = [*engine.residuals, *self._values(engine)]
        if self._parts:
            slots += self._parts
            tensors += self._unpack(engine.residuals)
        for slot, tensor in zip(slots, tensors):
            slot.assign(tensor)
        self._there.assign(True)

    def empty(self) -> None:
        """Let go of the residuals; products raise until there are others."""
        self._there.assign(False)
        for slot in [*self._residuals, *self._watched, *self._parts]:
            slot.empty()

    def run(self, rows: bool, function: Compiled, *tensors: tf.Tensor) -> Any:
        """Add a product to the graph being traced.

        Parameters
        ----------
        rows : bool
            Whether it is of a block, row by row; these count one each.
        function : Compiled
            Takes the tensors, and then the residuals.
        *tensors : tf.Tensor
            Vectors.
        """
        count = tf.shape(tensors[0])[0] if rows else 1
        xla = is_for_xla()
        there = self._there.read_value()
        if xla:
            amiss = tf.logical_not(there) | self._changed()
        else:  # what is no longer there has another shape
            amiss = tf.cond(there, self._changed, lambda: tf.constant(True))
        checks = []
        if not xla:
            with tf.init_scope():
                function.choose_for(tensors, _read(self._residuals))
            checks.append(tf.cond(amiss, self._ask, lambda: tf.constant(True)))
        with tf.control_dependencies(checks):
            self._count.assign_add(tf.cast(count, tf.int64), read_value=False)
            if not xla:
                return function(*tensors, *_read(self._residuals))
            if self._program.can_watch and not self._parts:
                with tf.init_scope():
                    self._elsewhere(self._make_parts)
            residuals = _read(self._parts or self._residuals)
            result = function.inline(*tensors, *residuals)
        # XLA can neither raise nor call Python.
        return tf.nest.map_structure(
            lambda tensor: tf.where(amiss, tf.cast(float("nan"), tensor.dtype), tensor), result
        )

    def _changed(self) -> tf.Tensor:
        """Whether variables that are watched have changed since the evaluation."""
        if self._resources and self._program.can_watch:
            return self._program.changed(*_read(self._residuals))
        changed = [
            differ(resource.read(), slot.read())
            for resource, slot in zip(self._resources, self._watched)
        ]
        return tf.reduce_any(changed) if changed else tf.constant(False)

    def _ask(self) -> tf.Tensor:
        current = self._current

        def ask() -> bool:
            evaluation = current()
            if evaluation is None:
                raise ClosedOperatorError(
                    "the operator no longer exists, and variables have changed",
                    "an operator that is kept for as long as the function is called",
                )
            evaluation()
            return True

        return tf.py_function(ask, [], tf.bool)

    def _values(self, engine: GraphEngine) -> list[tf.Tensor]:
        packed = self._program.can_watch  # with the residuals
        return list(engine.watched or []) if self._resources and not packed else []


def is_for_xla() -> bool:
    """Whether the graph being traced is for XLA."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


class Slot:
    """A tensor that can be replaced, or let go.

    Parameters
    ----------
    tensor : tf.Tensor
        What it is at first.
    shape : tf.TensorShape
        Of every tensor it will be.
    """

    def __init__(self, tensor: tf.Tensor, shape: tf.TensorShape) -> None:
        self._shape = shape
        self.variable = tf.Variable(tensor, shape=tf.TensorShape(None), trainable=False)
        self._nothing = _nothing(tensor.dtype)

    def read(self) -> tf.Tensor:
        """Return the tensor."""
        value = self.variable.read_value()
        value.set_shape(self._shape)
        return value

    def assign(self, tensor: tf.Tensor) -> None:
        """Replace the tensor; those read before stay what they were."""
        # The variable's own method costs several times as much.
        tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=tensor)

    def empty(self) -> None:
        """Let the tensor go."""
        self.assign(self._nothing)


def _nothing(dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=-1, element_dtype=tf.float32
        )
    return tf.zeros([0], dtype)


def _read(slots: Sequence[Slot]) -> list[tf.Tensor]:
    return [slot.read() for slot in slots]
