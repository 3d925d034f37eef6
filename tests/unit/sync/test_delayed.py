"""Gradients one step late: as a plain PyTorch loop that delays them too, and nothing is lost."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from helpers import Table, batches, far_apart, train
from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks
from instep.errors import SpecError
from instep.records import Attempt, Law
from instep.sync.base import make_strategy
from instep.sync.delayed import Delayed, InTurns
from instep.sync.generation import Generation
from instep.sync.sums import Exact
from instep.system.host_memory import HostMemory

STEPS, GLOBAL_BATCH, CLIP = 9, 12, 0.3


class Model(nn.Module):
    """Frozen, shared and unused parameters; statistics that move in the forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.second(torch.tanh(self.first(x))))))


torch.manual_seed(11)
MODEL = Model().double()  # built once: threads draw from one generator


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=5e-3, eps=1e-3)


def schedule(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


def late_loop(make_optimizer, table, steps=STEPS):
    """The reference: plain PyTorch on whole batches; each gradient is applied a step after its own,
    and the last step applies two."""
    trained = copy.deepcopy(MODEL)
    parameters = [p for p in trained.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters)
    scheduler = schedule(optimizer)
    waiting, losses = [], []
    for step, (inputs, targets) in enumerate(batches(table, GLOBAL_BATCH, steps), 1):
        loss = nn.functional.mse_loss(trained(inputs), targets)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        waiting.append(grads)
        losses.append(float(loss.detach()))
        while len(waiting) > (step < steps):
            for parameter, grad in zip(parameters, waiting.pop(0), strict=True):
                parameter.grad = grad
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            scheduler.step()
    return dict(trained.state_dict()), losses


def run(comm, make_optimizer, table, options=None, **more):
    options = options or {"delayed": True, "bucket_mb": 0.0003}
    settings = {"steps": STEPS, "global_batch": GLOBAL_BATCH, "clip": CLIP, "schedule": schedule}
    return train(comm, MODEL, make_optimizer, table, options=options, **settings | more)


@pytest.mark.grid(4)
@pytest.mark.parametrize("merge", [False, True], ids=["micro-batches", "merged"])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_training_equals_a_plain_loop_that_is_one_step_late(ranks, make_optimizer, merge):
    table = Table(37, dtype=torch.float64)  # the last batch of an epoch has one sample
    wanted, losses = late_loop(make_optimizer, table)
    for found, said in run_ranks(ranks, lambda comm: run(comm, make_optimizer, table, merge=merge)):
        assert far_apart(found, wanted) < 1e-12
        assert said == pytest.approx(losses, rel=1e-12)
    at_once, _ = run(AloneComm(), make_optimizer, table, {"delayed": False})
    assert far_apart(at_once, wanted) > 1e-3  # so the check above could have failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_are_the_same_on_any_number_of_ranks(dtype):
    table = Table(37, dtype=torch.float64)
    wanted, _ = late_loop(sgd, table)
    every = [
        found
        for ranks in (1, 2, 3)
        for found, _ in run_ranks(ranks, lambda comm: run(comm, sgd, table, exact=True))
    ]
    assert far_apart(every[0], wanted) < 1e-12
    assert all(torch.equal(each[name], every[0][name]) for each in every for name in each)


def test_a_run_of_one_step_applies_it():
    table = Table(12, dtype=torch.float64)
    wanted, _ = late_loop(sgd, table, steps=1)
    for found, _ in run_ranks(2, lambda comm: run(comm, sgd, table, steps=1)):
        assert far_apart(found, wanted) < 1e-12


class Worker:
    """One process's strategy; whole numbers as gradients, so that sums are exact."""

    def __init__(self, *, parts=0, dtype=torch.float32, memory=None):
        self.parameters = [Parameter(torch.zeros(n, dtype=dtype)) for n in (5, 3, 7)]
        self.strategy = make_strategy("all_reduce", {"delayed": True, "bucket_mb": 1e-5})
        assert isinstance(self.strategy, Delayed)
        self.memory, self.parts = memory or HostMemory(), parts
        self.seen = []

    def generation(self, comm, first, stop, number, draining=(), scale=1.0):
        at = Attempt(0, first, number)
        self.strategy.start(
            self.parameters,
            comm,
            Generation(
                notes=1,
                parts=self.parts,
                memory=self.memory,
                at=at,
                draining=draining,
            ),
        )
        for step in range(first + 1, stop + 1):
            while self.exchange(comm, step, number, draining) is None:
                pass
            assert self.strategy.prepare(step, scale * step) == 1.0
            self.strategy.hand_out()
            self.strategy.apply(self.move)
        self.strategy.stop()

    def exchange(self, comm, step, number, draining):
        self.strategy.begin_step(Attempt(0, step, number))
        if comm.rank not in draining:
            self.strategy.begin_pass(1.0, last=True)
            for slot in (2, 1, 0):
                if slot == 1 and step % 2 == 0:
                    continue  # has no gradient in every other step
                gradient = torch.full_like(self.parameters[slot], 10 * step + comm.rank + 1)
                self.strategy.gradient(slot, gradient)
        return self.strategy.exchange(torch.ones(1, dtype=torch.float64))

    def move(self):
        grads = [p.grad for p in self.parameters]
        self.seen.append([None if g is None else float(g.unique()) for g in grads])


def together(workers, *arguments, **more):
    run_ranks(len(workers), lambda c: workers[c.rank].generation(c, *arguments, **more))
    assert all(worker.seen == workers[0].seen for worker in workers)


def total(step, ranks, scale=1.0):
    return scale * step * (10 * step * ranks + sum(range(1, ranks + 1)))


@pytest.mark.parametrize("parts", [0, 4], ids=["order", "bits"])
def test_a_gradient_keeps_its_own_scale_and_who_had_one(parts):
    workers = [Worker(parts=parts) for _ in range(3)]
    for worker in workers:
        worker.strategy.last = 4
    together(workers, 0, 4, 1)
    wanted = [[total(s, 3), total(s, 3) if s % 2 else None, total(s, 3)] for s in (1, 2, 3, 4)]
    assert workers[0].seen == wanted
    assert not any(own.any() for own in workers[0].strategy.own_state().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("parts", [0, 4], ids=["order", "bits"])
def test_what_waits_is_handed_over_when_members_change(parts, dtype):
    workers = [Worker(parts=parts, dtype=dtype) for _ in range(4)]
    assert workers[0].strategy.laws == {"late": Law.SUM}
    together(workers, 0, 2, 1, scale=0.5)
    together(workers, 2, 2, 2, draining=[3])
    assert not any(own.any() for own in workers[3].strategy.own_state().values())
    together(workers[:3], 2, 4, 3)
    newcomer = Worker(parts=parts, dtype=dtype)
    newcomer.strategy.load_state(workers[0].strategy.state())
    newcomer.seen = list(workers[0].seen)
    workers[3] = newcomer
    for worker in workers:
        worker.strategy.last = 5
    together(workers, 4, 5, 4)
    of = [(1, 4, 0.5), (2, 4, 0.5), (3, 3, 1.0), (4, 3, 1.0), (5, 4, 1.0)]
    near = 1e-2 if dtype == torch.bfloat16 else 1e-12
    for seen, (step, ranks, scale) in zip(workers[0].seen, of, strict=True):
        assert seen[0] == pytest.approx(total(step, ranks, scale), rel=near)
        assert (seen[1] is None) == (step % 2 == 0)


@pytest.mark.parametrize("parts", [0, 4], ids=["order", "bits"])
def test_what_waits_is_found_in_memory_that_outlives_the_process(parts):
    workers = [Worker(parts=parts) for _ in range(2)]
    together(workers, 0, 3, 1)
    heir = Worker(parts=parts, memory=workers[1].memory)
    heir.strategy.load_state(workers[0].strategy.state())
    left = workers[1].memory.at(0, 3, 1)
    heir.strategy.load_left(left, heir.parameters)
    heir.seen = list(workers[0].seen)
    together([workers[0], heir], 3, 4, 2)
    assert heir.seen[-1] == [total(3, 2), total(3, 2), total(3, 2)]


@pytest.mark.parametrize("parts", [0, 4], ids=["order", "bits"])
def test_a_step_that_is_abandoned_leaves_what_waits(parts):
    def body(comm):
        worker = Worker(parts=parts)
        worker.generation(comm, 0, 2, 1)
        strategy = worker.strategy
        strategy.start(
            worker.parameters, comm, Generation(notes=1, parts=parts, at=Attempt(0, 2, 2))
        )
        for _ in range(3):
            while worker.exchange(comm, 3, 2, ()) is None:
                pass
            strategy.prepare(3, 3.0)
            strategy.hand_out()
            strategy.abandon()
        while worker.exchange(comm, 3, 2, ()) is None:
            pass
        strategy.prepare(3, 3.0)
        strategy.hand_out()
        strategy.apply(worker.move)
        return worker.seen

    for seen in run_ranks(2, body):
        assert seen[-1] == [total(2, 2), None, total(2, 2)]


def test_a_gradient_that_is_not_finite_makes_its_own_update_so_and_no_other():
    parameters = [Parameter(torch.zeros(2)), Parameter(torch.zeros(2))]
    comm = AloneComm()
    sums = InTurns(Exact(parameters, comm, 2), Exact(parameters, comm, 2))
    rooms = [[torch.zeros(2, dtype=torch.int32) for _ in parameters] for _ in range(3)]
    found = []
    for step in range(3):
        for _ in range(2):
            sums.begin_pass()
            for index, room in enumerate(rooms[step]):
                value = float("inf") if (step, index) == (0, 1) else 1.0 + step
                sums.add(index, torch.full((2,), value), 1.0, room, True)
            if sums.settle(sums.raised()):
                break
        if step:
            before = [sums.gradient(i, room) for i, room in enumerate(rooms[step - 1])]
            found.append([float(gradient[0]) for gradient in before])
        sums.end_step()
        saved = copy.deepcopy(sums.state())
        sums = InTurns(Exact(parameters, comm, 2), Exact(parameters, comm, 2))
        sums.load_state(saved)
    assert found[0][0] == 1.0
    assert found[0][1] != found[0][1]
    assert found[1] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "codec", "said"),
    [
        ({"delayed": "yes"}, "none", "needs to be true or false"),
        ({"delayed": True}, "bfloat16", "sends plain numbers"),
        ({"delayed": True, "encode_vectors": True}, "none", "sends plain numbers"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, codec, said):
    with pytest.raises(SpecError, match=said):
        make_strategy("all_reduce", options, codec)
