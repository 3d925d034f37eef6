"""A tie holds from one master to the next: nothing that was sent is lost, order is kept."""

import contextlib
import threading
import time

import pytest

from instep.comm.channel import Address, Hub, listen
from instep.comm.messages import (
    Built,
    Emit,
    Heard,
    Hello,
    Pulse,
    Refused,
    Release,
    Stop,
    StoreGet,
    Welcome,
)
from instep.comm.tie import PULSE_S, Tie
from instep.errors import PeerError

HELLO = Hello(token="t", role="worker", number=0, pid=1)
WELCOME = Welcome(job="", run="", started=0.0)
PATIENCE_S = 20.0


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
        """The next messages, pulses left out; and who sent them."""
        found = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < deadline, found
            for peer, message in self.hub.receive(0.05):
                if message is not None and not isinstance(message, Pulse):
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
def tie(masters):
    made = Tie(masters.address, HELLO)
    made.lasting = True
    yield made
    made.close()


def emit(number):
    return Emit(name="warning", fields={"text": str(number)})


def test_what_no_master_has_heard_is_said_again_to_the_next_in_order(masters, tie):
    for number in range(3):
        tie.send(emit(number))
    assert masters.heard(4)[0] == [HELLO, *map(emit, range(3))]
    masters.lose()
    masters.begin()
    assert tie.poll() is None
    again, _ = masters.heard(4)
    assert again[0].resends == 3
    assert again[1:] == [*map(emit, range(3))]


def test_what_was_heard_is_not_said_again(masters, tie):
    for number in range(3):
        tie.send(emit(number))
    _, peer = masters.heard(4)
    masters.hub.send(peer, Heard(count=2))
    masters.hub.send(peer, Stop(rule="a"))
    assert tie.wait_for(Stop) == Stop(rule="a")
    masters.lose()
    masters.begin()
    assert tie.poll() is None
    again, peer = masters.heard(2)
    assert (again[0].resends, again[1:]) == (1, [emit(2)])
    tie.send(emit(3))
    masters.hub.send(peer, Heard(count=1))  # counted anew on each connection
    masters.hub.send(peer, Stop(rule="b"))
    assert tie.wait_for(Stop) == Stop(rule="b")
    masters.lose()
    masters.begin()
    assert tie.poll() is None
    assert masters.heard(2)[0][1:] == [emit(3)]


def test_a_question_without_an_answer_is_asked_again_also_if_it_was_heard(masters, tie):
    tie.send(emit(0))
    tie.question = StoreGet(key="a")
    tie.send(tie.question)
    _, peer = masters.heard(3)
    for count in (1, 2):  # the last master had not, or had, heard it
        masters.hub.send(peer, Heard(count=count))
        masters.hub.send(peer, Stop(rule="a"))
        assert tie.wait_for(Stop) == Stop(rule="a")
        masters.lose()
        masters.begin()
        assert tie.poll() is None
        again, peer = masters.heard(2)
        assert (again[0].resends, again[1:]) == (1, [StoreGet(key="a")])
    tie.question = None
    masters.hub.send(peer, Heard(count=1))
    masters.hub.send(peer, Stop(rule="a"))
    assert tie.wait_for(Stop) == Stop(rule="a")
    masters.lose()
    masters.begin()
    assert tie.poll() is None
    assert masters.heard(1)[0][0].resends == 0


@pytest.mark.parametrize("listens", [False, True])
def test_a_last_word_waits_for_the_next_master_to_hear_it_and_not_for_ever(masters, tie, listens):
    if listens:
        tie.listen(Pulse, lambda message: None)
    tie.send(emit(0))
    began = time.monotonic()
    tie.wait_until_heard(0.3)
    assert time.monotonic() - began >= 0.3
    masters.lose()
    masters.begin()

    def hears():
        _, peer = masters.heard(2)
        masters.hub.send(peer, Heard(count=1))

    thread = threading.Thread(target=hears)
    thread.start()
    tie.wait_until_heard(PATIENCE_S)
    assert not tie._unheard
    thread.join()
    tie.send(emit(1))
    masters.hub.close()
    masters.listener.close()
    tie.wait_until_heard(PATIENCE_S)  # nobody is left who could
    assert time.monotonic() - began < PATIENCE_S


def test_a_process_that_waits_waits_for_the_next_master_too(masters, tie):
    tie.send(Built(recovers=True))
    masters.heard(2)
    got = []
    waiting = threading.Thread(target=lambda: got.append(tie.wait_for(Release)))
    waiting.start()
    masters.lose()
    masters.begin()
    _, peer = masters.heard(2)
    masters.hub.send(peer, WELCOME)
    masters.hub.send(peer, Release())
    waiting.join(PATIENCE_S)
    assert got == [Release()]


def test_with_nobody_to_call_the_tie_comes_apart(masters, tie):
    masters.heard(1)
    masters.close()
    with pytest.raises(PeerError, match="no master answers"):
        tie.receive()
    with pytest.raises(PeerError):
        tie.send(emit(1))


def test_a_tie_that_does_not_last_ends_with_its_master(masters):
    tie = Tie(masters.address, HELLO)
    masters.heard(1)
    masters.lose()
    masters.begin()
    with pytest.raises(PeerError, match="the master is gone"):
        tie.receive()
    tie.close()


def test_a_master_that_refuses_a_process_that_comes_back_ends_the_tie(masters, tie):
    _, peer = masters.heard(1)
    masters.hub.send(peer, WELCOME)
    assert tie.welcome() == WELCOME
    masters.lose()
    masters.begin()
    assert tie.poll() is None
    _, peer = masters.heard(1)
    masters.hub.send(peer, Refused(kind="PeerError", text="another has its place.", exit_code=5))
    with pytest.raises(PeerError, match="another has its place"):
        tie.receive()


@pytest.mark.parametrize("loses", [False, True])
def test_a_busy_process_shows_that_it_lives_and_hears_at_once(masters, tie, loses):
    arrived = []
    tie.listen(lambda: Pulse(step=7, phase="forward", progress=1), arrived.append)
    _, peer = masters.heard(1)
    if loses:
        masters.lose()
        masters.begin()
        _, peer = masters.heard(1)
    pulses = []
    deadline = time.monotonic() + PATIENCE_S
    while len(pulses) < 3:
        assert time.monotonic() < deadline
        pulses += [m for _, m in masters.hub.receive(PULSE_S) if isinstance(m, Pulse)]
    assert pulses[0] == Pulse(step=7, phase="forward", progress=1)
    masters.hub.send(peer, Stop(rule="a"))
    while not arrived and time.monotonic() < deadline:
        time.sleep(0.01)
    assert arrived == [Stop(rule="a")]
    assert tie.poll() == Stop(rule="a")


def test_one_that_falls_silent_hears_by_itself_again(masters, tie):
    tie.listen(lambda: Pulse(step=0, phase="", progress=0), lambda _: None)
    _, peer = masters.heard(1)
    tie.fall_silent()
    tie.fall_silent()
    assert not tie.listens
    list(masters.hub.receive(0.1))
    masters.hub.send(peer, Stop(rule="a"))
    assert tie.receive() == Stop(rule="a")
    assert [m for _, m in masters.hub.receive(3 * PULSE_S) if isinstance(m, Pulse)] == []


def test_one_that_sends_while_another_listens_loses_nothing_over_many_masters(masters, tie):
    tie.listen(lambda: Pulse(step=0, phase="", progress=0), lambda _: None)
    count, seen = 200, []

    def send():
        for number in range(count):
            tie.send(emit(number))
            time.sleep(0.002)

    sending = threading.Thread(target=send)
    sending.start()
    deadline, taken, lost = time.monotonic() + PATIENCE_S, 0, 0
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
                    masters.hub.send(peer, Heard(count=taken))
        if len(seen) > 40 * lost + 20:
            lost += 1
            masters.lose()
            masters.begin()
    sending.join()
    assert lost == 5
    assert seen == list(range(count))


class Answers:
    """A master that answers pulses while it is told to, in a thread of its own."""

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
                elif isinstance(message, Pulse) and self.answering:
                    self.masters.hub.send(peer, Heard(count=0, pulse=message.number))

    def close(self):
        self.ended = True
        self.thread.join()


@pytest.fixture
def answers(masters):
    each = Answers(masters)
    yield each
    each.close()


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_lease_lasts_while_pulses_are_answered_and_runs_out_once_they_are_not(answers, tie):
    lapses = []
    tie.keep(0.5)
    assert tie.lapsed  # nothing has been answered yet
    tie.listen(Pulse, lambda _: None, lambda: lapses.append(time.monotonic()))
    until(lambda: not tie.lapsed)
    lapses.clear()
    time.sleep(0.8)  # longer than the lease
    assert not tie.lapsed
    assert lapses == []
    answers.answering = False
    stopped = time.monotonic()
    until(lambda: tie.lapsed)
    assert time.monotonic() - stopped > 0.5 - 2 * PULSE_S  # it began when the pulse was sent
    until(lambda: len(lapses) > 1)
    answers.answering = True
    until(lambda: not tie.lapsed)


def test_an_answer_that_comes_late_counts_from_when_its_pulse_was_sent(masters, tie):
    tie.keep(0.5)
    tie.listen(Pulse, lambda _: None)
    pulses, peers = [], []
    while not pulses:
        for peer, message in masters.hub.receive(0.02):
            if isinstance(message, Pulse):
                pulses.append(message)
                peers.append(peer)
    assert pulses[0].number == 1
    time.sleep(0.6)
    masters.hub.send(peers[0], Heard(count=0, pulse=1))
    time.sleep(0.2)
    assert tie.lapsed


def test_where_nobody_answers_another_call_is_made_and_what_was_not_heard_is_said_again(
    answers, masters, tie
):
    tie.keep(0.3)
    answers.answering = False
    tie.listen(Pulse, lambda _: None)
    tie.send(emit(1))
    until(lambda: answers.hellos > 1)  # the same master, which lives and says nothing
    answers.answering = True
    until(lambda: not tie.lapsed)


def test_one_that_is_refused_when_it_calls_again_is_told_and_stays_lapsed(answers, tie):
    lapses = []
    tie.keep(0.3)
    answers.answering, answers.refuses = False, True
    tie._welcomed = True  # it was taken in before
    tie.listen(Pulse, lambda _: None, lambda: lapses.append(None))
    with pytest.raises(PeerError, match="it has its place"):
        tie.receive()
    until(lambda: not tie._thread.is_alive())
    assert tie.lapsed
    assert lapses


def test_without_a_lease_nothing_lapses(tie):
    assert not tie.lapsed
