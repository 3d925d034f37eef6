"""Collects what the pairs came to, where the table is to be written."""

from __future__ import annotations

import tempfile

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--parity-table",
        nargs="?",
        const="",
        default=None,
        help="write docs/concepts/parity-table.md instead of stopping at what differs",
    )


def pytest_configure(config):
    if config.getoption("--parity-table") == "":  # the processes of xdist are told the folder
        config.option.parity_table = tempfile.mkdtemp(prefix="parity-")


def pytest_sessionfinish(session):
    folder = session.config.getoption("--parity-table")
    if folder is None or hasattr(session.config, "workerinput"):
        return
    from table import write

    if wrong := write(folder):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\n".join(["", *wrong]))
