"""The kernel's count of bytes is exact."""

import socket
import sys
import time

import pytest

from instep.comm.metered import close, tcp_traffic

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell")

TIMEOUT_S = 600.0


def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def counted_until(wanted, before):
    """The traffic since `before`; an acknowledgement may be some milliseconds late."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        now = tcp_traffic()
        grown = (now.sent_bytes - before.sent_bytes, now.received_bytes - before.received_bytes)
        if grown == wanted or time.monotonic() > deadline:
            return grown


@pytest.mark.parametrize("count", [1, 1000, 123_457])
def test_bytes_over_loopback_are_counted_exactly_on_both_ends(count):
    one, other = pair()
    with one, other:
        before = tcp_traffic()
        one.setblocking(False)
        sent = received = 0
        while received < count:
            if sent < count:
                try:
                    sent += one.send(bytes(count - sent))
                except BlockingIOError:
                    pass
            received += len(other.recv(1 << 16))
        assert counted_until((count, count), before) == (count, count)


def test_a_connection_that_was_closed_is_counted_on():
    one, other = pair()
    before = tcp_traffic()
    one.sendall(bytes(1000))
    assert len(other.recv(1000, socket.MSG_WAITALL)) == 1000
    assert counted_until((1000, 1000), before) == (1000, 1000)
    for each in (one, one, other, other):
        close(each)
    sent, received = tcp_traffic()
    assert sent - before.sent_bytes == 1000
    assert received - before.received_bytes in (1000, 1001)  # an end counts as one byte
    assert one.fileno() == other.fileno() == -1


def test_sockets_that_are_not_tcp_are_not_counted():
    before = tcp_traffic()
    left, right = socket.socketpair()
    with left, right, socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
        left.sendall(b"not over a network")
        assert tcp_traffic() == before


def test_counting_leaves_the_sockets_as_they_are():
    one, other = pair()
    with one, other:
        for _ in range(3):
            tcp_traffic()
        one.sendall(b"still open")
        assert other.recv(100) == b"still open"
