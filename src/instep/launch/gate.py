"""The door of a cluster: machines come by themselves, show certificates, and take their places.

All connections are encrypted. A machine without a certificate gets one for its token, and comes
again (`join_folder.py`). The gate knows the places and who is in which, and nothing of what
machines do there. A place has one machine: the one whose certificate has its number. Where another
process shows the same certificate, the first one keeps the place if it still answers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from instep.comm.encryption.tls import context
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Address
from instep.comm.protocol.hub import Hub, Peer
from instep.errors import JoinError, SpecError
from instep.launch.join_folder import JoinFolder
from instep.words import plural

PROOF_S = 5.0
"""How long a connection may take to prove what it is."""

REFUSED = "refused"
"""All that anybody is told who has not proved what it is."""

SILENT_S = 3.0
"""A machine that is silent for so long loses its place to another that asks for it."""


@dataclass
class _Place:
    name: str
    peer: Peer | None = None
    who: str = ""
    rival: tuple[Peer, str, float] | None = None
    """Another that asks for this place, who it is, and since when."""


class Gate:
    """Listens, and lets in those that are expected.

    Args:
        address: of this machine, and a port.
        places: `host:port` each.
        folder: has the authority of all certificates.
        say: told of those that are refused; the same is said once.

    Raises:
        SpecError: nothing can listen there.
    """

    def __init__(
        self,
        address: tuple[str, int],
        places: Sequence[str],
        folder: JoinFolder,
        say: Callable[[str], None],
    ) -> None:
        self._places, self._folder = [_Place(name) for name in places], folder
        self._tell, self._told = say, set[str]()
        self._closing = False
        try:
            shown = context(folder.credentials(), server=True, newcomers=True)
            self._hub = Hub(socket.create_server(address, backlog=1024), context=shown)
        except OSError as error:
            raise SpecError(
                f"{address[0]}:{address[1]}: nothing can listen there ({error.strerror}). Give an "
                "address of this machine, and a port that is free."
            ) from None

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._hub.address

    @property
    def missing(self) -> list[str]:
        """Places that nobody has."""
        return [place.name for place in self._places if place.peer is None]

    def send(self, number: int, message: m.AnyMessage) -> None:
        """To the machine in a place, if there is one."""
        if (peer := self._places[number].peer) is not None:
            self._hub.send(peer, message)

    def turn(self, timeout_s: float) -> Iterator[tuple[int, m.AnyMessage | None]]:
        """What arrives within a time, by place; `Joined` of a new machine, None of a lost one."""
        for peer, message in self._hub.receive(timeout_s):
            number = next((n for n, place in enumerate(self._places) if place.peer is peer), -1)
            if message is None:
                yield from self._lose(peer)
            elif number >= 0:
                self._keep(self._places[number])
                yield number, message
            elif self._closing:
                self._hub.drop(peer)
            else:
                yield from self._stranger(peer, message)
        for peer in self._hub.late(PROOF_S):
            self._hub.drop(peer)
        now = time.monotonic()
        for place in self._places:
            if place.rival is not None and now - place.rival[2] > SILENT_S:
                yield from self._lose(place.peer)

    def _stranger(
        self, peer: Peer, message: m.AnyMessage
    ) -> Iterator[tuple[int, m.AnyMessage | None]]:
        """What arrives from a machine that has no place."""
        try:
            match message:
                case m.Certify(secret=secret, public_key=key):
                    certificate = self._folder.certify(secret, key)
                    self._hub.send(peer, m.Certified(certificate=certificate))
                case m.Join() if not peer.trusted:
                    yield from self._ask(peer, message)
                case _:
                    raise JoinError("it does not ask to join")
        except JoinError as error:
            self._say(f"a machine at {peer.address} was refused: {error}")
            self._refuse(peer, REFUSED)
        except (SpecError, OSError) as error:  # of the folder; it tries again
            self._say(f"a machine at {peer.address} cannot join: {error}")
            self._hub.drop(peer)

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def _ask(self, peer: Peer, asked: m.Join) -> Iterator[tuple[int, m.AnyMessage]]:
        shown = peer.shown
        if shown is None or not self._folder.is_current(shown.number, peer.certificate):
            raise JoinError("it has no certificate that fits")
        self._hub.trust(peer)
        if shown.number >= len(self._places):
            count = plural(len(self._places), "machine")
            self._refuse(peer, f"the run expects {count}, and this is host {shown.number}.")
            return
        place = self._places[shown.number]
        if place.peer is None:
            yield self._let_in(place, peer, asked.who)
        elif place.rival is not None:
            self._refuse(peer, _taken(place))
        else:
            place.rival = peer, asked.who, time.monotonic()

    def _let_in(self, place: _Place, peer: Peer, who: str) -> tuple[int, m.AnyMessage]:
        place.peer, place.who, joined = peer, who, m.Joined(place=place.name)
        self._hub.send(peer, joined)
        return self._places.index(place), joined

    def _keep(self, place: _Place) -> None:
        """The machine in a place has answered: nobody else gets it."""
        if place.rival is not None:
            rival, place.rival = place.rival[0], None
            self._refuse(rival, _taken(place))

    def _lose(self, peer: Peer | None) -> Iterator[tuple[int, m.AnyMessage | None]]:
        for number, place in enumerate(self._places):
            if place.rival is not None and place.rival[0] is peer:
                place.rival = None
            if peer is not None and place.peer is peer:
                self._hub.drop(peer)
                place.peer, rival, place.rival = None, place.rival, None
                yield number, None
                if rival is not None and not self._closing:
                    yield self._let_in(place, rival[0], rival[1])

    def _refuse(self, peer: Peer, text: str) -> None:
        self._hub.send(peer, m.Refused(kind="JoinError", text=text, exit_code=JoinError.exit_code))
        self._hub.drop(peer)

    def drop_all(self) -> None:
        """Listen no more, and close all connections; the machines are told nothing."""
        self._closing = True
        self._hub.close()

    def close(self, timeout_s: float) -> None:
        """Have all leave, and wait for that; a second call does nothing."""
        if self._closing:
            return
        self._closing = True
        for number in range(len(self._places)):
            self.send(number, m.Leave())
        deadline = time.monotonic() + timeout_s
        while len(self.missing) < len(self._places) and time.monotonic() < deadline:
            for _ in self.turn(0.05):
                pass
        self._hub.close()


def _taken(place: _Place) -> str:
    who = f"{place.name} has joined already ({place.who})"
    return f"{who}. End that one, or use the token file of another machine."
