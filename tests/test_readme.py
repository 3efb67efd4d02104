"""The README's code runs as it stands, block after block."""

import csv
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_code_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 3
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert capsys.readouterr().out.startswith("1 gradient for")
    assert namespace["info"] == 0
    assert namespace["largest"] > 0
    assert namespace["dense"].shape == (161, 161)


def test_the_readme_quotes_the_committed_benchmark():
    table = README.parent / "docs" / "benchmarks" / "products.csv"
    with table.open(newline="") as file:
        measured = {row["workload"]: row for row in csv.DictReader(file)}
    shown = ["gradient", "hvp", "TF eager, cached", "TF tf.function", "JAX linearize", "PyTorch"]
    lines = README.read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    quoted = {row[0]: row[1:] for row in rows if row[0] in measured}
    assert quoted == {name: [row[key] for key in shown] for name, row in measured.items()}
