"""What a worker said before it ended is heard, and cannot end its master."""

import json
import subprocess

import pytest

from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Channel
from instep.comm.protocol.endpoint import Switchboard
from instep.control.master import Master
from instep.control.processes.observations import Exit
from instep.job import file as spec_file


@pytest.fixture
def process():
    started = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield started
    started.stdin.close()
    started.kill()
    started.wait()


def test_a_last_message_that_cannot_be_used_is_said_and_those_after_it_are_heard(tmp_path, process):
    board = Switchboard()
    job = spec_file.build({"recipe": "a.py:f", "workers": 2}, source="a test")
    about = {"hosted": True, "started": 1.0, "about": {}}
    master = Master(job, tmp_path, board, views=[], **about)
    channel = Channel.connect(board.endpoint.address)
    try:
        own = {"role": "worker", "number": 0, "pid": process.pid}
        channel.send(m.Hello(token=board.endpoint.token, **own))
        while master._roster.worker(0).peer is None:
            master._turn()
        channel.send(m.Records(ledger=b"", steps=b"no record"))
        channel.send(m.Emit(name="warning", fields={"text": "its very last word"}))
        process.kill()
        process.wait()
        master._observe(Exit(0, process.pid, -9))
    finally:
        channel.close()
        master._close()
        board.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    first, second = (event["text"] for event in events if event["event"] == "warning")
    assert first.startswith("worker 0 sent a message that the master cannot use (Records: ValueErr")
    assert second == "its very last word"
    (lost,) = (event for event in events if event["event"] == "worker_lost")
    assert lost["worker"] == 0
