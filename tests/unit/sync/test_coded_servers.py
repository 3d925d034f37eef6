"""Servers and a codec: what a plain loop makes of it, to the bit, and nothing left out is lost.

The loop is one process: for each worker what it has left out, encode, decode, add up, the
optimizer, and the encoded difference. Workers and servers are threads.
"""

import copy
import hashlib
import itertools

import pytest
import torch
from test_server_sync import (
    FIRST,
    INPUTS,
    MODEL,
    OPTIMIZERS,
    PARTS,
    STEPS,
    TARGETS,
    Rank,
    alike,
    scaler,
    update_of,
)
from torch import nn

from helpers import run_processes
from instep.comm.buckets import lay_out
from instep.comm.codecs import CODECS
from instep.comm.codecs.base import draw_key
from instep.comm.codecs.none import Identity
from instep.comm.memory import MemoryComm, run_ranks
from instep.engine.gradients import Gradients
from instep.engine.served.optimizer import ServedUpdate
from instep.engine.served.written import put_together
from instep.engine.update import Update
from instep.errors import SpecError
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import SERVED, Generation, Servers
from instep.sync.servers.cuts import cut
from instep.sync.servers.server_sync import ServerSync
from instep.system.host_memory import HostMemory

INT8 = ("int8", {"block": 256})
EVERY = [
    INT8,
    ("int8", {"rounding": "random"}),
    ("int4", {}),
    ("sign", {}),
    ("top_k", {"density": 0.2}),
    ("bfloat16", {}),
    ("float16", {}),
]


class Plain:
    """What servers and workers are to do, in one process."""

    def __init__(
        self, make, workers, servers, *, codec, model=MODEL, limit=None, decay=0.7, vectors=False
    ):
        self.model, self.workers = copy.deepcopy(model), workers
        self.held = list(self.model.parameters())
        self.own = [nn.Parameter(p.detach().clone()) for p in self.held]  # the optimizer's
        self.update = update_of(Update, self.own, make, limit, decay)
        self.codec = CODECS.factory(codec[0], codec[1], where="")(**codec[1])
        self.coded = [vectors or p.dim() > 1 for p in self.held]
        self.left = [[torch.zeros_like(p) for p in self.held] for _ in range(workers)]
        plain = [slot for slot, coded in enumerate(self.coded) if not coded]
        self.buckets = lay_out(self.held, [300_000], last=plain)
        parts = cut(self.buckets, self.held, servers, by_element=True)
        self.segments = [s for part in parts for s in part.segments if self.coded[s.pieces[0].slot]]

    def step(self, number, scale=1.0):
        totals = [torch.zeros_like(p) for p in self.held]
        there = [False] * len(totals)
        for worker in range(self.workers):
            given = self._gradient(number, worker, scale)
            there = [seen or own is not None for seen, own in zip(there, given, strict=True)]
            given = [
                torch.zeros_like(total) if own is None else own
                for own, total in zip(given, totals, strict=True)
            ]
            for own, total, coded in zip(given, totals, self.coded, strict=True):
                if not coded:
                    total += own
            for segment in self.segments:
                if not self.codec.unbiased:
                    self._put(segment, given, self._of(segment, self.left[worker]), add=True)
                values = self._of(segment, given)
                sent, left = self._sent(values, number + 1, segment, worker)
                self._put(segment, totals, sent, add=True)
                if not self.codec.unbiased:
                    self._put(segment, self.left[worker], left)
        for parameter, total, used in zip(self.own, totals, there, strict=True):
            parameter.grad = total * scale if used else None
        self.update.apply(number + 1)
        for segment in self.segments:
            lacks = self._of(segment, self.own) - self._of(segment, self.held)
            self._put(segment, self.held, self._sent(lacks, number + 1, segment, -1)[0], add=True)
        for own, held, coded in zip(self.own, self.held, self.coded, strict=True):
            if not coded:
                held.data.copy_(own.data)

    def _gradient(self, number, worker, scale):
        own = [None] * len(self.held)
        inputs, targets = INPUTS[number % STEPS], TARGETS[number % STEPS]
        for part in range(worker, PARTS, self.workers):
            loss = nn.functional.mse_loss(self.model(inputs[part]), targets[part])
            found = torch.autograd.grad(loss, self.held, allow_unused=True)
            for slot, each in enumerate(found):
                if each is not None:
                    weight, own_before = 1 / PARTS / scale, own[slot]
                    fresh = own_before is None
                    own[slot] = each * weight if fresh else own_before.add(each, alpha=weight)
        return own

    def _sent(self, values, number, segment, who):
        payload, left = torch.zeros(self.codec.size(len(values)), dtype=torch.uint8), values.clone()
        key = draw_key(number, segment.bucket, segment.start, who)
        self.codec.encode(values, payload, key=key, left=left)
        decoded = torch.zeros_like(values)
        self.codec.add_into(decoded, payload)
        return decoded, left

    @staticmethod
    def _of(segment, tensors):
        return torch.cat(
            [tensors[p.slot].detach().flatten()[p.start : p.stop] for p in segment.pieces]
        )

    @staticmethod
    def _put(segment, tensors, values, *, add=False):
        at = 0
        for piece in segment.pieces:
            room = tensors[piece.slot].detach().view(-1)[piece.start : piece.stop]
            own = values[at : at + len(room)]
            at += len(room)
            room.copy_(room + own if add else own)


def trained(comm, make, servers, *, scale=1.0, steps=STEPS, **how):
    rank = Rank(make, servers, **how)
    rank.start(comm)
    rank.seen = hashlib.sha256()
    for step in range(steps):
        rank.exchange(step, scale)
        rank.commit(step, scale)
        rank.seen.update(bits_of(rank.parameters))
    rank.stop()
    return rank


def bits_of(parameters):
    return b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)


torch.manual_seed(6)
SMALL = nn.Sequential(nn.Linear(5, 90), nn.Tanh(), nn.Linear(90, 60), nn.Linear(60, 1))


@pytest.mark.parametrize(
    ("codec", "workers", "servers", "options", "limit", "steps"),
    [
        *((codec, 2, 3, {}, None, STEPS) for codec in EVERY),
        (INT8, 1, 1, {}, None, STEPS),
        (INT8, 3, 1, {"encode_vectors": True}, None, STEPS),
        (INT8, 3, 2, {"overlap": False, "bucket_mb": 0.3}, None, STEPS),
        (INT8, 2, 2, {}, 0.5, STEPS),
        *(
            pytest.param(codec, 3, 2, {}, None, 10_000, marks=pytest.mark.slow)
            for codec in [*EVERY, ("int4", {"rounding": "random"})]
        ),
    ],
    ids=str,
)
def test_it_is_a_plain_loop_to_the_bit(codec, workers, servers, options, limit, steps):
    """After each step, on all workers."""
    make, scale = OPTIMIZERS["adamw"], 0.75 if limit else 1.0
    vectors = options.get("encode_vectors", False)
    how = {"codec": codec, "limit": limit}
    if steps > STEPS:
        how |= {"model": SMALL, "decay": 1.0}  # else nothing moves any more in the end
    plain, seen = Plain(make, workers, servers, vectors=vectors, **how), hashlib.sha256()
    for number in range(steps):
        plain.step(number, scale)
        seen.update(bits_of(plain.held))
    how |= {"options": options, "scale": scale, "steps": steps}
    ranks = run_ranks(workers + servers, lambda comm: trained(comm, make, servers, **how))
    every = {rank.seen.digest() for rank in ranks[:workers]}
    assert every == {seen.digest()} if limit is None else len(every) == 1
    wanted = [p.detach() for p in plain.held]
    for rank in ranks:
        found = rank.tensors()
        if limit is None:
            assert alike(found, wanted)
        elif rank.strategy._mine < 0:
            for own, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
        assert alike(found, ranks[0].tensors())
    for number, rank in enumerate(ranks[:workers] if limit is None else ()):
        own = rank.strategy.own_state()
        for slot, left in enumerate(plain.left[number]):
            kept = own.get(f"residual/{slot}", torch.zeros(left.shape))
            assert torch.equal(kept, left), slot
    assert any(not torch.equal(own, held) for own, held in zip(plain.own, plain.held, strict=True))


def test_a_codec_that_leaves_nothing_out_changes_no_bit():
    """The difference of two numbers that are near each other is exact, and so is their sum."""
    drawn = torch.Generator().manual_seed(1)
    start = [1 + torch.rand(shape, generator=drawn) for shape in ((300, 300), (7,), (40, 9))]
    given = [[torch.randn(p.shape, generator=drawn) for p in start] for _ in range(2)]

    def body(comm, codec):
        parameters = [nn.Parameter(p.clone()) for p in start]
        update = update_of(
            ServedUpdate, parameters, lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)
        )
        strategy = ServerSync(bucket_mb=0.1, codec=codec)
        servers = Servers([2, 3], update)
        strategy.start(
            parameters, comm, Generation(notes=0, memory=HostMemory(), at=FIRST, servers=servers)
        )
        for step in range(1, 5):
            strategy.begin_step(Attempt(0, step, 1))
            strategy.begin_pass(0.5, last=True)
            for slot in (2, 1, 0) if comm.rank < 2 else ():
                strategy.gradient(slot, given[comm.rank][slot])
            strategy.exchange(torch.zeros(0, dtype=torch.float64))
            strategy.prepare(step, 1.0)
            strategy.apply(lambda: update.apply(step))  # noqa: B023
        return [p.detach() for p in parameters]

    found, wanted = (run_ranks(4, body, codec)[0] for codec in (Identity(), None))
    assert all(map(torch.equal, found, wanted))
    assert not any(map(torch.equal, found, start))


# ---- a step that is not like the one before


@pytest.mark.parametrize("codec", ["int8", "sign"])
def test_what_servers_undo_and_what_nobody_uses_leaves_no_trace(codec):
    """Servers that move early and guess wrong end as those that wait for all."""
    story = [(1, 1), (1, 1), (1, 0), (1, 1), (0, 1), (0, 0), (1, 1), (1, 1), (1, 1)]
    scales = [1, 1, 1, 1, 1, 1, 1, 0.5, 1]
    drawn = torch.Generator().manual_seed(2)
    given = [[torch.randn(s, generator=drawn) for s in ((300, 60), (60, 20))] for _ in story]

    def body(comm, overlap):
        parameters = [nn.Parameter(torch.ones(300, 60)), nn.Parameter(torch.ones(60, 20))]
        update = update_of(ServedUpdate, parameters, OPTIMIZERS["sgd"])
        strategy = make_strategy("server_sync", {"bucket_mb": 8.0, "overlap": overlap}, codec)
        servers, ends, wrong = Servers([2], update), [], 0
        strategy.start(
            parameters, comm, Generation(notes=0, memory=HostMemory(), at=FIRST, servers=servers)
        )
        for number, (used, gradients) in enumerate(zip(story, given, strict=True), 1):
            before = [p.detach().clone() for p in parameters]
            strategy.begin_step(Attempt(0, number, 1))
            strategy.begin_pass(0.5, last=True)
            for slot in [slot for slot in (1, 0) if used[slot]] if comm.rank < 2 else ():
                strategy.gradient(slot, gradients[slot] * (1 + comm.rank))
            strategy.exchange(torch.zeros(0, dtype=torch.float64))
            strategy.prepare(number, scales[number - 1])
            wrong = strategy._moves._guess._wrong
            left = strategy.own_state()
            strategy.apply(lambda: update.apply(number))  # noqa: B023
            after = strategy.own_state()
            for slot in (0, 1):
                moved = not torch.equal(before[slot], parameters[slot])
                assert moved == bool(used[slot]) or comm.rank == 2
                name = f"residual/{slot}"
                assert used[slot] or torch.equal(left[name], after[name])
            ends.append([p.detach().clone() for p in parameters] + [after["residual/0"]])
        return ends, wrong

    early, late = run_ranks(3, body, True), run_ranks(3, body, False)
    assert early[2][1] > 0
    for (own, _), (other, _) in zip(early, late, strict=True):
        for one, two in zip(own, other, strict=True):
            assert all(map(torch.equal, one, two))
    assert all(map(torch.equal, early[0][0][-1][:2], early[1][0][-1][:2]))


def test_a_step_that_does_not_happen_leaves_nothing():
    def body(comm, disturbed):
        rank = Rank(OPTIMIZERS["adamw"], 2, codec=INT8)
        rank.start(comm)
        for step in (0, 1):
            rank.exchange(step)
            rank.commit(step)
        if disturbed:
            rank.exchange(3)
            rank.strategy.abandon()
        rank.exchange(2)
        rank.commit(2)
        return rank.tensors(), rank.strategy.own_state()

    for own, other in zip(run_ranks(4, body, True), run_ranks(4, body, False), strict=True):
        assert alike(own[0], other[0])
        assert all(torch.equal(own[1][name], left) for name, left in other[1].items())


class Sorts(nn.Module):
    """Parameters of several types and layouts, each in a bucket of its own; one is shared."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.low = nn.Parameter(torch.randn(8, 8).bfloat16())
        self.short = nn.Parameter(torch.randn(8, 8).half())
        self.some = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.some[7].weight = self.some[0].weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.never = nn.Parameter(torch.randn(3, 3))

    def forward(self, images):
        x = self.first(images).mean((2, 3)) @ self.low.float() @ self.short.float()
        for each in self.some:
            x = torch.tanh(each(x)) + self.frozen
        return x.square().mean()


SORTS = Sorts()  # built once: threads draw from one generator


def ends_of(comm, name, steps):
    """After each step, all that two workers hold; there are two servers."""
    model = copy.deepcopy(SORTS)
    parameters = [p for p in model.parameters() if p.requires_grad]
    update = update_of(ServedUpdate, parameters, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    strategy = make_strategy("server_sync", {"bucket_mb": 1e-6, "encode_vectors": True}, name)
    how = {"servers": Servers([2, 3], update), "memory": HostMemory(), "at": FIRST}
    strategy.start(parameters, comm, Generation(notes=0, **how))
    assert len(strategy._buckets) > 8
    gradients, ends = Gradients(parameters, strategy.gradient), []
    for number in range(1, steps + 1):
        strategy.begin_step(Attempt(0, number, 1))
        if comm.rank < 2:
            strategy.begin_pass(0.5, last=True)
            drawn = torch.Generator().manual_seed(10 * number + comm.rank)
            model(torch.randn(2, 3, 5, 5, generator=drawn)).backward()
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.prepare(number, 1.0)
        strategy.apply(lambda: update.apply(number))  # noqa: B023
        ends.append(
            [p.detach().float().flatten().tolist() for p in parameters] if comm.rank < 2 else []
        )
    gradients.close()
    strategy.stop()
    return ends


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ["int8", "int4", "sign", "top_k", "bfloat16", "float16"])
def test_workers_have_the_same_bits_with_parameters_of_every_sort_and_many_buckets(name):
    first, second, *_ = run_ranks(4, ends_of, name, 10)
    assert first == second
    assert all(one != two for one, two in itertools.pairwise(first))


@pytest.mark.slow
@pytest.mark.process
def test_processes_do_not_wait_for_each_other_and_tell_the_same_as_threads(tmp_path):
    wanted = run_ranks(4, ends_of, "int8", 10)
    assert run_processes(4, ends_of, tmp_path, "int8", 10) == wanted


# ---- what is left out outlives everything


def restored(rank, other):
    """A process that was begun anew has what another worker gave, and what lay in its memory."""
    new = Rank(OPTIMIZERS["adamw"], rank.servers, memory=rank.memory, codec=INT8)
    with torch.no_grad():
        for own, given in zip(new.parameters, other.parameters, strict=True):
            own.copy_(given)
    new.update.scheduler.load_state_dict(other.update.scheduler.state_dict())
    new.update.optimizer.load_state_dict(other.update.optimizer.state_dict())
    left = new.memory.at(*new.memory.stamps()[0])
    new.strategy.load_left(left, new.parameters)
    return new


def steps(comm, rank, numbers, at, draining=()):
    rank.start(comm, at=at, draining=draining)
    for step in numbers:
        rank.exchange(step)
        rank.commit(step)
    rank.stop()
    return rank


@pytest.mark.grid(2)
@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (3,), (0, 2, 3)], ids=str)
def test_processes_that_are_killed_leave_no_trace(lost):
    make = OPTIMIZERS["adamw"]
    wanted = run_ranks(4, lambda comm: trained(comm, make, 2, codec=INT8))
    ranks = run_ranks(4, lambda comm: trained(comm, make, 2, codec=INT8, steps=2))
    other = ranks[1 if 0 in lost else 0]
    ranks = [restored(rank, other) if n in lost else rank for n, rank in enumerate(ranks)]
    found = run_ranks(4, lambda comm: steps(comm, ranks[comm.rank], (2, 3), Attempt(0, 2, 2)))
    for own, one in zip(found, wanted, strict=True):
        assert alike(own.tensors(), one.tensors())
        left, before = own.strategy.own_state(), one.strategy.own_state()
        assert left.keys() == before.keys()
        assert all(torch.equal(left[name], before[name]) for name in left)


def resumed(ranks, workers, servers):
    """Processes that begin from what a checkpoint has of others."""
    names = [name for name, _ in ranks[0].model.named_parameters()]
    own, shards = {}, {}
    for rank in ranks:
        for name, tensor in rank.strategy.own_state().items():
            kind, slot, *rest = name.split("/", 2)
            if kind == "residual":
                own[name] = own.get(name, 0) + tensor
            else:
                shards[f"{names[int(slot)]}/{rest[0]}"] = tensor
    every = []
    for number in range(workers + servers):
        new = Rank(OPTIMIZERS["adamw"], servers, codec=INT8)
        with torch.no_grad():
            for parameter, given in zip(new.parameters, ranks[0].parameters, strict=True):
                parameter.copy_(given)
        new.update.scheduler.load_state_dict(ranks[0].update.scheduler.state_dict())
        new.update.optimizer.load_state_dict(ranks[0].update.optimizer.state_dict())
        new.update.optimizer.state.update(put_together(shards, new.model))
        new.strategy.load_own(own if number == 0 else {})
        every.append(new)
    return every


def test_a_run_that_is_resumed_goes_on_as_if_nothing_had_been():
    make = OPTIMIZERS["adamw"]
    wanted = run_ranks(3, lambda comm: trained(comm, make, 2, codec=INT8))
    ranks = run_ranks(3, lambda comm: trained(comm, make, 2, codec=INT8, steps=2))
    ranks = resumed(ranks, 1, 2)
    found = run_ranks(3, lambda comm: steps(comm, ranks[comm.rank], (2, 3), Attempt(0, 2, 2)))
    assert all(alike(own.tensors(), one.tensors()) for own, one in zip(found, wanted, strict=True))


def residual_of(rank):
    return rank.strategy.own_state().get("residual/0", torch.zeros(600, 60)).double()


class Sent:
    """A rank of one matrix, and gradients that are drawn."""

    def __init__(self, servers):
        self.parameters, self.servers = [nn.Parameter(torch.zeros(600, 60))], servers
        optimizer, how = torch.optim.SGD(self.parameters, lr=1.0), {"scaler": scaler()}
        self.update = ServedUpdate(
            optimizer, None, self.parameters, seed=0, max_grad_norm=None, **how
        )
        self.memory = HostMemory()
        self.strategy = make_strategy("server_sync", {}, "int4")

    def generation(self, comm, at, steps, draining=()):
        servers = Servers(range(comm.size - self.servers, comm.size), self.update)
        how = {"notes": 0, "memory": self.memory, "at": at, "servers": servers}
        self.strategy.start(self.parameters, comm, Generation(draining=draining, **how))
        total = torch.zeros(600, 60).double()
        for number in range(at.number + 1, at.number + 1 + steps):
            self.strategy.begin_step(at._replace(number=number))
            self.strategy.begin_pass(1.0, last=True)
            if comm.rank not in servers.ranks and comm.rank not in draining:
                drawn = torch.Generator().manual_seed(1000 * number + comm.rank)
                gradient = torch.randn(600, 60, generator=drawn)
                total += gradient
                self.strategy.gradient(0, gradient)
            self.strategy.exchange(torch.zeros(0, dtype=torch.float64))
            self.strategy.prepare(number, 1.0)
            self.strategy.apply(lambda: self.update.apply(number))  # noqa: B023
        self.strategy.stop()
        return total


def test_nothing_is_lost_from_4_to_3_to_4_workers_and_in_checkpoints():
    """All that was given is in the servers' parameters, or is still to be sent by a worker."""
    make, given = lambda: Sent(2), torch.zeros(600, 60).double()
    workers, servers, step = [make() for _ in range(4)], [make() for _ in range(2)], 0

    def check(ranks):
        own = torch.zeros(600, 60).double()
        for server in servers:
            for name, values in server.strategy.own_state().items():
                if name.startswith(f"optimizer/0/{SERVED}/"):
                    start, stop = map(int, name.rsplit("/", 1)[1].split(":"))
                    own.view(-1)[start:stop] = values.reshape(-1).double()
        left = sum(residual_of(rank) for rank in ranks)
        assert float(left.abs().max()) > 0.1
        torch.testing.assert_close(left - own, given, rtol=0, atol=1e-4)

    for generation, (count, draining) in enumerate([(4, ()), (4, (3,)), (3, ()), (4, ())], 1):
        while len(workers) < count:
            workers.append(make())
        ranks = [*workers[:count], *servers]
        if count > 3 and generation > 3:  # a newcomer has what the others hold
            ranks[3].parameters[0].data.copy_(ranks[0].parameters[0])
        at = Attempt(0, step, generation)
        totals = run_ranks(
            len(ranks),
            lambda c: ranks[c.rank].generation(c, at, 3, draining),  # noqa: B023
        )
        given, step = given + sum(totals), step + 3
        check(ranks)
        assert not any(bool(residual_of(ranks[place]).any()) for place in draining)
        workers = [rank for place, rank in enumerate(workers[:count]) if place not in draining]


# ---- bytes, and what is refused


class Counted(MemoryComm):
    """Counts the bytes of messages."""

    sent = received = 0

    def send(self, tensor, to):
        self.sent += tensor.nbytes
        return super().send(tensor, to)

    def receive(self, tensor, source):
        self.received += tensor.nbytes
        return super().receive(tensor, source)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["int8", "int4", "sign", "top_k", "bfloat16"])
@pytest.mark.parametrize("servers", [1, 3])
def test_what_is_sent_is_what_the_sizes_of_codecs_say(name, servers):
    count, codec = 1_000_003, CODECS[name]()

    def body(comm):
        comm.__class__ = Counted
        parameters = [nn.Parameter(torch.zeros(count, 1))]
        update = update_of(ServedUpdate, parameters, OPTIMIZERS["sgd"])
        strategy = make_strategy("server_sync", {}, name)
        given = Servers(range(2, 2 + servers), update)
        strategy.start(parameters, comm, Generation(notes=0, memory=HostMemory(), servers=given))
        strategy.begin_step(Attempt(0, 1, 1))
        before = comm.sent, comm.received
        strategy.begin_pass(1.0, last=True)
        if comm.rank < 2:
            strategy.gradient(0, torch.randn(count, 1))
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.prepare(1, 1.0)
        sizes = [codec.size(s.stop - s.start) for p in strategy._shared.parts for s in p.segments]
        sent, received = comm.sent - before[0], comm.received - before[1]
        return sent, received, sum(sizes), strategy.price(4 * count, 2).sent_bytes

    every = run_ranks(2 + servers, body)
    for sent, received, size, price in every[:2]:
        assert sent == received == size
        assert sent == pytest.approx(price / (4 * count / codec.size(count)), rel=0.02)
    assert (
        sum(sent for sent, *_ in every[2:]) == sum(r for _, r, *_ in every[2:]) == 2 * every[0][2]
    )


@pytest.mark.parametrize("name", ["dgc", "nonzero", "powersgd"])
def test_codecs_without_a_fixed_size_or_with_a_way_of_their_own_are_refused(name):
    with pytest.raises(SpecError, match="segmentable and of fixed size"):
        make_strategy("server_sync", {}, name)


def test_a_copy_does_not_go_with_a_codec():
    with pytest.raises(SpecError, match=r"copy = true does not go with sync.codec"):
        make_strategy("server_sync", {"copy": True}, "int8")
