"""A function of one element applied to many at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def vectorized(function: Callable[[Any], Any], elements: Any) -> Any:
    """Apply a function along the first axis, as `tf.vectorized_map`, which says less about it.

    An operation that TensorFlow cannot apply to all elements at once runs in a loop in the graph;
    TensorFlow says so to its own developers.
    """
    logger = tf.get_logger()
    logger.addFilter(_is_of_use)
    try:
        return tf.vectorized_map(function, elements, warn=False)
    finally:
        logger.removeFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return "while_loop" not in record.getMessage()
