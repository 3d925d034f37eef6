"""Rounds of clipped participants: a masked sum has the bits of an open one, on any number of ranks,
and what leaves a rank says nothing of a participant."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.errors import RecipeError, WorkerError
from instep.privacy.secure.clipped import PER_CLIP, ClippedMean, Gift
from instep.records import Attempt
from instep.sync.generation import Generation
from instep.sync.rounds.averaging import Averaging

PARTICIPANTS, CLIP, WHOLE = 5, 1.5, 40.0
SIZES = [8.0, 4.0, 12.0, 6.0, 10.0]


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = (7, 3), (5,)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def moved_by(participant, factor=1.0):
    generator = torch.Generator().manual_seed(participant)
    return [factor * torch.randn(each.shape, generator=generator) for each in parameters()]


def gifts(without=(), infinite=(), factor=1.0):
    found = {}
    for each in range(PARTICIPANTS):
        moved = moved_by(each, factor)
        if each in infinite:
            moved[0][0, 0] = math.inf
        weight = 0.0 if each in without else SIZES[each]
        found[each] = Gift(weight, 0.25 * each * weight, SIZES[each], moved)
    return found


class Heard:
    """Wraps a rank's end of a group, and keeps what leaves it."""

    def __init__(self, comm):
        self._comm, self.sent = comm, []

    def all_reduce(self, tensor):
        self.sent.append(tensor.clone())
        return self._comm.all_reduce(tensor)

    def __getattr__(self, name):
        return getattr(self._comm, name)


def taken(comm, given, least=0, attempts=1, job=bytes(32)):
    """A round on one rank: what the parameters are moved by, the figures, and what was sent."""
    heard, own = Heard(comm), parameters()
    mean = ClippedMean(CLIP, PARTICIPANTS, least=least, job=job)
    strategy = Averaging()
    strategy.sum_by(mean, hidden=mean.sealed)
    strategy.start(own, heard, Generation(notes=2, parts=PARTICIPANTS, at=Attempt(0, 2, 1)))
    here = {each: gift for each, gift in given.items() if each % comm.size == comm.rank}
    for attempt in range(attempts):
        strategy.begin_step(Attempt(0, 3, 1 + attempt))
        for each, gift in here.items():
            if gift.weight:
                strategy.begin_pass(gift.weight / WHOLE, last=False, unit=each)
                for slot, moved in enumerate(gift.moved):
                    strategy.gradient(slot, moved)
        figures = mean.figures(here)
        strategy.exchange(torch.zeros(2, dtype=torch.float64))
        if attempt + 1 < attempts:
            strategy.abandon()
    strategy.prepare(3, 1.0)
    strategy.hand_out()
    found = [each.grad.clone() for each in own]
    strategy.apply(lambda: None)
    return found, figures, heard.sent, strategy.spread


def test_a_masked_round_has_the_bits_of_an_open_one_on_any_number_of_ranks_and_in_any_attempt():
    given = gifts()
    ((opened, figures, _, spread),) = run_ranks(1, lambda comm: taken(comm, given))
    assert spread is not None
    for ranks in (1, 2, 5):
        for least in (0, 3):
            attempts = 1 + (ranks == 2)
            every = run_ranks(ranks, partial(taken, given=given, least=least, attempts=attempts))
            for found, told, _, spread in every:
                assert all(map(torch.equal, found, opened))
                assert told == figures
                assert (spread is None) == bool(least)


def test_it_is_the_mean_of_what_was_clipped_and_the_figures_are_of_all():
    given = gifts(factor=0.5)
    ((found, (total, weight), _, _),) = run_ranks(1, lambda comm: taken(comm, given))
    wanted = [torch.zeros_like(each, dtype=torch.float64) for each in parameters()]
    clipped = 0
    for gift in given.values():
        norm = float(torch.cat([each.flatten().double() for each in gift.moved]).norm())
        clipped += norm > CLIP
        for place, each in zip(wanted, gift.moved, strict=True):
            place += gift.weight / WHOLE * min(1.0, CLIP / norm) * each.double()
    assert clipped > 0
    for mine, place in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), place, rtol=0, atol=1e-4)
    assert weight == sum(SIZES)
    assert total == sum(gift.total for gift in given.values())


def test_who_has_nothing_or_is_not_finite_is_out_of_the_sum_and_of_its_weight():
    given = gifts(without=[1], infinite=[4])
    ((opened, figures, *_),) = run_ranks(1, lambda comm: taken(comm, given))
    assert figures[1] == SIZES[0] + SIZES[2] + SIZES[3]
    for ranks in (2, 3):
        for found, told, *_ in run_ranks(ranks, lambda comm: taken(comm, given, 3)):
            assert all(map(torch.equal, found, opened))
            assert told == figures


def test_below_the_least_a_round_is_refused_and_nothing_was_sent_but_who_has_something():
    given, sent = gifts(without=[1, 4]), []

    def refused(comm):
        heard = Heard(comm)
        with pytest.raises(WorkerError, match="3 participants have something to give"):
            taken(heard, given, 4)
        sent.extend(heard.sent)

    run_ranks(2, refused)
    assert [tuple(each.shape) for each in sent] == [(3, PARTICIPANTS)] * 2


def test_what_leaves_a_rank_in_a_masked_round_looks_random_and_in_an_open_one_is_the_part():
    given = gifts()

    def parts_in(sent, of):
        whole = torch.cat([each.flatten() for each in given[of].moved]).double()
        factor = min(1.0, CLIP / float(whole.norm())) * SIZES[of] / WHOLE * PER_CLIP / CLIP
        wanted = np.sort(np.rint(whole.numpy() * factor))
        found = [each for each in sent if each.dtype == torch.int32 and each.numel() >= len(wanted)]
        near = [np.abs(np.sort(each.numpy().ravel())[: len(wanted)] - wanted) for each in found]
        near += [np.abs(np.sort(each.numpy().ravel())[-len(wanted) :] - wanted) for each in found]
        return any((each < 1e-3 * PER_CLIP).all() for each in near)

    for of, (_, _, sent, _) in enumerate(run_ranks(5, lambda comm: taken(comm, given))):
        assert parts_in(sent, of)
    for of, (_, _, sent, _) in enumerate(run_ranks(5, lambda comm: taken(comm, given, 3))):
        assert not parts_in(sent, of)


def test_a_round_is_summed_once_and_not_again_of_others():
    def again(comm):
        mean = ClippedMean(CLIP, PARTICIPANTS, least=3, job=bytes(32))
        mean.start(parameters(), comm, Generation(notes=2, parts=5, at=Attempt(0, 2, 1)))
        for attempt, given in enumerate((gifts(), gifts(without=[2]))):
            mean.begin_step(Attempt(0, 3, 1 + attempt))
            for each, gift in given.items():
                if gift.weight:
                    mean.begin_pass(gift.weight / WHOLE, last=False, unit=each)
                    for slot, moved in enumerate(gift.moved):
                        mean.gradient(slot, moved)
            mean.figures(given)
            mean.exchange(torch.zeros(2, dtype=torch.float64))
            mean.abandon()

    with pytest.raises(WorkerError, match="was summed up of 5 participants before"):
        run_ranks(1, again)


def test_losses_of_a_round_are_not_summed_again_of_others_either():
    sent = []

    def again(comm):
        heard = Heard(comm)
        mean = ClippedMean(CLIP, PARTICIPANTS, least=3, job=bytes(32))
        mean.start(parameters(), heard, Generation(notes=2, parts=5, at=Attempt(0, 2, 1)))
        for attempt, given in enumerate((gifts(), gifts(without=[2]))):
            mean.begin_step(Attempt(0, 3, 1 + attempt))
            heard.sent = sent if attempt else []
            mean.figures(given)
            mean.abandon()

    with pytest.raises(WorkerError, match="was summed up of 5 participants before"):
        run_ranks(1, again)
    assert [each.dtype for each in sent] == [torch.int32]  # who has something to give


def test_participants_that_are_on_no_rank_are_missed_and_the_sum_is_the_open_one_of_the_others():
    given = {of: gift for of, gift in gifts().items() if of != 3}
    ((opened, figures, *_),) = run_ranks(1, lambda comm: taken(comm, given))
    every = run_ranks(3, lambda comm: taken(comm, given, 3))
    assert all(map(torch.equal, every[0][0], opened))
    assert figures == every[0][1]
    assert figures[1] == sum(SIZES) - SIZES[3]


def test_a_round_that_was_opened_of_one_that_is_gone_moves_nothing_on_any_rank():
    """The ranks of the second attempt are other processes in part: one knows what was opened."""

    def again(comm):
        mean = ClippedMean(CLIP, PARTICIPANTS, least=3, job=bytes(32))
        mean.start(parameters(), comm, Generation(notes=2, parts=5, at=Attempt(0, 2, 1)))
        found = []
        for number, without in ((3, ()), (3, (2,)), (4, (2,))):
            if without and number == 3 and comm.rank == 1:
                mean = ClippedMean(CLIP, PARTICIPANTS, least=3, job=bytes(32))
                mean.start(parameters(), comm, Generation(notes=2, parts=5, at=Attempt(0, 2, 1)))
            here = {n: g for n, g in gifts().items() if n % 2 == comm.rank and n not in without}
            mean.begin_step(Attempt(0, number, 1 + len(found)))
            for each, gift in here.items():
                mean.begin_pass(gift.weight / WHOLE, last=False, unit=each)
                for slot, moved in enumerate(gift.moved):
                    mean.gradient(slot, moved)
            figures = mean.figures(here)
            mean.exchange(torch.zeros(2, dtype=torch.float64))
            moved = [bool(bucket.flat[:1].abs().sum()) for bucket in mean._buckets]
            found.append((mean.void, math.isnan(figures[0]), any(moved)))
            mean.abandon()
        return found

    for found in run_ranks(2, again):
        assert found == [(False, False, True), (True, True, False), (False, False, True)]


def test_ranks_with_different_jobs_do_not_agree():
    def differs(comm):
        return taken(comm, gifts(), 3, job=bytes([comm.rank]) * 32)

    with pytest.raises(WorkerError, match="another model, job or list"):
        run_ranks(2, differs)


def test_a_loss_that_is_a_mean_of_more_than_samples_is_refused():
    given = gifts()
    given[0] = given[0]._replace(weight=800.0)
    with pytest.raises(RecipeError, match="a mean of more than its samples"):
        run_ranks(1, lambda comm: taken(comm, given))
