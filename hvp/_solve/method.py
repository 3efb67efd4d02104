"""The interface between a Krylov method and the code that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

State = Sequence[tf.Tensor]


@dataclass(frozen=True)
class System:
    """The damped linear system, in the graph being traced.

    `multiply` and `precondition` take rows. A row has converged when the norm of its residual is at
    most its entry of `tolerance`.
    """

    multiply: Callable[[tf.Tensor], tf.Tensor]
    precondition: Callable[[tf.Tensor], tf.Tensor]
    tolerance: tf.Tensor


@dataclass(frozen=True)
class Step:
    """The result of one iteration, with one entry for each row.

    `norm` is the norm of the residual according to the method's own recurrence. `gain` is the
    decrease of the quadratic model; zero if the method does not minimize it.
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
    direction, product : int or None
        Index of the state's tensor that holds, at the end, a direction of negative curvature, and
        of the tensor that holds the products of the last iteration's directions, which were at
        `direction` before it. None if the method has no such tensor.
    continued_state : callable or None
        Takes the state at the end of a cycle, the true residual there, and the system. Returns the
        state, at the solution zero, from which the next cycle continues in the directions of this
        one. None if each cycle starts afresh.
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
