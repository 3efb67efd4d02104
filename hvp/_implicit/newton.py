"""Newton's method for a minimum or a root, in eager code or inside a graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

# The merit falls by this part of what a linear model of it promises, or the step is halved; so
# often at most.
_DECREASE, _HALVINGS = 1e-4, 30


def newton(
    evaluate: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
    direction: Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor, tf.Tensor]],
    start: tf.Tensor,
    *,
    rtol: float,
    maxiter: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the solution, and whether the last step was as small as `rtol` says.

    `evaluate` returns the merit of a flat point, which is to become small, and what is to become
    zero there. `direction` takes the point and that, and returns a step, the slope of the merit
    along it, and whether it is that of Newton's method. A step is small relative to the point or
    the first step, whichever is longer.
    """
    noise = 10 * float(np.finfo(start.dtype.as_numpy_dtype).eps)
    merit, force = evaluate(start)

    def is_unfinished(done: tf.Tensor, is_over: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
        del rest
        return (done < maxiter) & ~is_over

    def iterate(
        done: tf.Tensor,
        is_over: tf.Tensor,
        x: tf.Tensor,
        merit: tf.Tensor,
        force: tf.Tensor,
        first: tf.Tensor,
        is_small: tf.Tensor,
    ) -> list[tf.Tensor]:
        step, slope, is_newton = direction(x, force)
        length = tf.norm(step)
        first = tf.where(done > 0, first, length)
        size = tf.maximum(tf.norm(x), first)

        def is_too_long(
            tries: tf.Tensor, t: tf.Tensor, at: tf.Tensor, *rest: tf.Tensor
        ) -> tf.Tensor:
            del rest
            most = merit + _DECREASE * t * slope + noise * tf.abs(merit)
            return (tries < _HALVINGS) & ~(at <= most)  # a merit of NaN, too

        def halve(tries: tf.Tensor, t: tf.Tensor, *rest: tf.Tensor) -> list[tf.Tensor]:
            del rest
            return [tries + 1, t / 2, *evaluate(x + step * t / 2)]

        one = tf.ones([], x.dtype)
        tries, t, at, there = tf.while_loop(
            is_too_long, halve, [tf.constant(0), one, *evaluate(x + step)], parallel_iterations=1
        )
        stuck = tries == _HALVINGS
        # Where the merit does not fall, rounding may hide that it would.
        least = tf.where(stuck, tf.cast(noise**0.5, x.dtype), tf.cast(rtol, x.dtype))
        is_small = is_newton & (length <= least * size)
        x = tf.where(stuck, x, x + t * step)
        merit, force = tf.where(stuck, merit, at), tf.where(stuck, force, there)
        return [done + 1, is_small | stuck, x, merit, force, first, is_small]

    begun = [tf.constant(0), tf.constant(False), start, merit, force, tf.zeros([], start.dtype)]
    _, _, x, _, _, _, is_small = tf.while_loop(
        is_unfinished, iterate, [*begun, tf.constant(False)], parallel_iterations=1
    )
    return x, is_small
