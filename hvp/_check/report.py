"""What a check of an operator found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from hvp._errors import FailedCheckError

Outcome = Literal["ok", "note", "warning", "failed"]


class Finding(NamedTuple):
    """One thing that was looked at: its name, the outcome, and what was seen.

    The outcome is ``"ok"``, or ``"failed"``; ``"note"`` for what is only good to know;
    ``"warning"`` for what may be wrong, or could not be seen. What was seen tells what to do about
    it, too.
    """

    name: str
    outcome: Outcome
    said: str


@dataclass(frozen=True)
class CheckReport:
    """What `hvp.check` found: prints as a table.

    Attributes
    ----------
    title : str
        Of what.
    findings : tuple of Finding
        What was looked at, in order; each has `name`, `outcome` and `said`.
    eigenvalues : ndarray
        Ritz values, ascending: estimates of extreme eigenvalues, from inside.
    seconds_per_product : float
        Median over single vectors, the first product left out.
    residual_bytes : int or None
        Of what is kept for products.
    peak_bytes : int or None
        By how much products raised the process's, or device's, peak; None where it cannot be told.
    products, gradient_evaluations : int
        What the check cost.
    """

    title: str
    findings: tuple[Finding, ...]
    eigenvalues: np.ndarray
    seconds_per_product: float
    residual_bytes: int | None
    peak_bytes: int | None
    products: int
    gradient_evaluations: int

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(finding.outcome != "failed" for finding in self.findings)

    def __getitem__(self, name: str) -> Finding:
        """Return the finding of a name."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def raise_if_failed(self) -> None:
        """Raise `FailedCheckError`, which says what failed, if anything did."""
        failed = [f"{name}: {said}" for name, outcome, said in self.findings if outcome == "failed"]
        if failed:
            raise FailedCheckError(
                f"the check of {self.title} failed ({'; '.join(failed)})",
                "an operator whose products are those of a Hessian",
                "print the report to see all that was looked at",
            )

    def __str__(self) -> str:
        warned = [finding.name for finding in self.findings if finding.outcome == "warning"]
        verdict = f"nothing failed, look at {', '.join(warned)}" if warned else "all is well"
        if not self.ok:
            verdict = "FAILED"
        cost = f"{self.products} products, {self.gradient_evaluations} gradients"
        width = max(len(finding.name) for finding in self.findings)
        rows = [
            f"  {finding.outcome:<8} {finding.name:<{width}}  {finding.said}"
            for finding in self.findings
        ]
        return "\n".join([f"{self.title}: {verdict} ({cost})", *rows])

    __repr__ = __str__
