"""README and documentation quote what was measured. Their code runs in `test_bare_install`."""

import csv
import json
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"


def test_the_readme_quotes_the_committed_benchmark():
    table = DOCS / "benchmarks" / "products.csv"
    with table.open(newline="") as file:
        rows = {row["workload"]: row for row in csv.DictReader(file)}
    text = " ".join(README.read_text().split())
    assert len(rows) == 7
    assert "all seven workloads" in text
    assert all(float(row["hvp"]) < float(row["TF tf.function"]) for row in rows.values())
    ratios = [float(row["TF eager, cached"]) / float(row["hvp"]) for row in rows.values()]
    assert "up to eight times as fast as eager tapes" in text
    assert 7.5 <= max(ratios) < 8.5
    slower = {name for name, row in rows.items() if float(row["JAX linearize"]) < float(row["hvp"])}
    assert slower == {"mlp-small", "mlp"}
    quoted = re.search(r"\(([\d.]+) and ([\d.]+) ms against ([\d.]+) and ([\d.]+) ms\)", text)
    exact = [rows[w][key] for key in ("JAX linearize", "hvp") for w in ("mlp-small", "mlp")]
    for shown, measured in zip(quoted.groups(), exact):
        decimals = len(shown.partition(".")[2])
        assert float(shown) == round(float(measured), decimals)
    faster = {name for name, row in rows.items() if float(row["PyTorch"]) < float(row["hvp"])}
    assert faster == slower


def test_the_documentation_quotes_the_committed_solving():
    measured = json.loads((DOCS / "benchmarks" / "solving.json").read_text())
    by_name = {(row["problem"], row["method"]): row for row in measured["rows"]}
    text = " ".join((DOCS / "solve.rst").read_text().split())
    assert "took an eighth of the time" in text
    assert 7.5 <= by_name["mlp-9k", "block_cg"]["times as fast"] < 8.5
    scores, text = measured["scores"], " ".join((DOCS / "influence.rst").read_text().split())
    assert f"{scores['variables']:,} weights took {scores['seconds']:.0f} seconds" in text
    assert f"a process of {scores['peak MiB'] / 1024:.1f} GiB, TensorFlow included" in text


def test_the_documentation_quotes_the_committed_measurement_of_memory():
    measured = json.loads((DOCS / "benchmarks" / "memory.json").read_text())
    cached, recomputed = (measured["transformer"][name] for name in ("cached", "recompute"))
    text = " ".join((DOCS / "memory.rst").read_text().split())
    quoted = re.search(r"peaked at (\d+\.\d+) GB by default and at (\d+\.\d+) GB", text)
    assert [float(number) for number in quoted.groups()] == [
        round(cached["megabytes"] / 1e3, 2),
        round(recomputed["megabytes"] / 1e3, 2),
    ]
