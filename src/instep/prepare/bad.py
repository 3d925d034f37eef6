"""The bad records of a preparation, in the order of tasks, with where each is in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from instep.data.raw import FORMATS
from instep.prepare.folder import Folder
from instep.prepare.messages import Mapped


def bad_records(results: Sequence[Mapped], folder: Folder) -> Iterator[dict[str, Any]]:
    """Each: file, place and where that is, error, record and task."""
    for result in results:
        if result.bad:
            for bad in folder.bad_of(result.key):
                yield {"where": _where(bad), **bad, "task": result.key}


def _where(bad: dict[str, Any]) -> str:
    if "file" not in bad:
        return str(bad["where"])
    where = FORMATS[bad["format"]]().where(Path(bad["file"]), bad["place"])
    return f"{bad['file']}, {where}"
