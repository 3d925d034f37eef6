"""Votes by sign: against a plain loop over the voters, in one process."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from instep.comm.memory import MemoryComm, run_ranks
from instep.errors import SpecError
from instep.records import Attempt, Law
from instep.sync import ballots
from instep.sync.base import make_strategy
from instep.sync.generation import Generation
from instep.system.host_memory import HostMemory

SHAPES = [(9, 10), (7,), (3, 40), ()]
NEVER, RARELY = 1, 2
"""A parameter that nobody uses, and one that some do."""
STEPS = 6


def parameters():
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def taking_part(voters, step):
    """All, but for one in every other step."""
    return [n for n in range(voters) if step % 2 or n != step % voters]


def gradients(voter, step):
    draw = torch.Generator().manual_seed(100 * step + voter)
    given = {slot: torch.randn(shape, generator=draw) for slot, shape in enumerate(SHAPES)}
    given[0][voter % 9] = 0.0  # as of an embedding's row that no sample has
    if (voter + step) % 3 == 0:
        del given[RARELY]
    del given[NEVER]
    return given


def plain_loop(voters, momentum, steps=STEPS):
    """What each step's gradients are, without ranks, and what voters remember after it."""
    memory = [[torch.zeros(shape) for shape in SHAPES] for _ in range(voters)]
    for step in range(1, steps + 1):
        votes = {}
        for voter in taking_part(voters, step):
            for slot, gradient in gradients(voter, step).items():
                memory[voter][slot] = momentum * memory[voter][slot] + gradient / voters
                votes.setdefault(slot, []).append(memory[voter][slot].sign())
        yield [sum(votes[slot]).sign() if slot in votes else None for slot in range(len(SHAPES))]


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def one_step(strategy, slots, step, voters, deal, generation=1):
    strategy.begin_step(Attempt(0, step, generation))
    for voter in taking_part(voters, step):
        if deal(voter, step):
            strategy.begin_pass(1 / voters, last=False, unit=voter)
            for slot, gradient in gradients(voter, step).items():
                strategy.gradient(slot, gradient)
    strategy.exchange(torch.zeros(1, dtype=torch.float64))
    assert strategy.prepare(step, 0.3) == 1.0
    strategy.hand_out()
    return strategy.apply(lambda: [p.grad for p in slots])


def train(comm, voters, first=1, last=STEPS, momentum=0.9, own=None, state=None, **more):
    """Voters move from rank to rank."""
    strategy, slots = make_strategy("sign_vote", {"momentum": momentum}), parameters()
    strategy.load_state(state or {})
    strategy.load_own(own if own is not None and comm.rank == 0 else {})
    strategy.start(
        slots, comm, Generation(notes=1, parts=voters, at=Attempt(0, first - 1, 1), **more)
    )

    def deal(voter, step):
        return (voter + step) % comm.size == comm.rank

    every = range(first, last + 1)
    return [one_step(strategy, slots, step, voters, deal) for step in every], strategy


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("voters", [1, 4, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_ranks_come_to_the_bits_of_a_plain_loop_over_the_voters(ranks, voters, momentum):
    wanted = list(plain_loop(voters, momentum))
    signs = torch.cat([g.flatten() for step in wanted for g in step if g is not None])
    assert signs.unique().tolist() == [-1.0, 0.0, 1.0]
    for found, strategy in run_ranks(ranks, partial(train, voters=voters, momentum=momentum)):
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
        laws = set(strategy.laws.values())
        assert laws == ({Law.SUM} if momentum else set())
        assert bool(strategy.own_state()) == bool(momentum)


def test_momentum_makes_a_difference():
    with_it, without = (list(plain_loop(7, momentum)) for momentum in (0.9, 0.0))
    assert not torch.equal(with_it[3][0], without[3][0])


@pytest.mark.parametrize("voters", [64, 129, 300])
def test_many_voters_of_one_rank_are_counted_rightly(voters):
    wanted = list(plain_loop(voters, 0.9, 2))
    for ranks in (1, 2):
        for found, _ in run_ranks(ranks, partial(train, voters=voters, last=2)):
            for one, other in zip(found, wanted, strict=True):
                same(one, other)


def summed(strategies):
    """What a checkpoint holds."""
    states = [strategy.own_state() for strategy in strategies]
    return {name: sum(state[name] for state in states) for name in states[0]}


def test_checkpoints_go_on_with_the_same_bits_on_4_and_3_and_4_ranks():
    wanted, own, state = list(plain_loop(5, 0.9)), {}, {}
    for first, ranks in zip((1, 3, 5), (4, 3, 4), strict=True):
        results = run_ranks(ranks, train, 5, first, first + 1, 0.9, own, state)
        for found, _ in results:
            for one, other in zip(found, wanted[first - 1 :], strict=False):
                same(one, other)
        strategies = [strategy for _, strategy in results]
        own, state = summed(strategies), strategies[0].state()
        assert own.keys() == {f"momentum-{n}/{s}" for n in range(5) for s in range(len(SHAPES))}
    forgot, _ = run_ranks(2, train, 5, 3, 4, 0.9, {}, {})[0]
    assert not torch.equal(forgot[0][0], wanted[2][0])  # so that this can fail


def test_voters_of_a_rank_that_leaves_go_on_elsewhere_with_what_they_remember():
    wanted, kept = list(plain_loop(5, 0.9)), {}

    def leave(comm):
        _, strategy = train(comm, 5, last=3)
        strategy.start(parameters(), comm, Generation(notes=1, at=Attempt(0, 3, 2), draining=[0]))
        kept[comm.rank] = strategy
        assert any(t.any() for t in strategy.own_state().values()) == (comm.rank > 0)

    def go_on(comm):
        strategy, slots = kept[comm.rank + 1], parameters()
        strategy.start(slots, comm, Generation(notes=1, at=Attempt(0, 3, 3)))
        deal = lambda voter, step: voter % 2 == comm.rank  # noqa: E731
        return [one_step(strategy, slots, step, 5, deal, 3) for step in range(4, STEPS + 1)]

    run_ranks(3, leave)
    for found in run_ranks(2, go_on):
        for one, other in zip(found, wanted[3:], strict=True):
            same(one, other)


def test_what_voters_of_a_killed_process_remember_is_in_the_memory_of_its_host():
    wanted, memories = list(plain_loop(5, 0.9)), [HostMemory() for _ in range(3)]
    gone = {}

    def begin(comm):
        _, gone[comm.rank] = train(comm, 5, last=3, memory=memories[comm.rank])

    def go_on(comm):
        strategy, slots = gone[comm.rank], parameters()
        if comm.rank == 1:
            strategy = make_strategy("sign_vote", {})
            strategy.load_state(gone[0].state())
            newest = max(memories[1].stamps())
            assert newest[1] == 3
            strategy.load_left(memories[1].at(*newest), slots)
        memory = memories[comm.rank]
        strategy.start(slots, comm, Generation(notes=1, at=Attempt(0, 3, 2), memory=memory))
        deal = lambda voter, step: voter % 3 == comm.rank  # noqa: E731
        return [one_step(strategy, slots, step, 5, deal, 2) for step in range(4, STEPS + 1)]

    run_ranks(3, begin)
    for found in run_ranks(3, go_on):
        for one, other in zip(found, wanted[3:], strict=True):
            same(one, other)


def test_a_step_that_does_not_happen_leaves_nothing_behind():
    wanted = list(plain_loop(5, 0.9, 3))

    def body(comm):
        _, strategy = train(comm, 5, last=2)
        strategy.begin_step(Attempt(0, 3, 1))
        strategy.begin_pass(1.0, last=True, unit=comm.rank)
        strategy.gradient(0, torch.full(SHAPES[0], 7.0))
        strategy.exchange(torch.zeros(1, dtype=torch.float64))
        strategy.abandon()
        deal = lambda voter, step: voter % comm.size == comm.rank  # noqa: E731
        return one_step(strategy, strategy._parameters, 3, 5, deal)

    for found in run_ranks(2, body):
        same(found, wanted[2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_what_is_not_finite_never_becomes_a_sign(bad, momentum):
    def body(comm):
        strategy, slots = make_strategy("sign_vote", {"momentum": momentum}), parameters()
        strategy.start(slots, comm, Generation(notes=0))
        strategy.begin_step(Attempt(0, 1, 1))
        strategy.begin_pass(0.5, last=True, unit=comm.rank)
        for slot in (0, 2):
            gradient = torch.ones(SHAPES[slot])
            gradient[1, 2] = bad if (comm.rank, slot) == (1, 2) else 1.0
            strategy.gradient(slot, gradient)
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        return strategy.apply(lambda: [p.grad for p in slots])

    for good, never, spoilt, _ in run_ranks(2, body):
        assert never is None
        assert (good == 1).all()
        assert spoilt.isnan().all()


def test_sparse_gradients_come_back_sparse_and_types_are_kept():
    def body(comm):
        slots = [nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3).bfloat16())]
        strategy = make_strategy("sign_vote", {})
        strategy.start(slots, comm, Generation(notes=0))
        strategy.begin_step(Attempt(0, 1, 1))
        strategy.begin_pass(0.5, last=True, unit=comm.rank)
        rows = torch.tensor([[comm.rank, 2]])
        given = torch.sparse_coo_tensor(rows, torch.ones(2, 2), (4, 2), check_invariants=True)
        strategy.gradient(0, given)
        strategy.gradient(1, torch.tensor([1.0, -2.0, 0.0]).bfloat16())
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        return [p.grad for p in slots]

    for rows, low in run_ranks(2, body):
        assert rows.is_sparse
        assert rows.to_dense().tolist() == [[1.0, 1.0]] * 3 + [[0.0, 0.0]]
        assert low.dtype == torch.bfloat16
        assert low.tolist() == [1.0, -1.0, 0.0]


class Counted(MemoryComm):
    """Counts what goes to one rank."""

    sent = 0

    def send(self, tensor, to):
        self.sent += tensor.numel() * tensor.element_size()
        return super().send(tensor, to)


@pytest.mark.parametrize(
    ("ranks", "each", "zeros", "up", "down"),
    [
        (3, 1, False, 1, 1),  # an odd number of votes
        (2, 1, False, 1, 8 / 5),  # ties
        (3, 1, True, 8 / 5, 8 / 5),  # somebody abstains
        (2, 3, False, 2, 8 / 5),  # sums of 3 votes: 4 values
        (2, 4, True, 4, 8 / 5),  # of 9 values
    ],
)
def test_votes_travel_in_the_fewest_bits(ranks, each, zeros, up, down):
    count = 40_000

    def body(comm):
        comm.__class__ = Counted
        slots = [nn.Parameter(torch.zeros(count))]
        strategy = make_strategy("sign_vote", {})
        strategy.start(slots, comm, Generation(notes=0))
        strategy.begin_step(Attempt(0, 1, 1))
        for voter in range(comm.rank * each, (comm.rank + 1) * each):
            strategy.begin_pass(0.1, last=False, unit=voter)
            draw = torch.Generator().manual_seed(voter)
            gradient = torch.randn(count, generator=draw)
            gradient[:: count // 50] = 0.0 if zeros else 1.0
            strategy.gradient(0, gradient)
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        return comm.sent

    for sent in run_ranks(ranks, body):
        others = (ranks - 1) / ranks * count / 8
        assert sent == pytest.approx(others * (up + down), rel=0.001)


@pytest.mark.parametrize("base", [2, 3, 4, 5, 7, 9, 16, 17, 127, 128, 255, 256, 257, 601])
def test_numbers_below_a_base_are_packed_and_read(base):
    for count, dtype in itertools.product([0, 1, 2, 7, 8, 9, 1000], [torch.int16, torch.int64]):
        numbers = torch.arange(count, dtype=dtype) * 7 % base
        packed = ballots.pack(numbers, base)
        assert len(packed) == ballots.size(count, base)
        assert torch.equal(ballots.unpack(packed, count, base).to(dtype), numbers)


@pytest.mark.parametrize("momentum", [1, -0.1, True, "0.9", float("nan")])
def test_a_momentum_that_cannot_be_is_refused(momentum):
    with pytest.raises(SpecError, match=r"options.momentum = .*from 0 to below 1"):
        make_strategy("sign_vote", {"momentum": momentum})


def test_parameters_wider_than_a_momentum_are_refused():
    def body(comm):
        slots = [nn.Parameter(torch.zeros(3, dtype=torch.float64))]
        with pytest.raises(SpecError, match=r"torch.float64, and sync.name = 'sign_vote' has"):
            make_strategy("sign_vote", {}).start(slots, comm, Generation(notes=0))

    run_ranks(1, body)
