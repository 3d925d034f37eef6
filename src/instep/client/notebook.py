"""A run in a notebook: a table that is updated in place, and the report below the cell.

It reads the run's folder, as `instep status` does, and needs nothing of the run's processes.
Nothing here imports IPython: where a kernel runs, it is there. Ways in: `Table`, `page`.
"""

from __future__ import annotations

import html
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from instep.errors import InstepError
from instep.plain_file import read_plain
from instep.report.terminal.screen import notice
from instep.report.terminal.status import Status

UPDATE_S, SHARE = 0.5, 0.1
"""Least seconds between two updates, and the most of the time that they may take."""

MOST_NOTICES = 8


def in_kernel() -> bool:
    """Whether this process is the kernel of a notebook."""
    python = sys.modules.get("IPython")
    shell: Any = python.get_ipython() if python is not None else None
    return shell is not None and hasattr(shell, "kernel")


class Table:
    """For `watch` of a run: shows it below the cell, and updates what it shows."""

    def __init__(self) -> None:
        self._display: Any = import_module("IPython.display")
        begin = self._display.HTML(_pre(["starting"]))
        self._shown = self._display.display(begin, display_id=True)
        self._due = 0.0

    def __call__(self, run: Path) -> None:
        """Show how it is, if that is due."""
        now = time.monotonic()
        if now < self._due:
            return
        with suppress(InstepError):  # its first files are about to be written
            self._show(_lines(run))
        took_s = time.monotonic() - now
        self._due = now + max(UPDATE_S, took_s / SHARE)

    def end(self, lines: list[str]) -> None:
        """Show how it ended, in place of the table."""
        self._show(lines)

    def _show(self, lines: list[str]) -> None:
        self._shown.update(self._display.HTML(_pre(lines)))


def _lines(run: Path) -> list[str]:
    status = Status(run)
    told = [notice(event) for event in status.folder.events]
    return [*status.lines()[1:], *[line for line in told if line][-MOST_NOTICES:]]


def page(run: Path, lines: list[str]) -> str:
    """HTML: the last lines of a run, and its report in a frame, which has all that it shows."""
    report = run / "report.html"
    if not report.is_file():
        return _pre(lines)
    text = html.escape(read_plain(report).decode())
    frame = 'style="width: 100%; height: 36em; border: 1px solid #ccc"'
    return f'{_pre(lines)}<iframe srcdoc="{text}" {frame}></iframe>'


def _pre(lines: list[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"
