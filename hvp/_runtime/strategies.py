"""Running functions outside the scope of a `tf.distribute.Strategy`.

Inside such a scope a variable has no single buffer, and new variables are copied to every device,
whereas this package traces for one device. TensorFlow has no public way to leave a scope, but a
scope belongs to one thread, so that another thread is outside of it. So do tapes.
"""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import tensorflow as tf

from hvp._runtime.interrupts import Uninterrupted, acting_for_this_thread
from hvp._runtime.user_warning import warn

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def outside_strategies(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function so that it runs outside the scope of any strategy.

    Inside ``strategy.run``, where code runs once per replica, it is called directly.
    """

    @functools.wraps(function)
    def run_outside(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        scoped = tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context()
        if not (scoped and tf.executing_eagerly()):
            return function(*arguments, **named)
        return in_another_thread(function, *arguments, **named)

    return run_outside


def in_another_thread(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Result:
    """Call a function where no scope of a strategy, and no tape, of this thread is open."""
    caught = warnings.catch_warnings(record=True)
    alone = ThreadPoolExecutor(1)
    with caught as found, Uninterrupted(), acting_for_this_thread(), alone as executor:
        context = contextvars.copy_context()
        result = executor.submit(lambda: context.run(function, *arguments, **named)).result()
    for warning in found:  # from here, where the user's code is on the stack
        warn(warning.message, warning.category)
    return result
