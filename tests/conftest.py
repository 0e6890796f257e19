"""With HYBRIDKV_FORBID_SKIPS set, a skip fails the run, unless a store lacks what the test is about."""

import os

import pytest

CAPABILITY = ("the store ", "the capacity of this store ")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("HYBRIDKV_FORBID_SKIPS") or reporter is None:
        return
    for report in reporter.stats.get("skipped", []):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if not reason.startswith(CAPABILITY):
            reporter.write_line(f"forbidden skip: {report.nodeid}: {reason}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
