"""Bytes that the workers of a run moved, as its events tell them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from instep.store.run_files import Event, Floats


class Traffic(NamedTuple):
    """Bytes one worker moved in the whole run, over all its processes."""

    sent_bytes: int
    received_bytes: int


class TrafficCounter:
    """Adds up what each worker says that its process has moved.

    A new process counts from 0: it has joined, or (where its master was lost before that was
    written) its counter has fallen.

    Args:
        most: times that are kept of a worker; of more, each second one. 0 for all.
    """

    def __init__(self, most: int = 0) -> None:
        self.counted: dict[int, list[tuple[float, Traffic]]] = {}
        """For each worker, Unix seconds and what it had moved by then, in order."""
        self._most = most
        self._seen: dict[int, Traffic] = {}
        self._pids: dict[int, object] = {}
        self._whole: tuple[float, Floats, Floats] | None = None

    def take(self, event: Event) -> None:
        """Count an event; those that say nothing of traffic are ignored."""
        if event["event"] not in ("traffic", "worker_joined"):
            return
        worker, nothing = int(event["worker"]), Traffic(0, 0)
        if event["event"] == "worker_joined":
            if self._pids.setdefault(worker, event["pid"]) != event["pid"]:
                self._seen.pop(worker, None)
                self._pids[worker] = event["pid"]
            return
        now = Traffic(int(event["sent_bytes"]), int(event["received_bytes"]))
        counted = self.counted.setdefault(worker, [])
        before, total = self._seen.get(worker, nothing), counted[-1][1] if counted else nothing
        if now.sent_bytes < before.sent_bytes or now.received_bytes < before.received_bytes:
            before = nothing
        sent = total.sent_bytes + now.sent_bytes - before.sent_bytes
        received = total.received_bytes + now.received_bytes - before.received_bytes
        counted.append((float(event["time"]), Traffic(sent, received)))
        self._whole = None
        self._seen[worker] = now
        if self._most and len(counted) > self._most:
            counted[:-1] = counted[:-1:2]

    def sent_by(self, times: Floats, begin: float) -> Floats:
        """Count the bytes that all workers together had sent by these Unix times; told about once a
        second, between two in proportion, and none at `begin`."""
        if self._whole is None or self._whole[0] != begin:
            self._whole = begin, *self._of_all(begin)
        _, moments, sent = self._whole
        return np.round(np.interp(times, moments, sent))

    def _of_all(self, begin: float) -> tuple[Floats, Floats]:
        """Moments at which a worker told something, in order, and what all had sent; [any] each."""
        told = []
        for counted in self.counted.values():
            known = [(begin, 0), *((time, moved.sent_bytes) for time, moved in counted)]
            moments, sent = np.array(known, np.float64).T
            told.append((np.maximum.accumulate(moments), sent))
        if not told:
            return np.array([begin]), np.zeros(1)
        moments = np.unique(np.concatenate([each for each, _ in told]))
        return moments, np.sum([np.interp(moments, *each) for each in told], axis=0)


class RunTraffic:
    """Bytes that all workers moved.

    Args:
        events: of the run, oldest first.
        begin: of its first step, Unix seconds; 0 if there is none.
    """

    def __init__(self, events: Iterable[Event], begin: float) -> None:
        self._events, self._begin = events, begin

    @cached_property
    def by_worker(self) -> dict[int, Traffic]:
        """Bytes of each worker, over all processes that it was."""
        return {worker: counted[-1][1] for worker, counted in self._counter.counted.items()}

    def sent_by(self, times: Floats) -> Floats:
        """Count the bytes that all workers together had sent by these Unix times."""
        return self._counter.sent_by(times, self._begin)

    @cached_property
    def _counter(self) -> TrafficCounter:
        counter = TrafficCounter()
        for event in self._events:
            counter.take(event)
        return counter
