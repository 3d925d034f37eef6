"""A server whose host was cut off for a moment is waited for: nobody else has its part."""

from types import SimpleNamespace

import pytest

from instep.comm.protocol.messages import Heartbeat
from instep.control import state as s
from instep.control.hosts.hosts import LAST_S
from instep.control.master import Master

WORKERS, SERVER = (0, 1), 2


def given_up(worker, silent_s, options):
    """Whether the master gives up a process of a host that is quiet; all others can be reached."""
    everybody, found = frozenset([*WORKERS, SERVER]), []
    master = Master.__new__(Master)
    master._state = SimpleNamespace(
        ready=everybody,
        holders=everybody,
        servers=frozenset([SERVER]),
        fellows=lambda number: frozenset([number]),
        whole=lambda numbers: numbers,
    )
    master._job = SimpleNamespace(sync=SimpleNamespace(options=options))
    master._hosts = SimpleNamespace(is_quiet=lambda host: host == 1, can_do_without=True)
    now = 1000.0
    master._last_heartbeat = dict.fromkeys(everybody, (now, Heartbeat()))
    master._last_heartbeat[worker] = now - silent_s, Heartbeat()
    master._peers, master._reached = dict.fromkeys(everybody), (None, 0.0, frozenset())
    master._observe = found.append
    process = SimpleNamespace(
        host=1, killed_at=None, signal=lambda number: None, is_lost=lambda *_: False
    )
    master._watch_remote(worker, process, now)
    assert all(isinstance(each, s.Hung) and each.worker == worker for each in found)
    return bool(found)


@pytest.mark.parametrize(
    ("worker", "silent_s", "options", "lost"),
    [
        (0, 1.5, {}, True),
        (SERVER, 1.5, {}, False),
        (SERVER, 1.5, {"copy": False}, False),
        (SERVER, 1.5, {"copy": True}, True),
        (SERVER, LAST_S + 1.0, {}, True),
    ],
)
def test_who_alone_has_a_part_is_given_up_late(worker, silent_s, options, lost):
    assert given_up(worker, silent_s, options) is lost
