"""The current blocks of a Kronecker-factored matrix, for everything that is made from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from hvp._errors import ClosedOperatorError
from hvp._graphs.private import is_for_xla
from hvp._kronecker.block import Block
from hvp._runtime.guard import refuse_forks
from hvp._vectors.resources import differ
from hvp._vectors.tensor_cell import TensorCell
from hvp._vectors.watch import Watch

Blocks = Sequence[Block]


class Factors:
    """The blocks of a matrix, or of a function of another matrix, which follow that matrix.

    `make` takes nothing and returns the blocks, or takes the blocks of `source`, the matrix that
    this one is a function of. `watch` has the variables that the blocks depend on, if it matters
    whether they have changed; if so, the bound method `check` raises an error or evaluates again.
    `version` counts how often the blocks of the matrix were replaced.
    """

    def __init__(
        self,
        make: Callable[..., Blocks],
        source: Factors | None = None,
        *,
        watch: Watch | None = None,
        check: Callable[[], Any] | None = None,
    ) -> None:
        self._make, self._source, self._watch = make, source, watch
        # TensorFlow keeps Python functions of graphs: they must keep no matrix.
        self._check = None if check is None else weakref.WeakMethod(check)
        self.version, self._made_at = 0, -1
        self._made: list[Block] = []
        self._cells: list[TensorCell] = []
        self._watched: list[TensorCell] = []
        self._followers: weakref.WeakSet[Factors] = weakref.WeakSet()

    @property
    def root(self) -> Factors:
        """The factors of the matrix itself."""
        return self if self._source is None else self._source.root

    def current(self) -> list[Block]:
        """Return the blocks, after a check that they belong to the variables' current values."""
        self.root.make_sure()
        return self.held()

    def held(self) -> list[Block]:
        """Return the blocks of the last evaluation."""
        version = self.root.version
        if self._made_at != version:
            arguments = [] if self._source is None else [self._source.held()]
            self._made, self._made_at = list(self._make(*arguments)), version
        return self._made

    def replace(self, make: Callable[[], Blocks]) -> None:
        """Replace the blocks of the matrix by those of another evaluation."""
        self._make = make
        self.version += 1
        for follower in [*self._followers]:
            follower.fill()

    def make_sure(self) -> bool:
        """Raise an error if variables have changed, or evaluate again."""
        refuse_forks()
        if self._check is not None:
            check = self._check()
            if check is None:
                raise ClosedOperatorError(
                    "the matrix no longer exists, and variables have changed",
                    "a matrix that is kept for as long as the function is called",
                )
            check()
        return True

    def fill(self) -> None:
        """Update the blocks that graphs read."""
        for cell, tensor in zip(self._cells, _tensors(self.held())):
            cell.assign(tensor)
        if self._watched and self._watch is not None:
            for cell, value in zip(self._watched, self._watch.values):
                cell.assign(value)

    def in_graph(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return what products read in the graph being traced, and whether it is stale.

        Code that XLA compiles cannot call Python. Other graphs call it to raise an error or to
        evaluate again, so that their blocks are never stale.
        """
        root = self.root
        with tf.init_scope():
            root.make_cells(())
            self.make_cells(_tensors(self.held()))
        root.follow(self)
        changed = root.changed()
        if is_for_xla():
            return [cell.read() for cell in self._cells], changed
        make_sure = root.make_sure
        asked = tf.cond(
            changed, lambda: tf.py_function(make_sure, [], tf.bool), lambda: tf.constant(True)
        )
        with tf.control_dependencies([asked]):
            return [cell.read() for cell in self._cells], tf.constant(False)

    def follow(self, other: Factors) -> None:
        """Keep graphs that read factors made from these up to date when these are replaced."""
        self._followers.update({self, other})

    def changed(self) -> tf.Tensor:
        """Whether variables have changed since the evaluation, in the graph being traced."""
        pairs = zip([] if self._watch is None else self._watch.read, self._watched)
        changed = [differ(resource.read(), cell.read()) for resource, cell in pairs]
        return tf.reduce_any(changed) if changed else tf.constant(False)

    def make_cells(self, tensors: Sequence[tf.Tensor]) -> None:
        """Create variables for graphs that hold the tensors and the values of watched variables."""

        def make() -> None:
            if not self._cells:
                self._cells = [TensorCell(tensor, tensor.shape) for tensor in tensors]
            if not self._watched and self._watch is not None:
                self._watched = [TensorCell(v, tf.TensorShape(None)) for v in self._watch.values]

        # A tf.function that is being traced claims all variables created in its thread.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(make).result()


def _tensors(blocks: Blocks) -> list[tf.Tensor]:
    return [tensor for block in blocks for tensor in block.tensors]


def with_tensors(blocks: Blocks, tensors: Iterator[tf.Tensor]) -> list[Block]:
    """Return blocks that read other tensors in place of their own."""
    return [block.with_tensors(tensors) for block in blocks]
