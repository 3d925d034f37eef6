"""The master's shell: looks, reads, decides and acts, one turn after the other.

What a message means is known to `inbox.py`, who may come in to `reception.py`, what the world
looks like to `liveness.py`; each tells observations, `decide.py` decides, and the actions are
carried out here. One thread serves all connections, writes the run's files and updates the views.
It never imports torch and never waits for a worker. A host starts the processes; under torchrun or
Slurm there is none, and a worker whose connection closes counts as ended. With a journal the master
is a process of its own and may be killed: the next one continues from the journal, and the other
processes find it at the same address.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import MOST_UNTRUSTED
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.hub import Peer
from instep.control.decisions import endings
from instep.control.decisions.actions import (
    Action,
    Finish,
    Forget,
    GoBack,
    Kill,
    KillAll,
    Log,
    Send,
    Start,
)
from instep.control.decisions.decide import decide
from instep.control.decisions.events import Event, Interrupted, Restarted, Tick, WentBack
from instep.control.decisions.phases import TransitionError
from instep.control.decisions.state import Blame, State, TimeLimit, first_members
from instep.control.hosts.hosts import BACK_S, Hosts, Process
from instep.control.hosts.joined_hosts import KEY as JOINED_HOSTS
from instep.control.hosts.joined_hosts import JoinedHosts
from instep.control.hosts.worker_starts import GATHER_S, WorkerStarts
from instep.control.journal import Journal
from instep.control.keys import Keys
from instep.control.pacing import MANY, Pacing
from instep.control.parted import Parted
from instep.control.processes.inbox import Inbox
from instep.control.processes.liveness import Liveness
from instep.control.processes.observations import Exit, HangUp, LastWord, Observation, Observations
from instep.control.processes.placement import WorkerPlaces
from instep.control.processes.reception import Reception
from instep.control.processes.roster import Roster
from instep.control.processes.stack_requests import StackRequests
from instep.control.recorder import Recorder
from instep.control.resume import go_back
from instep.control.verdicts import Verdicts
from instep.control.watch import Watch
from instep.errors import InstepError, PeerError
from instep.job.spec import JobSpec, as_table
from instep.report.terminal.live import View
from instep.store.folder import BEGINNING, StartPoint, resume_hint
from instep.store.run_folder import RunFolder
from instep.system.lease import NO_WATCHDOG, SignsOfLife
from instep.words import without_secrets

_HELLO_S = 5.0
"""How long a connection may stay without a `Hello`."""

_HELLO_EACH_S = 0.01
"""How much longer for each worker, since all may connect at once."""


class Outcome(Exception):
    """How a run ended; raised inside the shell to leave its loop, returned by `serve`."""

    def __init__(self, finish: Finish, blame: Blame | None) -> None:
        super().__init__(finish.outcome)
        self.finish, self.blame = finish, blame


class Master:
    """Serves one run until it is over.

    Args:
        job: what to run.
        run: its folder; must exist.
        switchboard: to which the processes connect.
        views: shown everything that is written.
        hosted: whether a host starts the workers, and replaces them.
        gives_back: whether the client ends hosts that are not needed.
        places: workers that there is room for on each host; None: any number.
        started: Unix seconds at which the user's command began.
        about: further fields of the `run_started` event.
        start_point: where this session begins.
        journal: keeps the decisions; if it has some already, this master replaces a lost one.
        signs: written to at each turn, for the process that watches this one.
        why: how the lost master ended.
        run_id: by which a process knows whether it sees the folder; empty if all do.
    """

    def __init__(
        self,
        job: JobSpec,
        run: Path,
        switchboard: Switchboard,
        *,
        views: list[View],
        hosted: bool,
        gives_back: bool = False,
        places: Sequence[int] | None = None,
        started: float,
        about: Mapping[str, Any],
        start_point: StartPoint = BEGINNING,
        journal: Journal | None = None,
        signs: SignsOfLife = NO_WATCHDOG,
        why: str = "",
        run_id: str = "",
    ) -> None:
        self._job, self._run, self._hosted, self._started = job, run, hosted, started
        self._hub, self._journal, self._signs, self._why = switchboard.hub, journal, signs, why
        self._hub.untrusted.most = max(MOST_UNTRUSTED, 2 * job.workers)
        self._encrypted = switchboard.authority is not None
        self._ignored: set[str] = set()
        self._interrupts: list[str] = []
        self._state, self._pacing = State(), Pacing()
        self._recorder, self._verdicts = Recorder(run, views), Verdicts(job, start_point.figures)
        self._keys, self._stack_requests = Keys(), StackRequests(run)
        self._watch, self._parted = Watch(ranks=job.mesh.ranks), Parted()
        known = journal.last() if journal is not None else None
        count, send = job.launch.count if hosted else 0, self._hub.send
        self._hosts = hosts = Hosts(count, send, servers=job.server_hosts)
        if places is not None:
            hosts.numbers.place(dict(enumerate(places)))
        gather_s = GATHER_S if known is None else BACK_S
        starts = WorkerStarts(hosts, gather_s=gather_s, mesh=job.mesh, issue=switchboard.issue)
        self._joined_hosts = JoinedHosts(
            hosts, starts, job, send=send, emit=self._recorder.emit, keep=self._keep
        )
        self._roster = Roster(self._hub, hosts, starts, self._joined_hosts)
        self._make_parts(switchboard, gives_back=gives_back, run_id=run_id)
        if known is None:
            self._begin(about, start_point)
        else:
            self._take_over(known, start_point.step)
        self._recorder.warn(*(journal.warnings if journal is not None else ()))

    def _make_parts(self, switchboard: Switchboard, *, gives_back: bool, run_id: str) -> None:
        """Make what looks at the processes, reads their messages, and answers them."""
        job, run, roster = self._job, self._run, self._roster
        recorder, watch = self._recorder, self._watch

        def state() -> State:
            return self._state

        self._places = WorkerPlaces(
            run=run, roster=roster, recorder=recorder, state=state, gives_back=gives_back
        )
        self._liveness = Liveness(
            roster=roster,
            places=self._places,
            watch=watch,
            state=state,
            stack_requests=self._stack_requests,
            recorder=recorder,
            hosted=self._hosted,
            copied=job.sync.options.get("copy", False),
        )
        self._reception = Reception(
            job=job,
            run=run,
            run_id=run_id,
            token=switchboard.endpoint.token,
            started=self._started,
            hosted=self._hosted,
            roster=roster,
            recorder=recorder,
            watch=watch,
            keys=self._keys,
            state=state,
        )
        self._inbox = Inbox(
            run=run,
            job=job,
            roster=roster,
            recorder=recorder,
            watch=watch,
            verdicts=self._verdicts,
            parted=self._parted,
            keys=self._keys,
            issue=switchboard.issue,
            keep=self._keep,
            state=state,
        )

    def _begin(self, about: Mapping[str, Any], start_point: StartPoint) -> None:
        now, limit_s = time.monotonic(), self._job.stop.time_limit_s
        self._state = State(
            members=first_members(self._job.workers, self._job.sync.server_count),
            ranks=self._job.mesh.ranks,
            drains=self._job.sync.own_state and not self._job.sync.leased,
            bound=self._job.sync.sealed > 0 and self._job.data.parts > 0,
            recovers=self._hosted,
            parted=self._hosts.several,
            skips=self._job.data.unreadable == "skip",
            since=now,
            generation=start_point.generations,
            checkpoint=str(start_point.checkpoint or ""),
            time_limit=TimeLimit(limit_s, now, start_point.spent_s) if limit_s else None,
        )
        more: dict[str, Any] = {}
        if start_point.generations:
            more["resumed_step"] = start_point.step
        if not self._hub.address.host.startswith("127."):
            more["encrypted"] = self._encrypted
        job = without_secrets(as_table(self._job))
        self._recorder.emit("run_started", {"job": job, **about, **more})
        if self._hosted or self._journal is not None:
            self._recorder.emit("master_started", {"pid": os.getpid(), "again": False})
        self._recorder.warn(*start_point.warnings)
        self._recorder.show_ledger()

    def _take_over(self, known: State, began_at: int) -> None:
        """Continue where a master was lost; the processes are about to connect again."""
        assert self._journal is not None
        self._state, now = known, time.monotonic()
        for key, value in self._journal.kept():
            self._keys.leave(key, value)
        if kept := self._keys.value(JOINED_HOSTS):
            self._joined_hosts.restore(kept, now)
        folder = RunFolder(self._run)
        for event in folder.named("worker_joined"):  # the newest process of each number
            if event["time"] >= self._started:
                worker, pid, host = (int(event.get(key, 0)) for key in ("worker", "pid", "host"))
                hello = m.Hello(token="", role="worker", number=worker, pid=pid, host=host)
                self._roster.introduce(hello)
                if worker in known.joined and self._hosted:
                    self._roster.watch(worker, pid, host)
        if (pace := self._recorder.take_up(folder, known.joined)) is not None:
            self._watch.take_up(pace.step_s, pace.load_s)
        fields = {"pid": os.getpid(), "again": True, "why": self._why}
        self._recorder.emit("master_started", fields)
        self._roster.away.update(dict.fromkeys(known.joined, now))
        for worker in [] if known.recovers else known.living:  # none may stay away
            self._watch.begins(worker, now)
        for missed in self._verdicts.take_over(folder, began_at):
            self._observe(missed)
        self._observe(Restarted())

    @property
    def stale(self) -> Process | None:
        """A silent process of this machine, to be killed last: this one may end with it."""
        return self._liveness.stale

    def interrupt(self, by: str) -> None:
        """Ask for a stop; may be called from a signal handler or another thread."""
        self._interrupts.append(by)

    def serve(self) -> Outcome:
        """Run to the end, whatever the end is."""
        try:
            if self._state.phase == "ended":  # the master before was lost at its last action
                raise Outcome(endings.finish_of(self._state), self._state.blame)
            while True:
                self._turn()
        except Outcome as outcome:
            finish = outcome.finish
            fields = {"outcome": finish.outcome, "rule": finish.rule, "step": finish.step}
            self._recorder.emit("run_finished", {**fields, "seconds": time.time() - self._started})
            deadline = time.monotonic() + endings.EXIT_S
            followed = self._hosted or self._journal is not None
            while followed and self._roster.client is None and time.monotonic() < deadline:
                self._turn()  # it may be about to connect again
            if followed:
                self._act(KillAll())  # processes that have come since
            # before `Over`, at which the client ends this process, and prints itself
            self._recorder.show(lambda view: view.close())
            over = endings.over(finish, outcome.blame)
            for peer, connection in self._roster.connections.items():
                if connection.role == "client":
                    self._hub.send(peer, over)
            return outcome
        finally:
            self._close()

    # ---- look, read, decide, act

    def _turn(self) -> None:
        self._signs.show()
        self._read()
        while self._interrupts:
            by = self._interrupts.pop(0)
            self._observe(Interrupted(by, self._recorder.committed))
        if self._pacing.is_due(time.monotonic()):
            self._look()

    def _look(self) -> None:
        """Look at all processes, and at the time."""
        self._follow(self._liveness.hosts(time.monotonic()))
        self._follow(self._places.spread())
        self._follow(self._liveness.processes(time.monotonic()))
        self._follow(self._liveness.progress(time.monotonic()))
        for peer in self._hub.late(_HELLO_S + _HELLO_EACH_S * len(self._state.wanted)):
            self._hub.drop(peer)
        self._observe(Tick(self._recorder.committed))
        if self._hosts.several:
            told = self._parted.look(self._recorder.committed, self._state.broken)
            self._recorder.warn(*[told] if told else [])
        self._recorder.show(lambda view: view.tick(time.monotonic()))

    def _read(self) -> None:
        """Read the messages that have come, or come within a moment."""
        few_away = 0 < len(self._roster.away) < MANY  # as a rule such a worker has ended
        hurried = few_away or len(self._stack_requests) > 0
        gather_s = self._pacing.begin(len(self._roster.connections), hurried=hurried)
        if gather_s and not len(self._hub.untrusted):
            time.sleep(gather_s)
        for peer, message in self._hub.receive(self._pacing.timeout_s(time.monotonic())):
            self._pacing.note_message()
            if message is None:
                self._observe(HangUp(peer))
            elif isinstance(message, m.Hello):
                self._welcome(peer, message)
            elif peer in self._roster.connections:
                self._receive(peer, message)
            else:
                self._hub.drop(peer)  # no `Hello`

    def _welcome(self, peer: Peer, hello: m.Hello) -> None:
        try:
            self._follow(self._reception.welcome(peer, hello, time.monotonic()))
        except UnicodeEncodeError:  # of what the run answers, as each process would get
            raise
        except (TypeError, ValueError, AssertionError):  # a pid beyond all, say
            self._observe(HangUp(peer))

    def _receive(self, peer: Peer, message: m.AnyMessage) -> None:
        connection = self._roster.connections[peer]
        if wrong := self._use(peer, message):
            self._follow(self._inbox.refuse(peer, connection, message, wrong))
        else:
            self._inbox.confirm(peer, message)

    def _use(self, peer: Peer, message: m.AnyMessage) -> str:
        """Do what a message says; returns why it cannot be used, if it cannot."""
        try:
            for found in self._inbox.read(peer, message, time.monotonic()):
                if isinstance(found, Exit):
                    self._observe(found)
                else:
                    self._decide(found)
            return ""
        except (Outcome, InstepError):
            raise
        except Exception as error:
            return self._inbox.complain(peer, message, error)

    def _follow(self, observations: Observations) -> None:
        for found in observations:
            self._observe(found)

    def _observe(self, found: Observation) -> None:
        """Follow what was noticed; an impossible event is reported once."""
        match found:
            case Exit():
                self._follow(self._liveness.ended(found))
            case HangUp():
                self._follow(self._liveness.closed(found, time.monotonic()))
            case LastWord(peer, message):
                self._use(peer, message)
            case _:
                try:
                    self._decide(found)
                except TransitionError as error:
                    self._report(found, error)

    def _report(self, event: Event, error: TransitionError) -> None:
        text = f"{type(event).__name__} was ignored: {error}. This is an error of instep."
        if text not in self._ignored:
            self._ignored.add(text)
            self._recorder.warn(text)

    def _decide(self, event: Event) -> None:
        """Decide on an event, keep the decision, act on it.

        Raises:
            TransitionError: the event cannot happen to its member. Where a message was the
                event, its connection ends, as for each message that cannot be used, and at
                the third the worker is replaced.
        """
        before = self._state
        self._state, actions = decide(before, event, time.monotonic())
        if self._journal is not None and self._state != before:
            self._journal.write(event, self._state)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Send(worker, message):
                self._send(worker, message)
            case Log(name, fields):
                if name == "generation_started":  # the keys of the one before are not needed
                    self._forget(m.keys_of_generation())
                self._recorder.emit(name, fields)
            case Kill(worker):
                if (process := self._roster.worker(worker).process) is not None:
                    process.signal(signal.SIGKILL)
            case Forget(replica):
                self._forget(m.keys_of_replica(replica))
            case KillAll():
                self._kill_all()
            case GoBack():
                self._go_back()
            case Start(worker):
                self._places.start(worker)
            case Finish():
                raise Outcome(action, self._state.blame)

    def _keep(self, key: str, value: bytes) -> None:
        if self._journal is not None:
            self._journal.keep(key, value)

    def _forget(self, prefix: str) -> None:
        self._keys.forget(prefix)
        if self._journal is not None:
            self._journal.forget(prefix)

    def _send(self, worker: int, message: m.AnyMessage) -> None:
        if (peer := self._roster.worker(worker).peer) is None:
            return  # it gets a reminder when it connects again
        if isinstance(message, m.Form):
            self._watch.forms(worker, time.monotonic())
        elif isinstance(message, m.Release):
            self._watch.leaves(worker)
        self._hub.send(peer, message)

    def _kill_all(self) -> None:
        for peer, connection in list(self._roster.connections.items()):
            if connection.role == "host":
                self._hub.send(peer, m.KillAll())
            elif connection.role == "worker" and not self._hosted:
                blame = self._state.blame
                why = f": worker {blame.worker} failed: {blame.failed.cause}" if blame else "."
                text = f"the run has ended{why}{resume_hint(self._run)}"
                code = PeerError.exit_code
                refused = m.Refused(kind=PeerError.__name__, text=text, exit_code=code)
                self._hub.send(peer, refused)  # else it would connect again
                self._observe(HangUp(peer))
        for process in self._roster.processes().values() if self._hosted else ():
            process.signal(signal.SIGKILL)

    def _go_back(self) -> None:
        """Begin again from the newest checkpoint: no worker holds more."""
        start_point = go_back(self._run, self._job)
        self._verdicts.begin(start_point.figures)
        self._recorder.go_back(start_point.step)
        path = str(start_point.checkpoint or "")
        self._recorder.emit("went_back", {"resumed_step": start_point.step, "path": path})
        self._recorder.warn(*start_point.warnings)
        self._observe(WentBack(path, start_point.step))

    def _close(self) -> None:
        self._recorder.close()
        if self._journal is not None:
            self._journal.close()
        self._roster.close()
