"""Workers that were lost while they predicted: what is said of each, and when it was too often.

Pure: the master of predictions (`master.py`) says what happened.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from instep.client.predict.batches import START, PredictBatches
from instep.client.predict.replicas import PredictReplica
from instep.comm.protocol.messages import Whereabouts
from instep.control.decisions.endings import signal_name
from instep.errors import WorkerError


class PredictLosses:
    """The lost workers of one command.

    Args:
        batches: what is done, and where workers were lost.
        logs: the folder of the workers' logs.
        say: prints a line.
    """

    def __init__(self, batches: PredictBatches, logs: Path, say: Callable[[str], None]) -> None:
        self._batches, self._logs, self._say = batches, logs, say
        self.count = 0
        """How many were lost."""

    def add(
        self,
        replica: PredictReplica,
        number: int,
        at: int,
        code: int | None,
        place: Whereabouts | None,
        *,
        killed: str = "",
        hung: bool = False,
    ) -> None:
        """Count a lost worker, and give up if that has happened too often there.

        Args:
            replica: that it was of.
            number: of the worker.
            at: the batch that it was at.
            code: its exit code, if that is known.
            place: where it was, if that is known.
            killed: why the master killed it, if it did.
            hung: whether that was because it got nothing done.

        Raises:
            WorkerError: it has happened too often.
        """
        self.count += 1
        itself = not killed and code is not None and code != -signal.SIGKILL
        how = killed or (_how(code) if code is not None else "it has ended")
        often = self._batches.lost(at, how, place, own=itself or bool(killed), dies=itself or hung)
        where = "before it had a batch" if at == START else f"at batch {at}"
        again = "another takes its place"
        if len(numbers := replica.numbers) > 1:
            again = f"workers {numbers[0]} to {numbers[-1]}, one replica, start again"
        self._say(f"worker {number} was lost {where}: {how}; {again}")
        if often:
            reading = self._batches.deadly.said(place)
            text = f"{self._batches.said(at)}: {how}{reading}.\n"
            raise WorkerError(f"{text}  full log: {self._logs / f'worker-{number}.log'}")


def _how(code: int) -> str:
    return f"it was killed by {signal_name(code)}" if code < 0 else f"it ended with code {code}"
