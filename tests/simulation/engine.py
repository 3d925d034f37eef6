"""A virtual clock, processes that die, and connections between them. Knows nothing of training.

Whatever happens is a call at a time, drawn from one seeded generator: the
same seed gives the same story to the last message. A connection keeps order,
delays each message by as long as it likes, and holds all of them back while
its ends are cut off from one another. Where a process dies, what it had sent
may be lost from some point on, as with TCP.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from instep.comm.callers import Unproven
from instep.comm.protocol.channel import Address
from instep.errors import PeerError


class Violation(BaseException):
    """A promise was broken. No `Exception`, so that nothing under test can catch it."""


class Death(BaseException):
    """The process whose code this passes through was killed there."""


class VirtualTime:
    """Stands in for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        """Seconds since the story began."""
        return self.now

    def time(self) -> float:
        """Seconds on the wall."""
        return 1e6 + self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """A pause before another try at once takes no time in a story."""


TIME = VirtualTime()


class Engine:
    """Calls at virtual times, in order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.cuts: list[tuple[float, Callable[[Process, Process], bool]]] = []
        """Until when, and between whom nothing arrives."""
        self.story: list[str] | None = None
        """What happened, in words, where somebody reads it."""
        self.messages = 0
        TIME.now = 0.0

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have something called when so much time has passed."""
        self._number += 1
        heapq.heappush(self._calls, (TIME.now + seconds, self._number, call, arguments))

    def turn(self) -> bool:
        """Let the next thing happen; False where nothing is left to happen."""
        if not self._calls:
            return False
        TIME.now, _, call, arguments = heapq.heappop(self._calls)
        call(*arguments)
        return True

    def between(self, least: float, most: float) -> float:
        """A number between two, drawn."""
        return least + (most - least) * self.random.random()

    def chance(self, probability: float) -> bool:
        """Whether it happens."""
        return self.random.random() < probability

    def delay(self) -> float:
        """How long a message takes: as a rule a moment, now and then long."""
        draw = self.random.random()
        if draw < 0.97:
            return 0.0002 + 0.003 * draw
        return 0.3 * (draw - 0.97) / 0.03

    def cut_until(self, one: Process, other: Process) -> float:
        """When these two hear of one another again; a time in the past if they do."""
        if not self.cuts:
            return 0.0
        self.cuts = [cut for cut in self.cuts if cut[0] > TIME.now]
        return max((until for until, parts in self.cuts if parts(one, other)), default=0.0)

    def tell(self, who: object, what: str) -> None:
        """A line of the story."""
        if self.story is not None:
            self.story.append(f"{TIME.now:9.4f}  {who!s:<14} {what}")


class Process:
    """Something that lives, until it does not."""

    def __init__(self, engine: Engine, pid: int, name: str) -> None:
        self.engine, self.pid, self.name = engine, pid, name
        self.alive, self.stopped, self.deaf = True, False, False
        self.code: int | None = None
        self.ends: list[Channel] = []
        """Of connections, that close with it."""
        self.at_death: list[Callable[[], None]] = []
        self._living: Generator[float | None, None, int] | None = None
        self._awaited = 0
        self._late = False

    def __str__(self) -> str:
        return f"{self.name}/{self.pid}"

    def lead(self, life: Generator[float | None, None, int]) -> None:
        """Begin to live: the generator gives seconds to sleep, or None to wait; returns a code."""
        self._living = life
        self.engine.after(0.0, self._go_on, self._awaited)

    def wake(self) -> None:
        """Something has happened that it may wait for."""
        if self._awaited < 0:
            self._awaited = -self._awaited
            self.engine.after(0.0, self._go_on, self._awaited)

    def _go_on(self, awaited: int) -> None:
        if not self.alive or awaited != self._awaited or self._living is None:
            return
        if self.stopped:
            self._late = True
            return
        self._awaited += 1
        try:
            seconds = next(self._living)
        except StopIteration as end:
            self.die(end.value)
        except Death:
            self.die(-9)
        else:
            if seconds is None:
                self._awaited = -self._awaited
            else:
                self.engine.after(seconds, self._go_on, self._awaited)

    def arrived(self) -> None:
        """A connection has something to read."""
        self.wake()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        if not self.stopped or self.deaf or not self.alive:
            return
        self.stopped = False
        for end in list(self.ends):
            end.arrives()
        if self._late:
            self._late = False
            self._go_on(self._awaited)

    def die(self, code: int) -> None:
        """Its end, with the exit code, negative for a signal."""
        if not self.alive:
            return
        self.alive, self.code, self._living = False, code, None
        self.engine.tell(self, f"ends with code {code}")
        for end in list(self.ends):
            end.hang_up(abruptly=code < 0)
        for call in self.at_death:
            call()


class Pipe:
    """One direction of a connection."""

    def __init__(
        self, engine: Engine, source: Process, target: Process, take: Callable[[Any], None]
    ) -> None:
        self._engine, self._source, self.target, self._take = engine, source, target, take
        self._flight: deque[tuple[float, Any]] = deque()
        self._last, self._pumping = 0.0, False

    def put(self, message: Any) -> None:
        """Send something; None says that there will be no more."""
        self._last = max(TIME.now + self._engine.delay(), self._last)
        self._flight.append((self._last, message))
        self._pump_at(self._last)

    def lose(self) -> None:
        """What is under way is lost from some point on."""
        keep = self._engine.random.randint(0, len(self._flight))
        while len(self._flight) > keep:
            self._flight.pop()

    def _pump_at(self, when: float) -> None:
        if not self._pumping:
            self._pumping = True
            self._engine.after(max(0.0, when - TIME.now), self._pump)

    def _pump(self) -> None:
        self._pumping = False
        heals = self._engine.cut_until(self._source, self.target)
        if heals > TIME.now:
            self._pump_at(heals)
            return
        flight = self._flight
        while flight and flight[0][0] <= TIME.now:
            self._engine.messages += 1
            self._take(flight.popleft()[1])
        if flight:
            self._pump_at(flight[0][0])


class Channel:
    """A process's end of a connection to the master: as `comm.channel.Channel`."""

    def __init__(self, owner: Process, listener: Listener) -> None:
        self.owner = owner
        self._inbox: deque[Any] = deque()
        self._broken = self._closed = False
        owner.ends.append(self)
        self.peer = Peer(self)
        engine = owner.engine
        self._up = Pipe(engine, owner, listener.place, self.peer.take)
        self.down = Pipe(engine, listener.place, owner, self._arrive)
        listener.call(self.peer)

    @classmethod
    def connect(cls, address: Any, context: None = None) -> Channel:
        """Call a master: whoever listens need not live yet."""
        if address.listener.closed:
            raise PeerError("no master answers: nobody listens.")
        return cls(address.owner, address.listener)

    def send(self, message: Any) -> None:
        """Send one message."""
        if self._broken or self._closed:
            raise PeerError("the master is gone.")
        self._up.put(message)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether there is something to read."""
        return bool(self._inbox) or self._broken

    def read(self) -> list[Any]:
        """What has arrived."""
        if not self._inbox and self._broken:
            raise PeerError("the master is gone (it closed the connection).")
        found = list(self._inbox)
        self._inbox.clear()
        if self._broken:  # there is more to see
            self.owner.engine.after(0.0, self.arrives)
        return found

    def close(self) -> None:
        """Hang up."""
        self.hang_up(abruptly=False)

    def hang_up(self, *, abruptly: bool) -> None:
        """No more is sent; abruptly, what was sent may not arrive."""
        if self._closed:
            return
        self._closed = True
        self.owner.ends.remove(self)
        if abruptly and self.owner.engine.chance(0.3):
            self._up.lose()
        self._up.put(None)

    def _arrive(self, message: Any) -> None:
        if self._closed:
            return
        if message is None:
            self._broken = True
        else:
            self._inbox.append(message)
        self.arrives()

    def arrives(self) -> None:
        """Have the owner look, if it can."""
        something = (self._inbox or self._broken) and not self._closed
        if something and self.owner.alive and not self.owner.stopped:
            self.owner.arrived()


class _Frames:
    largest = 0


class Peer:
    """The master's end of a connection."""

    def __init__(self, end: Channel) -> None:
        self.end = end
        self.frames = _Frames()
        self.hub: Hub | None = None
        self.since = float("inf")
        """No stranger is ever thrown out here."""
        self.early: list[Any] = []
        """What arrived before anybody answered."""
        self.gone = False
        self.shown = None
        """No certificates are shown here."""

    def take(self, message: Any) -> None:
        """Something arrives."""
        if self.gone:
            return
        if self.hub is None:
            self.early.append(message)
        else:
            self.hub.take(self, message)

    def drop(self) -> None:
        """Hang up on the process."""
        if not self.gone:
            self.gone = True
            self.end.down.put(None)


class Listener:
    """The socket at which masters listen, one after the other."""

    def __init__(self, place: Process) -> None:
        self.place = place
        self.closed = False
        self.hub: Hub | None = None
        self._calling: list[Peer] = []

    def call(self, peer: Peer) -> None:
        """Somebody calls: taken in by a master that is there, or by the next."""
        if self.hub is not None:
            self.hub.accept(peer)
        else:
            self._calling.append(peer)

    def serve(self, hub: Hub) -> None:
        """A master is there, who takes in whoever has waited."""
        self.hub = hub
        for peer in self._calling:
            hub.accept(peer)
        self._calling.clear()


class Suspend(BaseException):
    """Leaves the master's loop, until it has something to do again."""


class Hub:
    """As `hub.Hub`: what the master's shell receives with, and sends by."""

    def __init__(self, wake: Callable[[], None], sent: Callable[[Peer, Any], None]) -> None:
        self._wake, self._sent = wake, sent
        self._arrived: deque[tuple[Peer, Any]] = deque()
        self._peers: list[Peer] = []
        self._may_look = False
        self.address = Address("127.0.0.1", 1)

    def accept(self, peer: Peer) -> None:
        """Take a caller in."""
        peer.hub = self
        self._peers.append(peer)
        for message in peer.early:
            self.take(peer, message)
        peer.early.clear()

    def take(self, peer: Peer, message: Any) -> None:
        """Something has arrived from a peer."""
        self._arrived.append((peer, message))
        self._wake()

    def allow(self) -> None:
        """The next `receive` may look; the one after it is too many."""
        self._may_look = True

    def receive(self, timeout_s: float) -> Generator[tuple[Peer, Any], None, None]:
        """What has arrived. Called a second time, it leaves the loop."""
        if not self._may_look:
            raise Suspend
        self._may_look = False
        while self._arrived:
            peer, message = self._arrived.popleft()
            if peer.gone:
                continue
            if message is None:
                self.drop(peer)
            yield peer, message

    def send(self, peer: Peer, message: Any) -> None:
        """Send something to a peer."""
        self._sent(peer, message)
        if not peer.gone:
            peer.end.down.put(message)

    untrusted = Unproven[Any](0)
    """Strangers are not told of here."""

    def late(self, seconds: float) -> list[Peer]:
        """Strangers that are to be hung up on."""
        return []

    def trust(self, peer: Peer) -> None:
        """It has shown the token."""

    def drop(self, peer: Peer) -> None:
        """Hang up on one."""
        peer.drop()
        if peer in self._peers:
            self._peers.remove(peer)

    def drain(self, peer: Peer) -> Generator[Any, None, None]:
        """What one that is gone has said to the end; hangs up on it."""
        for each, message in list(self._arrived):
            if each is peer and message is not None and not peer.gone:
                yield message
        self.drop(peer)

    def peers(self) -> list[Peer]:
        """Everyone who is connected."""
        return list(self._peers)

    def die(self, engine: Engine, *, abruptly: bool) -> None:
        """The master has ended: all connections that it had taken in end."""
        for peer in self._peers:
            if abruptly and engine.chance(0.3):
                peer.end.down.lose()
            peer.drop()
