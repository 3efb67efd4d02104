"""Suspension of Python's garbage collector while there is nothing for it to collect."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Suspend automatic garbage collection.

    Tracing creates hundreds of thousands of long-lived objects. The collector would scan them,
    along with those of TensorFlow and Keras, whenever their number has grown by a quarter. This
    would take up to an eighth of the time to the first product.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
