"""The errors of this package, which all derive from `HvpError`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "ClosedOperatorError",
    "ConvergenceWarning",
    "DeviceError",
    "FailedCheckError",
    "GraphModeError",
    "HvpError",
    "InvalidDataError",
    "InvalidLossError",
    "InvalidOptionError",
    "InvalidVariablesError",
    "InvalidVectorError",
    "NonFiniteError",
    "OutOfMemoryError",
    "ProcessError",
    "RecomputeError",
    "SecondDerivativeError",
    "StaleOperatorError",
    "TooLargeError",
]


class HvpError(Exception):
    """Base of every error this package raises on purpose.

    The message has up to three sentences, which are also available as attributes: the problem, what
    was expected, and how to fix it.

    Parameters
    ----------
    problem : str
        What went wrong.
    expected : str, optional
        What was expected instead.
    remedy : str, optional
        How to fix it.

    Examples
    --------
    >>> import hvp
    >>> error = hvp.HvpError("the loss has shape (3,)", "a scalar", "take its mean")
    >>> print(error)
    The loss has shape (3,). Expected a scalar. To fix: take its mean.
    """

    problem: str
    expected: str
    remedy: str

    # Keras would replace an error from within a layer by one with the first sentence alone, unless
    # it has this attribute, whose name is private to Keras.
    _keras_call_info_injected = True
    # When an error passes through a tf.function, AutoGraph makes a new one of the same type only if
    # the type has no `__init__` of its own.
    __init__ = Exception.__init__

    def __new__(cls, problem: str = "", expected: str = "", remedy: str = "") -> HvpError:
        """Store the three sentences."""
        self = super().__new__(cls, problem, expected, remedy)
        self.problem, self.expected, self.remedy = problem, expected, remedy
        return self

    def __str__(self) -> str:
        message = _sentence(self.problem)
        if self.expected:
            message += f" Expected {_sentence(self.expected, capital=False)}"
        if self.remedy:
            message += f" To fix: {_sentence(self.remedy, capital=False)}"
        return message


class InvalidLossError(HvpError, ValueError):
    """The loss, or the function to linearize, does not return what it should."""


class InvalidOptionError(HvpError, TypeError):
    """A keyword argument does not exist."""


class InvalidVariablesError(HvpError, ValueError):
    """The variables are not such that a loss can be differentiated with respect to them."""


class InvalidDataError(HvpError, ValueError):
    """The data are empty, of unequal lengths, of an unknown kind, or do not fit the loss."""


class InvalidVectorError(HvpError, ValueError):
    """A vector has the wrong length, shape or kind, or entries that are not finite."""


class NonFiniteError(HvpError, ArithmeticError):
    """The loss, its gradient or a product is NaN or infinite."""


class SecondDerivativeError(HvpError, LookupError):
    """TensorFlow lacks the derivative of an operation, so that a product would be wrong."""


class StaleOperatorError(HvpError, RuntimeError):
    """A variable that the loss reads has changed since the operator was evaluated."""


class ClosedOperatorError(HvpError, RuntimeError):
    """The operator was closed, or its last refresh failed."""


class GraphModeError(HvpError, RuntimeError):
    """A function that needs eager execution was called while TensorFlow traces a graph."""


class RecomputeError(HvpError, ValueError):
    """A function cannot be recomputed, or not with the same results."""


class CheckpointError(HvpError, ValueError):
    """A checkpoint cannot be written or read, or belongs to another run."""


class ConvergenceWarning(RuntimeWarning):
    """A result is less accurate than requested; it says where and why."""


class DeviceError(HvpError, RuntimeError):
    """No device can be reached, or results of a lost device cannot be computed again."""


class FailedCheckError(HvpError, AssertionError):
    """`hvp.check` found a property that a Hessian does not have."""


class OutOfMemoryError(HvpError, RuntimeError):
    """There is not enough memory for an evaluation or a product."""


class ProcessError(HvpError, RuntimeError):
    """An operator was taken to another process, by pickling or forking."""


class TooLargeError(HvpError, ValueError):
    """A dense matrix, or a single example, exceeds the stated limit."""


for _name in __all__:  # tracebacks show the public name
    globals()[_name].__module__ = "hvp"


def reason_of(error: Exception) -> str:
    """Return the reason within TensorFlow's message about an operation, without its graph."""
    lines = [
        re.sub(r"\{\{.*?\}\}\s*|\[Op:.*\]( name:.*)?|\x1b\[\d+m", "", line).strip()
        for line in str(error).splitlines()
    ]
    beside = (
        "Graph execution error",
        "Detected at",
        "<stack traces",
        "[[",
        "Exception encountered",
    )
    reasons = [line for line in lines if line and not line.startswith(beside)]
    return textwrap.shorten((reasons or lines or [""])[0], 200, placeholder=" ...")


def line_of(error: Exception, number: int = 0, about: str = "") -> str:
    """Return one line of another library's message.

    Parameters
    ----------
    error : Exception
        Of any kind.
    number : int, optional
        Which line to return if none contains `about`.
    about : str, optional
        Text that the line should contain.
    """
    lines = str(error).strip().splitlines() or [""]
    relevant = next((line for line in lines if about in line), None) if about else None
    return (relevant or lines[number]).strip()


def quoted(names: Sequence[str]) -> str:
    """Return names in quotes, the first five of them and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _sentence(text: str, *, capital: bool = True) -> str:
    text = text.strip().rstrip(".")
    first_word = text.partition(" ")[0]
    if capital and (first_word == "a" or (len(first_word) > 1 and first_word.isalpha())):
        # Not v, not data[0].
        text = text[:1].upper() + text[1:]
    return text + "."
