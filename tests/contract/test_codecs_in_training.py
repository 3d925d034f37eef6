"""What every codec promises of training: equal replicas, no rank that waits, nothing forgotten."""

import hashlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from helpers import run_processes
from instep.comm.codecs import CODECS
from instep.comm.memory import run_ranks
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation
from instep.system.host_memory import HostMemory

OPTIONS = {
    "powersgd": {"rank": 2, "start_after": 3},
    "dgc": {"density": 0.01, "warm_up": 8},
    "top_k": {"density": 0.02},
}
SHAPES = [(40, 30), (30,), (64, 48), (200,), (24, 40), (1,), (30, 64), (7, 3), (48, 48), (90,)]
"""Each fills a bucket of its own."""

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/adding-a-codec.md"


def shown_hook():
    """The communication hook of the guide, as a module that a job could name."""
    _, code = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.M | re.S)
    module = types.ModuleType("shown_hook")
    exec(compile(code, GUIDE.name, "exec"), module.__dict__)
    sys.modules["shown_hook"] = module
    return "shown_hook:MeanSign"


NAMES = [*(name for name in CODECS if name != "none"), shown_hook()]
EVERY = pytest.mark.parametrize("name", NAMES)


class Worker:
    """One process's strategy, with memory of the host that outlives it."""

    def __init__(self, name, memory=None):
        self.name, self.memory = name, memory or HostMemory()
        self.parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
        options = {"bucket_mb": 1e-6, "encode_vectors": True}
        self.strategy = make_strategy("all_reduce", options, name, OPTIONS.get(name, {}))
        if name == "dgc":
            self.strategy.codec.momentum = 0.9

    def generation(self, comm, first, steps, number, draining=()):
        """The parameters after each step, as one number; with one bucket after the other."""
        at = Attempt(0, first, number)
        self.strategy.start(
            self.parameters, comm, Generation(notes=1, memory=self.memory, at=at, draining=draining)
        )
        assert len(self.strategy._buckets) > 8
        seen = []
        for step in range(first + 1, first + steps + 1):
            draw = torch.Generator().manual_seed(1000 * step + comm.rank)
            self.strategy.begin_step(Attempt(0, step, number))
            if comm.rank not in draining:
                self.strategy.begin_pass(1 / (comm.size - len(draining)), last=True)
                for slot in reversed(range(len(SHAPES))):
                    gradient = torch.randn(SHAPES[slot], generator=draw) + 0.1
                    self.strategy.gradient(slot, gradient)
            self.strategy.exchange(torch.zeros(1, dtype=torch.float64))
            self.strategy.hand_out()
            self.strategy.apply(self.move)
            bits = b"".join(p.detach().numpy().tobytes() for p in self.parameters)
            seen.append(hashlib.sha256(bits).hexdigest())
        self.strategy.stop()
        return seen

    @torch.no_grad()
    def move(self):
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad


def together(workers, first, steps, number, draining=()):
    every = run_ranks(
        len(workers),
        lambda comm: workers[comm.rank].generation(comm, first, steps, number, draining),
    )
    assert all(seen == every[0] for seen in every)
    return every[0]


def carried(workers):
    """The sum over the workers of all that each remembers."""
    every = [worker.strategy.own_state() for worker in workers]
    names = sorted({name for own in every for name in own})
    return {
        name: sum(own[name].double() for own in every if name in own and own[name].numel())
        for name in names
    }


@pytest.mark.tail
@EVERY
def test_replicas_have_the_same_bits_after_every_step_with_many_buckets_under_way(name):
    assert len(set(together([Worker(name) for _ in range(3)], 0, 8, 1))) == 8


@pytest.mark.slow
@EVERY
def test_replicas_have_the_same_bits_over_ten_thousand_steps(name):
    together([Worker(name) for _ in range(3)], 0, 10_000, 1)


def one_of(comm, name, steps):
    return Worker(name).generation(comm, 0, steps, 1)


@pytest.mark.process
@pytest.mark.parametrize(
    "name", ["powersgd", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dgc", "top_k"))]
)
def test_processes_exchange_many_buckets_and_do_not_wait_for_each_other(name, tmp_path):
    every = run_processes(3, one_of, tmp_path, name, 15)
    assert every[0] == every[1] == every[2]


@pytest.mark.grid(5)
@EVERY
def test_what_workers_remember_is_handed_over_from_4_to_3_to_4(name):
    workers = [Worker(name) for _ in range(4)]
    together(workers, 0, 6, 1)
    before = carried(workers)
    together(workers, 6, 0, 2, draining=[3])
    after = carried(workers[:3])
    assert before.keys() == after.keys()
    for kind, total in before.items():
        torch.testing.assert_close(after[kind], total, rtol=1e-6, atol=1e-6)
        assert (after[kind] - total).norm() <= 1e-6 * total.norm()
    assert not any(own.any() for own in workers[3].strategy.own_state().values())
    newcomer = Worker(name)
    newcomer.strategy.load_state(workers[0].strategy.state())
    for one, other in zip(newcomer.parameters, workers[0].parameters, strict=True):
        one.data.copy_(other.data)
    together([*workers[:3], newcomer], 6, 3, 3)


@pytest.mark.grid(5)
@EVERY
def test_a_worker_killed_at_any_commit_is_replaced_to_the_bit(name):
    calm = together([Worker(name) for _ in range(3)], 0, 8, 1)
    workers, seen = [Worker(name) for _ in range(3)], []
    for number in range(4):
        seen += together(workers, 2 * number, 2, number)
        victim, peer = number % 3, (number + 1) % 3
        newcomer = Worker(name, workers[victim].memory)
        for one, other in zip(newcomer.parameters, workers[peer].parameters, strict=True):
            one.data.copy_(other.data)
        newcomer.strategy.load_state(workers[peer].strategy.state())
        if newcomer.strategy.laws:
            left = newcomer.memory.at(*newcomer.memory.stamps()[0])
            newcomer.strategy.load_left(left, newcomer.parameters)
        workers[victim] = newcomer
    assert seen == calm
