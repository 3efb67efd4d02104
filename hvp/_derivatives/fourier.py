"""Gradients of Fourier transforms of real numbers that cut their input.

TensorFlow's transforms drop entries beyond `fft_length`, for which their gradients raise an error
or are wrong. The transform of the remaining entries is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.registry import TENSORFLOWS, gradient_of, gradient_of_formula


def _register(kind: str, transform: Callable[..., tf.Tensor], axes: int, inverse: bool) -> None:
    @gradient_of(kind)
    def gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
        x, lengths = operation.inputs
        kept = tf.get_static_value(lengths)
        if kept is None:
            return TENSORFLOWS[kind](operation, upstream)
        sizes = [int(size) for size in kept]
        if inverse:  # whose input has half of the frequencies along the last axis
            sizes[-1] = sizes[-1] // 2 + 1
        if all(size is not None and size <= k for size, k in zip(x.shape[-axes:], sizes)):
            return TENSORFLOWS[kind](operation, upstream)

        def of_rest(x: tf.Tensor) -> tf.Tensor:
            cut: Any = (Ellipsis, *map(slice, sizes))
            return transform(x[cut], lengths)

        return [*gradient_of_formula(of_rest, [x], upstream), None]


_register("RFFT", tf.signal.rfft, 1, False)
_register("RFFT2D", tf.signal.rfft2d, 2, False)
_register("IRFFT", tf.signal.irfft, 1, True)
_register("IRFFT2D", tf.signal.irfft2d, 2, True)
