"""What a push does: it is numbered, moves the parameters, and counts towards its step.

A step of the job is complete when all its micro-batches are committed, in whatever order. Where
there are other servers, each moves its part: the push counts once all have. Nothing here knows
connections, files or the master. Way in: `Commits.grant` and `Commits.take`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from instep.engine.served.leased_optimizer import LeasedUpdate
from instep.server.coding import Given
from instep.server.messages import Apply, Prepare
from instep.server.micro_batches import Portions, change
from instep.server.peer_servers import Others
from instep.server.shard import Holding
from instep.state.packing import pack_state, unpack_state
from instep.sync.norm import norm as norm_of
from instep.sync.norm import recorded
from instep.sync.servers.leases import Committed, Leases, Unit, UnitLease

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
    """Of the mean loss, of each piece that this server has, as in `Holding.room`; what is not
    present holds anything."""
    changes: Sequence[Tensor]
    """What the pass has added to the buffers."""


class _Part(NamedTuple):
    """What a committed micro-batch has for the figures of its step."""

    total: float
    weight: float
    skipped: int
    norm: float
    """See `norm.recorded`."""


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
        holding: what this server has of them.
        buffers: of the model.
        update: has the learning rate.
        portions: the micro-batches.
        staleness: how many steps a micro-batch may be ahead; None for no bound.
        others: the other servers.
        undo: has `holding` be as the last commit left it.
        step: all of them up to this step are committed.
        left: what `state` gave, of another process; instead of what `step` says.
        first_token: of the first lease; see `Leases`.
    """

    def __init__(
        self,
        holding: Holding,
        buffers: Sequence[Tensor],
        update: LeasedUpdate,
        portions: Portions,
        *,
        staleness: int | None,
        others: Others,
        undo: Callable[[], None],
        step: int = 0,
        left: Mapping[str, Any] | None = None,
        first_token: int = 1,
    ) -> None:
        self._holding, self._buffers, self._update = holding, list(buffers), update
        self._portions, self._others, self._undo = portions, others, undo
        self.keeps = True
        """Whether all servers keep copies in memory that outlives them."""
        self._parts: dict[Unit, _Part] = {}  # of steps that `complete` has not been asked for
        for commit, number, *figures in unpack_state({}, left["parts"]) if left else ():
            self._parts[Unit(commit, number)] = _Part(*figures)
        self._last = dict[int, int](left["tokens"] if left else ())
        self._step = step
        self._usual = deque[float](maxlen=USUAL)
        self.leases = Leases(
            portions.count,
            staleness=staleness,
            step=step,
            beyond=self._parts,
            version=left["version"] if left else portions.before(step),
            first_token=first_token,
        )
        self._ahead = sum(self._samples(unit) for unit in self._parts)
        self._advanced = step  # by how many steps the scheduler has advanced
        self._count_steps()

    # ---- leases

    def grant(self, worker: int, now: float) -> tuple[UnitLease, Given] | None:
        """A lease, and the parameters and buffers to compute with, for as long as it counts; None
        if the worker has to wait.

        Args:
            worker: who asks; what was leased to it before is free again.
            now: seconds, on a clock that never goes back.
        """
        lease = self.leases.lease(worker, now, self._limit_s)
        if lease is None:
            return None
        return lease, self._holding.give(worker, lease.token, lease.version)

    def leave(self, worker: int) -> None:
        """A worker is gone, or has come again: what was leased to it is leased anew."""
        self.leases.leave(worker)
        self._holding.leave(worker)

    @property
    def _limit_s(self) -> float:
        """How long a lease counts while another worker has nothing to do."""
        longest = max(self._usual, default=math.inf)
        return max(LEAST_S, OVERDUE * longest)

    # ---- pushes

    def counted(self, worker: int, token: int) -> bool:
        """Whether a worker's last commit was under this lease."""
        return self._last.get(worker) == token

    def take(self, push: Push, now: float) -> Committed | None:
        """Commit a push, and move the parameters by it; None if it does not count.

        Where another server is lost meanwhile nothing has moved here, and the others are still to
        be told (`Others.meet`). What else is raised here ends the process.

        Raises:
            PeerError: as from `Others.ask`; nothing has moved here.
        """
        lease = self.leases.find(push.token)
        if lease is None:
            return None
        moved, found = self._move(push, lease)
        if not moved:
            self.leases.leave(lease.worker)
            return None
        committed = self.leases.push(push.token)
        assert committed is not None, "it counts"
        self._last[lease.worker] = push.token
        self._usual.append(now - lease.since)
        part = _Part(push.total, push.weight, push.skipped, recorded(found))
        self._parts[lease.unit] = part
        self._ahead += self._samples(lease.unit)
        for _ in range(self._count_steps()):
            self._update.advance()
        return committed

    def _move(self, push: Push, lease: UnitLease) -> tuple[bool, float | None]:
        """Have all servers move their parts; whether they have, and the norm of the gradient."""
        holding, others, version = self._holding, self._others, self.leases.version + 1
        moves, squares, found, factor = bool(push.weight), list[float](), None, 1.0

        def receive() -> None:
            given = lease.worker, version, push.present, push.gradients
            squares.extend(holding.receive(*given))

        def move() -> None:
            if moves:
                holding.move(version, factor)

        if moves:
            told = others.ask(Prepare(push.token, lease.worker, version), receive)
            if told is None or not all(each.fine for each in told):
                holding.drop()
                return False, None
            squares += [square for each in told for square in each.squares]
        if moves and self._update.clips:
            found = norm_of(squares)
            factor = self._update.factor(found)
        options, told = self._update.options() if others.count else [], None
        try:
            told = others.ask(Apply(version, moves, factor, options, self.keeps), move)
            if told is not None and not all(each.fine for each in told):
                told = None
                others.close()  # and are told where to be
        finally:
            if told is None and moves and others.count:
                self._undo()
        if told is None:
            return False, None
        self.keeps &= all(each.keeps for each in told)
        if moves:
            change(self._buffers, push.changes)
        return True, found

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
        return {
            "version": self.leases.version,
            "parts": pack_state(parts)[1],
            "tokens": sorted(self._last.items()),
        }
