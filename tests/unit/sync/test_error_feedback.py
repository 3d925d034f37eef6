"""What a codec drops is sent later, whoever comes, goes or dies: no gradient is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from instep.comm.codecs.int8 import Int8
from instep.comm.memory import run_ranks
from instep.engine.engine import Engine
from instep.engine.state.capture import CommitProgress
from instep.engine.turns import TurnState
from instep.engine.update import Update
from instep.errors import PeerError, SpecError
from instep.job import file as spec_file
from instep.records import Attempt
from instep.sync.all_reduce import AllReduce
from instep.sync.base import make_strategy
from instep.sync.generation import Generation, InMesh
from instep.system.host_memory import HostMemory
from ranks import FakeMember

SHAPES = [(40, 7), (5,), (300,)]


def drawn(workers):
    return [torch.randn(shape) / workers for shape in SHAPES]


class Worker:
    """One process's strategy, with memory of the host that outlives it."""

    def __init__(self, number, memory=None, codec="int8", vectors=True):
        self.number, self.memory = number, memory or HostMemory()
        self.parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
        self.strategy = make_strategy(
            "all_reduce",
            {"bucket_mb": 0.001, "encode_vectors": vectors},
            codec,
            OPTIONS.get(codec, {}),
        )

    def start(self, comm, at, draining=()):
        self.strategy.start(
            self.parameters, comm, Generation(notes=1, memory=self.memory, at=at, draining=draining)
        )

    def step(self, attempt, gradients):
        """Exchange one weighted gradient of each parameter, or none; gives what was agreed on."""
        self.strategy.begin_step(attempt)
        self.strategy.begin_pass(1.0, last=True)
        for slot, gradient in enumerate(gradients):
            self.strategy.gradient(slot, gradient.clone())
        self.strategy.exchange(torch.zeros(1, dtype=torch.float64))
        self.strategy.hand_out()
        return self.strategy.apply(
            lambda: [
                torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters
            ]
        )

    def residual(self):
        own = self.strategy.own_state()
        return [own.get(f"residual/{slot}", torch.zeros(s)) for slot, s in enumerate(SHAPES)]


CODECS = pytest.mark.parametrize("codec", ["int8", "top_k", "powersgd"])
OPTIONS = {"powersgd": {"rank": 1, "start_after": 3}}


class Run:
    """A run of several generations, whose sums are kept in double precision."""

    def __init__(self):
        self.given = [torch.zeros(s, dtype=torch.float64) for s in SHAPES]
        self.agreed = [torch.zeros(s, dtype=torch.float64) for s in SHAPES]
        self.step = self.generation = 0
        torch.manual_seed(3)

    def generation_of(self, workers, steps, draining=()):
        self.generation += 1
        first = self.step
        at = Attempt(0, first, self.generation)
        working = [w for w in range(len(workers)) if w not in draining]
        gradients = [
            [
                [torch.randn(s) / len(working) for s in SHAPES] if w in working else []
                for w in range(len(workers))
            ]
            for _ in range(steps)
        ]

        def body(comm):
            worker = workers[comm.rank]
            worker.start(comm, at, draining)
            results = [
                worker.step(Attempt(0, first + 1 + n, self.generation), gradients[n][comm.rank])
                for n in range(steps)
            ]
            worker.strategy.stop()
            return results

        every = run_ranks(len(workers), body)
        for n in range(steps):
            for mine in gradients[n]:
                for total, gradient in zip(self.given, mine, strict=False):
                    total += gradient
            for total, agreed in zip(self.agreed, every[0][n], strict=True):
                total += agreed
        self.step += steps
        for others in every[1:]:
            for one, other in zip(every[0], others, strict=True):
                assert all(map(torch.equal, one, other))

    def check(self, workers):
        """All that was given has been agreed on, but for what the workers carry over."""
        for slot in range(len(SHAPES)):
            left = sum(worker.residual()[slot].double() for worker in workers)
            torch.testing.assert_close(
                self.agreed[slot] + left, self.given[slot], rtol=0, atol=2e-5
            )
        assert any(float(r.abs().max()) > 1e-4 for w in workers for r in w.residual())


@pytest.mark.grid(1)
@CODECS
def test_nothing_is_lost_from_4_to_3_to_4_workers(codec):
    run, workers = Run(), [Worker(n, codec=codec) for n in range(4)]
    run.generation_of(workers, 20)
    run.check(workers)
    run.generation_of(workers, 1, draining=[3])
    run.check(workers[:3])
    assert not any(bool(residual.any()) for residual in workers[3].residual())
    run.generation_of(workers[:3], 20)
    run.check(workers[:3])
    workers = [*workers[:3], Worker(4, codec=codec)]
    run.generation_of(workers, 20)
    run.check(workers)


def test_what_a_checkpoint_has_takes_the_place_of_what_a_living_worker_carries():
    run, workers = Run(), [Worker(n) for n in range(2)]
    run.generation_of(workers, 3)
    saved = [worker.strategy.own_state() for worker in workers]
    run.generation_of(workers, 3)
    for worker, own in zip(workers, saved, strict=True):
        worker.strategy.load_own(own)
    run.generation_of(workers, 0)
    for worker, own in zip(workers, saved, strict=True):
        again = worker.strategy.own_state()
        assert own
        assert all(torch.equal(again[name], own[name]) for name in own)


def test_vectors_travel_as_they_are_unless_told_otherwise():
    run, workers = Run(), [Worker(n, vectors=False) for n in range(4)]
    run.generation_of(workers, 10)
    run.generation_of(workers, 1, draining=[3])
    run.generation_of(workers[:3], 10)
    run.check(workers[:3])
    for worker in workers[:3]:
        assert worker.strategy.own_state().keys() == {"residual/0"}
    for slot in (1, 2):
        torch.testing.assert_close(run.agreed[slot], run.given[slot], rtol=1e-6, atol=1e-6)
    killed = Worker(1, workers[1].memory, vectors=False)
    killed.strategy.load_left(killed.memory.at(*killed.memory.stamps()[0]), killed.parameters)
    assert all(map(torch.equal, workers[1].residual(), killed.residual()))


def test_a_model_of_vectors_alone_has_nothing_to_carry_over():
    parameters = [Parameter(torch.zeros(5)), Parameter(torch.zeros(()))]

    def body(comm):
        strategy = make_strategy("all_reduce", {}, "int8")
        strategy.start(parameters, comm, Generation(notes=1, memory=HostMemory()))
        for step in (1, 2):
            strategy.begin_step(Attempt(0, step, 0))
            strategy.begin_pass(1.0, last=True)
            strategy.gradient(1, torch.tensor(0.5))
            strategy.gradient(0, torch.full((5,), 0.1))
            notes = strategy.exchange(torch.full((1,), 0.25, dtype=torch.float64))
            strategy.hand_out()
            got = strategy.apply(lambda: [p.grad.tolist() for p in parameters])
        return got, notes.tolist(), strategy.own_state()

    both = torch.full((5,), 0.1)
    assert run_ranks(1, body) == [([both.tolist(), 0.5], [0.25], {})]


@pytest.mark.grid(1)
@CODECS
def test_nothing_is_lost_through_a_checkpoint_on_another_number_of_workers(codec):
    """It holds the sum over the workers, and the lowest rank of those that resume takes it up."""
    run, workers = Run(), [Worker(n, codec=codec) for n in range(3)]
    run.generation_of(workers, 20)
    names = workers[0].strategy.own_state().keys()
    saved = {name: sum(w.strategy.own_state()[name] for w in workers) for name in names}
    assert len(saved) == len(SHAPES)
    resumed = [Worker(n, codec=codec) for n in range(2)]
    for worker in resumed:
        worker.strategy.load_own(saved if worker.number == 0 else {})
    run.check(resumed)
    run.generation_of(resumed, 20)
    run.check(resumed)


@CODECS
def test_a_killed_worker_s_residual_is_taken_up_from_the_memory_of_its_host(codec):
    run, workers = Run(), [Worker(n, codec=codec) for n in range(3)]
    run.generation_of(workers, 5)
    before = workers[1].residual()
    replacement = Worker(1, workers[1].memory, codec)  # all else that it had is gone
    stamp = Attempt(*replacement.memory.stamps()[0])
    assert stamp == Attempt(0, 5, 1)
    replacement.strategy.load_left(replacement.memory.at(*stamp), replacement.parameters)
    assert all(map(torch.equal, before, replacement.residual()))
    workers[1] = replacement
    run.generation_of(workers, 5)
    run.check(workers)


def test_steps_are_the_same_to_the_bit_as_if_nobody_had_been_killed():
    def trained(kills):
        run, workers = Run(), [Worker(n) for n in range(3)]
        for generation in range(4):
            run.generation_of(workers, 3)
            if kills:
                victim = generation % 3
                newcomer = Worker(victim, workers[victim].memory)
                stamp = newcomer.memory.stamps()[0]
                newcomer.strategy.load_left(newcomer.memory.at(*stamp), newcomer.parameters)
                workers[victim] = newcomer
        return run.agreed

    assert all(map(torch.equal, trained(kills=False), trained(kills=True)))


@pytest.mark.parametrize("seen", [True, False])
def test_a_hand_over_that_broke_counts_on_every_rank_or_on_none(seen):
    """Rank 0 has seen the end of `start`, and the others have not; or nobody has."""
    run, workers = Run(), [Worker(n) for n in range(3)]
    run.generation_of(workers, 5)
    at = Attempt(0, 5, 2)

    def body(comm):
        class Breaks:
            """The last message of `start` does not come back."""

            def __init__(self):
                self.votes = 0

            def __getattr__(self, name):
                return getattr(comm, name)

            def all_reduce(self, tensor):
                work = comm.all_reduce(tensor)
                self.votes += tensor.numel() == 1
                if self.votes == 2 and not (seen and comm.rank == 0):
                    work.wait()
                    raise PeerError("lost")
                return work

        try:
            workers[comm.rank].start(Breaks(), at, draining=[2])
        except PeerError:
            return False
        workers[comm.rank].strategy.stop()
        return True

    ended = run_ranks(3, body)
    assert ended == [seen, False, False]
    for worker in workers:
        worker.strategy.resolve(2 if seen else 1)
    run.check(workers[:2] if seen else workers)
    run.generation = 2
    run.generation_of(workers, 1, draining=[2])
    run.check(workers[:2])


def test_the_replacement_of_one_that_ended_as_it_had_taken_over_has_what_it_took_over(tmp_path):
    """Both slots of its memory are of the last step: from before and after the hand-over."""
    run, workers = Run(), [Worker(n) for n in range(3)]
    run.generation_of(workers, 5)

    class Ends:
        """Ends its rank once the last message of `start` has come back."""

        def __init__(self, comm):
            self.comm, self.votes = comm, 0

        def __getattr__(self, name):
            return getattr(self.comm, name)

        def all_reduce(self, tensor):
            work = self.comm.all_reduce(tensor)
            self.votes += tensor.numel() == 1
            if self.votes == 2:
                work.wait()
                raise PeerError("it is killed")
            return work

    def body(comm):
        at = Attempt(0, 5, 2)
        if comm.rank == 0:
            with pytest.raises(PeerError, match="it is killed"):
                workers[0].start(Ends(comm), at, draining=[2])
        else:
            workers[comm.rank].start(comm, at, draining=[2])
            workers[comm.rank].strategy.stop()

    run_ranks(3, body)
    replacement = Worker(0, workers[0].memory)
    assert replacement.memory.stamps() == [(0, 5, 2), (0, 5, 1)]
    job = spec_file.build({"recipe": "a.py:f"}, source="a test")
    parameters = replacement.parameters
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    update = Update(optimizer, None, parameters, seed=0, max_grad_norm=None, scaler=scaler)
    model = nn.ParameterList(parameters)
    turn = TurnState("", parameters, update, replacement.strategy)
    engine = Engine(FakeMember(job, tmp_path, 0), model, parameters, [turn])
    engine.own.memory = replacement.memory
    engine.state.progress = CommitProgress(step=5)
    engine.state._made = {1: (0, 5), 2: (0, 5)}  # as its peers know
    engine.own.take_what_was_left()
    run.check([replacement, workers[1]])


def test_random_rounding_has_another_key_in_each_commit_and_the_same_in_a_second_attempt():
    class Keyed(Int8):
        def encode(self, values, out, *, key, left=None):
            self.keys.append(key)
            return super().encode(values, out, key=key, left=left)

    def body(comm):
        codec, found = Keyed(), []
        strategy = AllReduce(bucket_mb=0.001, codec=codec)
        parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
        strategy.start(parameters, comm, Generation(notes=1))
        for number in (1, 1, 2):
            codec.keys = []
            strategy.begin_step(Attempt(0, number, 1))
            strategy.begin_pass(1.0, last=True)
            for slot, parameter in enumerate(parameters):
                strategy.gradient(slot, torch.ones_like(parameter))
            strategy.exchange(torch.zeros(1, dtype=torch.float64))
            strategy.abandon()
            found.append(sorted(codec.keys))
        return found

    (first, again, second), others = run_ranks(2, body)
    assert first == again
    assert not {*first} & {*second}
    assert len({*first, *others[0]}) == len(first) + len(others[0])  # and in each segment


def test_a_model_that_float32_cannot_stand_for_is_refused():
    strategy = make_strategy("all_reduce", {}, "int8")

    def body(comm):
        wide = Parameter(torch.zeros(3, dtype=torch.float64))
        with pytest.raises(SpecError, match=r"sync\.codec cannot send"):
            strategy.start([wide], comm, Generation(notes=1))

    run_ranks(1, body)


def test_what_several_ranks_of_a_replica_have_is_encoded_alike_on_each():
    """Each rank has a part of one parameter, another length of it, and the whole of the other."""
    generator = torch.Generator().manual_seed(1)
    parts = [4 * torch.randn(size, generator=generator) for size in (300, 77)]
    common = torch.randn(2, 40, generator=generator)

    def agreed(comm, place, holders):
        parameters = [nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(len(parts[place])))]
        strategy = AllReduce(codec=Int8(), encode_vectors=True)
        strategy.start(parameters, comm, Generation(notes=0, mesh=InMesh(comm, holders)))
        for number in (1, 2):  # in the second, with what the first has left
            strategy.begin_step(Attempt(0, number, 0))
            strategy.begin_pass(0.5, last=True)
            strategy.gradient(1, parts[place] * number)
            strategy.gradient(0, common[comm.rank].clone())
            strategy.exchange(torch.zeros(0, dtype=torch.float64))
            strategy.hand_out()
            gradient = strategy.apply(lambda: parameters[0].grad)
        return gradient, strategy.own_state()["residual/0"]

    def on_each(apart):
        ranks = [(0, 1), (0, 1)] if apart else [(0,), (1,)]
        return [
            run_ranks(2, lambda comm, p=p: agreed(comm, p, [ranks[p], (p,)]))[0] for p in (0, 1)
        ]

    for one, other in zip(*on_each(apart=True), strict=True):
        assert torch.equal(one, other)
    (one, _), (other, _) = on_each(apart=False)
    assert not torch.equal(one, other)
