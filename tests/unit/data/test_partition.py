"""Every scheme divides a dataset, and the orders of its parts are permutations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.order import Order, key, keys
from instep.data.participants import OwnRounds, Sampling
from instep.data.partition import PARTITIONS
from instep.data.partition.regions import Regions
from instep.errors import RecipeError, SpecError

quick = settings(max_examples=50, deadline=None)


def column_of(scheme, samples, participants, seed=0):
    draw = np.random.default_rng(seed)
    return draw.integers(
        0, {"labels": 7, "owner": participants, "parts": participants}.get(scheme, 1), samples
    )


def dealt(scheme, samples=100, participants=5, skew=0.5, seed=0):
    column = column_of(scheme, samples, participants)
    return PARTITIONS[scheme](samples, participants, column=column, skew=skew, seed=seed)


@pytest.mark.parametrize("scheme", PARTITIONS)
@quick
@given(samples=st.integers(1, 80), participants=st.integers(1, 12), seed=st.integers(0, 99))
def test_a_scheme_gives_every_sample_to_one_participant(scheme, samples, participants, seed):
    shares = dealt(scheme, samples, participants, seed=seed)
    assert len(shares) == participants
    assert all(list(share) == sorted(share) for share in shares)
    every = sorted(index for share in shares for index in share)
    assert every == list(range(samples))
    again = dealt(scheme, samples, participants, seed=seed)
    assert [list(share) for share in again] == [list(share) for share in shares]


def test_blocks_differ_by_one_at_most():
    sizes = [len(share) for share in dealt("blocks", 103, 10)]
    assert (min(sizes), max(sizes)) == (10, 11)


def test_participants_at_random_are_alike():
    """Classes and participants are independent, by a chi-square test, also of blocks in order."""
    column = np.arange(7000) // 1000
    for seed in range(20):
        parts = PARTITIONS["random"](7000, 10, column=None, skew=1.0, seed=seed)
        assert {len(part) for part in parts} == {700}
        counts = np.stack([np.bincount(column[part], minlength=7) for part in parts])
        assert abs(((counts - 100) ** 2 / 100).sum() - 9 * 6) < 5 * (2 * 9 * 6) ** 0.5


def test_owners_get_what_the_column_says():
    column = np.array([2, 0, 2, 1, 0])
    shares = PARTITIONS["owner"](5, 4, column=column, skew=1.0, seed=0)
    assert [share.tolist() for share in shares] == [[1, 4], [3], [0, 2], []]
    with pytest.raises(RecipeError, match=r"owners says 2 of sample 0.*from 0 to 1\. Number"):
        PARTITIONS["owner"](5, 2, column=column, skew=1.0, seed=0)


def shares_of_classes(skew, samples=7000, participants=20, seed=0):
    """[participants, classes] of the samples of each class."""
    column = column_of("labels", samples, participants)
    parts = PARTITIONS["labels"](samples, participants, column=column, skew=skew, seed=seed)
    counts = np.stack([np.bincount(column[part], minlength=7) for part in parts])
    return counts / counts.sum(0)


def test_shares_of_labels_have_the_variance_of_a_symmetric_dirichlet():
    """Each share has the mean 1/P, and the variance (1/P)(1 - 1/P) / (P skew + 1)."""
    for skew in (0.1, 1.0, 100.0):
        shares = np.concatenate([shares_of_classes(skew, seed=seed) for seed in range(8)])
        expected = (1 / 20) * (1 - 1 / 20) / (20 * skew + 1)
        assert shares.var() == pytest.approx(expected, rel=0.35), skew


def test_a_validation_set_is_dealt_in_the_proportions_of_the_training_set():
    one, other = shares_of_classes(0.5), shares_of_classes(0.5, samples=70_000)
    assert np.abs(one - other).max() < 0.005
    assert np.abs(one - shares_of_classes(0.5, seed=1)).max() > 0.05


@pytest.mark.parametrize("scheme", PARTITIONS)
def test_a_region_has_each_of_its_samples_once_in_each_epoch_of_its_own(scheme):
    shares = dealt(scheme, 300, 5)
    regions, found = Regions(shares, seed=0), set()
    for share, begin, end in zip(shares, regions.offsets, regions.offsets[1:], strict=False):
        for epoch in range(3):
            order = regions.indices(epoch, begin, end).tolist()
            assert sorted(order) == list(share)
            cut = [regions.indices(epoch, n, n + 1).item() for n in range(begin, end)]
            assert cut == order
            found.add(tuple(order))
    assert len(found) == 15  # each participant and epoch has an order of its own
    whole = regions.indices(1, 0, 300).tolist()
    assert sorted(whole) == list(range(300))
    plain = Regions(shares, seed=0, shuffle=False)
    assert plain.indices(0, 0, 300).tolist() == [index for share in shares for index in share]
    assert Regions(dealt(scheme, 300, 5), seed=1).digest == regions.digest
    assert Regions(dealt(scheme, 299, 5), seed=0).digest != regions.digest


def test_participants_of_one_size_have_orders_of_their_own():
    """Else the first samples of all would stand beside each other in each epoch."""

    def orders(seed):
        regions = Regions([range(50 * n, 50 * n + 50) for n in range(4)], seed)
        return [regions.indices(0, 50 * n, 50 * n + 50) - 50 * n for n in range(4)]

    found = [*orders(7), *orders(8), Order(50, 7).indices(0, 0, 50)]
    assert len({tuple(each.tolist()) for each in found}) == 9
    assert all(sorted(each.tolist()) == list(range(50)) for each in found)


def test_keys_of_arrays_are_those_of_numbers():
    rows, columns = np.arange(3)[:, None], np.arange(4)
    wanted = [[key(7, 5, row, column) for column in range(4)] for row in range(3)]
    assert keys(7, 5, rows, columns).tolist() == wanted
    assert keys(-1, 2).tolist() == [key(-1, 2)]


def test_sampling_draws_by_key_and_counts_what_it_has_drawn():
    sampling, counts = Sampling(3, 9, 4), np.zeros(9, np.int64)
    far = Sampling(3, 9, 4).rounds(9000)
    for step in range(1, 9001):
        drawn = sampling.of(step)
        if step < 50 or step % 997 == 0:
            assert drawn == sorted(sorted(range(9), key=lambda n: key(3, 7, step, n))[:4])
        counts[drawn] += 1
    assert counts.tolist() == far.tolist() == sampling.rounds(9000).tolist()
    assert sampling.rounds(0).tolist() == [0] * 9
    everyone = Sampling(3, 9, 9)
    assert (everyone.of(5), everyone.rounds(5).tolist()) == (list(range(9)), [5] * 9)


@quick
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    portion=st.integers(1, 15),
    drawn=st.integers(1, 6),
    rounds=st.integers(0, 30),
)
def test_participants_use_up_one_epoch_after_the_other(sizes, portion, drawn, rounds):
    own = OwnRounds(sizes, portion, Sampling(0, len(sizes), min(drawn, len(sizes))))
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    at, used = [(0, 0)] * len(sizes), []
    for step in range(1, rounds + 1):
        parts = own.of(step)
        for number, part in zip(own._sampling.of(step), parts, strict=True):
            epoch, place = at[number]
            stop = min(place + portion, sizes[number])
            assert part == (epoch, begins[number] + place, begins[number] + stop)
            at[number] = (epoch + 1, 0) if stop == sizes[number] else (epoch, stop)
        used.append(sum(part.stop - part.first for part in parts))
        where = own.where(step, parts)
        assert where.stop - where.first == used[-1]
        assert (where.first == 0) == ((step - 1) % -(-sum(sizes) // (portion * len(parts))) == 0)
    assert own.epochs(rounds).tolist() == [epoch for epoch, _ in at]


def test_an_unknown_partition_is_answered_with_those_there_are():
    with pytest.raises(SpecError, match=r"no partition is called 'label'\. Did you mean 'labels'"):
        PARTITIONS.check("label")
