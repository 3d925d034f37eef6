"""The meaning of messages: those of workers, of hosts, and of clients.

A message is read, and what it says is told or noted; then it is acknowledged. One that cannot be
used ends its connection, and is not sent again. Of the clients, 0 submitted the run, 1 only asks
for something, and any other has hosts that joined. Way in: `Inbox`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.comm.encryption.certificates import Credentials, Identity
from instep.comm.protocol import messages as m
from instep.comm.protocol.hub import Peer
from instep.control.decisions import endings
from instep.control.decisions.events import (
    Broke,
    Built,
    Event,
    Formed,
    HostLost,
    Hung,
    Interrupted,
    LastMessage,
    Noticed,
    Scaled,
    StartFailed,
)
from instep.control.decisions.membership import refuse_scale
from instep.control.decisions.state import State
from instep.control.hosts.joined_hosts import KEY as JOINED_HOSTS
from instep.control.keys import Keys
from instep.control.pacing import MANY
from instep.control.parted import Parted
from instep.control.processes.observations import Exit, HangUp, Observations
from instep.control.processes.roster import Connection, Roster
from instep.control.recorder import Recorder
from instep.control.verdicts import Verdicts
from instep.control.watch import Watch
from instep.job.spec import JobSpec
from instep.store.run_folder import RunFolder
from instep.system.causes import sentence

MOST_UNUSABLE = 3
"""A process that sends so many messages that cannot be used is not asked to send them again."""

_CONFIRMED = 64
"""At the latest after so many messages an acknowledgement is sent."""


@dataclass(frozen=True, kw_only=True)
class Inbox:
    """Reads the messages of one run."""

    run: Path
    roster: Roster
    job: JobSpec
    recorder: Recorder
    watch: Watch
    verdicts: Verdicts
    parted: Parted
    keys: Keys
    issue: Callable[[Identity], Credentials | None]
    """Makes what a process is to show; None where connections are not encrypted."""
    keep: Callable[[str, bytes], None]
    """Keeps a key for another master."""
    state: Callable[[], State]
    """Tells the state of the run."""

    def read(self, peer: Peer, message: m.AnyMessage, now: float) -> Iterator[Event | Exit]:
        """Read a message of a process that has introduced itself.

        Raises:
            Exception: of whatever kind, if the message cannot be used.
        """
        connection = self.roster.connections[peer]
        number, resent = connection.number, connection.resends > 0
        if connection.role == "client":
            yield from self._client(peer, message, now)
            return
        match message:
            case m.Heartbeat():
                self._heartbeat(peer, connection, message, now)
            case m.StoreSet():
                self._store(message)
            case m.StoreGet():
                if (there := self.keys.find(message, peer)) is not None:
                    self.roster.hub.send(peer, there)
            case m.Records():
                self._record(number, message, again=message.again or resent)
            case m.Emit(name=name, fields=fields, again=earlier):
                yield from self._emit(name, fields, again=earlier or resent)
            case m.Figures():
                fired = self.verdicts.of(message, self.state().generation, again=resent)
                if fired is not None:
                    yield fired
                rule = fired.rule if fired else ""
                verdict = m.Verdict(step=message.step, rule=rule, number=message.number)
                self.roster.hub.send(peer, verdict)
            case m.Built(recovers=recovers, holds=holds, together=together):
                yield Built(number, recovers, holds, together)
            case m.Formed(generation=generation):
                yield Formed(number, generation)
            case m.Broken(generation=generation, cause=cause, mine=mine, holds=holds):
                self.parted.note(cause)
                yield Broke(number, generation, cause, mine, holds)
            case m.Notice():
                yield Noticed(number)
            case m.Done() | m.Failed():
                yield LastMessage(number, message)
            case m.Exited(number=worker, pid=0, error=error) if error:
                yield StartFailed(worker, error)
            case m.Exited(number=worker, pid=pid, code=code, place=place):
                yield Exit(worker, pid, code, number, place)
            case _:
                raise TypeError(message)

    def _heartbeat(
        self, peer: Peer, connection: Connection, heartbeat: m.Heartbeat, now: float
    ) -> None:
        number = connection.number
        connection.beats(heartbeat, now)
        if connection.role == "host":
            self.roster.hosts.heartbeat(number, peer, now, heartbeat.stopped)
        else:
            self.roster.worker(number).beats(heartbeat, now)
            self.watch.heartbeat(number, heartbeat, now)

    def _store(self, message: m.StoreSet) -> None:
        if message.key == JOINED_HOSTS:  # the master's own
            raise TypeError(message)
        if not (self.state().recovers and message.key.startswith(m.keys_of_generation())):
            self.keep(message.key, message.value)  # another master needs it; others form again
        for waiting, answer in self.keys.leave(message.key, message.value):
            self.roster.hub.send(waiting, answer)

    def _record(self, number: int, records: m.Records, *, again: bool) -> None:
        new = self.recorder.record(number, records.ledger, records.steps, again=again)
        if new is not None and not records.again:
            if self.state().member(number).role == "server":  # it waits for no data
                new = new._replace(load_s=self.watch.load_s)
            self.watch.commits(number, *new)

    def _emit(self, name: str, fields: Mapping[str, Any], *, again: bool) -> Iterator[Event]:
        """Write an event that a worker reports to the log."""
        clean_step = int(fields["clean_step"]) if name == "corruption_found" else -1
        if self.recorder.record_event(name, fields, again=again) and clean_step >= 0:
            yield from self.verdicts.roll_back(RunFolder(self.run), clean_step)

    def confirm(self, peer: Peer, message: m.AnyMessage) -> None:
        """Count a message that has taken effect, and acknowledge it now and then."""
        connection = self.roster.connections.get(peer)
        if connection is None:
            return
        is_worker = connection.role == "worker"
        if is_worker and self.roster.worker(connection.number).is_abandoned:
            return  # its lease is to run out
        if isinstance(message, m.Heartbeat):
            due = len(self.roster.connections) <= MANY or message.number % 2 == 0
        else:
            connection.count()
            often = connection.handled % _CONFIRMED == 0  # so many between two heartbeats
            due = isinstance(message, m.Failed) or not is_worker or often
        if due:
            acknowledged = m.Ack(count=connection.handled, heartbeat=connection.heartbeat)
            self.roster.hub.send(peer, acknowledged)

    # ---- clients

    def _client(self, peer: Peer, message: m.AnyMessage, now: float) -> Iterator[Event]:
        connection = self.roster.connections[peer]
        match message:
            case m.Interrupt(by=by, times=times):
                if times > self.state().asked:  # else another master has handled it
                    yield Interrupted(by, self.recorder.committed)
            case m.Heartbeat():
                connection.beats(message, now)
                self.roster.joined_hosts.heartbeat(connection.number, peer, now)
            case m.AddHosts(count=count, workers=workers):
                self.roster.hub.send(peer, self._add_hosts(count, workers, now))
            case m.RemoveHosts():
                self.roster.joined_hosts.leave(connection.number, now, "their client has to go")
            case m.HostEnded():
                yield from self._host_ended(message)
            case m.HostsLeave(numbers=numbers):
                self.roster.hosts.numbers.drain(numbers)
            case m.Emit(name=name, fields=fields, again=earlier):
                again = earlier or connection.resends > 0
                self.recorder.record_event(name, fields, again=again)
            case m.Scale(workers=workers, places=places):
                refusal = refuse_scale(self.state(), self.job, workers)
                self.roster.hub.send(peer, m.Answer(refusal=refusal))
                if not refusal:
                    yield Scaled(workers, first=self._without_place(places))
            case _:
                raise TypeError(message)

    def _without_place(self, places: list[int] | None) -> frozenset[int]:
        """Allow so many workers on each host; returns those that are too many there."""
        if places is None:
            return frozenset()
        self.roster.hosts.numbers.place(dict(enumerate(places)))
        servers = self.state().servers
        workers = {n: host for n, host in self.roster.placed().items() if n not in servers}
        return frozenset(self.roster.starts.beyond(workers))

    def _host_ended(self, ended: m.HostEnded) -> Iterator[Event]:
        number = ended.number
        if self.roster.hosts.numbers.has_left(number):
            return
        if self.roster.hosts.fails(number):
            yield HostLost(ended.code, ended.detail)
        else:
            host = self.job.launch.host(number)
            text = f"{host} ended with code {ended.code}; it is tried again. "
            self.recorder.warn(f"{text}{ended.detail}".strip())

    def _add_hosts(self, count: int, workers: int, now: float) -> m.HostsAdded:
        found = self.roster.joined_hosts.add(self.state(), count, workers, now)
        if isinstance(found, str):
            return m.HostsAdded(refusal=found)
        issued = [self.issue(Identity("host", number)) for number in found.numbers]
        return m.HostsAdded(
            numbers=found.numbers,
            credentials=[shown for shown in issued if shown is not None],
            client=found.client,
            own=self.issue(Identity("client", found.client)),
            folder=os.getcwd(),
        )

    # ---- messages that cannot be used

    def complain(self, peer: Peer, message: m.AnyMessage, error: Exception) -> str:
        """Count a message that cannot be used, and warn of the first; returns why it cannot.

        Empty where the process that sent it first was warned of, and has ended.
        """
        if getattr(message, "again", False):
            return ""
        known = self.roster.connections.get(peer)
        role, number = (known.role, known.number) if known else ("", -1)
        self.roster.unusable[role, number] += 1
        times = self.roster.unusable[role, number]
        what = f"{type(message).__name__}: {sentence(error)}"
        if times == 1:
            text = f"{role} {number} sent a message that the master cannot use ({what})."
            self.recorder.warn(text)
        return what

    def refuse(
        self, peer: Peer, connection: Connection, message: m.AnyMessage, why: str
    ) -> Observations:
        """End the connection of a process whose message cannot be used, so that it is not sent
        again; a worker that sends them again and again is replaced."""
        role, number = connection.role, connection.number
        times = self.roster.unusable[role, number]
        if times >= MOST_UNUSABLE and role != "worker":
            self.confirm(peer, message)  # else it would be sent again
            return
        yield HangUp(peer)
        if times >= MOST_UNUSABLE:
            how = f"sent a message that the master cannot use, {times} times ({why}),"
            step = self.recorder.in_flight(number)
            if self.state().recovers:
                yield Hung(number, step, "its messages", how)
            else:
                yield LastMessage(number, endings.failed("error", f"it {how}", step))
