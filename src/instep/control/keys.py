"""Where the members of one generation leave their addresses for each other.

The master's half of `comm/channel_store.py`: it knows what was left under
which key, and who waits for one that nobody has left yet.
"""

from __future__ import annotations

from instep.comm.channel import Peer


class Keys:
    """Values by key, and who waits for them."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Peer]] = {}

    def leave(self, key: str, value: bytes) -> list[Peer]:
        """Keep a value; who has waited for it."""
        self._values[key] = value
        return self._waiting.pop(key, [])

    def find(self, key: str, peer: Peer) -> bytes | None:
        """The value, or None where there is none: then the peer waits for it."""
        value = self._values.get(key)
        if value is None:
            self._waiting.setdefault(key, []).append(peer)
        return value

    def clear(self) -> None:
        """Another generation: nobody looks for the keys of the one before."""
        self._values.clear()
        self._waiting.clear()
