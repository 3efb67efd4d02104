"""Steps of a check that look at the graph of the loss without evaluating it."""

from __future__ import annotations

from collections.abc import Iterator

from hvp._check.report import Finding, shortened
from hvp._derivatives.missing import WRONG_AT_VALUES
from hvp._operators.matrix import Evaluation


def connected(evaluation: Evaluation) -> Iterator[Finding]:
    """Check that the loss depends on all variables."""
    names = evaluation.unconnected()
    if not names:
        yield Finding("connected", "ok", "the graph of the loss leads to all variables")
        return
    rows = "its rows and columns" if len(names) == 1 else "their rows and columns"
    text = f"the loss does not depend on {shortened(map(repr, names))}: {rows} are zero"
    yield Finding("connected", "warning", text)


def operations(evaluation: Evaluation) -> Iterator[Finding]:
    """Report the operations whose second derivatives deserve attention."""
    name, remarks = "operations", evaluation.remarks
    if remarks is None:
        yield Finding(
            name,
            "warning",
            "unknown, because the loss could not be traced: an operation without a second "
            "derivative is only detected if its gradient is None",
        )
        return
    notes = []
    if remarks.custom:
        notes.append(f"gradients defined by tf.custom_gradient: {shortened(remarks.custom)}")
    if remarks.python:
        notes.append("Python code that runs in the graph, where no variable is watched")
    if remarks.repeated:
        places = dict.fromkeys(suspect.place for suspect in remarks.repeated)
        notes.append(f"random draws, the same each time, at {shortened(places)}")
    if remarks.wrong_at_values:
        values = sorted({WRONG_AT_VALUES[d.kind][0] for d in remarks.wrong_at_values})
        notes.append(f"refused at {' and '.join(values)}: {shortened(remarks.wrong_at_values)}")
    if notes:
        yield Finding(name, "note", "; ".join(notes))
    else:
        yield Finding(name, "ok", "none whose second derivative is known to be missing or wrong")
