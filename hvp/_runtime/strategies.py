"""Work inside the scope of a `tf.distribute.Strategy`, done as if outside of it.

Inside such a scope a variable has no single buffer, and new variables are spread over all devices.
What this package traces belongs to one device. There is no public way to leave a scope; but it
belongs to a thread, so that another thread is outside.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import tensorflow as tf

from hvp._runtime.interrupts import Uninterrupted

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_strategies(function: Function) -> Function:
    """Let a function run outside of the scope of any strategy.

    Code that runs for each replica, by ``strategy.run``, is left alone.
    """

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        scoped = tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context()
        if not (scoped and tf.executing_eagerly()):
            return function(*arguments, **named)
        context = contextvars.copy_context()
        with Uninterrupted(), ThreadPoolExecutor(1) as executor:
            return executor.submit(context.run, function, *arguments, **named).result()

    return cast(Function, called)
