"""The store by which the ranks of a new group exchange addresses; the master keeps its keys.

Torch's own `TCPStore` listens on every interface, and anybody can write to it. This one opens no
port: a worker's keys go over its connection to the master. So a group forms in few round trips,
and the master can end the forming.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from instep.comm.protocol.connection import MasterConnection
from instep.comm.protocol.messages import Form, Release, StoreGet, StoreSet, StoreValue
from instep.errors import PeerError

if TYPE_CHECKING:
    from instep.comm.encryption.forwarder import Forwarder


class ChannelStore(Store):
    """The part of a store that `ProcessGroupGloo` and `ProcessGroupNCCL` use, over a connection.

    Args:
        connection: to the master; used only while the group forms.
        prefix: put before every key, one for each group.
        released: what `get` raises instead of PeerError once the run does not need this process.
        forwarder: encrypts what the ranks send each other between hosts; None if nothing does.
    """

    def __init__(
        self,
        connection: MasterConnection,
        prefix: str,
        released: type[Exception] | None = None,
        forwarder: Forwarder | None = None,
    ) -> None:
        super().__init__()
        self._forwarder = forwarder
        self._connection, self._prefix, self._released = connection, prefix, released
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value for the others."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        if self._forwarder is not None:
            data = self._forwarder.leave(self._prefix, data)
        self._connection.send(StoreSet(key=self._prefix + key, value=data))

    def get(self, key: str) -> bytes:
        """A value, once it is set; PeerError once another group is to form."""
        name = self._prefix + key
        if name not in self._known:
            group, _, _ = name.rpartition("/")
            known = sum(each.rpartition("/")[0] == group for each in self._known)
            self._connection.unacknowledged.question = question = StoreGet(key=name, known=known)
            self._connection.send(question)
        while name not in self._known:
            answer = self._connection.inbox.wait_for(StoreValue, Form, Release)
            if not isinstance(answer, StoreValue):  # this group will never form
                self._connection.unacknowledged.question = None
                self._connection.inbox.put_back(answer)
                if self._released is not None and isinstance(answer, Release):
                    raise self._released
                raise PeerError("the members changed while the group was forming.")
            # or those of a group that did not form
            self._known |= {answer.key: answer.value, **answer.more}
        if self._forwarder is not None:
            return self._forwarder.take(self._prefix, self._known[name])
        return self._known[name]

    @property
    def found(self) -> dict[str, bytes]:
        """Values that answers have brought so far, by the last part of the key."""
        return {key.rpartition("/")[2]: value for key, value in self._known.items()}

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once every key has been set. The master decides how long that may take."""
        for key in keys:
            self.get(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: the master decides."""
