"""Places at a gate: each machine has its own, and keeps it as long as it is heard."""

import random
import time
from contextlib import suppress

import pytest

from instep.comm.encryption import tls
from instep.comm.encryption.certificates import Credentials, new_key, public_key
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Address, Channel
from instep.errors import PeerError, SpecError
from instep.launch import gate
from instep.launch.gate import Gate
from instep.launch.join_folder import JoinFolder
from instep.launch.join_token import Token

PLACES = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.9:1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = JoinFolder(tmp_path_factory.mktemp("joined") / "certificates")
    made.prepare(len(PLACES))
    return made


@pytest.fixture(scope="module")
def shown(folder):
    """What each machine has bought."""

    def bought(host):
        token, key = Token.read(folder.token_file(host)), new_key()
        return Credentials(key + folder.certify(token.secret, public_key(key)), token.authority)

    return [bought(host) for host in range(len(PLACES))]


@pytest.fixture
def door(folder):
    made = Gate(("127.0.0.1", 0), PLACES, folder, lambda _: None)
    made.channels = []
    yield made
    made.close(0.0)
    for channel in made.channels:
        channel.close()


def connect(door, shown=None):
    made = shown and tls.context(shown, server=False)
    door.channels.append(Channel.connect(door._hub.address, context=made))
    return door.channels[-1]


def come(door, shown, who="a"):
    channel = connect(door, shown)
    channel.send(m.Join(who=who))
    return channel


def turns(door, until=lambda: False, limit_s=600.0, heard=1000):
    """Serve the gate, and have the machines take part in handshakes; until so much was heard."""
    found, deadline = [], time.monotonic() + limit_s
    while not until() and len(found) < heard and time.monotonic() < deadline:
        found += door.turn(0.01)
        for channel in door.channels:
            with suppress(PeerError):
                if channel.fileno() >= 0 and not channel._inbox and channel.wait(0):
                    channel._read()
    return found


def test_every_machine_has_the_place_of_its_certificate(door, shown):
    second, first = come(door, shown[1]), come(door, shown[0])
    joined = turns(door, lambda: door.missing == PLACES[2:])
    assert sorted(number for number, _ in joined) == [0, 1]
    assert first.receive() == m.Joined(place=PLACES[0])
    assert second.receive() == m.Joined(place=PLACES[1])


def test_messages_come_with_the_number_of_the_place(door, shown):
    channel = come(door, shown[2])
    turns(door, lambda: door.missing == PLACES[:2])
    channel.send(m.HostEnded(code=3, detail=""))
    (heard,) = turns(door, heard=1)
    assert heard == (2, m.HostEnded(code=3, detail=""))
    door.send(2, m.Leave())
    channel.receive()
    assert channel.receive() == m.Leave()
    channel.close()
    assert turns(door, lambda: door.missing == PLACES) == [(2, None)]


def test_a_machine_that_comes_while_the_gate_closes_is_not_told_that_it_is_wrong(door, shown):
    channel = come(door, shown[0])
    door._closing = True
    turns(door, lambda: channel.wait(0))
    door._closing = False
    with pytest.raises(PeerError):  # so it tries again
        channel.receive()


def test_whoever_has_a_place_keeps_it_if_it_is_heard(door, shown):
    first = come(door, shown[0], "the first")
    turns(door, lambda: door.missing == PLACES[1:])
    second = come(door, shown[0])
    turns(door, limit_s=0.1)
    first.send(m.Heartbeat())
    turns(door, lambda: second.wait(0))
    assert f"{PLACES[0]} has joined already (the first)" in second.receive().text
    assert door.missing == PLACES[1:]


def test_a_place_whose_machine_is_silent_goes_to_another_that_asks(door, shown, monkeypatch):
    monkeypatch.setattr(gate, "SILENT_S", 0.2)
    first = come(door, shown[0])
    turns(door, lambda: door.missing == PLACES[1:])
    second = come(door, shown[0])
    heard = turns(door, heard=2)
    assert heard == [(0, None), (0, m.Joined(place=PLACES[0]))]
    assert second.receive() == m.Joined(place=PLACES[0])
    first.receive()
    with pytest.raises(PeerError):
        first.receive()


def test_a_place_whose_machine_is_killed_goes_at_once_to_the_one_that_asked(door, shown):
    first = come(door, shown[0])
    turns(door, lambda: door.missing == PLACES[1:])
    second = come(door, shown[0])
    turns(door, limit_s=0.05)
    first.close()
    assert [number for number, _ in turns(door, heard=2)] == [0, 0]
    assert second.receive() == m.Joined(place=PLACES[0])


def test_idle_and_random_connections_keep_nobody_out(door, shown, monkeypatch):
    monkeypatch.setattr(gate, "PROOF_S", 0.2)
    draw = random.Random(3)
    for _ in range(100):
        connect(door)
    for _ in range(100):
        channel = connect(door)
        channel._socket.sendall(draw.randbytes(draw.randint(1, 200)))
        turns(door, limit_s=0.002)
    come(door, shown[0])
    turns(door, lambda: PLACES[0] not in door.missing)
    assert door.missing == PLACES[1:]
    turns(door, lambda: len(door._hub.peers()) == 1)
    assert len(door._hub.peers()) == 1


def test_a_port_that_is_taken_is_said(door, folder):
    address = door._hub.address
    with pytest.raises(SpecError, match=f"{address.port}: nothing can listen there"):
        Gate(Address(*address), PLACES, folder, print)
