"""Fixtures of all tests, and the counts of random programs at the end of a run."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.fuzz.report import REPORT

# What importing has made stays: the collector need not look through it again and again.
gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    """Start each test from the same random numbers, and forget its models afterwards."""
    np.random.seed(0)  # noqa: NPY002 - scipy's lobpcg tests draw from the global generator
    tf.random.set_seed(0)
    yield
    keras.backend.clear_session()


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
