"""Options of a run, and the counts of random programs at its end."""

import os
import zlib

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
    """Leave out cases that are much like others; of a quick run, most tests of each module."""
    if not os.environ.get("HVP_FUZZ"):
        leave_out(config, items, few_of_each(items))
        leave_out(config, items, {item for item in items if item.get_closest_marker("long")})
    if not config.getoption("--quick"):
        return
    by_module = {}
    for item in items:
        if item.path.stem not in SLOW and not item.get_closest_marker("skipif"):
            by_module.setdefault(item.path, []).append(item)
    chosen = [
        item for tests in by_module.values() for item in tests[:: max(1, -(-len(tests) // OF_EACH))]
    ]
    leave_out(config, items, {item for item in items if item not in chosen})


def few_of_each(items):
    """Return the cases to leave out of tests that are marked `few`, of which so many run always.

    Which ones is the same each time, and as good as random, so that they differ in every way.
    """
    by_test = {}
    for item in items:
        skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
        skipped = skipped or item.get_closest_marker("long")
        if item.get_closest_marker("few") and not skipped:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for cases in by_test.values():
        cases.sort(key=lambda item: zlib.crc32(item.name.encode()))
        left_out.update(cases[cases[0].get_closest_marker("few").args[0] :])
    return left_out


def leave_out(config, items, left_out):
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


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
