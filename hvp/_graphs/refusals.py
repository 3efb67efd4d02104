"""Conditions on values: errors of this package that a graph raises when it runs."""

from __future__ import annotations

import tensorflow as tf

from hvp._errors import HvpError

# The errors that graphs may raise, by their text, which is all that TensorFlow hands on.
_errors: dict[str, HvpError] = {}


def refuse_unless(condition: tf.Tensor, error: HvpError) -> None:
    """Raise an error unless a condition holds, now or whenever the graph being traced runs.

    The text of the error must not depend on values.
    """
    if tf.executing_eagerly():
        if not condition:
            raise error
        return
    _errors[str(error)] = error
    tf.debugging.Assert(condition, [str(error)])


def refusal_of(error: tf.errors.OpError) -> HvpError | None:
    """Return the error passed to `refuse_unless` that a TensorFlow error reports, if any."""
    message = error.message.replace("\\'", "'").replace('\\"', '"')  # TensorFlow escapes quotes
    for text, refusal in _errors.items():
        if text in message:
            return type(refusal)(refusal.problem, refusal.expected, refusal.remedy)
    return None
