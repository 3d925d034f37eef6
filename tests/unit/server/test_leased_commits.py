"""Each push moves the parameters as a plain loop does that knows which parameters it was for.

No process, no thread: workers take turns, in an order that the test draws or replays.
"""

import copy
import math
import random

import pytest
import torch
from torch import nn

from instep.engine.served.leased_optimizer import LeasedUpdate
from instep.job.train import TrainSpec
from instep.server.commits import Commits, Push
from instep.server.micro_batches import Parcel, Portions, buffers_of, changes, whole_pieces
from instep.server.peer_servers import Others
from instep.server.shard import Holding
from instep.sync.servers.bounded_stale import BoundedStale
from instep.sync.servers.leases import Unit
from instep.sync.servers.server_async import ServerAsync

SAMPLES, TRAIN = 90, TrainSpec(global_batch=16, micro_batches=4, steps=40)
STEPS = 24  # four epochs, whose last steps are smaller

torch.manual_seed(4)
MODEL = nn.Sequential(  # no bias before the normalisation: Adam would amplify its rounding
    nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)
)
INPUTS, TARGETS = torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 1)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


NOBODY = Others(0, lambda place: None, lambda: None, lambda: (0, 0))


def parcel_of(model):
    parameters = list(model.parameters())
    return Parcel(parameters, whole_pieces(parameters), buffers_of(model))


def loss_of(model, portions, unit):
    first, stop = portions.of(unit)
    return nn.functional.mse_loss(model(INPUTS[first:stop]), TARGETS[first:stop])


class Server:
    def __init__(self, options, make, limit=None):
        strategy = (BoundedStale if "staleness" in options else ServerAsync)(**options)
        self.model = copy.deepcopy(MODEL)
        parameters = list(self.model.parameters())
        optimizer = make(parameters)
        update = LeasedUpdate(
            optimizer,
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            parameters,
            seed=1,
            max_grad_norm=limit,
            scaler=torch.amp.GradScaler("cuda", enabled=False),
        )
        self.portions = Portions(SAMPLES, TRAIN)
        self.holding = Holding(parameters, update, strategy, buffers=buffers_of(self.model))
        self.commits = Commits(
            self.holding,
            buffers_of(self.model),
            update,
            self.portions,
            staleness=strategy.staleness,
            others=NOBODY,
            undo=self.fail,
        )

    def fail(self):
        raise AssertionError("no other server can be lost")


class Worker:
    def __init__(self, server, number):
        self.server, self.number, self.lease = server, number, None
        self.model = copy.deepcopy(MODEL)
        self.parcel = parcel_of(self.model)

    def ask(self):
        granted = self.server.commits.grant(self.number, 0.0)
        if granted is None:
            return False
        self.lease, given = granted
        for mine, sent in zip(self.parcel.flats, given.flats, strict=True):
            mine.copy_(sent)
        self.parcel.store()
        return True

    def push(self):
        self.model.zero_grad()
        loss = loss_of(self.model, self.server.portions, self.lease.unit)
        loss.backward()
        moved = parcel_of(self.model)
        changes(buffers_of(self.model), self.parcel.buffers, moved.buffers)
        first, stop = self.server.portions.of(self.lease.unit)
        gradients = [p.grad.clone() for p in self.model.parameters()]
        weight = stop - first
        return self.server.commits.take(
            Push(
                self.lease.token,
                loss.item() * weight,
                weight,
                0,
                [True] * len(gradients),
                gradients,
                moved.buffers,
            ),
            0.0,
        )


def train(server, workers, draw):
    """All steps; the pushes in the order in which they were committed."""
    members, done, complete = [Worker(server, n) for n in range(workers)], [], []
    server.commits.leases.stop_after(STEPS)
    while server.commits.leases.complete < STEPS:
        worker = draw.choice(members)
        if worker.lease is None:
            worker.ask()
            continue
        committed = worker.push()
        worker.lease = None
        done.append(committed)
        while server.commits.leases.complete > len(complete):
            complete.append(server.commits.complete())
    return done, complete


def replay(done, make, *, limit=None, compensation=0.0, slow_late=False):
    """A plain PyTorch loop over the same micro-batches, with the versions that they were for."""
    model, portions = copy.deepcopy(MODEL), Portions(SAMPLES, TRAIN)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    versions = [copy.deepcopy(model.state_dict())]
    sizes, samples, passed = [min(16, 90 - 16 * (n % 6)) for n in range(STEPS)], 0, 0
    for number, (version, lease, lag) in enumerate(done, 1):
        assert (version, lag) == (number, number - 1 - lease.version)
        then = copy.deepcopy(model)
        then.load_state_dict(versions[lease.version])
        loss = loss_of(then, portions, lease.unit)
        gradients = torch.autograd.grad(loss, list(then.parameters()))
        before = versions[lease.version]
        with torch.no_grad():
            for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
                p.grad = g + compensation * g * g * (p - before[name])
            for name, buffer in model.named_buffers():
                buffer += then.state_dict()[name] - before[name]
        if limit:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        usual = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = usual / max(1, lag) if slow_late else usual
        optimizer.step()
        optimizer.param_groups[0]["lr"] = usual
        first, stop = portions.of(lease.unit)
        samples += stop - first
        while passed < STEPS and samples >= sum(sizes[: passed + 1]):
            passed += 1
            scheduler.step()
        versions.append(copy.deepcopy(model.state_dict()))
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_without_staleness_is_a_plain_loop_over_the_micro_batches(name):
    server = Server({"staleness": 0}, OPTIMIZERS[name])
    done, complete = train(server, 1, random.Random(0))
    portions = server.portions
    wanted = [Unit(s, n) for s in range(1, STEPS + 1) for n in range(portions.count(s))]
    assert [each.lease.unit for each in done] == wanted
    assert {each.lag for each in done} == {0}
    assert len(complete) == STEPS
    model = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(1, STEPS + 1):
        losses = []
        for number in range(portions.count(step)):
            optimizer.zero_grad()
            loss = loss_of(model, portions, Unit(step, number))
            loss.backward()
            optimizer.step()
            first, stop = portions.of(Unit(step, number))
            losses += [loss.item()] * (stop - first)
        scheduler.step()
        assert complete[step - 1].loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    for key, value in server.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=1e-6, atol=1e-7)
    for one, other in zip(server.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"staleness": 1},
        {"staleness": 0, "slow_late": True},
        {"compensation": 0.7},
        {"staleness": 2, "compensation": 0.7, "slow_late": True},
    ],
    ids=str,
)
def test_any_order_of_pushes_is_that_of_a_plain_loop_that_replays_it(name, options):
    server = Server(options, OPTIMIZERS[name], limit=0.8)
    done, _ = train(server, 4, random.Random(str(options)))
    assert max(each.lag for each in done) > 2
    plain = {key: value for key, value in options.items() if key != "staleness"}
    model = replay(done, OPTIMIZERS[name], limit=0.8, **plain)
    for key, value in server.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=2e-5, atol=1e-6)


def test_another_process_takes_up_what_is_committed():
    torch.manual_seed(0)
    draw = random.Random(9)
    server = Server({"staleness": 2}, OPTIMIZERS["sgd"])
    members = [Worker(server, n) for n in range(3)]
    for turn in range(40):
        worker = draw.choice(members)
        if worker.ask():
            worker.push()
        if turn == 30:
            server.commits.complete()
    state, leases = server.commits.state(), server.commits.leases
    again = Commits(
        server.holding,
        buffers_of(server.model),
        server.commits._update,
        server.portions,
        staleness=2,
        others=NOBODY,
        undo=server.fail,
        step=server.commits._step,
        left=state,
    )
    assert again.leases.version == leases.version
    assert again.leases.complete == leases.complete
    assert again.leases.beyond == leases.beyond
    assert (again._advanced, again._ahead) == (server.commits._advanced, server.commits._ahead)
    assert again.complete() == server.commits.complete()


def test_a_micro_batch_in_which_nothing_counts_moves_nothing_and_counts():
    server = Server({"staleness": 0}, OPTIMIZERS["sgd"])
    worker = Worker(server, 0)
    before = copy.deepcopy(server.model.state_dict())
    worker.ask()
    committed = server.commits.take(Push(worker.lease.token, 0.0, 0.0, 4, [], [], []), 0.0)
    assert committed.version == 1
    assert all(torch.equal(before[key], value) for key, value in server.model.state_dict().items())


def test_a_second_push_and_one_of_another_server_change_nothing():
    server = Server({"staleness": 0}, OPTIMIZERS["sgd"])
    worker = Worker(server, 0)
    worker.ask()
    assert worker.push() is not None
    before = copy.deepcopy(server.model.state_dict())
    assert worker.push() is None
    assert server.commits.leases.version == 1
    assert all(torch.equal(before[key], value) for key, value in server.model.state_dict().items())


def test_an_epoch_has_as_many_micro_batches_as_its_steps():
    portions = Portions(SAMPLES, TRAIN)
    for step in range(30):
        assert portions.before(step) == sum(portions.count(s) for s in range(1, step + 1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("limit", [1.0, None])
def test_a_gradient_that_is_no_number_is_in_the_figures_of_its_step(value, limit):
    """Of one micro-batch: those of the others are finite."""
    server = Server({"staleness": 0}, OPTIMIZERS["sgd"], limit)
    members = [Worker(server, n) for n in range(3)]
    count = server.portions.count(1)
    for number in range(count):
        worker = members[number % 3]
        assert worker.ask()
        gradients = [torch.full_like(p, 1.0) for p in worker.model.parameters()]
        gradients[0][0] = value if number == 0 else 1.0
        push = Push(
            worker.lease.token,
            1.0,
            1.0,
            0,
            [True] * len(gradients),
            gradients,
            [torch.zeros_like(b) for b in buffers_of(server.model)],
        )
        server.commits.take(push, 0.0)
    assert server.commits.complete().norm == (math.inf if limit else None)
