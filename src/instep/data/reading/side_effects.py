"""Finds what reading changes in Python, so that another sample or a later epoch is read otherwise.

Each process that reads has a dataset of its own, and no checkpoint has it. How samples are read,
`fetch.py` knows. Way in: `side_effect`.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from instep.data.reading.fetch import Fetch, Slice, seed_for_sample
from instep.data.reading.generators import preserved
from instep.data.reading.told import SET_EPOCH
from instep.data.samples.contents import content_of
from instep.errors import DataError
from instep.usercode.counts import Counts

_FEWEST = 1, 2, 4
"""Samples of a batch that is read alone."""
_EPOCHS_S = 10.0
"""After so many seconds calls of `set_epoch` are not made again to see what they do."""


def side_effect(fetch: Fetch) -> str:
    """Find what reading changes in Python, so that it depends on what was read before.

    Args:
        fetch: reads in this process.

    Returns:
        Its name; `SET_EPOCH` if calls of that depend on earlier ones; empty if there is none.

    Raises:
        DataError: the dataset does not have as many samples in each epoch.
    """
    before = fetch.taken_counts()
    if before is None:
        return ""
    fetch.told.tell(0)
    fetch.read_by = os.getpid()
    with preserved(), suppress(Exception):  # that comes when its step does
        if found := _of_samples(fetch, before):
            return found
    return _of_epochs(fetch)


def _of_samples(fetch: Fetch, before: Counts) -> str:
    _alone(fetch, 0)  # which builds what is built once
    counts = fetch.counts()
    _alone(fetch, 0)
    if found := counts.changed():
        return found
    last = fetch.samples - 1
    others = [min(last, fetch.samples * n // 4 + n) for n in (1, 2, 3)]
    for place in (*others, last, 0):
        _alone(fetch, place)
    if found := counts.changed(memories=False):
        return found
    del counts  # it may hold what is open
    table = before.grown()  # a cache of samples, or numbers of labels?
    if not table:
        return ""
    before.put_back()
    alone = _alone(fetch, 0)
    before.put_back()
    for place in others:
        _alone(fetch, place)
    if _alone(fetch, 0) != alone:
        return table
    kept = _drawn_otherwise(fetch)
    before.put_back()
    return table if _drawn_otherwise(fetch) != kept else ""


def _of_epochs(fetch: Fetch) -> str:
    """Find whether a call of `set_epoch` leaves more, or less, behind when it is made again."""
    if not fetch.told.is_told:
        return ""
    places = [fetch.samples * n // 4 for n in range(4)]
    before = fetch.counts()
    began, known = time.monotonic(), dict[int, tuple[Counts, list[int]]]()
    try:
        for epoch in (0, 1, 1, 0):
            fetch.told.tell_again(epoch)
            counts, read = fetch.counts(), list[int]()
            with preserved(), suppress(Exception):
                read = [_alone(fetch, place) for place in places]
            seen, samples = known.setdefault(epoch, (counts, read))
            if samples != read or seen.changed(memories=False):
                return SET_EPOCH
            if time.monotonic() - began > _EPOCHS_S:
                break
    finally:
        before.put_back()
    return ""


def _alone(fetch: Fetch, place: int) -> int:
    """Read a batch of one sample, or of the fewest that `collate` takes; returns its content."""
    for size in _FEWEST:
        first = max(0, min(place, fetch.samples - size))
        seed_for_sample(fetch.seed, 0, 0)  # what was drawn last may be kept
        with suppress(DataError):
            return content_of(fetch.batch(Slice(0, first, min(first + size, fetch.samples)))[0])
    raise DataError("no batch can be read")


def _drawn_otherwise(fetch: Fetch) -> int:
    """Read the first sample of epoch 0 with what another epoch draws; returns its content."""
    (index,) = fetch.indices(Slice(0, 0, 1)).tolist()
    seed_for_sample(fetch.seed, 1, index)
    return content_of(fetch.sample(index))
