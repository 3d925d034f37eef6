"""An event that cannot happen to a member in its phase: dropped and reported, and the run lives."""

import json
import os
import threading
import time

import pytest

from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Channel
from instep.comm.protocol.endpoint import Switchboard
from instep.control.decisions.events import Joined
from instep.control.master import Master
from instep.errors import PeerError
from instep.job import file as spec_file


@pytest.fixture
def board():
    board = Switchboard()
    yield board
    board.close()


@pytest.fixture
def master(board, tmp_path):
    job = spec_file.build({"recipe": "a.py:f", "workers": 2}, source="a test")
    return Master(job, tmp_path, board, views=[], hosted=False, started=time.time(), about={})


def warnings(folder):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [e["text"] for e in map(json.loads, lines) if e["event"] == "warning"]


def test_what_the_master_itself_got_wrong_is_dropped_and_reported_once(master, tmp_path):
    for _ in range(3):
        master._observe(Joined(0))
    before = master._state
    assert before.joined == {0}
    (text,) = warnings(tmp_path)
    assert text.startswith("Joined was ignored: member 0 is building in generation 0")
    master._observe(Joined(1))
    assert master._state.joined == {0, 1}
    master._close()


def test_a_worker_that_sends_an_impossible_message_loses_its_connection(master, board, tmp_path):
    serving = threading.Thread(target=master.serve)
    serving.start()
    channel = Channel.connect(board.endpoint.address)
    hello = m.Hello(token=board.endpoint.token, role="worker", number=0, pid=os.getpid())
    channel.send(hello)
    channel.wait_for(m.Welcome)
    channel.send(m.Formed(generation=1))
    with pytest.raises(PeerError):
        channel.wait_for(m.Release)
    channel.close()
    serving.join(600)  # a worker that nobody can replace has gone
    assert not serving.is_alive()
    assert any(
        "worker 0 sent a message that the master cannot use (Formed: TransitionError: member 0 is "
        "building in generation 0" in text
        for text in warnings(tmp_path)
    )
