"""A connection holds from one master to the next: nothing that was sent is lost, order is kept."""

import contextlib
import os
import threading
import time

import msgspec
import pytest

from instep.comm.encryption import tls
from instep.comm.encryption.certificates import Authority, Identity
from instep.comm.protocol.channel import Address, listen
from instep.comm.protocol.connection import HEARTBEAT_S, MasterConnection
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.hub import Hub
from instep.comm.protocol.messages import (
    Ack,
    Built,
    Emit,
    Heartbeat,
    Hello,
    Refused,
    Release,
    Stop,
    StoreGet,
    StoreValue,
    Welcome,
)
from instep.errors import PeerError, StrangerError
from instep.system.outbox import Outbox

HELLO = Hello(token="t", role="worker", number=0, pid=1)
WELCOME = Welcome(job="", run="", started=0.0)
TIMEOUT_S = 600.0


class Masters:
    """Masters at one address, one after the other."""

    def __init__(self):
        self.listener = listen()
        name = self.listener.getsockname()
        self.address = Address(name[0], name[1])
        self.last = None
        self.begin()

    def begin(self):
        self.hub = Hub(self.listener.dup(), largest=1 << 20)

    def lose(self):
        self.hub.close()

    def heard(self, count):
        """The next messages, heartbeats left out; and who sent them."""
        found = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(found) < count:
            assert time.monotonic() < deadline, found
            for peer, message in self.hub.receive(0.05):
                if message is not None and not isinstance(message, Heartbeat):
                    found.append(message)
                    self.last = peer
        return found, self.last

    def close(self):
        self.hub.close()
        self.listener.close()


@pytest.fixture
def masters():
    each = Masters()
    yield each
    each.close()


@pytest.fixture
def connection(masters):
    made = MasterConnection(masters.address, HELLO)
    made.lasting = True
    yield made
    made.close()


def emit(number):
    return Emit(name="warning", fields={"text": str(number)})


def test_unacknowledged_messages_are_sent_again_to_the_next_master_in_order(masters, connection):
    for number in range(3):
        connection.send(emit(number))
    assert masters.heard(4)[0] == [HELLO, *map(emit, range(3))]
    masters.lose()
    masters.begin()
    assert connection.inbox.poll() is None
    again, _ = masters.heard(4)
    assert again[0].resends == 3
    assert again[1:] == [*map(emit, range(3))]


def test_acknowledged_messages_are_not_sent_again(masters, connection):
    for number in range(3):
        connection.send(emit(number))
    _, peer = masters.heard(4)
    masters.hub.send(peer, Ack(count=2))
    masters.hub.send(peer, Stop(rule="a"))
    assert connection.inbox.wait_for(Stop) == Stop(rule="a")
    masters.lose()
    masters.begin()
    assert connection.inbox.poll() is None
    again, peer = masters.heard(2)
    assert (again[0].resends, again[1:]) == (1, [emit(2)])
    connection.send(emit(3))
    masters.hub.send(peer, Ack(count=1))  # counted anew on each connection
    masters.hub.send(peer, Stop(rule="b"))
    assert connection.inbox.wait_for(Stop) == Stop(rule="b")
    masters.lose()
    masters.begin()
    assert connection.inbox.poll() is None
    assert masters.heard(2)[0][1:] == [emit(3)]


def test_what_no_master_has_acknowledged_outlives_the_process_that_sent_it(masters):
    file = os.memfd_create("test")
    first = MasterConnection(masters.address, HELLO)
    first.lasting = True
    first.keep_in(Outbox(file))
    for message in (emit(0), Built(recovers=True), emit(1), emit(2)):
        first.send(message)
    _, peer = masters.heard(5)
    masters.hub.send(peer, Ack(count=1))  # and then the master is killed, and the process
    first.wait_until_acknowledged(HEARTBEAT_S)
    masters.lose()
    first.close()
    masters.begin()
    second = MasterConnection(masters.address, HELLO)
    second.lasting = True
    second.keep_in(Outbox(file))
    second.send(emit(3))
    found, peer = masters.heard(4)
    again = [msgspec.structs.replace(emit(number), again=True) for number in (1, 2)]
    assert found == [HELLO, *again, emit(3)]
    masters.hub.send(peer, Ack(count=3))
    second.wait_until_acknowledged(TIMEOUT_S)
    assert Outbox(file).left == []
    second.close()
    os.close(file)


def test_an_unanswered_request_is_sent_again_also_if_it_was_acknowledged(masters, connection):
    connection.send(emit(0))
    connection.unacknowledged.question = StoreGet(key="a")
    connection.send(connection.unacknowledged.question)
    _, peer = masters.heard(3)
    for count in (1, 2):  # the last master had not, or had, heard it
        masters.hub.send(peer, Ack(count=count))
        masters.hub.send(peer, Stop(rule="a"))
        assert connection.inbox.wait_for(Stop) == Stop(rule="a")
        masters.lose()
        masters.begin()
        assert connection.inbox.poll() is None
        again, peer = masters.heard(2)
        assert (again[0].resends, again[1:]) == (1, [StoreGet(key="a")])
    for value in (b"first", b"second"):  # it was asked twice, and the last master has heard both
        masters.hub.send(peer, StoreValue(key="a", value=value))
    masters.hub.send(peer, Ack(count=1))
    masters.hub.send(peer, Stop(rule="a"))
    assert connection.inbox.wait_for(StoreValue).value == b"first"
    assert connection.inbox.poll() == Stop(rule="a")  # the second is in nobody's way
    masters.lose()
    masters.begin()
    assert connection.inbox.poll() is None
    assert masters.heard(1)[0][0].resends == 0


@pytest.mark.parametrize("listens", [False, True])
def test_a_last_message_waits_for_the_next_master_up_to_a_timeout(masters, connection, listens):
    if listens:
        connection.listen(Heartbeat, lambda message: None)
    connection.send(emit(0))
    began = time.monotonic()
    connection.wait_until_acknowledged(0.3)
    assert time.monotonic() - began >= 0.3
    masters.lose()
    masters.begin()

    def hears():
        _, peer = masters.heard(2)
        masters.hub.send(peer, Ack(count=1))

    thread = threading.Thread(target=hears)
    thread.start()
    connection.wait_until_acknowledged(TIMEOUT_S)
    assert not connection.unacknowledged.messages
    thread.join()
    connection.send(emit(1))
    masters.hub.close()
    masters.listener.close()
    connection.wait_until_acknowledged(TIMEOUT_S)  # nobody is left who could
    assert time.monotonic() - began < TIMEOUT_S


def test_a_process_that_waits_waits_for_the_next_master_too(masters, connection):
    connection.send(Built(recovers=True))
    masters.heard(2)
    got = []
    waiting = threading.Thread(target=lambda: got.append(connection.inbox.wait_for(Release)))
    waiting.start()
    masters.lose()
    masters.begin()
    _, peer = masters.heard(2)
    masters.hub.send(peer, WELCOME)
    masters.hub.send(peer, Release())
    waiting.join(TIMEOUT_S)
    assert got == [Release()]


def test_without_a_listener_the_connection_ends(masters, connection):
    masters.heard(1)
    masters.close()
    with pytest.raises(PeerError, match="no master answers"):
        connection.inbox.wait_for()
    with pytest.raises(PeerError):
        connection.send(emit(1))


def test_a_connection_that_does_not_last_ends_with_its_master(masters):
    connection = MasterConnection(masters.address, HELLO)
    masters.heard(1)
    masters.lose()
    masters.begin()
    with pytest.raises(PeerError, match="the master is gone"):
        connection.inbox.wait_for()
    connection.close()


def test_a_master_that_refuses_a_reconnecting_process_ends_its_connection(masters, connection):
    _, peer = masters.heard(1)
    masters.hub.send(peer, WELCOME)
    assert connection.welcome() == WELCOME
    masters.lose()
    masters.begin()
    assert connection.inbox.poll() is None
    _, peer = masters.heard(1)
    masters.hub.send(peer, Refused(kind="PeerError", text="another has its place.", exit_code=5))
    with pytest.raises(PeerError, match="another has its place"):
        connection.inbox.wait_for()


@pytest.mark.parametrize("loses", [False, True])
def test_a_busy_process_sends_heartbeats_and_receives_at_once(masters, connection, loses):
    arrived = []
    connection.listen(lambda: Heartbeat(step=7, phase="forward", progress=1), arrived.append)
    _, peer = masters.heard(1)
    if loses:
        masters.lose()
        masters.begin()
        _, peer = masters.heard(1)
    heartbeats = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(heartbeats) < 3:
        assert time.monotonic() < deadline
        heartbeats += [m for _, m in masters.hub.receive(HEARTBEAT_S) if isinstance(m, Heartbeat)]
    assert heartbeats[0] == Heartbeat(step=7, phase="forward", progress=1)
    masters.hub.send(peer, Stop(rule="a"))
    while not arrived and time.monotonic() < deadline:
        time.sleep(0.01)
    assert arrived == [Stop(rule="a")]
    assert connection.inbox.poll() == Stop(rule="a")


def test_sending_while_another_thread_receives_loses_nothing_over_many_masters(masters, connection):
    connection.listen(lambda: Heartbeat(step=0, phase="", progress=0), lambda _: None)
    count, seen = 200, []

    def send():
        for number in range(count):
            connection.send(emit(number))
            time.sleep(0.002)

    sending = threading.Thread(target=send)
    sending.start()
    deadline, taken, lost = time.monotonic() + TIMEOUT_S, 0, 0
    while len(seen) < count:
        assert time.monotonic() < deadline, len(seen)
        for peer, message in list(masters.hub.receive(0.02)):
            if isinstance(message, Hello):
                taken = 0
            elif isinstance(message, Emit):
                taken += 1
                number = int(message.fields["text"])
                if number == len(seen):
                    seen.append(number)
                assert number < len(seen), "one was left out"
                with contextlib.suppress(OSError):
                    masters.hub.send(peer, Ack(count=taken))
        if len(seen) > 40 * lost + 20:
            lost += 1
            masters.lose()
            masters.begin()
    sending.join()
    assert lost == 5
    assert seen == list(range(count))


class Answers:
    """A master that answers heartbeats while it is told to, in a thread of its own."""

    def __init__(self, masters):
        self.masters, self.answering, self.ended = masters, True, False
        self.hellos = self.refuses = 0
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        while not self.ended:
            for peer, message in list(self.masters.hub.receive(0.02)):
                if isinstance(message, Hello):
                    self.hellos += 1
                    if self.refuses:
                        word = Refused(kind="PeerError", text="it has its place.", exit_code=5)
                        self.masters.hub.send(peer, word)
                elif isinstance(message, Heartbeat) and self.answering:
                    self.masters.hub.send(peer, Ack(count=0, heartbeat=message.number))

    def close(self):
        self.ended = True
        self.thread.join()


@pytest.fixture
def answers(masters):
    each = Answers(masters)
    yield each
    each.close()


def until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_lease_lasts_while_heartbeats_are_answered_and_runs_out_once_they_are_not(
    answers, connection
):
    lapses = []
    connection.keep(0.5)
    assert connection.lapsed  # nothing has been answered yet
    connection.listen(Heartbeat, lambda _: None, lambda: lapses.append(time.monotonic()))
    until(lambda: not connection.lapsed)
    lapses.clear()
    time.sleep(0.8)  # longer than the lease
    assert not connection.lapsed
    assert lapses == []
    answers.answering = False
    stopped = time.monotonic()
    until(lambda: connection.lapsed)
    assert (
        time.monotonic() - stopped > 0.5 - 2 * HEARTBEAT_S
    )  # it began when the heartbeat was sent
    until(lambda: len(lapses) > 1)
    answers.answering = True
    until(lambda: not connection.lapsed)


def test_a_late_answer_extends_the_lease_from_when_its_heartbeat_was_sent(masters, connection):
    connection.keep(0.5)
    connection.listen(Heartbeat, lambda _: None)
    heartbeats, peers = [], []
    while not heartbeats:
        for peer, message in masters.hub.receive(0.02):
            if isinstance(message, Heartbeat):
                heartbeats.append(message)
                peers.append(peer)
    assert heartbeats[0].number == 1
    time.sleep(0.6)
    masters.hub.send(peers[0], Ack(count=0, heartbeat=1))
    time.sleep(0.2)
    assert connection.lapsed


def test_without_an_answer_the_process_reconnects_and_sends_unacknowledged_messages_again(
    answers, masters, connection
):
    connection.keep(0.3)
    answers.answering = False
    connection.listen(Heartbeat, lambda _: None)
    connection.send(emit(1))
    until(lambda: answers.hellos > 1)  # the same master, which lives and says nothing
    answers.answering = True
    until(lambda: not connection.lapsed)


def test_a_process_that_is_refused_when_it_reconnects_learns_so_and_its_lease_stays_lapsed(
    answers, connection
):
    lapses = []
    connection.keep(0.3)
    answers.answering, answers.refuses = False, True
    connection._welcomed = True  # it was taken in before
    connection.listen(Heartbeat, lambda _: None, lambda: lapses.append(None))
    with pytest.raises(PeerError, match="it has its place"):
        connection.inbox.wait_for()
    until(lambda: not connection.inbox.thread.is_alive())
    assert connection.lapsed
    assert lapses


@pytest.fixture
def briefly(monkeypatch):
    for name in ("GIVE_UP_S", "ANSWER_S"):
        monkeypatch.setattr(f"instep.comm.protocol.connection.{name}", 1.0)


def test_a_master_that_accepts_connections_and_never_answers_is_given_up(
    masters, connection, briefly, monkeypatch
):
    """The system still accepts for a master that is stopped, and another program may have its
    port."""
    monkeypatch.setattr("instep.comm.protocol.connection.RECONNECT_S", 0.2)
    connection.keep(0.1)
    connection.listen(Heartbeat, lambda _: None)
    with pytest.raises(PeerError, match="it does not answer"):
        connection.inbox.wait_for()


def test_the_first_answer_is_not_waited_for_without_end(masters, connection, briefly):
    with pytest.raises(PeerError, match=r"127.0.0.1:\d+ does not answer, for 1 s"):
        connection.welcome()


@contextlib.contextmanager
def hangs_up():
    """Somebody who listens, and closes each connection; how many there were."""
    with listen() as listener:
        count, over = [], threading.Event()
        listener.settimeout(0.05)

        def serve():
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    listener.accept()[0].close()
                    count.append(None)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Address(*listener.getsockname()), count
        over.set()
        thread.join()


def test_who_is_closed_without_an_answer_does_not_call_again_and_again_without_a_pause(briefly):
    """A master of another version closes each connection, and is busy with no more than a few."""
    with hangs_up() as (address, count):
        connection = MasterConnection(address, HELLO)
        connection.lasting = True
        with pytest.raises(PeerError):
            connection.welcome()
        connection.close()
    assert 2 < len(count) < 20


@pytest.mark.parametrize("has_lease", [False, True])
def test_a_master_of_another_run_is_not_called_without_end(has_lease, monkeypatch):
    """It has the port of a master that is gone; or its clock is days ahead."""
    monkeypatch.setattr("instep.comm.protocol.connection.RECONNECT_S", 0.1)
    board, over = Switchboard(authority=Authority()), threading.Event()

    def serve():
        while not over.is_set():
            list(board.hub.receive(0.02))

    thread = threading.Thread(target=serve)
    thread.start()
    shown = tls.context(Authority().issue(Identity("worker")), server=False)
    connection = MasterConnection(board.endpoint.address, HELLO, shown)
    connection.lasting = True
    try:
        if has_lease:
            connection.keep(0.1)
            connection.listen(Heartbeat, lambda _: None)
        with pytest.raises(StrangerError, match="no master of this run, or the clocks"):
            connection.inbox.wait_for()
    finally:
        connection.close()
        over.set()
        thread.join()
        board.close()


def test_without_a_lease_nothing_lapses(connection):
    assert not connection.lapsed
