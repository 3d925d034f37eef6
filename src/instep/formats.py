"""The format number of a run's files, and which version of instep reads which.

All files share one number, `FORMAT`. It is at the top of `job.toml`, in the ledger's header
(`events.py`) and in the manifest of a checkpoint (`state/files/manifest.py`). It increases whenever
one of them changes so that an earlier instep would misread it. A run of another format is
refused.
"""

from __future__ import annotations

import re

INSTEP = "0.6.0"
"""The version of this instep; `pyproject.toml` has the same."""

FORMAT = 2

_READ_BY = {1: "0.1", 2: "0.3"}
_VERSION = re.compile(r"(\d+\.\d+)(\.\w+)*", re.ASCII)


def other_format(what: object, found: int, written_by: object = None) -> str:
    """The error message for files of a format that this instep does not read.

    Args:
        what: the file or folder.
        found: its format.
        written_by: the version of instep that the files name, if they do.
    """
    named = _VERSION.fullmatch(str(written_by))
    version, series = (named[0], named[1]) if named else (_READ_BY.get(found),) * 2
    by, use = (f" by instep {version}", f"instep {series}") if version else ("", "the one")
    return (
        f"{what} was written{by} in format {found}; this is instep {INSTEP}, which reads "
        f"format {FORMAT}. Use {use} {'for it' if version else 'that wrote it'}."
    )
