"""Which step a process computes and which sample it reads, in memory that outlives it.

A process that a signal kills cannot report anything. So its parent makes a page of memory
that both share before it forks: the child writes its step and sample there (under a
microsecond a sample), and the parent reads the page once the child is dead. What to
conclude from a page is not decided here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from typing import TypeGuard

from instep.comm.protocol.messages import Whereabouts

DATASETS = ("training", "validation")
"""Each has its own part of a page: two threads may read at once."""


class _Read(ctypes.Structure):
    _fields_ = (
        ("sample", ctypes.c_int64),  # -1: none
        ("count", ctypes.c_int64),  # 0 in a page that was never used
        ("ahead", ctypes.c_int64),
        ("file", ctypes.c_char * 344),
    )


class Page(ctypes.Structure):
    """What one process writes."""

    _fields_ = (
        ("pid", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("reads", _Read * len(DATASETS)),
    )


class CurrentRead:
    """Records what this process reads of one dataset."""

    def __init__(self, page: Page, dataset: str) -> None:
        self._read = page.reads[DATASETS.index(dataset)]
        self.clear()

    def start(self, sample: int) -> None:
        """A sample is about to be read; writes one integer."""
        self._read.sample = sample

    def start_many(self, first: int, count: int) -> None:
        """`count` samples are about to be read in one call; `first` is the first of them."""
        self._read.count = count
        self._read.sample = first

    def start_named(self, sample: int, file: str) -> None:
        """A sample is about to be read; its file is recorded too."""
        self._read.file = os.fsencode(file)[-_Read.file.size :]
        self._read.sample = sample

    def clear(self) -> None:
        """Nothing is read at the moment."""
        self._read.sample, self._read.count, self._read.file = -1, 1, b""

    @property
    def ahead(self) -> bool:
        """Whether nothing waits for this read, so that the process may be busy elsewhere too."""
        return bool(self._read.ahead)

    @ahead.setter
    def ahead(self, value: bool) -> None:
        self._read.ahead = value


class Pages:
    """Pages for the processes that this one starts; make them before the first.

    Args:
        count: how many processes may live at once; one for which no page is free records nothing.
        file: descriptor of the pages of another process, to share them.
    """

    def __init__(self, count: int, file: int = -1) -> None:
        size = count * ctypes.sizeof(Page)
        self.count, self.file = count, memory_file(size) if file < 0 else file
        self._pages: ctypes.Array[Page] = (Page * count).from_buffer(mmap.mmap(self.file, size))

    def close(self) -> None:
        """Give the memory back; other processes keep theirs. A second call does nothing."""
        if self.file >= 0:
            os.close(self.file)
        self.file, self._pages = -1, (Page * 0)()  # the map has a descriptor of its own

    def free(self) -> Page | None:
        """The first unused page, emptied, for a process that is about to be forked."""
        number, page = next(((n, p) for n, p in enumerate(self._pages) if not p.pid), (0, None))
        if page is not None:
            ctypes.memset(ctypes.addressof(page), 0, ctypes.sizeof(page))
            page.number = number
        return page

    def assign(self, page: Page | None, pid: int) -> None:
        """The process has been forked and uses this page."""
        if page is not None:
            page.pid = pid

    def collect(self, pid: int) -> Whereabouts | None:
        """Where a dead process was, and free its page; None if it recorded nothing."""
        for page in self._pages:
            if page.pid == pid:
                page.pid = 0
                return decode_page(page)
        return None

    def current_reads(self) -> dict[int, Whereabouts]:
        """By pid, where the living processes are that read a sample at the moment."""
        found = {page.pid: decode_page(page) for page in self._pages}
        return {pid: place for pid, place in found.items() if pid and is_reading(place)}


def memory_file(size: int = 0) -> int:
    """A new file in memory of this many bytes, which has no name; its descriptor."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("instep-pages")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.ftruncate(file, size)
    return file


def decode_page(page: Page) -> Whereabouts | None:
    """What a page says; of two samples being read, the one that the process waited for."""
    found = Whereabouts(step=page.step)
    for dataset, read in zip(DATASETS, page.reads, strict=True):
        if read.sample < 0 or not read.count or (read.ahead and found.sample >= 0):
            continue
        found = Whereabouts(
            step=page.step,
            dataset=dataset,
            sample=read.sample,
            count=read.count,
            ahead=bool(read.ahead),
            file=os.fsdecode(read.file),
        )
    return found if found.step or found.sample >= 0 else None


def is_reading(place: Whereabouts | None) -> TypeGuard[Whereabouts]:
    """Whether a process was reading a sample, as far as its page says."""
    return place is not None and place.sample >= 0


def describe_read(place: Whereabouts) -> str:
    """`while it read sample 512 (pictures/512.png)`."""
    kind = "validation sample" if place.dataset == "validation" else "sample"
    many = f", or one of the {place.count - 1} after it in that call" if place.count > 1 else ""
    file = f" ({place.file})" if place.file else ""
    ahead = f"{',' * bool(many)} ahead" if place.ahead else ""
    return f"while it read {kind} {place.sample}{file}{many}{ahead}"


# ---- of this process

_page = Page()
_current = {dataset: CurrentRead(_page, dataset) for dataset in DATASETS}
_loader_pages: tuple[Pages, ...] = ()


def use_page(page: Page | None) -> None:
    """Record in this page from now on; in memory of this process alone if None."""
    global _page, _loader_pages
    _loader_pages = ()  # those of the process that forked this one
    _page = page if page is not None else Page()
    _current.update({dataset: CurrentRead(_page, dataset) for dataset in DATASETS})


def own_read() -> Whereabouts | None:
    """Where this process is, if it reads a sample and something waits for that."""
    place = decode_page(_page)
    return place if is_reading(place) and not place.ahead else None


def loader_reads() -> dict[int, Whereabouts]:
    """By pid, where the loader processes of this process are that read a sample."""
    return {pid: place for pages in _loader_pages for pid, place in pages.current_reads().items()}


def add_loader_pages(pages: Pages) -> None:
    """The processes of these pages read for this one, until `remove_loader_pages`."""
    global _loader_pages
    _loader_pages = (*_loader_pages, pages)


def remove_loader_pages(pages: Pages) -> None:
    """They no longer do; a second call does nothing."""
    global _loader_pages
    _loader_pages = tuple(each for each in _loader_pages if each is not pages)


def current_read(dataset: str) -> CurrentRead:
    """The record of a dataset that this process reads."""
    return _current[dataset]


def set_step(step: int) -> None:
    """This process computes this step."""
    _page.step = step
