"""A server's connections: each apart from the others, and only with workers of the run."""

import errno
import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress

import pytest
import torch
from torch import nn

from instep.comm.encryption.certificates import Authority, Identity
from instep.comm.encryption.tls import context
from instep.comm.protocol import listener
from instep.comm.protocol.channel import Address
from instep.errors import PeerError
from instep.server import door as door_file
from instep.server.door import Door
from instep.server.micro_batches import Parcel, buffers_of, whole_pieces
from instep.server.tensor_channel import Ask, Grant, Line

MODEL = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def parcel_of(model):
    parameters = list(model.parameters())
    return Parcel(parameters, whole_pieces(parameters), buffers_of(model))


def parcel():
    return parcel_of(MODEL)


@pytest.fixture
def doors():
    made = []

    def start(credentials=None):
        made.append(Door("127.0.0.1", parcel, credentials))
        return made[-1]

    yield start
    for door in made:
        door.close()


@pytest.fixture
def connected():
    lines = []

    def connect(door, worker=3, *, secret=None, credentials=None):
        lines.append(Line.to(door.address, 9, secret or door.secret, worker, credentials))
        return lines[-1]

    yield connect
    for line in lines:
        line.close()


def filled(value):
    made = parcel()
    for flat in made.flats:
        flat.fill_(value)
    return made


def check_carries(door, line, worker):
    line.send(Ask(token=5, total=1.5, weight=2.0, present=[True, False]), filled(7).flats)
    guest, ask = door.next(5.0)
    assert (guest.worker, ask.token, ask.present) == (worker, 5, [True, False])
    assert all((flat == 7).all() for flat in guest.body.flats)
    guest.answer(Grant(True, [(1, 0.5, None)], 6, 2, 1), filled(8).flats)
    taken = parcel()
    grant = line.receive(Grant, taken.flats)
    assert (grant.token, grant.step, grant.number, grant.complete) == (6, 2, 1, [(1, 0.5, None)])
    assert all((flat == 8).all() for flat in taken.flats)


def test_a_question_and_its_answer_arrive_whole(doors, connected):
    door = doors()
    line = connected(door)
    check_carries(door, line, 3)
    line.send(Ask(), ())  # without a body
    guest, ask = door.next(5.0)
    assert ask.token == -1
    guest.answer(Grant(False, [], ends="steps"))
    assert line.receive(Grant, parcel().flats).ends == "steps"
    line.close()
    assert door.next(5.0) == (guest, None)


def test_encrypted_lines_carry_the_same(doors, connected):
    authority = Authority()
    door = doors(authority.issue(Identity("worker", 9)))
    line = connected(door, credentials=authority.issue(Identity("worker", 3)))
    check_carries(door, line, 3)


@pytest.mark.parametrize("encrypted", [False, True], ids=["", "encrypted"])
def test_a_line_is_idle_until_its_other_end_leaves(doors, connected, encrypted):
    authority = Authority()
    ours, its = (authority.issue(Identity("worker", n)) if encrypted else None for n in (3, 9))
    door = doors(its)
    line = connected(door, credentials=ours)
    line.send(Ask(), ())
    guest, _ = door.next(5.0)
    guest.answer(Grant(True, []))
    line.receive(Grant, parcel().flats)
    time.sleep(0.2)
    assert line.idle
    guest.close()
    deadline = time.monotonic() + 600
    while line.idle:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("what", ["another run", "another number", "plain"])
def test_a_stranger_is_not_let_in_to_an_encrypted_door(doors, connected, what):
    authority = Authority()
    door = doors(authority.issue(Identity("worker", 9)))
    issuer = Authority() if what == "another run" else authority
    number = 4 if what == "another number" else 3
    credentials = None if what == "plain" else issuer.issue(Identity("worker", number))
    with pytest.raises(PeerError):
        connected(door, credentials=credentials).receive(Grant, ())
    assert door.next(0.2) is None


def test_a_worker_gives_nothing_to_another_than_the_server(doors, connected):
    authority = Authority()
    door = doors(authority.issue(Identity("worker", 8)))
    with pytest.raises(PeerError, match="the other end is instep:worker/8/0, which is not meant"):
        connected(door, credentials=authority.issue(Identity("worker", 3)))


def test_who_does_not_know_the_secret_is_not_let_in(doors, connected):
    door = doors()
    line = connected(door, secret=b"0" * 32)
    with pytest.raises(PeerError):
        line.receive(Grant, ())
    assert door.next(0.1) is None
    check_carries(door, connected(door), 3)


@pytest.mark.parametrize("data", [b"", b"x" * 200, b"\xff" * 12, b"\0" * 12 + b"\xc1"])
def test_what_is_no_message_ends_its_connection_alone(doors, connected, data, monkeypatch):
    monkeypatch.setattr(door_file, "PROOF_S", 0.2)
    door = doors()
    other = connected(door, 1)
    with socket.create_connection(door.address) as stranger:
        stranger.sendall(data)
        stranger.settimeout(600)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    check_carries(door, other, 1)


def test_a_worker_that_sends_nothing_holds_up_nobody(doors, connected):
    door = doors()
    half = connected(door, 1)
    half._socket.sendall(b"\0\0")
    check_carries(door, connected(door, 2), 2)


def test_at_the_end_every_question_is_answered_whoever_is_busy(doors, connected):
    door = doors()
    asked, late = connected(door, 1), connected(door, 2)
    asked.send(Ask(), ())
    deadline = time.monotonic() + 600
    while door._arrivals.empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    end = Grant(True, [], step=7, ends="steps")
    door.end(lambda guest, _: guest.answer(end) or True)
    late.send(Ask(), ())
    assert [each.receive(Grant, ()).step for each in (asked, late)] == [7, 7]


def test_whoever_waits_may_stop_waiting(doors, connected):
    line, stop = connected(doors()), threading.Event()
    threading.Timer(0.2, stop.set).start()

    def waits():
        if stop.is_set():
            raise InterruptedError

    with pytest.raises(InterruptedError):
        line.receive(Grant, (), waits)


def test_a_closed_door_is_said_to_be():
    door = Door("127.0.0.1", parcel)
    door.close()
    with pytest.raises(PeerError, match="the server does not answer"):
        Line.to(Address(*door.address), 9, door.secret, 1)


def test_a_parcel_has_every_sort_of_tensor():
    model = nn.Module()
    model.register_parameter("short", nn.Parameter(torch.randn(3).to(torch.bfloat16)))
    model.register_parameter("turned", nn.Parameter(torch.randn(4, 3).t()))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    model.register_buffer("count", torch.tensor(5))
    model.register_buffer("flags", torch.tensor([True, False]))
    model.register_buffer("empty", torch.zeros(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = parcel_of(model)
    made.load()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    made.store()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ---- callers that prove nothing


def ends(stranger, timeout_s=5.0):
    """What a stranger is told until its connection ends."""
    stranger.settimeout(timeout_s)
    told = b""
    with suppress(ConnectionResetError, BrokenPipeError):
        while data := stranger.recv(1 << 16):
            told += data
    return told


HELLO = b"\x16\x03\x01\x02\0"
"""The beginning of a first message of TLS, of 512 bytes."""


@pytest.mark.parametrize("encrypted", [False, True], ids=["", "encrypted"])
def test_the_time_for_a_proof_is_counted_while_bytes_drip(doors, connected, monkeypatch, encrypted):
    monkeypatch.setattr(door_file, "PROOF_S", 0.4)
    authority = Authority()
    ours, its = (authority.issue(Identity("worker", n)) if encrypted else None for n in (3, 9))
    door = doors(its)
    with socket.create_connection(door.address) as stranger, suppress(OSError):
        stranger.sendall(HELLO if encrypted else b"\0\0\0\xff" + bytes(12))
        for _ in range(200):  # each long before a read that waits for it would give up
            stranger.sendall(b"\0")
            stranger.settimeout(0.02)
            with suppress(TimeoutError):
                assert stranger.recv(1) == b""
                break
        else:
            pytest.fail("it may go on for ever")
    monkeypatch.undo()
    check_carries(door, connected(door, credentials=ours), 3)


@pytest.mark.parametrize("encrypted", [False, True], ids=["", "encrypted"])
def test_the_oldest_caller_makes_room_for_a_worker(doors, connected, monkeypatch, encrypted):
    monkeypatch.setattr(listener, "MOST_UNPROVEN", 4)
    monkeypatch.setattr(door_file, "PROOF_S", 60.0)
    authority = Authority()
    ours, its = (authority.issue(Identity("worker", n)) if encrypted else None for n in (3, 9))
    door = doors(its)
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(door.address)) for _ in range(9)]
        for oldest in strangers[:5]:
            assert ends(oldest) == b""
        check_carries(door, connected(door, credentials=ours), 3)


def test_nobody_is_told_what_is_wrong(doors):
    """No alert of TLS: its caller would learn what to try next."""
    authority = Authority()
    door = doors(authority.issue(Identity("worker", 9)))
    for wrong in (b"GET / HTTP/1.1\r\n\r\n", HELLO + bytes(512)):
        with socket.create_connection(door.address) as stranger:
            stranger.sendall(wrong)
            assert ends(stranger) == b""
    shown = context(Authority().issue(Identity("worker", 3)), server=False)
    shown.verify_mode = ssl.CERT_NONE
    arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = shown.wrap_bio(arrived, leaving)
    with socket.create_connection(door.address) as stranger:
        with pytest.raises(ssl.SSLWantReadError):
            caller.do_handshake()
        stranger.sendall(leaving.read())
        arrived.write(stranger.recv(1 << 16))  # all that a server says before it sees a certificate
        caller.do_handshake()
        stranger.sendall(leaving.read())
        assert ends(stranger) == b""


def test_a_door_that_can_open_no_more_files_makes_room(doors, connected, monkeypatch):
    monkeypatch.setattr(door_file, "PROOF_S", 60.0)
    accept, accepted = socket.socket.accept, []

    def full_at_the_second(listener):
        made = accept(listener)
        accepted.append(made[0])
        if len(accepted) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return made

    monkeypatch.setattr(socket.socket, "accept", full_at_the_second)
    door = doors()
    with ExitStack() as stack:
        first, _ = [stack.enter_context(socket.create_connection(door.address)) for _ in "ab"]
        assert ends(first) == b""
        check_carries(door, connected(door), 3)
        accepted[1].close()
