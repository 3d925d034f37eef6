"""Messages between machines that join and what expects them: a launcher, or a pool's scheduler.

Their rules are those of `messages.py`, which has them too.
"""

from __future__ import annotations

from typing import Any

from instep.comm.protocol.base_message import Message


class Certify(Message, frozen=True):
    """To the launcher, from a machine without a certificate: make one for this key."""

    secret: str
    """Of its join token."""
    public_key: str
    """PEM."""


class Certified(Message, frozen=True):
    """The certificate that a token has bought."""

    certificate: str
    """PEM."""


class Join(Message, frozen=True):
    """To the launcher, from a machine that somebody started `instep host` on, with a certificate
    that says which one it is."""

    who: str = ""
    """Machine and process in words."""


class Joined(Message, frozen=True):
    """It may stay, as this one."""

    place: str


class Serve(Message, frozen=True):
    """To a machine that has joined: start a fork server."""

    endpoint: dict[str, Any]
    logs: str
    run_id: str
    needs: dict[str, Any]
    """What the machine must have (`launch/node.py`)."""


class EndIfStopped(Message, frozen=True):
    """To a machine that has joined: kill the fork server, if it was stopped."""


class Leave(Message, frozen=True):
    """To a machine that has joined, or a client of hosts: they are not needed any more."""


class Attend(Message, frozen=True):
    """From a pool's scheduler to a machine: the runs of which it is to be a host, and no others."""

    runs: dict[str, str]
    """Where the client of each listens for its hosts, `address:port`."""


class Attending(Message, frozen=True):
    """To a pool's scheduler: the runs that have processes on this machine."""

    workers: dict[str, int]
    """Processes of workers of each run that have not ended."""
    leaving: bool = False
    """Whether this machine will soon be gone."""
