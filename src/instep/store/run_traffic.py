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
        return {worker: counted[-1][1] for worker, counted in self._counted.items()}

    def sent_by(self, times: Floats) -> Floats:
        """Count the bytes that all workers together had sent by these Unix times; told about once a
        second, between two in proportion."""
        total = np.zeros(len(times))
        for counted in self._counted.values():
            known = [(self._begin, 0), *((time, moved.sent_bytes) for time, moved in counted)]
            moments, sent = zip(*known, strict=True)
            total += np.interp(times, np.maximum.accumulate(moments), sent)
        return np.round(total)

    @cached_property
    def _counted(self) -> dict[int, list[tuple[float, Traffic]]]:
        """For each worker, Unix seconds and what it had moved by then, in order.

        A new process counts from 0: it has joined, or (where its master was lost before that was
        written) its counter has fallen.
        """
        totals: dict[int, list[tuple[float, Traffic]]] = {}
        seen: dict[int, Traffic] = {}
        pids: dict[int, object] = {}
        nothing = Traffic(0, 0)
        for event in self._events:
            if event["event"] not in ("traffic", "worker_joined"):
                continue
            worker = int(event["worker"])
            if event["event"] == "worker_joined":
                if pids.setdefault(worker, event["pid"]) != event["pid"]:
                    seen.pop(worker, None)
                    pids[worker] = event["pid"]
                continue
            now = Traffic(int(event["sent_bytes"]), int(event["received_bytes"]))
            counted = totals.setdefault(worker, [])
            before, total = seen.get(worker, nothing), counted[-1][1] if counted else nothing
            if now.sent_bytes < before.sent_bytes or now.received_bytes < before.received_bytes:
                before = nothing
            sent = total.sent_bytes + now.sent_bytes - before.sent_bytes
            received = total.received_bytes + now.received_bytes - before.received_bytes
            counted.append((float(event["time"]), Traffic(sent, received)))
            seen[worker] = now
        return totals
