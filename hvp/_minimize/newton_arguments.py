"""Checks of the arguments of `NewtonCG`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvp._errors import GraphModeError, HvpError
from hvp._minimize.subproblem import RECYCLED
from hvp._runtime.arguments import check_count, check_number, check_seed
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
    """Check the constructor's arguments that define the method."""
    check_number(radius, "radius", positive=True)
    check_number(damping, "damping")
    if forcing != "eisenstat-walker":
        named = "'eisenstat-walker'"
        check_number(forcing, "forcing", positive=True, below=1, instead=named)
    check_count(max_cg_iterations, "max_cg_iterations")
    check_count(rank, "rank")
    check_seed(seed)
    if preconditioner not in (None, *PRECONDITIONERS, RECYCLED):
        raise HvpError(
            f"the argument preconditioner is {preconditioner!r}",
            "None, " + " or ".join(map(repr, (*PRECONDITIONERS, RECYCLED))),
        )


def check_stopping(gtol: Any, rtol: Any, maxiter: Any) -> None:
    """Check the tolerances and the number of steps of a run."""
    check_number(gtol, "gtol")
    check_number(rtol, "rtol")
    check_count(maxiter, "maxiter", least=0)


def check_eager() -> None:
    """Raise `GraphModeError` if TensorFlow is tracing a graph."""
    if not tf.executing_eagerly():
        raise GraphModeError(
            "NewtonCG was called while TensorFlow traces a graph",
            "eager execution",
            "call it outside the tf.function",
        )
