"""Client, host and master of a story. The master's code is the real one: decisions, watch, shell.

The client brings the master up again as `watchdog.py` does; the host starts,
adopts and ends workers, and has a spare, as `launch/forking.py`. Both
speak by the real `MasterConnection`. What a worker does is in `workers.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import numpy as np

from instep.comm.protocol import connection as connection_module
from instep.comm.protocol import messages as m
from instep.comm.protocol.connection import MasterConnection
from instep.comm.protocol.messages import Form, Hello
from instep.control import master as master_module
from instep.control import pacing, recorder
from instep.control.decisions.state import State
from instep.control.master import Master
from instep.control.processes import inbox, reception, roster, stack_requests
from instep.errors import PeerError
from instep.events import STEPS
from instep.store.folder import StartPoint

from .engine import TIME, Channel, Death, Hub, Listener, Peer, Process, Suspend, Violation

if TYPE_CHECKING:
    from .world import World

TICK_S = pacing.TICK_S


class At:
    """An address: the listener, and who calls."""

    host, port = "simulation", 0

    def __init__(self, listener: Listener, owner: Process) -> None:
        self.listener, self.owner = listener, owner


class SimulatedConnection(MasterConnection):
    """The real one; the thread that listens is the engine."""

    def __init__(self, world: World, owner: Process, hello: Hello) -> None:
        super().__init__(At(world.listener, owner), hello)  # type: ignore[arg-type]

    def shows_itself(self) -> None:
        """From now on what arrives is taken in while the process is busy."""
        self.inbox.thread = True  # type: ignore[assignment]

    def takes_in(self) -> list[m.AnyMessage]:
        """What a listening thread does when something arrives."""
        return self._take_in(0.0)

    def beats(self, heartbeat: m.Heartbeat) -> None:
        """What a listening thread does a few times a second."""
        self._beat(heartbeat)


# ---- the master


class _File:
    """A file, or a folder, of which nothing is kept."""

    def __str__(self) -> str:
        return "a file"

    def __truediv__(self, name: str) -> _File:
        return self

    def exists(self) -> bool:
        return False

    def is_file(self) -> bool:
        return False

    def glob(self, pattern: str) -> list[_File]:
        return []


class _Steps:
    """As `step_log.StepLog`."""

    world: World

    def __init__(self, path: object) -> None:
        pass

    def write(self, data: bytes) -> None:
        if data:
            self.world.takes_effect()
            self.world.truth.timed.append(np.frombuffer(data, STEPS))

    def close(self) -> None:
        pass


class _Log:
    """Events, as `events.EventLog` keeps them."""

    world: World

    def __init__(self, path: object) -> None:
        pass

    def emit(self, name: str, **fields: Any) -> dict[str, Any]:
        if name == "warning" and ("cannot use" in fields["text"] or "ignored" in fields["text"]):
            raise Violation(fields["text"])
        event = {"time": TIME.time(), "event": name, **fields}
        self.world.takes_effect()
        self.world.truth.events.append(event)
        if self.world.engine.story is not None:
            self.world.engine.tell("master", f"logs {name} {fields}")
        return event

    def close(self) -> None:
        pass


class _Folder:
    """As `report.run_folder.RunFolder`."""

    world: World

    def __init__(self, path: object) -> None:
        truth = self.world.truth
        self.steps = np.concatenate(truth.timed) if truth.timed else np.empty(0, STEPS)
        self.validations: list[Mapping[str, Any]] = []
        self.events = list(truth.events)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.world.truth.events if event["event"] == name]

    def steps_of(self, worker: int) -> Any:
        return self.steps[self.steps["worker"] == worker]


class _LocalProcess:
    """As `hosts.LocalProcess`."""

    world: World

    def __init__(self, host: int, pid: int) -> None:
        self.host, self.pid = host, pid

    @property
    def ended(self) -> bool:
        process = self.world.processes.get(self.pid)
        return process is None or not process.alive

    @property
    def stopped(self) -> bool:
        process = self.world.processes.get(self.pid)
        return process is not None and process.alive and process.stopped

    def signal(self, number: int) -> None:
        self.world.takes_effect()
        process = self.world.processes.get(self.pid)
        if process is None:
            return
        if number == signal.SIGKILL:
            self.world.dismissed.add(process)
            process.die(-9)
        elif number == signal.SIGCONT:
            process.go_on()

    def close(self) -> None:
        pass


class _Journal:
    """As `journal.Journal`: a state that is read back went through its bytes."""

    warnings = ()

    def __init__(self, world: World) -> None:
        self._world = world

    def write(self, event: object, state: State) -> None:
        if self._world.engine.story is not None:
            self._world.engine.tell("master", f"decides on {event}")
        self._world.takes_effect()
        self._world.truth.journal = state
        self._world.decides()
        self._world.takes_effect()

    def last(self) -> State | None:
        state = self._world.truth.journal
        if state is None:
            return None
        return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State)

    def keep(self, key: str, value: bytes) -> None:
        self._world.takes_effect()
        self._world.truth.keys[key] = value

    def forget(self, prefix: str) -> None:
        self._world.takes_effect()
        keys = self._world.truth.keys
        for key in [key for key in keys if key.startswith(prefix)]:
            del keys[key]

    def kept(self) -> list[tuple[str, bytes]]:
        return list(self._world.truth.keys.items())

    def close(self) -> None:
        pass


@contextmanager
def staged(world: World) -> Generator[None, None, None]:
    """The product's modules see this world instead of clock, sockets, files and processes."""
    for each in (_Log, _Steps, _Folder, _LocalProcess):
        each.world = world
    of_the_master = {
        "time": TIME,
        "RunFolder": _Folder,
        "as_table": lambda job: {},
        "go_back": lambda run, job: world.goes_back(),
    }
    of_the_reception = {
        "time": TIME,
        "spec_file": SimpleNamespace(dump=lambda job: ""),
        "has_ended": lambda pid: not world.processes[pid].alive,
    }
    of_the_recorder = {
        "EventLog": _Log,
        "StepLog": _Steps,
        "read_records": lambda *_: np.empty(0, STEPS),
        "last_step": lambda path: len(world.truth.ledger),
    }
    of_the_stack_requests = {
        "stack_file": lambda run, worker: _File(),
        "last_stack": lambda file, since_bytes: '  File "x.py", line 1 in <module>\n',
    }
    with (
        mock.patch.multiple(master_module, **of_the_master),
        mock.patch.multiple(reception, **of_the_reception),
        mock.patch.multiple(inbox, RunFolder=_Folder),
        mock.patch.multiple(roster, LocalProcess=_LocalProcess),
        mock.patch.multiple(recorder, **of_the_recorder),
        mock.patch.multiple(stack_requests, **of_the_stack_requests),
        mock.patch.multiple(connection_module, time=TIME, Channel=Channel),
    ):
        yield


class MasterProcess(Process):
    """A process in which the real shell runs, until it is killed at one of its effects."""

    def __init__(self, world: World, pid: int) -> None:
        super().__init__(world.engine, pid, "master")
        self._world = world
        self.hub = Hub(self.wake_up, self._sends)
        self.stalled_until = 0.0
        self._soon = False
        self.at_death.append(self._leave)
        endpoint = SimpleNamespace(token="token")
        board = SimpleNamespace(
            hub=self.hub, endpoint=endpoint, authority=None, issue=lambda identity: None
        )
        self._run(lambda: self._make(board))
        if self.alive:
            world.listener.serve(self.hub)
            self.engine.after(0.0, self._tick)

    def _make(self, board: Any) -> None:
        world = self._world
        self.shell = Master(
            world.job,
            _File(),  # type: ignore[arg-type]
            board,
            views=[],
            hosted=not world.plan.joined,
            started=1e6,
            about={},
            start_point=StartPoint(0, None),
            journal=_Journal(world),  # type: ignore[arg-type]
        )

    @property
    def state(self) -> State:
        """What it knows."""
        return self.shell._state

    def watched(self) -> set[int]:
        """Numbers of the processes that it knows to be workers."""
        return {process.pid for process in self.shell._roster.processes().values()}

    def wake_up(self) -> None:
        """Something has arrived."""
        if not self._soon and self.alive:
            self._soon = True
            wait = max(0.0, self.stalled_until - TIME.now)
            self.engine.after(wait + 0.0005, self._turn, True)

    def _tick(self) -> None:
        if self.alive:
            self.engine.after(TICK_S, self._tick)
            if TIME.now >= self.stalled_until:
                self._turn(False)

    def _turn(self, soon: bool) -> None:
        if soon:
            self._soon = False
        if not self.alive:
            return
        self.hub.allow()
        self._run(self._serve)
        if self.alive:
            self._world.look(self)

    def _serve(self) -> None:
        outcome = self.shell.serve()
        self._world.finished(outcome)
        self.die(0)

    def _run(self, what: Any) -> None:
        try:
            what()
        except Suspend:
            pass
        except Death:
            self.die(-9)
        except Exception as error:
            raise Violation(f"the master failed: {error!r}") from error

    def _sends(self, peer: Peer, message: m.AnyMessage) -> None:
        world = self._world
        world.takes_effect()
        process = peer.end.owner
        told = self.engine.story is not None
        if told and not isinstance(message, (m.Ack, m.StoreValue, m.Welcome)):
            self.engine.tell("master", f"to {process}: {message}")
        if isinstance(message, Form):
            world.told_to_form(process, message)
        elif isinstance(message, m.Release):
            world.told_to_end(process)
        elif isinstance(message, m.Refused):
            world.dismissed.add(process)
        elif isinstance(message, m.KillAll) and isinstance(process, Host):
            world.killed_at_the_end(process.workers)

    def _leave(self) -> None:
        self._world.listener.hub = None
        self.hub.die(self.engine, abruptly=self.code != 0)
        self._world.client.lost_master(self)


# ---- the client


class Client(Process):
    """Must live; brings the master up again, and another host where one is wanted."""

    def __init__(self, world: World, pid: int) -> None:
        super().__init__(world.engine, pid, "client")
        self._world = world
        self._asked = 0

    def begin(self) -> None:
        """Bring up master and host, and listen to the one."""
        self._start_master()
        if self._world.plan.joined:
            for number in range(self._world.plan.workers):
                self.engine.after(self.engine.between(0.0, 2.0), self._world.joins, number)
        else:
            self._world.start_host(fresh=True)
        self.connection = SimulatedConnection(
            self._world, self, Hello(token="token", role="client", number=0, pid=0)
        )
        self.connection.lasting = True
        self.lead(self._life())

    def _life(self) -> Generator[float | None, None, int]:
        while True:
            message = self.connection.inbox.poll()
            if isinstance(message, m.Over):
                self._world.over(message)
                return 0
            if isinstance(message, m.Refused):
                raise Violation(f"the client was refused: {message}")
            if isinstance(message, m.HostWanted) and not self._world.launched.alive:
                self._world.start_host(fresh=True)
            elif message is None:
                yield None

    def lost_master(self, master: Process) -> None:
        """A master has ended; one that was killed is brought up again."""
        if not master.code:
            self.engine.after(8.0, self._miss_word)  # longer than they can be cut off
        else:
            self.engine.after(self.engine.between(0.15, 0.6), self._start_master)

    def _miss_word(self) -> None:
        if self.alive:
            raise Violation("the master has ended, and has not told the client how the run did")

    def _start_master(self) -> None:
        self._world.start_master()

    def interrupt(self) -> None:
        """Somebody asks for a stop."""
        self._asked += 1
        self.connection.send(m.Interrupt(by="SIGINT", times=self._asked))


class Wisher(Process):
    """Another client, with a wish."""

    def __init__(self, world: World, pid: int, workers: int) -> None:
        super().__init__(world.engine, pid, "wisher")
        self.connection = SimulatedConnection(
            world, self, Hello(token="token", role="client", number=1, pid=pid)
        )
        self.connection.send(m.Scale(workers=workers))
        self.lead(self._life())

    def _life(self) -> Generator[float | None, None, int]:
        try:
            while not isinstance(self.connection.inbox.poll(), m.Answer):
                yield None
        except PeerError:
            return 1  # the master was lost before it had answered
        return 0


# ---- the host


class Host(Process):
    """Starts workers at the master's word, and tells of their ends."""

    def __init__(self, world: World, pid: int, *, fresh: bool) -> None:
        super().__init__(world.engine, pid, "host")
        self._world = world
        self._workers: dict[Process, int] = {}
        self._adopted: dict[Process, int] = {}
        self.spare = False
        self.at_death.append(self._leave)
        self.connection = SimulatedConnection(
            world, self, Hello(token="token", role="host", number=0, pid=pid)
        )
        self.connection.lasting = True
        self.lead(self._life(fresh))

    @property
    def workers(self) -> set[Process]:
        """Whom it looks after."""
        return {*self._workers, *self._adopted}

    def _life(self, fresh: bool) -> Generator[float | None, None, int]:
        if fresh:
            yield self.engine.between(1.0, 2.5)  # imports
        self.engine.after(self.engine.between(0.001, 0.02), self._have_a_spare)
        try:
            while True:
                while (message := self.connection.inbox.poll()) is not None:
                    if isinstance(message, m.Refused):
                        raise PeerError(message.text)
                    self._obey(message)
                yield None
        except PeerError:
            self._kill_all()
            return 0

    def _have_a_spare(self) -> None:
        self.spare = self.alive

    def _obey(self, message: m.AnyMessage) -> None:
        match message:
            case m.StartWorker(number=number) if number not in self._workers.values():
                process = self._world.start_worker(number)
                self._workers[process] = number
                process.at_death.append(lambda: self._later(self._reap, process))
            case m.Adopt(workers=workers):
                known = {*self._workers.values(), *self._adopted.values()}
                for number, pid in workers:
                    process = self._world.processes[pid]
                    if number not in known:
                        self._adopted[process] = number
                        if process.alive:
                            process.at_death.append(lambda p=process: self._later(self._miss, p))
                        else:
                            self._later(self._miss, process)
            case m.KillAll():
                self._kill_all()

    def _later(self, what: Any, process: Process) -> None:
        self.engine.after(self.engine.between(0.0002, 0.05), what, process)

    def _reap(self, process: Process) -> None:
        if self.alive and process in self._workers:
            number = self._workers.pop(process)
            self.connection.send(m.Exited(number=number, pid=process.pid, code=process.code))

    def _miss(self, process: Process) -> None:
        if self.alive and process in self._adopted:
            number = self._adopted.pop(process)
            self.connection.send(m.Exited(number=number, pid=process.pid, code=None))

    def _kill_all(self) -> None:
        for process in [*self._workers, *self._adopted]:
            self._world.dismissed.add(process)
            process.die(-9)

    def _leave(self) -> None:
        if self.spare and self.code != 0:
            self.engine.after(self.engine.between(0.005, 0.1), self._world.start_host)
