"""Rounds that protect participants: the mean of the paper, on any number of ranks and masked."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.data.partition.regions import Regions
from instep.errors import SpecError
from instep.job import file as spec_file
from instep.privacy import refusals
from instep.privacy.grid import Grid
from instep.privacy.participants import DrawnParticipants
from instep.privacy.sampling import NOTHING, Allocation, Poisson
from instep.privacy.secure.clipped import Gift
from instep.privacy.secure.private_mean import PrivateMean
from instep.privacy.sums import PrivateSums
from instep.privacy.units import Units
from instep.records import Attempt
from instep.sync.generation import Generation
from instep.sync.rounds.averaging import Averaging

PARTICIPANTS, PLACES, PLANNED, CLIP = 7, 6, 3.5, 1.5
SECRET = bytes(range(32))
NUMBERS = 26
GRID = Grid(CLIP, NUMBERS, PLACES)


def parameters():
    return [nn.Parameter(torch.zeros(7, 3)), nn.Parameter(torch.zeros(5))]


def moved_by(participant, factor=1.0):
    generator = torch.Generator().manual_seed(participant)
    return [factor * torch.randn(each.shape, generator=generator) for each in parameters()]


def gifts(of=(0, 2, 3, 5), infinite=(), factor=1.0):
    found = {}
    for each in of:
        moved = moved_by(each, factor)
        if each in infinite:
            moved[0][0, 0] = math.inf
        found[each] = Gift(4.0 + each, 0.0, 4.0 + each, moved)
    return found


def taken(comm, given, noise=1.0, least=0, attempts=1):
    """A round on one rank: what parameters are moved by, what was recorded, and what was sent."""
    own, told = parameters(), []
    mean = PrivateMean(
        GRID,
        lambda slots: PrivateSums(slots, GRID, noise, PLANNED, SECRET),
        lambda commit, tag: told.append((commit, tag)),
        PARTICIPANTS,
        least=least,
        job=bytes(32),
        bucket_mb=8.0,
    )
    strategy = Averaging()
    strategy.sum_by(mean, hidden=True)
    strategy.start(own, comm, Generation(notes=2, parts=PLACES, at=Attempt(0, 2, 1)))
    here = {each: gift for each, gift in given.items() if each % comm.size == comm.rank}
    for attempt in range(attempts):
        strategy.begin_step(Attempt(0, 3, 1 + attempt))
        for each, gift in here.items():
            strategy.begin_pass(1.0, last=False, unit=each)
            for slot, moved in enumerate(gift.moved):
                strategy.gradient(slot, moved)
        assert mean.figures(here) == (0.0, 0.0)  # no loss, no weight
        strategy.exchange(torch.zeros(2, dtype=torch.float64))
        if attempt + 1 < attempts:
            strategy.abandon()
    strategy.prepare(3, 1.0)
    strategy.hand_out()
    found = [each.grad.clone() for each in own]
    strategy.apply(lambda: None)
    assert strategy.spread is None
    return found, told


def of_the_paper(given):
    """Clip each, add them up, and divide by how many a round has on average."""
    total = np.zeros(NUMBERS)
    for gift in given.values():
        whole = torch.cat([each.flatten() for each in gift.moved]).double().numpy()
        total += whole * min(1.0, CLIP / np.linalg.norm(whole))
    return total / PLANNED


def flat(found):
    return torch.cat([each.flatten() for each in found]).double().numpy()


def test_the_bits_and_the_record_are_the_same_on_any_number_of_ranks_masked_or_not():
    given = gifts()
    ((alone, told),) = run_ranks(1, lambda comm: taken(comm, given))
    assert len(told) == 1
    for ranks in (2, 3):
        for least in (0, 3):
            attempts = 1 + (ranks == 3)
            every = run_ranks(ranks, partial(taken, given=given, least=least, attempts=attempts))
            for found, written in every:
                assert all(map(torch.equal, found, alone))
                assert written == told * attempts  # a round that is summed again publishes the same


@pytest.mark.parametrize("factor", [1e-3, 0.4, 1e3])
def test_but_for_the_noise_it_is_the_mean_of_the_paper_whatever_participants_weigh(factor):
    given = gifts(factor=factor)
    ((found, _),) = run_ranks(1, lambda comm: taken(comm, given, noise=1e-9))
    slack = PLACES * (GRID.unit + 2.0**-15 * CLIP) / PLANNED
    np.testing.assert_allclose(flat(found), of_the_paper(given), rtol=0, atol=slack)


def test_noise_is_of_the_size_of_the_paper_once_and_in_a_round_of_nobody_too():
    drawn = []
    for ranks in (1, 3):
        (found, told), *_ = run_ranks(ranks, lambda comm: taken(comm, {}, noise=1.3))
        assert len(told) == 1
        drawn.append(flat(found))
    assert np.array_equal(*drawn)
    assert (drawn[0] != 0).all()
    of_one = 1.3 * CLIP / PLANNED
    assert 0.6 * of_one < drawn[0].std() < 1.5 * of_one


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_a_participant_changes_the_sum_by_no_more_than_the_sensitivity(factor):
    given = gifts(factor=factor)
    whole, *less = (
        np.rint(flat(taken_alone(some)) * PLANNED / GRID.unit)
        for some in (given, *({o: g for o, g in given.items() if o != out} for out in given))
    )
    for each in less:
        assert np.linalg.norm(whole - each) <= GRID.sensitivity + NUMBERS  # float32 of a mean


def taken_alone(given):
    return run_ranks(1, lambda comm: taken(comm, given, noise=1e-12))[0][0]


def test_who_is_not_finite_gives_nothing_and_changes_nothing_of_the_others():
    given, without = gifts(infinite=[3]), gifts(of=(0, 2, 5))
    ((found, told),) = run_ranks(1, lambda comm: taken(comm, given))
    ((other, others),) = run_ranks(1, lambda comm: taken(comm, without))
    assert told == others
    assert all(map(torch.equal, found, other))


# ---- which samples


SIZES = [5, 12, 7, 1, 9]
PORTION = 4


def regions():
    ends = np.cumsum(SIZES)
    return Regions([range(end - size, end) for size, end in zip(SIZES, ends, strict=True)], 3)


def rounds_of(drawn, order, rounds):
    """By participant, what it took in each of its rounds."""
    found = {each: [] for each in range(len(SIZES))}
    for step in range(1, rounds + 1):
        epoch, number = divmod(step - 1, drawn.steps)
        for place, participant in enumerate(order.of(step), number * drawn.places):
            samples = order.indices(epoch, place * PORTION, (place + 1) * PORTION)
            if participant == NOTHING:
                assert (samples == NOTHING).all()
                continue
            found[participant].append([each for each in samples.tolist() if each != NOTHING])
    return found


@pytest.mark.parametrize("kind", [Allocation, Poisson])
def test_a_participant_takes_its_own_samples_epoch_by_epoch_whenever_it_is_drawn(kind):
    drawn, own = kind(len(SIZES), 2, SECRET), regions()
    order = DrawnParticipants(drawn, own, PORTION)
    found = rounds_of(drawn, order, 30 * drawn.steps)
    for participant, rounds in found.items():
        assert kind is Poisson or len(rounds) == 30  # once in each epoch of the job
        size, begin = SIZES[participant], int(own.offsets[participant])
        each = -(-size // PORTION)
        for epoch in range(len(rounds) // each):
            taken = [s for some in rounds[epoch * each : (epoch + 1) * each] for s in some]
            assert taken == own.indices(epoch, begin, begin + size).tolist()
    late = DrawnParticipants(drawn, own, PORTION)  # of a run that is resumed
    assert np.array_equal(late.indices(17, 3, 33), order.indices(17, 3, 33))


def test_threads_that_ask_at_once_get_the_samples_that_one_gets():
    order, alone = (
        DrawnParticipants(Allocation(5, 2, SECRET), regions(), PORTION) for _ in range(2)
    )
    uses, asked = order._uses, []

    def meanwhile(*given):
        if not asked:  # another thread, in the middle of the same
            asked.append(given)
            order.indices(3, 0, order.positions)
        return uses(*given)

    order._uses = meanwhile
    for epoch in (2, 3, 4):
        found = order.indices(epoch, 0, order.positions)
        assert np.array_equal(found, alone.indices(epoch, 0, alone.positions))
    assert asked


# ---- jobs


def job(protects="participant", **options):
    return spec_file.build(
        {
            "recipe": "a.py:recipe",
            "train": {"determinism": "bits", "global_batch": 40},
            "sync": {
                "name": "averaging",
                "participants": 20,
                "options": {"partition": "owner", "local_steps": 3, **options},
            },
            "privacy": {"protects": protects, "noise": 1.0, "delta": 1e-5},
        },
        source="a test",
    )


def test_a_round_of_a_job_has_room_for_more_than_are_drawn_and_each_has_its_portion():
    some = job(fraction=0.2)
    assert (some.sync.taking_part, some.places) == (4, 20)
    assert some.per_commit.global_batch == 20 * 10 * 3
    assert Units.of_job(some, 1000) == Units(20, 4, 30)
    assert Units.of_job(some, 1000).in_epoch == 5
    assert Units.of_job(job(), 1000) == Units(20, 20, 6)
    assert not list(refusals.refusals(some))
    assert not list(refusals.refusals(job(secure_sums=True)))  # without sync.options.clip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partition": "none"}, "participants without data of their own have nothing to protect"),
        ({"local_optimizers": "kept"}, "would be in the checkpoints as it is"),
        ({"secure_sums": True, "fraction": 0.5}, "the sum of too few would tell workers"),
    ],
)
def test_what_would_reveal_more_is_refused(options, said):
    (refused,) = refusals.refusals(job(**options))
    assert isinstance(refused, SpecError)
    assert said in str(refused)
