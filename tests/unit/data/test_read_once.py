"""What gives each sample once is kept in memory until it is committed, whoever reads it."""

import os
import signal
import struct
import time
import traceback
from contextlib import contextmanager

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from instep.data.reading.streams.given import GivenStream
from instep.data.reading.streams.once import TRIED, KeptSamples, OncePart
from instep.data.reading.streams.stream import LET_GO, Stream
from instep.data.reading.streams.turns import StreamPlan, Turns
from instep.errors import DataError

WINDOW, NUMBER = 5, struct.Struct("<q")
PLAN = StreamPlan(1, WINDOW, True, None, 1000)
LIMIT_S = 60.0
"""Against hangs alone."""


class Piped(IterableDataset):
    """Gives what comes from a pipe, as a socket does."""

    def __init__(self, end):
        self.end = end

    def __iter__(self):
        while body := os.read(self.end, NUMBER.size):
            yield {"number": NUMBER.unpack(body)[0]}


class Source:
    def __init__(self):
        self.end, self._into = os.pipe()
        self.given = 0

    def give(self, count):
        for number in range(self.given, self.given + count):
            os.write(self._into, NUMBER.pack(number))
        self.given += count

    def close(self):
        os.close(self.end)
        os.close(self._into)


@pytest.fixture
def source():
    made = Source()
    yield made
    made.close()


@pytest.fixture
def kept():
    file = os.memfd_create("instep-test")
    yield KeptSamples(file)
    os.close(file)


def part_of(source, kept, plan=PLAN, number=0):
    return OncePart(GivenStream(Piped(source.end)), plan, number, 5, kept)


def numbers(part, first, stop):
    return [part.sample(0, count)["number"] for count in range(first, stop)]


@contextmanager
def forked(body):
    """A process that runs a function, and is killed at the end if it has not ended."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def held_by_another(kept, *parts):
    """Whether another process can have them."""
    with forked(lambda: os._exit(0 if all(map(kept.hold, parts)) else 9)) as pid:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status == 0


def wait_until(happened):
    until = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < until, "it never happens"
        time.sleep(0.001)


def test_what_a_killed_process_had_read_is_used_by_the_next(source, kept):
    source.give(WINDOW + 3)
    with forked(lambda: part_of(source, kept).sample(0, WINDOW)):
        wait_until(lambda: len(kept.samples(0, 1)) == 3)
    source.give(7)
    assert numbers(part_of(source, kept), 0, 3 * WINDOW) == list(range(3 * WINDOW))


def test_a_part_has_one_reader_until_it_lets_go(source, kept):
    go, told = os.pipe()
    source.give(2 * WINDOW)

    def other():
        mine = part_of(source, kept)
        mine.sample(0, 0)
        os.read(go, 1)
        mine.close()
        os.read(go, 1)

    with forked(other):
        wait_until(lambda: kept.due(0) == 1)
        ours = part_of(source, kept)
        assert numbers(ours, 0, WINDOW) == list(range(WINDOW))  # the other has read them
        assert not kept.hold(0)
        os.write(told, b"x")
        assert numbers(ours, WINDOW, 2 * WINDOW) == list(range(WINDOW, 2 * WINDOW))
    os.close(go)
    os.close(told)


def test_committed_windows_give_their_memory_back_and_cannot_be_read_again(source, kept):
    part, size = part_of(source, kept), 10_000

    class Large(IterableDataset):
        def __iter__(self):
            number = 0
            while True:
                yield [number, bytes(size)]
                number += 1

    part = OncePart(GivenStream(Large()), PLAN, 0, 5, kept)
    for count in range(100 * WINDOW):
        assert part.sample(0, count)[0] == count
        kept.commit(count)
    assert 512 * os.fstat(kept._file).st_blocks < 5 * WINDOW * size
    other = part_of(source, kept)
    with pytest.raises(DataError, match="window 3 of part 0 of the stream is wanted again"):
        other.sample(0, 3 * WINDOW)
    part.close()
    assert other.sample(TRIED, 0)[0] == 99 * WINDOW  # a trial takes what comes next


def test_a_part_stays_locked_when_memory_is_given_back(kept):
    assert kept.hold(0)
    kept.add(0, 0, b"one")
    kept.drop(0, before=1)
    assert kept.samples(0, 0) == []
    assert not held_by_another(kept, 0)


def test_what_is_left_of_another_window_does_not_count(kept):
    after = 0
    for each in (b"one", b"two", b"three"):
        after = kept.add(0, 2, each, after)
    kept._set(kept._slot(0, 2), 0)  # killed while it was dropped
    assert kept.samples(0, 62) == []
    kept.add(0, 62, b"one")
    assert kept.samples(0, 62) == [b"one"]
    assert kept.samples(0, 2) == []


def test_no_more_is_kept_than_has_room_and_only_plain_values(kept):
    for window in range(60):
        kept.add(0, window, b"")
    with pytest.raises(DataError, match="has 60 windows that are not committed yet"):
        kept.add(0, 60, b"")

    class Odd(IterableDataset):
        def __iter__(self):
            yield object()

    part = OncePart(GivenStream(Odd()), PLAN, 1, 5, kept)
    with pytest.raises(DataError, match=r"is a object, which data\.once = true cannot keep"):
        part.sample(0, 0)


def test_a_stream_of_it_gives_all_samples_in_its_order_and_lets_go_of_its_parts(source, kept):
    plan = StreamPlan(2, WINDOW, True, None, 40)
    stream = Stream(GivenStream(Piped(source.end)), plan, 5, once=kept)
    source.give(40)
    order = Turns(plan, 5, 10).indices(0, 0, 40)
    assert sorted(row["number"] for row in stream.__getitems__(order)) == list(range(40))
    stream.answer(LET_GO)
    assert held_by_another(kept, 0, 1)
    assert stream.few(5) == []


def test_many_parts_are_each_begun_once(kept):
    begun, parts = [], 80

    class Counted(IterableDataset):
        def __iter__(self):
            begun.append(get_worker_info().id)
            yield from range(1000)

    plan = StreamPlan(parts, 4, True, None, 1000 * parts)
    stream = Stream(GivenStream(Counted()), plan, 5, once=kept)
    order = Turns(plan, 5, parts)
    for position in range(8 * parts):  # a micro-batch of one part
        stream.__getitems__(order.indices(0, position, position + 1))
    assert sorted(begun) == [*range(parts)]
