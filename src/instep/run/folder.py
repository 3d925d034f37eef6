"""The folder of a run: made, held by one process at a time, and from where it goes on.

Imported before the processes are started, so it imports next to nothing.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from instep import spec_file
from instep.errors import RunError
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


BEGINNING = Origin(0, None)
"""Of a run that has only just been submitted."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Have a run folder for oneself, for as long as the context lasts or the process lives.

    Raises:
        RunError: another process has it: the run is going on.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"the run in {folder} is going on in another process. Wait for its end, "
                "or stop it there with Ctrl-C."
            ) from None
        except OSError:
            pass  # a file system without locks: nobody can be asked
        yield
    finally:
        os.close(descriptor)


def make_run_folder(runs: Path, job: JobSpec, *, named: bool) -> Path:
    """A new folder for a run, with the job as run in it.

    Raises:
        RunError: it cannot be made, or the name that was asked for is taken.
    """
    folder, number = runs / job.name, 1
    try:
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                break
            except FileExistsError:
                if named:
                    raise RunError(
                        f"there is already a run at {folder}. Choose another --name, or remove it."
                    ) from None
                number += 1
                folder = runs / f"{job.name}-{number}"
        (folder / "logs").mkdir()
        (folder / "job.toml").write_text(spec_file.dump(job), encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be made: {error.strerror}. Choose another --runs."
        ) from None
    return folder.resolve()
