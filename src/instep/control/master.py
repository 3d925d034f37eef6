"""The master's shell: receives, asks its mind (`decide.py`), and does what it says.

One thread serves every connection, writes the run's files and lets the view
draw. It never imports torch and never waits for a worker. Whoever calls it
gives it a run folder, views, and says whether a host starts the processes;
under torchrun or Slurm there is none, and a worker that hangs up counts as one
that has ended. Where it has a journal, it is a process of its own and may be killed: the
next one takes up what that says, and the processes find it at the same address.
"""

from __future__ import annotations

import hmac
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from instep import spec_file
from instep.comm import messages as m
from instep.comm.channel import Peer
from instep.comm.endpoint import Switchboard
from instep.control import crash_loop, endings
from instep.control import state as mind
from instep.control.decide import decide
from instep.control.hosts import BACK_S, GATHER_S, LAST_S, Far, Hosts, Process
from instep.control.journal import Journal
from instep.control.keys import Keys
from instep.control.lease import NOBODY, Lease, SignsOfLife
from instep.control.questions import Questions
from instep.control.recorder import Recorder
from instep.control.resume import go_back
from instep.control.silence import Silence
from instep.control.stop_rules import Fired, Judge, recorded
from instep.control.watch import Hang, Watch
from instep.errors import InstepError, PeerError
from instep.report.live import View
from instep.spec import JobSpec, as_table
from instep.store.folder import BEGINNING, Origin, way_on
from instep.store.run_folder import RunFolder
from instep.system.blame import sentence
from instep.system.limits import FLOOR_S, UNKNOWN_S
from instep.system.processes import Watched, has_ended, machine

TICK_S = 0.1
"""How often the master looks up when nothing arrives."""

ATTACH_S = 2.0
"""How long processes may take to find a new master."""

PARENT_S = 1.0
"""How long a host may take to say how a worker ended, or another to take its place."""

RETRY_S = 4.0
"""How long after that a host on another machine is tried again."""

MOST_UNUSABLE = 3
"""Who sends a message that the master cannot use so often, sends it again and again."""

ASKED_TICK_S = 0.01
"""The same, while a process that hangs is about to tell where it stands."""


class Outcome(Exception):
    """How a run ended; raised inside the shell to leave its loop, returned by `serve`."""

    def __init__(self, finish: mind.Finish, blame: mind.Blame | None) -> None:
        super().__init__(finish.outcome)
        self.finish, self.blame = finish, blame


class Master:
    """Serves one run until it is over.

    Args:
        job: what to run.
        run: its folder; must exist.
        switchboard: to which the processes connect.
        views: told of everything that is written.
        hosted: whether a host starts the workers, and starts them again.
        started: Unix seconds at which the user's command began.
        origin: from where the run goes on.
        servers: how many members hold parameters for the others.
        drains: whether members own state, which one that leaves hands over first.
        about: further fields of the `run_started` event.
        journal: what is decided is kept there; where it holds decisions already, this
            master takes the place of one that was lost.
        signs: on which it shows at each turn that it lives.
        why: what became of the one whose place it takes.
    """

    def __init__(
        self,
        job: JobSpec,
        run: Path,
        switchboard: Switchboard,
        *,
        views: list[View],
        hosted: bool,
        started: float,
        about: Mapping[str, Any],
        origin: Origin = BEGINNING,
        servers: int = 0,
        drains: bool = False,
        journal: Journal | None = None,
        signs: SignsOfLife = NOBODY,
        why: str = "",
    ) -> None:
        self._job, self._run, self._hosted = job, run, hosted
        self._started, self._origin, self._journal = started, origin, journal
        self._signs, self._why = signs, why
        self._hub, self._token = switchboard.hub, switchboard.endpoint.token
        self._machine = machine()
        self._recorder, self._judge = Recorder(run, views), Judge(job.stop, origin.heard)
        self._undone = (-1, 0)  # generation in which what came after a step was found wrong, step
        self._keys, self._questions = Keys(), Questions(run)
        self._peers: dict[int, Peer] = {}
        self._names: dict[Peer, tuple[str, int]] = {}
        self._processes: dict[int, Process] = {}
        self._pids: dict[int, int] = {}  # of workers that nobody here can watch
        self._leases: dict[Peer, Lease] = {}  # of hosts on this machine
        self._places: dict[int, int] = {}  # worker to the number of its host
        self._last_heartbeat: dict[
            int, tuple[float, m.Heartbeat | None]
        ] = {}  # when heard last, and what
        self._heartbeats: dict[Peer, int] = {}  # number of the newest
        self._heard: dict[Peer, int] = {}
        self._resends: dict[Peer, int] = {}
        self._ready: set[int] = set()
        self._began = False  # whether all were ready at one time
        self._seen_ended: dict[int, float] = {}
        self._gone: set[tuple[int, int]] = set()  # host and pid of workers that have ended
        self._absent: dict[int, float] = {}  # since when a living worker has had no connection
        self._no_host: dict[int, float] = {}  # since when there is none by this number
        self._gathered = False  # whether workers may be started
        self._unusable: dict[tuple[str, int], int] = {}  # how often each sent such a message
        self._watch, self._silence = Watch(), Silence()
        self._joined: dict[int, Watched] = {}  # workers of this machine that others have started
        self._nodes: dict[int, str] = {}  # what people call a worker's machine
        self.stale: Watched | None = None
        """A process of this machine that gave no sign of life, and is to be ended last of all:
        this one may end with it."""
        self._interrupts: list[str] = []
        known = journal.last() if journal is not None else None
        self._hosts = Hosts(
            len(job.launch.hosts) if hosted else 0,
            self._hub.send,
            gather_s=GATHER_S if known is None else BACK_S,
        )
        if known is None:
            self._begin(about, servers, drains)
        else:
            self._take_over(known)

    def _begin(self, about: Mapping[str, Any], servers: int, drains: bool) -> None:
        now, limit_s, origin = time.monotonic(), self._job.stop.time_limit_s, self._origin
        limit = mind.TimeLimit(limit_s, now, origin.spent_s) if limit_s else None
        self._state = mind.State(
            members=mind.first_members(self._job.workers, servers),
            drains=drains,
            recovers=self._hosted,
            parted=self._hosts.several,
            skips=self._job.data.unreadable == "skip",
            since=now,
            generation=origin.generations,
            origin=str(origin.checkpoint or ""),
            time_limit=limit,
        )
        resumed = {"resumed_step": origin.step} if origin.generations else {}
        self._recorder.emit("run_started", {"job": as_table(self._job), **about, **resumed})
        if self._hosted or self._journal is not None:
            self._recorder.emit("master_started", {"pid": os.getpid(), "again": False})
        for text in origin.warnings:
            self._recorder.emit("warning", {"text": text})
        self._recorder.show_ledger()

    def _take_over(self, known: mind.State) -> None:
        """Go on where a master was lost; the processes are about to call again."""
        assert self._journal is not None
        self._state = known
        for key, value in [] if known.recovers else self._journal.kept():
            self._keys.leave(key, value)
        self._origin = replace(
            self._origin, checkpoint=Path(known.origin) if known.origin else None
        )
        folder = RunFolder(self._run)
        for event in folder.named("worker_joined"):  # the newest process of each number
            if event["worker"] in known.joined and event["time"] >= self._started:
                worker, pid = int(event["worker"]), int(event["pid"])
                if self._hosted:
                    self._watch_process(worker, pid, int(event.get("host", 0)))
                self._pids[worker] = pid
        if (pace := self._recorder.take_up(folder, known.joined)) is not None:
            self._watch.step_s, self._watch.load_s = pace.step_s, pace.load_s
        ready = (e for e in folder.named("worker_ready") if e["time"] >= self._started)
        self._ready |= {int(event["worker"]) for event in ready}
        again = known.generation > self._origin.generations + 1
        self._began = again or (known.course > 0 and self._ready >= set(known.group))
        if self._watched:
            until = int(folder.steps["step"].max(initial=0))  # of workers that were lost too
            heard = recorded(folder.steps, folder.validations, until)
            self._judge = Judge(self._job.stop, heard)
        fields = {"pid": os.getpid(), "again": True, "why": self._why}
        self._recorder.emit("master_started", fields)
        self._absent = dict.fromkeys(known.joined, time.monotonic())
        for worker in known.living:
            self._silence.hears(worker, time.monotonic())
        if (step := _found_wrong(folder.events)) is not None:
            self._unhear(folder, step)
        for fired in self._fired(folder, self._origin.step):
            self._think(fired)  # it may not have been heard, and may never be told
        self._think(mind.Restarted())

    def interrupt(self, by: str) -> None:
        """Ask for a stop; may be called from a signal handler or another thread."""
        self._interrupts.append(by)

    def serve(self) -> Outcome:
        """Run to the end, whatever the end is."""
        try:
            if self._state.phase == "ended":  # the one before this was lost with its last word
                raise Outcome(endings.finish_of(self._state), self._state.blame)
            while True:
                self._turn()
        except Outcome as outcome:
            finish = outcome.finish
            fields = {"outcome": finish.outcome, "rule": finish.rule, "step": finish.step}
            self._recorder.emit("run_finished", {**fields, "seconds": time.time() - self._started})
            patience = time.monotonic() + endings.FAREWELL_S
            followed = self._hosted or self._journal is not None
            while followed and self._client is None and time.monotonic() < patience:
                self._turn()  # it may be about to call again
            if followed:
                self._act(mind.KillAll())  # whoever has come since
            # first: a client that has heard it ends this process, and speaks itself
            self._recorder.show(lambda view: view.close())
            self._tell_clients(outcome)
            return outcome
        finally:
            self._close()

    @property
    def _client(self) -> Peer | None:
        """Whoever submitted the job, where it is connected."""
        found = (peer for peer, name in self._names.items() if name == ("client", 0))
        return next(found, None)

    def _turn(self) -> None:
        self._signs.show()
        for peer, message in self._hub.receive(ASKED_TICK_S if self._questions else TICK_S):
            if message is None:
                self._hung_up(peer)
            elif isinstance(message, m.Hello):
                try:
                    self._welcome(peer, message)
                except (TypeError, ValueError, AssertionError):  # a pid beyond all, say
                    self._hub.drop(peer)
                    self._hung_up(peer)
            elif peer in self._names:
                self._digest(peer, message)
            else:
                self._hub.drop(peer)  # who does not introduce himself is not heard
        while self._interrupts:
            by = self._interrupts.pop(0)
            self._think(mind.Interrupted(by, self._began, self._recorder.committed))
        self._watch_hosts()
        self._watch_processes()
        self._watch_progress()
        for peer in self._hub.peers():
            if peer not in self._names and time.monotonic() - peer.since > _STRANGE_S:
                self._hub.drop(peer)
        self._think(mind.Tick(self._recorder.committed))
        self._recorder.show(lambda view: view.tick(time.monotonic()))

    def _close(self) -> None:
        self._recorder.close()
        if self._journal is not None:
            self._journal.close()
        for process in (*self._processes.values(), *self._joined.values()):
            process.close()

    # ---- who comes

    def _welcome(self, peer: Peer, hello: m.Hello) -> None:
        known = hmac.compare_digest(hello.token.encode(), self._token.encode())
        if not known or hello.version != m.VERSION or hello.role not in _ROLES:
            self._hub.drop(peer)
            return
        self._hub.trust(peer)
        if not self._may_come(peer, hello):
            text = "the run goes on without this process: another has its place."
            self._hub.send(peer, m.Refused(kind="Unwanted", text=text, exit_code=5))
            self._hub.drop(peer)
            return
        self._names[peer] = (hello.role, hello.number)
        self._heard[peer], self._resends[peer] = 0, hello.resends
        checkpoint = self._origin.checkpoint
        self._hub.send(
            peer,
            m.Welcome(
                job=spec_file.dump(self._job),
                run=str(self._run),
                started=self._started,
                checkpoint=str(checkpoint or ""),
                recovers=self._state.recovers,
                marks=crash_loop.marks(self._state),
                goes_on=bool(self._state.holders),
            ),
        )
        if hello.role == "host":
            self._welcome_host(peer, hello)
        elif hello.role == "worker":
            self._welcome_worker(peer, hello)

    def _welcome_host(self, peer: Peer, hello: m.Hello) -> None:
        number, now = hello.number, time.monotonic()
        self._recorder.emit("host_joined", {"pid": hello.pid, "host": number})
        before = self._hosts.comes(peer, number, hello.pid, now)
        if before is not None:
            self._names.pop(before, None)
            self._hub.drop(before)
        if hello.machine == self._machine:
            self._leases[peer] = Lease(hello.pid, now, first_s=math.inf)  # it may import for long
        there = [n for n in self._processes if n in self._peers and self._places[n] == number]
        if there:
            self._hub.send(peer, m.Adopt(workers=[(n, self._processes[n].pid) for n in there]))
        self._gathered = self._hosts.ready(now)
        self._think(mind.HostJoined())

    def _welcome_worker(self, peer: Peer, hello: m.Hello) -> None:
        number, state = hello.number, self._state
        self._peers[number] = peer
        self._absent.pop(number, None)
        self._last_heartbeat[number] = time.monotonic(), None
        self._hosts.started(number, hello.host)
        far, known = self._is_far(hello), self._processes.get(number)
        same = known is not None and known.pid == hello.pid and isinstance(known, Far) == far
        if self._hosted and not same:
            self._watch_process(number, hello.pid, hello.host, far=far)
        self._pids[number] = hello.pid
        self._nodes[number] = hello.node
        mine = not self._hosted and hello.machine == self._machine
        if mine and number not in self._joined:
            self._joined[number] = Watched(hello.pid)
        self._watch.begins(number, time.monotonic(), ready=number in state.ready)
        self._silence.hears(number, time.monotonic())
        if number in state.joined:
            self._think(mind.Reconnected(number, hello.generation or 0))
            if self._hosts.several and state.member(number).phase is mind.Phase.FORMING:
                # what it had asked the others' group for was answered on a connection now lost
                self._think(mind.Broke(number, state.generation))
            return
        fields = {"worker": number, "pid": hello.pid, "host": hello.host}
        self._recorder.emit("worker_joined", {**fields, "seconds": time.time() - self._started})
        self._think(mind.Joined(number))

    def _may_come(self, peer: Peer, hello: m.Hello) -> bool:
        """Whether the run has use for a process: one for each worker's number, once."""
        if peer in self._names:
            return False
        if hello.role != "worker":
            return True
        number, state = hello.number, self._state
        process = self._processes.get(number)
        if self._hosts.gave_up(hello.host, hello.pid):
            return False
        if isinstance(process, Far) and process.killed_at is not None:
            return False
        if number in state.joined:  # the same process, whose connection or master was lost
            same = self._pids.get(number) == hello.pid
            same &= process is not None or not self._hosted
            same &= self._places.get(number, 0) == hello.host
            if same and (before := self._peers.pop(number, None)) is not None:
                self._names.pop(before, None)
                self._hub.drop(before)
            return same
        if hello.generation is not None:  # the run has gone on without it
            return False
        # before anybody answered
        ended = self._hosted and not self._is_far(hello) and has_ended(hello.pid)
        return number in state.wanted and number not in self._peers and not ended

    def _is_far(self, hello: m.Hello) -> bool:
        """Whether a process is on another machine, as far as signals and its end are concerned."""
        return self._hosts.several and hello.machine != self._machine

    def _watch_process(
        self, number: int, pid: int, host: int = 0, *, far: bool | None = None
    ) -> None:
        if number in self._processes:
            self._processes.pop(number).close()
        far = self._hosts.several if far is None else far  # until it calls, nobody knows
        self._processes[number] = Far(self._hosts, host, pid) if far else Watched(pid)
        self._places[number] = host

    def _start_worker(self, number: int) -> None:
        """Have the host bring up a process under this number."""
        log = str(self._run / "logs" / f"worker-{number}.log")
        self._hosts.start(number, log, [self._places[n] for n in self._processes])

    # ---- what arrives

    def _digest(self, peer: Peer, message: m.AnyMessage) -> None:
        """Hear a message; one that cannot be used ends its connection, and does not come again."""
        role, number = self._names[peer]
        what = self._wrong_with(peer, message)
        times = self._unusable[role, number] if what else 0
        if not what or (times >= MOST_UNUSABLE and role != "worker"):
            self._confirm(peer, message)  # else it would be sent again
            return
        self._hub.drop(peer)
        self._hung_up(peer)
        if times >= MOST_UNUSABLE:
            how = f"sent a message that the master cannot use, {times} times ({what}),"
            step = self._recorder.in_flight(number)
            if self._state.recovers:
                self._think(mind.Hung(number, step, "what it tells", how))
            else:
                self._think(mind.LastWord(number, endings.failed("error", f"it {how}", step)))

    def _wrong_with(self, peer: Peer, message: m.AnyMessage) -> str:
        """Hear a message; why it cannot be used, if it cannot."""
        role, number = self._names.get(peer, ("", -1))
        try:
            self._hear(peer, message)
            return ""
        except (Outcome, InstepError):
            raise
        except Exception as error:
            times = self._unusable[role, number] = self._unusable.get((role, number), 0) + 1
            what = f"{type(message).__name__}: {sentence(error)}"
            if times == 1:
                text = f"{role} {number} sent a message that the master cannot use ({what})."
                self._recorder.emit("warning", {"text": text})
            return what

    def _hear(self, peer: Peer, message: m.AnyMessage) -> None:
        role, number = self._names[peer]
        if role == "client":
            self._hear_client(peer, message)
            return
        match message:
            case m.Heartbeat():
                self._hear_pulse(peer, message)
            case m.StoreSet(key=key, value=value):
                if self._journal is not None and not self._state.recovers:
                    self._journal.keep(key, value)  # else another master has another group form
                for waiting in self._keys.leave(key, value):
                    self._hub.send(waiting, m.StoreValue(key=key, value=value))
            case m.StoreGet(key=key):
                if (there := self._keys.find(key, peer)) is not None:
                    self._hub.send(peer, m.StoreValue(key=key, value=there))
            case m.Records(ledger=ledger, steps=steps):
                self._record(peer, number, ledger, steps)
            case m.Emit(name=name, fields=fields):
                self._hear_event(peer, name, fields)
            case m.Figures():
                self._hear_figures(peer, message)
            case m.Built(recovers=recovers):
                self._think(mind.Built(number, recovers))
            case m.Formed(generation=generation):
                self._think(mind.Formed(number, generation))
            case m.Broken(generation=generation, cause=cause, mine=mine):
                self._think(mind.Broke(number, generation, cause, mine))
            case m.Notice():
                self._think(mind.Noticed(number))
            case m.Done() | m.Failed():
                self._think(mind.LastWord(number, message))
            case m.Exited(number=worker, pid=0, error=error) if error:
                self._think(mind.StartFailed(worker, error))
            case m.Exited(number=worker, pid=pid, code=code, place=place):
                self._exited(worker, pid, code, host=number, place=place)
            case _:
                raise TypeError(message)

    def _hear_pulse(self, peer: Peer, heartbeat: m.Heartbeat) -> None:
        (role, number), now = self._names[peer], time.monotonic()
        self._heartbeats[peer] = heartbeat.number
        if role == "host":
            self._hosts.hears(number, peer, now, heartbeat.stopped)
            if peer in self._leases:
                self._leases[peer].hears(now)
        else:
            self._last_heartbeat[number] = now, heartbeat
            self._silence.hears(number, now)
            self._watch.hears(number, msgspec.structs.replace(heartbeat, number=0), now)

    def _hear_client(self, peer: Peer, message: m.AnyMessage) -> None:
        match message:
            case m.Interrupt(by=by, times=times):
                if times > self._state.asked:  # else another master has heard it
                    self._think(mind.Interrupted(by, self._began, self._recorder.committed))
            case m.HostEnded(code=code, detail=detail, number=number):
                self._host_ended(number, code, detail)
            case m.Scale(workers=workers):
                refusal = self._refusal_of(workers)
                self._hub.send(peer, m.Answer(refusal=refusal))
                if not refusal:
                    self._think(mind.Scaled(workers))
            case _:
                raise TypeError(message)

    def _host_ended(self, number: int, code: int, detail: str) -> None:
        """A process that starts workers has ended by itself."""
        if self._hosts.fails(number):
            self._think(mind.HostLost(code, detail))
            return
        host = self._job.launch.hosts[number]
        text = f"host {number} ({host}) ended with code {code}; it is tried again. {detail}"
        self._recorder.emit("warning", {"text": text.strip()})

    def _refusal_of(self, workers: int) -> str:
        most = self._job.train.micro_batches
        if not 1 <= workers <= most:
            return (
                f"workers = {workers}: a run needs 1 or more, and this one has work for {most} at "
                f"most, since train.micro_batches = {most}."
            )
        if not self._state.recovers:
            return "the workers of this run cannot change: it computes on GPUs."
        if not self._state.course:
            return "its workers are still getting ready. Try again in a moment."
        if self._state.phase not in ("gathering", "training") or self._state.stop:
            return "the run is about to end."
        return ""

    def _confirm(self, peer: Peer, message: m.AnyMessage) -> None:
        """Count what has taken effect, and say so now and then."""
        if peer not in self._heard:
            return
        role, number = self._names.get(peer, ("", 0))
        process = self._processes.get(number) if role == "worker" else None
        if isinstance(process, Far) and process.killed_at is not None:
            return  # its lease is to run out
        if not isinstance(message, m.Heartbeat):
            self._heard[peer] += 1
            self._resends[peer] = max(0, self._resends[peer] - 1)
        often = self._heard[peer] % _CONFIRMED == 0  # so many between two heartbeats
        if isinstance(message, (m.Heartbeat, m.Failed)) or role != "worker" or often:
            heard = m.Ack(count=self._heard[peer], heartbeat=self._heartbeats.get(peer, 0))
            self._hub.send(peer, heard)

    def _record(self, peer: Peer, worker: int, ledger: bytes, steps: bytes) -> None:
        new = self._recorder.record(worker, ledger, steps, again=self._may_repeat(peer))
        if new is not None:
            self._watch.commits(worker, *new)

    def _hear_event(self, peer: Peer, name: str, fields: Mapping[str, Any]) -> None:
        """An event that a worker tells of."""
        _, number = self._names[peer]
        clean_step = int(fields["clean_step"]) if name == "corruption_found" else -1
        if not self._recorder.hear(name, fields, again=self._may_repeat(peer)):
            return
        if name == "worker_ready":
            self._ready.add(number)
            self._began = self._began or self._ready >= set(self._state.group)
        elif clean_step >= 0:
            self._unhear(RunFolder(self._run), clean_step)

    def _unhear(self, folder: RunFolder, step: int) -> None:
        """The workers go back to a step in memory: figures of later ones may have been wrong."""
        if not self._watched:
            return
        generations = folder.named("generation_started")
        self._undone = generations[-1]["generation"] if generations else 0, step
        self._judge = Judge(self._job.stop, recorded(folder.steps, folder.validations, step))
        fires = self._fired(folder, step - 1)
        if not fires:
            self._think(mind.RolledBack(step))
        for fired in fires:  # whoever was to tell its figures may be the one that is lost
            self._think(fired)

    def _fired(self, folder: RunFolder, step: int) -> list[Fired]:
        """What the newest figures after a step fired; those of a last step nobody judges."""
        ready = folder.named("worker_ready")
        last = {ready[-1].get("last_step") if ready else None, self._job.train.stop_after_steps}
        return [fired for fired in self._judge.fired_after(step) if fired.step not in last]

    @property
    def _watched(self) -> bool:
        """Whether a rule looks at figures."""
        return self._job.stop.by_step or self._job.stop.by_metric

    def _hear_figures(self, peer: Peer, figures: m.Figures) -> None:
        """Let the rules decide on committed figures, and tell whoever sent them."""
        generation, step = self._undone
        void = figures.step > step and self._state.generation <= generation
        fired = None if void else self._judge.hear(figures, again=self._may_repeat(peer))
        if fired is not None:
            self._think(fired)
        rule = fired.rule if fired else ""
        self._hub.send(peer, m.Verdict(step=figures.step, rule=rule, number=figures.number))

    def _may_repeat(self, peer: Peer) -> bool:
        """Whether what it says now may have been heard by a master that was lost."""
        return self._resends[peer] > 0

    # ---- who goes, and who hangs

    def _exited(
        self,
        worker: int,
        pid: int,
        code: int | None,
        host: int = 0,
        place: m.Whereabouts | None = None,
    ) -> None:
        """A worker's process is gone."""
        process = self._processes.get(worker)
        if process is not None and (process.pid, self._places[worker]) != (pid, host):
            return  # it never had this place
        if process is None and pid and (host, pid) in self._gone and worker in self._state.joined:
            return  # told twice, as by a server and by the one that took its place
        if process is None and worker not in self._state.joined:
            if not self._hosts.started(worker, host):
                return  # nobody waits for it
            if (host, pid) in self._gone:
                if worker in self._state.wanted:  # a host that knew it still may have paid no heed
                    self._start_worker(worker)
                return  # its host and the system both tell of it
        if pid:  # else it was never born
            self._gone.add((host, pid))
        if (peer := self._peers.get(worker)) is not None:
            for last in self._hub.drain(peer):  # a child of it may hold its connection open
                self._wrong_with(peer, last)  # whatever it said, it has ended
            self._names.pop(peer, None)
            self._peers.pop(worker, None)
        if process is not None:
            self._processes.pop(worker).close()
        for hung in self._questions.close(worker):  # it may have crashed when it was asked
            self._think(hung)
        for known in (self._seen_ended, self._absent, self._last_heartbeat, self._places):
            known.pop(worker, None)
        self._unusable.pop(("worker", worker), None)
        self._watch.leaves(worker)
        self._silence.leaves(worker)
        self._recorder.emit("process_ended", {"worker": worker, "pid": pid, "code": code})
        step = (place.step if place is not None else 0) or self._recorder.in_flight(worker)
        self._think(mind.Ended(worker, code, step, self._recorder.reached, place))

    def _hung_up(self, peer: Peer) -> None:
        role, number = self._names.pop(peer, ("", -1))
        self._heard.pop(peer, None)
        self._resends.pop(peer, None)
        self._heartbeats.pop(peer, None)
        if role == "host":
            self._host_left(peer, number, "it hung up")
        if role == "worker" and self._peers.get(number) is peer:
            self._peers.pop(number)
            self._absent[number] = time.monotonic()
            if not self._hosted:  # nobody else tells us that it has ended
                self._leaves(number)

    def _leaves(self, worker: int) -> None:
        """A worker that others have started has ended, as far as can be told from here."""
        self._absent.pop(worker, None)
        self._silence.leaves(worker)
        code = 0 if worker in self._state.done else endings.UNSEEN
        self._think(mind.Ended(worker, code, self._recorder.in_flight(worker)))

    def _watch_processes(self) -> None:
        """Where nobody tells of a process that has ended, or one does not call again."""
        if not self._hosted:
            return
        now = time.monotonic()
        hosts = len(self._hosts.missing) < max(1, self._hosts.count)
        for worker, process in list(self._processes.items()):
            absent_s = now - self._absent.get(worker, now)
            if process.ended:
                since = self._seen_ended.setdefault(worker, now)
                if not hosts or now - since > PARENT_S:
                    self._exited(worker, process.pid, None, self._places[worker])
            elif self._state.recovers and absent_s > self._timeout_s(worker, process):
                process.signal(signal.SIGKILL)
        for worker in self._state.joined - self._processes.keys():  # nobody knows its process
            if now - self._absent.get(worker, now) > ATTACH_S:
                self._exited(worker, 0, None)
        self._want_hosts(now)

    def _timeout_s(self, worker: int, process: Process) -> float:
        """How long it may take to find another master; an import may hold it up."""
        if self._state.joined <= self._absent.keys():
            return UNKNOWN_S  # where all are away, as a rule it is none of them
        at_once = worker in self._state.ready or process.stopped
        return ATTACH_S if at_once else UNKNOWN_S

    def _want_hosts(self, now: float) -> None:
        """Ask the client for another host, where the last one is gone and none took its place."""
        self._no_host = {number: self._no_host.get(number, now) for number in self._hosts.missing}
        going_on = self._state.phase in ("gathering", "training")
        wanted = [number for number, since in self._no_host.items() if now - since > PARENT_S]
        if not wanted or not going_on:
            return
        again = now + (RETRY_S if self._hosts.several else 0.0)
        self._no_host |= dict.fromkeys(wanted, again)
        if self._client is not None:
            self._hub.send(self._client, m.HostWanted(numbers=wanted))

    def _watch_hosts(self) -> None:
        """Who of several hosts is silent, and who was lost with one."""
        now = time.monotonic()
        for peer in self._hosts.turn(now):
            _, number = self._names.pop(peer)
            self._hub.drop(peer)
            self._host_left(peer, number, f"it gave no sign of life for {FLOOR_S:g} s")
        for peer, lease in list(self._leases.items()):
            if how := lease.turn(now):
                self._end_host(peer, lease.pid, how)
        if not self._gathered and self._hosts.ready(now):
            self._gathered = True
            self._think(mind.HostJoined())
        for worker, process in list(self._processes.items()):
            if isinstance(process, Far):
                self._watch_far(worker, process, now)
        if self._hosts.several:
            self._spread()

    def _watch_far(self, worker: int, process: Far, now: float) -> None:
        heard, heartbeat = self._last_heartbeat.setdefault(worker, (now, None))
        silent_s = now - heard
        if heartbeat is not None and worker in self._state.ready:
            silent = self._hosts.is_quiet(process.host) and silent_s > FLOOR_S
        else:  # an import may hold the interpreter's lock
            silent = self._hosts.is_gone(process.host)
        if worker in self._state.holders and not self._holder_beside(worker, now):
            silent &= silent_s > LAST_S
        if silent and self._hosts.can_do_without and process.killed_at is None:
            step, phase = (
                (heartbeat.step, heartbeat.phase) if heartbeat is not None else (0, "building")
            )
            how = f"gave no sign of life for {silent_s:.1f} s, nor did its host"
            self._think(mind.Hung(worker, step, phase, how))
            process.signal(signal.SIGKILL)
        if process.is_lost(now, silent_s):
            self._hosts.give_up(process.host, process.pid)
            self._exited(worker, process.pid, None, process.host)

    def _holder_beside(self, worker: int, now: float) -> bool:
        """Whether another worker that holds the run's state can be reached."""
        return any(
            now - self._last_heartbeat[other][0] < FLOOR_S
            for other in self._state.holders
            if other != worker and other in self._peers and other in self._last_heartbeat
        )

    def _spread(self) -> None:
        """Have a worker move to a host that has come back, once nothing else is going on."""
        state, members = self._state, set(self._state.group)
        calm = state.phase == "training" and not (state.changing or state.stop or state.done)
        if (
            calm
            and members == state.wanted == state.joined == {*self._processes}
            and state.complete
        ):
            worker = self._hosts.crowded({w: self._places[w] for w in members})
            if worker is not None:
                self._think(mind.Noticed(worker))

    def _end_host(self, peer: Peer, pid: int, how: str) -> None:
        """A host of this machine hangs: another takes its place, once it is dead."""
        del self._leases[peer]
        self._recorder.emit(
            "warning", {"text": f"fork server (pid {pid}): {how}, so it is replaced."}
        )
        process = Watched(pid)
        process.signal(signal.SIGKILL)
        process.close()
        self._hub.drop(peer)
        self._hung_up(peer)

    def _host_left(self, peer: Peer, number: int, why: str) -> None:
        self._leases.pop(peer, None)
        if self._hosts.goes(number, peer) and self._hosts.several:
            self._recorder.emit("host_lost", {"host": number, "why": why})
            self._think(mind.HostJoined())  # what it was to start, another starts

    def _watch_progress(self) -> None:
        """End whoever hangs, after asking where it stands."""
        now = time.monotonic()
        if not self._state.recovers:
            self._watch_silence(now)
            return
        self._watch.turn(now)
        if self._state.phase in ("gathering", "training"):
            last, hangs = self._recorder.committed, self._state.hangs
            often = {worker: times for worker, (step, times) in hangs.items() if step >= last}
            for hang in self._watch.hangs(now, often, self._is_stopped):
                if hang.worker in self._processes and hang.worker not in self._questions:
                    self._look_into(hang, now)
        if self._state.phase == "training":
            seconds = self._watch.stuck_s(self._state.group, now, self._state.broken)
            if seconds and not self._hosts.all_quiet:
                self._think(mind.Stuck(self._state.generation, seconds, self._recorder.committed))
        for hung in self._questions.answered(now):
            self._think(hung)

    def _watch_silence(self, now: float) -> None:
        """End a run whose workers nobody can replace, where one gives no sign of life."""
        silent = self._silence.turn(now)
        if silent is None or (len(self._state.wanted) == 1 and not self._hosted):
            return  # nobody waits for one that trains alone
        worker = silent.worker
        pid, node = self._pids.get(worker, 0), self._nodes.get(worker, "")
        process = (self._processes if self._hosted else self._joined).get(worker)
        stopped = process is not None and process.stopped
        cause = silent.cause(pid, node, stopped=stopped, joined=not self._hosted)
        _, heartbeat = self._last_heartbeat.get(worker, (now, None))
        step, phase = (
            (heartbeat.step, heartbeat.phase)
            if heartbeat
            else (self._recorder.in_flight(worker), "")
        )
        if not silent.all and not self._hosted:
            self.stale = self._joined.pop(worker, None)
        self._think(mind.Silent(worker, step, phase, cause))

    def _is_stopped(self, worker: int) -> bool:
        return worker in self._processes and self._processes[worker].stopped

    def _look_into(self, hang: Hang, now: float) -> None:
        process = self._processes[hang.worker]
        if not (isinstance(process, Far) and self._hosts.is_quiet(process.host)):
            hung = mind.Hung(hang.worker, hang.step, hang.phase, hang.how, loops=hang.loops)
            self._questions.ask(hung, process, now)  # else its host is to blame

    # ---- what follows

    def _think(self, event: mind.Event) -> None:
        before = self._state
        self._state, actions = decide(before, event, time.monotonic())
        if self._journal is not None and self._state != before:
            self._journal.write(event, self._state)
        for action in actions:
            self._act(action)

    def _act(self, action: mind.Action) -> None:
        match action:
            case mind.Send(worker, message):
                self._send(worker, message)
            case mind.Log(name, fields):
                if name == "generation_started":  # nobody looks for the keys of the one before
                    self._keys.clear()
                    if self._journal is not None and not self._state.recovers:
                        self._journal.forget()
                self._recorder.emit(name, fields)
            case mind.Kill(worker):
                if worker in self._processes:
                    self._processes[worker].signal(signal.SIGKILL)
            case mind.KillAll():
                for peer, (role, _) in list(self._names.items()):
                    if role == "host":
                        self._hub.send(peer, m.KillAll())
                    elif role == "worker" and not self._hosted:
                        self._hub.send(peer, self._over())  # else it would call again
                        self._hub.drop(peer)
                        self._hung_up(peer)
                for process in self._processes.values():
                    process.signal(signal.SIGKILL)
            case mind.GoBack():
                self._go_back()
            case mind.Start(worker):
                self._ready.discard(worker)
                self._start_worker(worker)
            case mind.Finish():
                raise Outcome(action, self._state.blame)

    def _over(self) -> m.Refused:
        """What a worker hears that others have started, and that is to end."""
        blame = self._state.blame
        why = f": worker {blame.worker} failed: {blame.failed.cause}" if blame else "."
        text = f"the run has ended{why}{way_on(self._run)}"
        return m.Refused(kind="PeerError", text=text, exit_code=PeerError.exit_code)

    def _send(self, worker: int, message: m.AnyMessage) -> None:
        if worker not in self._peers:
            return  # it will be told when it calls again
        if isinstance(message, m.Form):
            self._watch.forms(worker, time.monotonic())
        elif isinstance(message, m.Release):
            self._watch.leaves(worker)
        self._hub.send(self._peers[worker], message)

    def _go_back(self) -> None:
        """Begin again from the newest checkpoint: nobody is left who has more."""
        self._origin = go_back(self._run, self._job)
        self._judge = Judge(self._job.stop, self._origin.heard)
        self._recorder.go_back(self._origin.step)
        path = str(self._origin.checkpoint or "")
        self._recorder.emit("went_back", {"resumed_step": self._origin.step, "path": path})
        for text in self._origin.warnings:
            self._recorder.emit("warning", {"text": text})
        self._think(mind.WentBack(path, self._origin.step))

    def _tell_clients(self, outcome: Outcome) -> None:
        finish, blame = outcome.finish, outcome.blame
        over = m.Over(
            outcome=finish.outcome,
            rule=finish.rule,
            step=finish.step,
            exit_code=finish.exit_code,
            worker=blame.worker if blame else None,
            failed=blame.failed if blame else None,
        )
        for peer, (role, _) in list(self._names.items()):
            if role == "client":
                self._hub.send(peer, over)


def _found_wrong(events: list[dict[str, Any]]) -> int | None:
    """The clean step of corruption after which no group has formed yet."""
    found = None
    for event in events:
        if event["event"] == "corruption_found" and event["clean_step"] >= 0:
            found = event["clean_step"] if found is None else min(found, event["clean_step"])
        elif event["event"] in ("generation_started", "run_started"):
            found = None
    return found


_CONFIRMED = 64
"""After so many messages it is said that they were heard, whatever else is said."""

_STRANGE_S = 5.0
"""How long somebody may be connected without a word."""

_ROLES = ("worker", "host", "client")
