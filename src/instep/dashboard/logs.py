"""The last lines that the processes of a run printed, without colours and control characters."""

from __future__ import annotations

import re
from pathlib import Path

from instep.dashboard.tail import last_bytes
from instep.words import printable

_BYTES, _LINES, _WIDTH, _FILES = 1 << 12, 12, 400, 24
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")


def last_lines(run: Path) -> list[dict[str, object]]:
    """For each process its name and its last lines; those that printed nothing are left out."""
    found: list[dict[str, object]] = []
    folder = run / "logs"
    if folder.is_symlink():
        return found
    for path in sorted(folder.glob("*.log"))[:_FILES]:
        try:
            text = last_bytes(path, _BYTES).decode(errors="replace")
        except OSError:  # it is a link, or no file
            continue
        lines = [printable(_ANSI.sub("", line))[:_WIDTH] for line in text.splitlines()]
        if kept := [line for line in lines if line.strip()][-_LINES:]:
            found.append({"of": path.stem, "lines": kept})
    return found
