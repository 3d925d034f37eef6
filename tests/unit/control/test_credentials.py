"""A master takes nobody for more than the certificate says; hosts get those of their workers."""

import os
import threading
import time

import pytest

from instep.comm.encryption import tls
from instep.comm.encryption.certificates import Authority, Identity
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Channel
from instep.comm.protocol.endpoint import Switchboard
from instep.control.hosts.hosts import Hosts
from instep.control.hosts.worker_starts import WorkerStarts
from instep.control.master import Master
from instep.errors import PeerError
from instep.job import file as spec_file
from instep.job.mesh import MeshSpec


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture
def board(authority, tmp_path):
    """A master of two workers serves there."""
    board = Switchboard(authority=authority)
    job = spec_file.build({"recipe": "a.py:f", "workers": 2}, source="test")
    master = Master(job, tmp_path, board, views=[], hosted=False, started=time.time(), about={})
    thread = threading.Thread(target=master.serve)
    thread.start()
    yield board
    master.interrupt("test")
    master.interrupt("test")
    thread.join()
    board.close()


def says(board, shown, role, number, host=0):
    """The master's answer to a process with such a certificate that says it is that."""
    context = tls.context(board.issue(shown), server=False)
    channel = Channel.connect(board.endpoint.address, 5.0, context)
    try:
        token = board.endpoint.token
        hello = m.Hello(token=token, role=role, number=number, pid=os.getpid(), host=host)
        channel.send(hello)
        return channel.receive()
    finally:
        channel.close()


@pytest.mark.parametrize(
    ("shown", "role", "number", "host"),
    [
        (Identity("worker", 0), "client", 0, 0),
        (Identity("worker", 0), "host", 0, 0),
        (Identity("host", 0), "client", 0, 0),
        (Identity("host", 0), "worker", 0, 0),
        (Identity("client", 0), "host", 0, 0),
        (Identity("client", 0), "worker", 0, 0),
        (Identity("worker", 1), "worker", 0, 0),
        (Identity("worker", 0, 1), "worker", 0, 0),
        (Identity("server", 0), "worker", 0, 0),
        (Identity("host", 1), "host", 0, 0),
        (Identity("client", 1), "client", 0, 0),
    ],
)
def test_one_role_or_number_opens_no_other(board, shown, role, number, host):
    with pytest.raises(PeerError, match="gone"):
        says(board, shown, role, number, host)


@pytest.mark.parametrize(
    ("shown", "role"),
    [
        (Identity("worker", 1), "worker"),
        (Identity("client", 1), "client"),
        (Identity("host", 1), "host"),
    ],
)
def test_who_shows_what_it_says_is_welcome(board, shown, role):
    assert isinstance(says(board, shown, role, 1), m.Welcome)


def test_a_host_gets_the_credentials_of_each_worker_that_it_is_to_start(authority):
    sent = []
    hosts = Hosts(2, lambda _, message: sent.append(message))
    starts = WorkerStarts(hosts, mesh=MeshSpec(), issue=authority.issue)
    for number in (0, 1):
        hosts.joins(object(), number, 100 + number, 1.0)
    hosts.turn(1.0)
    starts.start(5, "log", {7: 0}, "server")
    (order,) = sent
    context = tls.context(authority.issue(Identity("master")), server=True)
    accepts = tls.Tls(context, server=True, accepted=lambda _: True)
    calls = tls.Tls(
        tls.context(order.credentials, server=False), server=False, accepted=lambda _: True
    )
    data = calls.begin()
    while accepts.peer is None:
        _, data = accepts.open(data)
        _, data = calls.open(data)
    assert accepts.peer == Identity("server", 5, 1)
