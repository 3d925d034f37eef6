"""The side of a rendezvous that every process but the first has."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from instep.client.join.meeting import SAY_AFTER_S
from instep.client.join.placement import Placement
from instep.comm.encryption.certificates import Authority, Identity
from instep.comm.encryption.tls import context
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Address, Channel, why_failed
from instep.errors import JoinError, PeerError, SpecError, StrangerError
from instep.launch.join_token import read_secret
from instep.launch.node import versions
from instep.units import readable_seconds

NO_ANSWER_S = 300.0
"""How long process 0 may not be there: hosts may be started by hand."""

ANSWER_S = 5.0
"""How long to wait for a connection, and for an answer."""

LOST_S = 30.0
"""How long process 0 may not be there once it has been: it is not started again."""

LOOKS = 500
"""How often a second all processes together look for notes: process 0 reads a checkpoint meanwhile,
and has two requests of each look to answer."""

LONGEST_S = 1.0
"""Between two looks, however many processes there are."""

SHORTEST = 32
"""Characters of a token; of hexadecimal digits, 128 bits."""

AGAIN_S = 0.2
"""Between two attempts to connect, or to listen."""


class RendezvousClient:
    """The notes, as another process reads them; it connects when it has to.

    Args:
        address: of process 0.
        token_file: with what is to be shown.
        place: of this process.
    """

    lasts = False
    host: str | None = None

    def __init__(self, address: Address, token_file: Path, place: Placement) -> None:
        self._address, self._token_file, self._place = address, token_file, place
        self._where = f"{address.host}:{address.port}"
        self._channel: Channel | None = None
        self._why = ""
        self.pause_s = min(LONGEST_S, place.size / LOOKS)
        start = f"{self._where} {place.key}"
        # between two sessions of a script process 0 may do something of its own
        self._may_be_away_s = NO_ANSWER_S if start in _MET else LOST_S
        _MET.add(start)
        self._away_since: float | None = None
        self.missing = (
            f"said at {self._where} where its run is",
            "whether it is still there, or reads a checkpoint",
        )

    def enter(self) -> None:
        """Connect to process 0.

        Raises:
            JoinError: it does not answer, or refuses this process.
            SpecError: it has other versions.
        """
        began, said = time.monotonic(), False
        while self._connected() is None:
            waited_s = time.monotonic() - began
            if waited_s > NO_ANSWER_S:
                raise JoinError(
                    f"process 0 does not answer at {self._where} ({self._why}), tried for "
                    f"{readable_seconds(NO_ANSWER_S)}. Look whether it has started, whether "
                    f"{self._address.host} is an address of its machine, and whether a firewall "
                    f"closes port {self._address.port}."
                )
            if waited_s > SAY_AFTER_S and not said:
                text = f"instep: waiting for process 0 at {self._where} ({self._why})"
                print(text, file=sys.stderr)
                said = True
            time.sleep(AGAIN_S)

    def put(self, name: str, note: bytes) -> bool:
        """As `Meeting.put`."""
        return self._send(m.StoreSet(key=name, value=note))

    def get(self, name: str) -> bytes | None:
        """As `Meeting.get`.

        Raises:
            JoinError: process 0 is gone.
        """
        if self._send(m.StoreGet(key=name)):
            assert self._channel is not None, "it was sent"
            with suppress(PeerError, TimeoutError):
                answer = self._channel.receive(ANSWER_S)
                if isinstance(answer, m.StoreValue):
                    self._away_since = None
                    return answer.value or None
            self.close()
        self._give_up_if_lost()
        return None

    def _give_up_if_lost(self) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        elif now - self._away_since > self._may_be_away_s:
            raise JoinError(
                f"process 0 was at {self._where} and does not answer there any more ({self._why}), "
                f"for {readable_seconds(self._may_be_away_s)}. Look at what it printed last."
            )

    def remove(self, name: str) -> None:
        """As `Meeting.remove`."""
        self.put(name, b"")

    def names(self) -> list[str]:
        """Only process 0 reads all."""
        return []

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _send(self, message: m.AnyMessage) -> bool:
        channel = self._connected()
        if channel is None:
            time.sleep(AGAIN_S)
            return False
        try:
            channel.send(message)
        except PeerError:
            self.close()
            return False
        return True

    def _connected(self) -> Channel | None:
        """The connection; None, and `_why`, while there is none to be had."""
        if self._channel is not None:
            return self._channel
        if not self._token_file.exists():
            self._why = f"there is no {self._token_file} here"
            return None
        token = token_in(self._token_file)
        shown = Authority.of_secret(token).issue(Identity("worker", self._place.rank))
        try:
            made = context(shown, server=False)
            channel = Channel.connect(self._address, ANSWER_S, made)
        except (PeerError, TimeoutError) as error:
            self._why = why_failed(error)
            return None
        answer: m.AnyMessage | None = None
        try:
            channel.send(m.Meet(token=token))
            answer = channel.receive(ANSWER_S)
        except StrangerError:
            channel.close()
            raise JoinError(
                f"what listens at {self._where} does not have the token in {self._token_file}, and "
                "was told nothing. Copy the file again from the machine of process 0."
            ) from None
        except (PeerError, TimeoutError):
            pass
        if isinstance(answer, m.Met) and answer.start == self._place.key:
            self._channel = channel
            self._compare(answer)
            return channel
        channel.close()
        if isinstance(answer, m.Refused):
            raise JoinError(
                f"{self._where} refused this process: {self._token_file} has another token than "
                "process 0. Copy the file again from its machine."
            )
        another = f"the start {answer.start} is there" if isinstance(answer, m.Met) else ""
        self._why = another or "what listens there does not answer"
        return None

    def _compare(self, answer: m.Met) -> None:
        for name, here in versions():
            if here != (there := answer.versions.get(name)):
                raise SpecError(
                    f"the machine of process {self._place.rank} has {name} {here}, and that of "
                    f"process 0 {there}. Install the same on both."
                )


_MET: set[str] = set()
"""The starts, and where they meet, whose process 0 this process has asked before."""


def token_in(file: Path) -> str:
    """Read the token of a run.

    Raises:
        JoinError: it is too short, or the file cannot be read, or others can read it.
    """
    token = read_secret(file).strip()
    if len(token) < SHORTEST:
        raise JoinError(
            f"the token in {file} is too short to encrypt with. Make one with: openssl rand -hex 16"
        )
    return token
