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

from hvp._data.slot import Slot
from hvp._engines.graph_map import GraphMap
from hvp._engines.linear_map import LinearMap
from hvp._errors import ClosedOperatorError
from hvp._graphs.compiled import Compiled
from hvp._graphs.private import is_for_xla
from hvp._snapshots.watch import Watch
from hvp._vectors.resources import differ


class InGraph:
    """What products inside graphs read: the residuals of a map, as they are now.

    Parameters
    ----------
    current : bound method
        Makes sure, in Python, that there is a map and that it is current: raises, or evaluates
        again. Called when the graph finds that something is amiss.
    watch : Watch or None
        The variables that the map depends on; None if it does not matter whether they change.
    held : GraphMap
        The map of now.
    """

    def __init__(self, current: Callable[[], Any], watch: Watch | None, held: GraphMap) -> None:
        # TensorFlow keeps functions it calls for as long as the process lives: they must keep no
        # residuals.
        self._current = weakref.WeakMethod(current)
        self._resources = () if watch is None else watch.resources
        self._program = held.program
        # The residuals one by one, where they are packed: XLA would take them apart each time.
        self._parts: list[Slot] = []
        self._unpack = tf.function(self._program.unpack, autograph=False)
        # A tf.function being traced takes every variable made meanwhile in its thread for its own,
        # also those made in an init_scope, and is traced again.
        self._elsewhere(self._make, held, [] if watch is None else watch.values)

    @staticmethod
    def _elsewhere(make: Callable[..., None], *arguments: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(make, *arguments).result()

    def _make_parts(self) -> None:
        parts = self._program.unpack(_read(self._residuals))
        self._parts = [Slot(tensor, tensor.shape) for tensor in parts]

    def _make(self, held: GraphMap, values: Sequence[tf.Tensor]) -> None:
        self._there = tf.Variable(True, trainable=False)
        specs = held.program.residual_specs
        self._residuals = [Slot(t, spec.shape) for t, spec in zip(held.residuals, specs)]
        self._watched = [Slot(value, tf.TensorShape(None)) for value in self._apart(values)]
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def products(self) -> int:
        """How many there were so far."""
        return int(self._count)

    def fill(self, held: GraphMap, values: Sequence[tf.Tensor]) -> None:
        """Take the residuals of a new point, and the values of variables to compare with."""
        slots = [*self._residuals, *self._watched]
        tensors = [*held.residuals, *self._apart(values)]
        if self._parts:
            slots += self._parts
            tensors += self._unpack(held.residuals)
        for slot, tensor in zip(slots, tensors):
            slot.assign(tensor)
        self._there.assign(True)

    def empty(self) -> None:
        """Let go of the residuals; products raise until there are others."""
        self._there.assign(False)
        for slot in [*self._residuals, *self._watched, *self._parts]:
            slot.empty()

    def run(self, count: Any, function: Compiled, *tensors: tf.Tensor) -> Any:
        """Add a product to the graph being traced.

        Parameters
        ----------
        count : int or tf.Tensor
            How many vectors are multiplied.
        function : Compiled
            Takes the tensors, and then the residuals.
        *tensors : tf.Tensor
            Vectors.
        """
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
            if self._program.tells_changes and not self._parts:
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
        if self._resources and self._program.tells_changes:
            return self._program.changed(*_read(self._residuals))
        changed = [
            differ(resource.read(), slot.read())
            for resource, slot in zip(self._resources, self._watched)
        ]
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

    def _apart(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return values that are not packed with the residuals anyway."""
        return [] if self._program.tells_changes or not self._resources else list(values)


class InGraphMap(GraphMap):
    """A linear map in the graph being traced, which reads the residuals of the moment.

    Parameters
    ----------
    held : GraphMap
        The map of now.
    in_graph : InGraph
        What has its residuals, now and later.
    """

    def __init__(self, held: GraphMap, in_graph: InGraph) -> None:
        super().__init__(held.program, held.residuals, held.domain, held.codomain)
        self._in_graph = in_graph

    def apply(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Multiply by a vector, whose shape may be known only when the graph runs."""
        return super().apply([tf.ensure_shape(p, s) for p, s in zip(parts, self.domain.shapes)])

    def apply_flat(self, flat: tf.Tensor) -> tf.Tensor:
        """Multiply by a flat vector, whose length may be known only when the graph runs."""
        return super().apply_flat(tf.ensure_shape(flat, [self.domain.size]))

    def apply_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply by each row of a block."""
        if is_for_xla():  # where blocks of several sizes would be compiled each
            return self.run_rows(self.block_function(), rows)
        return super().apply_rows(rows)

    def run(self, function: Compiled, *tensors: tf.Tensor) -> Any:
        """Call one of the compiled functions on a vector and the residuals."""
        return self._in_graph.run(1, function, *tensors)

    def run_rows(self, function: Compiled, *tensors: tf.Tensor) -> Any:
        """Call one of the compiled functions on a block, given by its rows."""
        return self._in_graph.run(tf.shape(tensors[0])[0], function, *tensors)


class PythonMap(LinearMap):
    """A linear map in the graph being traced, for which Python runs at every product.

    Parameters
    ----------
    find : callable
        Returns the map to multiply with, when the graph runs.
    domain, codomain : Space
        Its spaces.
    """

    def __init__(self, find: Callable[[], LinearMap], domain: Any, codomain: Any) -> None:
        self._find = find
        self.domain, self.codomain = domain, codomain

    def apply(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Multiply by a vector given as the parts of the domain."""
        parts = [tf.ensure_shape(p, s) for p, s in zip(parts, self.domain.shapes)]
        find = self._find
        specs = self.codomain.specs
        return _in_python(lambda *parts: find().apply(parts), parts, specs)

    def apply_flat(self, flat: tf.Tensor) -> tf.Tensor:
        """Multiply by a flat vector."""
        flat, find = tf.ensure_shape(flat, [self.domain.size]), self._find
        spec = self.codomain.flat_spec
        return _in_python(lambda flat: [find().apply_flat(flat)], [flat], [spec])[0]

    def apply_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply by each row of a block."""
        find = self._find
        spec = tf.TensorSpec([rows.shape[0], self.codomain.size], self.codomain.dtype)
        return _in_python(lambda rows: [find().apply_rows(rows)], [rows], [spec])[0]

    def transpose(self) -> LinearMap:
        """Return the transposed map, for which Python runs too."""
        find = self._find
        return PythonMap(lambda: find().transpose(), self.codomain, self.domain)


def _in_python(
    function: Callable[..., list[tf.Tensor]],
    tensors: Sequence[tf.Tensor],
    specs: Sequence[tf.TensorSpec],
) -> list[tf.Tensor]:
    results = tf.py_function(function, tensors, [spec.dtype for spec in specs])
    for result, spec in zip(results, specs):
        result.set_shape(spec.shape)
    return results


def _read(slots: Sequence[Slot]) -> list[tf.Tensor]:
    return [slot.read() for slot in slots]
