"""The first server's end of training without lockstep: grants leases, commits pushes, ends steps.

It is a loop of one member: its steps are those of the job, and a step is over when workers have
pushed all its micro-batches. So what follows a step (validation, checkpoint, rules that stop the
run) is that of every other training. For what needs exactly the steps up to one, no micro-batch of
later steps is leased before that is done (`_limit`).

An update is committed in this order: parameters, on all servers (`others.py`), a copy of all that
this one has in memory that outlives the process, the ledger, the answer. A process that takes this
one's place continues from that copy, and has the other servers go back to it. The model is whole
here only for what reads it, which asks the others for their parts (`_gather`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from instep.comm.alone import AloneComm
from instep.comm.base import Comm
from instep.comm.protocol.messages import Form, Heartbeat
from instep.data.loader import Read, Slice
from instep.data.order import Position
from instep.engine.clock import Clock
from instep.engine.member import Member
from instep.engine.passes import Share
from instep.engine.served.leased_optimizer import LeasedUpdate
from instep.engine.skipping import share_read
from instep.engine.state.committed import Commit
from instep.engine.update import Update
from instep.errors import PeerError
from instep.events import Kind
from instep.recipe.recipe import Recipe
from instep.records import Attempt
from instep.server.commits import Commits, Push
from instep.server.connect import reach, tell
from instep.server.door import Door, Guest
from instep.server.messages import End, Give, ServerAnswer, Write
from instep.server.micro_batches import Parcel, buffers_of, frozen_in
from instep.server.peer_servers import Others, halfway, lost
from instep.server.request_queue import Desk
from instep.server.server import TrainingServer
from instep.server.shard import Holding
from instep.server.shard_service import HELD, write_shard, written_by
from instep.server.step_limits import LagCount, StepLimits
from instep.server.tensor_channel import Ask
from instep.state.files.staging import SAVING
from instep.state.pieces import SHARD
from instep.state.snapshot import model_tensors
from instep.sync.norm import recorded
from instep.sync.servers.leases import UnitLease
from instep.sync.servers.server_async import ServerAsync
from instep.system.host_memory import NoRoom
from instep.worker.loop.parts import Parts, Shards
from instep.worker.loop.shard_files import could_not_write
from instep.worker.passes.base import Compute, Results


class Pushed(Compute):
    """Computes by taking what workers push; a server itself reads nothing.

    Args:
        take_until: takes pushes until a step is complete.
    """

    def __init__(self, take_until: Callable[[int], None]) -> None:
        self._take_until = take_until

    def slices(self, share: Share) -> Iterable[Slice]:
        """Slices to read: none."""
        return ()

    def run(self, where: Position, share: Share, reads: Iterator[Read], step: int) -> Results:
        """Run the passes of a step, on workers."""
        self._take_until(step)
        return Results({}, [])


class Serving(TrainingServer):
    """The first server of a run, or its only one; as `TrainingServer`."""

    def __init__(self, member: Member, recipe: Recipe, device: torch.device) -> None:
        super().__init__(member, recipe, device)
        self._others = Others(
            self._servers - 1,
            lambda place: reach(member, place, self._keep_up),
            self._keep_up,
            lambda: (self.engine.state.progress.course, self.commits.leases.version),
            member.number,
        )
        self.callbacks.gather = self._gather
        self.after.parts = ServerParts(self)
        self._held: Mapping[str, Tensor] = {}  # by the process before
        self._whole_at: tuple[int, int] | None = None  # the update at which the model was whole
        self._left: dict[str, Any] | None = None  # by it
        self._row: tuple[int, ...] | None = None  # of the last commit, for the ledger
        self._ledger_at = 0  # where it begins there
        self._written = b""  # since the last complete step
        self._lag = LagCount()
        validates = self._inputs.validate is not None
        self._limits = StepLimits(
            self.job, self.last_step, self._portions, self.samples, validates=validates
        )
        self._desk: Desk | None = None
        self._commits: Commits | None = None
        self._holding: Holding

    @property
    def commits(self) -> Commits:
        """There once a generation has begun."""
        assert self._commits is not None, "join() comes first"
        return self._commits

    @property
    def desk(self) -> Desk:
        """There once a generation has begun."""
        assert self._desk is not None, "join() comes first"
        return self._desk

    def join(self) -> None:
        """Take up what the process before this one has left, and begin to serve."""
        found = self._copy.of_all(AloneComm(), self.device)
        if found is not None:
            _, snapshot = found
            self._left = snapshot.facts.pop("leased")
            if self._servers > 1:
                self._held = snapshot.tensors.pop(HELD)
                rest = snapshot.tensors["model"]
                snapshot.tensors["model"] = model_tensors(self.engine.model) | rest
            self.engine.state.take(snapshot, "the memory of this host")
            self.engine.state.settled = max(0, self.engine.state.progress.step - 1)
            self.member.holds = True
        super().join()

    # ---- generations: connections outlive them

    @property
    def _group(self) -> Form:
        """This server alone: workers have no part in its steps but by their pushes."""
        number = [self.member.number]
        return msgspec.structs.replace(
            super()._group, members=number, rank=0, servers=(), draining=()
        )

    def _make_comms(self) -> tuple[Comm, Comm]:
        return AloneComm(), AloneComm()

    def _form(self) -> None:
        form = self.member.form
        assert form is not None, "no generation yet"
        if form.checkpoint is None and self.member.others_have_state and not self.engine.state.held:
            raise lost(self.member.number, self._servers)
        if form.checkpoint is not None:
            self._left = None
            self._copy.clear()
        super()._form()
        if self._row is not None:  # the process before may have been killed before it was written
            self.engine.records.ledger.cut(self._ledger_at)
            self._write(self._row)
        if self._desk is None:
            self._open()

    def _before_steps(self, comm: Comm) -> None:
        super()._before_steps(comm)
        assert self.member.form is not None, "no generation yet"
        self.sized(len(self.member.form.members))
        if self._commits is not None:
            return
        left, self._left = self._left, None
        self._holding = self._made_holding(buffers_of(self.engine.model))
        if left is not None and self._servers > 1:
            self._holding.take(self._held)
        self._held = {}
        self._commits = Commits(
            self._holding,
            buffers_of(self.engine.model),
            cast(LeasedUpdate, self._update),
            self._portions,
            staleness=cast(ServerAsync, self.engine.turn.strategy).staleness,
            others=self._others,
            undo=self._undo,
            step=self.engine.state.progress.step,
            left=left,
            first_token=time.time_ns(),  # above all of a server before this one
        )
        if left is None:
            self._keep()
            return
        self._lag = LagCount(tuple(left["lag"]))
        if left["row"] is not None:
            self._row, self._ledger_at = tuple(left["row"]), left["ledger_bytes"]

    def _open(self) -> None:
        holding = self._holding
        given = self.member.outside, holding.room, self.member.credentials
        member = self.member
        most = 2 * member.job.workers  # all may come at once
        door = Door(*given, token=member.token, most=most, sums=holding.coded)
        self._desk = Desk(door, self.commits, self._take, self._frozen)
        tell(self.member, 0, door)
        if idle := sum(not each for each in holding.shares):
            self.announcer.warn(
                f"sync.servers = {self._servers}, and there are no parameters for {idle} of them: "
                "choose fewer"
            )

    def _frozen(self) -> list[Tensor]:
        parcel = frozen_in(self.engine.model, self.engine.parameters)
        parcel.load()
        return parcel.flats

    def _leave(self, error: PeerError | None = None) -> None:
        if self.engine.started:
            self.engine.buffers.after_update()  # or they would be taken back
        super()._leave(error)

    # ---- steps

    def _make_compute(self, update: Update) -> Compute:
        return Pushed(self._take_until)

    def _take_until(self, step: int) -> None:
        """Take pushes until every unit up to this step is committed."""
        self.commits.leases.stop_after(self._limits.from_step(self.step))
        self.activity.enter("exchange")
        while self.commits.leases.complete < step:
            self._turn()

    def _one_step(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Any, None, Commit]:
        yield from ()
        self.compute.run(where, share, loads, self.step)
        return self._end_step(where)

    def _end_step(self, where: Position) -> Commit:
        limits, step, begun, figures = (
            self._limits,
            self.step,
            self.commits.leases.begun,
            self.commits.complete(),
        )
        share_read(figures.skipped, where.size)
        asked = self.after.stopping.asked_to_stop(step)
        if asked or self.after.stopping.not_finite(figures.loss, figures.norm):
            limits.end_at(begun)
        if self.after.is_late:
            limits.save_at(begun)
        told, saves = step == limits.ends_at, limits.take_save(step)
        if told or saves or limits.has(step):  # no unit of a later step is committed
            self._lag.tell(self.member, step)
        ends = told or limits.ends(step)
        done = Commit(step, figures.loss, figures.norm, told, ends, figures.skipped, saves=saves)
        self.engine.buffers.after_update()  # pushes have moved some
        self.engine.state.commit(done, where)
        self.desk.completed(step, figures.loss, figures.norm)
        clock = self.engine.clock
        row = (step, self.member.number, 0, figures.loss, *clock.parts, recorded(figures.norm))
        self.member.records.add(self._written, row)
        self._written, self.engine.clock = b"", Clock(begin=time.time())
        if not self.after.stopping.spec.non_finite:
            self.announcer.warn_of_loss(step, done.loss)
        return done

    # ---- what workers ask

    def _turn(self) -> None:
        """Take in what arrives, and answer all that can be answered."""
        since = time.perf_counter()
        arrived = self.desk.next()
        since = self.engine.clock.lap(since, "wait")
        self._keep_up()
        self._others.meet(idle=arrived is None)
        self.desk.take_in(arrived)
        self.desk.answer()
        self.engine.clock.lap(since, "update")

    def _take(self, guest: Guest, ask: Ask) -> bool:
        """Whether a push is a commit; then it is one for all."""
        figures = ask.token, ask.total, ask.weight, ask.skipped, ask.present
        push = Push(*figures, guest.body.pieces, guest.body.buffers)
        committed = self.commits.take(push, time.monotonic())
        if committed is None:
            self._others.meet()
            return False
        self._row = self._entry(committed.lease)
        self._lag.add(committed.lag)
        self._keep()
        self._write(self._row)
        return True

    def _entry(self, lease: UnitLease) -> tuple[int, ...]:
        """Of a commit, for the ledger."""
        step, number = lease.unit
        epoch, course = self._portions.where(step).epoch, self.engine.state.progress.course
        at = self._portions.of(lease.unit)
        return (
            step, epoch, course, self.engine.state.generation, lease.worker, Kind.RANGE, number, *at
        )  # fmt: skip

    def _keep(self) -> None:
        """Copy the state of the last commit into memory that outlives this process."""
        if not self._copy.lasts:
            return
        if not self.commits.keeps:
            self._go_without_copies("another server has none.")
            return
        self._ledger_at = self.engine.records.ledger.size_bytes if self._row is not None else 0
        snapshot = self.engine.state.for_another()
        if self._servers > 1:  # not what other servers have
            model, parameters = self.engine.model, {id(p) for p in self.engine.parameters}
            every = model.named_parameters(remove_duplicate=False)
            for name in [name for name, each in every if id(each) in parameters]:
                del snapshot.tensors["model"][name]
            snapshot.tensors[HELD] = self._holding.kept()
        snapshot.facts["leased"] = {
            "row": self._row,
            "ledger_bytes": self._ledger_at,
            "lag": self._lag.figures,
            **self.commits.state(),
        }
        version, generation = self.commits.leases.version, super()._group.generation
        at = Attempt(self.engine.state.progress.course, version, generation)
        try:
            self._copy.keep(snapshot, at)
        except NoRoom as error:
            self._go_without_copies(str(error))

    def _go_without_copies(self, why: str) -> None:
        self._copy.drop()
        self.commits.keeps = False
        self.member.emit(
            "warning",
            text=f"no memory for copies of the server's state: {why} Training continues "
            "without them: if the server is lost, the run ends, and can be resumed from its "
            "newest checkpoint.",
        )

    def _undo(self) -> None:
        """Have what this server holds be as the last commit left it."""
        held = self._copy.held()
        if not held:
            raise halfway(self._servers)
        self._holding.take(self._copy.back_to(held[0]).tensors[HELD])

    def _write(self, row: tuple[int, ...]) -> None:
        """Append a commit to the ledger.

        Raises:
            PeerError: this process may not write any more.
        """
        written = self.engine.records.ledger.append([row])
        if not written:
            self.member.lease.fence()
            raise PeerError("the master did not answer for too long: the others may continue.")
        self._written += written

    # ---- what needs the parts of all servers

    def _gather(self) -> None:
        """Have the model whole: with the parts of the other servers, as of the last update."""
        at = self.engine.state.progress.course, self.commits.leases.version
        if self._servers == 1 or self._whole_at == at:
            return
        rooms = [Parcel(self.engine.parameters, each) for each in self._holding.shares[1:]]
        self._others.must(Give(), bodies=[room.flats for room in rooms])
        for room in rooms:
            room.store()
        self._whole_at = at

    def _validate(self, where: Position) -> dict[str, float] | None:
        if self._inputs.validate is not None:
            self._gather()
        return super()._validate(where)

    def written_by_all(self, *, last: bool) -> Shards:
        """Have each server write a checkpoint of what it holds."""
        self._gather()
        state, folder, names = self.engine.state, self.member.run / "checkpoints", self._names
        step = state.progress.step
        begins = str(folder / f"{SAVING}{step}-{SHARD}")
        asked, own = Write(begins, f"-{state.generation}", last), list[ServerAnswer]()
        told = self._others.must(
            asked, lambda: own.append(write_shard(asked, 0, self._holding, names))
        )
        shards, failed = written_by(asked, answers := [own[-1], *told])
        if failed is None:
            return shards
        why = answers[failed]
        if not why.errno:
            self.member.emit("warning", text=f"no checkpoint of step {step}: {why.why}")
        who = f"server {self.member.number + failed}"
        return could_not_write(step, who, folder, why.errno)

    # ---- the end

    def _finish_saving(self) -> None:
        self._gather()
        super()._finish_saving()
        self._end_others()

    def _end_others(self) -> None:
        """Tell the other servers of the end; again, where a generation has begun meanwhile, since
        the run is over once all have ended in the same."""
        told = -1
        while told != self.engine.state.generation:
            told = self.engine.state.generation
            self._others.must(End(self.step, self.after.rule, self.after.finite, told))

    def finish(self) -> bool:
        """Tell all workers that the run is over, and save the model; as `Loop.finish`."""
        self.desk.end(self.step, self.after.rule, finite=self.after.finite)
        return super().finish()

    def _heartbeat(self) -> Heartbeat:
        found = super()._heartbeat()
        done = self._commits.leases.version if self._commits is not None else 0
        return msgspec.structs.replace(found, progress=found.progress + done)

    def close(self) -> None:
        """Close all connections too."""
        super().close()
        self._others.close()
        if self._desk is not None:
            self._desk.close()


class ServerParts(Parts):
    """Has all servers write what they hold.

    Args:
        serving: the first of them.
    """

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving.engine, serving.member)
        self._serving = serving

    @property
    def many(self) -> bool:
        """Whether there are several."""
        return self._serving.job.sync.servers > 1

    def write(self, due: bool, *, last: bool) -> tuple[bool, dict[str, Tensor], Shards]:
        """Have each write its part, if a checkpoint is due, as `Parts.write` says."""
        if not due:
            return False, {}, {}
        return True, {}, self._serving.written_by_all(last=last)
