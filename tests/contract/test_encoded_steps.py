"""Every codec, summed by all or by servers: equal bits on every rank, no hang, nothing lost."""

import hashlib

import pytest
import torch
from torch.nn import Parameter

from helpers import run_processes
from instep.comm.codecs import CODECS
from instep.comm.memory import run_ranks
from instep.engine.served.optimizer import ServedUpdate
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation, Servers
from instep.system.host_memory import HostMemory

AT_RANDOM = ", at random"
NAMES = [*(name for name in CODECS if name != "none"), f"int8{AT_RANDOM}", f"int4{AT_RANDOM}"]
WITH_SERVERS = [name for name in NAMES if name not in {"dgc", "nonzero", "powersgd"}]
"""Servers refuse the others: `test_coded_servers.py`."""
SHAPES = [(24, 16), (16,), *[(20, 16)] * 7, (30, 16), ()]
"""With buckets of a kilobyte, each matrix has one of its own: nine are under way at once."""


def strategy_with(name, seed=0, vectors=False, servers=0):
    codec, comma, _ = name.partition(",")
    options = {"rounding": "random"} if comma else {}
    settings = {"bucket_mb": 0.001, "encode_vectors": vectors}
    strategy = "server_sync" if servers else "all_reduce"
    return make_strategy(strategy, settings, codec, options, seed)


class Replica:
    """Trains each parameter towards zero, with gradients that differ between ranks."""

    def __init__(self, name, comm, drawn=1, own=None, vectors=False, servers=0):
        self.comm, self.workers = comm, comm.size - servers
        self.strategy = strategy_with(name, vectors=vectors, servers=servers)
        self.parameters = [Parameter(torch.full(shape, 0.5)) for shape in SHAPES]
        self.generator = torch.Generator().manual_seed(100 * drawn + comm.rank)
        self.strategy.load_own(own or {})
        generation = Generation(notes=1)
        if servers:
            update = ServedUpdate(
                torch.optim.SGD(self.parameters, lr=0.05),
                None,
                self.parameters,
                seed=0,
                max_grad_norm=None,
                scaler=torch.amp.GradScaler("cuda", enabled=False),
            )
            self.update = lambda: update.apply(1)
            known = Servers(range(self.workers, comm.size), update)
            generation = Generation(notes=1, memory=HostMemory(), servers=known)
        self.strategy.start(self.parameters, comm, generation)
        self.given = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        self.agreed = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]

    def step(self, number):
        self.strategy.begin_step(Attempt(0, number, 1))
        self.strategy.begin_pass(1.0 / self.workers, last=True)
        for slot in reversed(range(len(SHAPES))) if self.comm.rank < self.workers else ():
            parameter = self.parameters[slot].detach()
            noise = torch.randn(parameter.shape, generator=self.generator)
            gradient = parameter + noise * (1 + self.comm.rank)
            self.given[slot] += gradient.double() / self.workers
            self.strategy.gradient(slot, gradient)
        self.strategy.exchange(torch.zeros(1, dtype=torch.float64))
        self.strategy.prepare(number, 1.0)
        self.strategy.hand_out()
        self.strategy.apply(self.update)

    @torch.no_grad()
    def update(self):
        for slot, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.agreed[slot] += parameter.grad.double()
                parameter -= 0.05 * parameter.grad

    def digest(self):
        return hashlib.sha256(
            b"".join(parameter.detach().numpy().tobytes() for parameter in self.parameters)
        ).hexdigest()


def digests(comm, name, steps, every, servers=0):
    replica, found = Replica(name, comm, servers=servers), []
    for number in range(1, steps + 1):
        replica.step(number)
        if number % every == 0:
            found.append(replica.digest())
    assert all(parameter.isfinite().all() for parameter in replica.parameters)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_replicas_have_the_same_bits_after_each_step_with_nine_buckets_under_way(name):
    one, *others = run_ranks(3, digests, name, 8, 1)
    assert len(set(one)) == 8
    assert all(other == one for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_replicas_have_the_same_bits_over_10000_steps(name):
    one, other = run_ranks(2, digests, name, 10_000, 10)
    assert one == other


def all_digests(comm, names, steps, every, servers=0):
    return [digests(comm, name, steps, every, servers) for name in names]


@pytest.mark.process
def test_processes_do_not_hang_with_nine_buckets_under_way_and_have_the_same_bits(tmp_path):
    one, other, third = run_processes(3, all_digests, tmp_path, NAMES, 10, 10)
    assert one == other == third


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "servers", "steps"),
    [*((name, 0, 10_000) for name in NAMES), *((name, 2, 2_000) for name in WITH_SERVERS)],
)
def test_processes_do_not_hang_within_thousands_of_steps_and_have_the_same_bits(
    tmp_path, name, servers, steps
):
    how = [name], steps, 10, servers
    one, other, *_ = run_processes(2 + servers, all_digests, tmp_path, *how, timeout_s=600)
    assert one == other
    assert len(one[0]) == steps // 10


@pytest.mark.grid
@pytest.mark.parametrize("vectors", [False, True], ids=["matrices", "vectors too"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_is_kept_through_checkpoints_on_4_and_3_and_4_ranks(name, vectors):
    """A checkpoint has the sum over the ranks; the lowest rank of those that resume takes it up."""
    if not strategy_with(name).laws:
        pytest.skip("it carries nothing over")
    own, given, agreed = {}, 0.0, 0.0

    def some_steps(comm, drawn):
        mine = own if comm.rank == 0 else {}
        replica = Replica(name, comm, drawn, mine, vectors)
        for number in range(1, 5):
            replica.step(number)
        return replica.given, replica.agreed, replica.strategy.own_state()

    for drawn, size in enumerate((4, 3, 4)):
        ranks = run_ranks(size, some_steps, drawn)
        given += sum(torch.cat([part.flatten() for part in rank[0]]) for rank in ranks)
        agreed += torch.cat([part.flatten() for part in ranks[0][1]])
        own = {key: sum(rank[2][key] for rank in ranks) for key in ranks[0][2]}
    assert ("residual/1" in own) == (vectors or name == "dgc")  # has the momentum of all
    parts = [own.get(f"residual/{n}", torch.zeros(s)).flatten() for n, s in enumerate(SHAPES)]
    torch.testing.assert_close(agreed + torch.cat(parts), given, rtol=1e-6, atol=1e-4)


def test_rounding_at_random_carries_nothing_over_and_is_right_on_average():
    name, steps = f"int8{AT_RANDOM}", 100
    assert strategy_with(name).laws == {}

    def some_steps(comm):
        replica = Replica(name, comm)
        for number in range(1, steps + 1):
            replica.step(number)
        assert not replica.strategy.own_state()
        return replica.given, replica.agreed

    ranks = run_ranks(2, some_steps)
    for slot, shape in enumerate(SHAPES):
        given = sum(rank[0][slot] for rank in ranks)
        off = (ranks[0][1][slot] - given) / steps**0.5
        assert off.abs().max() < 0.15, shape  # a level is about 0.05
        if len(shape) == 2:
            assert off.square().mean() ** 0.5 > 0.001


def test_another_seed_draws_other_numbers():
    def one_step(comm, seed):
        replica = Replica(f"int4{AT_RANDOM}", comm)
        replica.strategy.stop()
        replica.strategy = strategy_with(f"int4{AT_RANDOM}", seed)
        replica.strategy.start(replica.parameters, comm, Generation(notes=1))
        replica.step(1)
        return replica.digest()

    first, again, other = (run_ranks(2, one_step, seed)[0] for seed in (0, 0, 1))
    assert first == again != other
