"""Resident memory, measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

PRELUDE = """
import gc
import numpy as np
import tensorflow as tf
import hvp

def megabytes(field):
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) / 1024

def resident_megabytes():
    gc.collect()
    return megabytes("VmRSS")

def begin_peak():
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return megabytes("VmRSS")
"""


def run(program: str, **environment: str) -> dict[str, float]:
    """Run a program that prints `name value` lines, in a changed environment; return them."""
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )
    assert answer.returncode == 0, answer.stderr
    return {k: float(v) for k, v in (line.split() for line in answer.stdout.splitlines())}
