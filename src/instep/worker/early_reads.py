"""What a worker shows of its reads of samples while it gets ready.

Nobody can tell a recipe that downloads for an hour from one that sleeps for ever, so
a worker that gets ready takes as long as it takes. But samples are read before the
first step too: the first one, those by which the dataset is known again, those of the
trial. While one is read the worker shows that it reads, as in training, and hangs by
the same rule (`watch.py`); of loader processes, the one that loops is ended from here
(`loader_watch.py`). Where a process reads is told by `data/samples/last_read.py`.
"""

from __future__ import annotations

import time

from instep.comm.messages import READING, Heartbeat, Whereabouts
from instep.data.samples import last_read
from instep.worker.loader_watch import LoaderWatch


class EarlyReads:
    """Of one worker, from before its loaders are made until it joins a group.

    Args:
        loaders: looks after the loader processes.
    """

    def __init__(self, loaders: LoaderWatch) -> None:
        self._loaders = loaders
        self._at: tuple[Whereabouts, ...] = ()
        self._ended = 0

    def heartbeat(self, phase: str, cpu_s: float) -> Heartbeat:
        """To be asked for a few times a second, by another thread than the one that reads.

        Args:
            phase: what the worker is at where it reads no sample.
            cpu_s: what its computing and reading has used so far.
        """
        here, others = last_read.own_read(), last_read.loader_reads()
        at = (here,) if here is not None else tuple(others[pid] for pid in sorted(others))
        if at and at != self._at:  # whoever takes the place of one that was ended reads the same
            self._at = at
            self._ended += 1
        waits = bool(others) and here is None
        self._loaders.turn(time.monotonic(), [*others], at=self._at, waits=waits, known=False)
        return Heartbeat(
            phase=READING if at else phase,
            progress=self._ended + self._loaders.ended,
            cpu_s=cpu_s,
        )
