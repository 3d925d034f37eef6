"""Words on a file that cannot be used (`failed_by`), and the end of a log (`last_line`)."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from instep.errors import MOST_OF_A_TEXT, one_line
from instep.plain_file import read_plain
from instep.prepare.messages import Failed
from instep.words import printable

_FULL = {
    errno.ENOSPC: "its disk is full. Free some",
    errno.EDQUOT: "your quota of its disk is used up. Free some",
    errno.EFBIG: "a file may not be so large there. Raise the limit (ulimit -f)",
}


def failed_by(error: OSError, number: int, folder: str = "the folder of --to") -> Failed:
    """The end of a command by what the system says.

    Args:
        error: of a file.
        number: of the task.
        folder: that is written to.
    """
    what = error.filename or folder
    if (why := _FULL.get(error.errno or 0)) is not None:
        text = f"{what} cannot be written: {why}, and give the same command again: what is done is "
        return Failed(number, "RunError", f"{text}kept.")
    text = f"{what} cannot be used: {error.strerror or one_line(error)}."
    return Failed(number, "DataError", text)


def last_line(log: Path) -> str:
    """The last that a process printed, shortened; empty if there is nothing."""
    lines = list[str]()
    with suppress(OSError):
        lines = read_plain(log).decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return printable(last[:MOST_OF_A_TEXT])
