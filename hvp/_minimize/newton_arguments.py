"""Checks of the arguments of `NewtonCG`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import GraphModeError, HvpError
from hvp._minimize.subproblem import RECYCLED
from hvp._runtime.arguments import check_count
from hvp._solve.preconditioners import PRECONDITIONERS


def check_method(
    *,
    radius: Any,
    damping: Any,
    forcing: Any,
    max_cg_iterations: Any,
    preconditioner: Any,
    rank: Any,
    seed: Any,
) -> None:
    """Check the arguments of the constructor that define the method."""
    if not (_is_number(radius) and 0 < radius < math.inf):
        raise HvpError(f"the argument radius is {radius!r}", "a finite positive number")
    if not (_is_number(damping) and 0 <= damping < math.inf):
        raise HvpError(f"the argument damping is {damping!r}", "a finite number, zero or positive")
    if forcing != "eisenstat-walker" and not (_is_number(forcing) and 0 < forcing < 1):
        raise HvpError(
            f"the argument forcing is {forcing!r}",
            "'eisenstat-walker', or a number between 0 and 1",
        )
    check_count(max_cg_iterations, "max_cg_iterations")
    check_count(rank, "rank")
    check_count(seed, "seed", least=0)
    if preconditioner not in (None, *PRECONDITIONERS, RECYCLED):
        raise HvpError(
            f"the argument preconditioner is {preconditioner!r}",
            "None, " + " or ".join(map(repr, (*PRECONDITIONERS, RECYCLED))),
        )


def check_stopping(gtol: Any, rtol: Any, maxiter: Any) -> None:
    """Check the tolerances and the number of steps of a run."""
    for name, value in (("gtol", gtol), ("rtol", rtol)):
        if not (isinstance(value, (int, float, np.number)) and 0 <= value < math.inf):
            raise HvpError(f"the argument {name} is {value!r}", "a number, zero or positive")
    check_count(maxiter, "maxiter", least=0)


def check_eager() -> None:
    """Refuse to take a step while TensorFlow traces a graph."""
    if not tf.executing_eagerly():
        raise GraphModeError(
            "NewtonCG was called while TensorFlow traces a graph",
            "eager execution",
            "call it outside the tf.function",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
