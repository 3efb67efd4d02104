"""Running functions outside the scope of a `tf.distribute.Strategy`.

Inside such a scope a variable has no single buffer, and new variables are copied to every device,
whereas this package traces for one device. TensorFlow has no public way to leave a scope, but a
scope belongs to one thread, so that another thread is outside of it.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import tensorflow as tf

from hvp._runtime.interrupts import Uninterrupted

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
        context = contextvars.copy_context()
        with Uninterrupted(), ThreadPoolExecutor(1) as executor:
            return executor.submit(lambda: context.run(function, *arguments, **named)).result()

    return run_outside
