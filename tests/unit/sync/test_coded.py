"""What participants give, summed with a codec: against one process without ranks or segments."""

import itertools

import pytest
import torch
from torch import nn

from instep.comm.codecs import CODECS
from instep.comm.memory import run_ranks
from instep.errors import SpecError
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation
from instep.sync.rounds.coded import Coded
from instep.sync.rounds.segments import Segments
from instep.system.host_memory import HostMemory

SHAPES = [(90, 100), (7,), (3, 4000), (5,)]
PARTICIPANTS, WEIGHTS = 4, [0.1, 0.2, 0.3, 0.4]
CODEC_NAMES = ["int8", "int4", "sign", "bfloat16"]


def parameters():
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def contribution(participant, step):
    """Of all parameters but the second, which nobody uses."""
    generator = torch.Generator().manual_seed(100 * step + participant)
    return [
        (slot, torch.randn(shape, generator=generator) * (1 + slot))
        for slot, shape in enumerate(SHAPES)
        if slot != 1
    ]


def take_part(step):
    """All in the first two rounds, then not always the same."""
    return range(PARTICIPANTS) if step < 3 else [n for n in range(PARTICIPANTS) if n != step % 4]


def in_one_process(codec_name, steps, vectors=False, start_after=0):
    """Each participant's contribution to a matrix encoded as a whole, then their sum."""
    whos = [*range(PARTICIPANTS), "sum"]
    zero = {(who, slot): torch.zeros(s).flatten() for who in whos for slot, s in enumerate(SHAPES)}
    left = dict(zero)

    def through(values, who, slot):
        codec = codec_of(slot)
        out = torch.empty(codec.size(len(values)), dtype=torch.uint8)
        rest = torch.empty_like(values)
        codec.encode(values + left[who, slot], out, key=0, left=rest)
        left[who, slot] = rest
        return out

    def codec_of(slot):
        return CODECS[codec_name if vectors or len(SHAPES[slot]) > 1 else "none"]()

    for step in range(1, steps + 1):
        result = []
        left |= zero if step == start_after + 1 else {}
        for slot, shape in enumerate(SHAPES):
            total, decoded = torch.zeros(shape).flatten(), torch.zeros(shape).flatten()
            for n in take_part(step):
                own = dict(contribution(n, step)).get(slot, torch.zeros(shape)).flatten()
                codec_of(slot).add_into(total, through(own * torch.tensor(WEIGHTS[n]), n, slot))
            codec_of(slot).add_into(decoded, through(total, "sum", slot))
            result.append(decoded)
        yield torch.cat(result)


def one_round(strategy, comm, step, deal):
    """What is agreed on in a round; `deal` says who has a participant."""
    strategy.begin_step(Attempt(0, step, 1))
    for n in take_part(step):
        if deal(n) != comm.rank:
            continue
        strategy.begin_pass(WEIGHTS[n], last=False, unit=n)
        for slot, tensor in contribution(n, step):
            strategy.gradient(slot, tensor)
    notes = strategy.exchange(torch.tensor([1.0 + comm.rank], dtype=torch.float64))
    assert notes.tolist() == [sum(range(1, comm.size + 1))]
    strategy.hand_out()
    grads = [p.grad for p in strategy._parameters]
    assert grads[1] is None
    flat = torch.cat([torch.zeros(7) if g is None else g.flatten() for g in grads])
    strategy.apply(lambda: None)
    return flat


def dealt(step, size):
    """Participants move from rank to rank."""
    return lambda n: (n + step) % size


def rounds(comm, name, first, last, own=None, state=None, vectors=False, start_after=0, **more):
    strategy, slots = Coded(CODECS[name](), encode_vectors=vectors), parameters()
    strategy.start_after = start_after
    strategy.load_state(state or {})
    strategy.load_own(own if own is not None and comm.rank == 0 else {})
    strategy.start(slots, comm, Generation(notes=1, at=Attempt(0, first - 1, 1), **more))
    found = [one_round(strategy, comm, s, dealt(s, comm.size)) for s in range(first, last + 1)]
    return found, strategy


def test_vectors_are_sent_as_they_are_unless_told_otherwise():
    (plain, _), (encoded, _) = (
        run_ranks(2, rounds, "sign", 1, 1, None, None, vectors)[0] for vectors in (False, True)
    )
    place = slice(-5, None)  # of the vector
    given = [dict(contribution(n, 1))[3] * torch.tensor(WEIGHTS[n]) for n in range(PARTICIPANTS)]
    assert torch.equal(plain[0][place], sum(given))
    assert torch.equal(encoded[0], next(in_one_process("sign", 1, vectors=True)))
    assert not torch.equal(plain[0], encoded[0])
    with pytest.raises(SpecError, match=r"encode_vectors = 1: needs to be true or false"):
        make_strategy("diloco", {"encode_vectors": 1}, "int4")


def summed(strategies):
    """What a checkpoint holds."""
    states = [strategy.own_state() for strategy in strategies]
    return {name: sum(state[name] for state in states) for name in states[0]}


@pytest.mark.parametrize(
    ("name", "ranks"), [("int4", 1), ("int4", 2), ("int4", 3), *((n, 3) for n in CODEC_NAMES)]
)
def test_any_ranks_come_to_the_bits_of_one_process_without_segments(name, ranks):
    """Also where participants move, are not in every round, and a rank has none."""
    wanted = list(in_one_process(name, 6))
    for found, _ in run_ranks(ranks, rounds, name, 1, 6):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_gradients_left_out_is_not_added_to_the_first_rounds(ranks):
    """Nor is it from a checkpoint, and by participants that are not in the first of them."""
    wanted, usual = (list(in_one_process("int4", 8, start_after=n)) for n in (3, 0))
    assert torch.equal(wanted[2], usual[2])
    assert not torch.equal(wanted[3], usual[3])
    results = run_ranks(ranks, lambda comm: rounds(comm, "int4", 1, 4, start_after=3))
    state, own = results[0][1].state(), summed([strategy for _, strategy in results])
    loaded = {"own": own, "state": state, "start_after": 3}
    rest = run_ranks(2, lambda comm: rounds(comm, "int4", 5, 8, **loaded))
    for found in ([*results[0][0], *later] for later, _ in rest):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


def test_nothing_is_lost_but_late():
    """All that was given is what was applied and what is still left out."""
    results = run_ranks(3, rounds, "int4", 1, 8)
    applied = torch.stack(results[0][0]).double().sum(0)
    left = summed([strategy for _, strategy in results])
    given = torch.zeros(len(applied), dtype=torch.float64)
    for step, n in itertools.product(range(1, 9), range(PARTICIPANTS)):
        if n in take_part(step):
            own = dict(contribution(n, step))
            parts = [own.get(slot, torch.zeros(s)).flatten() for slot, s in enumerate(SHAPES)]
            given += torch.cat(parts).double() * WEIGHTS[n]
    late = torch.zeros(len(applied), dtype=torch.float64)
    for of in [*range(PARTICIPANTS), -1]:
        parts = [left[f"residual-{of}/{slot}"].flatten() for slot in range(len(SHAPES))]
        late += torch.cat(parts).double()
    assert late.abs().max() > 0.05
    torch.testing.assert_close(applied + late, given, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (2, 2)])
def test_a_checkpoint_goes_on_with_the_same_bits_on_other_ranks(before, after):
    wanted = list(in_one_process("int4", 6))
    strategies = [strategy for _, strategy in run_ranks(before, rounds, "int4", 1, 3)]
    own, state = summed(strategies), strategies[0].state()
    for found, _ in run_ranks(after, rounds, "int4", 4, 6, own, state):
        for one, other in zip(found, wanted[3:], strict=True):
            assert torch.equal(one, other)
    forgot = run_ranks(after, rounds, "int4", 4, 6, {}, state)[0][0]
    assert not torch.equal(forgot[0], wanted[3])  # so that this can fail


def test_what_a_rank_that_leaves_holds_is_taken_over_before_it_goes():
    wanted, kept = list(in_one_process("int4", 6)), {}

    def leave(comm):
        _, strategy = rounds(comm, "int4", 1, 3)
        strategy.start(parameters(), comm, Generation(notes=1, at=Attempt(0, 3, 2), draining=[0]))
        kept[comm.rank] = strategy
        assert bool(strategy.carried.held) == (comm.rank > 0)

    def go_on(comm):
        strategy = kept[comm.rank + 1]
        strategy.start(parameters(), comm, Generation(notes=1, at=Attempt(0, 3, 3)))
        return [one_round(strategy, comm, s, dealt(s, comm.size)) for s in range(4, 7)]

    run_ranks(3, leave)
    for found in run_ranks(2, go_on):
        for one, other in zip(found, wanted[3:], strict=True):
            assert torch.equal(one, other)


def test_what_a_killed_process_held_is_in_the_memory_of_its_host():
    wanted, memories = list(in_one_process("int4", 6)), [HostMemory() for _ in range(3)]
    gone, states = {}, {}

    def train(comm):
        memory = memories[comm.rank]
        _, strategy = rounds(comm, "int4", 1, 3, memory=memory)
        gone[comm.rank], states[comm.rank] = strategy, strategy.state()

    def go_on(comm):
        strategy = gone[comm.rank]
        if comm.rank == 1:
            strategy = Coded(CODECS["int4"]())
            strategy.load_state(states[0])
            newest = max(memories[1].stamps())
            assert newest[1] == 3
            strategy.load_left(memories[1].at(*newest), parameters())
        memory = memories[comm.rank]
        strategy.start(parameters(), comm, Generation(notes=1, at=Attempt(0, 3, 2), memory=memory))
        return [one_round(strategy, comm, s, dealt(s, comm.size)) for s in range(4, 7)]

    run_ranks(3, train)
    for found in run_ranks(3, go_on):
        for one, other in zip(found, wanted[3:], strict=True):
            assert torch.equal(one, other)


def test_participants_whose_memory_is_lost_are_named_once_and_begin_anew():
    gone = {}

    def train(comm):
        gone[comm.rank] = rounds(comm, "int4", 1, 3)[1]

    def go_on(comm):
        strategy = gone[2 * comm.rank]  # 1 is lost
        strategy.start(parameters(), comm, Generation(notes=1, at=Attempt(0, 3, 2)))
        assert strategy.carried.lost == {}
        one_round(strategy, comm, 4, dealt(4, comm.size))
        lost, strategy.carried.lost = strategy.carried.lost, {}
        one_round(strategy, comm, 5, dealt(5, comm.size))
        assert strategy.carried.lost == {}
        return lost

    run_ranks(3, train)
    held = {piece.of: piece.commit for piece in gone[1].carried.held if piece.of >= 0}
    assert held
    assert run_ranks(2, go_on) == [held, held]


def test_a_round_that_does_not_happen_leaves_nothing_behind():
    wanted = list(in_one_process("int4", 3))

    def body(comm):
        _, strategy = rounds(comm, "int4", 1, 2)
        strategy.begin_step(Attempt(0, 3, 1))
        strategy.begin_pass(1.0, last=True, unit=comm.rank)
        strategy.gradient(0, torch.full(SHAPES[0], 7.0))
        strategy.exchange(torch.zeros(1, dtype=torch.float64))
        strategy.abandon()
        return one_round(strategy, comm, 3, dealt(3, comm.size))

    for found in run_ranks(2, body):
        assert torch.equal(found, wanted[2])


@pytest.mark.parametrize("count", [1, 4096, 4097, 300_000, 3_000_000, 70_000_000])
def test_segments_are_cut_where_codecs_may_be_and_dealt_to_all(count):
    segments = Segments([torch.empty(count, device="meta"), torch.empty(5)])
    assert [segments.places[1], segments.cuts[-1]] == [slice(count, count + 5), count + 5]
    assert all(cut % 4096 == 0 for cut in segments.cuts[:-2])
    lengths = [high - low for low, high in itertools.pairwise(segments.cuts)]
    assert max(lengths) <= 65536
    assert len(lengths) <= 66 or max(lengths) == 65536
    for owners in ([0, 1, 2], [0, 2]):
        stretches = segments.stretches(owners, 3)
        assert sum(stop - start for start, stop in stretches) == count + 5
        each = [stop - start for rank, (start, stop) in enumerate(stretches) if rank in owners]
        assert max(each) - min(each) <= 2 * max(lengths)


def test_a_codec_of_another_kind_is_refused():
    class Grows:
        segmentable, fixed_size = True, False

    with pytest.raises(SpecError, match="Use int8"):
        Coded(Grows())


def test_a_sparse_gradient_of_a_step_before_the_rounds_is_handed_out_sparse():
    """Optimizers such as SparseAdam take no other."""
    values = torch.tensor([[1.0], [1.0], [0.0]]).expand(3, 3)  # of row 2 nothing but zeros
    rows = torch.sparse_coo_tensor([[4, 1, 2]], values, (6, 3), check_invariants=True)

    def body(comm):
        strategy, table = Coded(CODECS["int8"]()), nn.Parameter(torch.zeros(6, 3))
        strategy.start_after = 1
        strategy.start([table], comm, Generation(notes=0))
        strategy.begin_step(Attempt(0, 1, 1))
        if comm.rank == 0:
            strategy.begin_pass(0.5, last=True, unit=0)
            strategy.gradient(0, rows)
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        return table.grad

    for found in run_ranks(2, body):
        assert found.is_sparse
        assert found.coalesce().indices().tolist() == [[1, 2, 4]]
        torch.testing.assert_close(found.to_dense(), 0.5 * rows.to_dense())


def test_all_strategies_with_rounds_take_a_codec():
    for name in ("averaging", "fedprox", "fedopt", "diloco"):
        assert make_strategy(name, {}, "int4").laws


def test_the_median_stands_a_participant_that_sends_garbage():
    """Element by element, in plain PyTorch; participants count alike, whatever their weights."""
    ways = [dict(contribution(n, 1)) for n in range(5)]
    for slot in ways[3]:
        ways[3][slot] = torch.full(SHAPES[slot], [1e30, -1e30, torch.nan, torch.inf][slot])

    def body(comm, count):
        parameters_ = parameters()
        strategy = make_strategy("averaging", {"combine": "median"})
        strategy.start(parameters_, comm, Generation(notes=0))
        strategy.begin_step(Attempt(0, 1, 1))
        for n in range(comm.rank, count, comm.size):
            strategy.begin_pass(0.2, last=False, unit=n)
            for slot, way in ways[n].items():
                strategy.gradient(slot, way)
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        return [p.grad for p in parameters_]

    for ranks in (1, 3):
        for grads in run_ranks(ranks, body, 5):
            for slot, grad in enumerate(grads):
                if slot == 1:
                    assert grad is None
                    continue
                every = torch.stack([way[slot] for way in ways])
                every = every.nan_to_num(nan=torch.inf, posinf=torch.inf)
                torch.testing.assert_close(grad, every.median(0).values)
                assert grad.abs().max() < 20
    even = run_ranks(2, body, 2)[0]
    torch.testing.assert_close(even[0], 0.4 * (ways[0][0] + ways[1][0]) / 2)
    assert make_strategy("averaging", {"combine": "median"}).laws == {}
