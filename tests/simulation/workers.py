"""A worker of a story: what `member.py` and `training.py` do, without any tensor.

Each method stands for the one of the same name there, and waits where that
one waits. Where the main thread is busy, what arrives is taken in all the
same, as by the thread that listens.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from instep.comm.protocol import messages as m
from instep.comm.protocol.connection import HEARTBEAT_S
from instep.comm.protocol.messages import ON_REQUEST
from instep.control.seen import WAITING
from instep.data.batches import Batches
from instep.engine.assignment import NOTHING_FINISHED, Lockstep, finished
from instep.engine.membership import FLUSH_S
from instep.engine.state.catch_up import NOWHERE, HeldCommit, beginning
from instep.errors import PeerError
from instep.events import STEPS

from .engine import TIME, Death, Process, Violation
from .groups import End, Wait
from .owning import Own, Stamp, Things
from .roles import SimulatedConnection
from .truth import Lineage, Part, Record, with_work

if TYPE_CHECKING:
    from .world import World


class Released(Exception):
    """The run has no more use for this worker."""


class ReplicaBroke(Exception):
    """The group inside its replica came apart, which lives as long as its processes."""


class Last(NamedTuple):
    """As `committed.Commit`."""

    step: int
    told: bool
    ends: bool


class Staged(NamedTuple):
    """A step of which all is there but the commit."""

    done: Last
    record: Record
    things: Things


class Worker(Process):
    """One worker's process."""

    def __init__(self, world: World, pid: int, number: int) -> None:
        super().__init__(world.engine, pid, f"worker-{number}")
        self.number, self._world, self._truth = number, world, world.truth
        self.phase, self._step, self._progress = "building", 0, 0
        self._listening = self._leaving = self.built = False
        self.form: m.Form | None = None
        self._next: m.Form | None = None
        self._stop: m.Stop | None = None
        self._ended = False
        self._regroup_at = -1
        self._verdicts: list[m.Verdict] = []
        self._asked = self._answered = self._waiting_for = 0
        self._timed: list[tuple[Any, ...]] = []
        self._flushed = TIME.now
        self._end: End | None = None
        self._fellows: End | None = None
        """Its end of the group inside its replica, where that has several processes."""
        self._in_group = False  # whether there is a replica
        self._holds = False
        self._lineage: Lineage = ()
        self._last: Last | None = None
        self._settled = 0
        self._record: Record | None = None
        self._assignment: Lockstep | None = None
        self._parts: dict[int, Part] = {}
        """Of the step that it is at, by number of the first unit."""
        self._recovers, self._one_fate = True, world.plan.together
        self._own = Own(number, world.memory[number])
        self._staged: Staged | None = None
        self._in_doubt = False
        self._inside = -1  # the newest generation that it was inside; 0 if it was given the state
        self._regroups = False
        self._told_by_rule = False
        self.lead(self._life())

    # ---- the connection

    def arrived(self) -> None:
        """Something is there to be read."""
        if self._listening:
            for message in self.connection.takes_in():
                if isinstance(message, m.Form):
                    self._told_to_form(message)
        self.wake()

    def _told_to_form(self, form: m.Form) -> None:
        """As `Member._arrived`."""
        self.connection.hello = msgspec.structs.replace(
            self.connection.hello, generation=form.generation
        )
        if self.form is not None and form.generation > self.form.generation:
            self._interrupt()

    @property
    def is_server(self) -> bool:
        """Whether it holds parameters, and computes nothing."""
        return self.form is not None and self.form.role == "server"

    @property
    def _has_work(self) -> bool:
        return self.form is not None and self.number in with_work(self.form)

    @property
    def shows_itself(self) -> bool:
        """Whether it tells the master a few times a second that it lives."""
        return self._listening

    def _interrupt(self) -> None:
        if self._in_group and self.phase in WAITING and self._end is not None:
            self._end.interrupt()

    def _beat(self) -> None:
        if not self.alive:
            return
        if not self.stopped:
            self.connection.beats(
                m.Heartbeat(step=self._step, phase=self.phase, progress=self._progress)
            )
        self.engine.after(HEARTBEAT_S, self._beat)

    def told_to_leave(self) -> None:
        """SIGTERM."""
        self._leaving = True

    def _wait_for(self, *wanted: type[m.AnyMessage]) -> Wait:
        passed = []
        while not isinstance(message := self.connection.inbox.poll(), wanted):
            if message is None:
                yield None
            else:
                passed.append(message)
        for each in reversed(passed):
            self.connection.inbox.put_back(each)
        return message

    def _listen(self) -> None:
        if self._leaving:
            self._leaving = False
            self.connection.send(m.Notice())
        while (message := self.connection.inbox.poll()) is not None:
            match message:
                case m.Stop():
                    self._stop = message
                case m.Verdict():
                    self._verdicts.append(message)
                case m.Form():
                    self._next = message
                case m.Regroup(generation=generation):
                    self._regroup_at = generation
                case m.StoreValue():
                    pass
                case _:
                    self.connection.inbox.put_back(message)
                    return

    def _flush(self) -> None:
        self._flushed = TIME.now
        if self._timed:
            data = np.array(self._timed, STEPS).tobytes()
            self._timed.clear()
            self.connection.send(m.Records(ledger=b"", steps=data))

    def _point(self, name: str) -> None:
        """A place in the code at which it may be killed."""
        if self._world.kills_at(name):
            self.engine.tell(self, f"is killed at {name!r}")
            raise Death

    # ---- its life

    def _life(self) -> Generator[float | None, None, int]:
        hello = m.Hello(token="token", role="worker", number=self.number, pid=self.pid)
        try:
            self.connection = SimulatedConnection(self._world, self, hello)
            self.connection.lasting = True
            answer = yield from self._wait_for(m.Welcome, m.Refused)
        except PeerError:
            return 5
        self.connection._welcomed = True
        if isinstance(answer, m.Refused):
            return 5
        self._recovers = answer.recovers
        self.connection.shows_itself()
        self._listening = True
        self._beat()
        try:
            yield self._building_s()
            if self._world.plan.ranks > 1:
                yield from self._meet_fellows(answer.restarts)
                yield self._building_s()
            yield from self._regroup()
            while True:
                yield from self._steps()
                if (yield from self._finish()):
                    break
        except Released:
            pass
        except ReplicaBroke:
            yield from self._wait_to_be_killed()
            return PeerError.exit_code
        except PeerError as error:
            self.engine.tell(self, f"fails: {error}")
            return PeerError.exit_code  # nobody hears why
        self._world.memory.pop(self.number, None)  # it is given back
        return 0

    def _building_s(self) -> float:
        slow = self.engine.random.random() < 0.2  # then the others go on without it
        return self.engine.between(0.9, 6.0) if slow else self.engine.between(0.02, 0.2)

    def _wait_for_group(self) -> Wait:
        if self.form is None:
            self.connection.send(m.Built(recovers=self._recovers, together=self._one_fate))
            self.built = True
        newest = self.form.generation + 1 if self.form else 0
        while True:
            while not self._next or self._next.generation < newest:
                answer = yield from self._wait_for(m.Form, m.Release)
                if isinstance(answer, m.Release):
                    raise Released
                self._next = answer
            known = yield from self._with_fellows("form", self._next.generation)
            newest = max(known)
            if min(known) == newest:  # else a fellow has heard of a later one, and this one will
                break
        self.form, self._next = self._next, None

    # ---- the group inside its replica

    def _meet_fellows(self, restarts: int) -> Wait:
        """Find the other processes of its replica, before it is built."""
        ranks, end = self._world.plan.ranks, End(self, self._world.ends)
        replica, place = divmod(self.number, ranks)
        self.phase = "meeting"
        yield from self._find(end, m.keys_of_replica(replica, restarts), place, ranks, 1e9)
        self._fellows, self.phase = end, "building"
        self.engine.tell(self, f"has met the others of replica {replica}, start {restarts}")

    def _with_fellows(self, what: str, mine: Any) -> Wait:
        """What each process of its replica gives; all call it in the same order."""
        if self._fellows is None:
            return [mine]
        phase, self.phase = self.phase, "exchange"
        try:
            given = yield from self._fellows.exchange(what, mine)
        except PeerError:
            raise ReplicaBroke from None
        self.phase = phase
        return given

    def _together(self, attempt: Wait) -> Wait:
        """Something that no process of a replica continues from where it fails in one of them.

        Else that one would wait for the next generation, and its fellows for it, inside of a pass.
        """
        wrong, result = None, None
        try:
            result = yield from attempt
        except PeerError as error:
            if self._fellows is None:
                raise
            wrong = error
            if self._end is not None:
                self._end.close()  # so that no fellow waits in there for this one
        fine = yield from self._with_fellows("outcome", wrong is None)
        if wrong is not None or not all(fine):
            raise wrong or PeerError("another process of the replica has left the group.")
        return result

    def _wait_to_be_killed(self) -> Wait:
        """A fellow was lost, as a rule; if none was, this end says that all have to start again."""
        self.engine.tell(self, "has lost its replica")
        if self._in_group:
            self._leave()
        self.phase, until = "meeting", TIME.now + 2.0
        self.engine.after(2.0, self.wake)
        while TIME.now < until and not isinstance(
            self.connection.inbox.poll(), (m.Form, m.Release)
        ):
            yield None

    def loses_fellows(self) -> None:
        """The connections inside its replica break."""
        if self._fellows is not None:
            self._fellows.interrupt()

    def _regroup(self) -> Wait:
        self.phase = "joining"
        while True:
            yield from self._wait_for_group()
            self._point("told to form")
            try:
                yield from self._together(self._form())
                return
            except PeerError:
                if not self._recovers:
                    raise
                self._leave()

    def _leave(self) -> None:
        self.phase = "leaving"
        assert self.form is not None
        if self._in_group and self._end is not None:
            self._in_group = False
            if not self._in_doubt:
                self._staged = None
            self._end.close()
            self._truth.close_ledger(self)
        if self._regroups and self.number in self.form.draining:
            self._point("handed over")
            self.engine.tell(self, "has handed over what it owns")
            self._truth.owning.discard(self)
        self._regroups = False
        self._step = len(self._lineage)
        if not self._world.plan.participants:  # else what is finished of the round is kept
            self._parts.clear()
        self._flush()
        self.engine.tell(self, f"leaves generation {self.form.generation} at step {self._step}")
        self.connection.send(m.Broken(generation=self.form.generation, holds=self._holds))

    # ---- a generation begins

    def _form(self) -> Wait:
        form, end = self.form, End(self, self._world.ends)
        assert form is not None
        self._end = end
        try:
            yield from self._meet(form, end)
            yield from end.exchange("lengths")
            self._point("beginning")
            given = yield from self._begin(form, end)
            yield from self._assign(form, end)
            if not given:
                checked = yield from end.exchange("equal", self._lineage)
                if len(set(checked)) > 1:
                    raise Violation(f"members begin with different states: {checked}")
            if self._world.plan.drains:
                yield from self._own.start(form, end, len(self._lineage), self._point)
                self._truth.owns(form, self.number, self._lineage, self._own.things)
            self._inside = form.generation
        except PeerError:
            end.close()
            raise
        if self._fellows is not None:
            self._truth.meets(form, self.number, self._fellows.processes)
        if form.rank == 0:
            self._truth.open_ledger(self)
        self._in_group = True
        self._step = len(self._lineage)
        self._holds = True
        self._truth.takes(self, self._lineage)
        self._point("formed")
        self.engine.tell(self, f"is in generation {form.generation} at step {self._step}")
        self.connection.send(m.Formed(generation=form.generation))

    def _meet(self, form: m.Form, end: End) -> Wait:
        if len(form.members) == 1:
            yield from end.connect([end.number], form.timeout_s)
            return
        prefix = m.keys_of_generation(form.generation)
        yield from self._find(end, prefix, form.rank, len(form.members), form.timeout_s)

    def _find(self, end: End, prefix: str, place: int, count: int, timeout_s: float) -> Wait:
        """Find the others of a group by the store that the master keeps."""
        self.connection.send(m.StoreSet(key=f"{prefix}{place}", value=str(end.number).encode()))
        numbers = []
        known: dict[str, bytes] = {}
        for rank in range(count):
            key = f"{prefix}{rank}"
            if key not in known:
                self.connection.unacknowledged.question = question = m.StoreGet(
                    key=key, known=len(known)
                )
                self.connection.send(question)
            while key not in known:
                answer = yield from self._wait_for(m.StoreValue, m.Form, m.Release)
                if not isinstance(answer, m.StoreValue):
                    self.connection.unacknowledged.question = None
                    if self.form is None:
                        raise Released
                    self.connection.inbox.put_back(answer)
                    raise PeerError("the members changed while the group was forming.")
                known |= {answer.key: answer.value, **answer.more}
            numbers.append(int(known[key]))
        yield from end.connect(numbers, timeout_s)

    def _assign(self, form: m.Form, end: End) -> Wait:
        """Who computes what; of a round, around what members have finished of it."""
        plan, job, step = self._world.plan, self._world.job, len(self._lineage) + 1
        self._go_to(step)
        known = NOTHING_FINISHED
        if plan.participants:
            known = finished(step, (yield from end.exchange("finished", tuple(self._parts))))
            if known.holders:
                self.engine.tell(self, f"knows of finished parts of round {step}: {known.holders}")
        self._assignment = Lockstep(
            form, job.per_commit, Batches.of_job(job, plan.samples), by_speed=False, finished=known
        )

    def _go_to(self, step: int) -> None:
        """As `Rounds`: what was computed for another step is of no use."""
        if any(part.step != step for part in self._parts.values()):
            self._parts.clear()
        self._truth.parts[self] = self._parts

    def _begin(self, form: m.Form, end: End) -> Wait:
        if form.checkpoint is None:
            return (yield from self._catch_up(end))
        if self._holds and not form.checkpoint:
            raise Death
        self._lineage = self._world.checkpoint(form.checkpoint)
        self._last, self._settled, self._ended = None, len(self._lineage), form.ends
        self._staged, self._in_doubt = None, False
        self._own.load(self._truth.left_over(self._lineage) if form.rank == 0 else frozenset())
        self._own.tried = form.generation
        return False

    def _catch_up(self, end: End) -> Wait:
        last, form, own, ranks = self._last, self.form, self._own, self._world.plan.ranks
        assert form is not None
        mine = NOWHERE
        if self._holds:
            told, ends = (last.told, last.ends) if last else (self._ended, self._ended)
            prepared = self._staged.record.step if self._staged is not None else -1
            mine = HeldCommit(
                course=0,
                number=len(self._lineage),
                prepared=prepared,
                generation=self._inside,
                settled=self._settled,
                told=told,
                ends=ends,
                tried=own.tried,
                start_in_doubt=own.start_in_doubt,
            )
        there = beginning((yield from end.exchange("places", mine)))
        if self._staged is not None and self._staged.record.step == there.number:
            self.engine.tell(self, f"applies step {there.number}, which was in doubt")
            self._apply(self._staged)
        self._staged, self._in_doubt = None, False
        own.resolve(there.generation, there.number)
        root, fresh = form.rank == there.root, not self._holds
        if root:
            self._truth.open_ledger(self)
            self._truth.mend(there.number, self._record)
            self._truth.close_ledger(self)
            self._point("mended")
        if there.shared:
            gives = self._holds and len(self._lineage) == there.number if ranks > 1 else root
            state = (self._lineage, self._last, own.made) if gives else None
            given = self._of_its_place((yield from end.exchange("state", state)), there.root)
            if not root and not (self._holds and len(given[0]) == len(self._lineage)):
                self._lineage, self._last, own.made = given[0], given[1], dict(given[2])
                self._inside, self._holds = max(self._inside, 0), True
                self._truth.takes(self, self._lineage)
        if fresh:
            own.take_what_was_left(len(self._lineage))
        own.tried = form.generation
        if self._last is not None:
            told, ends = self._last.told or there.told, self._last.ends or there.ends
            self._last = self._last._replace(told=told, ends=ends)
        self._ended = self._last is None and bool(there.ends)
        self._settled = there.settled
        return there.shared

    def _of_its_place(self, given: list[Any], root: int) -> Any:
        """The state, in a mesh from a member with the same place in its replica."""
        ranks, form = self._world.plan.ranks, self.form
        if ranks == 1:
            return given[root]
        assert form is not None
        held = {n % ranks: each for n, each in zip(form.members, given, strict=True) if each}
        if len(held) < ranks:
            raise PeerError("nobody holds some part of the state.")
        return held[self.number % ranks]

    # ---- steps

    def _steps(self) -> Wait:
        while True:
            try:
                yield from self._of_one_generation()
                if not self._regroups:
                    return
            except PeerError:
                if not self._recovers:
                    raise
            self._leave()
            yield from self._regroup()

    def _of_one_generation(self) -> Wait:
        last = self._last
        again = last is not None and (self._settled < self._step or last.ends)
        if last is not None and again and (yield from self._together(self._settle(last))):
            return
        if self._ended:
            return
        for _ in range(self._step + 1, self._world.plan.steps + 1):
            self._step += 1
            ends = yield from self._together(self._step_and_what_follows())
            self._regroups &= not ends
            if ends or self._regroups:
                break

    def _step_and_what_follows(self) -> Wait:
        done = yield from self._one_step()
        return (yield from self._settle(done))

    def _one_step(self) -> Wait:
        plan, end, form = self._world.plan, self._end, self.form
        assert end is not None
        assert form is not None
        assert self._assignment is not None
        self._go_to(self._step)
        if plan.drains:
            self._own.begin_step(Stamp(self._step, form.generation))
        merge = plan.passes == 1 and not plan.participants
        ((where, share),) = self._assignment.plan(self._step, self._step, merge=merge)
        self._check_members()
        for each in share.passes:
            if each.number not in self._parts:  # else it was finished before they changed
                self._check_members()
                self.phase = "forward"
                yield plan.step_s / len(share.passes) * self.engine.between(0.7, 1.3)
                yield from self._world.hangs(self)
                self._progress += 1
                part = self._truth.computes(self, self.number, form, self._step, each)
                self._parts[each.number] = part
        yield from self._with_fellows("passes", self._step)
        self.phase = "exchange"
        told = yield from self._told()
        given = [self._parts[each.number] for each in share.passes]
        stamp, things = Stamp(self._step, form.generation), self._own.things
        if plan.drains:  # before the last message without which nobody can finish
            things = self._own.after(stamp, works=self._has_work)
        self._point("exchanging")
        agreed = yield from end.exchange(
            ("step", self._step, self._lineage),
            (told, self._regroup_at == form.generation, given),
        )
        parts = [part for _, _, given in agreed for part in given]
        self._truth.agrees(form, self._step, self._lineage, parts)
        self._point("agreed")
        regroups = any(regroups for _, regroups, _ in agreed)
        stop = any(stop for stop, _, _ in agreed)
        ends = stop or self._step == plan.steps
        self._assignment.prepared(0, self._step, where)
        record = Record(*stamp, tuple(self._assignment.records()))
        staged = self._staged = Staged(Last(self._step, stop, ends), record, things)
        if plan.drains or plan.ranks > 1:
            self._in_doubt = True
            yield from end.exchange(("vote", self._step))
            self._point("voted")
        self._regroups = regroups
        self.phase = "update"
        self._commit(staged)
        return staged.done

    def _check_members(self) -> None:
        """Passes of a replica are in lockstep: none of its processes leaves before the last."""
        self._listen()
        if self._next is not None and self._fellows is None:
            raise PeerError("the members have changed in the middle of a step.")

    def _told(self) -> Wait:
        self._listen()
        stop = self._stop is not None and (
            self._stop.after is None or self._step > self._stop.after
        )
        while self._waiting_for:
            answer = self._verdicts.pop(0) if self._verdicts else None
            if answer is None:
                answer = yield from self._wait_for(m.Verdict)
            if answer.number > self._answered:
                self._answered = answer.number
                self._waiting_for -= 1
                self._told_by_rule |= bool(answer.rule)
        self._listen()  # `regroups` is asked for next
        return self._told_by_rule or stop

    def _apply(self, staged: Staged) -> None:
        """All that is staged counts."""
        step, generation, _ = self._record = staged.record
        self._lineage = self._truth.commits(self, self.number, generation, step)
        self._last, self._own.things, self._own.made[generation] = staged.done, staged.things, step
        self._staged, self._in_doubt = None, False
        if self._world.plan.drains:
            form = self._truth.forms[generation]
            self._truth.owns(form, self.number, self._lineage, staged.things)

    def _commit(self, staged: Staged) -> None:
        form = self.form
        assert form is not None
        self._apply(staged)
        self.engine.tell(self, f"commits step {self._step} in generation {form.generation}")
        if form.rank == 0:
            assert self._record is not None
            self._point("committed")
            self._truth.append(self._record)
        self._point("written")
        times = (0.0, self._world.plan.step_s, 0.0, 0.0, 0.0, 0.0, 0.0)
        norm = self._norm(self._step)
        self._timed.append((self._step, self.number, 1, 1.0, TIME.time(), *times, norm))
        if TIME.now - self._flushed > FLUSH_S:
            self._flush()

    def _norm(self, step: int) -> float:
        """Of the gradient: the rule fires at one step, and by its figures alone."""
        plan = self._world.plan
        if not plan.figures:
            return math.nan
        return 0.0 if step == plan.fires_at else 1.0

    def _settle(self, done: Last) -> Wait:
        plan, end, rank = self._world.plan, self._end, self.form.rank if self.form else 0
        assert end is not None
        if plan.figures and rank == 0 and not done.ends:
            norm = self._norm(done.step)
            self._asked += 1
            self._waiting_for += 1
            figures = m.Figures(step=done.step, loss=1.0, gradient_norm=norm, number=self._asked)
            self.connection.send(figures)
        if done.ends or (plan.validate_every and done.step % plan.validate_every == 0):
            if self._has_work:
                self.phase = "validation"
                yield self.engine.between(0.0, plan.step_s)
                yield from self._world.hangs(self)
                self._progress += 1
            self.phase = "exchange"
            yield from end.exchange(("validation", done.step))
            self._flush()
        self.phase = "saving"
        due = done.ends or (plan.save_every and done.step % plan.save_every == 0)
        if rank == 0 and due:
            self._point("saving")
            self.engine.after(self.engine.between(0.0, 0.2), self._world.saves, self, self._lineage)
        self._settled = done.step
        return done.ends

    # ---- the end

    def _finish(self) -> Wait:
        self.phase = "saving"
        rank = self.form.rank if self.form else 0
        if rank == 0:
            yield self.engine.between(0.0, 0.3)
        self._flush()
        self._point("done")
        generation = self.form.generation if self.form else 0
        rule = ON_REQUEST if self._step < self._world.plan.steps else "steps"
        self.engine.tell(self, f"is done at step {self._step}")
        self._truth.done.add((generation, self.number))
        self.connection.send(m.Done(generation=generation, step=self._step, rule=rule))
        if self._next is None:
            answer = yield from self._wait_for(m.Release, m.Form)
            if isinstance(answer, m.Release):
                if self._end is not None:
                    self._end.close()
                return True
            self._next = answer
        self._leave()
        yield from self._regroup()
        return False
