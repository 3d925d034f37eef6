"""Requests of people to a pool: files in a folder, which the scheduler takes in their order.

A request is whole when it has its name, and stays until the scheduler has journaled it. So it needs
no scheduler that is there, and is taken once. Ways in: `ask`, `pending`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from instep.errors import RunError
from instep.plain_file import PRIVATE, read_plain, replace_plain
from instep.pool.jobs import AgainAsked, CancelAsked, DrainAsked, FlowSubmitted, JobSubmitted

FOLDER = "inbox"

Request = JobSubmitted | FlowSubmitted | AgainAsked | CancelAsked | DrainAsked


def ask(pool: Path, request: Request) -> None:
    """Leave a request.

    Raises:
        RunError: the folder cannot be written.
    """
    folder = pool / FOLDER
    path = folder / f"{time.time_ns():020d}-{_name(request)}.json"
    try:
        folder.mkdir(exist_ok=True)
        replace_plain(path, msgspec.json.encode(request), PRIVATE, durable=True)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror}. Make room, or get access to it."
        ) from None


def _name(request: Request) -> str:
    match request:
        case JobSubmitted():
            return request.job.id
        case FlowSubmitted():
            return request.flow
        case AgainAsked():
            return f"{request.ids[0]}-again"
        case CancelAsked():
            return f"{request.id}-cancel"
        case DrainAsked():
            return f"{request.host}-drain"


def pending(pool: Path) -> Iterator[tuple[Path, Request]]:
    """Requests that nobody has taken, the oldest first; what is no request is left alone."""
    for path in sorted((pool / FOLDER).glob("[0-9]*.json")):
        try:
            yield path, msgspec.json.decode(read_plain(path), type=Request)
        except (OSError, msgspec.MsgspecError):
            continue
