"""A server whose host was cut off for a moment is waited for: nobody else has its part."""

from types import SimpleNamespace

import pytest

from instep.comm.protocol.messages import Heartbeat
from instep.control.decisions.events import Hung
from instep.control.hosts.hosts import LAST_S, RemoteProcess
from instep.control.processes.liveness import Liveness
from instep.control.processes.observations import Exit
from instep.control.processes.roster import WorkerRecord

WORKERS, SERVER = (0, 1), 2


class Hosts(SimpleNamespace):
    """Hosts of which one is quiet."""

    several, now, can_do_without = False, 0.0, True

    def is_quiet(self, host):
        return host == 1


def given_up(worker, silent_s, copied):
    """Whether the master gives up a process of a host that is quiet; all others can be reached."""
    everybody, now = frozenset([*WORKERS, SERVER]), 1000.0
    state = SimpleNamespace(
        ready=everybody,
        holders=everybody,
        servers=frozenset([SERVER]),
        fellows=lambda number: frozenset([number]),
        whole=lambda numbers: numbers,
    )
    workers = {
        n: WorkerRecord(peer=object(), last_message=now, heartbeat=Heartbeat()) for n in everybody
    }
    workers[worker].beats(Heartbeat(), now - silent_s)
    hosts = Hosts(
        turn=lambda now: [],
        send=lambda *_: None,
        abandon=lambda *_: None,
    )
    process = RemoteProcess(hosts, 1, 77)
    roster = SimpleNamespace(
        hosts=hosts,
        starts=SimpleNamespace(has_become_ready=lambda now: False),
        connections={},
        worker=workers.__getitem__,
        processes=lambda: {worker: process},
    )
    parts = dict.fromkeys(["places", "watch", "stack_requests", "recorder"])
    liveness = Liveness(roster=roster, state=lambda: state, hosted=True, copied=copied, **parts)
    (*found,) = (each for each in liveness.hosts(now) if not isinstance(each, Exit))
    assert all(isinstance(each, Hung) and each.worker == worker for each in found)
    return bool(found)


@pytest.mark.parametrize(
    ("worker", "silent_s", "copied", "lost"),
    [
        (0, 1.5, False, True),
        (SERVER, 1.5, False, False),
        (SERVER, 1.5, True, True),
        (SERVER, LAST_S + 1.0, False, True),
    ],
)
def test_who_alone_has_a_part_is_given_up_late(worker, silent_s, copied, lost):
    assert given_up(worker, silent_s, copied) is lost
