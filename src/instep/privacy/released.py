"""A record of what a private run has published: commit and tag of each sum that got noise.

The first record is of commit 0, which publishes nothing: its tag says which secret the run has, to
whoever has that. Each worker writes a record before it uses anything of the sum, as it may be the
only one that lives to do so; nothing is ever cut. A step that was computed again after a return to
a checkpoint has one tag if it was the same sum with the same noise, else two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from instep.errors import SpecError
from instep.plain_file import plain, read_plain
from instep.privacy.keys import derived, tag

FILE = "releases.bin"
RELEASE = np.dtype([("commit", "<u8"), ("tag", "V16")])


class Releases:
    """Appends to the record of a run.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / FILE

    def begin(self, secret: bytes) -> None:
        """Record which secret the run has, once.

        Raises:
            SpecError: it has another.
        """
        known = secret_tag_in(self._path.parent)
        if known is None and not self._path.exists():
            self.write(0, secret_tag(secret))
        elif known not in (None, secret_tag(secret)):
            raise SpecError(
                "[privacy]: the secret that is here is not that of the run; with another one the "
                "run would use its budget twice. Copy the file from the machine on which the run "
                "began; or begin a new run."
            )

    def write(self, commit: int, tag: bytes) -> None:
        """Record a sum."""
        record = np.array([(commit, tag)], RELEASE).tobytes()
        with open(self._path, "ab", opener=plain, buffering=0) as file:
            file.write(record)


def contents_by_commit(run: Path) -> Mapping[int, int]:
    """How many contents each commit was published with; empty where there is no record."""
    return Counter(commit for commit, _ in _records(run) if commit)


def secret_tag(secret: bytes) -> bytes:
    """16 bytes by which whoever has a secret knows it again."""
    return tag(derived(secret, "released"), b"the secret of the run")


def secret_tag_in(run: Path) -> bytes | None:
    """The tag of the secret of a run; None where there is no record."""
    return next((found for commit, found in _records(run) if not commit), None)


def _records(run: Path) -> set[tuple[int, bytes]]:
    path = run / FILE
    if not path.is_file():
        return set()
    data = read_plain(path)
    whole = data[: len(data) // RELEASE.itemsize * RELEASE.itemsize]
    return {(int(commit), bytes(tag)) for commit, tag in np.frombuffer(whole, RELEASE).tolist()}
