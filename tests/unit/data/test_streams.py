"""Any sample of a stream can be read at any time, and is the one that a plain loop gives."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from instep.data.reading.streams import kept as keeping
from instep.data.reading.streams.given import GivenStream
from instep.data.reading.streams.kept import KeptWindows, thinned
from instep.data.reading.streams.part import StreamPart
from instep.data.reading.streams.state import packed, unpacked
from instep.data.reading.streams.stream import Stream
from instep.data.reading.streams.turns import StreamPlan
from instep.data.samples import last_read
from instep.errors import DataError
from instep.worker.reading.streamed import _check_heads

PARTS, WINDOW, COUNT = 3, 7, 100


class Plain(IterableDataset):
    read = 0

    def __init__(self, count=COUNT):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from self._from(0)

    def _from(self, at):
        info = get_worker_info()
        for number in range(info.id + at * info.num_workers, self.count, info.num_workers):
            Plain.read += 1
            yield number + 1000 * self.epoch


class Told(Plain):
    """Says where it is."""

    step = 0
    """Samples by which its state is wrong."""

    def __init__(self, count=COUNT):
        super().__init__(count)
        self.at = 0

    def __iter__(self):
        for sample in self._from(self.at + self.step):
            self.at += 1
            yield sample

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Drawn(IterableDataset):
    """Draws from the global generators."""

    def __iter__(self):
        for _ in range(COUNT):
            yield random.random(), np.random.rand(), torch.rand(()).item()


@pytest.fixture(autouse=True)
def each_window_is_written(monkeypatch):
    monkeypatch.setattr(keeping, "PAUSE_S", 0.0)


def alone(dataset, part, epoch=0, parts=PARTS):
    """A plain loop over one part."""
    torch_worker._worker_info = torch_worker.WorkerInfo(part, parts, 0, dataset)
    try:
        dataset.set_epoch(epoch)
        return list(dataset)
    finally:
        torch_worker._worker_info = None


def plan_of(count=COUNT, parts=PARTS):
    sizes = tuple(len(range(part, count, parts)) for part in range(parts))
    return StreamPlan(parts, WINDOW, True, sizes, count)


def stream_of(dataset, plan=None, folder=None):
    return Stream(GivenStream(dataset), plan or plan_of(), 5, folder)


def read(stream, part, epoch, at):
    return stream[int(stream.plan.numbers(part, epoch, np.array(at)))]


@pytest.mark.parametrize("kind", [Plain, Told])
def test_samples_in_any_order_are_those_of_a_plain_loop(kind, tmp_path):
    stream = stream_of(kind(), folder=tmp_path)
    wanted = {(p, e): alone(Plain(), p, e) for p in range(PARTS) for e in range(2)}
    places = [(p, e, at) for (p, e), rows in wanted.items() for at in range(len(rows))]
    random.Random(1).shuffle(places)
    for part, epoch, at in places[:150]:
        assert read(stream, part, epoch, at) == wanted[part, epoch][at]
    assert get_worker_info() is None


def test_another_process_continues_from_a_state_and_reads_no_more_than_two_windows(tmp_path):
    wanted = alone(Plain(9000), 1)
    plan = plan_of(9000)
    first = stream_of(Told(9000), plan, tmp_path)
    assert [read(first, 1, 0, at) for at in range(2950)] == wanted[:2950]
    Plain.read = 0
    other = stream_of(Told(9000), plan, tmp_path)
    assert read(other, 1, 0, 2949) == wanted[2949]
    assert Plain.read <= 2 * WINDOW
    assert len(other._part(1)._kept._windows) < 16
    sizes = [len(file.read_bytes()) for file in tmp_path.iterdir()]
    states = sum(len(each.state or b"") for each in other._part(1)._kept._windows.values())
    assert sum(sizes) - states < 1000


def test_a_state_that_leads_elsewhere_costs_time_and_changes_nothing(tmp_path):
    wanted = alone(Plain(), 0)
    first = stream_of(Told(), folder=tmp_path)
    assert [read(first, 0, 0, at) for at in range(28)] == wanted[:28]
    wrong = Told()
    wrong.step = 1
    other = stream_of(wrong, folder=tmp_path)
    with pytest.raises(DataError, match="part 0 of the stream gives other samples"):
        read(other, 0, 0, 27)  # neither its state nor its start gives the same
    with pytest.raises(DataError, match="gives other samples"):
        read(other, 0, 0, 3)

    class Forgets(Told):
        def load_state_dict(self, state):
            self.at = state["at"] - 1

    assert [read(stream_of(Forgets(), folder=tmp_path), 0, 0, at) for at in (27, 3)] == [
        wanted[27],
        wanted[3],
    ]


class Nowhere(Told):
    """Begins at its end, where a state puts it."""

    def load_state_dict(self, state):
        self.at = self.count


class NotLoaded(Told):
    def load_state_dict(self, state):
        raise IndexError("list index out of range")


class NotRead(NotLoaded):
    """Raises later, where a state is used."""

    def load_state_dict(self, state):
        self.count = "none"


class NotTold(Told):
    def state_dict(self):
        raise RuntimeError("State dict is not initialized")


@pytest.mark.parametrize("kind", [Nowhere, NotLoaded, NotRead, NotTold])
def test_a_state_that_leads_nowhere_is_as_none(kind, tmp_path):
    wanted = alone(Plain(), 0)
    first = stream_of(kind(), folder=tmp_path)
    assert [read(first, 0, 0, at) for at in range(28)] == wanted[:28]
    other = stream_of(kind(), folder=tmp_path)
    assert [read(other, 0, 0, at) for at in range(26, len(wanted))] == wanted[26:]


def test_draws_from_global_generators_follow_from_the_place_and_disturb_nobody():
    plan = StreamPlan(1, WINDOW, True, (COUNT,), COUNT)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = [stream_of(Drawn(), plan)[at] for at in (50, 3, 20)]
    torch.manual_seed(2)
    other = stream_of(Drawn(), plan)
    assert [other[at] for at in (3, 20, 50)] == [one[1], one[2], one[0]]
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({*one}) == 3


def test_a_part_that_ends_begins_again_where_steps_are_counted():
    stream = stream_of(Plain(), StreamPlan(PARTS, WINDOW, True, None, 1000))
    wanted = [n for passes in range(4) for n in alone(Plain(), 2, passes)]
    assert [read(stream, 2, 0, at) for at in range(120)] == wanted[:120]
    with pytest.raises(DataError, match="part 2 of 3 of the stream has no sample"):
        read(stream_of(Plain(2), StreamPlan(PARTS, WINDOW, True, None, 1000)), 2, 0, 0)


def test_a_stream_without_samples_says_what_to_look_at():
    empty = stream_of(Plain(0), StreamPlan(1, WINDOW, True, None, 1000))
    with pytest.raises(
        DataError, match=r"the stream of Recipe\.train has no sample: .* See whether"
    ):
        read(empty, 0, 0, 0)


def test_an_iter_that_returns_no_iterator_is_said():
    class Listed(IterableDataset):
        def __iter__(self):
            return [1, 2, 3]

    with pytest.raises(DataError, match=r"__iter__ of the stream \(Listed\) returned a list, and"):
        read(stream_of(Listed()), 0, 0, 0)


def test_samples_are_counted_and_another_length_later_is_an_error():
    huge = (1 << 40,) * PARTS
    stream, found = stream_of(Plain(), StreamPlan(PARTS, WINDOW, True, huge, 1 << 40)), []
    while not found:
        found = stream.counted(0.0)
    assert found == [34, 33, 33]
    for count in (99, 103):
        with pytest.raises(DataError, match="samples in epoch 1, and had 34 when they were"):
            read(stream_of(Plain(count)), 0, 0, 33)
    whole = plan_of(2 * WINDOW * PARTS)  # whose last windows are full
    with pytest.raises(DataError, match="has more than 14 samples in epoch 1, and had 14 when"):
        read(stream_of(Plain(whole.samples + PARTS), whole), 0, 0, 13)


def test_parts_that_begin_alike_or_otherwise_when_read_again_are_refused():
    class Undivided(IterableDataset):
        def __iter__(self):
            yield from range(50)

    class Live(IterableDataset):
        def __iter__(self):
            source = random.SystemRandom()
            while True:
                yield source.random()

    class Round:
        def __init__(self, number):
            self.number, self.myself = number, self

    class OfUnknownContent(Plain):
        def __iter__(self):
            yield from map(Round, super().__iter__())

    for each in (Plain(), OfUnknownContent()):
        *heads, again = stream_of(each).heads()
        _check_heads("the stream", heads, again)
    *heads, again = stream_of(Undivided()).heads()
    with pytest.raises(DataError, match=r"does not divide itself\. Set data\.parts = 1"):
        _check_heads("the stream", heads, again)
    *heads, again = stream_of(Live()).heads()
    with pytest.raises(DataError, match="gives other samples when it is read again"):
        _check_heads("the stream", heads, again)


def test_a_stream_that_gives_one_buffer_again_and_again_is_refused():
    class Reused(Plain):
        def __iter__(self):
            buffer = torch.zeros(2)
            for number in super().__iter__():
                yield buffer.fill_(number), number

    class Copied(Reused):
        def __iter__(self):
            yield from ((buffer.clone(), number) for buffer, number in super().__iter__())

    with pytest.raises(
        DataError, match=r"changes sample 0 of part 0 .* one buffer again and again"
    ):
        stream_of(Reused()).heads()
    *heads, again = stream_of(Copied()).heads()
    _check_heads("the stream", heads, again)


def test_a_worker_init_fn_divides_the_copy_of_each_part():
    class Ranged(IterableDataset):
        first, stop = 0, 90

        def __iter__(self):
            yield from range(self.first, self.stop)

    def divide(number):
        info = get_worker_info()
        assert info.id == number
        info.dataset.first, info.dataset.stop = 30 * number, 30 * number + 30

    plan = StreamPlan(PARTS, WINDOW, True, (30,) * PARTS, 90)
    stream = Stream(GivenStream(Ranged(), divide), plan, 5)
    assert [read(stream, part, 0, 29) for part in range(PARTS)] == [29, 59, 89]


def test_what_is_kept_of_a_part_grows_with_the_logarithm_of_its_windows():
    kept = list[int]()
    for number in range(100_000):
        kept = sorted(thinned([*kept, number]))
    assert kept[-3:] == [99_997, 99_998, 99_999]
    assert len(kept) < 25
    for back in (10, 100, 1000, 10_000):
        nearest = max(number for number in kept if number <= 99_999 - back)
        assert 99_999 - back - nearest <= 2 * back


def test_a_damaged_file_is_as_none(tmp_path):
    stream = stream_of(Told(), folder=tmp_path)
    assert [read(stream, 1, 0, at) for at in range(30)] == alone(Plain(), 1)[:30]
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"x" + file.read_bytes())
    assert KeptWindows(tmp_path, 1, 0).nearest(0, 9) is None
    assert read(stream_of(Told(), folder=tmp_path), 1, 0, 29) == alone(Plain(), 1)[29]


def test_states_keep_their_types():
    state = {
        "generator": random.Random(3).getstate(),
        "numpy": np.random.default_rng(3).bit_generator.state,
        7: [1, (2.5, None), {"b": b"x"}],
        "tensor": torch.arange(6).view(2, 3),
        "count": np.int64(5),
        "seen": (np.float32(0.1), np.float64(0.1)),  # a batch of either has its type
        "name": np.str_("x"),
    }
    narrow = torch.ones(2, 1, dtype=torch.bfloat16)
    assert torch.equal(unpacked(packed(narrow)), narrow)
    found = unpacked(packed(state))
    assert [type(each) for each in found["seen"]] == [np.float32, np.float64]
    assert found.pop("tensor").tolist() == state.pop("tensor").tolist()
    assert found == state
    with pytest.raises(TypeError):
        packed({"open": object()})
    with pytest.raises(TypeError):
        packed(np.zeros(1, [("a", "<f4")]))  # names of fields would be lost


def test_parts_that_are_read_in_turn_stay_open():
    begun, parts = [], 80

    class Counted(IterableDataset):
        def __iter__(self):
            begun.append(get_worker_info().id)
            yield from range(1000)

    stream = Stream(GivenStream(Counted()), StreamPlan(parts, 4, False, None, 9000), 5)
    for step in range(6):
        for part in range(parts):
            stream[stream.plan.number(part, 0, step)]
    assert len(begun) <= 2 * parts  # once it is seen how long a part is not wanted


def test_an_iterator_of_its_own_may_have_the_state(tmp_path):
    class Walk:
        def __init__(self, first, step):
            self.at, self.step = first, step

        def __iter__(self):
            return self

        def __next__(self):
            if self.at >= COUNT:
                raise StopIteration
            self.at += self.step
            return self.at - self.step

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    class Walks(IterableDataset):
        def __iter__(self):
            return Walk(get_worker_info().id, get_worker_info().num_workers)

    kept = KeptWindows(None, 0, 0)
    part = StreamPart(GivenStream(Walks()), plan_of(), 0, 5, kept)
    assert part.sample(0, 30) == 90
    assert kept.nearest(0, 4).state is not None
    assert part.sample(0, 16) == 48


def test_after_a_read_nothing_is_read():
    """A worker that reads counts as hanging by the rule of reads."""
    read(stream_of(Plain()), part=0, epoch=0, at=0)
    assert last_read.own_read() is None
