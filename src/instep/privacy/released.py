"""A record of what a private run has published: commit and tag of each sum that got noise.

It is written before anything of the sum is used, and never cut: a step that was computed again
after a return to a checkpoint is there twice, with one tag if it was the same sum, else with two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from instep.plain_file import plain, read_plain

FILE = "releases.bin"
RELEASE = np.dtype([("commit", "<u8"), ("tag", "V16")])


class Releases:
    """Appends to the record of a run.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / FILE

    def write(self, commit: int, tag: bytes) -> None:
        """Record a sum."""
        record = np.array([(commit, tag)], RELEASE).tobytes()
        with open(self._path, "ab", opener=plain, buffering=0) as file:
            file.write(record)


def contents_by_commit(run: Path) -> Mapping[int, int]:
    """How many contents each commit was published with; empty where there is no record."""
    path = run / FILE
    if not path.is_file():
        return {}
    data = read_plain(path)
    whole = data[: len(data) // RELEASE.itemsize * RELEASE.itemsize]
    found = {(int(commit), bytes(tag)) for commit, tag in np.frombuffer(whole, RELEASE).tolist()}
    return Counter(commit for commit, _ in found)
