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
    assert "up to seven times as fast as eager persistent tapes" in text
    assert 7 <= max(ratios) < 8

    def faster(other):
        return {name for name, row in rows.items() if float(row[other]) < float(row["hvp"])}

    def agrees(shown, measured):
        return float(shown) == round(float(measured), len(shown.partition(".")[2]))

    assert faster("JAX linearize") == {"mlp-small", "mlp", "lstm"}
    quoted = re.search(r"\(([\d.]+) and ([\d.]+) ms against ([\d.]+) and ([\d.]+) ms\)", text)
    exact = [rows[w][key] for key in ("JAX linearize", "hvp") for w in ("mlp-small", "mlp")]
    assert all(map(agrees, quoted.groups(), exact))
    assert faster("PyTorch linearize") == {"mlp", "cnn", "transformer", "resnet18"}
    for name, pattern in [
        ("transformer", r"the transformer \((\d+) against (\d+) ms\)"),
        ("resnet18", r"ResNet-18 \((\d+) against (\d+) ms\)"),
    ]:
        exact = [rows[name][key] for key in ("PyTorch linearize", "hvp")]
        assert all(map(agrees, re.search(pattern, text).groups(), exact))
    exact = [rows["mlp-small"][key] for key in ("PyTorch linearize", "hvp")]
    smallest = re.search(r"On the smallest network it takes ([\d.]+) against ([\d.]+) ms", text)
    assert all(map(agrees, smallest.groups(), exact))
    least, most = map(int, re.search(r"by (\d+) to (\d+) %", text).groups())
    shares = [
        100 * (1 - float(rows[name]["PyTorch linearize"]) / float(rows[name]["hvp"]))
        for name in ("mlp", "cnn")
    ]
    assert (least, most) == (round(min(shares)), round(max(shares)))
    fastest = {name for name, row in rows.items() if float(row["hvp / fastest other"]) < 1}
    assert fastest == {"mlp-large", "lstm"}
    assert 0.95 < float(rows["lstm"]["hvp"]) / float(rows["lstm"]["JAX linearize"]) < 1.05
    (auto,) = re.search(r"faster, hvp takes (\d+) ms on the transformer", text).groups()
    assert agrees(auto, rows["transformer"]["hvp, auto"])


def test_the_documentation_quotes_the_committed_solving():
    measured = json.loads((DOCS / "benchmarks" / "solving.json").read_text())
    by_name = {(row["problem"], row["method"]): row for row in measured["rows"]}
    text = " ".join((DOCS / "solve.rst").read_text().split())
    times = round(by_name["mlp-9k", "block_cg"]["times as fast"])
    fraction = {8: "an eighth", 9: "a ninth", 10: "a tenth", 11: "an eleventh"}[times]
    assert f"took {fraction} of the time" in text
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
