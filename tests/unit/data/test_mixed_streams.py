"""Streams that are mixed come in the shares that the job says, each as by itself."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import instep
from instep.data.reading.streams.mixed import JoinedStreams, MixedStreams
from instep.data.reading.streams.shares import MixedPlan, MixedTurns
from instep.data.reading.streams.turns import StreamPlan
from instep.errors import DataError, RecipeError, SpecError
from instep.job.data import DataSpec
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.worker.reading.planned_data import plan_data
from instep.worker.reading.streamed import with_stream

WINDOW = 5


def plan_of(sizes, planned):
    """Counted streams; sizes of the parts of each."""
    plans = tuple(
        StreamPlan(len(each), WINDOW, True, each, sum(each), number, len(sizes))
        for number, each in enumerate(sizes)
    )
    every = sum(planned)
    return MixedPlan(plans, tuple(n / every for n in planned), tuple(planned), every)


def endless(shares, samples, parts=2):
    plans = tuple(
        StreamPlan(parts, WINDOW, True, None, samples, number, len(shares))
        for number in range(len(shares))
    )
    return MixedPlan(plans, tuple(n / sum(shares) for n in shares), None, samples)


@settings(max_examples=60, deadline=None)
@given(
    sizes=some.lists(
        some.lists(some.integers(0, 30), min_size=1, max_size=3).filter(any), min_size=1, max_size=4
    ),
    planned=some.lists(some.integers(1, 60), min_size=4, max_size=4),
    batch=some.integers(1, 17),
    seed=some.integers(0, 5),
)
def test_each_sample_comes_the_floor_or_the_ceiling_of_its_mean(sizes, planned, batch, seed):
    plan = plan_of([tuple(each) for each in sizes], planned[: len(sizes)])
    order, epochs = MixedTurns(plan, seed, batch), 3
    taken = [order.indices(epoch, 0, plan.samples).tolist() for epoch in range(epochs)]
    for source, (own, count) in enumerate(zip(sizes, plan.planned, strict=True)):
        for each in taken:
            assert sum(number % len(sizes) == source for number in each) == count
        times = np.unique([n for each in taken for n in each if n % len(sizes) == source])
        places = [plan.place(int(n)) for n in times]
        assert all(place.at < own[place.part] for place in places)
        # numbers tell the pass too, so none comes twice, and passes are begun when one is over
        assert len(times) == epochs * count
        passes = np.bincount([place.epoch for place in places])
        assert (passes[:-1] == sum(own)).all()


@pytest.mark.parametrize("mixed", [plan_of([(40, 35), (9,)], [70, 30]), endless([7, 3], 100)])
def test_every_stretch_has_the_streams_in_proportion_and_may_be_asked_for_by_itself(mixed):
    order = MixedTurns(mixed, 3, 16)
    whole = order.indices(0, 0, 100)
    of_second = np.cumsum(whole % 2)
    assert abs(of_second - 0.3 * np.arange(1, 101)).max() < 16  # a step has them stream by stream
    assert abs(of_second[15::16] - 0.3 * np.arange(16, 101, 16)).max() <= 1
    for first, stop in ((0, 7), (5, 33), (16, 32), (90, 100), (40, 40)):
        assert order.indices(0, first, stop).tolist() == whole[first:stop].tolist()


def test_where_streams_never_end_more_steps_are_a_longer_beginning_of_the_same():
    short, long = (MixedTurns(endless([5, 1, 2], count), 3, 16) for count in (160, 400))
    places = [
        [(*order.plan.place(n), n % 3) for n in order.indices(0, 0, 160).tolist()]
        for order in (short, long)
    ]
    assert places[0] == places[1]


class Words(IterableDataset):
    def __init__(self, name, count, long=1):
        self.name, self.count, self.long = name, count, long

    def __iter__(self):
        info = get_worker_info()
        assert info is not None
        for number in range(info.id, self.count, info.num_workers):
            yield [self.name, number, *range(self.long)]


def recipe(train=None, **more):
    streams = {"web": Words("web", 300), "books": Words("books", 40, long=5)}
    return instep.Recipe(
        model=nn.Linear(1, 1),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        train=streams if train is None else train,
        **more,
    )


def job(*sources, train=None, **data):
    return JobSpec(
        recipe="a.py:recipe",
        seed=3,
        train=TrainSpec(global_batch=8, micro_batches=2, **(train or {"epochs": 2})),
        data=DataSpec(sources=sources, parts=2, loaders=0, **data),
    )


HALVES = {"name": "books", "weight": 1}, {"name": "web", "weight": 1}


def test_streams_of_a_recipe_are_divided_and_mixed_as_the_job_says():
    assert isinstance(recipe().train, JoinedStreams)
    made = with_stream(job(*HALVES), recipe())
    data = made.train
    assert isinstance(data, MixedStreams)
    assert data.plan.sizes == (150, 150, 20, 20)
    assert plan_data(job(*HALVES), made).balanced["planned"] == [170, 170]
    numbers = MixedTurns(data.plan, 3, 8).indices(0, 0, 340).tolist()
    random.Random(1).shuffle(numbers)
    rows = data.__getitems__(numbers)
    for number, (name, place, *_) in zip(numbers, rows, strict=True):
        part, _, at = data.plan.place(number)
        assert (name, place) == (data.names[number % 2], 2 * at + part)
    assert "of the stream 'books', in epoch" in data.named(1)


def test_shares_of_tokens_follow_from_the_first_samples():
    tokens = [dict(each, of="tokens") for each in HALVES]
    made = with_stream(job(*tokens), recipe(length=lambda rows, place: len(rows[place])))
    assert made.train.plan.shares == pytest.approx((7 / 10, 3 / 10), abs=0.01)
    with pytest.raises(RecipeError, match="weights of tokens, and nobody says how long"):
        with_stream(job(*tokens), recipe())


ENDS = {"name": "books", "when_exhausted": "end"}, {"name": "web"}


def test_a_stream_may_end_the_epoch():
    assert with_stream(job(*ENDS), recipe()).train.plan.planned == (40, 40)
    with pytest.raises(SpecError, match=r"'books' has when_exhausted = 'end', and with train\.st"):
        with_stream(job(*ENDS, train={"steps": 9}), recipe())


@pytest.mark.parametrize(
    ("sources", "train", "error", "message"),
    [
        ((), None, SpecError, r"several datasets \(web, books\), and the job does not say"),
        (({"name": "web"},), None, SpecError, "does not name books of"),
        (
            ({"name": "a"}, {"name": "b"}),
            {"a": Words("a", 5), "b": Words("b", 0)},
            DataError,
            "the stream 'b' of Recipe.train has no sample",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sources, train, error, message):
    with pytest.raises(error, match=message):
        with_stream(job(*sources), recipe(train))


def test_datasets_with_a_length_and_streams_are_not_mixed():
    with pytest.raises(RecipeError, match="of map-style ones that are no lists, or of streams"):
        recipe({"web": Words("web", 5), "books": torch.utils.data.TensorDataset(torch.zeros(3))})
