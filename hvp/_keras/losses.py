"""What Keras layers note during a call, put back.

A layer with an activity regularizer, or that calls `add_loss`, keeps the loss's tensor in a list.
A trace would leave a symbolic tensor there, for whoever reads `model.losses` next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvp._keras.private import layers_of, lists_of_losses, losses_of


@contextlib.contextmanager
def kept_losses(variables: Any) -> Iterator[None]:
    """Put back the losses that the layers of Keras models among `variables` hold.

    Parameters
    ----------
    variables : nest
        What was given as variables; only layers and models in it are known.
    """
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
    """Return the names of layers that have noted a loss in the graph that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    return [
        layer.name
        for layer in layers_of(model)
        if any(tf.is_symbolic_tensor(loss) and loss.graph is graph for loss in losses_of(layer))
    ]
