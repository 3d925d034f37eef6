"""Who gets in: those with the token, each in a place of its own; all others learn one word."""

import random
import time

import pytest

from instep.comm import messages as m
from instep.comm.channel import Address, Channel
from instep.errors import PeerError, SpecError
from instep.launch import gate
from instep.launch.gate import REFUSED, Gate

PLACES = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.9:1"]
TOKEN = "ab" * 16


@pytest.fixture
def door():
    made = Gate(("127.0.0.1", 0), PLACES, TOKEN, lambda _: None)
    made.channels = []
    yield made
    made.close(0.0)
    for channel in made.channels:
        channel.close()


def connect(door):
    door.channels.append(Channel.connect(door._hub.address))
    return door.channels[-1]


def come(door, *, token=TOKEN, place="", who="a"):
    channel = connect(door)
    channel.send(m.Join(token=token, place=place, who=who))
    return channel


def turns(door, until=lambda: False, limit_s=1.0):
    found, deadline = [], time.monotonic() + limit_s
    while not until() and time.monotonic() < deadline:
        found += door.turn(0.01)
    return found


def test_machines_take_the_places_of_their_address_in_turn(door):
    first, second = come(door), come(door)
    joined = turns(door, lambda: door.missing == PLACES[2:])
    assert [number for number, _ in joined] == [0, 1]
    assert first.receive() == m.Joined(place=PLACES[0])
    assert second.receive() == m.Joined(place=PLACES[1])


def test_a_place_can_be_asked_for_and_messages_come_with_its_number(door):
    channel = come(door, place=PLACES[2])
    turns(door, lambda: door.missing == PLACES[:2])
    channel.send(m.HostEnded(code=3, detail=""))
    (heard,) = turns(door, limit_s=0.1)
    assert heard == (2, m.HostEnded(code=3, detail=""))
    door.send(2, m.Leave())
    channel.receive()
    assert channel.receive() == m.Leave()
    channel.close()
    assert turns(door, lambda: door.missing == PLACES) == [(2, None)]


@pytest.mark.parametrize(
    "message",
    [
        m.Join(token=""),
        m.Join(token="é" * 8),
        m.Join(token=TOKEN[:-1]),
        m.Join(token=TOKEN[:-1], place=PLACES[0]),
        m.Join(token="", place="elsewhere:1"),
        m.Heartbeat(),
        m.HostEnded(code=0, detail=TOKEN),
        m.Hello(token=TOKEN, role="host", number=0, pid=1),
    ],
)
def test_before_the_token_every_refusal_is_the_same_word(door, message):
    channel = connect(door)
    channel.send(message)
    turns(door, lambda: channel.wait(0))
    answer = channel.receive()
    assert answer == m.Refused(kind="JoinError", text=REFUSED, exit_code=9)
    with pytest.raises(PeerError):
        channel.receive()
    assert door.missing == PLACES


def test_a_stranger_with_the_token_is_told_who_is_expected(door):
    channel = come(door, place="127.0.0.7:1")
    turns(door, lambda: channel.wait(0))
    answer = channel.receive()
    assert "expects no machine 127.0.0.7:1" in answer.text
    assert all(place in answer.text for place in PLACES)


def test_whoever_has_a_place_keeps_it_if_it_is_heard(door):
    first = come(door, place=PLACES[0], who="the first")
    turns(door, lambda: door.missing == PLACES[1:])
    second = come(door, place=PLACES[0])
    turns(door, limit_s=0.1)
    first.send(m.Heartbeat())
    turns(door, limit_s=0.1)
    assert f"{PLACES[0]} has joined already (the first)" in second.receive().text
    assert door.missing == PLACES[1:]


def test_a_place_whose_machine_is_silent_goes_to_another_that_asks(door, monkeypatch):
    monkeypatch.setattr(gate, "SILENT_S", 0.2)
    first = come(door, place=PLACES[0])
    turns(door, lambda: door.missing == PLACES[1:])
    second = come(door, place=PLACES[0])
    heard = turns(door, limit_s=0.5)
    assert heard == [(0, None), (0, m.Joined(place=PLACES[0]))]
    assert second.receive() == m.Joined(place=PLACES[0])
    first.receive()
    with pytest.raises(PeerError):
        first.receive()


def test_a_place_whose_machine_is_killed_goes_at_once_to_the_one_that_asked(door):
    first = come(door, place=PLACES[0])
    turns(door, lambda: door.missing == PLACES[1:])
    second = come(door, place=PLACES[0])
    turns(door, limit_s=0.05)
    first.close()
    assert [number for number, _ in turns(door, limit_s=0.1)] == [0, 0]
    assert second.receive() == m.Joined(place=PLACES[0])


def test_idle_and_random_connections_keep_nobody_out(door, monkeypatch):
    monkeypatch.setattr(gate, "PROOF_S", 0.2)
    draw = random.Random(3)
    for _ in range(100):
        connect(door)
    for _ in range(100):
        channel = connect(door)
        channel._socket.sendall(draw.randbytes(draw.randint(1, 200)))
        turns(door, limit_s=0.002)
    come(door, place=PLACES[0])
    turns(door, lambda: PLACES[0] not in door.missing)
    assert door.missing == PLACES[1:]
    turns(door, lambda: len(door._hub.peers()) == 1)
    assert len(door._hub.peers()) == 1


def test_a_port_that_is_taken_is_said(door):
    address = door._hub.address
    with pytest.raises(SpecError, match=f"{address.port}: nothing can listen there"):
        Gate(Address(*address), PLACES, TOKEN, print)
