"""Read beside training in a thread, or in processes: whichever a measurement favours.

Loader processes can be the slow path: for small samples two of them were ten
times slower than reading in the process that trains. So a few samples are read
at the start, and where they are dear both ways are raced while matrix products
keep this process as busy as training will. Takes under 0.3 s unless a handful
of samples alone takes longer.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal, NamedTuple

import torch

from instep.data import keyed, wire
from instep.data.fetch import Fetch, Slice
from instep.data.processes import Pool
from instep.data.readers import Ahead, Inline, Reader
from instep.errors import DataError

_CHEAP_S = 0.2e-3
"""A sample that takes less is not worth a trip between processes."""

_QUICK_S = 0.3e-3
"""A slice that takes less is not worth a thread: both want the interpreter, and one core."""

_PROBE_S, _PROBE_SAMPLES = 0.025, 63
_RACE_PARTS = 4
_PROCESSES = 2
_WARM_S, _LIMIT_S = 0.005, 0.06
_CLEARLY = 0.9
"""Processes must need this share of the thread's time or less: they cost memory too."""


class Probe(NamedTuple):
    """What reading the first samples of epoch 0 showed."""

    samples: int
    sample_s: float
    slice_s: float
    """All of the last slice, half of the samples."""
    busy: float
    """CPU time over wall time: 1 computes, 0 waits."""
    carried: bool
    """Whether the batch can come from another process."""


class Choice(NamedTuple):
    """How slices are read from now on."""

    mode: Literal["inline", "ahead", "processes"]
    why: str
    pool: Pool | None


def choose(fetch: Fetch, processes: int | Literal["auto"]) -> Choice:
    """Look at the dataset, then decide; sets `fetch.draws`.

    Raises:
        DataError: the first sample cannot be read.
    """
    probe = look(fetch)
    if processes == "auto":
        return _choose_by_measuring(fetch, probe)
    if processes == 0:
        return _here(fetch, probe, "data.loaders = 0")
    return Choice("processes", f"data.loaders = {processes}", Pool(fetch, processes))


def look(fetch: Fetch) -> Probe:
    """Read slices of 1, 2, 4, ... samples until it has cost enough.

    The caller's generators are left as they were.

    Raises:
        DataError: the first sample cannot be read. What is wrong with later
            ones, or with stacking them, is left to the slices of the run, which
            may be cut otherwise.
    """
    begin, busy = time.perf_counter(), time.process_time()
    with keyed.kept() as before:
        batch, _ = fetch(Slice(0, 0, 1))
        stop, now = 1, time.perf_counter()
        sample_s = slice_s = now - begin
        while now - begin < _PROBE_S and stop < min(_PROBE_SAMPLES, fetch.samples):
            part = Slice(0, stop, min(2 * stop + 1, fetch.samples))
            started = now
            try:
                more, _ = fetch(part)
            except DataError:
                break
            batch = batch if more is None else more
            stop, now = part.stop, time.perf_counter()
            slice_s = now - started
            sample_s = slice_s / (part.stop - part.first)
        fetch.draws = not keyed.states().same(before)
    share = (time.process_time() - busy) / max(now - begin, 1e-9)
    return Probe(stop, sample_s, slice_s, min(share, 1.0), _carried(batch))


def _carried(batch: Any) -> bool:
    try:
        wire.pack(batch)
    except DataError:
        return False
    return True


def _choose_by_measuring(fetch: Fetch, probe: Probe) -> Choice:
    cost = f"a sample takes {probe.sample_s * 1e3:.2g} ms"
    if probe.sample_s < _CHEAP_S:
        return _here(fetch, probe, f"{cost}, less than {_CHEAP_S * 1e3:g} ms")
    if not probe.carried:
        return _here(fetch, probe, f"{cost}; its type cannot come from another process")
    if not hasattr(os, "fork"):
        return _here(fetch, probe, f"{cost}; this system cannot fork")
    if probe.samples < _RACE_PARTS:
        return _choose_unraced(fetch, probe, cost)
    try:
        return _race(fetch, probe, cost)
    except DataError as error:
        return _here(fetch, probe, f"{cost}; processes were tried, but: {error}")


def _here(fetch: Fetch, probe: Probe, why: str) -> Choice:
    if fetch.draws:
        text = "the dataset draws from global generators, which training shares"
        return Choice("inline", f"{why}; {text}", None)
    if probe.slice_s < _QUICK_S:
        count = probe.samples // 2 + 1
        text = f"{count} samples take {probe.slice_s * 1e3:.2g} ms, a thread would cost more"
        return Choice("inline", f"{why}; {text}", None)
    return Choice("ahead", why, None)


def _choose_unraced(fetch: Fetch, probe: Probe, cost: str) -> Choice:
    """Samples too slow to race in the time there is: waiting overlaps, computing needs a core."""
    spare = cores() - torch.get_num_threads()
    facts = f"{cost}, {probe.busy:.0%} of it computing, with {max(spare, 0)} cores to spare"
    if probe.busy > 0.5 and spare < 1:
        return _here(fetch, probe, facts)
    return Choice("processes", facts, Pool(fetch, _PROCESSES))


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _race(fetch: Fetch, probe: Probe, cost: str) -> Choice:
    size = probe.samples // _RACE_PARTS  # samples seen before, so that both find warm caches
    parts = [Slice(0, i * size, (i + 1) * size) for i in range(_RACE_PARTS)]
    # half of what reading takes alone: only where reading is the longer part does the way matter
    chores = _Chores(_RACE_PARTS * size * probe.sample_s / 2)
    here: Reader = Inline(fetch.keeping) if fetch.draws else Ahead(fetch)
    try:
        here_s = _timed(here, parts, chores)
    finally:
        here.close()
    pool = Pool(fetch, _PROCESSES)
    try:
        for ticket in [pool.submit(Slice(0, i, i + 1)) for i in range(_PROCESSES)]:
            pool.take(ticket)  # each process copies what it touches of the parent's memory, once
        there_s = _timed(pool, parts, chores)
    except BaseException:
        pool.close()
        raise
    facts = (
        f"{cost}; {_RACE_PARTS * size} of them beside other work took {here_s * 1e3:.0f} ms here, "
        f"{there_s * 1e3:.0f} ms in {_PROCESSES} processes"
    )
    if there_s < _CLEARLY * here_s:
        return Choice("processes", facts, pool)
    pool.close()
    return _here(fetch, probe, facts)


class _Chores:
    """Matrix products on this process's threads, in place of training."""

    def __init__(self, seconds: float) -> None:
        self._matrix = torch.full((192, 192), 1e-3)
        self._count = 2**30
        self.do(_WARM_S)
        done, took_s = self.do(_WARM_S)
        self._count = max(1, round(done * seconds / took_s))

    @property
    def count(self) -> int:
        return self._count

    def do(self, limit_s: float) -> tuple[int, float]:
        """Do all, or as many as the limit allows: how many, and seconds."""
        begin, done, took_s = time.perf_counter(), 0, 0.0
        while done < self._count and took_s < limit_s:
            self._matrix @ self._matrix
            done += 1
            took_s = time.perf_counter() - begin
        return done, took_s


def _timed(reader: Reader, parts: list[Slice], chores: _Chores) -> float:
    """Seconds until chores and slices are both done; chores beyond the limit are extrapolated.

    A thread that computes in Python can slow training tenfold, as each wants
    the interpreter when the other has it: the race must not wait for that.
    """
    begin = time.perf_counter()
    tickets = [reader.submit(part) for part in parts]
    done, took_s = chores.do(_LIMIT_S)
    for ticket in tickets:
        reader.take(ticket)
    return time.perf_counter() - begin + took_s * (chores.count / done - 1)
