"""Runs a script as on a bare install: with TensorFlow, NumPy and scipy, and what they require.

Called as ``python tests/bare.py SCRIPT``: other packages are hidden.
"""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REQUIRED = ("tensorflow", "numpy", "scipy")


class HiddenPackages:
    """Finds no module of the packages to hide."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hidden_modules() -> set[str]:
    """Return the top-level modules of all installed packages that the required ones do not need."""
    installed = {_normalized(d.metadata["Name"]): d for d in importlib.metadata.distributions()}
    needed: set[str] = set()
    queue = list(REQUIRED)
    while queue:
        name = queue.pop()
        if name in needed or name not in installed:
            continue
        needed.add(name)
        for requirement in installed[name].requires or ():
            if "extra ==" not in requirement:
                queue.append(_normalized(re.match(r"[\w.-]+", requirement)[0]))
    kept = {module for name in needed for module in _modules(installed[name])}
    others = {m for name in installed if name not in needed for m in _modules(installed[name])}
    return others - kept - {"hvp", "tests"}


def _modules(distribution: Any) -> Iterator[str]:
    for file in distribution.files or ():
        module = file.parts[0].partition(".")[0]
        if file.suffix == ".py" and module.isidentifier():
            yield module


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.meta_path.insert(0, HiddenPackages(hidden_modules()))
    # In place of this folder, in which tests of the room `keras` would hide the package.
    sys.path[0] = str(Path(__file__).parents[1])
    runpy.run_path(sys.argv[1], run_name="__main__")
