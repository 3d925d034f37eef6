"""Looks at the world: processes that end, hang, are silent, or do not come back, and hosts.

It tells what it sees, one observation after the other, and decides nothing. Where no host reports
the end of a worker, a closed connection is its end. How long something may take is known to
`watch.py` for workers, to `hosts/hosts.py` for hosts, and to `system/lease.py` for other processes.
Way in: `Liveness`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from instep.control.decisions import endings
from instep.control.decisions.events import Ended, Event, HostJoined, Hung, Silent, Stuck
from instep.control.decisions.state import State
from instep.control.hosts.hosts import LAST_S, Process, RemoteProcess
from instep.control.processes.observations import Exit, HangUp, LastWord, Observations
from instep.control.processes.placement import WorkerPlaces
from instep.control.processes.roster import Roster
from instep.control.processes.stack_requests import StackRequests
from instep.control.recorder import Recorder
from instep.control.seen import Hang
from instep.control.watch import SILENT_S, Watch
from instep.system.limits import FLOOR_S, UNKNOWN_S
from instep.system.processes import Watched

ATTACH_S = 2.0
"""How long a process may take to find a new master."""

REPORT_S = 1.0
"""How long a host may take to report a worker's end."""


@dataclass(kw_only=True)
class Liveness:
    """Looks at the processes of one run."""

    roster: Roster
    places: WorkerPlaces
    watch: Watch
    stack_requests: StackRequests
    recorder: Recorder
    state: Callable[[], State]
    """Tells the state of the run."""
    hosted: bool
    """Whether a host starts the workers, reports their ends, and replaces them."""
    copied: bool
    """Whether a server's part is also on the next one."""
    stale: Process | None = None
    """A silent process of this machine, to be killed last: this one may end with it."""
    _reached: tuple[State, float, frozenset[int]] = State(), 0.0, frozenset()
    """By `_is_another_holder`, and when."""

    # ---- hosts

    def hosts(self, now: float) -> Observations:
        """Hosts that are silent, and workers that were lost with one."""
        for peer in self.roster.hosts.turn(now):
            yield HangUp(peer, f"it gave no sign of life for {FLOOR_S:g} s")
        for peer, connection in list(self.roster.connections.items()):
            if connection.lease is not None and (how := connection.lease.turn(now)):
                self._end_host(connection.lease.pid, how)
                yield HangUp(peer)
        if self.roster.starts.has_become_ready(now):
            yield HostJoined()
        for worker, process in self.roster.processes().items():
            if isinstance(process, RemoteProcess):
                yield from self._remote(worker, process, now)
        if self.roster.hosts.several:
            yield from self.roster.joined_hosts.turn(self.state, self.roster.placed(), now)

    def _end_host(self, pid: int, how: str) -> None:
        """A host of this machine hangs: another replaces it, once it is dead."""
        self.recorder.warn(f"fork server (pid {pid}): {how}, so it is replaced.")
        process = Watched(pid)
        process.signal(signal.SIGKILL)
        process.close()

    def _remote(self, worker: int, process: RemoteProcess, now: float) -> Observations:
        record = self.roster.worker(worker)
        silent_s, heartbeat = now - record.silent_since(now), record.heartbeat
        if heartbeat is not None and worker in self.state().ready:
            if silent_s <= FLOOR_S and process.killed_at is None:
                return
            silent = self.roster.hosts.is_quiet(process.host) and silent_s > FLOOR_S
        else:  # an import may hold the interpreter's lock
            silent = self.roster.hosts.is_gone(process.host)
        if silent and worker in self.state().holders and self._holds_alone(worker, now):
            silent = silent_s > LAST_S
        if silent and self.roster.hosts.can_do_without and process.killed_at is None:
            step, phase = (heartbeat.step, heartbeat.phase) if heartbeat else (0, "building")
            how = f"gave no sign of life for {silent_s:.1f} s, nor did its host"
            yield Hung(worker, step, phase, how)
            process.signal(signal.SIGKILL)
        if process.is_lost(now, silent_s):
            self.roster.hosts.abandon(process.host, process.pid)
            yield Exit(worker, process.pid, host=process.host)

    def _holds_alone(self, worker: int, now: float) -> bool:
        """Whether the run goes back, or ends, without a process that holds its state.

        A server's part is nowhere else, but with a copy on the next one.
        """
        has_own_part = worker in self.state().servers and not self.copied
        return has_own_part or not self._is_another_holder(worker, now)

    def _is_another_holder(self, worker: int, now: float) -> bool:
        """Whether another replica that holds the run's state can be reached."""
        state, (known, at, reached) = self.state(), self._reached
        if known is not state or at != now:  # for many workers that are silent at once
            workers = {n: self.roster.worker(n) for n in state.holders}
            reached = frozenset(n for n, each in workers.items() if each.is_reached(now))
            reached = state.whole(reached)
            self._reached = state, now, reached
        return not reached <= state.fellows(worker)

    # ---- processes

    def processes(self, now: float) -> Observations:
        """Processes whose end no host reports, or that do not connect again."""
        if not self.hosted:
            return
        known = self.roster.processes()
        for worker, process in known.items():
            if process.ended:
                since = self.roster.worker(worker).ended_since(now)
                # if its host is lost, nobody else reports the end
                if process.host not in self.roster.hosts.connected or now - since > REPORT_S:
                    yield Exit(worker, process.pid, host=process.host)
            elif self._is_away_too_long(worker, process, now):
                process.signal(signal.SIGKILL)
        known = self.roster.processes()
        for worker in self.state().joined - known.keys():  # of which no process is known
            if now - self.roster.away.get(worker, now) > ATTACH_S:
                yield Exit(worker, 0)
        self._want_hosts(now)

    def _want_hosts(self, now: float) -> None:
        """Ask the client for hosts that are missing."""
        if self.state().phase not in ("gathering", "training"):
            return
        if missing := self.roster.hosts.to_start(now):
            self.roster.joined_hosts.ask_for(missing, self.roster.client)

    def _is_away_too_long(self, worker: int, process: Process, now: float) -> bool:
        """Whether a worker should have found another master; an import may delay it."""
        state, away = self.state(), self.roster.away
        if worker not in away:
            return False
        all_away = state.joined <= away.keys()  # the cause is hardly one of them
        at_once = not all_away and (worker in state.ready or process.stopped)
        timeout_s = ATTACH_S if at_once else UNKNOWN_S
        return state.recovers and now - away[worker] > timeout_s

    # ---- workers that are silent, or hang

    def progress(self, now: float) -> Iterator[Event]:
        """Workers that hang, once they were asked for their stack; or are silent."""
        self.watch.turn(now)
        if not self.state().recovers:
            yield from self._silence(now)
            return
        last = self.recorder.committed
        if self.state().phase in ("gathering", "training"):
            self._ask_for_stacks(last, now)
        state = self.state()
        if state.phase == "training" and not state.together:
            seconds = self.watch.stuck_s(state.group, now, state.broken)
            if seconds and not self.roster.hosts.all_quiet:
                yield Stuck(state.generation, seconds, last)
        yield from self.stack_requests.answered(now)

    def _ask_for_stacks(self, last: int, now: float) -> None:
        """Ask workers that hang where they are; `last` is the last step that was committed."""
        state = self.state()
        often = {worker: times for worker, (step, times) in state.hangs.items() if step >= last}
        least_s = SILENT_S if state.together else FLOOR_S  # its end costs all that much
        for hang in self.watch.hangs(now, often, self._is_stopped, least_s):
            process = self.roster.worker(hang.worker).process
            if process is None or hang.worker in self.stack_requests:
                continue
            if isinstance(process, RemoteProcess) and self.roster.hosts.is_quiet(process.host):
                continue  # its host is the cause
            self.stack_requests.ask(_hung(hang), process, now)

    def _silence(self, now: float) -> Iterator[Silent]:
        """A worker that gives no sign of life, where none can be replaced."""
        silent = self.watch.silent(now)
        if silent is None or (len(self.state().wanted) == 1 and not self.hosted):
            return  # no other worker waits for it
        worker, record = silent.worker, self.roster.worker(silent.worker)
        pid, node = (record.hello.pid, record.hello.node) if record.hello is not None else (0, "")
        cause = silent.cause(pid, node, stopped=record.is_stopped, joined=not self.hosted)
        last, in_flight = record.heartbeat, self.recorder.in_flight(worker)
        step, phase = (last.step, last.phase) if last is not None else (in_flight, "")
        if not silent.all and not self.hosted:
            self.stale = self.roster.forget_process(worker)
        yield Silent(worker, step, phase, cause)

    def _is_stopped(self, worker: int) -> bool:
        return self.roster.worker(worker).is_stopped

    # ---- processes that go

    def closed(self, closed: HangUp, now: float) -> Observations:
        """A connection is closed, or is to be."""
        connection = self.roster.drop(closed.peer)
        if connection is None:
            return
        number = connection.number
        self.roster.joined_hosts.closed(closed.peer)
        if connection.role == "host":
            if self.roster.hosts.leaves(number, closed.peer) and self.roster.hosts.several:
                self.recorder.emit("host_lost", {"host": number, "why": closed.why})
                yield HostJoined()  # another starts what it was to start
        elif connection.role == "worker" and self.roster.worker(number).peer is closed.peer:
            self.roster.disconnect(number)
            if self.hosted:
                self.roster.away[number] = now
                return
            self.watch.leaves(number)
            code = 0 if number in self.state().done else endings.UNSEEN
            yield Ended(number, code, self.recorder.in_flight(number))
            self._warn_of_end(number)

    def _warn_of_end(self, worker: int) -> None:
        """Say at once that a joined process has ended: torchrun leaves no time to find the cause.

        It ends process 0, and with it this master, a moment after any other process.
        """
        suspect = self.state().suspect
        if suspect is not None and suspect.worker == worker and suspect.failed.kind == "exit":
            at = f" at step {suspect.failed.step}" if suspect.failed.step else ""
            self.recorder.warn(f"worker {worker}{at}: {suspect.failed.cause}")

    def ended(self, end: Exit) -> Observations:
        """A worker's process has ended."""
        worker, pid = end.worker, end.pid
        if not self._is_new(end):
            return
        if pid:  # else it never started
            self.roster.gone.add((end.host, pid))
        if (peer := self.roster.worker(worker).peer) is not None:
            for last in self.roster.hub.drain(peer):  # a child of it may hold its connection open
                yield LastWord(peer, last)  # whatever it said, it has ended
            self.roster.drop(peer)
            self.roster.disconnect(worker)
        if (process := self.roster.forget_process(worker)) is not None:
            process.close()
        yield from self.stack_requests.close(worker)  # it may have crashed when it was asked
        self.roster.forget(worker)
        self.watch.leaves(worker)
        self.recorder.emit("process_ended", {"worker": worker, "pid": pid, "code": end.code})
        place = end.place
        step = (place.step if place is not None else 0) or self.recorder.in_flight(worker)
        yield Ended(worker, end.code, step, self.recorder.reached, place)

    def _is_new(self, end: Exit) -> bool:
        """Whether an end is of a process that the run counts on, and is not known yet."""
        worker, host, pid = end.worker, end.host, end.pid
        process, joined = self.roster.worker(worker).process, self.state().joined
        if process is not None:
            return (process.pid, process.host) == (pid, host)  # else it never had this number
        known = (host, pid) in self.roster.gone
        if worker in joined:  # by a fork server and by the one that replaced it
            return not (pid and known)
        if not self.roster.starts.started(worker, host):
            return False  # not needed
        if known and worker in self.state().needed:
            self.places.start(worker)  # a host that still knew it may have ignored us
        return not known  # else both its host and the system report it


def _hung(hang: Hang) -> Hung:
    return Hung(hang.worker, hang.step, hang.phase, hang.how, loops=hang.loops)
