"""The keys under which the members of a group exchange their addresses.

The group is a generation's, or the one inside a replica. The master's half of
`comm/protocol/channel_store.py`. A member asks for one key after the other; each answer brings what
else is there. So it asks a few times, however many members there are.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from instep.comm.protocol.channel import LARGEST
from instep.comm.protocol.hub import Peer
from instep.comm.protocol.messages import StoreGet, StoreValue


class Keys:
    """Values by key, and the connections that wait for one."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._waiting: dict[str, list[tuple[Peer, StoreGet]]] = {}

    def leave(self, key: str, value: bytes) -> list[tuple[Peer, StoreValue]]:
        """Keep a value; returns the connections that wait for it, with what each gets."""
        self._groups[_group(key)][key] = value
        return [(peer, self._answer(asked)) for peer, asked in self._waiting.pop(key, [])]

    def find(self, asked: StoreGet, peer: Peer) -> StoreValue | None:
        """The reply; None if the value is not there yet: then the connection waits for it."""
        if asked.key in self._groups[_group(asked.key)]:
            return self._answer(asked)
        self._waiting.setdefault(asked.key, []).append((peer, asked))
        return None

    def _answer(self, asked: StoreGet) -> StoreValue:
        group = self._groups[_group(asked.key)]
        more, size = dict[str, bytes](), 0
        for key, value in islice(group.items(), asked.known, None):
            size += len(key) + len(value)
            if size > LARGEST // 4:  # as much as a frame can hold beside the one that was asked for
                break
            if key != asked.key:
                more[key] = value
        return StoreValue(key=asked.key, value=group[asked.key], more=more)

    def value(self, key: str) -> bytes:
        """The value; empty if it is not there yet."""
        return self._groups[_group(key)].get(key, b"")

    def forget(self, prefix: str) -> None:
        """Forget all keys that begin like this, for another group."""
        for group, values in list(self._groups.items()):
            for key in [key for key in values if key.startswith(prefix)]:
                del values[key]
            if not values:
                del self._groups[group]
        for key in [key for key in self._waiting if key.startswith(prefix)]:
            del self._waiting[key]


def _group(key: str) -> str:
    return key.rpartition("/")[0]
