"""Collects what the pairs came to, where the table is to be written."""

from __future__ import annotations

import shutil
import tempfile

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--parity-table",
        action="store_true",
        help="write docs/concepts/parity-table.md instead of stopping at what differs",
    )
    parser.addoption(
        "--parity-part",
        metavar="K/N",
        help="run only each Nth test, from the Kth on",
    )


def pytest_configure(config):
    if not wanted(config):
        return
    if hasattr(config, "workerinput"):
        config.parity_rows = config.workerinput["parity_rows"]
    else:
        config.parity_rows = tempfile.mkdtemp(prefix="parity-")
        config.add_cleanup(lambda: shutil.rmtree(config.parity_rows))


def pytest_collection_modifyitems(config, items):
    if part := config.getoption("--parity-part"):
        number, parts = map(int, part.split("/"))
        assert 1 <= number <= parts, f"--parity-part {part}: the first is 1/{parts}"
        items[:] = items[number - 1 :: parts]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a process of xdist where the rows go."""
    if wanted(node.config):
        node.workerinput["parity_rows"] = node.config.parity_rows


def pytest_sessionfinish(session):
    if not wanted(session.config) or hasattr(session.config, "workerinput"):
        return
    from table import write

    if wrong := write(session.config.parity_rows):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\n".join(["", *wrong]))


def wanted(config):
    """Whether the table is to be written."""
    return config.getoption("--parity-table")
