"""Heartbeats of a worker that reads samples before its first step.

A recipe that downloads for an hour looks like one that sleeps forever, so a worker may take any
time to get ready. But samples are read before the first step too: the first one, those of the
fingerprint, those of the trial. During such a read the heartbeat says so, and the worker counts
as hanging by the same rule as in training (`control/watch.py`). A loader process that loops is
killed here (`loader_watch.py`). `data/samples/last_read.py` knows what a process reads.
"""

from __future__ import annotations

import time

from instep.comm.protocol.messages import READING, Heartbeat, Whereabouts
from instep.data.samples import last_read
from instep.worker.reading.loader_watch import LoaderWatch


class EarlyReads:
    """The heartbeats of one worker, from before its loaders are made until it joins a group.

    Args:
        loaders: watches the loader processes.
    """

    def __init__(self, loaders: LoaderWatch) -> None:
        self._loaders = loaders
        self._at: tuple[Whereabouts, ...] = ()
        self._ended = 0

    def heartbeat(self, phase: str, cpu_s: float) -> Heartbeat:
        """Called a few times a second, by another thread than the one that reads.

        Args:
            phase: of the worker while it reads no sample.
            cpu_s: CPU seconds of its computing and reading so far.
        """
        here, others = last_read.own_read(), last_read.loader_reads()
        at = (here,) if here is not None else tuple(others[pid] for pid in sorted(others))
        if at and at != self._at:  # the replacement of a killed process reads the same
            self._at = at
            self._ended += 1
        waits = bool(others) and here is None
        self._loaders.turn(time.monotonic(), [*others], at=self._at, waits=waits, known=False)
        return Heartbeat(
            phase=READING if at else phase,
            progress=self._ended + self._loaders.ended,
            cpu_s=cpu_s,
        )
