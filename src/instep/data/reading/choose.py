"""Chooses by measuring: read in the process that trains, or in loader processes.

Loader processes can be the slow way: for small samples two of them were ten times slower than
reading in the process that trains. So a few samples are read at the start, and where they are
slow, processes are raced against reading here, while matrix products keep this process as busy
as training will. This takes under 0.3 s unless a handful of samples alone takes longer.

A dataset's own code is measured in a loader process, because nothing may read it here before
the processes are forked. That process is kept if processes are chosen. Where only torch's and
instep's own code reads, a thread may read ahead as well. It must not where the user's code
does: a thread shares the global generators with training, and comparing their states cannot
tell which of the two drew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from instep.data.cores import cores
from instep.data.order import key
from instep.data.reading import wire
from instep.data.reading.fetch import Fetch, Slice
from instep.data.reading.pool import Pool
from instep.data.reading.process import Work
from instep.data.reading.readers import Ahead, Reader
from instep.data.reading.side_effects import side_effect
from instep.data.reading.streams.stream import QUESTIONS
from instep.data.reading.template import Say
from instep.data.samples.fingerprint import SAMPLES, fingerprint
from instep.errors import DataError
from instep.words import plural

_CHEAP_S = 0.2e-3
"""A faster sample is not worth a trip between processes where a thread would do."""

_SHORT_S = 1e-3
"""A faster slice is not worth a trip between processes at all."""

_QUICK_S = 0.3e-3
"""A faster slice is not worth a thread, which competes for the interpreter and a core."""

_PROBE_S, _PROBE_SAMPLES = 0.025, 63
_RACE_PARTS = 4
_PROCESSES = 2
_WARM_S, _LIMIT_S = 0.005, 0.06
_CLEARLY = 0.9
"""Processes must take at most this share of the time here: they cost memory too."""

_OF_LOADER = 4

LOOK, FINGERPRINT, COUNTED = Slice(-1, 0, 0), Slice(-2, 0, 0), Slice(-4, 0, 0)
"""Submitted to a reader in place of a slice: asks for a `Probe`, for the fingerprint, and for
what reading counts."""

OF_CONTENTS = -3
"""In place of an epoch: asks for the contents of samples."""


class Probe(NamedTuple):
    """What reading the first samples of epoch 0 showed."""

    samples: int
    sample_s: float
    slice_s: float
    """All of the last slice, half of the samples."""
    busy: float
    """CPU time over wall time: 1 computes, 0 waits."""
    can_be_sent: bool
    """Whether the batch can come from another process."""


class Choice(NamedTuple):
    """How slices are read, and why."""

    mode: Literal["inline", "ahead", "processes"]
    why: str
    pool: Pool | None


def choose(
    fetch: Fetch,
    processes: int | Literal["auto"],
    worker_init: Callable[[int], Any] | None = None,
    say: Say = lambda text: None,
    info_dataset: Any = None,
) -> Choice:
    """Measure, then decide; a dataset's own code is not run in this process.

    Args:
        fetch: reads.
        processes: how many are asked for.
        worker_init: called in each process with its number, before it reads.
        say: called with a sentence at each fork that failed and is retried.
        info_dataset: `get_worker_info().dataset` in a loader process.

    Raises:
        DataError: the first sample cannot be read; not raised here where the
            dataset's own code will read in this process.
    """
    seed = key(fetch.seed, _OF_LOADER) >> 1
    work = Work(fetch, Handler(fetch), info_dataset, seed, worker_init)
    if fetch.stream is not None:
        return _choose_for_stream(fetch, work, processes, say)
    if processes == 0:
        return _here(fetch, look(fetch) if fetch.plain else None, "data.loaders = 0")
    if processes != "auto":
        pool = Pool(work, processes, unread=lambda: _unread(fetch), say=say)
        try:
            pool.take(pool.submit(Slice(0, 0, 1)))
        except BaseException:
            pool.close()
            raise
        return Choice("processes", _told(f"data.loaders = {processes}", pool), pool)
    if fetch.plain:
        return _choose_plain(fetch, work, say)
    if not hasattr(os, "fork"):
        return _here(fetch, None, "this system cannot fork")
    return _choose_by_measuring(fetch, work, say)


class Handler:
    """What a reader runs: on a slice, `LOOK`, `FINGERPRINT`, `COUNTED`, or one of contents."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __call__(self, part: Slice) -> Any:
        fetch = self._fetch
        if part == LOOK:
            return tuple(look(fetch))
        if fetch.stream is not None and part in QUESTIONS:
            return fetch.stream.answer(part)
        if part == FINGERPRINT:
            among = fetch.stream.few(SAMPLES) if fetch.stream is not None else None
            return fingerprint(fetch.samples, fetch.seed, fetch.content, among=among).to_plain()
        if part == COUNTED:
            return side_effect(fetch)
        if part.epoch == OF_CONTENTS:
            return fetch.contents(part.first, part.stop)
        return fetch(part)


def _choose_for_stream(fetch: Fetch, work: Work, processes: int | str, say: Say) -> Choice:
    """One process reads it, as each part has one iterator; or this one does."""
    if processes == 0 or not hasattr(os, "fork"):
        return Choice("inline", "a stream", None)
    pool = Pool(work, 1, unread=lambda: _unread(fetch), say=say)
    return Choice("processes", _told("a stream", pool), pool)


def _unread(fetch: Fetch) -> bool:
    return fetch.plain or fetch.read_by != os.getpid()


def look(fetch: Fetch) -> Probe:
    """Read slices of 1, 2, 4, ... samples until enough time has passed.

    The caller's generators are left as they were.

    Raises:
        DataError: the first sample cannot be read. Errors of later ones, or of
            stacking them, are left to the slices of the run, which may be others.
    """
    begin, busy = time.perf_counter(), time.process_time()
    batch, *_ = fetch(Slice(0, 0, 1))
    stop, now = 1, time.perf_counter()
    sample_s = slice_s = now - begin
    while now - begin < _PROBE_S and stop < min(_PROBE_SAMPLES, fetch.samples):
        part = Slice(0, stop, min(2 * stop + 1, fetch.samples))
        started = now
        try:
            more, *_ = fetch(part)
        except DataError:
            break
        batch = batch if more is None else more
        stop, now = part.stop, time.perf_counter()
        slice_s = now - started
        sample_s = slice_s / (part.stop - part.first)
    share = (time.process_time() - busy) / max(now - begin, 1e-9)
    return Probe(stop, sample_s, slice_s, min(share, 1.0), _can_be_sent(batch))


def _can_be_sent(batch: Any) -> bool:
    try:
        wire.pack(batch)
    except DataError:
        return False
    return True


def _choose_plain(fetch: Fetch, work: Work, say: Say) -> Choice:
    """This process, a thread, or processes; all read from one object, which keeps nothing."""
    probe = look(fetch)
    cost = _cost(probe)
    if probe.sample_s < _CHEAP_S:
        return _here(fetch, probe, f"{cost}, less than {_CHEAP_S * 1e3:g} ms")
    if not hasattr(os, "fork"):
        return _here(fetch, probe, f"{cost}; this system cannot fork")
    if fetch.samples < _RACE_PARTS:
        return _here(fetch, probe, f"{cost}; {fetch.samples} samples are too few for a race")
    chores, parts = _race_of(probe)
    here = Ahead(fetch)
    try:
        here_s = _timed(here, parts, chores)
    finally:
        here.close()
    return _raced(fetch, probe, lambda: Pool(work, 1, of=_PROCESSES, say=say), here_s)


def _choose_by_measuring(fetch: Fetch, work: Work, say: Say) -> Choice:
    """This process or loader processes; so far only the latter run the dataset's own code."""
    try:
        pool = Pool(work, 1, of=_PROCESSES, unread=lambda: _unread(fetch), say=say)
    except DataError as error:
        return _here(fetch, None, f"processes were tried, but: {error}")
    try:
        probe = Probe(*pool.take(pool.submit(LOOK)))
    except BaseException:
        pool.close()
        raise
    if why := _why_here(probe, pool):
        pool.close()
        return _here(fetch, probe, why)
    if probe.samples < _RACE_PARTS:
        return _choose_unraced(fetch, probe, pool)
    chores, parts = _race_of(probe)
    here_s = chores.seconds + sum(part.stop - part.first for part in parts) * probe.sample_s
    return _raced(fetch, probe, lambda: pool, here_s)


def _why_here(probe: Probe, pool: Pool) -> str:
    """Why loader processes are out of the question; empty if they are not."""
    if pool.reads_here:
        return pool.trouble
    if probe.slice_s < _SHORT_S:
        count = probe.samples // 2 + 1
        return f"{count} samples take {probe.slice_s * 1e3:.2g} ms, less than {_SHORT_S * 1e3:g} ms"
    return "" if probe.can_be_sent else f"{_cost(probe)}; its type cannot be sent between processes"


def _told(why: str, pool: Pool) -> str:
    """Why samples are read so, and what went wrong with the pool, if anything did."""
    return f"{why}; {pool.trouble}" if pool.trouble else why


def _cost(probe: Probe) -> str:
    return f"a sample takes {probe.sample_s * 1e3:.2g} ms"


def _here(fetch: Fetch, probe: Probe | None, why: str) -> Choice:
    if not fetch.plain:
        return Choice("inline", why, None)
    assert probe is not None, "a plain dataset is always probed"
    if probe.slice_s < _QUICK_S:
        count = probe.samples // 2 + 1
        text = f"{count} samples take {probe.slice_s * 1e3:.2g} ms, a thread would cost more"
        return Choice("inline", f"{why}; {text}", None)
    return Choice("ahead", why, None)


def _choose_unraced(fetch: Fetch, probe: Probe, pool: Pool) -> Choice:
    """Samples too slow for a race: reads that wait overlap, reads that compute need a core."""
    spare = cores() - torch.get_num_threads()
    cores_left = plural(max(spare, 0), "core")
    facts = f"{_cost(probe)}, {probe.busy:.0%} of it computing, with {cores_left} to spare"
    if probe.busy > 0.5 and spare < 1:
        pool.close()
        return _here(fetch, probe, facts)
    try:
        pool.grow(_PROCESSES)
    except DataError as error:
        return _here(fetch, probe, f"{facts}; processes were tried, but: {error}")
    return Choice("processes", _told(facts, pool), pool)


def _race_of(probe: Probe) -> tuple[_Chores, list[Slice]]:
    size = max(probe.samples // _RACE_PARTS, 1)  # samples seen before: all find warm caches
    parts = [Slice(0, i * size, (i + 1) * size) for i in range(_RACE_PARTS)]
    # half of what reading takes alone: the choice matters only where reading is the longer part
    return _Chores(_RACE_PARTS * size * probe.sample_s / 2), parts


def _raced(fetch: Fetch, probe: Probe, made: Callable[[], Pool], here_s: float) -> Choice:
    """Processes, if they are clearly faster than `here_s`."""
    chores, parts = _race_of(probe)
    pool = None
    try:
        pool = made()
        pool.grow(_PROCESSES)
        for ticket in [pool.submit(Slice(0, i, i + 1)) for i in range(_PROCESSES)]:
            pool.take(ticket)  # each process copies the memory that it touches, once
        there_s = _timed(pool, parts, chores)
    except DataError as error:
        if pool is not None:
            pool.close()
        return _here(fetch, probe, f"{_cost(probe)}; processes were tried, but: {error}")
    except BaseException:
        if pool is not None:
            pool.close()
        raise
    facts = (
        f"{_cost(probe)}; {parts[-1].stop} of them beside other work took {here_s * 1e3:.0f} ms "
        f"here, {there_s * 1e3:.0f} ms in {_PROCESSES} processes"
    )
    if there_s < _CLEARLY * here_s:
        return Choice("processes", _told(facts, pool), pool)
    pool.close()
    return _here(fetch, probe, _told(facts, pool))


class _Chores:
    """Matrix products on this process's threads, which stand in for training."""

    def __init__(self, seconds: float) -> None:
        self._matrix = torch.full((192, 192), 1e-3)
        self.count = 2**30
        self.do(_WARM_S)
        done, took_s = self.do(_WARM_S)
        self.count = max(1, round(done * seconds / took_s))
        self.seconds = self.count * took_s / done
        """What they take alone."""

    def do(self, limit_s: float) -> tuple[int, float]:
        """Do all, or as many as the limit allows; returns how many, and seconds."""
        begin, done, took_s = time.perf_counter(), 0, 0.0
        while done < self.count and took_s < limit_s:
            self._matrix @ self._matrix
            done += 1
            took_s = time.perf_counter() - begin
        return done, took_s


def _timed(reader: Reader, parts: list[Slice], chores: _Chores) -> float:
    """Seconds until chores and slices are both done; chores beyond the limit are extrapolated.

    A thread that computes in Python can slow training tenfold, as both compete for the
    interpreter: the race must not wait for that.
    """
    begin = time.perf_counter()
    tickets = [reader.submit(part) for part in parts]
    done, took_s = chores.do(_LIMIT_S)
    for ticket in tickets:
        reader.take(ticket)
    return time.perf_counter() - begin + took_s * (chores.count / done - 1)
