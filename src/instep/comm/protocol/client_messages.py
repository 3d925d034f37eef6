"""Messages between the master and clients: those that started a run, change it, or lend it hosts.

Their rules are those of `messages.py`, which has them too.
"""

from __future__ import annotations

import msgspec

from instep.comm.encryption.certificates import Credentials
from instep.comm.protocol.base_message import Message
from instep.comm.protocol.process_messages import Failed


class Interrupt(Message, frozen=True):
    """From the client: stop at the next commit; a second time, now."""

    by: str
    """Name of the signal that the client got."""
    times: int
    """How many signals it has got so far."""


class HostWanted(Message, frozen=True):
    """To the client: start fork servers on these hosts, which have none any more."""

    numbers: list[int]


class HostUnneeded(Message, frozen=True):
    """To the client: this host has no workers, and the run can do without it; it may be ended."""

    number: int


class HostsLeave(Message, frozen=True):
    """From the client: the machines of these hosts, and of no others, are about to go."""

    numbers: list[int]


class HostEnded(Message, frozen=True):
    """From the client: a fork server has ended by itself."""

    code: int
    detail: str
    """The last line that it printed."""
    number: int = 0


class Scale(Message, frozen=True):
    """From a client: change the number of workers; the reply is `Answer`."""

    workers: int
    places: list[int] | None = None
    """Workers that there is room for, by host; None: they may be on any."""


class AddHosts(Message, frozen=True):
    """From a client: it has hosts for the run; the reply is `HostsAdded`."""

    count: int
    workers: int
    """How many workers more the run is to have while they are there."""


class HostsAdded(Message, frozen=True):
    """To that client: what its hosts are called, and what they show.

    For as long as they are there it has a connection of its own, as a client of number `client`.
    """

    refusal: str = ""
    """Why the run cannot have them; empty if it can."""
    numbers: list[int] = msgspec.field(default_factory=list)
    credentials: list[Credentials] = msgspec.field(default_factory=list)
    """Of each host; empty where connections are not encrypted."""
    client: int = 0
    own: Credentials | None = None
    """What the client itself shows."""
    folder: str = ""
    """Where the run was started."""


class HostsJoined(Message, frozen=True):
    """To that client: the run has more workers now; or nothing yet, as all hosts are late."""

    workers: int
    missing: list[int]
    """Hosts that have not connected."""


class RemoveHosts(Message, frozen=True):
    """From that client: its hosts are about to go; the reply is `Leave`, once they may."""


class Answer(Message, frozen=True):
    """To a client: why its request is refused; empty if it is accepted."""

    refusal: str


class Over(Message, frozen=True):
    """To the client: how the run ended."""

    outcome: str
    rule: str
    step: int
    exit_code: int
    worker: int | None = None
    """The worker that failed, if one did."""
    failed: Failed | None = None
