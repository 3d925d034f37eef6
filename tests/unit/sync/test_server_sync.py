"""Servers move the parameters as an all-reduce does: with the same bits, whoever holds which part.

Workers and servers are threads. What is compared is another strategy, and a plain loop in PyTorch.
"""

import copy
import math
import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn

from instep.comm.buckets import lay_out
from instep.comm.memory import run_ranks
from instep.engine.gradients import Gradients
from instep.engine.served.optimizer import ServedUpdate
from instep.engine.served.written import put_together
from instep.engine.update import Update
from instep.errors import RecipeError, SpecError, WorkerError
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation, Piece, Servers
from instep.sync.servers.cuts import CUT, Packed, cut
from instep.system.host_memory import HostMemory

PARTS, STEPS = 6, 4
FIRST = Attempt(0, 0, 1)

torch.manual_seed(3)
MODEL = nn.Sequential(nn.Linear(5, 700), nn.ReLU(), nn.Linear(700, 300), nn.Linear(300, 1))
MODEL.register_parameter("never", nn.Parameter(torch.ones(3)))
INPUTS, TARGETS = torch.randn(STEPS, PARTS, 4, 5), torch.randn(STEPS, PARTS, 4, 1)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
}


class Whole(torch.optim.SGD):
    """One that is not known to move an element by nothing but its own, and keeps numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.state["steps"] = self.state.get("steps", 0) + 1  # of no parameter, as MADGRAD has it
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - 1e-3 / self.state["steps"])
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["decay"] = 0.9 * state.get("decay", 1.0)
                    parameter.mul_(1 - 1e-3 * state["decay"] / state["count"])


def scaler():
    return torch.amp.GradScaler("cuda", enabled=False)


def update_of(kind, parameters, make, limit=None, decay=0.7):
    optimizer = make(parameters)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    return kind(optimizer, scheduler, parameters, seed=0, max_grad_norm=limit, scaler=scaler())


class Rank:
    """One process of a run, with servers or without."""

    def __init__(
        self,
        make,
        servers=0,
        *,
        model=MODEL,
        limit=None,
        decay=0.7,
        options=None,
        memory=None,
        wide=False,
        codec=("none",),
    ):
        self.model, self.servers = copy.deepcopy(model), servers
        self.dtype = torch.float64 if wide else torch.float32
        self.model.to(self.dtype)
        self.parameters = list(self.model.parameters())
        kind = ServedUpdate if servers else Update
        self.update = update_of(kind, self.parameters, make, limit, decay)
        self.memory = memory or HostMemory()
        name = "server_sync" if servers else "all_reduce"
        self.strategy = make_strategy(name, {"bucket_mb": 0.3, **(options or {})}, *codec)

    def start(self, comm, *, parts=0, at=FIRST, draining=()):
        self.comm, self.at = comm, at
        self.workers = comm.size - self.servers
        servers = Servers(range(self.workers, comm.size), self.update) if self.servers else None
        self.strategy.start(
            self.parameters,
            comm,
            Generation(
                notes=1,
                parts=parts,
                memory=self.memory,
                at=at,
                draining=draining,
                servers=servers,
            ),
        )
        self.working = [rank for rank in range(self.workers) if rank not in draining]
        self.gradients = Gradients(self.parameters, self.strategy.gradient)

    def exchange(self, step, scale=1.0):
        """The passes of this rank, until all agree; the parameters have not moved."""
        who = self.working
        own = [n for n in range(PARTS) if who[n % len(who)] == self.comm.rank]
        self.strategy.begin_step(self.at._replace(number=step + 1))
        agreed = None
        while agreed is None:
            for place, number in enumerate(own):
                self.strategy.begin_pass(1 / PARTS / scale, last=place == len(own) - 1)
                found = self.model(INPUTS[step % STEPS, number].to(self.dtype))
                wanted = TARGETS[step % STEPS, number].to(self.dtype)
                nn.functional.mse_loss(found, wanted).backward()
            agreed = self.strategy.exchange(torch.ones(1, dtype=torch.float64))
        assert agreed.tolist() == [self.comm.size]
        self.strategy.prepare(step + 1, scale)

    def commit(self, step, scale=1.0):
        self.strategy.hand_out()
        for parameter in self.parameters:
            if parameter.grad is not None and scale != 1.0:
                parameter.grad.mul_(scale)
        return self.strategy.apply(lambda: self.update.apply(step + 1))

    def stop(self):
        self.gradients.close()
        self.strategy.stop()

    def tensors(self):
        """What it has of the parameters; a server not more than its own part."""
        if self.strategy.whole if self.servers else True:
            return [p.detach().clone() for p in self.parameters]
        own = [torch.full_like(p, math.nan) for p in self.parameters]
        for piece in self.update.held:
            found, room = self.parameters[piece.slot], own[piece.slot]
            room.view(-1)[piece.start : piece.stop] = found.detach().reshape(-1)[
                piece.start : piece.stop
            ]
        return own


def alike(found, wanted):
    """To the bit, as far as a rank has it."""
    for own, other in zip(found, wanted, strict=True):
        there = ~own.isnan()
        if not torch.equal(own[there], other[there]):
            return False
    return True


def trained(comm, make, servers=0, *, parts=0, scale=1.0, **how):
    """What a rank ends with, and the norms."""
    rank = Rank(make, servers, **how)
    rank.start(comm, parts=parts)
    norms = []
    for step in range(STEPS):
        rank.exchange(step, scale)
        norms.append(rank.commit(step, scale))
    rank.stop()
    held = {**rank.update.optimizer.state}
    if servers:
        assert not held, "state for whole parameters"
        assert bool(rank.update.held) == (comm.rank >= rank.workers)
    return rank.tensors(), norms, rank.strategy.state()


def same(found, wanted):
    (ours, norms, state), (theirs, other_norms, other_state) = found, wanted
    assert alike(ours, theirs)
    assert norms == other_norms
    assert state.keys() == other_state.keys()
    assert all(torch.equal(state[name], other_state[name]) for name in state)


@pytest.mark.grid
@pytest.mark.parametrize(("limit", "scale"), [(None, 1.0), (None, 0.75), (0.5, 0.75)])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3), (3, 2)])
def test_with_bits_it_is_an_all_reduce_to_the_bit(workers, servers, name, limit, scale):
    make, how = OPTIMIZERS[name], {"parts": PARTS, "limit": limit, "scale": scale}
    wanted = run_ranks(2, lambda comm: trained(comm, make, **how))
    found = run_ranks(workers + servers, lambda comm: trained(comm, make, servers, **how))
    for each in found:
        same(each, wanted[0])


@pytest.mark.grid
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"bucket_mb": 8.0}], ids=str)
@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), lambda p: Whole(p, lr=0.05)])
def test_it_is_a_plain_loop_to_rounding(make, options):
    """In double precision, since Adam makes much of what rounding leaves of a small gradient."""
    model = copy.deepcopy(MODEL).double()
    optimizer = make(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(PARTS):
            found = model(INPUTS[step, number].double())
            (nn.functional.mse_loss(found, TARGETS[step, number].double()) / PARTS).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
    how = {"limit": 0.5, "options": options, "wide": True}
    every = run_ranks(5, lambda comm: trained(comm, make, 2, **how))
    for rank, (ours, found, _) in enumerate(every):
        assert alike(ours, every[0][0])
        assert found == pytest.approx(norms, rel=1e-9)
        for tensor, wanted in zip(ours, model.parameters(), strict=True) if rank < 3 else ():
            torch.testing.assert_close(tensor, wanted.detach(), rtol=1e-9, atol=1e-12)


# ---- what has come moves at once


class Watched:
    """A group that notes what a rank receives; `gives` is called before it sends."""

    def __init__(self, comm, gives=lambda: None):
        self._comm, self._gives = comm, gives
        self.rank, self.size, self.messages = comm.rank, comm.size, []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def send(self, tensor, to):
        self._gives()
        return self._comm.send(tensor, to)

    def receive(self, tensor, source):
        self.messages.append(self._comm.receive(tensor, source))
        return self.messages[-1]


def test_a_server_sends_back_what_has_come_while_more_is_coming():
    """No worker sends its second bucket of step 2 before the first has come back, moved."""
    steps, waited = [0], []

    def body(comm):
        rank = Rank(OPTIMIZERS["sgd"], 1)
        watched = Watched(comm)
        rank.start(watched, parts=PARTS)
        first = len(rank.strategy._traffic._segments[0])

        def gives():
            if steps[0] == 1 and comm.rank < 2 and len(watched.messages) == first:
                waits = [threading.Thread(target=m.wait, daemon=True) for m in watched.messages]
                for thread in waits:
                    thread.start()
                    thread.join(600)
                    assert not thread.is_alive(), "nothing comes back"
                waited.append(comm.rank)

        rank.exchange(0)
        rank.commit(0)
        comm.all_reduce(torch.zeros(1)).wait()
        steps[0], watched._gives = 1, gives
        watched.messages.clear()
        rank.exchange(1)
        rank.commit(1)
        return rank.tensors()

    found = run_ranks(3, body)
    assert {0, 1} <= {*waited}
    wanted = run_ranks(1, two_steps)
    assert alike(found[0], wanted[0])


def two_steps(comm):
    rank = Rank(OPTIMIZERS["sgd"])
    rank.start(comm, parts=PARTS)
    for step in (0, 1):
        rank.exchange(step)
        rank.commit(step)
    return rank.tensors()


class Odd(NamedTuple):
    """What a step is like."""

    there: tuple[int, int] = (1, 1)
    size: float = 1.0
    scale: float = 1.0
    nan: bool = False


@pytest.mark.grid
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    "odd",
    [Odd((1, 0)), Odd((0, 1)), Odd((0, 0)), Odd(size=1e5), Odd(scale=0.5), Odd(nan=True)],
    ids=str,
)
def test_where_a_step_is_not_like_the_last_servers_begin_it_again(odd, servers):
    story = [Odd(), Odd(), odd, Odd(), Odd(), Odd(), odd, odd, Odd()]
    drawn = torch.Generator().manual_seed(2)
    slots = [[torch.randn(shape, generator=drawn) for shape in ((400, 300), (7,))] for _ in story]
    moved_in_vain = []

    def body(comm, servers):
        parameters = [nn.Parameter(torch.ones(400, 300)), nn.Parameter(torch.ones(7))]
        kind, name = (ServedUpdate, "server_sync") if servers else (Update, "all_reduce")
        update = update_of(kind, parameters, OPTIMIZERS["sgd"])
        strategy, memory = make_strategy(name, {"bucket_mb": 0.1}), HostMemory()
        given = Servers(range(2, 2 + servers), update) if servers else None
        strategy.start(
            parameters, comm, Generation(notes=0, parts=2, memory=memory, at=FIRST, servers=given)
        )
        ends = []
        for number, (step, gradients) in enumerate(zip(story, slots, strict=True), 1):
            agreed = None
            strategy.begin_step(Attempt(0, number, 1))
            while agreed is None:
                if comm.rank < 2:
                    strategy.begin_pass(0.5, last=True)
                    for slot in [slot for slot in (1, 0) if step.there[slot]]:
                        gradient = gradients[slot] * step.size * (1 + comm.rank)
                        gradient.view(-1)[3] *= math.nan if step.nan else 1.0
                        strategy.gradient(slot, gradient)
                agreed = strategy.exchange(torch.zeros(0, dtype=torch.float64))
            before = servers and comm.rank == 2 and strategy._own.moved
            strategy.prepare(number, step.scale)
            if before and strategy._moves._guess._wrong > len(moved_in_vain):
                moved_in_vain.append(number)
            strategy.hand_out()
            for parameter in parameters:
                if parameter.grad is not None and step.scale != 1.0:
                    parameter.grad.mul_(step.scale)
            strategy.apply(lambda: update.apply(number))  # noqa: B023
            ends.append([p.detach().clone() for p in parameters] + [*strategy.state().values()])
        return ends

    wanted = run_ranks(2, body, 0)[0]
    for rank in run_ranks(2 + servers, body, servers)[:2]:
        for own, other in zip(rank, wanted, strict=True):
            for one, two in zip(own, other, strict=True):
                assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))
    assert moved_in_vain == [] if odd.size > 1 else moved_in_vain[0] == 3


# ---- who has which part


def resnet_50():
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if not block:
                shapes += [(4 * width, before, 1, 1), (4 * width,), (4 * width,)]
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def transformer(width=768, layers=12, words=50_257, places=1024):
    shapes = [(words, width), (places, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width)]
        shapes += [(width,)]
    return [*shapes, (width,), (width,)]


@pytest.mark.parametrize("servers", [2, 3, 4, 7])
@pytest.mark.parametrize(
    ("shapes", "elements"), [(resnet_50(), 25_557_032), (transformer(), 124_439_808)]
)
def test_servers_have_equal_parts_of_large_models(shapes, elements, servers):
    parameters = [torch.empty(shape, device="meta") for shape in shapes]
    assert sum(p.numel() for p in parameters) == elements
    parts = cut(lay_out(parameters, [8_000_000]), parameters, servers, by_element=True)
    loads = [sum(s.stop - s.start for s in part.segments) for part in parts]
    assert sum(loads) == elements
    assert max(loads) / (elements / servers) <= 1.02


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
@pytest.mark.parametrize("by_element", [True, False])
def test_every_element_has_one_server_and_each_has_about_as_much(servers, by_element):
    shapes = [(9,), (300, 1000), (0,), (7, 9), (CUT,), (2 * CUT + 1,), (5,), (500, 700)]
    parameters = [torch.zeros(shape) for shape in shapes]
    buckets = lay_out(parameters, [400_000])
    parts = cut(buckets, parameters, servers, by_element=by_element)
    seen = [torch.zeros(p.numel()) for p in parameters]
    for part in parts:
        lengths = sum(segment.stop - segment.start for segment in part.segments)
        assert lengths == sum(piece.stop - piece.start for piece in part.pieces)
        for slot, start, stop in part.pieces:
            seen[slot][start:stop] += 1
            assert start % CUT == 0
            assert by_element or (start, stop) == (0, parameters[slot].numel())
    assert all(bool((each == 1).all()) for each in seen)
    loads = [sum(p.stop - p.start for p in part.pieces) for part in parts]
    assert max(loads) - min(loads) <= (2 * CUT if by_element else 400_000)


def test_a_step_that_does_not_happen_leaves_nothing_on_a_server():
    def body(comm, disturbed):
        rank = Rank(OPTIMIZERS["adamw"], 2)
        rank.start(comm, parts=PARTS)
        rank.exchange(0)
        rank.commit(0)
        if disturbed:
            rank.exchange(2)
            before = rank.tensors()
            rank.strategy.abandon()
            assert alike(rank.tensors(), before)
            assert all(p.grad is None for p in rank.parameters)
        rank.exchange(1)
        rank.commit(1)
        return rank.tensors(), [], rank.strategy.state()

    found, wanted = run_ranks(3, body, True), run_ranks(3, body, False)
    for each, other in zip(found, wanted, strict=True):
        same(each, other)


@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], lambda p: Whole(p, lr=0.1, momentum=0.9)])
def test_another_process_goes_on_with_the_memory_of_a_server(make):
    def before(comm):
        rank = Rank(make, 1)
        rank.start(comm)
        for step in (0, 1):
            rank.exchange(step)
            rank.commit(step)
        return rank

    def after(comm, ranks):
        rank = Rank(make, 1, memory=ranks[comm.rank].memory)
        with torch.no_grad():
            for own, given in zip(rank.parameters, ranks[0].parameters, strict=True):
                own.copy_(given)
        rank.update.scheduler.load_state_dict(ranks[0].update.scheduler.state_dict())
        rank.update.optimizer.load_state_dict(ranks[0].update.optimizer.state_dict())
        if comm.rank == 2:
            left = rank.memory.at(0, 2, 1)
            rank.strategy.load_left(left, rank.parameters)
        rank.start(comm, at=Attempt(0, 2, 2))
        for step in (2, 3):
            rank.exchange(step)
            rank.commit(step)
        return rank.tensors()

    found = run_ranks(3, after, run_ranks(3, before))
    wanted = run_ranks(3, lambda comm: trained(comm, make, 1))
    assert all(map(torch.equal, found[0], wanted[0][0]))


@pytest.mark.grid
@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], lambda p: Whole(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("lost", [(2,), (3,), (4,)])
def test_a_server_whose_host_is_lost_has_its_state_from_the_copy_of_another(make, lost):
    options = {"copy": True}

    def before(comm):
        rank = Rank(make, 3, options=options)
        rank.start(comm, parts=PARTS)
        for step in (0, 1):
            rank.exchange(step)
            rank.commit(step)
        return rank

    def after(comm, ranks):
        rank = ranks[comm.rank]
        if comm.rank in lost:
            rank = Rank(make, 3, options=options)
            with torch.no_grad():
                for own, given in zip(rank.parameters, ranks[0].parameters, strict=True):
                    own.copy_(given)
            rank.update.scheduler.load_state_dict(ranks[0].update.scheduler.state_dict())
            rank.update.optimizer.load_state_dict(ranks[0].update.optimizer.state_dict())
            rank.strategy.load_state(learnt)
        rank.start(comm, parts=PARTS, at=Attempt(0, 2, 2))
        for step in (2, 3):
            rank.exchange(step)
            rank.commit(step)
        return rank.tensors(), [], rank.strategy.state()

    ranks = run_ranks(5, before)
    learnt = ranks[0].strategy.state()
    wanted = run_ranks(2, lambda comm: trained(comm, make, parts=PARTS))[0]
    for rank in run_ranks(5, after, ranks):
        same(rank, (wanted[0], [], wanted[2]))


@pytest.mark.grid
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("servers", [2, 3])
def test_servers_with_copies_are_an_all_reduce_to_the_bit(servers, limit):
    how = {"parts": PARTS, "limit": limit}
    wanted = run_ranks(2, lambda comm: trained(comm, OPTIMIZERS["adamw"], **how))
    how["options"] = {"copy": True}
    for rank in run_ranks(2 + servers, lambda c: trained(c, OPTIMIZERS["adamw"], servers, **how)):
        same(rank, wanted[0])


def test_a_copy_on_the_only_server_is_refused():
    with pytest.raises(SpecError, match=r"copy = true.*two.*sync.servers"):
        run_ranks(2, lambda comm: trained(comm, OPTIMIZERS["sgd"], 1, options={"copy": True}))


@pytest.mark.grid
@pytest.mark.parametrize("lost", [(), (3,), (2, 4)])
@pytest.mark.parametrize("copies", [False, True])
def test_servers_alone_have_the_whole_model_together(lost, copies):
    """All workers are gone, and some servers too, which left their memory."""

    def before(comm):
        rank = Rank(OPTIMIZERS["adamw"], 3, options={"copy": copies})
        rank.start(comm, parts=PARTS)
        for step in (0, 1):
            rank.exchange(step)
            rank.commit(step)
        return rank

    def after(comm, ranks):
        rank = ranks[comm.rank]
        if comm.rank in {0, 1, *lost}:
            rank = Rank(OPTIMIZERS["adamw"], 3, options={"copy": copies}, memory=rank.memory)
        root = min({2, 3, 4} - {*lost})
        memory = rank.memory if comm.rank > 1 else None
        assert rank.strategy.whole == (comm.rank in {0, 1, *lost})
        rank.strategy.make_whole(comm, root, [2, 3, 4], memory)
        return rank.tensors() if comm.rank == root else None

    ranks = run_ranks(5, before)
    wanted = [p.detach().clone() for p in ranks[0].parameters]
    found = [tensors for tensors in run_ranks(5, after, ranks) if tensors]
    assert len(found) == 1
    assert all(map(torch.equal, found[0], wanted))


def test_servers_that_cannot_have_the_whole_model_together_say_so():
    def body(comm):
        rank = Rank(OPTIMIZERS["sgd"], 2)
        rank.start(comm)
        rank.exchange(0)
        rank.commit(0)
        rank.strategy.make_whole(comm, 1, [1, 2], HostMemory() if comm.rank == 2 else rank.memory)

    with pytest.raises(WorkerError, match=r"server 2 of 2 \(.*\) was lost .* newest checkpoint"):
        run_ranks(3, body)


def test_a_server_whose_state_is_lost_says_so():
    def body(comm):
        rank = Rank(OPTIMIZERS["sgd"], 1)
        rank.start(comm, at=Attempt(0, 7, 2))

    with pytest.raises(WorkerError, match=r"of the server was lost .* newest checkpoint"):
        run_ranks(2, body)


@pytest.mark.grid
@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], lambda p: Whole(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_the_state_of_all_servers_is_that_of_one_optimizer(servers, make):
    """So a checkpoint can be taken up with any number of servers, or without."""

    def body(comm):
        rank = Rank(make, servers)
        rank.start(comm, parts=PARTS)
        for step in range(2):
            rank.exchange(step)
            rank.commit(step)
        names = [name for name, _ in rank.model.named_parameters()]
        shard = {}
        for name, tensor in rank.strategy.own_state().items():
            _, slot, rest = name.split("/", 2)
            shard[f"{names[int(slot)]}/{rest}"] = tensor
        return shard

    def plain(comm):
        rank = Rank(make)
        rank.start(comm, parts=PARTS)
        for step in range(2):
            rank.exchange(step)
            rank.commit(step)
        return {n: rank.update.optimizer.state.get(p) for n, p in rank.model.named_parameters()}

    shards = {k: v for shard in run_ranks(2 + servers, body) for k, v in shard.items()}
    wanted, model = run_ranks(1, plain)[0], copy.deepcopy(MODEL)
    found = put_together(shards, model)
    for name, parameter in model.named_parameters():
        own = found.get(parameter, {})
        assert own.keys() == (wanted[name] or {}).keys()
        for kept, tensor in own.items():
            other = wanted[name][kept]
            assert type(tensor) is type(other)
            same = (
                torch.equal(tensor, other) if isinstance(other, torch.Tensor) else tensor == other
            )
            assert same, (name, kept)
    resumed = update_of(ServedUpdate, list(model.parameters()), make)
    resumed.optimizer.state.update(found)
    resumed.hold({Piece(n, 0, p.numel()): p for n, p in enumerate(model.parameters())})
    steps = {int(each) for name, each in resumed.states().items() if "/beside.steps:int/" in name}
    assert steps == ({2} if type(resumed.optimizer) is Whole else set())


# ---- what is refused


def refused(**changes):
    def body(comm):
        model = nn.Embedding(5, 3, sparse=True)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        if hook := changes.get("hook"):
            getattr(optimizer, hook)(lambda *_: None)
        update = ServedUpdate(
            optimizer, None, parameters, seed=0, max_grad_norm=None, scaler=scaler()
        )
        strategy = make_strategy("server_sync", {})
        servers = Servers(changes.get("ranks", (1,)), update)
        strategy.start(parameters, comm, Generation(notes=1, memory=HostMemory(), servers=servers))
        gradients = Gradients(parameters, strategy.gradient)
        strategy.begin_pass(1.0, last=True)
        model(torch.tensor([1])).sum().backward()
        gradients.close()

    return run_ranks(2, body)


def test_sparse_gradients_are_refused():
    with pytest.raises(RecipeError, match=r"sparse gradient.*sparse=False"):
        refused()


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks_are_refused(hook):
    with pytest.raises(RecipeError, match="step hooks"):
        refused(hook=hook)


@pytest.mark.parametrize("ranks", [(), (0, 1)])
def test_servers_without_workers_and_workers_without_servers_are_refused(ranks):
    with pytest.raises(SpecError, match="at least one server and one worker"):
        refused(ranks=ranks)


class Marked(torch.optim.SGD):
    """Goes by what the user wrote on a parameter, and by a mark of its own."""

    def __init__(self, params, **how):
        super().__init__(params, **how)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["flat"] = parameter.dim() < 2

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = 1e-3 if self.state[parameter]["flat"] else 2e-3
                    parameter.sub_(parameter.grad * rate * getattr(parameter, "rate", 1.0))


@pytest.mark.parametrize("servers", [1, 2])
def test_an_optimizer_finds_what_the_user_marked_parameters_with(servers):
    def make(parameters):
        parameters[1].rate = 0.25
        return Marked(parameters, lr=0.1)

    wanted = run_ranks(2, lambda comm: trained(comm, make, parts=PARTS))
    for rank in run_ranks(2 + servers, lambda comm: trained(comm, make, servers, parts=PARTS)):
        assert alike(rank[0], wanted[0][0])


class Lists(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = [1]


class Draws(torch.optim.SGD):
    def step(self, closure=None):
        torch.rand(1)


class Together(torch.optim.SGD):
    """Divides every gradient by the norm of all."""

    @torch.no_grad()
    def step(self, closure=None):
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        whole = sum(float(parameter.grad.square().sum()) for parameter in own)
        for parameter in own:
            parameter.sub_(parameter.grad / (1 + whole))


class Learns(torch.optim.SGD):
    """Counts its steps in its groups, as optimizers without a schedule do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / group["k"])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Lists, "Lists keeps 'seen' as list"),
        (Draws, "Draws draws random numbers in its step"),
        (Together, "Together moves parameters otherwise when it has all of them"),
        (Learns, "Learns changes values of its param_groups in its step"),
    ],
)
def test_an_optimizer_that_servers_cannot_have_is_refused(kind, why):
    def body(comm):
        rank = Rank(lambda p: kind(p, lr=0.1), 1)
        rank.start(comm)
        rank.exchange(0)

    with pytest.raises(RecipeError, match=why):
        run_ranks(2, body)


def test_a_scaled_loss_is_refused():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    on = torch.amp.GradScaler("cpu", enabled=True)
    with pytest.raises(SpecError, match="float16"):
        ServedUpdate(optimizer, None, [weight], seed=0, max_grad_norm=None, scaler=on)


def test_what_is_taken_up_lies_in_memory_as_its_parameter_does():
    """Fused optimizers go through both as they lie."""
    whole = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    update = update_of(ServedUpdate, [whole], OPTIMIZERS["fused"])
    piece = Piece(0, 0, whole.numel())
    own = nn.Parameter(Packed([piece], [whole]).views[piece])
    own.grad = torch.ones_like(own)
    update.hold({piece: own})
    update.step(1, [piece])
    kept = {name: state.contiguous() for name, state in update.states().items()}
    update.load_states(kept)
    for name, state in update.states().items():
        assert torch.equal(state, kept[name])
        assert state.dim() == 0 or state.stride() == own.stride() == whole.stride()
