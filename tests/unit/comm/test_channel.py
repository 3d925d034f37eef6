"""Frames over sockets: whole, split, too long, and nonsense that hurts nobody else."""

import socket
import struct
import subprocess
import sys
import threading

import pytest

from helpers import random_bytes
from instep.comm.protocol.channel import LARGEST, MOST_UNTRUSTED, Address, Channel, Frames, frame
from instep.comm.protocol.hub import Hub
from instep.comm.protocol.messages import Done, Emit, Release, Stop, StoreSet
from instep.errors import PeerError

NONSENSE = 1000


@pytest.fixture
def hub():
    hub = Hub(largest=LARGEST)
    yield hub
    hub.close()
    hub.close()


@pytest.fixture
def channel(hub):
    channel = Channel.connect(hub.address)
    yield channel
    channel.close()
    channel.close()


def heard(hub, count):
    """The next `count` things that arrive, with whom they come from."""
    arrived = []
    while len(arrived) < count:
        arrived += hub.receive(5.0)
    return arrived


def send_many(channel):
    for _ in range(1000):
        channel.send(StoreSet(key="", value=bytes(10_000)))


def raw(hub):
    return socket.create_connection(hub.address)


def test_a_hub_listens_on_loopback_only(hub):
    assert hub.address.host == "127.0.0.1"


def test_messages_arrive_whole_and_in_order_in_both_directions(hub, channel):
    words = [Emit(name=f"event {n}", fields={"n": n}) for n in range(50)]
    for word in words:
        channel.send(word)
    arrived = heard(hub, 50)
    assert [message for _, message in arrived] == words
    peer = arrived[0][0]
    for n in range(50):
        hub.send(peer, Stop(rule=str(n)))
    assert [channel.receive().rule for _ in range(50)] == [str(n) for n in range(50)]


def test_a_frame_that_arrives_byte_by_byte_is_one_message(hub):
    words, arrived = [Stop(rule="slow"), Release()], []
    with raw(hub) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"".join(map(frame, words)):
            connection.sendall(bytes([byte]))
            arrived += hub.receive(0)
        while len(arrived) < 2:
            arrived += hub.receive(5.0)
    assert [message for _, message in arrived] == words


def test_every_split_of_two_frames_gives_the_same_two_messages():
    words = [Stop(rule="a"), StoreSet(key="k", value=b"\x00" * 9)]
    data = b"".join(map(frame, words))
    for cut in range(len(data) + 1):
        frames = Frames()
        assert frames.feed(data[:cut]) + frames.feed(data[cut:]) == words


def test_a_message_larger_than_any_buffer_arrives_while_others_are_served(hub, channel):
    large = StoreSet(key="large", value=bytes(8_000_000))
    other = Channel.connect(hub.address)
    sending = threading.Thread(target=channel.send, args=(large,))
    sending.start()
    other.send(Release())
    arrived = heard(hub, 2)
    sending.join()
    assert {type(message) for _, message in arrived} == {StoreSet, Release}
    sender = next(peer for peer, message in arrived if message == large)
    hub.send(sender, large)  # more than a socket takes in: the rest goes out as the other end reads
    answer = []
    reading = threading.Thread(target=lambda: answer.append(channel.receive()))
    reading.start()
    while reading.is_alive():
        list(hub.receive(0.01))
    assert answer == [large]
    other.close()


def test_a_closed_connection_is_reported_as_none(hub, channel):
    channel.send(Release())
    ((peer, _),) = heard(hub, 1)
    channel.close()
    assert heard(hub, 1) == [(peer, None)]
    hub.send(peer, Release())  # nobody is there: no error


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!I", LARGEST + 1),
        b"\xff" * 100,
        struct.pack("!I", 3) + b"abc",
        struct.pack("!I", 0),
        frame(Stop(rule="x"))[:4] + b"\x00" * (len(frame(Stop(rule="x"))) - 4),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["too long", "far too long", "no message", "empty", "zeros", "a browser"],
)
def test_a_peer_that_does_not_speak_the_protocol_is_disconnected(hub, channel, data):
    with raw(hub) as stranger:
        stranger.sendall(data)
        ((_, message),) = heard(hub, 1)
        assert message is None
        assert stranger.recv(10) == b""
    channel.send(Release())
    assert [m for _, m in heard(hub, 1)] == [Release()]


def test_a_valid_message_before_nonsense_in_one_packet_does_not_keep_the_connection(hub):
    with raw(hub) as stranger:
        stranger.sendall(frame(Release()) + b"\xff" * 50)
        arrived = heard(hub, 1)
        while arrived[-1][1] is not None:
            arrived += heard(hub, 1)


def test_a_peer_that_is_dropped_for_its_first_message_is_not_heard_any_more(hub):
    """A stranger could have a thousand handled that came in one packet."""
    with socket.create_connection(hub.address) as stranger:
        stranger.sendall(1000 * frame(Release()))
        heard = 0
        while not heard:
            for peer, _ in hub.receive(0.05):
                heard += 1
                hub.drop(peer)
    assert heard == 1


def test_a_thousand_strings_of_random_bytes_disturb_no_other_connection(hub, channel):
    """Each stranger sends nonsense and hangs up; the worker beside them is served throughout."""
    gone = 0
    for start in range(0, NONSENSE, 50):
        for seed in range(start, start + 50):
            with raw(hub) as stranger:
                stranger.sendall(random_bytes(seed))
        channel.send(Stop(rule=str(start)))
        served = False
        while gone < start + 50 or not served:
            for peer, message in hub.receive(5.0):
                if message is None:
                    gone += 1
                else:
                    assert message == Stop(rule=str(start))
                    served = True
                    hub.send(peer, Release())
        assert channel.receive() == Release()
    assert gone == NONSENSE


def test_waiting_for_one_class_keeps_the_others_in_order_for_later(hub, channel):
    channel.send(Release())
    ((peer, _),) = heard(hub, 1)
    for message in (
        Stop(rule="a"),
        Stop(rule="b"),
        Done(generation=1, step=1, rule=""),
        Stop(rule="c"),
    ):
        hub.send(peer, message)
    assert channel.wait_for(Done).step == 1
    assert [channel.receive().rule for _ in range(3)] == ["a", "b", "c"]


def test_a_master_that_is_gone_raises_peer_error(hub, channel):
    channel.send(Release())
    heard(hub, 1)
    hub.close()
    with pytest.raises(PeerError, match="the master is gone"):
        channel.receive()
    with pytest.raises(PeerError, match="the master is gone"):
        send_many(channel)


def test_a_channel_without_a_listener_raises_peer_error_with_the_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerError, match=f"no master answers at 127.0.0.1:{port}"):
        Channel.connect(Address("127.0.0.1", port))


def test_dropping_a_peer_twice_and_sending_to_it_does_nothing(hub, channel):
    channel.send(Release())
    ((peer, _),) = heard(hub, 1)
    hub.drop(peer)
    hub.drop(peer)
    hub.send(peer, Release())
    with pytest.raises(PeerError):
        channel.receive()


def test_a_stranger_may_send_little_and_nothing_deep_breaks_the_hub():
    hub = Hub()
    deep = b"\x91" * 3000 + b"\x90"
    for data in (struct.pack("!I", 5000), struct.pack("!I", len(deep)) + deep):
        with raw(hub) as stranger:
            stranger.sendall(data)
            assert [message for _, message in heard(hub, 1)] == [None]
    hub.close()


def calls(hub, count):
    """So many strangers, who say nothing."""
    return [raw(hub) for _ in range(count)]


def test_new_connections_replace_unauthenticated_ones_and_never_trusted_ones():
    hub = Hub()
    known = Channel.connect(hub.address)
    known.send(Release())
    [(peer, _)] = heard(hub, 1)
    hub.trust(peer)
    strangers = calls(hub, 3 * MOST_UNTRUSTED)
    late = Channel.connect(hub.address)
    late.send(Stop(rule="late"))
    known.send(Stop(rule="known"))
    said = [message.rule for _, message in heard(hub, 2)]
    assert sorted(said) == ["known", "late"]
    assert len(hub.peers()) == MOST_UNTRUSTED + 1
    assert peer in hub.peers()
    for each in (*strangers, known, late):
        each.close()
    hub.close()


FULL = """
import resource, socket, sys, time
from instep.comm.protocol.channel import Channel
from instep.comm.protocol.hub import Hub
from instep.comm.protocol.messages import Release
hub = Hub()
known = Channel.connect(hub.address)
known.send(Release())
[(peer, _)] = [arrived for _ in range(20) for arrived in hub.receive(0.1)]
hub.trust(peer)
own = socket.create_connection(hub.address)  # a stranger, whose file is this process's as well
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (own.fileno() + 8, hard))
full = []
try:
    while True:
        full.append(open("/dev/null"))
except OSError:
    pass
began, turns = time.monotonic(), 0
while time.monotonic() - began < 1.0:
    turns += len(list(hub.receive(0.1))) + 1
print(turns)
known.send(Release())
arrived = [message for _ in range(3) for _, message in hub.receive(0.1)]
print(len(arrived), peer in hub.peers())
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
late = Channel.connect(hub.address)
late.send(Release())
deadline = time.monotonic() + 600
while time.monotonic() < deadline and not any(m for _, m in hub.receive(0.1)):
    pass
print(time.monotonic() < deadline)
"""


@pytest.mark.process
def test_a_process_that_can_open_no_more_files_does_not_spin_and_serves_its_connections():
    done = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    turns, served, later = done.stdout.split("\n")[:3]
    assert int(turns) < 50
    assert served == "1 True"
    assert later == "True"


def test_a_message_whose_text_is_no_utf_8_is_no_message():
    sent = bytes(frame(Emit(name="ABCDEFG", fields={}))).replace(b"ABCDEFG", b"ABC\xffEFG")
    with pytest.raises(PeerError, match="no message arrived"):
        Frames().feed(sent)
