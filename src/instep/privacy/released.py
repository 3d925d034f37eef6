"""A record of what a private run has published: commit and tag of each sum that got noise.

The first record is of commit 0, which publishes nothing: its tag says which secret the run has, to
whoever has that. Each worker writes a record before it uses anything of the sum, as it may be the
only one that lives to do so; no whole record is ever cut. A step that was computed again after a
return to a checkpoint has one tag if it was the same sum with the same noise, else two.

The same records are kept beside the secret. Where a run's folder was copied and both go on with one
secret, each finds there what the other has published.
"""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from instep.errors import SpecError, WorkerError
from instep.plain_file import PRIVATE, plain, read_plain
from instep.privacy import secret_files
from instep.privacy.keys import derived, tag

FILE = "releases.bin"
RELEASE = np.dtype([("commit", "<u8"), ("tag", "V16")])


class Releases:
    """Appends to the record of a run.

    Args:
        run: its folder.
        run_id: names the secret; empty where there is none to keep records beside.
    """

    def __init__(self, run: Path, run_id: str = "") -> None:
        self._path = run / FILE
        self._files = [self._path, *([beside_secret(run_id)] if run_id else [])]

    def begin(self, secret: bytes) -> None:
        """Record which secret the run has, once; cut a record that was not written to its end, of
        a sum that was never used.

        Raises:
            SpecError: it has another.
        """
        for path in self._files:
            if path.exists():
                with _whole(path):
                    pass
        known = read_released(self._path.parent).secret
        if known is None and not (self._path.exists() and self._path.stat().st_size):
            self.write(0, secret_tag(secret))
        elif known not in (None, secret_tag(secret)):
            raise SpecError(
                "[privacy]: the secret that is here is not that of the run; with another one the "
                "run would use its budget twice. Copy the file from the machine on which the run "
                "began; or begin a new run."
            )

    def write(self, commit: int, tag: bytes) -> None:
        """Record a sum, before it is used.

        Raises:
            WorkerError: it cannot be recorded.
        """
        record = np.array([(commit, tag)], RELEASE).tobytes()
        for path in self._files:
            try:
                with _whole(path) as file:
                    written = file.write(record)
            except OSError as error:
                raise WorkerError(
                    f"{path} cannot be written ({error.strerror}), and a sum that is not recorded "
                    "is not published. Mend that, then resume the run."
                ) from error
            if written != len(record):
                raise WorkerError(
                    f"{path} cannot be written to its end, and a sum that is not recorded is "
                    "not published. Make room, then resume the run."
                )


def beside_secret(run_id: str) -> Path:
    """The record of all that was published with the secret of a run, by whoever has it."""
    return secret_files.folder() / f"{run_id}.{FILE}"


class ReleaseRecords(NamedTuple):
    """Records of a run, read once."""

    secret: bytes | None
    """The tag of its secret; None where there is no record."""
    own: Mapping[int, int]
    """Contents that each commit was published with, by this folder: how many."""
    known: Mapping[int, int]
    """Contents by whatever has the same secret and is known here."""


def read_released(run: Path, run_id: str = "") -> ReleaseRecords:
    """Read the records of a run.

    Args:
        run: its folder.
        run_id: names the secret; what else was published with it counts too, if that is known here.
    """
    own = _records(run / FILE)
    known = own | _records(beside_secret(run_id)) if own and run_id else own
    counted = [Counter(commit for commit, _ in some if commit) for some in (own, known)]
    return ReleaseRecords(next((found for commit, found in own if not commit), None), *counted)


def contents_by_commit(run: Path, run_id: str = "") -> Mapping[int, int]:
    """Contents that each commit was published with, how many; empty where there is no record.

    Args:
        run, run_id: as for `read_released`.
    """
    return read_released(run, run_id).known


def secret_tag(secret: bytes) -> bytes:
    """16 bytes by which whoever has a secret knows it again."""
    return tag(derived(secret, "released"), b"the secret of the run")


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a record to append to it, without what was not written to its end: what follows would
    be read as other records. Other processes of this host wait meanwhile."""
    with open(path, "ab", opener=_private, buffering=0) as file:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        _cut(file)
        try:
            yield file
        finally:
            _cut(file)
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open


def _cut(file: IO[bytes]) -> None:
    size = file.seek(0, 2)
    if torn := size % RELEASE.itemsize:
        file.truncate(size - torn)


def _private(path: str, flags: int) -> int:
    return plain(path, flags, PRIVATE)


def _records(path: Path) -> set[tuple[int, bytes]]:
    if not path.is_file():
        return set()
    data = read_plain(path)
    whole = data[: len(data) // RELEASE.itemsize * RELEASE.itemsize]
    return {(int(commit), bytes(tag)) for commit, tag in np.frombuffer(whole, RELEASE).tolist()}
