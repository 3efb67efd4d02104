"""Run the zoo: `python -m tests.zoo [NAME ...]`, each model in a process of its own."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.zoo.models import MODELS

TABLE = Path(__file__).parents[2] / "docs" / "zoo.csv"
TIMEOUT = 600
TITLES = {
    "model": "model",
    "parameters": "parameters",
    "variables": "variables",
    "dtype": "dtype",
    "engine": "engine",
    "differences": "error against differences of gradients",
    "block": "error of a block against its columns",
    "recompute": "error with recompute=True",
    "note": "note",
}


def run(name: str) -> dict[str, Any]:
    """Compare one model in a new process; return its row."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.zoo.compare", name]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"model": name, "note": f"took more than {TIMEOUT} s", "passed": False}
    if process.returncode != 0:
        print(process.stderr)
        return {"model": name, "note": f"ended with {process.returncode}", "passed": False}
    row = json.loads(process.stdout.splitlines()[-1])
    if not row["passed"]:
        print(process.stderr)
    return row


def write(rows: list[dict[str, Any]]) -> None:
    """Replace these rows of the table; the others stay as they are."""
    lines = {}
    if TABLE.exists():
        with TABLE.open(newline="") as file:
            lines = {line["model"]: line for line in csv.DictReader(file)}
    lines |= {r["model"]: {t: r.get(k, "") for k, t in TITLES.items()} for r in rows}
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, TITLES.values(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines[name] for name in MODELS if name in lines)


def main(names: list[str]) -> int:
    """Compare the named models, or all; return how many failed."""
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        print(f"Unknown: {unknown}. Expected names of {sorted(MODELS)}.")
        return 2
    rows = []
    for name in names or MODELS:
        start = time.perf_counter()
        row = run(name)
        rows.append(row)
        shown = ", ".join(f"{key} {row.get(key)}" for key in list(TITLES)[1:] if row.get(key))
        verdict = "ok    " if row["passed"] else "FAILED"
        print(f"{verdict} {name} ({time.perf_counter() - start:.0f} s): {shown}", flush=True)
        write([row])
    failed = [row["model"] for row in rows if not row["passed"]]
    print(f"{len(rows)} models, {len(failed)} failed{': ' * bool(failed)}{', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
