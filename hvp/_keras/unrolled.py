"""Recurrent Keras layers without a loop, so that each step is an operation of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvp._keras.private import layers_of, one_at_a_time


@contextlib.contextmanager
def unrolled(source: Any) -> Iterator[None]:
    """Unroll the recurrent layers of the models and layers in a nest, within this context."""
    layers = [
        layer
        for leaf in tf.nest.flatten(source)
        if hasattr(leaf, "trainable_variables") and not isinstance(leaf, (tf.Variable, type))
        for layer in layers_of(leaf)
        if getattr(layer, "unroll", None) is False
    ]
    with one_at_a_time():
        for layer in layers:
            layer.unroll = True
        try:
            yield
        finally:
            for layer in layers:
                layer.unroll = False
