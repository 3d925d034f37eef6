"""Encrypted channels: who is let in, and that all others are told the same: nothing."""

import datetime
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from helpers import random_bytes
from instep.comm.encryption import tls
from instep.comm.encryption.certificates import Authority, Credentials, Identity
from instep.comm.protocol.channel import MOST_UNTRUSTED, Channel, frame
from instep.comm.protocol.endpoint import Endpoint, Switchboard
from instep.comm.protocol.hub import MOST_HANDSHAKES
from instep.comm.protocol.messages import Emit, Release, Stop, StoreSet
from instep.errors import PeerError

UNWANTED = ["cryptography", "instep.comm.encryption.tls", "instep.comm.encryption.forwarder"]
WORKER, RECORDS = Identity("worker", 3, 1), 200

AT_ONCE = 20
"""Strangers that connect before any is served."""


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture
def board(authority):
    board = Switchboard(authority=authority)
    board.hub  # noqa: B018  from now on it accepts
    yield board
    board.close()


def calling(credentials):
    return tls.context(credentials, server=False)


@pytest.fixture
def connect(board):
    """Connect with some credentials; closed with the test."""
    made = []

    def start(credentials):
        made.append(Channel.connect(board.endpoint.address, 5.0, calling(credentials)))
        return made[-1]

    yield start
    for channel in made:
        channel.close()


def serve(board, until, timeout_s=600.0):
    """What arrives at the hub until a condition holds."""
    arrived, deadline = [], time.monotonic() + timeout_s
    while not until(arrived):
        assert time.monotonic() < deadline
        arrived += board.hub.receive(0.01)
    return arrived


def pump(board, channel, words):
    """Send messages, while the hub serves; returns what it got with the peer."""
    for word in words:
        channel.send(word)
    arrived = []
    while len(arrived) < len(words):
        arrived += board.hub.receive(0.01)
        if channel.wait(0):
            assert channel.read() == []
    return arrived


def test_an_identity_is_read_as_it_was_written():
    assert Identity.of(WORKER.uri) == WORKER
    for wrong in ("", "worker/3/1", "instep:king/3/1", "instep:worker/3", "instep:worker/x/1"):
        with pytest.raises(ValueError):
            Identity.of(wrong)


def test_credentials_show_no_key_when_they_are_printed(authority):
    assert "PRIVATE" not in repr(Endpoint(("127.0.0.1", 1), "t", 0, authority.issue(WORKER)))


def test_an_endpoint_is_the_same_after_its_way_through_json(board):
    endpoint = board.for_host(2)
    assert Endpoint.of({**endpoint.as_table(), "folder": "x"}) == endpoint
    assert endpoint.credentials is not None


def test_another_process_issues_certificates_of_the_same_authority(authority, board, connect):
    again = Authority(authority.pem)
    channel = connect(again.issue(WORKER))
    ((peer, _),) = pump(board, channel, [Release()])
    assert peer.shown == WORKER


def test_messages_arrive_whole_and_in_order_in_both_directions(authority, board, connect):
    channel = connect(authority.issue(WORKER))
    words = [Emit(name=f"event {n}", fields={"n": n}) for n in range(RECORDS)]
    arrived = pump(board, channel, words)
    assert [message for _, message in arrived] == words
    peer = arrived[0][0]
    assert peer.shown == WORKER
    board.hub.trust(peer)
    for n in range(RECORDS):
        board.hub.send(peer, Stop(rule=str(n)))
    assert [channel.receive().rule for _ in range(RECORDS)] == [str(n) for n in range(RECORDS)]


def test_long_messages_cross_each_other_while_one_thread_sends_and_one_receives(
    authority, board, connect
):
    channel, count, got = connect(authority.issue(WORKER)), 20, []
    pump(board, channel, [Release()])
    (peer,) = board.hub.peers()
    board.hub.trust(peer)
    words = [StoreSet(key=str(n), value=random_bytes(n, 1 << 20)) for n in range(count)]

    def read():
        while len(got) < count:
            got.extend(channel.read())

    threads = [
        threading.Thread(target=read),
        threading.Thread(target=lambda: [channel.send(word) for word in words]),
    ]
    for thread in threads:
        thread.start()
    for word in words:
        board.hub.send(peer, word)
    arrived = serve(board, lambda arrived: len(arrived) == count and not peer.unsent, 20)
    for thread in threads:
        thread.join(600)
    assert [message for _, message in arrived] == words
    assert got == words


def test_no_message_can_be_read_on_the_way(authority, board):
    """Between channel and hub, everything is copied: the message is nowhere in it."""
    secret, seen = "a text that is easily found", bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:
        channel = Channel.connect(
            type(board.endpoint.address)(*between.getsockname()),
            5.0,
            calling(authority.issue(WORKER)),
        )
        near, _ = between.accept()
    far = socket.create_connection(board.endpoint.address)
    ways = [
        threading.Thread(target=copy, args=each) for each in ((near, far, seen), (far, near, seen))
    ]
    for way in ways:
        way.start()
    try:
        ((peer, message),) = pump(board, channel, [Emit(name=secret, fields={})])
        assert message.name == secret
        board.hub.send(peer, Stop(rule=secret))
        assert channel.receive().rule == secret
    finally:
        channel.close()
        serve(board, lambda arrived: arrived)
        for way in ways:
            way.join(600)
        near.close()
        far.close()
    assert len(seen) > 1000
    assert secret.encode() not in seen
    assert b"instep" not in seen  # nor what the certificates say


def copy(source, target, seen):
    while data := source.recv(1 << 16):
        seen += data
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


# ---- who is refused


def refused_by(board, made):
    """What a caller hears that has shown the wrong thing, after the master's first answer.

    Args:
        made: context of the caller, or bytes that it sends instead of a handshake.
    """
    with socket.create_connection(board.endpoint.address, timeout=600) as connection:
        heard, told = [], threading.Event()

        def call():
            heard.append(answer_to(connection, made))
            told.set()

        caller = threading.Thread(target=call)
        caller.start()
        arrived = serve(board, lambda _: told.is_set())
        caller.join(600)
    assert [message for _, message in arrived if message is not None] == []
    return b"".join(heard)


def answer_to(connection, made):
    """What the other end says until it hangs up; `made` is as for `refused_by`."""
    heard = b""
    try:
        if isinstance(made, bytes):
            connection.sendall(made)
        else:
            shake_hands(connection, made)
        while data := connection.recv(1 << 16):
            heard += data
    except ConnectionResetError:  # closed before all of ours was read
        pass
    return heard


def shake_hands(connection, made):
    """The caller's part of a handshake; its last flight is sent, and nothing read after it."""
    arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = made.wrap_bio(arrived, leaving)
    while True:
        try:
            ours.do_handshake()
        except ssl.SSLWantReadError:
            connection.sendall(leaving.read())
            data = connection.recv(1 << 16)
            if not data:
                return
            arrived.write(data)
            continue
        ours.write(frame(Release()))
        connection.sendall(leaving.read())
        return


def without_certificate():
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


def showing(own):
    made = without_certificate()
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(own)
        file.flush()
        made.load_cert_chain(file.name)
    return made


def at_most_1_2(own):
    made = showing(own)
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    return made


def another_key(own, other):
    """A certificate of the run, and the key of another: it was stolen without its key."""
    key = other[: other.index("-----BEGIN CERTIFICATE")]
    certificate = own[own.index("-----BEGIN CERTIFICATE") :]
    return key + certificate


def as_authority(own):
    """What a worker can make of its own key and certificate."""
    made = Authority()
    made._key = serialization.load_pem_private_key(own.encode(), password=None)
    made._certificate = x509.load_pem_x509_certificate(own.encode())
    return made


WRONG = {
    "no certificate": lambda run: without_certificate(),
    "another run's": lambda run: showing(Authority().issue(WORKER).own),
    "an expired one": lambda run: showing(
        run.issue(WORKER, lasts=datetime.timedelta(seconds=-1)).own
    ),
    "the master's": lambda run: showing(run.issue(Identity("master")).own),
    "the authority's own": lambda run: showing(run.pem),
    "one made by a worker": lambda run: showing(
        as_authority(run.issue(WORKER).own).issue(Identity("client")).own
    ),
    "TLS 1.2": lambda run: at_most_1_2(run.issue(WORKER).own),
    "no TLS at all": lambda run: frame(Release()),
    "another protocol": lambda run: b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("what", WRONG)
def test_before_proof_every_refusal_is_the_same_and_says_nothing(authority, board, what):
    assert refused_by(board, WRONG[what](authority)) == b""
    assert board.hub.peers() == []


def test_a_certificate_without_its_key_is_not_even_accepted_by_ssl(authority):
    own, other = authority.issue(WORKER).own, authority.issue(WORKER).own
    with pytest.raises(ssl.SSLError, match="MISMATCH"):
        showing(another_key(own, other))


def hangs_up(board, channel):
    """The caller finds out by itself, and what it wanted to send does not arrive."""

    def serve_and_read():
        while True:
            assert [message for _, message in board.hub.receive(0.01) if message] == []
            if channel.wait(0.01):
                channel.read()

    with pytest.raises(PeerError):
        serve_and_read()


@pytest.mark.parametrize("role", ["worker", "server", "host", "client"])
def test_a_process_of_the_run_that_plays_the_master_is_sent_nothing(authority, role):
    """Whoever listens at the master's address: only a master's certificate gets the `Hello`."""
    board = Switchboard(authority=authority)
    board.issue = lambda _: authority.issue(Identity(role))
    channel = Channel.connect(board._anyone.address, 5.0, calling(authority.issue(WORKER)))
    try:
        channel.send(Release())
        board.hub  # noqa: B018
        hangs_up(board, channel)
    finally:
        channel.close()
        board.close()


def test_a_master_of_another_run_is_sent_nothing(authority, board, connect):
    channel = connect(Credentials(authority.issue(WORKER).own, Authority().certificate))
    channel.send(Release())
    hangs_up(board, channel)


def test_captured_bytes_that_are_sent_again_open_nothing(authority, board):
    """All that a worker sent, handshake and message: the second time it is noise."""
    sent = bytearray()
    with socket.create_connection(board.endpoint.address, timeout=600) as connection:
        ours = tls.Tls(calling(authority.issue(WORKER)), server=False, accepted=lambda _: True)
        data, arrived = ours.begin() + ours.seal(frame(Release())), []
        while not arrived:
            sent += data
            connection.sendall(data)
            arrived += board.hub.receive(0.05)
            connection.settimeout(0.05)
            try:
                _, data = ours.open(connection.recv(1 << 16))
            except TimeoutError:
                data = b""
    assert arrived[0][1] == Release()
    serve(board, lambda arrived: arrived)
    with socket.create_connection(board.endpoint.address, timeout=600) as connection:
        connection.sendall(sent)
        again = serve(board, lambda arrived: arrived)
    assert [message for _, message in again] == [None]


def frames_of_noise(authority, board, connect, count, seed=0):
    """A process of the run is served after so many connections with a random frame each.

    Args:
        count: of frames, a multiple of `AT_ONCE`.
        seed: another one draws other frames.
    """
    channel = connect(authority.issue(WORKER))
    pump(board, channel, [Release()])
    (known,) = board.hub.peers()
    board.hub.trust(known)
    dice, address = random.Random(seed), tuple(board.endpoint.address)
    for _ in range(0, count, AT_ONCE):
        strangers = [stranger(address, dice, n % 2 == 1) for n in range(AT_ONCE)]
        arrived = serve(board, lambda arrived: len(arrived) >= AT_ONCE, 60)
        assert [message for _, message in arrived] == [None] * AT_ONCE
        for each in strangers:
            each.close()
    assert pump(board, channel, [Stop(rule="after")])[0] == (known, Stop(rule="after"))
    assert board.hub.peers() == [known]


def stranger(address, dice, as_a_record):
    """A connection that has sent a random frame; or one that begins as a record of a handshake."""
    noise = dice.randbytes(dice.randint(1, 300))
    if as_a_record:
        noise = b"\x16\x03\x01" + len(noise).to_bytes(2, "big") + noise
    connection = socket.socket()
    connection.connect(address)
    connection.sendall(noise)
    connection.shutdown(socket.SHUT_WR)
    return connection


def test_two_thousand_random_frames_hurt_nobody_else(authority, board, connect):
    frames_of_noise(authority, board, connect, 2000)


@pytest.mark.slow
def test_a_hundred_thousand_random_frames_hurt_nobody_else(authority, board, connect):
    frames_of_noise(authority, board, connect, 100_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_million_random_frames_hurt_nobody_else(authority, board, connect, seed):
    frames_of_noise(authority, board, connect, 50_000, seed)


def test_strangers_that_say_nothing_or_stop_in_the_handshake_are_dropped_and_delay_nobody(
    authority, board, connect
):
    channel = connect(authority.issue(WORKER))
    pump(board, channel, [Release()])
    (known,) = board.hub.peers()
    board.hub.trust(known)
    half = tls.Tls(calling(authority.issue(WORKER)), server=False, accepted=lambda _: True).begin()
    strangers = []
    try:
        for n in range(4 * MOST_UNTRUSTED):
            strangers.append(socket.create_connection(board.endpoint.address))
            if n % 2:
                strangers[-1].sendall(half)
            list(board.hub.receive(0))
        assert len(board.hub.peers()) <= MOST_UNTRUSTED + 1
        assert pump(board, channel, [Stop(rule="after")])[0][0] is known
    finally:
        for each in strangers:
            each.close()


def test_a_turn_of_the_master_takes_only_a_few_steps_of_handshakes(authority, board):
    """However many call at once: those that are known are served in between."""
    half = tls.Tls(calling(authority.issue(WORKER)), server=False, accepted=lambda _: True).begin()
    strangers = [socket.create_connection(board.endpoint.address) for _ in range(20)]
    try:
        while len(board.hub.peers()) < len(strangers):
            list(board.hub.receive(0))
        for each in strangers:
            each.sendall(half)
        time.sleep(0.1)
        answered = 0
        for _ in range(5):
            list(board.hub.receive(0.1))
            now = sum(readable(each) for each in strangers)
            assert now - answered <= MOST_HANDSHAKES
            answered = now
        assert answered == 20
    finally:
        for each in strangers:
            each.close()


def readable(connection):
    connection.settimeout(0.02)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


def test_on_one_machine_nothing_of_encryption_is_even_imported():
    ways = "client.submit", "control.master_process", "launch.fork_server"
    imports = "; ".join(f"import instep.{way}" for way in ways)
    code = f"{imports}; import sys; print([n for n in {UNWANTED} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
