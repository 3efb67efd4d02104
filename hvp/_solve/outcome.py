"""The reason why an iteration ended."""

from __future__ import annotations

import enum


class SolveOutcome(enum.IntEnum):
    """Outcome for one right-hand side; its text is what `SolveResult.outcomes` shows.

    Only a method in a trust region ends at its boundary.
    """

    RUNNING = 0
    CONVERGED = 1
    NEGATIVE_CURVATURE = 2
    LEAST_SQUARES = 3
    STALLED = 4
    MAXITER = 5
    NOT_FINITE = 6
    INDEFINITE_PRECONDITIONER = 7
    BOUNDARY = 8

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")
