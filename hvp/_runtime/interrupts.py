"""Deferral of the user's interrupts until TensorFlow is at rest.

A `KeyboardInterrupt` raised while TensorFlow traces a function can leave the thread inside the
graph being built; every later operation is then added to that graph and never runs. One raised
while TensorFlow converts an array to a tensor goes unnoticed, and can end the process with a
segmentation fault. An interrupt is therefore deferred to the end of the current evaluation or
product, or in long computations to the next call of `deliver_interrupt`. A second interrupt is not
deferred.
"""

from __future__ import annotations

import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

from hvp._runtime.context import assigned


class _Deferred:
    """The state of the main thread, the only thread that Python interrupts."""

    # How many `Uninterrupted` contexts are open.
    depth = 0
    # The handler that `_defer` stands in for, and the arguments of the interrupt that is pending.
    handler: Any = None
    interrupt: tuple[int, FrameType | None] | None = None


def _defer(number: int, frame: FrameType | None) -> None:
    """Record the first interrupt, and pass the second one on."""
    if _Deferred.interrupt is None:
        _Deferred.interrupt = number, frame
        return
    handler, _Deferred.handler, _Deferred.interrupt = _Deferred.handler, None, None
    signal.signal(signal.SIGINT, handler)
    handler(number, frame)


class Uninterrupted(contextlib.ContextDecorator):
    """A context or decorator that defers the first interrupt (SIGINT) until it ends."""

    def __enter__(self) -> None:
        """Begin to defer interrupts."""
        if threading.current_thread() is not threading.main_thread():
            return
        if _Deferred.depth == 0:
            handler = signal.getsignal(signal.SIGINT)
            # Interrupts that are ignored, or not handled by Python, are left alone.
            _Deferred.handler, _Deferred.interrupt = handler if callable(handler) else None, None
            if _Deferred.handler is not None:
                try:
                    signal.signal(signal.SIGINT, _defer)
                except ValueError:  # Python is embedded in another program and gets no signals
                    _Deferred.handler = None
        _Deferred.depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        where: TracebackType | None = None,
    ) -> None:
        """Restore the handler, and deliver a deferred interrupt."""
        if threading.current_thread() is not threading.main_thread():
            return
        _Deferred.depth -= 1
        if _Deferred.depth == 0 and _Deferred.handler is not None:
            handler = _Deferred.handler
            replaced = signal.signal(signal.SIGINT, handler)
            if replaced is not _defer:  # code inside the context set a handler of its own
                signal.signal(signal.SIGINT, replaced)
            _Deferred.handler = None
            if _Deferred.interrupt is not None:
                _deliver(handler)


# Whether the main thread waits for this one, which then receives its interrupts.
_acts_for_main: contextvars.ContextVar[bool] = contextvars.ContextVar("acts", default=False)


def acting_for_this_thread() -> contextlib.AbstractContextManager[None]:
    """Let a thread that copies this context receive interrupts in place of this one."""
    is_main = threading.current_thread() is threading.main_thread()
    return assigned(_acts_for_main, is_main or _acts_for_main.get())


def deliver_interrupt() -> None:
    """Deliver a deferred interrupt between the parts of a long computation."""
    is_main = threading.current_thread() is threading.main_thread() or _acts_for_main.get()
    if is_main and _Deferred.depth and _Deferred.handler is not None:
        _deliver(_Deferred.handler)


def _deliver(handler: Callable[..., Any]) -> None:
    interrupt, _Deferred.interrupt = _Deferred.interrupt, None
    if interrupt is not None:
        handler(*interrupt)


def put_back(pairs: Iterable[tuple[Callable[[Any], Any], Any]]) -> None:
    """Call each function with its value; raise a `KeyboardInterrupt` only after all calls."""
    remaining, interrupt = list(pairs), None
    while remaining:
        try:
            assign, value = remaining[-1]
            assign(value)
            remaining.pop()
        except KeyboardInterrupt as error:  # perhaps before the assignment: assign again
            interrupt = error
    if interrupt is not None:
        raise interrupt
