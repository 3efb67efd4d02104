"""Interrupts by the user: they wait until TensorFlow is at rest.

A `KeyboardInterrupt` that is raised while TensorFlow traces a function may leave the thread in the
graph that was being made: all that comes later is then added to that graph, and never runs. So here
an interrupt waits for the end of what goes on, one evaluation or one product. A second one does not
wait.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any


class _Waiting:
    """The state of the main thread, the only one that Python interrupts."""

    depth = 0
    # What is to handle an interrupt afterwards, and the one that waits.
    handler: Any = None
    interrupt: tuple[int, FrameType | None] | None = None


def _wait(number: int, frame: FrameType | None) -> None:
    """Handle an interrupt: note the first, pass on the second."""
    if _Waiting.interrupt is None:
        _Waiting.interrupt = number, frame
        return
    handler, _Waiting.handler, _Waiting.interrupt = _Waiting.handler, None, None
    signal.signal(signal.SIGINT, handler)
    handler(number, frame)


class Uninterrupted:
    """A context in which an interrupt (SIGINT) waits for the end; a second one does not."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Let interrupts wait."""
        if threading.current_thread() is not threading.main_thread():
            return
        if _Waiting.depth == 0:
            handler = signal.getsignal(signal.SIGINT)
            # Not if interrupts are ignored, or handled by other than Python.
            _Waiting.handler, _Waiting.interrupt = handler if callable(handler) else None, None
            if _Waiting.handler is not None:
                try:
                    signal.signal(signal.SIGINT, _wait)
                except ValueError:  # where Python is part of another program: no signals come
                    _Waiting.handler = None
        _Waiting.depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        where: TracebackType | None = None,
    ) -> None:
        """Let them come."""
        if threading.current_thread() is not threading.main_thread():
            return
        _Waiting.depth -= 1
        if _Waiting.depth == 0 and _Waiting.handler is not None:
            handler = _Waiting.handler
            replaced = signal.signal(signal.SIGINT, handler)
            if replaced is not _wait:  # by what ran within
                signal.signal(signal.SIGINT, replaced)
            _Waiting.handler = None
            _come(handler)


def let_interrupts_come() -> None:
    """Raise the interrupt that waits, if one does: between parts of what takes long."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _Waiting.depth and _Waiting.handler is not None:
        _come(_Waiting.handler)


def _come(handler: Callable[..., Any]) -> None:
    interrupt, _Waiting.interrupt = _Waiting.interrupt, None
    if interrupt is not None:
        handler(*interrupt)


def put_back(pairs: Iterable[tuple[Callable[[Any], Any], Any]]) -> None:
    """Call each function with its value, all of them, also if that is interrupted in between.

    Parameters
    ----------
    pairs : iterable of (callable, object)
        What assigns, and what to assign.

    Raises
    ------
    KeyboardInterrupt
        Afterwards, if there was one.
    """
    waiting, interrupt = list(pairs), None
    while waiting:
        try:
            assign, value = waiting[-1]
            assign(value)
            waiting.pop()
        except KeyboardInterrupt as error:  # it may have been assigned or not: once more
            interrupt = error
    if interrupt is not None:
        raise interrupt
