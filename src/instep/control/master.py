"""The master's shell: receives messages, has `decide.py` decide, and carries the actions out.

One thread serves all connections, writes the run's files and updates the views. It never
imports torch and never waits for a worker. A host starts the processes; under torchrun or
Slurm there is none, and a worker whose connection closes counts as ended. With a journal
the master is a process of its own and may be killed: the next one continues from the
journal, and the other processes find it at the same address.
"""

from __future__ import annotations

import hmac
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from instep.comm.encryption.certificates import Identity
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import MOST_UNTRUSTED, Peer
from instep.comm.protocol.endpoint import Switchboard
from instep.control import crash_loop, endings
from instep.control import state as s
from instep.control.decide import decide, refuse_scale
from instep.control.hosts.hosts import (
    BACK_S,
    GATHER_S,
    LAST_S,
    Hosts,
    LocalProcess,
    Process,
    RemoteProcess,
)
from instep.control.hosts.joined_hosts import KEY as JOINED_HOSTS
from instep.control.hosts.joined_hosts import JoinedHosts
from instep.control.journal import Journal
from instep.control.keys import Keys
from instep.control.parted import Parted
from instep.control.recorder import Recorder
from instep.control.resume import go_back
from instep.control.stack_requests import StackRequests
from instep.control.verdicts import Verdicts
from instep.control.watch import SILENT_S, Watch
from instep.errors import InstepError, PeerError, SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec, as_table
from instep.report.terminal.live import View
from instep.store.folder import BEGINNING, StartPoint, resume_hint
from instep.store.run_folder import RunFolder
from instep.sync import LEASED, servers_of
from instep.system.causes import sentence
from instep.system.lease import NO_WATCHDOG, Lease, SignsOfLife
from instep.system.limits import FLOOR_S, UNKNOWN_S
from instep.system.processes import Watched, has_ended, machine

TICK_S = 0.1
"""How often the master looks at the time when no message arrives."""

TICK_EACH_S, LONGEST_TICK_S = 2e-4, 0.2
"""The same with more than 500 connections, for each, and at most: a look at 1,000 processes takes
1.6 ms. `limits.LOOK_S` is longer."""

ATTACH_S = 2.0
"""How long a process may take to find a new master."""

REPORT_S = 1.0
"""How long a host may take to report a worker's end."""

MOST_UNUSABLE = 3
"""A process that sends so many messages that cannot be used is not asked to send them again."""

ASKED_TICK_S = 0.01
"""`TICK_S` while a process that hangs is asked for its stack, or few workers have no connection."""

LOOK_EACH_S = 0.001
"""For each connection, how long only messages are handled after a look at all processes. It is at
most the tick. A look takes the longer the more there are; so its share of the time is the same."""

GATHER_EACH_S = 1e-5
"""For each connection, how long messages gather before they are read: to be woken for each of 5,000
heartbeats a second costs more than to handle it. Not where the last round brought many."""

MANY = 50
"""Connections above which messages gather, and every other heartbeat is acknowledged; with fewer,
each is answered at once."""

_CONFIRMED = 64
"""At the latest after so many messages an acknowledgement is sent."""

_HELLO_S = 5.0
"""How long a connection may stay without a `Hello`."""

_HELLO_EACH_S = 0.01
"""How much longer for each worker, since all may connect at once."""


class Outcome(Exception):
    """How a run ended; raised inside the shell to leave its loop, returned by `serve`."""

    def __init__(self, finish: s.Finish, blame: s.Blame | None) -> None:
        super().__init__(finish.outcome)
        self.finish, self.blame = finish, blame


@dataclass
class _Connection:
    """What is known of a process that has introduced itself on a connection."""

    role: str
    number: int
    resends: int
    """How many of its next messages a lost master may have handled."""
    handled: int = 0
    heartbeat: int = 0
    """The number of the newest."""
    lease: Lease | None = None
    """Of a host on this machine."""


class Master:
    """Serves one run until it is over.

    Args:
        job: what to run.
        run: its folder; must exist.
        switchboard: to which the processes connect.
        views: shown everything that is written.
        hosted: whether a host starts the workers, and replaces them.
        gives_back: whether the client ends hosts that are not needed.
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
        started: float,
        about: Mapping[str, Any],
        start_point: StartPoint = BEGINNING,
        journal: Journal | None = None,
        signs: SignsOfLife = NO_WATCHDOG,
        why: str = "",
        run_id: str = "",
    ) -> None:
        self._job, self._run, self._hosted, self._gives_back = job, run, hosted, gives_back
        self._run_id = run_id
        self._started, self._start_point, self._journal = started, start_point, journal
        self._signs, self._why = signs, why
        self._hub, self._token = switchboard.hub, switchboard.endpoint.token
        self._hub.untrusted.most = max(MOST_UNTRUSTED, 2 * job.workers)
        self._encrypted = switchboard.authority is not None
        self._machine = machine()
        self._recorder, self._verdicts = Recorder(run, views), Verdicts(job, start_point.figures)
        self._keys, self._stack_requests = Keys(), StackRequests(run)
        self._watch, self._parted = Watch(ranks=job.mesh.ranks), Parted()
        self._connections: dict[Peer, _Connection] = {}
        # of workers, by number
        self._peers: dict[int, Peer] = {}
        self._processes: dict[int, Process] = {}  # under `instep.join`: of this machine only
        self._hellos: dict[int, m.Hello] = {}  # of the last process, also once it ended
        self._last_heartbeat: dict[int, tuple[float, m.Heartbeat | None]] = {}
        self._absent: dict[int, float] = {}  # since when it lives without a connection
        self._seen_ended: dict[int, float] = {}
        self._gone: set[tuple[int, int]] = set()  # host and pid of workers that have ended
        self._gathered = False  # whether workers may be started
        self._reached = s.State(), 0.0, frozenset[int]()  # by `_is_another_holder`, and when
        self._looked_at, self._unseen = 0.0, False  # whether a message has come since then
        self._read = 0  # messages in the last round
        self._unusable: dict[tuple[str, int], int] = {}  # such messages, by role and number
        self._ignored: set[str] = set()
        self.stale: Process | None = None
        """A silent process of this machine, to be killed last: this one may end with it."""
        self._interrupts: list[str] = []
        known = journal.last() if journal is not None else None
        self._hosts = Hosts(
            job.launch.count if hosted else 0,
            self._hub.send,
            gather_s=GATHER_S if known is None else BACK_S,
            mesh=job.mesh,
            servers=job.server_hosts,
            issue=switchboard.issue,
        )
        self._issue = switchboard.issue
        self._joined_hosts = JoinedHosts(
            self._hosts,
            job,
            send=self._hub.send,
            observe=self._observe,
            emit=self._recorder.emit,
            keep=self._keep,
        )
        if known is None:
            self._begin(about)
        else:
            self._take_over(known)
        self._warn(*(journal.warnings if journal is not None else ()))

    def _begin(self, about: Mapping[str, Any]) -> None:
        now, limit_s, start_point = time.monotonic(), self._job.stop.time_limit_s, self._start_point
        servers = servers_of(self._job.sync)
        self._state = s.State(
            members=s.first_members(self._job.workers, servers),
            ranks=self._job.mesh.ranks,
            drains=self._job.sync.own_state and self._job.sync.name not in LEASED,
            recovers=self._hosted,
            parted=self._hosts.several,
            skips=self._job.data.unreadable == "skip",
            since=now,
            generation=start_point.generations,
            checkpoint=str(start_point.checkpoint or ""),
            time_limit=s.TimeLimit(limit_s, now, start_point.spent_s) if limit_s else None,
        )
        more: dict[str, Any] = {}
        if start_point.generations:
            more["resumed_step"] = start_point.step
        if not self._hub.address.host.startswith("127."):
            more["encrypted"] = self._encrypted
        self._recorder.emit("run_started", {"job": as_table(self._job), **about, **more})
        if self._hosted or self._journal is not None:
            self._recorder.emit("master_started", {"pid": os.getpid(), "again": False})
        self._warn(*start_point.warnings)
        self._recorder.show_ledger()

    def _take_over(self, known: s.State) -> None:
        """Continue where a master was lost; the processes are about to connect again."""
        assert self._journal is not None
        self._state, now = known, time.monotonic()
        for key, value in self._journal.kept():
            self._keys.leave(key, value)
        if kept := self._keys.value(JOINED_HOSTS):
            self._joined_hosts.restore(kept, now)
        checkpoint = Path(known.checkpoint) if known.checkpoint else None
        self._start_point = replace(self._start_point, checkpoint=checkpoint)
        folder = RunFolder(self._run)
        for event in folder.named("worker_joined"):  # the newest process of each number
            if event["time"] >= self._started:
                worker, pid, host = (int(event.get(key, 0)) for key in ("worker", "pid", "host"))
                hello = m.Hello(token="", role="worker", number=worker, pid=pid, host=host)
                self._hellos[worker] = hello
                if worker in known.joined and self._hosted:
                    self._watch_process(worker, pid, host)
        if (pace := self._recorder.take_up(folder, known.joined)) is not None:
            self._watch.step_s, self._watch.load_s = pace.step_s, pace.load_s
        fields = {"pid": os.getpid(), "again": True, "why": self._why}
        self._recorder.emit("master_started", fields)
        self._absent = dict.fromkeys(known.joined, now)
        for worker in [] if known.recovers else known.living:  # none may stay away
            self._watch.begins(worker, now)
        for missed in self._verdicts.take_over(folder, self._start_point.step):
            self._observe(missed)
        self._observe(s.Restarted())

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
            while followed and self._client is None and time.monotonic() < deadline:
                self._turn()  # it may be about to connect again
            if followed:
                self._act(s.KillAll())  # processes that have come since
            # before `Over`, at which the client ends this process, and prints itself
            self._recorder.show(lambda view: view.close())
            over = endings.over(finish, outcome.blame)
            for peer, connection in self._connections.items():
                if connection.role == "client":
                    self._hub.send(peer, over)
            return outcome
        finally:
            self._close()

    @property
    def _client(self) -> Peer | None:
        """The process that submitted the job, if it is connected."""
        clients = (p for p, c in self._connections.items() if (c.role, c.number) == ("client", 0))
        return next(clients, None)

    def _turn(self) -> None:
        self._signs.show()
        few_absent = 0 < len(self._absent) < MANY  # as a rule such a worker has ended
        count = len(self._connections)
        tick_s = max(TICK_S, min(TICK_EACH_S * count, LONGEST_TICK_S))
        tick_s = ASKED_TICK_S if self._stack_requests or few_absent else tick_s
        pause_s = min(tick_s, LOOK_EACH_S * count)
        due = self._looked_at + (pause_s if self._unseen else tick_s)
        if count > MANY and self._read < count / 10 and not len(self._hub.untrusted):
            time.sleep(GATHER_EACH_S * count)
        self._read = 0
        for peer, message in self._hub.receive(max(0.0, due - time.monotonic())):
            self._unseen = True
            self._read += 1
            if message is None:
                self._closed(peer)
            elif isinstance(message, m.Hello):
                try:
                    self._welcome(peer, message)
                except UnicodeEncodeError:  # of what the run answers, as each process would get
                    raise
                except (TypeError, ValueError, AssertionError):  # a pid beyond all, say
                    self._hang_up(peer)
            elif peer in self._connections:
                self._receive(peer, message)
            else:
                self._hub.drop(peer)  # no `Hello`
        while self._interrupts:
            by = self._interrupts.pop(0)
            self._observe(s.Interrupted(by, self._recorder.committed))
        now = time.monotonic()
        if now - self._looked_at >= (pause_s if self._unseen else tick_s):
            self._looked_at, self._unseen = now, False
            self._look()

    def _look(self) -> None:
        """What follows from the time: a look at all processes."""
        self._watch_hosts()
        self._watch_processes()
        self._watch_progress()
        for peer in self._hub.late(_HELLO_S + _HELLO_EACH_S * len(self._state.wanted)):
            self._hub.drop(peer)
        self._observe(s.Tick(self._recorder.committed))
        if self._hosts.several:
            told = self._parted.look(self._recorder.committed, self._state.broken)
            self._warn(*[told] if told else [])
        self._recorder.show(lambda view: view.tick(time.monotonic()))

    def _close(self) -> None:
        self._recorder.close()
        if self._journal is not None:
            self._journal.close()
        for process in self._processes.values():
            process.close()

    def _warn(self, *texts: str) -> None:
        for text in texts:
            self._recorder.emit("warning", {"text": text})

    # ---- processes that connect

    def _welcome(self, peer: Peer, hello: m.Hello) -> None:
        known = hmac.compare_digest(hello.token.encode(), self._token.encode())
        known &= self._has_shown(peer, hello)
        roles = ("worker", "host", "client")
        if not known or hello.role not in roles:
            self._hub.drop(peer)
            return
        if hello.version != m.VERSION:
            text = (
                f"{hello.role} {hello.number} has another version of instep than the run. Install "
                "the same one on all machines."
            )
            self._refuse(peer, "SpecError", text, SpecError.exit_code)
            return
        self._hub.trust(peer)
        if not self._may_come(peer, hello):
            text = "the run has replaced this process: another has its place."
            self._refuse(peer, "Unwanted", text, PeerError.exit_code)
            return
        self._connections[peer] = _Connection(hello.role, hello.number, hello.resends)
        if (
            hello.role == "worker"
        ):  # first: who knows of a start of its replica is known to be of it
            self._welcome_worker(peer, hello)
        checkpoint = self._start_point.checkpoint
        self._hub.send(
            peer,
            m.Welcome(
                job=spec_file.dump(self._job),
                run=str(self._run),
                run_id=self._run_id,
                started=self._started,
                checkpoint=str(checkpoint or ""),
                recovers=self._state.recovers,
                marks=crash_loop.marks(self._state),
                others_have_state=bool(self._state.holders),
                role=self._state.member(hello.number).role,
                restarts=self._state.restarts_of(hello.number),
                known=self._keys.value(m.KNOWN),
            ),
        )
        if hello.role == "host":
            self._welcome_host(peer, hello)
        if self._joined_hosts.is_client(hello.number) and hello.role == "client":
            self._joined_hosts.heartbeat(hello.number, peer, time.monotonic())

    def _refuse(self, peer: Peer, kind: str, text: str, code: int) -> None:
        self._hub.send(peer, m.Refused(kind=kind, text=text, exit_code=code))
        self._hub.drop(peer)

    def _has_shown(self, peer: Peer, hello: m.Hello) -> bool:
        """Whether a process is what its certificate says, where there are certificates."""
        worker = hello.role == "worker"
        role = self._state.member(hello.number).role if worker else hello.role
        return peer.shown in (None, (role, hello.number, hello.host))

    def _welcome_host(self, peer: Peer, hello: m.Hello) -> None:
        number, now = hello.number, time.monotonic()
        self._recorder.emit("host_joined", {"pid": hello.pid, "host": number})
        before = self._hosts.joins(peer, number, hello.pid, now, hello.machine)
        if before is not None:
            self._hang_up(before)
        if hello.machine == self._machine:  # its first imports may take long
            self._connections[peer].lease = Lease(hello.pid, now, first_s=math.inf)
        own = [(n, process.pid) for n, process in self._processes.items() if process.host == number]
        there = [(n, pid) for n, pid in own if n in self._peers]
        # on another machine these numbers are those of other programs
        if there := [each for each in there if self._hellos[each[0]].machine == hello.machine]:
            self._hub.send(peer, m.Adopt(workers=there))
        self._gathered = self._hosts.ready(now)
        self._observe(s.HostJoined())

    def _welcome_worker(self, peer: Peer, hello: m.Hello) -> None:
        number, state, now = hello.number, self._state, time.monotonic()
        self._peers[number] = peer
        self._absent.pop(number, None)
        self._last_heartbeat[number] = now, None
        self._hosts.started(number, hello.host)
        far, known = self._is_remote(hello), self._processes.get(number)
        same = (
            known is not None and known.pid == hello.pid and isinstance(known, RemoteProcess) == far
        )
        if not same if self._hosted else hello.machine == self._machine and known is None:
            self._watch_process(number, hello.pid, hello.host, far=far)
        before = self._hellos.get(number, hello).host
        self._hellos[number] = hello
        self._watch.begins(number, now, ready=number in state.ready)
        if number in state.joined:
            self._observe(s.Reconnected(number, hello.generation or 0))
            return
        role = state.member(number).role
        fields = {"worker": number, "role": role, "pid": hello.pid, "host": hello.host}
        self._recorder.emit("worker_joined", {**fields, "seconds": time.time() - self._started})
        if before != hello.host:
            self._recorder.moved(number, before, hello.host)
        self._observe(s.Joined(number))

    def _may_come(self, peer: Peer, hello: m.Hello) -> bool:
        """Whether the run needs a process: one for each worker's number, once."""
        if peer in self._connections:
            return False
        if hello.role == "client":
            return hello.number < 2 or self._joined_hosts.is_client(hello.number)
        if hello.role == "host":
            replaced = self._hosts.was_replaced(hello.number, hello.machine, hello.pid)
            return not (replaced or self._hosts.has_left(hello.number))
        number, state = hello.number, self._state
        process = self._processes.get(number)
        if self._hosts.is_abandoned(hello.host, hello.pid) or _is_abandoned(process):
            return False
        if state.member(number).phase is s.Phase.ENDED:  # it was refused, and has not read it yet
            return False
        if number in state.joined:  # the same process, whose connection or master was lost
            same = number in self._hellos and self._hellos[number].pid == hello.pid
            if self._hosted:
                same &= process is not None and process.host == hello.host
            if same and (before := self._peers.pop(number, None)) is not None:
                self._hang_up(before)
            return same
        if hello.generation is not None:  # the run has continued without it
            return False
        # it may have ended before the master read its `Hello`
        ended = self._hosted and not self._is_remote(hello) and has_ended(hello.pid)
        return number in state.needed and number not in self._peers and not ended

    def _is_remote(self, hello: m.Hello) -> bool:
        """Whether a process is on another machine, as far as signals and its end are concerned."""
        return self._hosts.several and hello.machine != self._machine

    def _watch_process(
        self, number: int, pid: int, host: int = 0, *, far: bool | None = None
    ) -> None:
        if number in self._processes:
            self._processes.pop(number).close()
        far = self._hosts.several if far is None else far  # not known until it connects
        self._processes[number] = (
            RemoteProcess(self._hosts, host, pid) if far else LocalProcess(host, pid)
        )

    def _start_worker(self, number: int) -> None:
        """Have a host start a process under this number."""
        if not self._hosts.may_start(number):
            return
        state, role = self._state, self._state.member(number).role
        log = str(self._run / "logs" / f"{role}-{number}.log")
        there, killed = self._processes.items(), state.those(s.KILLED)  # these start again too
        placed = {n: process.host for n, process in there if n not in killed}
        # a server, a codec or the only replica left memory on the host where it was
        only = 1 < state.ranks == len(state.wanted)
        left = state.drains or role == "server" or only
        home = self._hellos[number].host if left and number in self._hellos else None
        workers = len(state.wanted - state.servers)
        self._hosts.start(number, log, placed, role, of=workers, home=home)

    # ---- messages

    def _receive(self, peer: Peer, message: m.AnyMessage) -> None:
        """Handle a message; one that cannot be used ends its connection, and is not sent again."""
        connection = self._connections[peer]
        if not (what := self._wrong_with(peer, message)):
            self._confirm(peer, message)
            return
        role, number = connection.role, connection.number
        times = self._unusable[role, number]
        if times >= MOST_UNUSABLE and role != "worker":
            self._confirm(peer, message)  # else it would be sent again
            return
        self._hang_up(peer)
        if times >= MOST_UNUSABLE:
            how = f"sent a message that the master cannot use, {times} times ({what}),"
            step = self._recorder.in_flight(number)
            if self._state.recovers:
                self._observe(s.Hung(number, step, "its messages", how))
            else:
                self._observe(s.LastMessage(number, endings.failed("error", f"it {how}", step)))

    def _wrong_with(self, peer: Peer, message: m.AnyMessage) -> str:
        """Handle a message; why it cannot be used, if it cannot."""
        try:
            self._handle(peer, message)
            return ""
        except (Outcome, InstepError):
            raise
        except Exception as error:
            if getattr(message, "again", False):
                return ""  # the process that sent it first was warned of, and ended
            known = self._connections.get(peer)
            role, number = (known.role, known.number) if known else ("", -1)
            times = self._unusable[role, number] = self._unusable.get((role, number), 0) + 1
            what = f"{type(message).__name__}: {sentence(error)}"
            if times == 1:
                self._warn(f"{role} {number} sent a message that the master cannot use ({what}).")
            return what

    def _handle(self, peer: Peer, message: m.AnyMessage) -> None:
        connection = self._connections[peer]
        number = connection.number
        if connection.role == "client":
            self._handle_client(peer, message)
            return
        match message:
            case m.Heartbeat():
                self._handle_heartbeat(peer, connection, message)
            case m.StoreSet(key=key, value=value):
                if key == JOINED_HOSTS:  # the master's own
                    raise TypeError(message)
                forms_again = self._state.recovers and key.startswith(m.keys_of_generation())
                if self._journal is not None and not forms_again:  # another master needs it
                    self._journal.keep(key, value)
                for waiting, answer in self._keys.leave(key, value):
                    self._hub.send(waiting, answer)
            case m.StoreGet():
                if (there := self._keys.find(message, peer)) is not None:
                    self._hub.send(peer, there)
            case m.Records(ledger=ledger, steps=steps, again=earlier):
                again = earlier or connection.resends > 0
                new = self._recorder.record(number, ledger, steps, again=again)
                if new is not None and not earlier:
                    if self._state.member(number).role == "server":  # it waits for no data
                        new = new._replace(load_s=self._watch.load_s)
                    self._watch.commits(number, *new)
            case m.Emit(name=name, fields=fields, again=earlier):
                again = earlier or connection.resends > 0
                self._handle_event(name, fields, again=again)
            case m.Figures():
                again, generation = connection.resends > 0, self._state.generation
                fired = self._verdicts.of(message, generation, again=again)
                if fired is not None:
                    self._decide(fired)
                rule = fired.rule if fired else ""
                verdict = m.Verdict(step=message.step, rule=rule, number=message.number)
                self._hub.send(peer, verdict)
            case m.Built(recovers=recovers, holds=holds, together=together):
                self._decide(s.Built(number, recovers, holds, together))
            case m.Formed(generation=generation):
                self._decide(s.Formed(number, generation))
            case m.Broken(generation=generation, cause=cause, mine=mine, holds=holds):
                self._parted.cause = cause or self._parted.cause
                self._decide(s.Broke(number, generation, cause, mine, holds))
            case m.Notice():
                self._decide(s.Noticed(number))
            case m.Done() | m.Failed():
                self._decide(s.LastMessage(number, message))
            case m.Exited(number=worker, pid=0, error=error) if error:
                self._decide(s.StartFailed(worker, error))
            case m.Exited(number=worker, pid=pid, code=code, place=place):
                self._exited(worker, pid, code, host=number, place=place)
            case _:
                raise TypeError(message)

    def _handle_heartbeat(
        self, peer: Peer, connection: _Connection, heartbeat: m.Heartbeat
    ) -> None:
        number, now = connection.number, time.monotonic()
        connection.heartbeat = heartbeat.number
        if connection.role == "host":
            self._hosts.heartbeat(number, peer, now, heartbeat.stopped)
            if connection.lease is not None:
                connection.lease.renew(now)
        else:
            self._last_heartbeat[number] = now, heartbeat
            self._watch.heartbeat(number, heartbeat, now)

    def _handle_client(self, peer: Peer, message: m.AnyMessage) -> None:
        client = self._connections[peer].number
        match message:
            case m.Interrupt(by=by, times=times):
                if times > self._state.asked:  # else another master has handled it
                    self._decide(s.Interrupted(by, self._recorder.committed))
            case m.Heartbeat(number=number):
                self._connections[peer].heartbeat = number
                self._joined_hosts.heartbeat(client, peer, time.monotonic())
            case m.AddHosts(count=count, workers=workers):
                self._hub.send(peer, self._add_hosts(count, workers))
            case m.RemoveHosts():
                self._joined_hosts.leave(client, time.monotonic(), "their client has to go")
            case m.HostEnded(number=number) if self._hosts.has_left(number):
                pass
            case m.HostEnded(code=code, detail=detail, number=number):
                if self._hosts.fails(number):
                    self._decide(s.HostLost(code, detail))
                else:
                    host = self._job.launch.host(number)
                    text = f"{host} ended with code {code}; it is tried again. "
                    self._warn(f"{text}{detail}".strip())
            case m.HostsLeave(numbers=numbers):
                self._hosts.drain(numbers)
            case m.Emit(name=name, fields=fields, again=earlier):
                again = earlier or self._connections[peer].resends > 0
                self._recorder.record_event(name, fields, again=again)
            case m.Scale(workers=workers):
                refusal = refuse_scale(self._state, self._job, workers)
                self._hub.send(peer, m.Answer(refusal=refusal))
                if not refusal:
                    self._decide(s.Scaled(workers))
            case _:
                raise TypeError(message)

    def _add_hosts(self, count: int, workers: int) -> m.HostsAdded:
        found = self._joined_hosts.add(self._state, count, workers, time.monotonic())
        if isinstance(found, str):
            return m.HostsAdded(refusal=found)
        issued = [self._issue(Identity("host", number)) for number in found.numbers]
        return m.HostsAdded(
            numbers=found.numbers,
            credentials=[shown for shown in issued if shown is not None],
            client=found.client,
            own=self._issue(Identity("client", found.client)),
            folder=os.getcwd(),
        )

    def _confirm(self, peer: Peer, message: m.AnyMessage) -> None:
        """Count a message that has taken effect, and acknowledge it now and then."""
        connection = self._connections.get(peer)
        if connection is None:
            return
        is_worker = connection.role == "worker"
        if is_worker and _is_abandoned(self._processes.get(connection.number)):
            return  # its lease is to run out
        if isinstance(message, m.Heartbeat):
            due = len(self._connections) <= MANY or message.number % 2 == 0
        else:
            connection.handled += 1
            connection.resends = max(0, connection.resends - 1)
            often = connection.handled % _CONFIRMED == 0  # so many between two heartbeats
            due = isinstance(message, m.Failed) or not is_worker or often
        if due:
            acknowledged = m.Ack(count=connection.handled, heartbeat=connection.heartbeat)
            self._hub.send(peer, acknowledged)

    def _handle_event(self, name: str, fields: Mapping[str, Any], *, again: bool) -> None:
        """A worker reports an event for the log."""
        clean_step = int(fields["clean_step"]) if name == "corruption_found" else -1
        if not self._recorder.record_event(name, fields, again=again):
            return
        if clean_step >= 0:
            for event in self._verdicts.roll_back(RunFolder(self._run), clean_step):
                self._observe(event)

    # ---- processes that end

    def _exited(
        self,
        worker: int,
        pid: int,
        code: int | None,
        host: int = 0,
        place: m.Whereabouts | None = None,
    ) -> None:
        """A worker's process has ended."""
        process = self._processes.get(worker)
        if process is not None and (process.pid, process.host) != (pid, host):
            return  # it never had this number
        if process is None and pid and (host, pid) in self._gone and worker in self._state.joined:
            return  # reported twice, as by a fork server and by the one that replaced it
        if process is None and worker not in self._state.joined:
            if not self._hosts.started(worker, host):
                return  # not needed
            if (host, pid) in self._gone:
                if worker in self._state.needed:  # a host that still knew it may have ignored us
                    self._start_worker(worker)
                return  # both its host and the system report it
        if pid:  # else it never started
            self._gone.add((host, pid))
        if (peer := self._peers.get(worker)) is not None:
            for last in self._hub.drain(peer):  # a child of it may hold its connection open
                self._wrong_with(peer, last)  # whatever it said, it has ended
            self._connections.pop(peer, None)
            self._peers.pop(worker, None)
        if process is not None:
            self._processes.pop(worker).close()
        for hung in self._stack_requests.close(worker):  # it may have crashed when it was asked
            self._observe(hung)
        for known in (self._seen_ended, self._absent, self._last_heartbeat):
            known.pop(worker, None)
        self._unusable.pop(("worker", worker), None)
        self._watch.leaves(worker)
        self._recorder.emit("process_ended", {"worker": worker, "pid": pid, "code": code})
        step = (place.step if place is not None else 0) or self._recorder.in_flight(worker)
        self._observe(s.Ended(worker, code, step, self._recorder.reached, place))

    def _hang_up(self, peer: Peer, why: str = "it hung up") -> None:
        """Close a connection; what follows is as if the process had closed it."""
        self._hub.drop(peer)
        self._closed(peer, why)

    def _closed(self, peer: Peer, why: str = "it hung up") -> None:
        """A connection is closed."""
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        number = connection.number
        self._joined_hosts.closed(peer)
        if connection.role == "host" and self._hosts.leaves(number, peer) and self._hosts.several:
            self._recorder.emit("host_lost", {"host": number, "why": why})
            self._observe(s.HostJoined())  # another starts what it was to start
        if connection.role == "worker" and self._peers.get(number) is peer:
            self._peers.pop(number)
            self._absent[number] = time.monotonic()
            if not self._hosted:  # no host reports its end
                self._absent.pop(number)
                self._watch.leaves(number)
                code = 0 if number in self._state.done else endings.UNSEEN
                self._observe(s.Ended(number, code, self._recorder.in_flight(number)))
                self._warn_of_end(number)

    def _warn_of_end(self, worker: int) -> None:
        """Say at once that a joined process has ended: torchrun leaves no time to find the cause.

        It ends process 0, and with it this master, a moment after any other process.
        """
        suspect = self._state.suspect
        if suspect is not None and suspect.worker == worker and suspect.failed.kind == "exit":
            at = f" at step {suspect.failed.step}" if suspect.failed.step else ""
            self._warn(f"worker {worker}{at}: {suspect.failed.cause}")

    def _watch_processes(self) -> None:
        """Processes whose end no host reports, or that do not connect again."""
        if not self._hosted:
            return
        now = time.monotonic()
        for worker, process in list(self._processes.items()):
            if process.ended:
                since = self._seen_ended.setdefault(worker, now)
                # if its host is lost, nobody else reports the end
                if not self._hosts.is_there(process.host) or now - since > REPORT_S:
                    self._exited(worker, process.pid, None, process.host)
            elif worker in self._absent and self._is_away_too_long(worker, process, now):
                process.signal(signal.SIGKILL)
        for worker in self._state.joined - self._processes.keys():  # of which no process is known
            if now - self._absent.get(worker, now) > ATTACH_S:
                self._exited(worker, 0, None)
        self._want_hosts(now)

    def _is_away_too_long(self, worker: int, process: Process, now: float) -> bool:
        """Whether a worker should have found another master; an import may delay it."""
        all_away = self._state.joined <= self._absent.keys()  # the cause is hardly one of them
        at_once = not all_away and (worker in self._state.ready or process.stopped)
        timeout_s = ATTACH_S if at_once else UNKNOWN_S
        return self._state.recovers and now - self._absent[worker] > timeout_s

    def _want_hosts(self, now: float) -> None:
        """Ask the client for hosts that are missing."""
        if self._state.phase not in ("gathering", "training"):
            return
        wanted = self._hosts.to_start(now)
        if wanted:
            self._joined_hosts.ask_for(wanted, self._client)

    # ---- processes that are silent, or hang

    def _watch_hosts(self) -> None:
        """Find hosts that are silent, and workers that were lost with one."""
        now = time.monotonic()
        for peer in self._hosts.turn(now):
            self._hang_up(peer, f"it gave no sign of life for {FLOOR_S:g} s")
        for peer, connection in list(self._connections.items()):
            if connection.lease is not None and (how := connection.lease.turn(now)):
                self._end_host(peer, connection.lease.pid, how)
        if not self._gathered and self._hosts.ready(now):
            self._gathered = True
            self._observe(s.HostJoined())
        for worker, process in list(self._processes.items()):
            if isinstance(process, RemoteProcess):
                self._watch_remote(worker, process, now)
        if self._hosts.several:
            placed = {worker: process.host for worker, process in self._processes.items()}
            self._joined_hosts.turn(lambda: self._state, placed, now)
            self._spread()

    def _end_host(self, peer: Peer, pid: int, how: str) -> None:
        """A host of this machine hangs: another replaces it, once it is dead."""
        self._warn(f"fork server (pid {pid}): {how}, so it is replaced.")
        process = Watched(pid)
        process.signal(signal.SIGKILL)
        process.close()
        self._hang_up(peer)

    def _watch_remote(self, worker: int, process: RemoteProcess, now: float) -> None:
        last, heartbeat = self._last_heartbeat.setdefault(worker, (now, None))
        silent_s = now - last
        if heartbeat is not None and worker in self._state.ready:
            if silent_s <= FLOOR_S and process.killed_at is None:
                return
            silent = self._hosts.is_quiet(process.host) and silent_s > FLOOR_S
        else:  # an import may hold the interpreter's lock
            silent = self._hosts.is_gone(process.host)
        if silent and worker in self._state.holders and self._holds_alone(worker, now):
            silent = silent_s > LAST_S
        if silent and self._hosts.can_do_without and process.killed_at is None:
            step, phase = (heartbeat.step, heartbeat.phase) if heartbeat else (0, "building")
            how = f"gave no sign of life for {silent_s:.1f} s, nor did its host"
            self._observe(s.Hung(worker, step, phase, how))
            process.signal(signal.SIGKILL)
        if process.is_lost(now, silent_s):
            self._hosts.abandon(process.host, process.pid)
            self._exited(worker, process.pid, None, process.host)

    def _holds_alone(self, worker: int, now: float) -> bool:
        """Whether the run goes back, or ends, without a process that holds its state.

        A server's part is nowhere else, but with a copy on the next one.
        """
        copied = self._job.sync.options.get("copy", False)
        has_own_part = worker in self._state.servers and not copied
        return has_own_part or not self._is_another_holder(worker, now)

    def _is_another_holder(self, worker: int, now: float) -> bool:
        """Whether another replica that holds the run's state can be reached."""
        known, at, reached = self._reached
        if known is not self._state or at != now:  # for many workers that are silent at once
            reached = self._reached_holders(now)
            self._reached = self._state, now, reached
        return not reached <= self._state.fellows(worker)

    def _reached_holders(self, now: float) -> frozenset[int]:
        """Members of replicas that hold the run's state and can be reached."""
        state = self._state
        reached = frozenset(
            other
            for other in state.holders
            if other in self._peers and other in self._last_heartbeat
            if now - self._last_heartbeat[other][0] < FLOOR_S
        )
        return state.whole(reached)

    def _spread(self) -> None:
        """Move workers from hosts that are about to go, or one to a host that has come back, when
        nothing else changes; and give back hosts that are not needed.

        To a host that has come back none moves that shares its replica: all of them would, and
        crowd it.
        """
        state, members = self._state, set(self._state.group)
        self._hosts.take_again(len(state.wanted - state.servers))
        calm = state.phase == "training" and not (state.changing or state.stop or state.done)
        settled = members == state.wanted == state.joined == self._processes.keys()
        if not (calm and settled and state.complete):
            return
        placed = {w: self._processes[w].host for w in members}
        moved = self._hosts.to_move(placed, stay=state.servers)
        crowded = self._hosts.crowded(placed, stay=state.servers) if state.ranks == 1 else None
        if not moved and crowded is not None:
            moved = [crowded]
        for worker in moved:
            self._observe(s.Noticed(worker))
        if not moved and self._gives_back and self._client is not None:
            self._give_back(placed)

    def _give_back(self, placed: Mapping[int, int]) -> None:
        """Have the client end a host that the run can do without."""
        workers = len(self._state.wanted - self._state.servers)
        number = self._hosts.give_back(set(placed.values()), workers)
        if number is not None and self._client is not None:
            self._recorder.emit("host_given_back", {"host": number})
            self._hub.send(self._client, m.HostUnneeded(number=number))

    def _watch_progress(self) -> None:
        """Kill workers that hang, after asking them for their stack."""
        now, state = time.monotonic(), self._state
        self._watch.turn(now)
        if not state.recovers:
            self._watch_silence(now)
            return
        last = self._recorder.committed
        if state.phase in ("gathering", "training"):
            often = {worker: times for worker, (step, times) in state.hangs.items() if step >= last}
            least_s = SILENT_S if state.together else FLOOR_S  # its end costs all that much
            for hang in self._watch.hangs(now, often, self._is_stopped, least_s):
                process = self._processes.get(hang.worker)
                if process is None or hang.worker in self._stack_requests:
                    continue
                if isinstance(process, RemoteProcess) and self._hosts.is_quiet(process.host):
                    continue  # its host is the cause
                self._stack_requests.ask(s.Hung(*hang[:4], loops=hang.loops), process, now)
        if state.phase == "training" and not state.together:
            seconds = self._watch.stuck_s(state.group, now, state.broken)
            if seconds and not self._hosts.all_quiet:
                self._observe(s.Stuck(state.generation, seconds, last))
        for hung in self._stack_requests.answered(now):
            self._observe(hung)

    def _watch_silence(self, now: float) -> None:
        """End a run whose workers cannot be replaced, if one gives no sign of life."""
        silent = self._watch.silent(now)
        if silent is None or (len(self._state.wanted) == 1 and not self._hosted):
            return  # no other worker waits for it
        worker = silent.worker
        hello = self._hellos.get(worker)
        pid, node = (hello.pid, hello.node) if hello is not None else (0, "")
        stopped = self._is_stopped(worker)
        cause = silent.cause(pid, node, stopped=stopped, joined=not self._hosted)
        _, last = self._last_heartbeat.get(worker, (now, None))
        step, phase = (last.step, last.phase) if last else (self._recorder.in_flight(worker), "")
        if not silent.all and not self._hosted:
            self.stale = self._processes.pop(worker, None)
        self._observe(s.Silent(worker, step, phase, cause))

    def _is_stopped(self, worker: int) -> bool:
        return worker in self._processes and self._processes[worker].stopped

    # ---- what follows

    def _observe(self, event: s.Event) -> None:
        """Decide on what the master itself has observed; an impossible event is reported once."""
        try:
            self._decide(event)
        except s.TransitionError as error:
            text = f"{type(event).__name__} was ignored: {error}. This is an error of instep."
            if text not in self._ignored:
                self._ignored.add(text)
                self._warn(text)

    def _decide(self, event: s.Event) -> None:
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

    def _act(self, action: s.Action) -> None:
        match action:
            case s.Send(worker, message):
                self._send(worker, message)
            case s.Log(name, fields):
                if name == "generation_started":  # the keys of the one before are not needed
                    self._forget(m.keys_of_generation())
                self._recorder.emit(name, fields)
            case s.Kill(worker):
                if worker in self._processes:
                    self._processes[worker].signal(signal.SIGKILL)
            case s.Forget(replica):
                self._forget(m.keys_of_replica(replica))
            case s.KillAll():
                self._kill_all()
            case s.GoBack():
                self._go_back()
            case s.Start(worker):
                self._start_worker(worker)
            case s.Finish():
                raise Outcome(action, self._state.blame)

    def _keep(self, key: str, value: bytes) -> None:
        if self._journal is not None:
            self._journal.keep(key, value)

    def _forget(self, prefix: str) -> None:
        self._keys.forget(prefix)
        if self._journal is not None:
            self._journal.forget(prefix)

    def _send(self, worker: int, message: m.AnyMessage) -> None:
        if worker not in self._peers:
            return  # it gets a reminder when it connects again
        if isinstance(message, m.Form):
            self._watch.forms(worker, time.monotonic())
        elif isinstance(message, m.Release):
            self._watch.leaves(worker)
        self._hub.send(self._peers[worker], message)

    def _kill_all(self) -> None:
        for peer, connection in list(self._connections.items()):
            if connection.role == "host":
                self._hub.send(peer, m.KillAll())
            elif connection.role == "worker" and not self._hosted:
                blame = self._state.blame
                why = f": worker {blame.worker} failed: {blame.failed.cause}" if blame else "."
                text = f"the run has ended{why}{resume_hint(self._run)}"
                code = PeerError.exit_code
                refused = m.Refused(kind=PeerError.__name__, text=text, exit_code=code)
                self._hub.send(peer, refused)  # else it would connect again
                self._hang_up(peer)
        for process in self._processes.values() if self._hosted else ():
            process.signal(signal.SIGKILL)

    def _go_back(self) -> None:
        """Begin again from the newest checkpoint: no worker holds more."""
        self._start_point = go_back(self._run, self._job)
        self._verdicts = Verdicts(self._job, self._start_point.figures)
        self._recorder.go_back(self._start_point.step)
        path = str(self._start_point.checkpoint or "")
        self._recorder.emit("went_back", {"resumed_step": self._start_point.step, "path": path})
        self._warn(*self._start_point.warnings)
        self._observe(s.WentBack(path, self._start_point.step))


def _is_abandoned(process: Process | None) -> bool:
    """Whether a process of another machine is being killed, and gets no more answers."""
    return isinstance(process, RemoteProcess) and process.killed_at is not None
