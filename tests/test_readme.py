"""The README's code runs as it stands, block after block."""

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
