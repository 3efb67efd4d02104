"""The report of a check: a table of findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from hvp._errors import FailedCheckError

Verdict = Literal["ok", "note", "warning", "failed"]

# Number of names that a finding lists.
_MAX_NAMES = 3


class Finding(NamedTuple):
    """The finding of one step of a check.

    Its `name` says what was checked. Its `outcome` is ``"ok"`` or ``"failed"``; ``"note"`` marks
    useful information, and ``"warning"`` something that may be wrong or could not be checked. The
    `message` describes the result, and what to do about it.
    """

    name: str
    outcome: Verdict
    message: str


@dataclass(frozen=True)
class CheckReport:
    """The report of `hvp.check`, which prints as a table.

    Attributes
    ----------
    title : str
        The kind, size and dtype of the operator.
    findings : tuple of Finding
        The findings, in order; each has a `name`, an `outcome` and a `message`.
    eigenvalues : ndarray
        All eigenvalues in increasing order, if there are at most `max_products`. Otherwise Ritz
        values, which lie inside the spectrum; the first one is the smallest eigenvalue that was
        found.
    seconds_per_product : float
        Median time of a product with one vector, not counting the first product.
    residual_bytes : int or None
        Memory for the residuals that the operator keeps for products.
    peak_bytes : int or None
        Increase of the peak memory of the process, or of the device, during the check. None if it
        is unknown.
    products, gradient_evaluations : int
        Number of products and evaluations of the gradient that the check needed.
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
        """Whether no finding has the outcome ``"failed"``."""
        return all(finding.outcome != "failed" for finding in self.findings)

    def __getitem__(self, name: str) -> Finding:
        """Return the finding with a name.

        Parameters
        ----------
        name : str
            For example ``"differences"``.

        Returns
        -------
        Finding

        Raises
        ------
        KeyError
            If no finding has this name.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def raise_if_failed(self) -> None:
        """Raise an error if a finding has the outcome ``"failed"``.

        Raises
        ------
        FailedCheckError
            Its message lists the findings that failed.
        """
        failures = [
            f"{name}: {said}" for name, verdict, said in self.findings if verdict == "failed"
        ]
        if failures:
            raise FailedCheckError(
                f"the check of {self.title} failed ({'; '.join(failures)})",
                "an operator whose products are those of a Hessian",
                "print the report to see all findings",
            )

    def __str__(self) -> str:
        warnings = [finding.name for finding in self.findings if finding.outcome == "warning"]
        summary = (
            f"nothing failed, look at {', '.join(warnings)}" if warnings else "no problem found"
        )
        if not self.ok:
            summary = "FAILED"
        cost = f"{self.products} products, {self.gradient_evaluations} gradients"
        width = max(len(finding.name) for finding in self.findings)
        rows = [
            f"  {finding.outcome:<8} {finding.name:<{width}}  {finding.message}"
            for finding in self.findings
        ]
        return "\n".join([f"{self.title}: {summary} ({cost})", *rows])

    __repr__ = __str__


def shortened(names: Iterable[object]) -> str:
    """Join the first few names, and add the number of the others."""
    texts = list(map(str, names))
    rest = f", and {len(texts) - _MAX_NAMES} more" if len(texts) > _MAX_NAMES else ""
    return ", ".join(texts[:_MAX_NAMES]) + rest
