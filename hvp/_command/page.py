"""A page of HTML with the results of the command."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ text-align: left; padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid #ddd }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums }}
svg {{ max-width: 100%; height: auto }}
</style>
<h1>{title}</h1>
<p>{about}</p>
{content}
</html>
"""


def page(results: dict[str, Any], about: str, figure: str) -> str:
    """Return a page of `results`, which are those for JSON, with a `figure` in SVG."""
    subject = results["subject"]
    parts = [
        _table(
            ["", ""],
            [
                ("loss", results["value"]),
                ("norm of the gradient", results["gradient_norm"]),
                ("trace", _with_error(results["trace"])),
            ],
        ),
        figure[figure.index("<svg") :],
        "<h2>Eigenvalues</h2>",
        _table(
            ["", "eigenvalue", "norm of the residual", ""],
            [
                *(("largest", *_eigenvalue(row)) for row in results["largest_eigenvalues"]),
                ("smallest", *_eigenvalue(results["smallest_eigenvalue"])),
            ],
        ),
    ]
    if results["layers"]:
        # The trace of all is what had to converge.
        each = {name: {**row, "converged": True} for name, row in results["layers"].items()}
        rows = [(name, row["size"], _with_error(row)) for name, row in each.items()]
        parts += ["<h2>Layers</h2>", _table(["layer", "variables", "trace"], rows)]
    if "check" in results:
        rows = [(outcome, name, text) for name, (outcome, text) in results["check"].items()]
        parts += ["<h2>Is it right?</h2>", _table(["outcome", "check", "what was found"], rows)]
    title = f"Curvature of {subject['model']}"
    return _PAGE.format(title=escape(title), about=escape(about), content="\n".join(parts))


def _table(head: list[str], rows: Iterable[tuple[Any, ...]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, str):
            return f"<td>{escape(value)}</td>"
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
        return f'<td class="number">{shown}</td>'

    top = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if any(head) else ""
    body = "\n".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table>\n{top}{body}\n</table>"


def _eigenvalue(row: dict[str, Any]) -> tuple[Any, ...]:
    converged = "" if row["converged"] else "not converged"
    return row["eigenvalue"], f"{row['residual_norm']:.1g}", converged


def _with_error(row: dict[str, Any]) -> str:
    ended = "" if row["converged"] else ", not converged"
    return f"{row['estimate']:.5g} ± {row['standard_error']:.2g}{ended}"
