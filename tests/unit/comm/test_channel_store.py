"""A group forms over the channels to a real master, which keeps what the ranks tell each other."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_connection import TIMEOUT_S, Masters, until

from instep.comm.protocol.channel_store import ChannelStore
from instep.comm.protocol.connection import MasterConnection
from instep.comm.protocol.endpoint import Endpoint, Switchboard
from instep.comm.protocol.hub import Hub
from instep.comm.protocol.messages import (
    Ack,
    Form,
    Hello,
    Release,
    Stop,
    StoreGet,
    StoreValue,
    Welcome,
)
from instep.comm.torch_comm import TorchComm
from instep.control.master import Master
from instep.engine.member import Member, ReplicaBroken
from instep.engine.membership import Released
from instep.errors import PeerError
from instep.job import file as spec_file

HELLO = Hello(token="", role="worker", number=0, pid=1)


@pytest.fixture
def run(tmp_path):
    """Start a master for so many workers, and end it with the test."""
    boards, threads = [], []

    def start(workers):
        job = spec_file.build({"recipe": "a.py:f", "workers": workers}, source="test")
        board = Switchboard()
        master = Master(job, tmp_path, board, views=[], hosted=False, started=time.time(), about={})
        threads.append(threading.Thread(target=master.serve))
        threads[-1].start()
        boards.append((board, master))
        return board.endpoint

    yield start
    for _, master in boards:
        master.interrupt("test")
        master.interrupt("test")
    for thread in threads:
        thread.join()
    for board, _ in boards:
        board.close()


def members(endpoint, count):
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda number: Member(endpoint, number), range(count)))
        list(pool.map(lambda member: member.wait_for_group(), found))
    return found


def leave(member):
    member.done(0, "own loop")
    member.close()


def test_a_value_that_one_sets_is_found_by_the_others_in_any_order(run):
    first, second = members(run(2), 2)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(second.store().get, "early")
        first.store().set("early", b"\x00 value")
        assert waiting.result() == b"\x00 value"
        second.store().set("late", "text")
        assert first.store().get("late") == b"text"
        first.store().wait(["early", "late"])
        list(pool.map(leave, [first, second]))


def test_a_generation_does_not_see_the_keys_of_another(run):
    (only,) = members(run(1), 1)
    old, new = (
        ChannelStore(only._connection, "generation-1/"),
        ChannelStore(only._connection, "generation-2/"),
    )
    old.set("key", b"old")
    new.set("key", b"new")
    assert (old.get("key"), new.get("key")) == (b"old", b"new")
    leave(only)


def test_a_gloo_group_forms_over_channels_and_sums(run):
    def one(member):
        comm = TorchComm(member.store(), member.form.rank, len(member.form.members))
        tensor = torch.full((3,), float(comm.rank + 1))
        comm.all_reduce(tensor).wait()
        leave(member)
        comm.close()
        return tensor.tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, members(run(3), 3))) == [[6.0] * 3] * 3


def test_a_master_that_hangs_up_ends_the_wait_for_a_key():
    board = Switchboard()
    connection = MasterConnection(board.endpoint.address, HELLO)
    ((peer, _),) = [*board.hub.receive(5), *board.hub.receive(5)][-1:]
    board.hub.send(peer, Stop(rule="interrupted"))
    board.close()
    with pytest.raises(PeerError, match="the master is gone"):
        ChannelStore(connection, "").get("never")
    connection.close()


@pytest.mark.parametrize("word", [Form(generation=2, rank=0, members=[0]), Release()])
def test_a_newer_generation_ends_the_wait_for_a_key_and_its_message_is_kept(word):
    hub = Hub()
    try:
        connection = MasterConnection(hub.address, HELLO)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ChannelStore(connection, "generation-1/").get, "never")
            arrived = (each for _ in range(100) for each in hub.receive(0.1))
            assert next(arrived)[1] == HELLO
            peer, message = next(arrived)
            assert message == StoreGet(key="generation-1/never")
            hub.send(peer, word)
            with pytest.raises(PeerError, match="members changed"):
                waiting.result()
        assert connection.inbox.poll() == word
        connection.close()
    finally:
        hub.close()


@pytest.fixture
def masters():
    each = Masters()
    yield each
    each.close()


def test_who_meets_while_its_master_is_lost_meets_with_the_help_of_the_next(masters):
    """As under `instep.join`, where another master does not form another group."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Member, Endpoint(masters.address, "t"), 0)
        masters.heard(1)
        masters.hub.send(masters.last, Welcome(job='recipe = "a.py:f"', run="", started=0.0))
        member = waiting.result()
    member.show_itself()
    form, question = Form(generation=1, rank=0, members=[0, 1]), StoreGet(key="generation-1/1")
    masters.hub.send(masters.last, form)
    until(lambda: member._connection.inbox._messages)
    masters.lose()  # the worker has not looked yet
    masters.begin()
    (hello,), _ = masters.heard(1)
    assert hello.generation == 1, "another form of this group would end it"
    assert member.wait_for_group() == form
    got = []
    asking = threading.Thread(target=lambda: got.append(member.store().get("1")), daemon=True)
    asking.start()
    (_, asked), peer = masters.heard(2)
    assert asked == question
    masters.hub.send(peer, Ack(count=2))
    member._connection.wait_until_acknowledged(TIMEOUT_S)
    masters.lose()
    masters.begin()
    (_, asked), peer = masters.heard(2)
    assert asked == question, "the next master does not know who waits for what"
    masters.hub.send(peer, StoreValue(key=question.key, value=b"one"))
    asking.join(TIMEOUT_S)
    assert got == [b"one"]
    assert not member.superseded
    member.close()


# ---- the processes of a replica, before the first generation


@pytest.fixture
def mesh(run, monkeypatch):
    """Start a master for so many workers, two to a replica."""
    build = spec_file.build
    both = {"mesh": {"shard": 2}}
    monkeypatch.setattr(spec_file, "build", lambda table, **how: build(table | both, **how))
    return run


def test_the_processes_of_a_replica_meet_before_they_are_built(mesh):
    endpoint = mesh(4)

    def one(number):
        member = Member(endpoint, number)
        member.phase = "meeting"
        member.show_itself()
        comm = TorchComm(member.replica_store(), number % 2, 2)
        tensor = torch.full((3,), float(10**number))
        comm.all_reduce(tensor).wait()
        return member, comm, tensor.tolist()

    with ThreadPoolExecutor(4) as pool:
        there = list(pool.map(one, range(4)))
    assert [each for *_, each in there] == [[11.0] * 3, [11.0] * 3, [1100.0] * 3, [1100.0] * 3]
    with ThreadPoolExecutor(4) as pool:
        forms = list(pool.map(lambda each: each[0].wait_for_group(), there))
    assert [form.members for form in forms] == [[0, 1, 2, 3]] * 4
    first, second = there[0][0], there[1][0]
    first.replica_store().set("later", b"kept")  # as for another group inside the replica
    assert second.replica_store().get("later") == b"kept"
    for member, comm, _ in there:
        member.close()
        comm.close()


@pytest.mark.parametrize(("word", "kind"), [(Release(), Released), (None, PeerError)])
def test_a_process_that_waits_for_its_fellows_hears_of_the_end(masters, word, kind):
    job = 'recipe = "a.py:f"\n[mesh]\nshard = 2\n'
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(Member, Endpoint(masters.address, "t"), 3)
        masters.heard(1)
        welcome = Welcome(job=job, run="", started=0.0, restarts=7)
        masters.hub.send(masters.last, welcome)
        member = waiting.result()
        member.phase = "meeting"
        meets = pool.submit(TorchComm, member.replica_store(), 1, 2)  # gloo's own thread of control
        key = ""
        while not key:
            messages, peer = masters.heard(1)
            key = next((m.key for m in messages if isinstance(m, StoreGet)), "")
        assert key.startswith("replica-1-7/")
        if word is None:
            masters.lose()
            masters.close()
        else:
            masters.hub.send(peer, word)
        with pytest.raises(kind):
            meets.result(TIMEOUT_S)
        member.close()


def test_a_process_that_has_lost_its_replica_ends_when_it_is_told_to_form_a_group(masters):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Member, Endpoint(masters.address, "t"), 0)
        masters.heard(1)
        masters.hub.send(masters.last, Welcome(job='recipe = "a.py:f"', run="", started=0.0))
        member = waiting.result()
        with pytest.raises(ReplicaBroken):
            member.wait_to_be_killed(0.0)
        lost = pool.submit(member.wait_to_be_killed, TIMEOUT_S)
        masters.hub.send(masters.last, Form(generation=1, rank=0, members=[0, 1]))
        with pytest.raises(ReplicaBroken):
            lost.result(TIMEOUT_S)
        lost = pool.submit(member.wait_to_be_killed, TIMEOUT_S)
        masters.hub.send(masters.last, Release())
        with pytest.raises(Released):
            lost.result(TIMEOUT_S)
    member.close()
