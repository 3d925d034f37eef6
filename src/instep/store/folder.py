"""The folder of a run: made, locked by one process at a time; where a run starts from.

Imported before the processes are started, so it imports next to nothing.
"""

from __future__ import annotations

import fcntl
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

from instep.comm.protocol.messages import Figures
from instep.errors import RunError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.plain_file import check_plain, plain, read_plain
from instep.privacy import secret_files
from instep.store.own_files import NO_LOCKS, lock, open_own, unlock
from instep.words import not_utf8


@dataclass(frozen=True)
class StartPoint:
    """Where a run starts: its beginning, or a checkpoint."""

    step: int
    """The last committed step there; 0 without a checkpoint."""
    checkpoint: Path | None
    generations: int = 0
    """Generations that the run has had."""
    warnings: tuple[str, ...] = ()
    figures: tuple[Figures, ...] = ()
    """Figures that the rules of `[stop]` got up to that step, if there are any rules."""
    spent_s: float = 0.0
    """Seconds that the earlier sessions took."""


BEGINNING = StartPoint(0, None)
"""The start_point of a new run."""


ID = "run.id"
"""The file that identifies a run; the process that uses the run folder has it locked."""

_FILES = (
    *("job.toml", ID, "events.jsonl", "ledger.bin", "steps.bin", "steps.crc", "journal.sqlite"),
    *("callbacks.jsonl", "loggers.json", "metrics.csv"),
    *("summary.json", "report.html", "trace.json", "model.safetensors"),
    *("contents-*.bin", "logs/*.log", "huggingface/*.json", "streams/*"),
)
"""Files that a run reads or writes in its folder."""

RESUMED_FROM = (
    *("job.toml", ID, "events.jsonl", "ledger.bin", "steps.crc", "steps.bin", "callbacks.jsonl"),
)
"""Files that resuming reads in addition to a checkpoint. A checksum is older than its record."""

_LOOK_S = 0.1
"""A lock that is held for longer is not that of somebody who looks."""


def run_id(folder: Path) -> str:
    """What identifies a run, whatever its folder's name; empty if there is no id."""
    path = folder / ID
    return read_plain(path).decode().strip() if path.is_file() else ""


def id_of(folder: Path) -> str:
    """The same; empty also where the folder cannot be read from here."""
    try:
        return run_id(folder)
    except (OSError, ValueError):
        return ""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a run folder, for as long as the context lasts or the process lives.

    Raises:
        RunError: another process has locked it: the run is running; or it cannot be written,
            or one of its files is not a plain file, or its path is not UTF-8.
    """
    _check_path(folder)
    _check_files(folder)
    try:
        file = open_own(folder / ID)  # some file systems lock only writable files
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be written: {error.strerror}. Get access to it."
        ) from None
    with file:
        if not _locked(file):
            raise RunError(
                f"the run in {folder} is running in another process. Wait for its end, "
                "or stop it there with Ctrl-C."
            )
        try:
            yield
        finally:
            unlock(file)


def _check_files(folder: Path) -> None:
    """Refuse a folder before training, rather than at its end."""
    for pattern in _FILES:
        for file in [folder / pattern] if "*" not in pattern else sorted(folder.glob(pattern)):
            try:
                check_plain(file)
            except OSError as error:
                raise RunError(
                    f"{file} cannot be used: {error.strerror}. Remove it, and restore the file "
                    "from a copy if there was one."
                ) from None


def _locked(file: IO[Any]) -> bool:
    """Lock it, though somebody may look at just this moment whether it is locked."""
    end = time.monotonic() + _LOOK_S
    while not (mine := lock(file)) and time.monotonic() < end:
        time.sleep(_LOOK_S / 10)
    return mine


def is_running(folder: Path) -> bool:
    """Whether another process holds the lock of the run folder.

    Raises:
        RunError: the lock cannot be tried.
    """
    return bool(_is_locked(folder))


def is_over(folder: Path) -> bool:
    """Whether no process holds the lock; False too where the file system has no locks.

    Raises:
        RunError: the lock cannot be tried.
    """
    return _is_locked(folder) is False


def _is_locked(folder: Path) -> bool | None:
    """The same; None where that is not known, as the file system has no locks."""
    try:
        with open(folder / ID, "rb", opener=plain) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise RunError(f"{folder / ID} cannot be tried: {error.strerror}.") from None
    return False


def resume_hint(folder: Path) -> str:
    """A line for an error: how to resume the run, if it has a checkpoint."""
    from instep.store.run_folder import RunFolder

    saved = any((folder / "checkpoints").glob("step-*"))
    return f"\n  to resume: {RunFolder(folder).to_resume}" if saved else ""


def numbered(name: str) -> Iterator[str]:
    """Names for a run, to take the first free one: `net`, `net-2`, `net-3`, ..."""
    yield name
    for number in count(2):
        yield f"{name}-{number}"


def make_run_folder(runs: Path, job: JobSpec, *, named: bool) -> Path:
    """A new folder for a run, with the job as run and an id of its own in it.

    Raises:
        RunError: it cannot be made, or the name that was asked for is taken.
    """
    folder, text = runs / job.name, spec_file.dump(job)
    _check_path(folder.resolve())
    _check_job(text)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for name in numbered(job.name):
            folder = runs / name
            try:
                folder.mkdir()
                break
            except FileExistsError:
                if named and _was_given_up(folder):
                    _set_aside(folder)
                    folder.mkdir()
                    break
                if named:
                    raise RunError(
                        f"there is already a run at {folder}. Choose another --name, or remove it."
                    ) from None
        (folder / "logs").mkdir()
        with open_own(folder / ID) as file:
            file.write(f"{secrets.token_hex(16)}\n".encode())
        (folder / "job.toml").write_text(text, encoding="utf-8")
        if job.privacy.on:
            secret_files.create(run_id(folder))
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be made: {error.strerror}. Choose another --runs."
        ) from None
    return folder.resolve()


def _check_path(folder: Path) -> None:
    """Refuse a path that a message to another process cannot hold, before it would wait for it."""
    if not_utf8(str(folder)) is not None:
        raise RunError(
            f"the run folder {str(folder)!r} has a name that is not UTF-8 text, and its processes "
            "tell each other where it is in UTF-8. Rename it, or choose another --runs."
        )


def _check_job(text: str) -> None:
    at = not_utf8(text)
    if at is not None:
        line = text.splitlines()[text[:at].count("\n")]
        raise RunError(
            f"the job cannot be written into its run folder: {line!r} is not UTF-8 text. Rename "
            "what it names."
        )


def _was_given_up(folder: Path) -> bool:
    return (folder / ID).is_file() and is_over(folder) and nothing_came_of(folder)


def nothing_came_of(folder: Path) -> bool:
    """Whether a run that is over was interrupted or killed before its first step: its name can
    be given to another."""
    from instep.store.run_folder import RunFolder

    known = (*_FILES, "journal.sqlite-*", "endpoint.json", "logs/*", "checkpoints/.saving-*")
    ours = {path for pattern in known for path in folder.glob(pattern)}
    if any(path.is_file() and path not in ours for path in folder.rglob("*")):
        return False
    with suppress(RunError):
        run = RunFolder(folder)
        ended = run.outcome in ("interrupted", "unfinished") and bool(run.events)
        return ended and not len(run.ledger)  # without events, another start may be making it
    return False


def _set_aside(folder: Path) -> None:
    """Give a run of which nothing came the next free name: somebody may read its logs."""
    aside = (folder.with_name(name) for name in numbered(folder.name))
    folder.rename(next(path for path in aside if not path.exists()))


def remove_run_folder(folder: Path) -> None:
    """Remove the folder of a run that was refused before it trained anything."""
    shutil.rmtree(folder, ignore_errors=True)


def host_log(logs: Path, host: int) -> Path:
    """The log of a host; the first one has no number."""
    return logs / (f"host-{host}.log" if host else "host.log")
