"""The results of the command, as text, JSON and a figure."""

from __future__ import annotations

import io
import json
import warnings
from argparse import Namespace
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hvp._check.check import check
from hvp._check.report import CheckReport
from hvp._command.page import page
from hvp._errors import ConvergenceWarning
from hvp._operators.symmetric import SymmetricOperator
from hvp._spectra.density import SpectralDensity, spectral_density
from hvp._spectra.eigsh import EigenResult, eigsh
from hvp._spectra.estimate import Estimate
from hvp._spectra.trace import FEWEST_PRODUCTS, trace


@dataclass(frozen=True)
class Subject:
    """The files and settings of a report; `mode` is ``"training"`` or ``"inference"``.

    `examples` is None if they come in batches, and are not counted.
    """

    model: str
    data: str
    examples: int | None
    matrix: str
    mode: str
    seed: int

    def as_text(self, size: int) -> str:
        """Describe the operator, which has `size` variables, in one line."""
        count = "all" if self.examples is None else self.examples
        examples = f"{count} example{'' if self.examples == 1 else 's'}"
        name = {"hessian": "Hessian", "gauss-newton": "Gauss-Newton matrix"}[self.matrix]
        return (
            f"{name} of {self.model}, {size:,} variables, {examples} of {self.data}, "
            f"{self.mode} mode"
        )


@dataclass(frozen=True)
class Curvature:
    """All results for one operator; `check` and `density` are None if they were skipped.

    `sizes` holds the number of variables of each layer, and `trace` also the traces of the layers.
    """

    subject: Subject
    value: float
    gradient_norm: float
    check: CheckReport | None
    largest: EigenResult
    smallest: EigenResult
    trace: Estimate
    density: SpectralDensity | None
    sizes: dict[str, int]

    @classmethod
    def of(cls, H: SymmetricOperator, subject: Subject, options: Namespace) -> Curvature:
        """Compute everything; the options are those of the command."""
        more: Any = {"seed": options.seed, "progress": find_spec("tqdm") is not None}
        size = H.shape[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the text says so
            largest = eigsh(H, min(options.eigenvalues, size), "LA", **more)
            # The smallest one is among many that are close to it.
            limit = max(options.max_products, 4)
            smallest = eigsh(H, 1, "SA", max_products=limit, **more)
        limit = max(options.max_products, FEWEST_PRODUCTS)
        return cls(
            subject,
            H.value,
            float(np.linalg.norm(H.gradient.astype(np.float64))),
            None if options.no_check else check(H),
            largest,
            smallest,
            trace(H, rtol=options.rtol, max_products=limit, **more),
            None if options.no_density else spectral_density(H, **more),
            {name: block.shape[0] for name, block in H.blocks().items()},
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all results as numbers, lists and dicts, for JSON."""
        result: dict[str, Any] = {
            "subject": {**asdict(self.subject), "version": import_module("hvp").__version__},
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
        """Return the results as text for people to read."""
        lines = [
            f"loss                {self.value:.6g}",
            f"norm of gradient    {self.gradient_norm:.4g}",
        ]
        if self.check is not None:
            bad = [f for f in self.check.findings if f.outcome not in ("ok", "note")]
            outcome = "passed" if self.check.ok else "FAILED"
            if bad:
                outcome += f", {len(bad)} remark{'' if len(bad) == 1 else 's'}"
            lines.append(f"check               {outcome}")
            lines += [f"  {f.outcome:<9} {f.name}: {f.message}" for f in bad]
        lines += ["largest eigenvalues", *_eigenvalue_lines(self.largest)]
        lines += ["smallest eigenvalue", *_eigenvalue_lines(self.smallest)]
        lines.append(f"trace               {_with_error(self.trace)}")
        if self.trace.layers:
            width = max(map(len, self.trace.layers))
            lines.append(f"  {'layer':<{width}}  variables    trace")
            for name, part in self.trace.layers.items():
                lines.append(
                    f"  {name:<{width}}  {self.sizes[name]:>9,}    "
                    f"{part.estimate:.5g} +- {part.standard_error:.2g}"
                )
        if self.density is not None:
            low, high = self.density.bulk
            bulk = "no bulk, all eigenvalues are separate or equal"
            if low <= high:
                bulk = (
                    f"bulk from {low:.4g} to {high:.4g}; number of separate eigenvalues: "
                    f"{self.density.below} below, {self.density.above} above"
                )
            lines.append(f"density             {bulk}")
        return "\n".join(lines)

    def save_json(self, path: Path) -> None:
        """Write all results to a JSON file."""
        # JSON has no NaN, which the bulk is if there is none.
        finite = json.loads(json.dumps(self.as_dict()), parse_constant=lambda _: None)
        path.write_text(json.dumps(finite, indent=1) + "\n")

    def save_figure(self, file: Any, kind: str) -> None:
        """Draw all results into a file or stream, in a format of matplotlib's."""
        import matplotlib.pyplot as plt

        count = 1 + (self.density is not None) + bool(self.trace.layers)
        figure, row = plt.subplots(1, count, figsize=(4.6 * count, 3.6), layout="constrained")
        row = list(np.atleast_1d(row))
        ax, least = self.largest.plot(row.pop(0)), self.smallest
        places = np.arange(1, len(self.largest.eigenvalues) + 1)
        last = places[-1] + 2
        ax.errorbar([last], least.eigenvalues, yerr=least.residual_norms, fmt="s", color="C1")
        ax.set_xticks([*places, last], [*map(str, places), f"{sum(self.sizes.values()):,}"])
        ax.set_title("Largest and smallest eigenvalues", loc="left")
        if self.trace.layers:
            self.trace.plot(row.pop(0)).set_title("Trace of each layer", loc="left")
        if self.density is not None:
            self.density.plot(row.pop(0)).set_title("Spectral density", loc="left")
        figure.suptitle(
            f"{self.subject.model}, {self.subject.matrix}, {self.subject.mode} mode",
            fontsize="medium",
        )
        figure.savefig(file, dpi=120, format=kind)
        plt.close(figure)

    def save_html(self, path: Path) -> None:
        """Write a page with the results, which needs no other file and no network."""
        drawn = io.StringIO()
        self.save_figure(drawn, "svg")
        text = page(
            self.as_dict(), self.subject.as_text(sum(self.sizes.values())), drawn.getvalue()
        )
        path.write_text(text, "utf-8")


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
