"""The keys under which the members of a group exchange their addresses.

The group is a generation's, or the one inside a replica. The master's half of
`comm/channel_store.py`.
"""

from __future__ import annotations

from instep.comm.channel import Peer


class Keys:
    """Values by key, and the connections that wait for one."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Peer]] = {}

    def leave(self, key: str, value: bytes) -> list[Peer]:
        """Keep a value; returns the connections that wait for it."""
        self._values[key] = value
        return self._waiting.pop(key, [])

    def find(self, key: str, peer: Peer) -> bytes | None:
        """The value; None if it is not there yet: then the connection waits for it."""
        value = self._values.get(key)
        if value is None:
            self._waiting.setdefault(key, []).append(peer)
        return value

    def value(self, key: str) -> bytes:
        """The value; empty if it is not there yet."""
        return self._values.get(key, b"")

    def forget(self, prefix: str) -> None:
        """Forget all keys that begin like this, for another group."""
        for known in (self._values, self._waiting):
            for key in [key for key in known if key.startswith(prefix)]:
                del known[key]
