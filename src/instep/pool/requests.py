"""Requests of people to a pool: files in a folder, which the scheduler takes in their order.

A request is whole when it has its name, and stays until the scheduler has journaled it. So it needs
no scheduler that is there, and is taken once. A key of a job is a file of its own, which one job
makes. Ways in: `ask`, `claim_key`, `pending`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from instep.errors import RunError, SpecError
from instep.plain_file import PRIVATE, create_plain, read_plain, replace_plain
from instep.pool.jobs import (
    AgainAsked,
    CancelAsked,
    DrainAsked,
    FlowSubmitted,
    JobSubmitted,
    PoolJob,
)

FOLDER = "inbox"

_KEY = re.compile(r"[A-Za-z0-9._-]+")

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


def check_key(key: str) -> None:
    """Refuse a key that cannot be part of a file's name.

    Raises:
        SpecError: it says what a key can have.
    """
    if key and not _KEY.fullmatch(key):
        raise SpecError(f"--key {key!r}: letters, digits, '.', '_' and '-' only.")


def claim_key(folder: Path, key: str, name: str, known: Mapping[str, PoolJob]) -> None:
    """Give a job its key: no other job has it, not even one that is submitted at this moment.

    Args:
        folder: of the files of a pool's jobs.
        key: of the job.
        name: of the job, with the key.
        known: the jobs of the pool.

    Raises:
        SpecError: another job has the key, or the name.
        RunError: it cannot be written down.
    """
    for other in known.values():
        if other.key == key and other.id != name:
            raise _taken(key, other.id, name)
        if other.id == name and other.key != key:
            raise SpecError(
                f"--key {key!r}: the pool has another job that is called {name}. Give another key."
            )
    path = folder / f"{key}.key"
    try:
        create_plain(path, name, PRIVATE)
    except FileExistsError:
        if (other_name := path.read_text()) != name:
            raise _taken(key, other_name, name) from None
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}.") from None


def _taken(key: str, other: str, name: str) -> SpecError:
    return SpecError(
        f"--key {key!r}: {other} has it, and this job would be {name}. Give it a key of its own."
    )
