"""A dataset is recognised by its fingerprint, also if some of its samples never repeat."""

import random

import pytest
import torch
from datasets import Plain

from instep.data.reading.fetch import Fetch
from instep.data.samples.fingerprint import LEAST, SAMPLES, confirmed_fingerprint, fingerprint
from marks import tail


class Coins(Plain):
    """Some samples hold one of two things each time, as with a random flip of their own."""

    def __init__(self, seed, *, flipped, changed=()):
        super().__init__(SAMPLES)
        self.own, self.flipped, self.changed, self.reads = random.Random(seed), flipped, changed, 0

    def __getitem__(self, index):
        self.reads += 1
        coin = self.own.random() < 0.5 if index in self.flipped else False
        return torch.tensor([index, coin, index in self.changed])


def STILL():
    """A clock: how much is read does not depend on the machine."""
    return 0.0


def readings(dataset):
    fetch = Fetch(dataset, seed=5, shuffle=True)
    return lambda: fingerprint(fetch.samples, fetch.seed, fetch.content, clock=STILL)


def again(before, dataset):
    return confirmed_fingerprint(readings(dataset), before, clock=STILL)


def test_all_contents_are_compared_where_all_repeat():
    before = readings(Coins(1, flipped=()))()
    assert before.changes(again(before, Coins(2, flipped=()))) == []
    assert before.changes(again(before, Coins(2, flipped=(), changed=[3]))) == [3]


def test_one_reading_shows_that_samples_do_not_repeat():
    assert readings(Coins(1, flipped=range(SAMPLES)))().differed
    assert readings(Coins(1, flipped=()))().differed == []


@pytest.mark.parametrize("seed", [*range(3), *map(tail, range(3, 20))])
@pytest.mark.parametrize("flipped", [range(SAMPLES), range(0, SAMPLES, 4)])
def test_samples_that_do_not_repeat_never_make_it_another_dataset(seed, flipped):
    before = readings(Coins(seed, flipped=flipped))()
    assert before.same_as(again(before, Coins(100 + seed, flipped=flipped)))


@pytest.mark.parametrize("seed", [*range(3), *map(tail, range(3, 20))])
def test_samples_that_do_not_repeat_hide_no_change_of_the_others(seed):
    flipped, changed = range(0, SAMPLES, 4), range(1, SAMPLES, 4)
    before = readings(Coins(seed, flipped=flipped))()
    now = again(before, Coins(100 + seed, flipped=flipped, changed=changed))
    assert set(before.changes(now)) == set(changed)
    assert not before.same_as(now)


def test_of_a_dataset_in_which_nothing_repeats_the_length_alone_is_compared():
    class Fresh(Coins):
        def __getitem__(self, index):
            return torch.tensor([self.own.random()])

    before = readings(Fresh(1, flipped=()))()
    assert before.same_as(again(before, Fresh(2, flipped=())))
    assert not before.same_as(readings(Plain(SAMPLES + 1))())


def test_a_few_slow_samples_are_compared():
    """Each takes 0.2 s, so that half a second is used up with the third."""
    dataset = Coins(1, flipped=())
    fetch = Fetch(dataset, seed=5, shuffle=True)
    found = fingerprint(fetch.samples, fetch.seed, fetch.content, clock=lambda: 0.2 * dataset.reads)
    assert len(found.contents) == LEAST == 4
    changed, unread = (
        found.contents[0][0],
        [i for i in range(SAMPLES) if i not in dict(found.contents)],
    )
    for which, same in (([changed], False), (unread, True)):
        assert found.same_as(again(found, Coins(1, flipped=(), changed=which))) == same


def test_the_readings_before_a_refusal_end_in_time():
    dataset = Coins(1, flipped=(), changed=[3])
    before = readings(Coins(1, flipped=()))()
    now = confirmed_fingerprint(readings(dataset), before, clock=lambda: 0.1 * dataset.reads)
    assert before.changes(now) == [3]
    assert dataset.reads < 3 * 2 * SAMPLES
