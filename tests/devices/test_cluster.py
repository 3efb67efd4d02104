"""Workers in processes of their own: the same matrix, also when they die."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import long


@pytest.mark.skipif(sys.platform != "linux", reason="restricted to this machine on Linux alone")
@pytest.mark.parametrize(
    "names",
    [
        ("only_this_machine", "agreement", "one_call", "refusals"),
        long(("further_agreement", "loss_of_one", "losses", "draws", "threads", "fetching")),
        long(("kills",)),
        long(("fetching_kills",)),
    ],
)
def test_workers(names):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.devices.workers", *names],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=900,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert run.stdout.endswith("whole\n")
