"""Locking, fork detection and out-of-memory errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import tensorflow as tf

from hvp._errors import HvpError, ProcessError

Self = TypeVar("Self")


class _Process:
    """Records whether this process was forked from one in which TensorFlow was in use."""

    in_use = False
    is_broken = False

    @classmethod
    def after_fork(cls) -> None:
        """Record in the child process that TensorFlow's threads are missing."""
        cls.is_broken = cls.in_use


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Process.after_fork)


class Guard:
    """A context that refuses forked processes and explains out-of-memory errors.

    `out_of_memory` maps TensorFlow's error to the one to raise. Creating or entering the guard in a
    process forked from one that used this package raises a `ProcessError`, since TensorFlow would
    hang there, waiting for threads that do not exist.

    `lock` lets one thread in at a time; enter it inside the guard. It is a context of its own
    because the guard's `__exit__` is written in Python, so that an interrupt can prevent it from
    running.
    """

    def __init__(self, out_of_memory: Callable[[Exception], HvpError]) -> None:
        refuse_forks()
        self.lock = threading.RLock()
        self._out_of_memory = out_of_memory

    def __enter__(self) -> None:
        """Refuse a forked process before the lock is taken.

        A thread of the parent may have held the lock during the fork, and nothing would release it
        here.
        """
        if _Process.is_broken:
            refuse_forks()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Replace TensorFlow's out-of-memory error by one that says what to do."""
        if isinstance(error, tf.errors.ResourceExhaustedError):
            raise self._out_of_memory(error) from error


def refuse_forks() -> None:
    """Raise `ProcessError` in a process that was forked from one that called this, or a guard."""
    _Process.in_use = True
    if _Process.is_broken:
        raise ProcessError(
            "this process was forked from one that had used hvp; TensorFlow's threads do not exist "
            "here, and it would hang",
            "a process that starts TensorFlow itself",
            "use multiprocessing.get_context('spawn'), and build the operator there",
        )


class OneProcess:
    """Base class of objects that cannot be pickled or deep-copied."""

    def __copy__(self: Self) -> Self:
        """Return a shallow copy, which shares everything with this object."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling and `copy.deepcopy`."""
        raise ProcessError(
            f"{type(self).__name__} cannot be pickled or deep-copied: it holds graphs and tensors "
            "of this process",
            "the weights, the data and the code of the loss, from which it can be built",
            "save the weights, and build it again in the other process",
        )
