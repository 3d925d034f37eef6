"""Where workers are: which host starts one, and which move to another host.

Hosts know what they have (`hosts/hosts.py`); here is what the run needs. Way in: `WorkerPlaces`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from instep.comm.protocol.messages import HostUnneeded
from instep.control.decisions.events import HostJoined, Noticed
from instep.control.decisions.phases import KILLED
from instep.control.decisions.state import State
from instep.control.processes.roster import Roster
from instep.control.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class WorkerPlaces:
    """The places of a run's workers."""

    run: Path
    roster: Roster
    recorder: Recorder
    state: Callable[[], State]
    """Tells the state of the run."""
    gives_back: bool
    """Whether the client ends hosts that are not needed."""

    def start(self, number: int) -> None:
        """Start a process under this number, on a host."""
        if not self.roster.starts.may_start(number):
            return
        state, role = self.state(), self.state().member(number).role
        log = str(self.run / "logs" / f"{role}-{number}.log")
        killed = state.those(KILLED)  # these start again too
        placed = {n: host for n, host in self.roster.placed().items() if n not in killed}
        # a server, a codec or the only replica left memory on the host where it was
        only = 1 < state.ranks == len(state.wanted)
        left, hello = state.drains or role == "server" or only, self.roster.worker(number).hello
        home = hello.host if left and hello is not None else None
        workers = len(state.wanted - state.servers)
        starts, apart = self.roster.starts, state.servers
        starts.start(number, log, placed, role, of=workers, home=home, apart=apart)

    def spread(self) -> Iterator[Noticed | HostJoined]:
        """Move workers from hosts that are about to go, or one to a host that has come back, when
        nothing else changes; and give back hosts that are not needed.

        To a host that has come back none moves that shares its replica: all of them would, and
        crowd it.
        """
        if not self.roster.hosts.several:
            return
        yield from self._wait_for_room()
        state, members = self.state(), set(self.state().group)
        self.roster.hosts.numbers.take_again(len(state.wanted - state.servers))
        calm = state.phase == "training" and not (state.changing or state.stop or state.done)
        everywhere = self.roster.placed()
        settled = members == state.wanted == state.joined == everywhere.keys()
        if not (calm and settled and state.complete):
            return
        placed = {w: everywhere[w] for w in members}
        moved = self.roster.starts.to_move(placed, stay=state.servers)
        crowded = (
            self.roster.starts.crowded(placed, stay=state.servers) if state.ranks == 1 else None
        )
        if not moved and crowded is not None:
            moved = [crowded]
        yield from map(Noticed, moved)
        if not moved and self.gives_back:
            self._give_back(placed)

    def _wait_for_room(self) -> Iterator[HostJoined]:
        """Start workers for which there was no room, in case there is some now."""
        state, roster = self.state(), self.roster
        if roster.hosts.numbers.places is None or state.phase not in ("gathering", "training"):
            return
        if any(n not in roster.placed() and roster.starts.may_start(n) for n in state.needed):
            yield HostJoined()

    def _give_back(self, placed: Mapping[int, int]) -> None:
        """Ask the client to end a host that the run can do without."""
        if (client := self.roster.client) is None:
            return
        workers = len(self.state().wanted - self.state().servers)
        number = self.roster.hosts.give_back({*placed.values(), *self.roster.starts.hosts}, workers)
        if number is not None:
            self.recorder.emit("host_given_back", {"host": number})
            self.roster.hub.send(client, HostUnneeded(number=number))
