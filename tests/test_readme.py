"""The README's code runs as it stands, block after block."""

import csv
import json
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_code_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 8
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    printed = capsys.readouterr().out
    assert printed.startswith("1 gradient for")
    assert "HessianOperator of size 161, float32: " in printed
    assert namespace["info"] == 0
    assert namespace["largest"] > 0
    assert namespace["dense"].shape == (161, 161)
    assert namespace["H"].stats.batches == namespace["H"].stats.batches_kept > 1
    assert namespace["result"].gradient_evaluations == len(namespace["result"].history)
    assert namespace["result"].fun < namespace["loss_value"]
    assert namespace["solutions"].shape == (161, 8)
    assert namespace["report"].ok
    assert namespace["scores"].shape == (10, 200)
    assert namespace["again"].shape == namespace["block"].__wrapped__.kernel.shape


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
    found, said = measured["scores"], (docs / "influence.rst").read_text()
    assert f"{found['variables']:,} weights took {found['seconds']:.0f} seconds" in said
    assert f"a process of {found['peak MiB'] / 1024:.1f} GiB, TensorFlow included" in said


def test_the_readme_quotes_the_committed_measurement_of_memory():
    measured = json.loads((README.parent / "docs" / "benchmarks" / "memory.json").read_text())
    kept, recomputed = (measured["transformer"][name] for name in ("cached", "recompute"))
    quoted = re.findall(r"(\d+\.\d+) (?:GB|times the time)", README.read_text())
    assert [float(number) for number in quoted[-3:]] == [
        round(kept["megabytes"] / 1e3, 2),
        round(recomputed["megabytes"] / 1e3, 2),
        round(recomputed["seconds"] / kept["seconds"], 1),
    ]
