"""The interface between a Krylov method and the code that drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

State = Sequence[tf.Tensor]


@dataclass(frozen=True)
class System:
    """The linear system, in the graph being traced.

    Attributes
    ----------
    multiply : callable
        Multiplies rows by the damped operator.
    precondition : callable
        Multiplies rows by the preconditioner.
    tolerance : tf.Tensor
        Shape `(k,)`: a row has converged when the norm of its residual is at most this.
    """

    multiply: Callable[[tf.Tensor], tf.Tensor]
    precondition: Callable[[tf.Tensor], tf.Tensor]
    tolerance: tf.Tensor


@dataclass(frozen=True)
class Step:
    """The result of one iteration.

    Attributes
    ----------
    outcome : tf.Tensor
        The `SolveOutcome` of each row.
    norm : tf.Tensor
        The norm of each row's residual, according to the method's own recurrence.
    gain : tf.Tensor
        The decrease of each row's quadratic model; zero if the method does not minimize it.
    state : list of tf.Tensor
        The method's state after the iteration.
    """

    outcome: tf.Tensor
    norm: tf.Tensor
    gain: tf.Tensor
    state: list[tf.Tensor]


@dataclass(frozen=True)
class Method:
    """A Krylov method that iterates on the rows of a block, in a graph.

    Attributes
    ----------
    name : str
        The name by which users choose the method.
    initial_state : callable
        Takes the residual of the system, of shape `(k, n)`, and the system. Returns the state at
        the solution zero. The first tensor of every state is the current solution.
    iterate : callable
        Takes the state, a mask of the rows that are still running, and the system. Leaves the other
        rows as they are.
    state_shapes : callable
        Takes `n` and returns the shapes of the state's tensors.
    separable : bool
        Whether the rows are independent of each other, so that some can be removed.
    preconditioned : bool
        Whether the method accepts a preconditioner.
    continued_state : callable or None
        Takes the state at the end of a cycle, the true residual there, and the system. Returns the
        state, at the solution zero, from which the next cycle goes on in the directions of this
        one. None if each cycle begins anew.
    direction : int or None
        Index of the state's tensor that holds, at the end, a direction of negative curvature. None
        if the method finds no such direction.
    product : int or None
        Index of the state's tensor that holds the products of the last iteration's directions, at
        `direction` before it; None if the method does not keep them.
    """

    name: str
    initial_state: Callable[[tf.Tensor, System], list[tf.Tensor]]
    iterate: Callable[[State, tf.Tensor, System], Step]
    state_shapes: Callable[[int], list[list[int | None]]]
    separable: bool
    preconditioned: bool
    direction: int | None
    continued_state: Callable[[State, tf.Tensor, System], list[tf.Tensor]] | None = None
    product: int | None = None
