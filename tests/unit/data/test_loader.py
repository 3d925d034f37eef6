"""A batch depends on seed and slice alone, however it is read."""

import random
import threading
import time
from contextlib import closing
from itertools import chain, count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Drawing, Many, Nested, Plain, Raising, Uneven, augment, load, same
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from instep.data.dealing import deal
from instep.data.loader import Loader, Slice
from instep.data.order import Order, key, micro_batch, position, steps_in_epoch
from instep.data.reading.generators import DrawDetector
from instep.data.sources.text import text
from instep.data.torch_loader import LoaderParts
from instep.errors import DataError
from instep.job.data import DataSpec
from instep.job.spec import JobSpec

TENSORS = TensorDataset(torch.randn(100, 5), torch.arange(100))
SLICES = [Slice(0, 0, 7), Slice(0, 7, 7), Slice(0, 7, 40), Slice(3, 99, 100), Slice(1, 0, 64)]


def batches(dataset, slices=SLICES, **options):
    with closing(Loader(dataset, **{"seed": 5, "shuffle": True, **options})) as loader:
        return list(load(loader, slices))


@pytest.mark.parametrize("workers", range(1, 9))
def test_global_batches_are_equal_at_any_number_of_workers_also_the_last(workers):
    samples, batch, parts = 1797, 64, 8
    dataset = TensorDataset(torch.arange(samples))
    order = Order(samples, 5)
    steps = range(1, steps_in_epoch(samples, batch) + 1)
    places = [position(step, samples, batch) for step in steps]
    got = [[] for _ in steps]
    for share in deal(parts, workers):
        cuts = [(e, micro_batch(a, b, n, parts)) for e, a, b in places for n in share]
        with closing(Loader(dataset, seed=5, shuffle=True, processes=0)) as loader:
            for number, loaded in enumerate(load(loader, (Slice(e, *cut) for e, cut in cuts))):
                got[number // len(share)] += [] if loaded is None else loaded[0].tolist()
    assert got == [order.indices(*place).tolist() for place in places]
    assert sorted(chain(*got)) == list(range(samples))


@pytest.mark.parametrize("order", ["global", "dataset"])
def test_a_job_decides_in_which_order_is_trained(order):
    job = JobSpec(recipe="a.py:f", data=DataSpec(order=order))
    places = [Slice(epoch, 0, 100) for epoch in (0, 1)]
    for name in ("training", "validation"):
        parts = LoaderParts(TENSORS, loaders=0)
        with closing(Loader.of_job(job, parts, name, say=print)) as loader:
            orders = [read[1].tolist() for read in load(loader, places)]
        natural = name == "validation" or order == "dataset"
        assert (orders[0] == orders[1] == list(range(100))) == natural
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(100))


@pytest.mark.grid
@pytest.mark.parametrize("dataset", [Plain(), Many(), Drawing(), Nested(), TENSORS])
@pytest.mark.parametrize("augmented", [False, True])
def test_all_ways_of_reading_give_the_same_bits(dataset, augmented):
    options = {"augment": augment} if augmented and not isinstance(dataset, Nested) else {}
    if augmented and dataset is TENSORS:
        options = {"augment": lambda s, g: (s[0] + torch.rand(5, generator=g), s[1])}
    here = batches(dataset, processes=0, **options)
    assert here[1] is None
    assert same(here, batches(dataset, processes=0, **options))
    for processes in (1, 3):
        assert same(here, batches(dataset, processes=processes, **options))


@pytest.mark.parametrize("processes", [0, 2])
def test_the_draws_of_a_sample_are_those_of_its_key_in_each_epoch(processes):
    """The key is written out here: seed, epoch, index, and what the draw is for."""

    class Rolls(Plain):
        def __getitem__(self, index):
            return torch.rand(2)

    def augmented(sample, generator):
        return torch.cat([sample, torch.rand(2, generator=generator)])

    slices = [Slice(0, 0, 20), Slice(1, 0, 20)]
    options = {"shuffle": False, "augment": augmented, "processes": processes}
    for epoch, batch in enumerate(batches(Rolls(), slices, **options)):
        for index, row in enumerate(batch):
            for purpose, drawn in ((1, row[:2]), (0, row[2:])):
                generator = torch.Generator().manual_seed(key(5, epoch, index, purpose))
                assert torch.equal(drawn, torch.rand(2, generator=generator))


@pytest.mark.grid
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("options", [{"augment": augment}, {}])
def test_a_sample_has_the_same_values_whatever_slice_it_comes_in(processes, options):
    (whole,) = batches(Drawing(), [Slice(2, 0, 60)], processes=processes, **options)
    cuts = [Slice(2, first, first + 10) for first in range(0, 60, 10)]
    parts = batches(Drawing(), cuts, processes=processes, **options)
    assert torch.equal(whole[0], torch.cat([inputs for inputs, _ in parts]))
    (other,) = batches(Drawing(), [Slice(3, 0, 60)], processes=processes, **options)
    assert not torch.equal(whole[0].sort()[0], other[0].sort()[0])


class Seldom(Plain):
    """Draws for a few of its samples, none of them among the first."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        if index % 40 == 39:
            inputs = inputs + random.random() + np.random.randn() + torch.rand(3)
        return inputs, target


@pytest.mark.grid(1)
@pytest.mark.parametrize("dataset", [Seldom(), type("ManySeldom", (Many, Seldom), {})()])
def test_samples_that_draw_are_keyed_although_those_before_them_drew_nothing(dataset):
    options = {"shuffle": False, "augment": augment}
    cuts = [[Slice(1, 0, 100)], [Slice(1, n, n + 1) for n in range(100)]]
    wholes = []
    for processes in (0, 1, 3, "auto"):
        for slices in cuts:
            before = DrawDetector()
            got = batches(dataset, slices, processes=processes, **options)
            assert not before.drawn()
            wholes.append(torch.cat([inputs for inputs, _ in got]))
            torch.rand(1), np.random.randn(), random.random()  # their positions must not matter
    assert all(torch.equal(wholes[0], whole) for whole in wholes)
    assert not torch.equal(wholes[0][39], batches(Plain(), [Slice(1, 39, 40)], **options)[0][0][0])


def test_the_users_own_code_never_runs_in_a_thread_beside_training():
    class Threads(Plain):
        def __getitem__(self, index):
            time.sleep(0.001)
            return torch.tensor(threading.current_thread() is threading.main_thread())

    for processes in (0, 1, "auto"):
        assert all(batch.all() for batch in batches(Threads(), [SLICES[0]], processes=processes))


def states():
    return torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.randn, torch.rand])
def test_a_draw_is_detected_and_undone(draw):
    for left_over in (False, True):
        if left_over:
            np.random.seed(0), np.random.randn()  # the second of the pair is kept
        detector, before = DrawDetector(), states()
        for _ in range(3):
            detector.remember()
            assert not detector.drawn()
            draw(1) if draw is torch.rand else draw()
            assert detector.drawn()
            assert detector.drawn_beside_torch() == (draw is not torch.rand)
            detector.restore()
            assert str(states()) == str(before)


@pytest.mark.parametrize("processes", [0, 2, "auto"])
def test_the_generators_of_the_caller_are_left_as_they_were(processes):
    before = DrawDetector()
    batches(Drawing(), processes=processes)
    assert not before.drawn()


@pytest.mark.parametrize("dataset", [Plain(), Many(), Nested(), TENSORS])
def test_batches_are_those_of_torchs_own_loader(dataset):
    slices = [Slice(0, first, min(first + 16, 100)) for first in range(0, 100, 16)]
    expected = list(DataLoader(dataset, batch_size=16))
    assert same(batches(dataset, slices, shuffle=False), expected)


def test_a_subset_of_tensors_gives_what_its_samples_say():
    dataset = Subset(Subset(TENSORS, range(50, 100)), [3, 1, 4, 1, 5])
    (batch,) = batches(dataset, [Slice(0, 0, 5)], shuffle=False)
    assert same(batch, default_collate([dataset[index] for index in range(5)]))


@pytest.mark.grid
@pytest.mark.parametrize(
    "indices",
    [
        [-1, 3, -50],
        torch.tensor([-1, 3]),
        np.array([2, -2]),
        (5, -1),
        [True, False],
        [torch.tensor(3), 4],
        range(-3, 0),
    ],
)
@pytest.mark.parametrize("inner", [TENSORS, Plain(), Many()])
def test_a_strange_index_means_what_it_means_in_pytorch(inner, indices):
    dataset = Subset(Subset(inner, range(100)), indices)
    assert same(
        batches(dataset, [Slice(0, 0, len(indices))], shuffle=False),
        list(DataLoader(dataset, batch_size=len(indices))),
    )


@pytest.mark.parametrize("indices", [[3, 100], [0, -101], [0.5, 1], ["1", "2"]])
@pytest.mark.parametrize("processes", [0, 1])
def test_an_index_that_pytorch_refuses_is_refused(indices, processes):
    dataset = Subset(TENSORS, indices)
    with pytest.raises((IndexError, TypeError)):
        list(DataLoader(dataset, batch_size=2))
    with pytest.raises(DataError, match=r"cannot be read: (IndexError|TypeError)"):
        batches(dataset, [Slice(0, 0, 2)], shuffle=False, processes=processes)


def test_the_last_window_of_a_text_is_the_last_for_a_negative_index_too(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(101)))
    windows = text(tmp_path / "text", 10)
    (batch,) = batches(Subset(windows, [-1, 0]), [Slice(0, 0, 2)], shuffle=False)
    assert batch[0][:, 0].tolist() == [90, 0]


def test_a_subclass_that_changes_a_sample_is_asked_for_samples():
    class Doubled(Many):
        def __getitem__(self, index):
            return index * 2

    class Tripled(TensorDataset):
        def __getitem__(self, index):
            return self.tensors[0][index] * 3

    (batch,) = batches(Doubled(), [Slice(0, 0, 4)], shuffle=False)
    assert batch.tolist() == [0, 2, 4, 6]
    (batch,) = batches(Tripled(*TENSORS.tensors), [Slice(0, 0, 4)], shuffle=False)
    assert torch.equal(batch, TENSORS.tensors[0][:4] * 3)


def test_tensors_that_numpy_does_not_know_are_read_too():
    dataset = TensorDataset(torch.randn(10, 2).bfloat16())
    (batch,) = batches(dataset, [Slice(0, 2, 5)], shuffle=False)
    assert torch.equal(batch[0], dataset.tensors[0][2:5])


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_handful_of_slow_samples_is_read(samples):
    """Two milliseconds each: slow enough to measure processes, and too few to race them."""
    dataset = TensorDataset(torch.arange(samples)[:, None].expand(-1, 2_000_000).contiguous())
    (batch,) = batches(dataset, [Slice(0, 0, samples)], shuffle=False)
    assert batch[0][:, -1].tolist() == list(range(samples))


def test_a_batch_is_the_callers_own():
    dataset = TensorDataset(torch.zeros(8, 2))
    for processes in (0, 1):
        first, second = batches(dataset, [Slice(0, 0, 8)] * 2, processes=processes)
        first[0].fill_(1)
        assert dataset.tensors[0].sum() == second[0].sum() == 0


def test_collate_decides_what_a_batch_is():
    for processes in (0, 1):
        got = batches(Plain(), [Slice(0, 0, 3)], shuffle=False, processes=processes, collate=len)
        assert got == [3]


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("dataset", [Raising(), type("ManyRaising", (Many, Raising), {})()])
def test_a_sample_that_raises_is_named_with_its_cause_and_the_users_line(dataset, processes):
    slices = [Slice(0, first, first + 10) for first in range(0, 100, 10)]
    options = {"seed": 5, "shuffle": False, "processes": processes}
    with closing(Loader(dataset, **options)) as loader:
        loaded = load(loader, slices)
        for _ in range(7):
            next(loaded)
        with pytest.raises(DataError) as caught:
            next(loaded)
    text = str(caught.value)
    assert text.startswith("sample 70 cannot be read: ValueError: pixel of 70 is purple (")
    line = Raising.__getitem__.__code__.co_firstlineno + 2
    assert f"datasets.py:{line} in __getitem__)" in text
    assert "purple" in str(caught.value.__cause__)


@pytest.mark.parametrize("processes", [0, 2])
def test_an_augmentation_that_raises_is_named_too(processes):
    def wrong(sample, generator):
        return sample[0] @ torch.zeros(4) if sample[0][0] == 70 else sample

    with pytest.raises(
        DataError, match=r"sample 70 cannot be augmented: RuntimeError: .*loader.py:"
    ):
        batches(Plain(), [Slice(0, 60, 80)], shuffle=False, augment=wrong, processes=processes)


@pytest.mark.parametrize("processes", [0, 2])
def test_samples_that_cannot_be_stacked_are_named_with_their_shapes(processes):
    message = r"sample 70 cannot be stacked with sample 66: it is \(float32 \[4\], int\), .* \[3\]"
    with pytest.raises(DataError, match=message):
        batches(Uneven(), [Slice(0, 66, 72)], shuffle=False, processes=processes)


def test_a_sample_that_is_bad_from_the_start_is_named_when_the_loader_is_made():
    with pytest.raises(DataError, match="sample 0 cannot be read"):
        Loader(Raising(bad=0), seed=1, shuffle=False)


def test_samples_that_differ_are_no_error_where_no_slice_stacks_them():
    slices = [Slice(0, index, index + 1) for index in range(100)]
    for processes in (0, "auto"):
        got = batches(Uneven(), slices, shuffle=False, processes=processes)
        assert [inputs.shape[1] for inputs, _ in got] == [3] * 70 + [4] + [3] * 29


class Iterable:
    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "has no samples"),
        (Iterable(), "no __getitem__"),
        (type("A", (Plain,), {"__len__": None})(), "needs __len__"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset, message):
    with pytest.raises(DataError, match=message):
        Loader(dataset, seed=1, shuffle=True)


def test_the_wrong_number_of_samples_at_once_is_refused():
    class Short(Many):
        def __getitems__(self, indices):
            return super().__getitems__(indices)[:1]

    with pytest.raises(DataError, match="asked for 2 samples and gave 1"):
        batches(Short(), [Slice(0, 0, 2)])


def every_read_takes(seconds, monkeypatch):
    """Set the clock that decides how to read, whatever the machine."""
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: seconds * next(ticks), process_time=lambda: 0.0)
    monkeypatch.setattr("instep.data.reading.choose.time", clock)


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("instep-loader")]


def test_no_thread_outlives_the_generator_or_the_loader(monkeypatch):
    every_read_takes(1e-3, monkeypatch)  # too slow to be read inside the step
    loader = Loader(TENSORS, seed=1, shuffle=True, processes=0)
    first, second = (load(loader, (Slice(0, i, i + 1) for i in range(100))) for _ in range(2))
    next(first), next(second)
    assert len(loader_threads()) == 2
    first.close()
    assert len(loader_threads()) == 1
    loader.close()
    assert loader_threads() == []
    assert list(second) == []
    loader.close()


def test_only_a_few_slices_are_asked_for_ahead():
    asked = []
    for processes in (0, 2):
        asked.clear()
        with closing(Loader(Plain(), seed=1, shuffle=True, processes=processes)) as loader:
            loaded = load(loader, (asked.append(i) or Slice(0, i, i + 1) for i in range(100)))
            next(loaded)
            assert len(asked) <= 5


def test_cheap_samples_stay_in_the_process(monkeypatch):
    every_read_takes(1e-5, monkeypatch)
    with closing(Loader(TENSORS, seed=1, shuffle=True)) as loader:
        assert loader.mode in ("inline", "ahead")  # by the time that 32 samples took
        assert loader.pids == []
        assert "less than 0.2 ms" in loader.why
