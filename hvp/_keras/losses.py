"""Restoration of the losses that Keras layers collect during a call.

A layer that has an activity regularizer or calls `add_loss` keeps the tensor of the loss in a list.
A trace would leave a symbolic tensor there, which `model.losses` would return later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvp._keras.private import layers_of, lists_of_losses, losses_of, one_at_a_time


@contextlib.contextmanager
def preserved_losses(variables: Any) -> Iterator[None]:
    """Restore the losses held by the Keras layers in a nest when the context ends."""
    with one_at_a_time():
        yield from _preserved(variables)


def _preserved(variables: Any) -> Iterator[None]:
    saved = [
        (holder, holder.copy())
        for model in tf.nest.flatten(variables)
        for layer in layers_of(model)
        for holder in lists_of_losses(layer)
    ]
    try:
        yield
    finally:
        for holder, content in saved:
            holder.clear()
            (holder.update if isinstance(holder, set) else holder.extend)(content)


def layers_with_new_losses(model: Any) -> list[str]:
    """Return the names of layers that have added a loss in the graph being traced."""
    graph = tf.compat.v1.get_default_graph()
    return [
        layer.name
        for layer in layers_of(model)
        if any(tf.is_symbolic_tensor(loss) and loss.graph is graph for loss in losses_of(layer))
    ]
