"""Counts of random programs, at the end of a run."""

from tests.fuzz.report import REPORT


def pytest_sessionfinish(session):
    """Send the counts to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fuzz"] = REPORT.as_dict()


def pytest_terminal_summary(terminalreporter):
    """Tell them."""
    if REPORT.outcomes:
        terminalreporter.section("random programs")
        for line in REPORT.lines():
            terminalreporter.line(line)


class _Merge:
    @staticmethod
    def pytest_testnodedown(node):
        """Add what a worker counted."""
        REPORT.merge(node.workeroutput.get("fuzz", REPORT.__class__().as_dict()))


def pytest_configure(config):
    """Listen to workers, if there are any."""
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(_Merge())
