"""The record of a step of `NewtonCG`, and the list of them in a result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NewtonStep:
    """What one step of `NewtonCG` did.

    Attributes
    ----------
    iteration : int
        Number of the step, counted from 1.
    loss : float
        Loss after the step.
    gradient_norm : float
        Euclidean norm of the gradient after the step.
    accepted : bool
        Whether the step was accepted, so that the variables moved.
    ratio : float
        Decrease of the loss divided by the decrease that the model predicted. It is minus infinity
        if the loss or its gradient was not finite at the trial point, and NaN if there was no trial
        point.
    radius : float
        Radius of the trust region for the next step.
    damping : float
        Damping for the next step.
    forcing : float
        Tolerance of conjugate gradients, relative to the norm of the gradient.
    cg_iterations : int
        Number of iterations of conjugate gradients, each with one Hessian-vector product; or of
        factorizations, in the space of residuals.
    outcome : str
        Why conjugate gradients ended: ``"converged"``, ``"boundary"`` (of the trust region),
        ``"negative curvature"`` or ``"maxiter"``.
    from_gradients : bool
        Whether the decrease was computed from gradients, since it was below the rounding error of
        the loss.
    """

    iteration: int
    loss: float
    gradient_norm: float
    accepted: bool
    ratio: float
    radius: float
    damping: float
    forcing: float
    cg_iterations: int
    outcome: str
    from_gradients: bool


class History(list[NewtonStep]):
    """The steps of a run, with a short `repr`, since there may be a thousand of them."""

    def __repr__(self) -> str:
        if not self:
            return "[no steps]"
        accepted = sum(step.accepted for step in self)
        first, last = self[0].loss, self[-1].loss
        return f"[{len(self)} steps, {accepted} taken, loss {first:.4g} ... {last:.4g}]"
