"""A worker's end of training without lockstep: ask, compute, push, until the run is over.

It has a connection to each server. What it has computed it leaves with all others before it shows
the token to the first, so no server ever waits for it. It holds nothing that another process would
miss, but with a codec what it carries over to its next push. If a connection breaks it connects
again, and what it had leased is leased again; if it is killed, likewise. It knows no other worker.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from instep.comm.alone import AloneComm
from instep.data.loader import Slice
from instep.data.samples import last_read
from instep.engine.clock import Clock
from instep.engine.member import Member
from instep.engine.served.leased_optimizer import LeasedUpdate
from instep.engine.state.buffers import Buffers
from instep.engine.turns import key_of_pass
from instep.errors import PeerError, RecipeError
from instep.recipe.build import set_generators
from instep.recipe.recipe import Recipe
from instep.server.coding import Coding, Held, WorkerPushes
from instep.server.connect import AGAIN_S, reach
from instep.server.messages import Pull, ServerAnswer, Stage
from instep.server.micro_batches import (
    Parcel,
    Portions,
    buffers_of,
    changes,
    frozen_in,
    pieces_of,
)
from instep.server.tensor_channel import Ask, Grant, Line
from instep.sync.norm import recorded
from instep.sync.servers.leases import Unit
from instep.sync.servers.server_async import ServerAsync
from instep.worker.loop.after_commit import Step
from instep.worker.training.training import Training

_FIXED = (
    "With sync.name = {!r} a server has room for it from the start: run one batch through the "
    "model in the recipe."
)

Told = TypeVar("Told", Grant, ServerAnswer)


@dataclass
class _Share:
    """What this worker has done of a step that is not complete."""

    samples: int = 0
    clock: Clock = field(default_factory=Clock)


class Working(Training):
    """A worker of a run.

    Args:
        member: this worker's membership in the run.
        recipe: what is trained.
        device: the CPU.

    Raises:
        InstepError: job or recipe cannot be trained.
    """

    def __init__(self, member: Member, recipe: Recipe, device: torch.device) -> None:
        super().__init__(member, recipe, device)
        self._portions = Portions(self.samples, self.job.per_commit)
        model, parameters = self.engine.model, self.engine.parameters
        by_element = cast(LeasedUpdate, self._update).by_element
        pieces = pieces_of(parameters, self.job.sync.servers, by_element=by_element)
        buffers = [buffers_of(model), *[[]] * (len(pieces) - 1)]  # with the first server's part
        coding = Coding(cast(ServerAsync, self.engine.turn.strategy), parameters)
        every = zip(pieces, buffers, strict=True)
        self._held = [Held(coding, *each) for each in every]  # of each server
        self._pushes = WorkerPushes(coding, pieces, buffers)
        self._lacks: Parcel | None = None  # a checkpoint has them, and the server
        if member.checkpoint is not None:
            self._lacks = frozen_in(model, parameters)
        self._watched = Buffers(model)
        self._shares: dict[int, _Share] = {}
        self._known = 0
        self._agreed = False

    # ---- generations: nothing of a step belongs to one

    def _form(self) -> None:
        form = self.member.form
        assert form is not None, "no generation yet"
        if not self._agreed:
            self._agreed = True
            self._agree_on_trial(AloneComm())
        self._inputs.mark()
        self.sized(len(form.members))
        self.member.formed()

    def _report_ready(self) -> None:
        self._announce()

    def _keep_up(self) -> None:
        """Be in the generation that the master has begun.

        Raises:
            Released: the run continues without this worker.
        """
        if self.member.regroups:
            self.member.broken(holds=True)
        elif not self.member.superseded:
            return
        before = self.activity.phase
        self._regroup()
        self.activity.enter(before)

    # ---- units

    def steps(self) -> Iterator[Step]:
        """Compute what is leased, to the end of the run; yields nothing."""
        yield from ()
        while True:
            end = self._until_the_end()
            if self.member.done(end.step, end.ends, finite=end.finite):
                break
            self._regroup()
        self.close()

    def _until_the_end(self) -> Grant:
        while True:
            lines = list[Line]()
            try:
                self.activity.enter("joining")
                for place in range(len(self._held)):
                    lines.append(reach(self.member, place, self._keep_up))
                return self._work(*lines)
            except PeerError as error:  # raised again, if there is no master either
                with suppress(OSError):  # a full disk must not end the run
                    print(f"instep: {error}", file=sys.stderr, flush=True)
                time.sleep(AGAIN_S)
            finally:
                for line in lines:
                    line.close()

    def _work(self, first: Line, *others: Line) -> Grant:
        """Until the end of the run.

        Raises:
            PeerError: a connection broke.
        """
        if self._lacks is not None:
            first.send(Ask(frozen=True), ())
            grant = first.receive(Grant, self._lacks.flats, self._keep_up)
            if grant.ends:
                return grant
            self._lacks.store()
            self._lacks, self._watched = None, Buffers(self.engine.model)
        ask, body = Ask(unsure=self._pushes.unsettled), list[Tensor]()
        clock = Clock(begin=time.time())
        while True:
            ask.known = self._known
            self.activity.enter("exchange")
            since = time.perf_counter()
            if body:
                self._stage(others, Stage(ask.token, ask.present))
            first.send(ask, body)
            grant = self._receive(first, Grant, self._held[0])
            if not grant.ends:
                self._pushes.settle(grant.counted)
                self._pull(others, grant.token)
                self._held[0].take(grant.token, grant.since)
            took = time.perf_counter() - since
            clock.wait += min(grant.held_s, took)
            clock.wire += max(0.0, took - grant.held_s)
            if grant.counted and ask.token >= 0:
                self._count(Unit(self.step, self._number), clock)
            self._report(grant)
            if grant.ends:
                return grant
            clock = Clock(begin=time.time())
            self.step, self._number = grant.step, grant.number
            ask = self._compute(grant, clock)
            body = self._pushes.rooms[0].flats if ask.weight else []
            self._done += 1

    _number = 0

    def _stage(self, others: Sequence[Line], question: Stage) -> None:
        """Leave the gradient with all servers but the first."""
        for line, room in zip(others, self._pushes.rooms[1:], strict=True):
            line.send(question, room.flats)
        for line in others:
            line.receive(ServerAnswer, (), self._keep_up)

    def _pull(self, others: Sequence[Line], token: int) -> None:
        """Get what to compute with from all servers but the first."""
        for line in others:
            line.send(Pull(token), ())
        for line, held in zip(others, self._held[1:], strict=True):
            held.take(token, self._receive(line, ServerAnswer, held).since)

    def _receive(self, line: Line, kind: type[Told], held: Held) -> Told:
        """An answer with what to compute with."""
        return line.receive(kind, lambda told: held.room(told.since), self._keep_up)

    def _compute(self, grant: Grant, clock: Clock) -> Ask:
        """The gradient of one micro-batch, in `_pushes`; or nothing, if nothing in it counts."""
        last_read.set_step(self.step)
        epoch, unit = self._portions.where(self.step).epoch, Unit(grant.step, grant.number)
        self.activity.enter("loading")
        since = time.perf_counter()
        (read,) = self._loader.read([Slice(epoch, *self._portions.of(unit))], self._record)
        since = clock.lap(since, "load")
        self._skips.report(read.skipped, dataset="training", step=self.step, epoch=epoch)
        ask = Ask(grant.token, skipped=len(read.skipped))
        set_generators(key_of_pass(self.job.seed, unit.step, unit.number, 0))
        self.activity.enter("forward")
        found = self._forward.loss(read.batch, read.size) if read.size else None
        since = clock.lap(since, "forward")
        if found is None:
            return ask
        self.activity.enter("backward")
        for parameter in self.engine.parameters:
            parameter.grad = None
        found.loss.backward()
        ask.total, ask.weight = float(found.loss.detach()) * found.factor, found.factor
        if ask.weight:
            ask.present = self._pack_gradients(grant.token, unit)
        self._watched.refuse_reshaped(_FIXED.format(self.job.sync.name))
        now = buffers_of(self.engine.model)
        changes(now, self._held[0].parcel.buffers, self._pushes.rooms[0].buffers)
        self._watched.after_pass(0.0, unit.number)  # each module has its own tensors again
        clock.lap(since, "backward")
        return ask

    def _pack_gradients(self, token: int, unit: Unit) -> list[bool]:
        gradients = [parameter.grad for parameter in self.engine.parameters]
        for parameter, gradient in zip(self.engine.parameters, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                names = (n for n, each in self.engine.model.named_parameters() if each is parameter)
                raise RecipeError(
                    f"the gradient of {next(names)!r} is sparse, and sync.name = "
                    f"{self.job.sync.name!r} sends none that is. Use sync.name = 'server_sync' and "
                    "nn.Embedding(..., sparse=True), whose rows servers have; or leave sparse=True "
                    "out."
                )
        self._pushes.pack(token, unit, gradients)
        for parameter in self.engine.parameters:
            parameter.grad = None
        return [each is not None for each in gradients]

    # ---- the record

    def _count(self, unit: Unit, clock: Clock) -> None:
        """A push was a commit."""
        share = self._shares.setdefault(unit.step, _Share(clock=Clock(begin=clock.begin)))
        first, stop = self._portions.of(unit)
        share.samples += stop - first
        for part in ("load", "forward", "backward", "wait", "wire"):
            setattr(share.clock, part, getattr(share.clock, part) + getattr(clock, part))

    def _report(self, grant: Grant) -> None:
        """Record this worker's part of steps that are complete."""
        for step, loss, norm in grant.complete:
            share = self._shares.pop(step, None)
            self._known = max(self._known, step)
            if share is None:
                continue
            row = (step, self.member.number, share.samples, loss, *share.clock.parts)
            self.member.records.add(b"", (*row, recorded(norm)))
