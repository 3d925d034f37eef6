"""Messages of the store by which the members of a group find each other, and its keys.

Their rules are those of `messages.py`, which has them too.
"""

from __future__ import annotations

import msgspec

from instep.comm.protocol.base_message import Message


def keys_of_generation(generation: int | None = None) -> str:
    """The prefix of the keys by which the members of a generation connect, or those of all."""
    return "generation-" if generation is None else f"generation-{generation}/"


def keys_of_replica(replica: int, restarts: int | None = None) -> str:
    """The prefix of the keys by which the processes of a replica connect, or of all its starts."""
    start = f"replica-{replica}-"
    return start if restarts is None else f"{start}{restarts}/"


KNOWN = "known"
"""The key of what is found out once, for all processes of the run."""


class StoreSet(Message, frozen=True):
    """Set a key for the other members of a group that is forming."""

    key: str
    value: bytes


class StoreGet(Message, frozen=True):
    """Ask for a key; the reply is `StoreValue`, once it is set."""

    key: str
    known: int = 0
    """How many keys with the same beginning, up to the last `/`, the asker has got already."""


class StoreValue(Message, frozen=True):
    """The reply to `StoreGet`."""

    key: str
    value: bytes
    more: dict[str, bytes] = msgspec.field(default_factory=dict)
    """What else was set since the asker got something, of keys with the same beginning."""
