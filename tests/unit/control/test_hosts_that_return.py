"""A real master, over sockets: a host that was cut off returns when another is in its place."""

import pytest
from test_a_replica_restarts import a_master

from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Channel
from instep.control.journal import Begin
from instep.job import file as spec_file
from instep.store.folder import BEGINNING

LAUNCH = {"hosts": ["env A=1", "env A=2"], "address": "127.0.0.1"}
TABLE = {"recipe": "a.py:f", "workers": 1, "network": "private", "launch": LAUNCH}


@pytest.fixture
def call(tmp_path):
    """A process calls the master; its connection."""
    job, made = spec_file.build(TABLE, source="a test"), []
    (tmp_path / "job.toml").write_text(spec_file.dump(job))
    with a_master(tmp_path, Begin(1.0, BEGINNING), job) as endpoint:

        def introduce(role, number, pid, machine, host=0):
            made.append(Channel.connect(endpoint.address))
            who = {"role": role, "number": number, "pid": pid, "machine": machine, "host": host}
            made[-1].send(m.Hello(token=endpoint.token, **who))
            return made[-1]

        yield introduce
        for each in made:
            each.close()


def kinds(channel):
    """What arrives at once, by its class."""
    found = []
    while channel.wait(0.3):
        found += [type(message) for message in channel.read()]
    return found


def test_a_host_that_was_replaced_while_it_was_cut_off_does_not_take_the_place_back(call):
    call("host", 0, 17, "the first")
    assert kinds(call("host", 0, 17, "the second"))[0] is m.Welcome  # a number may be the same
    (refused,) = call("host", 0, 17, "the first").read()
    assert (type(refused), refused.kind) == (m.Refused, "Unwanted")
    assert kinds(call("host", 0, 17, "the second"))[0] is m.Welcome


def test_a_host_is_not_told_to_look_after_processes_of_another_machine(call):
    """What has the same number there is somebody else's, and would be killed with the host."""
    first = call("host", 0, 1, "the first")
    call("host", 1, 1, "the first")
    order = first.wait_for(m.StartWorker, 20)
    assert kinds(call("worker", order.number, 4711, "the first"))[0] is m.Welcome
    assert m.Adopt in kinds(call("host", 0, 2, "the first"))
    assert m.Adopt not in kinds(call("host", 0, 2, "the second"))
