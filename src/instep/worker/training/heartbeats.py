"""Heartbeats of a worker that trains a recipe: what it is doing, and how far it has come."""

from __future__ import annotations

import time

from instep.comm.protocol.messages import COMPILING, Heartbeat
from instep.data.reading.threads import cpu_clock
from instep.parallel.compiled import compiling
from instep.worker.loop.after_commit import CALLBACKS
from instep.worker.passes.activity import Activity
from instep.worker.passes.late_trial import TRYING
from instep.worker.reading.early_reads import EarlyReads
from instep.worker.reading.loader_watch import LoaderWatch
from instep.worker.training.inputs import Inputs


def doing(phase: str, of_forward: str) -> str:
    """Say what a worker is at, as precisely as it is known.

    Args:
        phase: of the worker.
        of_forward: of its forward pass.
    """
    within = {"validation": "validation", TRYING: "the trial of a batch"}
    if phase in within:
        return f"{within[phase]} ({of_forward})"
    return of_forward if phase == "forward" else phase


class Heartbeats:
    """Makes the heartbeats of one worker, from its first read on; for the thread that sends them.

    Args:
        activity: what the worker is doing.
    """

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._loaders, self._clock = LoaderWatch(), cpu_clock()
        self._early = EarlyReads(self._loaders)

    @property
    def _phase(self) -> str:
        return COMPILING if compiling() else self._activity.phase

    def early(self) -> Heartbeat:
        """Make one before there is a group."""
        return self._early.heartbeat(self._phase, self._clock())

    def within(self, inputs: Inputs, step: int, steps: int, done: int, *, once: bool) -> Heartbeat:
        """Make one while the worker trains.

        Args:
            inputs: of the worker.
            step: that is being computed.
            steps: that it has committed.
            done: batches and gradients so far.
            once: whether what is read cannot be read again, and may take any time to come.
        """
        phase = self._activity.phase
        if pids := inputs.pids:
            waits = phase in ("loading", "validation")
            at = step, phase, done
            self._loaders.turn(time.monotonic(), pids, at=at, waits=waits, known=steps > 0)
        # a callback may take as long as it likes, and so may what is read once
        free = (CALLBACKS, *(("loading", TRYING, "joining") if once else ()))
        called_back = int(time.monotonic()) if phase in free else 0
        return Heartbeat(
            step=step,
            steps=steps,
            phase=self._phase,
            progress=done + self._loaders.ended + called_back,
            cpu_s=self._clock() + sum(loader.cpu_s for loader in inputs.loaders),
        )
