"""Who may use what: one thread at a time, in the process that made it, as far as memory goes."""

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
    """Whether TensorFlow was in use here when this process was forked off another."""

    in_use = False
    is_broken = False

    @classmethod
    def after_fork(cls) -> None:
        """Note, in the new process, that TensorFlow's threads are missing."""
        cls.is_broken = cls.in_use


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Process.after_fork)


class Guard:
    """A context in which something is used: not in a forked process, a lack of memory in words.

    Parameters
    ----------
    out_of_memory : callable
        Takes the error that TensorFlow raised for lack of memory; returns the one to raise.

    Attributes
    ----------
    lock : context manager
        To be entered within, for one thread at a time. Not part of the guard: of what is written in
        Python, the end may be missed if there is an interrupt.

    Raises
    ------
    ProcessError
        When made or entered in a process that was forked off one that used this package: there
        TensorFlow would wait for ever for threads that are not there.
    """

    def __init__(self, out_of_memory: Callable[[Exception], HvpError]) -> None:
        refuse_forks()
        _Process.in_use = True
        self.lock = threading.RLock()
        self._out_of_memory = out_of_memory

    def __enter__(self) -> None:
        """Look whether this is another process: before the lock, which may be held for ever."""
        refuse_forks()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Tell a lack of memory in words."""
        if isinstance(error, tf.errors.ResourceExhaustedError):
            raise self._out_of_memory(error) from error


def refuse_forks() -> None:
    """Raise `ProcessError` in a process that was forked off one that used this package."""
    if _Process.is_broken:
        raise ProcessError(
            "this process was forked off one in which hvp was used, and has none of TensorFlow's "
            "threads: it would wait for ever",
            "a process that starts TensorFlow itself",
            "use multiprocessing.get_context('spawn'), and build the operator there",
        )


class OneProcess:
    """What cannot be taken to another process, nor copied with all that it holds."""

    def __copy__(self: Self) -> Self:
        """Copy the object, not what it holds."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, or copied by `copy.deepcopy`."""
        raise ProcessError(
            f"{type(self).__name__} cannot be pickled or deep-copied: it holds graphs and tensors "
            "of this process",
            "what it was made of: weights, data and the code of the loss",
            "save the weights, and build it again there",
        )
