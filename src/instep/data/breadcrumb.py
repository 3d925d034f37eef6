"""Where a process is, left in memory that outlives it: who reaps it can say what it died of.

A process that a signal ends has no last word. So the one that will fork it makes a
page of memory which both share; the process writes there which step it computes and
which sample it reads, and the other reads it once the process is gone. That costs
less than a microsecond for each sample. What follows from it is not known here.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any, TypeGuard

from instep.comm.messages import Whereabouts

SIZE = 1024
"""Bytes of one process's page."""

DATASETS = ("training", "validation")
"""Each has a place of its own: two threads may read at once."""

_PID, _STEP = range(2)
_FIRST, _EACH = 16, 48  # words before the first dataset, and of each
_SAMPLE, _COUNT, _AHEAD, _LENGTH, _NAME = range(5)
_LONGEST = 8 * (_EACH - _NAME)


class Trail:
    """What is said of one dataset by the process that reads it."""

    def __init__(self, memory: memoryview, dataset: str) -> None:
        first = _FIRST + _EACH * DATASETS.index(dataset)
        words = memory.cast("q")
        self._words = words[first : first + _EACH]
        self._name = memory[8 * (first + _NAME) : 8 * (first + _EACH)]
        self.ends()

    def begins(self, sample: int) -> None:
        """A sample is about to be read: one word is written."""
        self._words[_SAMPLE] = sample

    def begins_many(self, first: int, count: int) -> None:
        """So many samples are about to be read in one call, of which this is the first."""
        self._words[_COUNT] = count
        self._words[_SAMPLE] = first

    def begins_named(self, sample: int, file: str) -> None:
        """A sample is about to be read of which more is to be known."""
        name = os.fsencode(file)[-_LONGEST:]
        self._name[: len(name)] = name
        self._words[_LENGTH] = len(name)
        self._words[_SAMPLE] = sample

    def ends(self) -> None:
        """Nothing is read at the moment."""
        words = self._words
        words[_SAMPLE], words[_COUNT], words[_LENGTH] = -1, 1, 0

    @property
    def ahead(self) -> bool:
        """Whether nobody waits for what is read: the process may be at something else too."""
        return bool(self._words[_AHEAD])

    @ahead.setter
    def ahead(self, value: bool) -> None:
        self._words[_AHEAD] = value


class Pages:
    """Pages for the processes that this one forks; make them before the first fork.

    Args:
        count: how many may live at once; a process for which there is none leaves nothing.
    """

    def __init__(self, count: int) -> None:
        self._memory = memoryview(mmap.mmap(-1, count * SIZE))  # shared with whoever is forked

    def free(self) -> memoryview | None:
        """An empty page that nobody has, for a process that is about to be forked."""
        for page in self._pages():
            if not page.cast("q")[_PID]:
                page[:] = bytes(SIZE)
                return page
        return None

    def give(self, page: memoryview | None, pid: int) -> None:
        """The process has been forked."""
        if page is not None:
            page.cast("q")[_PID] = pid

    def take(self, pid: int) -> Whereabouts | None:
        """Where a process was that has ended, whoever forked it; None if it left nothing."""
        for page in self._pages():
            if page.cast("q")[_PID] == pid:
                found = left_in(page)
                page.cast("q")[_PID] = 0
                return found
        return None

    def reads(self) -> dict[int, Whereabouts]:
        """Where the living processes are that read a sample at the moment, by pid."""
        found = {page.cast("q")[_PID]: left_in(page) for page in self._pages()}
        return {pid: place for pid, place in found.items() if pid and at_a_read(place)}

    def _pages(self) -> list[memoryview]:
        return [self._memory[at : at + SIZE] for at in range(0, len(self._memory), SIZE)]


def left_in(page: memoryview) -> Whereabouts | None:
    """What a process has left; of two samples the one that it waited for."""
    words = page.cast("q")
    found = Whereabouts(step=words[_STEP])
    for number, dataset in enumerate(DATASETS):
        first = _FIRST + _EACH * number
        mine = words[first : first + _EACH]
        if mine[_SAMPLE] < 0 or not mine[_COUNT] or (mine[_AHEAD] and found.sample >= 0):
            continue
        begin = 8 * (first + _NAME)
        name = bytes(page[begin : begin + min(mine[_LENGTH], _LONGEST)])
        found = Whereabouts(
            step=words[_STEP],
            dataset=dataset,
            sample=mine[_SAMPLE],
            count=mine[_COUNT],
            ahead=bool(mine[_AHEAD]),
            file=os.fsdecode(name),
        )
    return found if found.step or found.sample >= 0 else None


def at_a_read(place: Whereabouts | None) -> TypeGuard[Whereabouts]:
    """Whether a process was reading a sample, as far as it left word."""
    return place is not None and place.sample >= 0


def reading(place: Whereabouts) -> str:
    """`while it read sample 512 (pictures/512.png)`: what a process was at that left word."""
    kind = "validation sample" if place.dataset == "validation" else "sample"
    many = f", or one of the {place.count - 1} after it in that call," if place.count > 1 else ""
    ahead, file = " ahead" if place.ahead else "", f" ({place.file})" if place.file else ""
    return f"while it read {kind} {place.sample}{file}{many}{ahead}"


# ---- of this process

_page = memoryview(bytearray(SIZE))
_trails = {dataset: Trail(_page, dataset) for dataset in DATASETS}
_readers: tuple[Pages, ...] = ()


def leave_in(page: memoryview | None) -> None:
    """From now on this process leaves word there; nowhere without one."""
    global _page, _readers
    _readers = ()  # those of the process that forked this one
    _page = page if page is not None else memoryview(bytearray(SIZE))
    _trails.update({dataset: Trail(_page, dataset) for dataset in DATASETS})


def reads_here() -> Whereabouts | None:
    """Where this process is, if it reads a sample and somebody waits for that."""
    place = left_in(_page)
    return place if at_a_read(place) and not place.ahead else None


def reads_for_us() -> dict[int, Whereabouts]:
    """Where processes are that read for this one, by pid; of those that are at a read."""
    return {pid: place for pages in _readers for pid, place in pages.reads().items()}


def follow(pages: Pages) -> None:
    """The processes of these pages read for this one, until `unfollow`."""
    global _readers
    _readers = (*_readers, pages)


def unfollow(pages: Pages) -> None:
    """They do so no longer; a second call does nothing."""
    global _readers
    _readers = tuple(each for each in _readers if each is not pages)


def trail(dataset: str) -> Trail:
    """Of a dataset that this process reads."""
    return _trails[dataset]


def at_step(step: int) -> None:
    """This process computes a step."""
    _page.cast("q")[_STEP] = step


# ---- names

_LISTS = ("samples", "imgs", "files", "paths", "image_paths", "filenames")


def files_of(dataset: Any) -> Callable[[int], str]:
    """The file of a sample by its index, as far as the dataset's attributes tell; else empty.

    Looked for are lists as long as the dataset, of paths or of tuples that begin with one,
    under the names that are usual, and through subsets.
    """
    kept = getattr(dataset, "__dict__", {})  # no property of the user's is asked
    inner, indices = kept.get("dataset"), kept.get("indices")
    if inner is not None and isinstance(indices, Sized):
        of_inner, chosen = files_of(inner), indices
        return lambda index: of_inner(int(chosen[index]))  # type: ignore[index]
    for name in _LISTS:
        table = kept.get(name)
        if not isinstance(table, list | tuple) or len(table) != len(dataset):
            continue
        if table and _path(table[0]):
            return partial(_path_at, table)
    return lambda index: ""


def _path_at(table: Sequence[Any], index: int) -> str:
    return _path(table[index])


def _path(entry: Any) -> str:
    first = entry[0] if isinstance(entry, tuple | list) and entry else entry
    return str(first) if isinstance(first, str | os.PathLike) else ""
