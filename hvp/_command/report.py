"""What the command computes and prints."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvp._check.check import check
from hvp._check.report import CheckReport
from hvp._errors import ConvergenceWarning
from hvp._operators.operator import SymmetricOperator
from hvp._spectra.density import SpectralDensity, spectral_density
from hvp._spectra.eigsh import EigenResult, eigsh
from hvp._spectra.estimate import Estimate
from hvp._spectra.trace import trace

# Products for the smallest eigenvalue, which is among many close ones.
_PRODUCTS = 500


@dataclass(frozen=True)
class Curvature:
    """Everything that is computed of an operator.

    Attributes
    ----------
    value, gradient_norm : float
        The loss, and the norm of its gradient.
    check : CheckReport or None
        Whether it is the right matrix.
    largest, smallest : EigenResult
        The largest eigenvalues, and the smallest one.
    trace : Estimate
        The trace, with those of the layers.
    density : SpectralDensity or None
        The density of all eigenvalues.
    sizes : dict of str to int
        The number of variables of each layer.
    """

    value: float
    gradient_norm: float
    check: CheckReport | None
    largest: EigenResult
    smallest: EigenResult
    trace: Estimate
    density: SpectralDensity | None
    sizes: dict[str, int]

    @classmethod
    def of(
        cls,
        H: SymmetricOperator,
        *,
        eigenvalues: int,
        rtol: float,
        checks: bool,
        density: bool,
        seed: int,
        progress: Any,
    ) -> Curvature:
        """Compute everything.

        Parameters
        ----------
        H : SymmetricOperator
            The operator.
        eigenvalues : int
            How many of the largest.
        rtol : float
            The relative standard error of the trace.
        checks, density : bool
            Whether to run these.
        seed : int
            What random vectors depend on.
        progress : bool or "always"
            Whether to show bars.
        """
        more: Any = {"seed": seed, "progress": progress}
        size = H.shape[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the text says so
            largest = eigsh(H, min(eigenvalues, size), "LA", **more)
            limit = max(_PRODUCTS, 2 * size + 1) if size <= _PRODUCTS else _PRODUCTS
            smallest = eigsh(H, 1, "SA", tol=1e-2, max_products=limit, **more)
        return cls(
            H.value,
            float(np.linalg.norm(H.gradient.astype(np.float64))),
            check(H) if checks else None,
            largest,
            smallest,
            trace(H, rtol=rtol, **more),
            spectral_density(H, **more) if density else None,
            {name: block.shape[0] for name, block in H.blocks().items()},
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers, lists and dicts, for JSON."""
        result: dict[str, Any] = {
            "value": self.value,
            "gradient_norm": self.gradient_norm,
            "size": sum(self.sizes.values()),
            "largest_eigenvalues": _eigenvalues(self.largest),
            "smallest_eigenvalue": _eigenvalues(self.smallest)[0],
            "trace": _estimate(self.trace),
            "layers": {
                name: {"size": self.sizes[name], **_estimate(part)}
                for name, part in self.trace.layers.items()
            },
        }
        if self.check is not None:
            result["check"] = {f.name: [f.outcome, f.message] for f in self.check.findings}
        if self.density is not None:
            d = self.density
            result["density"] = {
                "nodes": d.nodes.tolist(),
                "weights": d.weights.tolist(),
                "bandwidth": d.bandwidth,
                "below": d.below,
                "above": d.above,
                "bulk": list(d.bulk),
            }
        return result

    def as_text(self) -> str:
        """Return what a person reads."""
        lines = [
            f"loss                {self.value:.6g}",
            f"norm of gradient    {self.gradient_norm:.4g}",
        ]
        if self.check is not None:
            bad = [f for f in self.check.findings if f.outcome not in ("ok", "note")]
            lines.append(f"check               {'nothing failed' if self.check.ok else 'FAILED'}")
            lines += [f"  {f.outcome:<9} {f.name}: {f.message}" for f in bad]
        lines += ["largest eigenvalues", *_eigenvalue_lines(self.largest)]
        lines += ["smallest eigenvalue", *_eigenvalue_lines(self.smallest)]
        lines.append(f"trace               {_with_error(self.trace)}")
        if self.trace.layers:
            width = max(map(len, self.trace.layers))
            lines.append(f"  {'layer':<{width}}  variables    trace")
            for name, part in self.trace.layers.items():
                lines.append(f"  {name:<{width}}  {self.sizes[name]:>9,}    {_with_error(part)}")
        if self.density is not None:
            low, high = self.density.bulk
            lines += [
                f"density             bulk from {low:.4g} to {high:.4g}, {self.density.below} "
                f"eigenvalues below and {self.density.above} above",
            ]
        return "\n".join(lines)

    def save_json(self, path: Path) -> None:
        """Write everything to a file."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def save_figure(self, path: Path) -> None:
        """Draw everything into a file, in the format that its name ends with."""
        import matplotlib.pyplot as plt

        count = 1 + (self.density is not None) + bool(self.trace.layers)
        figure, row = plt.subplots(1, count, figsize=(4.6 * count, 3.6), layout="constrained")
        row = list(np.atleast_1d(row))
        self.largest.plot(row.pop(0)).set_title("Largest eigenvalues", loc="left")
        if self.trace.layers:
            self.trace.plot(row.pop(0)).set_title("Trace of each layer", loc="left")
        if self.density is not None:
            self.density.plot(row.pop(0)).set_title("Spectral density", loc="left")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _eigenvalues(result: EigenResult) -> list[dict[str, Any]]:
    rows = zip(result.eigenvalues, result.residual_norms, result.converged)
    return [
        {"eigenvalue": float(e), "residual_norm": float(r), "converged": bool(c)}
        for e, r, c in rows
    ]


def _eigenvalue_lines(result: EigenResult) -> list[str]:
    return [
        f"  {row['eigenvalue']:14.6g}  residual {row['residual_norm']:.1g}"
        + ("" if row["converged"] else ", not converged")
        for row in _eigenvalues(result)
    ]


def _estimate(result: Estimate) -> dict[str, Any]:
    return {
        "estimate": result.estimate,
        "standard_error": result.standard_error,
        "converged": result.converged,
    }


def _with_error(result: Estimate) -> str:
    ended = "" if result.converged else ", not converged"
    return f"{result.estimate:.5g} +- {result.standard_error:.2g}{ended}"
