"""Each batch is given out until it is done, whoever is lost with it."""

import random

import pytest

from instep.client.predict.batches import IN_HAND, MOST_KILLED, MOST_OWN, START, PredictBatches
from instep.comm.protocol.messages import Whereabouts


def batches(samples=101, size=8, done=(), skip=False):
    made = PredictBatches(done, size, skip=skip)
    made.count(samples)
    return made


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_batch_is_done_once_whoever_is_lost(size):
    draw = random.Random(3)
    made, hands, times = batches(), {n: [] for n in range(3)}, dict.fromkeys(range(13), 0)
    while not made.complete:
        replica = draw.randrange(3)
        hands[replica] += made.take(len(hands[replica]), 3, 0, size)
        assert len(hands[replica]) <= IN_HAND
        if draw.random() < 0.3:
            made.give_back(number for turn in hands[replica] for number in turn)
            hands[replica] = []
        elif hands[replica]:
            for number in hands[replica].pop(0):
                times[number] += 1
                made.done.add(number)
    assert set(times.values()) == {1}
    assert made.take(0, 3, 0) == []


def test_a_turn_is_as_long_as_there_are_batches():
    made = batches()
    assert made.take(0, 1, 0, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert made.take(3, 1, 0, 4) == []
    assert made.take(2, 1, 0, 4) == []
    assert made.take(0, 1, 0, 4) == [[12]]


def test_what_another_has_done_meanwhile_is_not_given_out_again():
    made = batches(samples=32)
    (turn,) = made.take(0, 2, 0, 2)
    made.give_back(turn)
    made.done.add(0)
    assert made.take(0, 1, 0, 2) == [[1, 2], [3]]


def test_what_is_there_is_not_done_again_and_what_is_not_of_this_dataset_does_not_count():
    made = batches(done={0, 1, 40})
    assert (made.total, made.before) == (13, 2)
    assert made.take(0, 1, 0) == [[2], [3], [4], [5]]
    made.give_back([3, 5])
    assert made.take(0, 1, 0) == [[3], [5], [6], [7]]


def test_few_that_are_left_are_shared():
    made = batches(samples=32)
    assert [made.take(0, 3, 0) for _ in range(5)] == [[[0]], [[1]], [[2]], [[3]], []]


def test_it_gives_up_when_workers_are_lost_at_one_batch_and_not_when_at_many():
    made = batches()
    lost = [made.lost(at, "it fell", None, own=True, dies=True) for at in range(13)]
    assert not any(lost)
    again = [made.lost(4, "it fell", None, own=True, dies=True) for _ in range(MOST_OWN - 1)]
    assert again == [False, True]
    assert made.said(4) == "3 workers ended at batch 4 (samples 32 to 39)"
    assert made.times(4) == made.most_times == 3
    killed = [made.lost(5, "", None, own=False, dies=False) for _ in range(MOST_KILLED)]
    assert killed == [False] * 9 + [True]
    assert not batches().complete
    assert made.said(12) == "1 worker ended at batch 12 (samples 96 to 100)"


def test_a_start_that_succeeds_is_forgotten():
    made = batches()
    for _ in range(5):
        assert not made.lost(START, "it fell", None, own=True, dies=True)
        made.starts()


def test_a_batch_that_kills_goes_to_a_worker_that_knows_its_sample():
    made = batches(skip=True)
    place = Whereabouts(dataset="validation", sample=3)
    (hand,) = made.take(0, 13, 0)
    for _ in range(MOST_OWN):
        assert not made.lost(0, "it fell", place, own=True, dies=True)
    made.give_back(hand)
    assert made.take(0, 13, 0) == [[1]]
    assert made.take(0, 13, made.deadly.changes) == [[0]]
