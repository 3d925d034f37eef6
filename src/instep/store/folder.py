"""The folder of a run: made, held by one process at a time, and from where it goes on.

Imported before the processes are started, so it imports next to nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

from instep import spec_file
from instep.comm.messages import Figures
from instep.errors import RunError
from instep.plain_file import check_plain, plain
from instep.spec import JobSpec


@dataclass(frozen=True)
class Origin:
    """From where a run goes on."""

    step: int
    """The last one that counts; 0 where there was no checkpoint yet."""
    checkpoint: Path | None
    generations: int = 0
    """Those that the run has had."""
    warnings: tuple[str, ...] = ()
    heard: tuple[Figures, ...] = ()
    """What the rules of `[stop]` heard up to that step, if there are any."""
    spent_s: float = 0.0
    """Seconds that the sessions before took."""


BEGINNING = Origin(0, None)
"""Of a run that has only just been submitted."""


ID = "run.id"
"""The file that tells a run from every other; whoever holds the run folder has it locked."""

_FILES = (
    *("job.toml", ID, "events.jsonl", "ledger.bin", "steps.bin", "journal.sqlite"),
    *("summary.json", "report.html", "trace.json", "model.safetensors"),
    *("contents-*.bin", "logs/*.log"),
)
"""What a run reads or writes in its folder under these very names."""

OWNERS = 0o600
"""Mode of the files whose lock counts."""

_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)


def run_id(folder: Path) -> str:
    """What tells this run from every other, by name or not; empty if nothing does."""
    path = folder / ID
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Have a run folder for oneself, for as long as the context lasts or the process lives.

    Raises:
        RunError: another process has it: the run is going on; or it cannot be written, or
            something else stands in the place of one of its files.
    """
    _check_files(folder)
    try:
        file = open_own(folder / ID)  # some file systems lock only what may be written
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be written: {error.strerror}. Get access to it."
        ) from None
    with file:
        if not lock(file):
            raise RunError(
                f"the run in {folder} is going on in another process. Wait for its end, "
                "or stop it there with Ctrl-C."
            )
        try:
            yield
        finally:
            unlock(file)


def _check_files(folder: Path) -> None:
    """Refuse a folder before anything is done in it, rather than at the end of training."""
    for pattern in _FILES:
        for file in [folder / pattern] if "*" not in pattern else sorted(folder.glob(pattern)):
            try:
                check_plain(file)
            except OSError as error:
                raise RunError(
                    f"{file} cannot be used: {error.strerror}. Take it away, and put the file "
                    "back from a copy where there was one."
                ) from None


def open_own(path: Path, mode: str = "ab", *, buffering: int = -1) -> IO[Any]:
    """Open a file that only its owner may open: whoever may read it may lock it.

    Raises:
        OSError: it cannot be opened for writing.
    """
    file = open(path, mode, buffering=buffering, opener=_owners)  # noqa: SIM115 closed by the caller
    with suppress(OSError):  # it is another user's, or the file system knows no modes
        if os.fstat(file.fileno()).st_mode & 0o077:
            os.fchmod(file.fileno(), OWNERS)
    return file


def _owners(path: str, flags: int) -> int:
    return plain(path, flags, OWNERS)


def lock(file: IO[Any]) -> bool:
    """Take a file that is open for writing for oneself; never waits.

    Returns:
        False where another process has it. True where the file system knows no locks:
        nobody can be asked.

    Raises:
        RunError: it cannot be locked for another reason.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise RunError(f"{file.name} cannot be locked: {error.strerror}.") from None
    return True


def unlock(file: IO[Any]) -> None:
    """Let others have a file, though forks of this process may keep it open; twice does no harm."""
    if not file.closed:
        with suppress(OSError):  # it knows no locks; closing lets go of it as well
            fcntl.flock(file, fcntl.LOCK_UN)


def resume_hint(folder: Path) -> str:
    """A line for the error of a run: how to go on, where there is a checkpoint to go on from."""
    from instep.store.run_folder import RunFolder

    saved = any((folder / "checkpoints").glob("step-*"))
    return f"\n  to go on: {RunFolder(folder).to_resume}" if saved else ""


def gone(run: Path) -> str:
    """A sentence where there is no run folder at this path any more; else empty."""
    try:
        run.stat()
    except FileNotFoundError:
        return (
            f"the run folder {run} was removed or renamed while the run went on. Where it was "
            "renamed, it can be resumed under its new name."
        )
    except OSError:  # nobody knows
        pass
    return ""


def numbered(name: str) -> Iterator[str]:
    """Names for a run, until one is free: `net`, `net-2`, `net-3`, ..."""
    yield name
    for number in count(2):
        yield f"{name}-{number}"


def make_run_folder(runs: Path, job: JobSpec, *, named: bool) -> Path:
    """A new folder for a run, with the job as run and an id of its own in it.

    Raises:
        RunError: it cannot be made, or the name that was asked for is taken.
    """
    folder = runs / job.name
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for name in numbered(job.name):
            folder = runs / name
            try:
                folder.mkdir()
                break
            except FileExistsError:
                if named:
                    raise RunError(
                        f"there is already a run at {folder}. Choose another --name, or remove it."
                    ) from None
        (folder / "logs").mkdir()
        with open_own(folder / ID) as file:
            file.write(f"{secrets.token_hex(16)}\n".encode())
        (folder / "job.toml").write_text(spec_file.dump(job), encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be made: {error.strerror}. Choose another --runs."
        ) from None
    return folder.resolve()


def remove_run_folder(folder: Path) -> None:
    """Take away the folder of a run that was refused before it had trained anything."""
    shutil.rmtree(folder, ignore_errors=True)


def host_log(logs: Path, host: int) -> Path:
    """Where a host prints; the first has the plain name."""
    return logs / (f"host-{host}.log" if host else "host.log")
