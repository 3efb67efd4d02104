"""`tf.autodiff.ForwardAccumulator`, which is refused where TensorFlow has its derivative wrong.

One accumulator inside a loss is right, also around or inside of tapes. Of one within another
TensorFlow gives a wrong first derivative in graphs, without an error: terms are missing. Nothing in
the graph tells; so it is noticed when the second accumulator is entered. A thread that does not
linearize meanwhile may nest them.
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
    """A forward accumulator that refuses to be entered within another."""

    def __enter__(self) -> Any:
        """Record, unless another accumulator does already."""
        depth = getattr(_local, "depth", 0)
        if depth and is_linearizing():
            raise SecondDerivativeError(
                "the function has a tf.autodiff.ForwardAccumulator within another, of which "
                "TensorFlow's derivative is wrong in graphs",
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
