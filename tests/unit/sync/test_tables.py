"""Rows of embeddings on servers: the result is that of a plain loop in PyTorch that has the table.

Workers and servers are threads.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import instep
from instep.comm.memory import run_ranks
from instep.engine.gradients import Gradients
from instep.engine.served.optimizer import ServedUpdate
from instep.engine.served.tables import ServedTables, refuse_sparse
from instep.errors import CheckpointError, RecipeError, SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.recipe.build import build_model, build_optimizer
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation, Servers
from instep.system.host_memory import HostMemory

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's optimizers

PARTS, STEPS, ROWS, DIM = 6, 5, 40, 4
FIRST = Attempt(0, 0, 1)
JOB = JobSpec(recipe="net.py:recipe")

torch.manual_seed(2)
WORDS = (torch.rand(STEPS, PARTS, 3, 6) ** 3 * ROWS).long()  # few of them often, 0 most of all
WORDS[2, 1:] = 0  # there, only one part has anything but the padding
TARGETS = torch.randn(STEPS, PARTS, 3, dtype=torch.float64)
WEIGHTS = torch.rand(STEPS, PARTS, 3, 4, dtype=torch.float64)


class Net(nn.Module):
    """One of each sort of layer; `rare` is in some steps only, and twice in a pass then."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="sum")
        self.means = nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="mean", padding_idx=0)
        self.rare = nn.Embedding(ROWS, DIM, sparse=True)
        self.table = nn.Embedding(ROWS, DIM)  # every worker has this one
        self.out = nn.Linear(DIM, 1)

    def forward(self, words, weights, *, rare):
        flat, starts = words[:, 2:5].reshape(-1), torch.arange(0, 3 * len(words), 3)
        x = self.words(words[:, :2]).mean(1) + self.bag(words[:, :4], per_sample_weights=weights)
        x = x + self.means(flat, starts) * self.table(words[:, 5])
        if rare:
            x = x + self.rare(words[:, 0]) * self.rare(words[:, 1])
        return self.out(torch.tanh(x))[:, 0]


torch.manual_seed(5)
START = Net().double()  # made once: ranks as threads draw from one generator


def loss_of(model, step, part):
    found = model(WORDS[step, part], WEIGHTS[step, part], rare=step in (1, 2))
    return functional.mse_loss(found, TARGETS[step, part])


def rest_of(model):
    return [*model.table.parameters(), *model.out.parameters()]


def sparse_of(model):
    rest = {id(each) for each in rest_of(model)}
    return [each for each in model.parameters() if id(each) not in rest]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.3),
    "rowwise": lambda m: instep.RowwiseAdagrad(m.parameters(), 0.1, initial_accumulator_value=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.1, initial_accumulator_value=0.1),
    "sparse_adam": lambda m: [
        torch.optim.SparseAdam(sparse_of(m), lr=0.05),
        torch.optim.Adam(rest_of(m), lr=0.02),
    ],
    "groups": lambda m: [
        torch.optim.SGD([{"params": rest_of(m), "momentum": 0.9, "lr": 0.1}]),
        instep.RowwiseAdagrad(
            [{"params": [p], "lr": 0.1 + 0.1 * n} for n, p in enumerate(sparse_of(m))]
        ),
    ],
}


def recipe(name):
    return instep.Recipe(
        model=lambda: copy.deepcopy(START),
        train=[(0, 0)],
        loss=functional.mse_loss,
        parameters=lambda model: model,
        optimizer=OPTIMIZERS[name],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
    )


def plain(name, *, limit=None, parts=PARTS, scale=1.0):
    """The loop that every user knows; the model, and the norms."""
    model = copy.deepcopy(START)
    every = OPTIMIZERS[name](model)
    every = every if isinstance(every, list) else [every]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in every]
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        for part in range(parts):
            (loss_of(model, step, part) / parts * scale).backward()
        squares = [
            float((p.grad.coalesce().values() if p.grad.is_sparse else p.grad).square().sum())
            for p in model.parameters()
            if p.grad is not None
        ]
        norms.append(math.sqrt(sum(squares)))
        if limit is not None:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
                    p.grad *= min(1.0, limit / (norms[-1] + 1e-6))
        for each in (*every, *schedulers):
            each.step()
    return model, norms


class Rank:
    """One process of a run with servers."""

    def __init__(self, name, servers, *, limit=None, memory=None, options=None):
        built, _ = build_model(recipe(name), JOB.seed, torch.device("cpu"))
        self.model, self.servers = built, servers
        self.served = ServedTables(self.model, JOB)
        made = self.served.made(build_optimizer(recipe(name), self.model, STEPS))
        self.parameters = made.parameters
        self.update = ServedUpdate(
            made.optimizer,
            made.scheduler,
            self.parameters,
            seed=0,
            max_grad_norm=limit,
            scaler=torch.amp.GradScaler("cuda", enabled=False),
        )
        self.memory = memory or HostMemory()
        self.strategy = make_strategy("server_sync", {"bucket_mb": 0.0001, **(options or {})})
        self.strategy.tables = self.tables = self.served.tables

    def start(self, comm, *, parts=0, at=FIRST):
        self.comm, self.at = comm, at
        self.workers = comm.size - self.servers
        self.strategy.start(
            self.parameters,
            comm,
            Generation(
                notes=1,
                parts=parts,
                memory=self.memory,
                at=at,
                servers=Servers(range(self.workers, comm.size), self.update),
            ),
        )
        self.gradients = Gradients(self.parameters, self.strategy.gradient)

    def exchange(self, step, scale=1.0, data=None):
        data = step if data is None else data
        own = [n for n in range(PARTS) if n % self.workers == self.comm.rank]
        own = own if self.comm.rank < self.workers else []
        self.strategy.begin_step(self.at._replace(number=step + 1))
        agreed = None
        while agreed is None:
            losses = [loss_of(self.model, data, number) for number in own[:-1]]
            for place, number in enumerate(own):
                loss = losses[place] if losses[place:] else loss_of(self.model, data, number)
                last = place == len(own) - 1
                self.strategy.begin_pass(1 / PARTS / scale, last=last, unit=number)
                loss.backward()
            agreed = self.strategy.exchange(torch.ones(1, dtype=torch.float64))
            if agreed is None:
                self.strategy.begin_step(self.at._replace(number=step + 1))
        self.strategy.prepare(step + 1, scale)

    def commit(self, step):
        self.strategy.hand_out()
        return self.strategy.apply(lambda: self.update.apply(step + 1))

    def state_dict(self):
        """The whole model, as a worker gets it from the servers; every rank calls it."""
        with self.tables.reading():
            if self.comm.rank >= self.workers:
                return {}
            tables = {name: torch.cat(list(self.served.read(name))) for name in self.served.names}
        return {**self.model.state_dict(), **tables}


def trained(comm, name, servers, *, parts=0, scale=1.0, **how):
    rank = Rank(name, servers, **how)
    rank.start(comm, parts=parts)
    norms = []
    for step in range(STEPS):
        rank.exchange(step, scale)
        norms.append(rank.commit(step))
    rank.bytes = rank.tables.bytes_pulled, rank.tables.bytes_pushed  # before all rows are read
    return rank.state_dict(), norms, rank


def check(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.grid
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (3, 2), (1, 3)])
def test_it_is_a_plain_loop_to_rounding(workers, servers, name):
    model, _ = plain(name)
    every = run_ranks(workers + servers, lambda comm: trained(comm, name, servers))
    for found, _, _ in every[:workers]:
        check(found, model.state_dict())


@pytest.mark.parametrize("name", ["sgd", "sparse_adam"])
def test_clipping_counts_the_gradients_of_rows(name):
    model, norms = plain(name, limit=0.2)
    assert min(norms) > 0.2
    for found, seen, _ in run_ranks(4, lambda c: trained(c, name, 2, limit=0.2, scale=0.75))[:2]:
        check(found, model.state_dict())
        assert seen == pytest.approx(norms, rel=1e-9)


def test_with_bits_the_result_has_the_same_bits_on_any_number_of_workers_and_servers():
    found = [
        run_ranks(workers + servers, lambda c, s=servers: trained(c, "rowwise", s, parts=PARTS))[0]
        for workers, servers in [(1, 1), (2, 1), (3, 2), (2, 3)]
    ]
    for one, _, _ in found[1:]:
        assert all(torch.equal(one[name], each) for name, each in found[0][0].items())


def test_each_row_travels_once_in_each_direction():
    """Little but rows: C14's 4 bytes for each row's number, and its numbers."""
    ranks = [rank for *_, rank in run_ranks(3, lambda comm: trained(comm, "sgd", 1))[:2]]
    for number, rank in enumerate(ranks):
        own = range(number, PARTS, 2)
        pulled = pushed = 0
        for step in range(STEPS):
            words = WORDS[step, list(own)]
            for layer in [words[..., :2], words[..., :4], words[..., 2:5]]:
                pulled += len(layer.unique())
            pushed += sum(
                len(layer[layer > 0].unique()) for layer in (words[..., :2], words[..., 2:5])
            )
            pushed += len(words[..., :4].unique())
            if step in (1, 2):
                pulled += len(words[..., :2].unique())
                pushed += len(words[..., :2].unique())
        row = 8 * DIM + 4
        heads = rank.bytes[0] - pulled * row
        assert 0 < heads <= 16 * STEPS * 5 * len(own)
        assert rank.bytes[1] - pushed * row == sum(
            8 + 24 * (4 if step in (1, 2) else 3) for step in range(STEPS)
        )


# ---- recovery


def test_a_step_that_does_not_happen_leaves_nothing():
    def body(comm, disturbed):
        rank = Rank("sparse_adam", 2)
        rank.start(comm)
        for step in range(STEPS):
            if disturbed:
                rank.exchange(step, data=(step + 2) % STEPS)
                rank.strategy.abandon()
            rank.exchange(step)
            rank.commit(step)
        return rank.state_dict()

    found, wanted = run_ranks(4, body, True)[0], run_ranks(4, body, False)[0]
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


@pytest.mark.grid
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("name", ["sgd", "sparse_adam", "rowwise"])
@pytest.mark.parametrize("staged", [False, True])
def test_another_process_goes_on_with_the_rows_of_a_server(name, staged, torn):
    """The one before was killed between two steps, or with the next one staged; or while it copied
    rows over those that it had."""

    def before(comm):
        rank = Rank(name, 1)
        rank.start(comm)
        for step in (0, 1):
            rank.exchange(step)
            rank.commit(step)
        if staged:
            rank.exchange(2)
        return rank

    def after(comm, ranks):
        rank = Rank(name, 1, memory=ranks[comm.rank].memory)
        with torch.no_grad():
            for own, given in zip(rank.parameters, ranks[0].parameters, strict=True):
                own.copy_(given)
        rank.update.scheduler.load_state_dict(ranks[0].update.scheduler.state_dict())
        rank.update.optimizer.load_state_dict(ranks[0].update.optimizer.state_dict())
        if comm.rank == 2:
            left = rank.memory.at(0, 2, 1)
            rank.memory.forget(0, 3, 1)  # all have agreed that it did not happen
            if torn:
                kept = ranks[2].tables.kept
                for table, values in enumerate(kept.values):
                    values[left[f"rows/{table}/ids"][: int(left[f"rows/{table}/count"])]] = 7.0
            rank.strategy.load_left(left, rank.parameters)
        rank.start(comm, at=Attempt(0, 2, 2))
        for step in range(2, STEPS):
            rank.exchange(step)
            rank.commit(step)
        return rank.state_dict()

    ranks = run_ranks(3, before)
    found = run_ranks(3, after, ranks)[0]
    wanted = run_ranks(3, lambda comm: trained(comm, name, 1))[0][0]
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


# ---- what is refused


class Momentum(nn.Module):
    def __init__(self, make=lambda: nn.Embedding(9, 3, sparse=True)):
        super().__init__()
        self.words, self.bias = make(), nn.Parameter(torch.zeros(1))


class Counting(torch.optim.SGD):
    """Keeps a number that is of no row."""

    def step(self, closure=None):
        self.state["k"] = self.state.get("k", 0) + 1
        super().step()


class Clipping(torch.optim.SGD):
    """Clips by the norm of all rows of a batch, after some steps."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if self.steps > 8 and parameter.grad is not None:
                norm = parameter.grad.coalesce().values().norm()
                parameter.grad = parameter.grad * min(1.0, float(20 / norm))
        super().step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Clipping(p, lr=0.1), "Clipping moves other rows.*or these otherwise"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD moves other rows"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), "SGD"),
        (lambda p: torch.optim.Adam(p), "Adam"),
        (lambda p: Counting(p, lr=0.1), "Counting keeps 'k' for no parameter"),
        (
            lambda p: [torch.optim.SGD(list(p)[:1], lr=0.1), Counting(list(p)[1:], lr=0.1)],
            "SGD and Counting keeps 'k' for no parameter",
        ),
    ],
)
def test_an_optimizer_that_moves_other_rows_is_refused(make, message):
    def body(comm):
        given = instep.Recipe(
            model=Momentum, train=[0], compute_loss=lambda m, b: m(b), optimizer=make
        )
        model, _ = build_model(given, 0, torch.device("cpu"))
        served = ServedTables(model, JOB)
        served.made(build_optimizer(given, model, 1))
        served.tables.start(comm, [1], HostMemory(), by_unit=False)

    with pytest.raises(RecipeError, match=rf"{message}.*words.weight.*RowwiseAdagrad"):
        run_ranks(2, body)


def tied():
    model = nn.ModuleList([nn.Embedding(9, 3, sparse=True), nn.Linear(3, 9, bias=False)])
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Embedding(9, 3, sparse=True, max_norm=1.0), "max_norm"),
        (lambda: nn.Embedding(9, 3, sparse=True, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (lambda: nn.Embedding(9, 3, sparse=True, dtype=torch.bfloat16), "bfloat16"),
        (tied, "shares its weight"),
    ],
)
def test_an_embedding_that_needs_its_whole_table_is_refused(make, why):
    with pytest.raises(RecipeError, match=rf"sparse embedding.*{why}.*sparse=True"):
        ServedTables(Momentum(make), JOB)


def test_a_loss_of_the_whole_batch_is_refused():
    with pytest.raises(RecipeError, match=r"'words\.weight' .*Recipe\.batch_loss.*sparse=True"):
        ServedTables(Momentum(), JOB, batch_loss=True)
    ServedTables(nn.Linear(3, 3), JOB, batch_loss=True)


def test_a_server_that_does_not_see_the_checkpoint_is_refused_before_its_first_step(tmp_path):
    def body(comm):
        given = instep.Recipe(
            model=Momentum,
            train=[0],
            compute_loss=lambda m, b: m(b),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        )
        model, _ = build_model(given, 0, torch.device("cpu"))
        served = ServedTables(model, JOB)
        served.made(build_optimizer(given, model, 1))
        served.load(tmp_path, sees=comm.rank == 0)  # the worker, which needs no rows
        served.tables.start(comm, [1], HostMemory(), by_unit=False)

    with pytest.raises(CheckpointError, match=r"'words\.weight' from .*its host does not see"):
        run_ranks(2, body)


def test_a_model_of_embeddings_alone_is_refused():
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True))
    given = instep.Recipe(
        model=model, train=[0], compute_loss=sum, optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    served = ServedTables(model, JOB)
    with pytest.raises(RecipeError, match="no parameter beside its sparse embeddings"):
        served.made(build_optimizer(given, model, 1))


def test_the_weight_of_such_an_embedding_cannot_be_asked_for():
    rank = Rank("sgd", 1)
    with pytest.raises(RecipeError, match=r"weight of an nn\.Embedding with sparse=True"):
        rank.model.words.weight  # noqa: B018
    assert "words.weight" not in rank.model.state_dict()
    twin = copy.deepcopy(rank.model).float()
    assert twin.words(torch.tensor([3, 1, 3])).dtype == torch.float32


def test_a_call_that_no_server_answers_says_so():
    def called(comm):
        rank = Rank("sgd", 1)
        rank.start(comm)
        if comm.rank == 0:
            with pytest.raises(RecipeError, match="outside of passes and validations, as in a cal"):
                loss_of(rank.model, 0, 0)

    run_ranks(2, called)


def test_strategies_whose_server_has_whole_parameters_refuse_them():
    job = spec_file.build({"recipe": "net.py:recipe", "sync": {"name": "bounded_stale"}}, source="")
    with pytest.raises(RecipeError, match=r"'words'.*bounded_stale.*server_sync"):
        refuse_sparse(Net(), job)


def test_copies_of_rows_are_refused():
    with pytest.raises(SpecError, match=r"copy = true.*embeddings"):
        run_ranks(3, lambda comm: trained(comm, "sgd", 2, options={"copy": True}))
