"""The protocol of secure sums: equal to open ones to the bit, whoever drops out, and never opened
for too few or twice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from instep.errors import WorkerError
from instep.privacy.secure.masks import Mask, apply_mask
from instep.privacy.secure.members import SumMember
from instep.privacy.secure.opening import masks_left
from instep.privacy.secure.shamir import join, split
from marks import tail

CONTEXT = bytes(range(32))
LENGTH = 50


def parts_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(-(2**31), 2**31, (count, LENGTH), dtype=np.int64).astype(np.int32)


def run_sum(parts, least, *, after_keys=(), after_shares=(), after_parts=(), apply=apply_mask):
    """The whole protocol between members, some of which are lost after a message.

    Returns:
        The opened sum, and the masked parts that came.
    """
    members = {n: SumMember(n, CONTEXT, least) for n in range(len(parts))}
    keys = {n: each.keys() for n, each in members.items()}
    there = {n for n in members if n not in after_keys}
    sent = {n: members[n].shares(keys) for n in sorted(there)}
    there -= set(after_shares)
    masked = {}
    for number in sorted(there):
        sealed = {other: sent[other][number] for other in sent if other != number}
        masked[number] = parts[number].copy()
        for mask in members[number].masks(sealed).values():
            apply(mask, masked[number])
    there -= set(after_parts)
    answers = {n: members[n].answer(set(masked)) for n in sorted(there)}
    total = np.zeros(LENGTH, np.int32)
    for each in masked.values():
        total += each
    for mask in masks_left(keys, set(sent), set(masked), answers, least=least, context=CONTEXT):
        apply(mask, total)
    return total, masked


def open_sum(parts, lost=()):
    with np.errstate(over="ignore"):
        return sum((p for n, p in enumerate(parts) if n not in lost), np.zeros(LENGTH, np.int32))


@pytest.mark.parametrize("count", [2, 3, 8, 32, *map(tail, (n for n in range(4, 32) if n != 8))])
def test_a_secure_sum_has_the_bits_of_an_open_one(count):
    parts = parts_of(count)
    total, masked = run_sum(parts, count // 2 + 1)
    assert np.array_equal(total, open_sum(parts))
    assert not any(np.array_equal(masked[n], parts[n]) for n in masked)


def subsets(members):
    return (set(some) for size in range(6) for some in itertools.combinations(members, size))


def test_every_subset_of_five_that_is_lost_at_any_moment_leaves_the_sum_of_the_others():
    parts, least, refused = parts_of(5), 3, 0
    for phase in ("after_keys", "after_shares", "after_parts"):
        for lost in subsets(range(5)):
            if 5 - len(lost) < least:
                with pytest.raises(WorkerError, match=r"3\. Nothing of them was revealed"):
                    run_sum(parts, least, **{phase: lost})
                refused += 1
                continue
            total, _ = run_sum(parts, least, **{phase: lost})
            gone = lost if phase != "after_parts" else ()
            assert np.array_equal(total, open_sum(parts, gone)), (phase, lost)
    assert refused == 3 * 16


@pytest.mark.slow
def test_a_thousand_random_drop_outs_of_twenty_leave_the_sum_of_the_others():
    rng = np.random.default_rng(5)
    parts = parts_of(20)
    for _ in range(1000):
        lost = rng.permutation(20)[: rng.integers(0, 10)].tolist()
        cuts = np.sort(rng.integers(0, len(lost) + 1, 2))
        early, middle, late = np.split(np.array(lost, int), cuts)
        total, _ = run_sum(parts, 11, after_keys=early, after_shares=middle, after_parts=late)
        assert np.array_equal(total, open_sum(parts, {*early.tolist(), *middle.tolist()}))


def test_a_member_answers_once_and_never_for_too_few_or_for_strangers():
    members = {n: SumMember(n, CONTEXT, 2) for n in range(3)}
    keys = {n: each.keys() for n, each in members.items()}
    sent = {n: each.shares(keys) for n, each in members.items()}
    for n, each in members.items():
        each.masks({o: sent[o][n] for o in sent if o != n})
    with pytest.raises(WorkerError, match="1 participants have parts in it"):
        members[0].answer({1})
    with pytest.raises(WorkerError, match="strangers"):
        members[0].answer({0, 1, 7})
    first = members[0].answer({0, 1})
    assert len(first) == 3
    with pytest.raises(WorkerError, match="opened twice"):
        members[0].answer({0, 2})


def test_shares_are_sealed_once_as_one_key_would_seal_two_of_them():
    members = {n: SumMember(n, CONTEXT, 2) for n in range(3)}
    keys = {n: each.keys() for n, each in members.items()}
    members[0].shares(keys)
    with pytest.raises(WorkerError, match="sealed twice"):
        members[0].shares(keys)


def test_where_all_shares_are_needed_all_members_but_one_open_nothing():
    members = {n: SumMember(n, CONTEXT, 3, shares=5) for n in range(5)}
    keys = {n: each.keys() for n, each in members.items()}
    sent = {n: each.shares(keys) for n, each in members.items()}
    for n, each in members.items():
        each.masks({o: sent[o][n] for o in sent if o != n})
    come = {0, 1, 2, 3}  # member 4 has nothing to give, and answers
    answers = {n: each.answer(come) for n, each in members.items()}
    given = {"least": 3, "context": CONTEXT, "needed": 5}
    assert len(masks_left(keys, members, come, answers, **given)) == 4 + 4
    del answers[4]
    with pytest.raises(WorkerError, match="4 participants answered"):
        masks_left(keys, members, come, answers, **given)
    shares = {n + 1: answers[n][0] for n in answers}
    assert join(shares) != members[0]._seed


def test_at_least_half_is_not_enough_as_two_halves_could_be_opened_apart():
    members = {n: SumMember(n, CONTEXT, 2) for n in range(4)}
    keys = {n: each.keys() for n, each in members.items()}
    with pytest.raises(WorkerError, match="more than half"):
        members[0].shares(keys)


def test_who_has_another_model_has_masks_that_do_not_cancel():
    members = {n: SumMember(n, CONTEXT if n else bytes(32), 3) for n in range(3)}
    keys = {n: each.keys() for n, each in members.items()}
    sent = {n: each.shares(keys) for n, each in members.items()}
    with pytest.raises(WorkerError, match="another model, job or list"):
        members[1].masks({0: sent[0][1], 2: sent[2][1]})


def test_shares_give_the_secret_and_fewer_or_wrong_ones_do_not():
    secret = bytes(range(100, 132))
    shares = dict(enumerate(split(secret, 7, 4), 1))
    for some in itertools.combinations(shares, 4):
        assert join({n: shares[n] for n in some}) == secret
    for some in itertools.combinations(shares, 3):
        assert join({n: shares[n] for n in some}) != secret
    assert join({1: shares[2], 2: shares[1], 3: shares[3], 4: shares[4]}) != secret


def test_a_part_of_a_mask_is_that_part_and_applying_the_opposite_takes_it_off():
    mask, whole = Mask(bytes(range(32)), True), np.zeros(200_001, np.int32)
    apply_mask(mask, whole)
    part = np.zeros(1000, np.int32)
    apply_mask(mask, part, first=4 * 70_000)
    assert np.array_equal(part, whole[70_000:71_000])
    apply_mask(mask.opposite(), whole)
    assert not whole.any()


# ---- views


def told_apart(ones, others):
    """Whether any of twelve tests tells two samples of masked words apart, or from random ones."""
    found = []
    for part in (ones, others):
        words = part.reshape(-1).view(np.uint32)
        for byte in range(4):
            counts = np.bincount(words >> np.uint32(8 * byte) & np.uint32(255), minlength=256)
            expected = len(words) / 256
            chi = float(((counts - expected) ** 2 / expected).sum())
            found.append(abs(chi - 255) / np.sqrt(2 * 255))
        centred = words.astype(np.float64) / 2**32 - 0.5
        found.append(abs(centred.mean()) * np.sqrt(12 * len(words)))
    means = [part.reshape(-1).view(np.uint32).astype(np.float64).mean() for part in (ones, others)]
    scale = 2**32 / np.sqrt(12) * np.sqrt(2 / ones.size)
    found.append(abs(means[0] - means[1]) / scale)
    both = (ones.astype(np.float64) * others).mean() / 2**62 * 3 * np.sqrt(ones.size)
    found.append(abs(both))
    assert len(found) == 12
    return max(found) > 4.9  # of twelve, p below 1e-5


def views(parts, apply, times=60):
    """What whoever adds up sees of member 0, many times."""
    return np.stack([run_sum(parts, 2, apply=apply)[1][0] for _ in range(times)])


def test_two_inputs_with_one_sum_cannot_be_told_apart_and_a_weak_mask_lets_them():
    ones = np.zeros((3, LENGTH), np.int32)
    others = np.stack([np.full(LENGTH, 1 << 30), np.full(LENGTH, -(1 << 30)), np.zeros(LENGTH)])
    others = others.astype(np.int32)
    assert np.array_equal(run_sum(ones, 2)[0], run_sum(others, 2)[0])
    assert not told_apart(views(ones, apply_mask), views(others, apply_mask))

    def weak(mask, numbers, first=0):  # a range below that of the words
        whole = np.zeros(len(numbers), np.int32)
        apply_mask(Mask(mask.key, True), whole)
        small = whole & 0xFFFFFF
        numbers += small if mask.added else -small

    assert np.array_equal(run_sum(others, 2, apply=weak)[0], open_sum(others))
    assert told_apart(views(ones, weak), views(others, weak))
