"""How a process of the run finds a server: by what that has left with the master."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from instep.comm.protocol.channel import Address
from instep.engine.member import Member
from instep.errors import PeerError
from instep.server.door import Door
from instep.server.tensor_channel import Line, secret_of

AGAIN_S = 0.05
"""How long to wait before another try to reach a server, which may be on its way."""


class _Where(msgspec.Struct):
    """How to reach a server."""

    host: str
    port: int
    number: int
    """Of its process."""
    nonce: bytes
    """With the run's token it makes the secret, which is so in no file: the master keeps this."""


def tell(member: Member, place: int, door: Door) -> None:
    """Leave with the master how this server is reached.

    Args:
        member: its process.
        place: which of the servers it is.
        door: of it.
    """
    where = _Where(*door.address, member.number, door.nonce)
    member.run_store.set(_key(place), msgspec.msgpack.encode(where))


def reach(member: Member, place: int, keep_up: Callable[[], None]) -> Line:
    """A connection to a server; waits for it.

    Args:
        member: this process.
        place: which of the servers.
        keep_up: called now and then meanwhile; what it raises is raised here.

    Raises:
        PeerError: there is no master any more.
    """
    sums = member.job.sync.codec != "none"
    while True:
        try:
            told = member.run_store.get(_key(place))
        except PeerError:
            if not member.superseded:
                raise
            keep_up()
            continue
        where = msgspec.msgpack.decode(told, type=_Where)
        address = Address(where.host, where.port)
        try:
            secret = secret_of(member.token, where.nonce)
            known = address, where.number, secret, member.number, member.credentials
            return Line.to(*known, sums=sums)
        except PeerError:
            time.sleep(AGAIN_S)
            keep_up()


def _key(place: int) -> str:
    return f"server {place}"
