"""Where the processes of one start meet whose hosts share no folder: an address of process 0.

Process 0 listens there and keeps the notes (`meeting.py`); the others show a token and read them.
They also encrypt by it: both ends show certificates of the authority that follows from the token.
So who does not have it is closed without a word. Only where the run's master listens is said here:
the processes talk with the master itself. Way in: `meeting_at`.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from instep.client.join.meeting import Meeting, meeting_file
from instep.client.join.placement import Placement, address_of
from instep.client.join.rendezvous_client import AGAIN_S, RendezvousClient, token_in
from instep.comm.encryption.certificates import Authority, Identity
from instep.comm.encryption.tls import context
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import MOST_UNTRUSTED, Address
from instep.comm.protocol.hub import Hub, Peer
from instep.errors import JoinError, SpecError
from instep.launch.gate import PROOF_S, REFUSED
from instep.launch.node import versions
from instep.plain_file import PRIVATE, replace_plain
from instep.units import host_and_port

AT, TOKEN = "INSTEP_RENDEZVOUS", "INSTEP_TOKEN_FILE"
"""Environment variables."""


BUSY_S = 10.0
"""How long the port may still be that of the start before."""


def meeting_at(
    place: Placement,
    runs: Path,
    rendezvous: str | None,
    token_file: str | Path | None,
    environment: Mapping[str, str] = os.environ,
) -> Meeting:
    """Where the processes of this start meet: at an address if one is given, else at a file.

    Args:
        place: of this process.
        runs: folder of run folders.
        rendezvous: `host:port` of process 0; else the environment may say it.
        token_file: the same of the token; process 0 makes the file if there is none.

    Raises:
        InstepError: process 0 cannot listen there, or the token cannot be used.
    """
    given = rendezvous or environment.get(AT, "")
    file = token_file or environment.get(TOKEN, "")
    if not given or place.size == 1:
        return meeting_file(runs, place)
    address = _address(given)
    if not file:
        raise SpecError(
            f"rendezvous = {given!r}: the processes prove with a token that they belong together. "
            f"Name its file with token_file or {TOKEN}; process 0 makes it, and each other host "
            "needs a copy that only its user can read."
        )
    _check_reachable(address, place)
    path = Path(file)
    if place.rank == 0:
        return Rendezvous(address, _made(path), place)
    return RendezvousClient(address, path, place)


class Rendezvous:
    """The notes, in the memory of process 0, and the door to them.

    Args:
        address: to listen on.
        token: what each process must show.
        place: of process 0.

    Raises:
        SpecError: nothing can listen there.
    """

    lasts = False
    pause_s = 0.02
    missing = ("made its run ready", "whether it is still there")

    def __init__(self, address: Address, token: str, place: Placement) -> None:
        self._token, self._start = token.encode(), place.key
        self._notes: dict[str, bytes] = {}
        self._said: set[str] = set()
        self._over = threading.Event()
        shown = Authority.of_secret(token).issue(Identity("master"))
        self._hub = Hub(_listen(address), context=context(shown, server=True))
        self._hub.untrusted.most = max(MOST_UNTRUSTED, 2 * place.size)  # all may come at once
        self.host: str | None = self._hub.address.host
        self._thread = threading.Thread(target=self._serve, name="instep meeting", daemon=True)
        self._thread.start()

    def enter(self) -> None:
        """It is here."""

    def put(self, name: str, note: bytes) -> bool:
        """As `Meeting.put`."""
        self._notes[name] = note
        return True

    def get(self, name: str) -> bytes | None:
        """As `Meeting.get`."""
        return self._notes.get(name)

    def remove(self, name: str) -> None:
        """As `Meeting.remove`."""
        self._notes.pop(name, None)

    def names(self) -> list[str]:
        """As `Meeting.names`."""
        return [name for name in list(self._notes) if name]

    def close(self) -> None:
        """Listen no more; a second call does nothing."""
        self._over.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._over.is_set():
            for peer, message in self._hub.receive(0.1):
                if message is not None:
                    self._answer(peer, message)
            for peer in self._hub.late(PROOF_S):
                self._hub.drop(peer)
        self._hub.close()

    def _answer(self, peer: Peer, message: m.AnyMessage) -> None:
        match message:
            case m.Meet() if not peer.trusted:
                self._let_in(peer, message)
            case m.StoreGet(key=name) if peer.trusted:
                value = self._notes.get(name, b"")
                self._hub.send(peer, m.StoreValue(key=name, value=value))
            case m.StoreSet(key=name, value=value) if peer.trusted:
                if value:
                    self._notes[name] = value
                else:
                    self._notes.pop(name, None)
            case _:
                self._refuse(peer)

    def _let_in(self, peer: Peer, asked: m.Meet) -> None:
        if not hmac.compare_digest(asked.token.encode(), self._token):
            self._say(peer)
            self._refuse(peer)
            return
        self._hub.trust(peer)
        self._hub.send(peer, m.Met(start=self._start, versions=dict(versions())))

    def _refuse(self, peer: Peer) -> None:
        code = JoinError.exit_code
        self._hub.send(peer, m.Refused(kind="JoinError", text=REFUSED, exit_code=code))
        self._hub.drop(peer)

    def _say(self, peer: Peer) -> None:
        if (who := peer.address) and who not in self._said:
            self._said.add(who)
            print(f"instep: refused a process at {who}: another token", file=sys.stderr)


def _address(given: str) -> Address:
    try:
        return Address(*host_and_port(given))
    except ValueError:
        raise SpecError(
            f"rendezvous = {given!r}: needs the machine of process 0 and a free port of it, such "
            "as 'node1:29600'."
        ) from None


def _check_reachable(address: Address, place: Placement) -> None:
    leads_to = address_of(address.host)
    if leads_to == "0.0.0.0" or (leads_to.startswith("127.") and not place.one_host):
        raise SpecError(
            f"rendezvous = '{address.host}:{address.port}': {address.host} leads to {leads_to} on "
            f"the machine of process {place.rank}, which other machines cannot reach. Give the "
            "network address of the machine of process 0."
        )


def _made(file: Path) -> str:
    """The token of a file, which is made if there is none."""
    if not file.exists():
        try:
            replace_plain(file, secrets.token_hex(16) + "\n", PRIVATE)
        except OSError as error:
            raise SpecError(
                f"token_file = {str(file)!r} cannot be written: {error.strerror}. Name a file in a "
                "folder of yours."
            ) from None
    return token_in(file)


def _listen(address: Address) -> socket.socket:
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return socket.create_server((address.host, address.port), backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(AGAIN_S)
                continue
            raise SpecError(
                f"rendezvous = '{address.host}:{address.port}': process 0 cannot listen there "
                f"({error.strerror}). Give an address of its machine, and a port that is free."
            ) from None
