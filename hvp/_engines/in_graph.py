"""Products inside a user's graph, without Python.

A graph that captured the residuals themselves would hold them as constants, and answer for an old
point after a refresh. The current residuals are therefore put in variables, which share their
buffers, and the graph reads those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from hvp._engines.graph_map import GraphMap
from hvp._engines.graph_program import GraphProgram
from hvp._errors import ClosedOperatorError, GraphModeError
from hvp._graphs.compiled import Compiled
from hvp._graphs.private import is_for_xla
from hvp._vectors.resources import Resource, differ
from hvp._vectors.space import Space
from hvp._vectors.tensor_cell import TensorCell


class InGraph:
    """The current residuals of a map, for products inside graphs.

    The bound method `current` makes sure, in Python, that there is a map and that it is current: it
    raises, or evaluates again. It is called when the graph finds that the residuals are invalid.
    `resources` are the variables that the map depends on, none if changes do not matter, and
    `values` are their values at its point. The last `copies` of them are further copies of
    variables, on other devices.
    """

    def __init__(
        self,
        held: GraphMap,
        current: Callable[[], Any],
        resources: Sequence[Resource],
        values: Sequence[tf.Tensor],
        copies: int,
    ) -> None:
        # TensorFlow keeps functions it calls for as long as the process lives: they must keep no
        # residuals.
        self._current = weakref.WeakMethod(current)
        self._resources = list(resources)
        self._program, self._spaces = held.program, (held.domain, held.codomain)
        # Values that are packed with the residuals need no place of their own.
        packed = len(self._resources) - copies if held.program.tells_changes else 0
        self._own = slice(packed, len(self._resources))
        self._copies = copies
        # The residuals one by one, where they are packed: XLA would take them apart each time.
        self._parts: list[TensorCell] = []
        self._unpack = tf.function(self._program.unpack, autograph=False)
        # A tf.function that is being traced claims all variables created in its thread, even those
        # created in an init_scope, and is then traced again.
        self._elsewhere(self._make, held, values)

    @staticmethod
    def _elsewhere(make: Callable[..., None], *arguments: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(make, *arguments).result()

    def _make_parts(self) -> None:
        parts = self._program.unpack(_read(self._residuals))
        self._parts = [TensorCell(tensor, tensor.shape) for tensor in parts]

    def _make(self, held: GraphMap, values: Sequence[tf.Tensor]) -> None:
        self._there = tf.Variable(True, trainable=False)
        specs = held.program.residual_specs
        self._residuals = [TensorCell(t, spec.shape) for t, spec in zip(held.residuals, specs)]
        self._watched = [
            TensorCell(value, tf.TensorShape(None)) for value in self._unpacked(values)
        ]
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def products(self) -> int:
        """The number of products so far."""
        return int(self._count)

    def map(self) -> GraphMap:
        """Return a map that reads the current residuals in the graph being traced."""
        with tf.init_scope():  # those of now, for what has to be tried out while tracing
            residuals = _read(self._residuals)
        return _InGraphMap(self._program, residuals, *self._spaces, self)

    def fill(self, held: GraphMap, values: Sequence[tf.Tensor]) -> None:
        """Take the residuals of a new point, and the values of variables to compare with."""
        slots = [*self._residuals, *self._watched]
        tensors = [*held.residuals, *self._unpacked(values)]
        if self._parts:
            slots += self._parts
            tensors += self._unpack(held.residuals)
        for slot, tensor in zip(slots, tensors):
            slot.assign(tensor)
        self._there.assign(True)

    def empty(self) -> None:
        """Release the residuals; products raise until `fill` is called."""
        self._there.assign(False)
        for slot in [*self._residuals, *self._watched, *self._parts]:
            slot.empty()

    def run(self, count: Any, function: Compiled, *tensors: tf.Tensor) -> Any:
        """Add a product with `count` vectors to the graph being traced.

        `function` takes `tensors`, the vectors, and then the residuals.
        """
        xla = is_for_xla()
        if xla and self._program.passes_lists:
            raise GraphModeError(
                "a function with jit_compile=True multiplies by the matrix of a loss with loops or "
                "branches that pass on lists of tensors",
                "products that XLA can compile",
                "leave out jit_compile=True; or write the loops out, for a recurrent layer of "
                "Keras with unroll=True",
            )
        there = self._there.read_value()
        if xla:
            is_invalid = tf.logical_not(there) | self._changed(copies=False)
        else:  # what is no longer there has another shape
            is_invalid = tf.cond(there, self._changed, lambda: tf.constant(True))
        checks = []
        if not xla:
            with tf.init_scope():
                function.choose_for(tensors, _read(self._residuals))
            checks.append(tf.cond(is_invalid, self._ask, lambda: tf.constant(True)))
        with tf.control_dependencies(checks):
            self._count.assign_add(tf.cast(count, tf.int64), read_value=False)
            if not xla:
                return function(*tensors, *_read(self._residuals))
            if self._program.tells_changes and not self._parts:
                with tf.init_scope():
                    self._elsewhere(self._make_parts)
            residuals = _read(self._parts or self._residuals)
            result = function.inline(*tensors, *residuals)
        # XLA can neither raise nor call Python.
        return tf.nest.map_structure(
            lambda tensor: tf.where(is_invalid, tf.cast(float("nan"), tensor.dtype), tensor), result
        )

    def _changed(self, *, copies: bool = True) -> tf.Tensor:
        """Return whether watched variables have changed since the evaluation.

        What XLA compiles cannot read `copies` on other devices.
        """
        pairs = list(zip(self._resources[self._own], self._watched))
        pairs = pairs if copies else pairs[: len(pairs) - self._copies]
        changed = [differ(resource.read(), slot.read()) for resource, slot in pairs]
        if self._resources and self._program.tells_changes:
            changed.append(self._program.changed(*_read(self._residuals)))
        return tf.reduce_any(changed) if changed else tf.constant(False)

    def _ask(self) -> tf.Tensor:
        current = self._current

        def ask() -> bool:
            make_sure = current()
            if make_sure is None:
                raise ClosedOperatorError(
                    "the operator no longer exists, and variables have changed",
                    "an operator that is kept for as long as the function is called",
                )
            make_sure()
            return True

        return tf.py_function(ask, [], tf.bool)

    def _unpacked(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the values that are not packed with the residuals."""
        return list(values[self._own])


class _InGraphMap(GraphMap):
    """A linear map in the graph being traced, which reads the current residuals."""

    def __init__(
        self,
        program: GraphProgram,
        residuals: Sequence[tf.Tensor],
        domain: Space,
        codomain: Space,
        in_graph: InGraph,
    ) -> None:
        # XLA would compile blocks of each size by themselves.
        super().__init__(program, residuals, domain, codomain, whole_blocks=is_for_xla())
        self._in_graph = in_graph

    def run(self, function: Compiled, *tensors: tf.Tensor, in_rows: bool = False) -> Any:
        """Add a product to the graph, with the residuals of the moment it runs."""
        return self._in_graph.run(tf.shape(tensors[0])[0] if in_rows else 1, function, *tensors)


def _read(slots: Sequence[TensorCell]) -> list[tf.Tensor]:
    return [slot.read() for slot in slots]
