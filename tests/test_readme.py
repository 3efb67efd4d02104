"""The README quotes what was measured. Its code runs in `test_bare_install`."""

import csv
import json
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_quotes_the_committed_benchmark():
    table = README.parent / "docs" / "benchmarks" / "products.csv"
    with table.open(newline="") as file:
        measured = {row["workload"]: row for row in csv.DictReader(file)}
    shown = ["gradient", "hvp", "TF eager, cached", "TF tf.function", "JAX linearize", "PyTorch"]
    lines = README.read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    quoted = {row[0]: row[1:] for row in rows if row[0] in measured}
    assert quoted == {name: [row[key] for key in shown] for name, row in measured.items()}


def test_the_documentation_quotes_the_committed_solving():
    docs = README.parent / "docs"
    measured = json.loads((docs / "benchmarks" / "solving.json").read_text())
    by_name = {(row["problem"], row["method"]): row for row in measured["rows"]}
    assert "took an eighth of the time" in README.read_text()
    assert 7.5 <= by_name["mlp-9k", "block_cg"]["times as fast"] < 8.5
    scores, text = measured["scores"], (docs / "influence.rst").read_text()
    assert f"{scores['variables']:,} weights took {scores['seconds']:.0f} seconds" in text
    assert f"a process of {scores['peak MiB'] / 1024:.1f} GiB, TensorFlow included" in text


def test_the_readme_quotes_the_committed_measurement_of_memory():
    measured = json.loads((README.parent / "docs" / "benchmarks" / "memory.json").read_text())
    cached, recomputed = (measured["transformer"][name] for name in ("cached", "recompute"))
    quoted = re.search(
        r"peaked at (\d+\.\d+) GB by default and\s+at (\d+\.\d+) GB", README.read_text()
    )
    assert [float(number) for number in quoted.groups()] == [
        round(cached["megabytes"] / 1e3, 2),
        round(recomputed["megabytes"] / 1e3, 2),
    ]
