"""The last lines that the processes of a run printed, without colours and control characters.

Way in: `LogEnds`.
"""

from __future__ import annotations

import re
from pathlib import Path

from instep.growing_file import last_bytes
from instep.words import printable

_BYTES, _LINES, _WIDTH, _FILES = 1 << 12, 12, 400, 24
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")


class LogEnds:
    """The ends of the logs of a run; a file is read again when it has changed.

    Args:
        run: folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / "logs"
        self._known: dict[str, tuple[tuple[int, int], list[str]]] = {}
        self._shown: list[dict[str, object]] = []

    def look(self) -> list[dict[str, object]]:
        """For each process its name and its last lines; those that printed nothing are left out.

        The same object as before if nothing has changed.
        """
        known, self._known = self._known, {}
        if not self._folder.is_symlink():
            for path in sorted(self._folder.glob("*.log"))[:_FILES]:
                try:
                    about = path.lstat()
                    key = about.st_size, about.st_mtime_ns
                    before = known.get(path.stem)
                    lines = before[1] if before and before[0] == key else _last_lines(path)
                except OSError:  # it is a link, or no file
                    continue
                self._known[path.stem] = key, lines
        shown: list[dict[str, object]] = [
            {"of": of, "lines": lines} for of, (_, lines) in self._known.items() if lines
        ]
        if shown != self._shown:
            self._shown = shown
        return self._shown


def _last_lines(path: Path) -> list[str]:
    text = last_bytes(path, _BYTES).decode(errors="replace")
    lines = [printable(_ANSI.sub("", line))[:_WIDTH] for line in text.splitlines()]
    return [line for line in lines if line.strip()][-_LINES:]
