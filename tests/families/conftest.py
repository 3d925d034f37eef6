"""Where the loops and their judge lie, and the option that writes the table into the documents."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "parity"))


def pytest_addoption(parser):
    parser.addoption(
        "--families-table",
        action="store_true",
        help="write docs/concepts/families-table.md",
    )
