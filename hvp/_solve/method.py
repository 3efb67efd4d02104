"""What a Krylov method is, to what drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

State = Sequence[tf.Tensor]


@dataclass(frozen=True)
class System:
    """The equations, in the graph being traced.

    Attributes
    ----------
    multiply, precondition : callable
        Take and return rows.
    tolerance : tf.Tensor
        Of shape `(k,)`: norms of residuals that are small enough.
    """

    multiply: Callable[[tf.Tensor], tf.Tensor]
    precondition: Callable[[tf.Tensor], tf.Tensor]
    tolerance: tf.Tensor


@dataclass(frozen=True)
class Step:
    """What an iteration has come to.

    Attributes
    ----------
    outcome : tf.Tensor
        Of each row, an `Outcome`.
    norm : tf.Tensor
        Of each row's residual, as the method believes it.
    gain : tf.Tensor
        By how much each row's quadratic model fell, if the method makes that fall.
    state : list of tf.Tensor
        The method's own.
    """

    outcome: tf.Tensor
    norm: tf.Tensor
    gain: tf.Tensor
    state: list[tf.Tensor]


@dataclass(frozen=True)
class Method:
    """An iteration on the rows of a block, in a graph.

    Attributes
    ----------
    name : str
        What users call it.
    first : callable
        Takes residuals, of shape `(k, n)`, and the system; returns the state at zero. Its first
        tensor is the solution so far.
    iterate : callable
        Takes the state, which rows are still running, and the system. Other rows stay as they are.
    shapes : callable
        Takes `n`; returns the shapes of the state's tensors.
    separable : bool
        Whether rows know nothing of each other, so that some can be taken out.
    preconditioned : bool
        Whether it takes a preconditioner.
    direction : int or None
        Which tensor of the state holds, at the end, a direction of negative curvature.
    """

    name: str
    first: Callable[[tf.Tensor, System], list[tf.Tensor]]
    iterate: Callable[[State, tf.Tensor, System], Step]
    shapes: Callable[[int], list[list[int | None]]]
    separable: bool
    preconditioned: bool
    direction: int | None
