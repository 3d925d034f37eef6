"""In which format a run's files are, and which instep reads which.

There is one number for all of them, `FORMAT`: `job.toml` says it at its top, the
ledger in its header (`events.py`), a checkpoint in its manifest
(`state/manifest.py`). It grows whenever one of them changes so that an earlier
instep would misread it, and a run of another format is refused, never guessed at.
"""

from __future__ import annotations

import re

INSTEP = "0.2.0"
"""The version of this instep; `pyproject.toml` has the same."""

FORMAT = 2

_READ_BY = {1: "0.1", 2: "0.2"}
_VERSION = re.compile(r"(\d+\.\d+)(\.\w+)*", re.ASCII)


def other_format(what: object, found: int, written_by: object = None) -> str:
    """Refuses files of a format that this instep does not read, as a sentence or two.

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
