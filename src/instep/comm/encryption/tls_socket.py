"""A connected socket with TLS on it: as much of a socket as messages need.

Beside `ssl.SSLSocket`: the time for a handshake is counted in all, however slowly its bytes
arrive, and a caller that is not accepted gets no alert. Way in: `TlsSocket`.
"""

from __future__ import annotations

import socket
import time

from instep.comm.encryption.certificates import Identity
from instep.comm.encryption.tls import Tls
from instep.errors import PeerError

CHUNK = 1 << 18
"""Bytes that are encrypted or received at a time."""


class TlsSocket:
    """One end of an encrypted connection. One thread uses it; another may close its socket.

    Args:
        connection: that it runs on, whose timeouts hold here too.
        tls: of this end, new.
        deadline: by which the other end has to prove what it is, on the monotonic clock.

    Raises:
        PeerError: it has not, or is another than is meant.
        OSError: the connection is gone.
    """

    def __init__(self, connection: socket.socket, tls: Tls, deadline: float) -> None:
        self.socket, self._tls = connection, tls
        self._buffer = memoryview(bytearray(CHUNK))
        self._plain = b""  # has arrived with the end of the handshake
        self._set_time(deadline)
        connection.sendall(tls.begin())
        while tls.peer is None:
            self._set_time(deadline)
            try:
                count = connection.recv_into(self._buffer)
            except TimeoutError:
                continue
            if not count:
                raise PeerError("the other end is gone.")
            self._plain, answer = tls.open(self._buffer[:count])
            connection.sendall(answer)

    def _set_time(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise PeerError("no proof in time.")
        self.socket.settimeout(left_s)

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all of it."""
        view = memoryview(data)
        for at in range(0, len(view), CHUNK):
            self.socket.sendall(self._tls.seal(view[at : at + CHUNK]))

    def recv_into(self, into: memoryview) -> int:
        """Receive at most as much as there is room for; 0 at the end of the connection."""
        if self._plain:
            count = min(len(into), len(self._plain))
            into[:count], self._plain = self._plain[:count], self._plain[count:]
            return count
        count = self._tls.open_into(b"", into)
        while not count:
            got = self.socket.recv_into(self._buffer)
            if not got:
                return 0
            count = self._tls.open_into(self._buffer[:got], into)
        return count

    @property
    def peer(self) -> Identity:
        """What the other end has proved to be."""
        assert self._tls.peer is not None, "it has"
        return self._tls.peer

    @property
    def pending(self) -> bool:
        """Whether bytes have arrived that were not received yet."""
        return bool(self._plain) or self._tls.pending
