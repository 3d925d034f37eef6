"""The bad records of a preparation, in the order of tasks, with where each is in words.

Ways in: `bad_records`; `check_files` refuses files that have no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from instep.data.raw import FORMATS
from instep.errors import DataError
from instep.prepare.folder import Folder
from instep.prepare.messages import Mapped
from instep.prepare.plan import Group
from instep.words import plural


def bad_records(results: Sequence[Mapped], folder: Folder) -> Iterator[dict[str, Any]]:
    """Each: where it is, in words and as line, file, format and place; error, record and task."""
    for result in results:
        if result.bad:
            for bad in folder.bad_of(result.key):
                yield {**_where(bad), **bad, "task": result.key}


def check_files(groups: Sequence[Group], results: Sequence[Mapped], folder: Folder) -> None:
    """Refuse a file of several records that are all bad.

    Args:
        groups: the tasks.
        results: of each.
        folder: of results.

    Raises:
        DataError: there is one.
    """
    bad, good = Counter[str](), set[str]()
    for group, result in zip(groups, results, strict=True):
        bad.update(result.only_bad)
        if result.records:
            good.update(p.path for p in group.pieces if p.path not in result.only_bad)
    wrong = [path for path, count in bad.items() if count > 1 and path not in good]
    if not wrong:
        return
    of_file = (line for line in bad_records(results, folder) if line["file"] == wrong[0])
    first = next(of_file)
    more = f" So are those of {plural(len(wrong) - 1, 'other file')}." if len(wrong) > 1 else ""
    raise DataError(
        f"all {bad[wrong[0]]:,} records of {wrong[0]} are bad, the first is {first['where']}: "
        f"{first['error']}.{more} Perhaps it is of another format, or has other columns. To leave "
        "out such files, too: --unreadable skip; what is done is kept."
    )


def _where(bad: dict[str, Any]) -> dict[str, Any]:
    if "where" in bad:
        return {}
    at = FORMATS[bad["format"]]().where(Path(bad["file"]), bad["place"])
    kind, _, number = at.partition(" ")
    line = {"line": int(number)} if kind == "line" else {}
    return {"where": f"{bad['file']}, {at}", **line}
