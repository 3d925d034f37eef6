"""Hundreds of workers on one master: all may connect at once, and a message costs what it did."""

import os
import time

import msgspec

from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import MOST_UNTRUSTED, Channel
from instep.comm.protocol.endpoint import Switchboard
from instep.control.decisions.phases import Phase
from instep.control.decisions.state import State, first_members
from instep.control.master import Master
from instep.control.pacing import TICK_S
from instep.job import file as spec_file

WORKERS = 2 * MOST_UNTRUSTED


def test_all_workers_may_connect_at_once_and_every_other_heartbeat_is_acknowledged(
    tmp_path, monkeypatch
):
    table = {"workers": WORKERS, "train": {"micro_batches": WORKERS, "global_batch": WORKERS}}
    job = spec_file.build({"recipe": "a.py:f", **table}, source="a test")
    board = Switchboard()
    master = Master(job, tmp_path, board, views=[], hosted=False, started=time.time(), about={})
    looks = []
    look = master._look
    monkeypatch.setattr(master, "_look", lambda: looks.append(look()))
    channels = [Channel.connect(board.endpoint.address) for _ in range(WORKERS)]
    while len(master._hub.untrusted) < WORKERS:
        master._turn()
    for number, channel in enumerate(channels):
        hello = m.Hello(token=board.endpoint.token, role="worker", number=number, pid=os.getpid())
        channel.send(hello)
    while len(master._roster.connections) < WORKERS:
        master._turn()
    for channel in channels:
        channel.wait_for(m.Welcome)
    looks.clear()
    began = time.monotonic()
    for round_ in range(1, 5):
        for channel in channels:
            channel.send(m.Heartbeat(phase="recipe", progress=round_, number=round_))
            master._turn()
    while any(c.heartbeat < 4 for c in master._roster.connections.values()):
        master._turn()
    assert len(looks) <= (time.monotonic() - began) / TICK_S + 1
    for channel in channels:
        assert [channel.wait_for(m.Ack).heartbeat for _ in range(2)] == [2, 4]
        channel.close()
    master._close()
    board.close()


def test_what_a_state_has_worked_out_is_neither_kept_in_the_next_nor_written():
    state = State(members=first_members(3))
    assert state.joined == state.living == frozenset()
    after = state.move(0, Phase.BUILDING)
    assert after.joined == after.living == {0}
    assert state == State(members=first_members(3))
    written = msgspec.msgpack.encode(state)
    assert written == msgspec.msgpack.encode(State(members=first_members(3)))
    assert msgspec.msgpack.decode(written, type=State) == state
