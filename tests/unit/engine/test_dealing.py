"""Who is slow gets less, who has recovered gets its share again, and equal workers keep theirs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from instep.data.dealing import deal
from instep.engine.dealing import FEW, FEW_S, PAUSE, TRIAL, TRIAL_SHARE, WINDOW, Dealing

STEP_S, SAMPLES = 0.001, 3  # of a micro-batch, on a worker of speed 1


def counts_of(dealing, workers, parts):
    return [len(share) for share in deal(parts, workers, dealing.speeds)]


def train(speed, workers, parts, steps, *, noise=0.0, seed=0, dealing=None, part_s=STEP_S):
    """Steps of workers whose speed is `speed(step, worker)`, and what a Dealing made of them.

    Returns:
        The dealing, its changes as (step, why, counts), and the seconds of each step.
    """
    dice, dealing = random.Random(seed), dealing or Dealing(workers)
    changes, took = [], []
    for step in range(1, steps + 1):
        counts = counts_of(dealing, workers, parts)
        seconds = [
            n * part_s / speed(step, worker) * dice.lognormvariate(0, noise)
            for worker, n in enumerate(counts)
        ]
        took.append(max(seconds))
        why = dealing.after_step(seconds, [n * SAMPLES for n in counts], parts)
        if why:
            changes.append((step, why, counts_of(dealing, workers, parts)))
        else:
            assert counts_of(dealing, workers, parts) == counts
    return dealing, changes, took


def slow(which, speed, until=10**9):
    return lambda step, worker: speed if worker == which and step < until else 1.0


@pytest.mark.parametrize(
    ("speeds", "parts", "counts"),
    [
        ((1, 0.25, 1, 1), 32, [10, 2, 10, 10]),
        ((1, 0.2, 1, 1), 32, [10, 2, 10, 10]),
        ((0.2, 1), 8, [1, 7]),
        ((1, 1, 1, 0.2), 4, [1, 1, 2, 0]),
        ((1, 2, 4), 21, [3, 6, 12]),
        ((1, 0.99, 1.01), 30, [10, 10, 10]),  # not worth a change
        ((1, 0.5), 2, [1, 1]),  # nor possible
    ],
)
def test_work_is_dealt_by_speed_after_two_windows_and_then_stays(speeds, parts, counts):
    _, changes, took = train(lambda _, worker: speeds[worker], len(speeds), parts, PAUSE)
    even = [len(share) for share in deal(parts, len(speeds))]
    if counts == even:
        assert changes == []
        return
    [(step, why, dealt)] = changes
    assert (step, why) == (1 + 2 * WINDOW, "speed")
    assert sorted(dealt) == sorted(counts)
    assert took[-1] < 0.95 * took[0]


def test_in_long_steps_few_are_enough_for_a_large_difference_and_not_for_a_small_one():
    _, changes, _ = train(slow(1, 0.25), 4, 32, 100, part_s=FEW_S)
    assert [(step, dealt) for step, _, dealt in changes] == [(1 + 2 * FEW, [10, 2, 10, 10])]
    _, changes, _ = train(slow(1, 0.8), 4, 32, 100, part_s=FEW_S)
    assert [(step, dealt) for step, _, dealt in changes] == [(1 + 2 * WINDOW, [9, 7, 8, 8])]


def test_one_of_four_slowed_four_times_costs_what_it_lacks_and_no_more():
    _, _, took = train(slow(1, 0.25), 4, 32, 200)
    ideal = 32 * STEP_S / 3.25
    assert ideal / took[-1] > 0.98


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
@pytest.mark.parametrize(("workers", "parts"), [(2, 8), (4, 8), (4, 32), (3, 24), (8, 64)])
def test_equal_workers_keep_the_even_deal_however_their_times_scatter(workers, parts, noise):
    for seed in range(5):
        dealing, changes, _ = train(lambda *_: 1.0, workers, parts, 1000, noise=noise, seed=seed)
        assert changes == []
        assert dealing.speeds is None


def test_hitches_that_hit_one_worker_now_and_then_change_nothing():
    def speed(step, worker):
        return 0.05 if worker == 2 and step % 5 == 0 else 1.0

    _, changes, _ = train(speed, 4, 32, 500)
    assert changes == []


def test_steps_too_short_to_tell_change_nothing():
    _, changes, _ = train(slow(0, 0.25), 2, 8, 200, part_s=1e-5)
    assert changes == []


def test_the_first_step_does_not_count():
    """A process warms up in it."""
    _, changes, _ = train(slow(0, 1e-3, until=2), 2, 8, 100)
    assert changes == []


def test_whoever_recovers_gets_an_even_share_again():
    dealing, changes, _ = train(slow(1, 0.25, until=100), 4, 32, 200)
    assert [dealt for _, _, dealt in changes] == [[10, 2, 10, 10], [8, 8, 8, 8]]
    assert dealing.speeds is None


def test_a_worker_without_work_is_tried_again_now_and_then_at_little_cost():
    _, changes, took = train(slow(1, 0.2), 4, 4, 1000)
    assert changes[0][2][1] == 0
    trials = [step for step, why, counts in changes if why == "trial" and counts[1] == 1]
    assert len(trials) >= 3
    ends = [step for step, why, counts in changes[1:] if why == "speed" and counts[1] == 0]
    assert ends == [step + 1 + TRIAL for step in trials]
    best = 2 * STEP_S
    assert sum(took[50:]) < (1 + 1.5 * TRIAL_SHARE) * best * len(took[50:])


def test_a_worker_without_work_that_has_recovered_gets_its_share():
    dealing, changes, _ = train(slow(1, 0.2, until=300), 4, 4, 1000)
    assert changes[-1][2] == [1, 1, 1, 1]
    assert dealing.speeds is None


def test_of_several_without_work_each_is_tried_in_its_turn():
    def speed(step, worker):
        return 0.2 if worker in (0, 2) else 1.0

    _, changes, _ = train(speed, 4, 4, 2000)
    trials = [counts for _, why, counts in changes if why == "trial"]
    tried = [[worker for worker in (0, 2) if counts[worker]] for counts in trials]
    assert tried[:4] == [[0], [2], [0], [2]]


def test_short_steps_between_do_not_disturb():
    """The last of an epoch has fewer micro-batches; some workers may have none in it."""
    dealing, workers = Dealing(4), 4
    for step in range(1, 100):
        parts = 3 if step % 4 == 0 else 32
        counts = counts_of(dealing, workers, parts)
        seconds = [n * STEP_S / (0.25 if w == 3 else 1) for w, n in enumerate(counts)]
        dealing.after_step(seconds, [n * SAMPLES for n in counts], parts)
    assert counts_of(dealing, workers, 32) == [10, 10, 10, 2]
    assert counts_of(dealing, workers, 3) == [1, 1, 1, 0]


def test_where_no_step_has_work_for_all_the_even_deal_stays():
    dealing = Dealing(4)
    for _ in range(100):
        counts = [len(share) for share in deal(2, 4)]
        assert not dealing.after_step([n * STEP_S for n in counts], counts, 2)


@pytest.mark.parametrize(("workers", "by_speed"), [(1, True), (4, False)])
def test_alone_or_unwanted_it_deals_evenly(workers, by_speed):
    _, changes, _ = train(
        slow(0, 0.1), workers, 32, 200, dealing=Dealing(workers, by_speed=by_speed)
    )
    assert changes == []


@settings(max_examples=50)
@given(
    speeds=some.lists(some.floats(0.02, 5.0), min_size=2, max_size=6),
    more=some.integers(0, 20),
    noise=some.sampled_from([0.0, 0.1, 0.5]),
    seed=some.integers(0, 100),
)
def test_equal_figures_give_equal_deals_that_are_whole_and_never_much_worse_than_even(
    speeds, more, noise, seed
):
    workers, parts = len(speeds), len(speeds) + more
    runs = [
        train(lambda _, w: speeds[w], workers, parts, 120, noise=noise, seed=seed) for _ in range(2)
    ]
    assert runs[0][1] == runs[1][1]
    for _, _, counts in runs[0][1]:
        assert sum(counts) == parts
        assert min(counts) >= 0
    if not noise:
        even = max(n / s for n, s in zip(map(len, deal(parts, workers)), speeds, strict=True))
        took = runs[0][2]
        trial = {step for step, why, _ in runs[0][1] if why == "trial"}
        for step, seconds in enumerate(took, 1):
            if not any(step - 1 - TRIAL - 1 <= at < step for at in trial):
                assert seconds <= even * STEP_S * (1 + 1e-9)
