"""Options of a run, and the counts of random programs at its end."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Threads for matrices of a hundred rows only wait for each other, and several processes run.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from tests.fuzz.report import REPORT

# Tests of these start processes, or take seconds each: they are no part of a quick run.
SLOW = {"test_memory", "test_processes", "test_strategies", "test_bare_install", "test_checkpoint"}
SLOW |= {
    "test_readme",
    "test_errors",
    "test_programs",
    "test_recompute",
    "test_ctc",
    "test_missing",
}
OF_EACH = 3


def pytest_addoption(parser):
    """Let a quick run be asked for."""
    parser.addoption("--quick", action="store_true", help=f"run {OF_EACH} tests of each module")


def pytest_configure(config):
    """Load the fixtures, and TensorFlow, where tests run: not where they are only dealt out."""
    if hasattr(config, "workerinput") or getattr(config.option, "dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_modifyitems(config, items):
    """Choose the tests of a quick run, spread over each module."""
    if not config.getoption("--quick"):
        return
    by_module = {}
    for item in items:
        if item.path.stem not in SLOW and not item.get_closest_marker("skipif"):
            by_module.setdefault(item.path, []).append(item)
    chosen = [
        item for tests in by_module.values() for item in tests[:: max(1, -(-len(tests) // OF_EACH))]
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


# Not in tests/fuzz: of several processes, the one that reports reads no conftest there.
def pytest_sessionfinish(session):
    """Send what a process counted to the one that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fuzz"] = REPORT.as_dict()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Add what another process counted."""
    if "fuzz" in getattr(node, "workeroutput", {}):  # not if it was killed
        REPORT.merge(node.workeroutput["fuzz"])


def pytest_terminal_summary(terminalreporter):
    """Tell it."""
    if REPORT.outcomes:
        terminalreporter.section("random programs")
        for line in REPORT.lines():
            terminalreporter.line(line)
