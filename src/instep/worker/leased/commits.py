"""What a push does: it is numbered, moves the parameters, and counts towards its step.

A step of the job is complete when all its micro-batches are committed, in whatever order. Nothing
here knows connections, files or the master. Way in: `Commits.grant` and `Commits.take`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.state.packing import pack_state, unpack_state
from instep.sync.servers.leases import Committed, Lease, Leases, Unit
from instep.sync.servers.server_async import ServerAsync
from instep.worker.leased.portions import Parcel, Portions, buffers_of, change
from instep.worker.step.leased import LeasedUpdate

USUAL = 64
"""Micro-batches from which it is learnt how long one takes."""

OVERDUE, LEAST_S = 4.0, 1.0
"""A lease is overdue after so many times the longest of these, and not before so many seconds."""


class Push(NamedTuple):
    """What a worker has computed under a lease."""

    token: int
    total: float
    """The loss: its mean times the weight."""
    weight: float
    """How much of what the loss is a mean of the micro-batch holds; 0 where nothing counts."""
    skipped: int
    """Samples that could not be read."""
    present: Sequence[bool]
    """Which parameters have a gradient; none where nothing counts."""
    gradients: Sequence[Tensor]
    """Of the mean loss, like the parameters; what is not present holds anything."""
    changes: Sequence[Tensor]
    """What the pass has added to the buffers."""


class _Part(NamedTuple):
    """What a committed micro-batch has for the figures of its step."""

    total: float
    weight: float
    skipped: int
    norm: float


class Complete(NamedTuple):
    """The figures of a complete step."""

    loss: float
    """Mean over its samples, by weight; each with the parameters that its worker had."""
    skipped: int
    norm: float | None
    """The largest of its gradients, before clipping; None where nobody wants it."""


class Commits:
    """The parameters of a run, and the order in which pushes move them.

    Args:
        model: has them.
        parameters: those that are trained.
        update: moves them.
        strategy: how.
        portions: the micro-batches.
        step: all of them up to this step are committed.
        left: what `state` gave, of another process; instead of what `step` says.
        first_token: of the first lease; see `Leases`.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        update: LeasedUpdate,
        strategy: ServerAsync,
        portions: Portions,
        *,
        step: int = 0,
        left: Mapping[str, Any] | None = None,
        first_token: int = 1,
    ) -> None:
        self._model, self._parameters = model, list(parameters)
        self._update, self._strategy, self._portions = update, strategy, portions
        self._parts: dict[Unit, _Part] = {}  # of steps that `complete` has not been asked for
        for commit, number, *figures in unpack_state({}, left["parts"]) if left else ():
            self._parts[Unit(commit, number)] = _Part(*figures)
        self._step = step
        self._given: dict[int, Parcel] = {}  # what each worker computes with
        self._usual = deque[float](maxlen=USUAL)
        self.leases = Leases(
            portions.count,
            staleness=strategy.staleness,
            step=step,
            beyond=self._parts,
            version=left["version"] if left else portions.before(step),
            first_token=first_token,
        )
        self._ahead = sum(self._samples(unit) for unit in self._parts)
        self._advanced = step  # by how many steps the scheduler has advanced
        self._count_steps()

    # ---- leases

    def grant(self, worker: int, now: float) -> tuple[Lease, list[Tensor]] | None:
        """A lease, and as bytes the parameters and buffers to compute with, for as long as it
        counts; None if the worker has to wait.

        Args:
            worker: who asks; what was leased to it before is free again.
            now: seconds, on a clock that never goes back.
        """
        lease = self.leases.lease(worker, now, self._limit_s)
        if lease is None:
            return None
        if worker not in self._given:
            self._given[worker] = Parcel(self._model, self._parameters)
        self._given[worker].load()
        return lease, self._given[worker].flats

    def leave(self, worker: int) -> None:
        """A worker is gone."""
        self.leases.leave(worker)
        self._given.pop(worker, None)

    @property
    def _limit_s(self) -> float:
        """How long a lease counts while another worker has nothing to do."""
        longest = max(self._usual, default=math.inf)
        return max(LEAST_S, OVERDUE * longest)

    # ---- pushes

    def take(self, push: Push, now: float) -> Committed | None:
        """Commit a push, and move the parameters by it; None if it does not count.

        Whatever is raised here ends the process.
        """
        committed = self.leases.push(push.token)
        if committed is None:
            return None
        lease, found = committed.lease, None
        self._usual.append(now - lease.since)
        if push.weight:
            found = self._move(push, committed)
        norm = math.nan if found is None else found
        self._parts[lease.unit] = _Part(push.total, push.weight, push.skipped, norm)
        self._ahead += self._samples(lease.unit)
        for _ in range(self._count_steps()):
            self._update.advance()
        return committed

    def _move(self, push: Push, committed: Committed) -> float | None:
        then = self._given[committed.lease.worker].parameters
        every = zip(self._parameters, push.present, push.gradients, then, strict=True)
        for parameter, present, gradient, before in every:
            parameter.grad = gradient if present else None
            if present and self._strategy.compensation and committed.lag:
                self._strategy.compensate(gradient, parameter.detach(), before)
        found = self._update.move(committed.version, self._strategy.rate(committed.lag))
        for parameter in self._parameters:
            parameter.grad = None
        change(buffers_of(self._model), push.changes)
        return found

    def _samples(self, unit: Unit) -> int:
        first, stop = self._portions.of(unit)
        return stop - first

    def _count_steps(self) -> int:
        """How many steps' worth of samples are committed since the last call."""
        before = self._advanced
        while self._ahead >= (size := self._portions.size(self._advanced + 1)):
            self._ahead -= size
            self._advanced += 1
        return self._advanced - before

    # ---- steps

    def complete(self) -> Complete:
        """The figures of the next step, all of whose micro-batches are committed."""
        self._step += 1
        assert self.leases.complete >= self._step, f"step {self._step} is not complete"
        count = self._portions.count(self._step)
        parts = [self._parts.pop(Unit(self._step, number)) for number in range(count)]
        weight = math.fsum(part.weight for part in parts)
        norms = [part.norm for part in parts if not math.isnan(part.norm)]
        return Complete(
            sum(part.total for part in parts) / (weight or 1.0),
            sum(part.skipped for part in parts),
            max(norms, default=None),
        )

    def state(self) -> dict[str, Any]:
        """What another process needs beside model and optimizer, as plain JSON."""
        parts = [[*unit, *part] for unit, part in sorted(self._parts.items())]
        return {"version": self.leases.version, "parts": pack_state(parts)[1]}
