"""Keeps Python's garbage collector from running while there is nothing for it to find."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Suspend automatic garbage collection.

    Tracing makes hundreds of thousands of objects that live on. The collector runs again whenever
    their number has grown by a quarter, and looks at each of them, and at those of TensorFlow and
    Keras: up to an eighth of the time to the first product.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
