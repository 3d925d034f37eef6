"""Sums in two phases: right to what the codec drops, and nothing is lost, whoever dies when."""

import hashlib
import threading

import pytest
import torch

from helpers import run_processes
from instep.comm.alone import AloneComm
from instep.comm.codecs import CODECS
from instep.comm.memory import run_ranks
from instep.errors import PeerError, SpecError
from instep.sync.reducers import Place, Room, reducer_of
from instep.sync.reducers.gather import Gather
from instep.sync.reducers.two_phase import RankSegments, TwoPhase
from marks import slow, tail

BUCKETS = [
    [Place("wide", (40, 17)), Place("bias", (3,))],
    [Place("scalar", ())],
    [],
    [Place("nothing", (0, 4)), Place("long", (700,))],
    [Place("few", (4,))],
]
"""Also buckets that are smaller than the number of ranks, and empty."""

SHAPES = {place.name: place.shape for bucket in BUCKETS for place in bucket}
SIZES = [1, 2, 3, 5]
NAMES = [name for name in CODECS if reducer_of(CODECS[name]) is TwoPhase]


FEW = [[Place("long", (700,))], [Place("few", (2,))]]


def contribution(rank, size, step, number, buckets=BUCKETS):
    """[elements] of one bucket; weights differ and add up to 1, levels differ from rank to rank."""
    weight = 2 * (rank + 1) / (size * (size + 1))
    length = RankSegments(buckets, size).lengths[number]
    seed = 1_000_003 * step + 101 * rank + number
    drawn = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    return weight * (drawn * 10.0 ** (rank - 1) + 0.3)


def exact(size, step, buckets=BUCKETS):
    """For each bucket, the sum of all contributions in float64."""
    return [
        sum(contribution(rank, size, step, number, buckets).double() for rank in range(size))
        for number in range(len(buckets))
    ]


def exchange(two, comm, step, buckets=BUCKETS):
    """One step up to its end; each bucket's sum."""
    flats = []
    for number in range(len(buckets)):
        own = contribution(comm.rank, comm.size, step, number, buckets)
        flats.append(torch.cat([own, torch.full((2,), 8.0)]))  # what follows is not summed
        two.begin(number, flats[-1], key=step)
    two.finish()
    for flat in flats:
        assert flat[-2:].tolist() == [8.0, 8.0]
    return [flat[:-2] for flat in flats]


def made(comm, codec="int8", buckets=BUCKETS, room=None, staged=None):
    place = Room(slots=room, staged=staged)
    return TwoPhase(CODECS[codec](), comm, RankSegments(buckets, comm.size), place)


def some_steps(comm, codec, steps, abandoned=()):
    """The sum of each step that happened, for each bucket; and the residuals at the end."""
    two, results = made(comm, codec), []
    for step in range(steps):
        before = residuals(two)
        results.append(exchange(two, comm, step))
        if step in abandoned:
            two.abandon()
            two.abandon()
            results.pop()
            after = residuals(two)
            assert all(torch.equal(after[name], before[name]) for name in before)
        else:
            two.apply()
    return results, residuals(two)


def on(size, codec, steps, abandoned=()):
    if size == 1:
        return [some_steps(AloneComm(), codec, steps, abandoned)]
    return run_ranks(size, some_steps, codec, steps, abandoned)


def residuals(two):
    """This rank's, by parameter."""
    return {key.removeprefix("residual/"): part for key, part in two.own_state().items()}


def room_of(layout, rank, state):
    """Two slots, of which the first holds these residuals."""
    slots = torch.zeros(layout.room(rank)), torch.zeros(layout.room(rank))
    layout.fill(slots[0], rank, {f"residual/{name}": part for name, part in state.items()})
    return slots


def bits(tensors):
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def by_name(flats, buckets=BUCKETS):
    """Like `own_state`, of each bucket's flat memory."""
    layout = RankSegments(buckets, 1)
    return {
        place.name: part
        for number, flat in enumerate(flats)
        for place, part in zip(buckets[number], layout.members(number, flat), strict=True)
    }


def total(states):
    """The sum over ranks of what each holds, in float64."""
    return {name: sum(state[name].double() for state in states) for name in states[0]}


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_is_off_by_what_the_codec_drops_at_most(size):
    for (result,), _ in on(size, "int8", 1):
        for number, (got, wanted) in enumerate(zip(result, exact(size, 0), strict=True)):
            parts = [contribution(rank, size, 0, number) for rank in range(size)]
            largest = sum(float(part.abs().max()) for part in parts if part.numel())
            assert got.shape == wanted.shape
            assert (got - wanted).abs().sum() == 0 or largest
            assert ((got - wanted).abs() <= (2.1 * largest) / 254).all()
    for (result,), _ in on(size, "none", 1):
        for got, wanted in zip(result, exact(size, 0), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        *(tail("int8", size) for size in SIZES[:2]),
        ("int8", SIZES[2]),
        slow("int8", 5),
        ("none", 3),
    ],
)
def test_over_many_steps_only_the_residuals_are_missing(codec, size):
    abandoned = {3, 4, 50}
    ranks = on(size, codec, 80, abandoned)
    got = [sum(result[number].double() for result in ranks[0][0]) for number in range(len(BUCKETS))]
    happened = [exact(size, step) for step in range(80) if step not in abandoned]
    wanted = [sum(step[number] for step in happened) for number in range(len(BUCKETS))]
    missing = total([state for _, state in ranks])
    largest = 10.0 ** (size - 2)
    for name, part in by_name(got).items():
        off = (part + missing.get(name, 0) - by_name(wanted)[name]).abs()
        assert (off <= 80 * 2**-23 * max(largest, 1)).all(), name
        assert codec == "none" or missing[name].shape == SHAPES[name]
    assert codec == "none" or any(part.abs().sum() > 0 for part in missing.values())


@pytest.mark.grid(2)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_same_bits(size):
    results = [b"".join(bits(result) for result in results) for results, _ in on(size, "int8", 20)]
    assert len(set(results)) == 1


def digest_of_steps(comm, steps):
    results, own = some_steps(comm, "int8", steps)
    return [bits(result) for result in results], bits(own.values())


@pytest.mark.process
@pytest.mark.parametrize("size", [2, 3])
def test_processes_come_to_the_bits_of_threads(tmp_path, size):
    on_threads = run_ranks(size, digest_of_steps, 10)
    assert run_processes(size, digest_of_steps, tmp_path, 10) == on_threads


def trained(comm, steps):
    """Hash of the parameters after each step of SGD on a quadratic that differs between ranks."""
    layout = RankSegments([[Place("first", (31,))], [Place("second", (300,))]], comm.size)
    two = TwoPhase(CODECS["int8"](), comm, layout)
    parameters, seen = [torch.zeros(31), torch.ones(300)], hashlib.sha256()
    generator = torch.Generator().manual_seed(comm.rank)
    for step in range(steps):
        flats = [(p + torch.randn(p.shape, generator=generator)) / comm.size for p in parameters]
        for number, flat in enumerate(flats):
            two.begin(number, flat, key=step)
        two.finish()
        two.apply()
        for parameter, flat in zip(parameters, flats, strict=True):
            parameter -= 0.1 * flat
            seen.update(parameter.numpy().tobytes())
    return seen.hexdigest()


def test_replicas_stay_the_same_to_the_bit_over_100_steps():
    assert len(set(run_ranks(2, trained, 100))) == 1


@pytest.mark.slow
@pytest.mark.process
def test_replicas_stay_the_same_to_the_bit_over_10000_steps(tmp_path):
    assert len(set(run_processes(2, trained, tmp_path, 10_000))) == 1


@pytest.mark.grid(3)
@pytest.mark.parametrize("codec", NAMES)
def test_what_nobody_holds_any_more_is_handed_over_with_its_sum(codec):
    """4, 3, 4 ranks: the one that leaves gives its residual to another."""
    states, given, got = [{}] * 4, 0.0, 0.0

    def body(comm, first):
        layout = RankSegments(BUCKETS, comm.size)
        two = made(comm, codec, room=room_of(layout, comm.rank, states[comm.rank]))
        results = []
        for step in range(first, first + 5):
            results.append(exchange(two, comm, step))
            two.apply()
        return results, residuals(two)

    for first, size in ((0, 4), (5, 3), (10, 4)):
        if size < len(states):
            leaver = states.pop()
            states[0] = {name: part + leaver[name] for name, part in states[0].items()}
        states += [{}] * (size - len(states))
        ranks = run_ranks(size, body, first)
        states = [state for _, state in ranks]
        got += sum(by_name(result)["long"].double() for result in ranks[0][0])
        steps = range(first, first + 5)
        given += sum(by_name(exact(size, step))["long"] for step in steps)
    missing = total(states).get("long", 0)
    torch.testing.assert_close(got + missing, given, rtol=1e-6, atol=1e-4)


def test_own_state_is_taken_up_as_it_was_given():
    def body(comm):
        two = made(comm)
        exchange(two, comm, 0)
        two.apply()
        state = residuals(two)
        room = room_of(RankSegments(BUCKETS, comm.size), comm.rank, state)
        again = residuals(made(comm, room=room))
        return all(torch.equal(again[name], state[name]) for name in SHAPES)

    assert run_ranks(3, body) == [True] * 3


def test_what_is_not_finite_is_seen_by_all_and_gone_in_the_next_step():
    def body(comm):
        two = TwoPhase(CODECS["int8"](), comm, RankSegments([[Place("a", (600,))]], comm.size))
        seen = []
        for step in range(2):
            flat = torch.full((600,), 0.5)
            flat[450] = torch.inf if step == 0 and comm.rank == 1 else 0.5
            two.begin(0, flat, key=step)
            two.finish()
            two.apply()
            seen.append((bool(flat[450].isfinite()), bool(flat.isfinite().all())))
        return seen

    assert run_ranks(2, body) == [[(False, False), (True, True)]] * 2


class Died(Exception):
    pass


class Frail:
    """A rank's end of a group that dies at one of its message boundaries.

    Boundaries are before and after each call, and before and after each wait.
    """

    def __init__(self, comm, dies_at):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.dies_at, self.passed = dies_at, 0

    def boundary(self):
        if self.passed == self.dies_at:
            self.comm.interrupt()
            raise Died
        self.passed += 1

    def __getattr__(self, name):
        def call(*tensors):
            self.boundary()
            work = getattr(self.comm, name)(*tensors)
            self.boundary()
            return FrailWork(self, work)

        return call


class FrailWork:
    def __init__(self, comm, work):
        self.comm, self.work = comm, work

    def wait(self):
        self.comm.boundary()
        self.work.wait()
        self.comm.boundary()


BOUNDARIES = len(FEW) * 2 * 4


def deadly_step(comm, victim, dies_at, agree):
    """Two steps, of which one rank dies in the second.

    `agree` says of the second whether it happens, by what each rank knows of its end.

    Returns:
        The residuals before it and after it, and the result if there is one.
    """
    slots, told = [], []

    frail, layout = Frail(comm, None), RankSegments(FEW, comm.size)
    count = layout.room(comm.rank)
    slots.extend([torch.zeros(count), torch.zeros(count)])
    two = made(frail, buckets=FEW, room=tuple(slots), staged=told.append)
    exchange(two, comm, 0, FEW)
    two.apply()
    told.clear()
    before, result = residuals(two), None
    if comm.rank == victim:
        frail.dies_at, frail.passed = dies_at, 0
    try:
        result = exchange(two, comm, 1, FEW)
    except (PeerError, Died):
        pass
    if agree(result is not None):
        assert told, "the result of a step is somewhere, and a rank's residual is not"
        # what whoever takes over from a dead process finds in its memory
        found = layout.state_of(slots[told[0]], comm.rank)
        two.apply()
        assert all(torch.equal(two.own_state()[key], found[key]) for key in found)
        after = residuals(two)
    else:
        two.abandon()
        after = residuals(two)
    return before, after, result


def test_a_rank_that_dies_at_any_message_boundary_takes_nothing_with_it():
    """If any rank has the result, the step happens on all; else on none."""
    size, ends = 3, set()
    for victim in range(size):
        for dies_at in range(BOUNDARIES):
            vote, votes = threading.Barrier(size), []

            def agree(has_result, vote=vote, votes=votes):
                votes.append(has_result)
                vote.wait()
                return any(votes)

            ranks = run_ranks(size, deadly_step, victim, dies_at, agree)
            before, after = (total([rank[at] for rank in ranks]) for at in (0, 1))
            results = {bits(rank[2]): rank[2] for rank in ranks if rank[2] is not None}
            ends.add(len(results))
            assert len(results) <= 1
            for result in results.values():
                given, got = by_name(exact(size, 1, FEW), FEW), by_name(result, FEW)
                for name in before:
                    before[name] += given[name] - got[name]
            for name in before:
                off = (after[name] - before[name]).abs()
                assert (off <= (1e-5 if results else 0)).all(), (victim, dies_at, name)
    assert ends == {0, 1}


def test_a_step_that_a_death_ended_can_be_abandoned_by_all():
    """Also by those who have its result."""
    for victim in range(3):
        for dies_at in range(BOUNDARIES):
            for before, after, _ in run_ranks(3, deadly_step, victim, dies_at, lambda _: False):
                assert all(torch.equal(after[name], before[name]) for name in before)


def test_staged_is_said_before_the_last_message_and_once_all_lies_there():
    def body(comm):
        said, frail = [], Frail(comm, None)
        slots = []

        def staged(slot):
            said.append((slot, frail.passed, slots[slot].clone()))

        count = RankSegments(FEW, comm.size).room(comm.rank)
        slots.extend([torch.zeros(count), torch.full((count,), torch.nan)])
        two = made(frail, buckets=FEW, room=tuple(slots), staged=staged)
        exchange(two, comm, 0, FEW)
        ((slot, passed, then),) = said
        assert slot == 1 - two.committed == 1
        assert torch.equal(then, slots[1])
        assert then.isfinite().all()
        two.apply()
        assert two.committed == 1
        return BOUNDARIES - passed

    after = len(FEW) * 2 + 2  # the last gather's call, and the waits for all gathers
    assert run_ranks(3, body) == [after] * 3


class Whole:
    linear, segmentable, unbiased, fixed_size = False, False, False, True


def test_a_codec_whose_payloads_cannot_be_dealt_is_gathered():
    assert reducer_of(Whole()) is Gather


def test_a_codec_may_name_its_reducer():
    codec = Whole()
    codec.reducer = "two_phase"
    assert reducer_of(codec) is TwoPhase
    codec.reducer = "two_phases"
    with pytest.raises(SpecError, match="Did you mean 'two_phase'"):
        reducer_of(codec)
