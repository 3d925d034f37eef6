"""Whether classes come one after the other is seen on labels alone."""

import numpy as np
import pytest

from instep.data.mixing import mixing
from instep.data.shard_sizes import blocks
from instep.data.windowed import Windowed

SAMPLES, WINDOW = 40_000, 2_000


def labels(how: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    match how:
        case "rare":
            return (np.arange(SAMPLES) < SAMPLES // 100).astype(int)
        case "many":
            return np.arange(SAMPLES) * 1000 // SAMPLES
        case "words":
            return np.array(["a", "b", "c", "d"])[np.arange(SAMPLES) * 4 // SAMPLES]
        case _:
            return rng.permutation(np.arange(SAMPLES) * int(how) // SAMPLES)


@pytest.mark.grid(2)
@pytest.mark.parametrize("each", [64, 1024])
@pytest.mark.parametrize(
    ("how", "sorted_", "poor"),
    [
        ("10", True, True),
        ("2", True, True),
        ("many", False, True),
        ("words", False, True),
        ("10", False, False),
        ("2", False, False),
        ("1000", False, False),
    ],
)
def test_sorted_classes_are_told_from_shuffled_ones(how, sorted_, poor, each):
    column = labels(how)
    column = np.sort(column) if sorted_ else column
    order = Windowed(blocks(SAMPLES, WINDOW), WINDOW, 1)
    found = mixing(order, SAMPLES, 1, WINDOW, lambda i: column[i].tolist(), each=each)
    assert found is not None
    told = how != "many" or each > 64  # 64 labels of a window are too few to tell 1,000 classes
    assert found.poor == (poor and told)
    if how == "10":
        assert found.here == pytest.approx(1 if sorted_ else found.shuffled, rel=0.05)


def test_a_rare_class_that_comes_all_at_once_is_seen_where_a_window_has_it():
    column = labels("rare")
    order = Windowed([SAMPLES], WINDOW, 1)  # the first window has them all
    for each in (64, 1024):
        found = mixing(order, SAMPLES, 1, WINDOW, lambda i: column[i].tolist(), each=each)
        assert found is not None
        assert found.poor
        for seed in range(20):
            mixed = np.random.default_rng(seed).permutation(column)
            found = mixing(order, SAMPLES, 1, WINDOW, lambda i, c=mixed: c[i].tolist(), each=each)
            assert found is not None
            assert not found.poor


def test_lanes_mix_sorted_classes():
    column = np.sort(labels("10"))
    found = [
        mixing(
            Windowed(blocks(SAMPLES, 100), WINDOW, 1, batch=64, lanes=lanes),
            SAMPLES,
            1,
            WINDOW,
            lambda i: column[i].tolist(),
        )
        for lanes in (1, 4, 16)
    ]
    told = [each.told for each in found if each is not None]
    assert told[0] > told[1] > told[2]


def test_nothing_is_said_of_one_class_or_one_window():
    order = Windowed([SAMPLES], WINDOW, 1)
    assert mixing(order, SAMPLES, 1, WINDOW, lambda i: [0] * len(i)) is None
    assert mixing(order, SAMPLES, 1, SAMPLES, lambda i: i.tolist()) is None
