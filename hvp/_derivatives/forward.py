"""Refuses nested `tf.autodiff.ForwardAccumulator`, which TensorFlow differentiates incorrectly.

One accumulator in a loss is right, also around or inside tapes. For one inside another,
TensorFlow's first derivative in graphs silently lacks terms. The graph does not show this, so
nesting is detected when the second accumulator is entered. Threads that do not linearize can nest
them.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import tensorflow as tf

from hvp._derivatives.corrections import is_linearizing
from hvp._errors import SecondDerivativeError

_local = threading.local()


class OnlyForwardAccumulator(tf.autodiff.ForwardAccumulator):
    """A forward accumulator that cannot be entered inside another one."""

    def __enter__(self) -> Any:
        """Start recording, unless another accumulator is recording."""
        depth = getattr(_local, "depth", 0)
        if depth and is_linearizing():
            raise SecondDerivativeError(
                "the function has a tf.autodiff.ForwardAccumulator inside another one, which "
                "TensorFlow differentiates wrong in graphs",
                "one forward accumulator at a time",
                "use a tf.GradientTape inside the accumulator, or two tapes",
            )
        entered = super().__enter__()
        _local.depth = depth + 1
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Stop recording."""
        _local.depth -= 1
        super().__exit__(kind, error, where)
