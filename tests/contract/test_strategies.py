"""Every strategy keeps the promises of `sync/base.py`, whoever has which passes."""

import copy
import inspect

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.engine.gradients import Gradients
from instep.engine.served.optimizer import ServedUpdate
from instep.errors import SpecError
from instep.job.sync.rounds import ROUND_OPTIONS
from instep.job.sync.tables import STRATEGY_ROWS
from instep.records import Attempt
from instep.sync import STRATEGIES
from instep.sync.base import make_strategy
from instep.sync.generation import Generation, Servers
from instep.system.host_memory import HostMemory

NAMES = [name for name, row in STRATEGY_ROWS.items() if not row.leased]
SERVERS = {name for name, row in STRATEGY_ROWS.items() if row.served}
"""Those that take each step together; the others are tested by `test_leased_commits.py`."""
OPTIONS = {
    "all_reduce": [{}, {"bucket_mb": 0.0004}, {"overlap": False}],
    "averaging": [{}, {"bucket_mb": 0.0004}],
    "fedopt": [{"rule": "momentum", "outer_lr": 1.0, "outer_momentum": 0.0}],  # to the mean
    "diloco": [{"outer_lr": 1.0, "outer_momentum": 0.0}],
    "server_sync": [{}, {"bucket_mb": 0.0004}, {"overlap": False}],
}
VOTES = {"sign_vote"}
"""Those that agree on the sign of the majority of the passes, and not on their mean."""
CASES = [(name, options) for name in NAMES for options in OPTIONS.get(name, [{}])]
SIZES = [1, 2, 3, 5]
NEAR = {torch.bfloat16: (3e-2, 1e-2), torch.float32: (2e-5, 1e-7), torch.float64: (1e-6, 1e-7)}
"""Relative and absolute; a sum over ranks rounds once for each of them."""


class Takes(torch.optim.Optimizer):
    """Makes each parameter its gradient: what servers have agreed on, as all ranks get it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)


class Everything(nn.Module):
    """One of each sort of parameter that a strategy may meet."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4, sparse=True)
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.never = nn.Parameter(torch.randn(3))
        self.rarely = nn.Parameter(torch.randn(4))
        self.low = nn.Parameter(torch.randn(4).to(torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(0.7))

    def forward(self, rows, *, rarely):
        x = self.tied(torch.tanh(self.first(self.words(rows)) + self.frozen))
        x = x * self.low.to(torch.float32) + self.wide.to(torch.float32) * self.scalar
        return (x * self.rarely if rarely else x).square().mean()


torch.manual_seed(5)
MODEL = Everything()  # made once: ranks as threads draw from one generator


def model_and_parameters(name="all_reduce"):
    model = copy.deepcopy(MODEL)
    model.words.sparse = name not in SERVERS
    if name in VOTES:
        model.wide = nn.Parameter(model.wide.float())
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return model, [n for n, _ in named], [p for _, p in named]


def passes_of(rank, size):
    """Number, weight, samples and whether the rare parameter is used: rank r runs r passes, rank 0
    two."""
    dealt = []
    for owner in range(size):
        count = owner or (2 if size == 1 else 0 if size > 2 else 1)
        dealt += [(owner, n) for n in range(count)]
    shares = [1 + n for n in range(len(dealt))]
    every = [
        (n, share / sum(shares), torch.tensor([n % 7, (n + 2) % 7]), who == (size - 1, 0))
        for n, (share, who) in enumerate(zip(shares, dealt, strict=True))
    ]
    return [one for one, (owner, _) in zip(every, dealt, strict=True) if owner == rank]


def ranks_of(name, workers):
    """So many workers, and two servers where the strategy has some."""
    return workers + (2 if name in SERVERS else 0)


def begin(name, parameters, comm, options=None, *, notes=1, parts=0, state=None):
    """A strategy that has started on a rank, and how many workers there are."""
    strategy, workers, servers = (
        make_strategy(name, options or OPTIONS.get(name, [{}])[0]),
        comm.size,
        None,
    )
    if state is not None:
        strategy.load_state(state)
    if name in SERVERS:
        workers -= 2
        none = torch.amp.GradScaler("cuda", enabled=False)
        update = ServedUpdate(
            Takes(parameters), None, parameters, seed=0, max_grad_norm=None, scaler=none
        )
        servers = Servers(range(workers, comm.size), update)
    more = {"memory": HostMemory(), "servers": servers}
    strategy.start(parameters, comm, Generation(notes=notes, parts=parts, **more))
    return strategy, workers


def exchange(strategy, notes):
    agreed = strategy.exchange(notes)
    if agreed is not None:
        strategy.prepare(1, 1.0)
    return agreed


def agreed_on(name, strategy, parameters):
    """Let the step happen: the agreed gradient of each parameter."""
    before = [p.detach().clone() for p in parameters]
    strategy.hand_out()
    grads = strategy.apply(lambda: [_copy(p.grad) for p in parameters])
    if name in SERVERS:
        assert grads == [None] * len(grads)
        pairs = list(zip(before, parameters, strict=True))
        grads = [None if torch.equal(p, old) else p.detach().clone() for old, p in pairs]
        with torch.no_grad():
            for old, parameter in pairs:
                parameter.copy_(old)
    return grads


def one_step(comm, name, options, steps=1):
    """What a rank holds after the agreement of its last step."""
    model, names, parameters = model_and_parameters(name)
    strategy, workers = begin(name, parameters, comm, options, notes=2)
    gradients = Gradients(parameters, strategy.gradient)
    for _ in range(steps):
        own = passes_of(comm.rank, workers)
        for number, (unit, weight, rows, rarely) in enumerate(own):
            strategy.begin_pass(weight, last=number == len(own) - 1, unit=unit)
            model(rows, rarely=rarely).backward()
        notes = torch.tensor([float(len(own)), 0.25 * comm.rank], dtype=torch.float64)
        notes = exchange(strategy, notes)
        assert all(parameter.grad is None for parameter in parameters)
        grads = dict(zip(names, agreed_on(name, strategy, parameters), strict=True))
        assert all(parameter.grad is None for parameter in parameters)
    gradients.close()
    strategy.stop()
    return grads, notes


def _copy(grad):
    return None if grad is None else grad.detach().clone()


def _bits(grad):
    return grad.to_dense().reshape(-1).view(torch.uint8).numpy().tobytes()


def agreed_of(strategy, parts):
    """What is agreed on, of what the passes have of a parameter, each times its weight."""
    if strategy in VOTES:
        return sum(part.sign() for part in parts).sign()
    return sum(parts)


def expected_gradients(strategy, size):
    """What one process without instep makes of all passes."""
    model, names, parameters = model_and_parameters(strategy)
    parts = {name: [] for name in names}
    for rank in range(size):
        for _, weight, rows, rarely in passes_of(rank, size):
            model(rows, rarely=rarely).backward()
            for name, parameter in zip(names, parameters, strict=True):
                if parameter.grad is not None:
                    parts[name].append(weight * parameter.grad.to_dense().to(torch.float64))
                    parameter.grad = None
    return {name: agreed_of(strategy, each) if each else None for name, each in parts.items()}


@pytest.fixture(
    scope="module",
    params=[(*case, size) for case in CASES for size in SIZES],
    ids=lambda p: f"{p[0]}-{p[1] or ''}-{p[2]}",
)
def agreed(request):
    """For each rank: its agreed gradients by name, and its notes."""
    name, options, size = request.param
    return Agreed(run_ranks(ranks_of(name, size), one_step, name, options), name, size)


class Agreed(list):
    """What each rank gave, of which so many are workers."""

    def __init__(self, given, strategy, workers):
        super().__init__(given)
        self.strategy, self.workers = strategy, workers

    @property
    def of_workers(self):
        """A server has its own part only."""
        return self[: self.workers]


def test_notes_come_back_summed_and_alike(agreed):
    size = agreed.workers
    passes = sum(len(passes_of(rank, size)) for rank in range(size))
    wanted = torch.tensor([passes, 0.25 * sum(range(len(agreed)))], dtype=torch.float64)
    for _, notes in agreed:
        torch.testing.assert_close(notes, wanted, rtol=1e-7, atol=0)
        assert torch.equal(notes, agreed[0][1])


def test_the_agreed_gradient_is_the_mean_over_all_passes_by_their_weights_or_their_vote(agreed):
    for name, wanted in expected_gradients(agreed.strategy, agreed.workers).items():
        for grads, _ in agreed.of_workers:
            if wanted is None:
                assert grads[name] is None, name
                continue
            own = grads[name].to_dense()
            rtol, atol = NEAR[own.dtype]
            torch.testing.assert_close(own.double(), wanted, rtol=rtol, atol=atol)


def test_every_worker_holds_the_same_bits(agreed):
    first, _ = agreed[0]
    for grads, _ in agreed.of_workers[1:]:
        for name, grad in grads.items():
            assert (grad is None) == (first[name] is None)
            assert grad is None or _bits(grad) == _bits(first[name]), name


def test_a_parameter_that_no_rank_used_keeps_no_gradient(agreed):
    assert all(grads["never"] is None for grads, _ in agreed.of_workers)


def test_a_parameter_that_one_pass_of_one_rank_used_has_its_mean_on_every_worker(agreed):
    assert all(grads["rarely"].abs().sum() > 0 for grads, _ in agreed.of_workers)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SERVERS])
def test_the_gradient_of_a_sparse_embedding_is_sparse_on_every_rank(name):
    agreed = run_ranks(3, one_step, name, {})
    assert all(grads["words.weight"].is_sparse for grads, _ in agreed)


def test_gradients_have_the_type_of_their_parameters(agreed):
    _, names, parameters = model_and_parameters(agreed.strategy)
    for grads, _ in agreed.of_workers:
        for name, parameter in zip(names, parameters, strict=True):
            assert grads[name] is None or grads[name].dtype == parameter.dtype


@pytest.mark.parametrize(("name", "options"), CASES)
def test_nothing_of_a_step_is_left_in_the_next(name, options):
    once, thrice = (
        run_ranks(ranks_of(name, 3), one_step, name, options, 1),
        run_ranks(ranks_of(name, 3), one_step, name, options, 3),
    )
    for (first, _), (last, _) in zip(once, thrice, strict=True):
        for key, grad in first.items():
            assert (grad is None) == (last[key] is None)
            assert grad is None or _bits(grad) == _bits(last[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_may_have_no_pass_at_all_and_still_gets_the_gradient(name):
    def body(comm):
        weight = nn.Parameter(torch.ones(2))
        strategy, _ = begin(name, [weight], comm)
        if comm.rank == 0:
            strategy.begin_pass(1.0, last=True)
            strategy.gradient(0, torch.tensor([2.0, 3.0]))
        exchange(strategy, torch.zeros(1, dtype=torch.float64))
        return agreed_on(name, strategy, [weight])[0]

    given = run_ranks(ranks_of(name, 3), body)
    wanted = agreed_of(name, [torch.tensor([2.0, 3.0])]).tolist()
    assert [gradient.tolist() for gradient in given[:3]] == [wanted] * 3


@pytest.mark.parametrize("name", NAMES)
def test_a_step_in_which_nobody_has_a_pass_leaves_no_gradient(name):
    def body(comm):
        weight = nn.Parameter(torch.ones(2))
        strategy, _ = begin(name, [weight], comm)
        notes = exchange(strategy, torch.ones(1, dtype=torch.float64))
        return agreed_on(name, strategy, [weight])[0], notes.tolist()

    ranks = ranks_of(name, 2)
    assert run_ranks(ranks, body) == [(None, [float(ranks)])] * ranks


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_price_grows_with_replicas_and_parameters_and_is_never_negative(name):
    price = make_strategy(name, {}).price
    assert price(1_000_000, 1) >= (0, 0)
    assert price(1_000_000, 2).sent_bytes > 0
    assert price(1_000_000, 2).messages > 0
    assert price(1_000_000, 4).sent_bytes >= price(1_000_000, 2).sent_bytes
    assert price(2_000_000, 4).sent_bytes > price(1_000_000, 4).sent_bytes


@pytest.mark.parametrize("name", NAMES)
def test_what_a_strategy_remembers_is_taken_up_by_another_of_its_name(name):
    def body(comm):
        _, _, parameters = model_and_parameters(name)
        strategy, _ = begin(name, parameters, comm)
        state = strategy.state()
        strategy.stop()
        other, _ = begin(name, parameters, comm, state=state)
        again = other.state()
        other.stop()
        return state.keys() == again.keys() and all(torch.equal(state[k], again[k]) for k in state)

    ranks = ranks_of(name, 2)
    assert run_ranks(ranks, body) == [True] * ranks


@pytest.mark.parametrize("name", NAMES)
def test_after_stop_a_backward_pass_is_as_if_there_had_been_no_strategy(name):
    def body(comm):
        weight = nn.Parameter(torch.ones(2))
        strategy, _ = begin(name, [weight], comm)
        strategy.stop()
        strategy.stop()
        (weight * 3).sum().backward()
        return weight.grad.tolist()

    ranks = ranks_of(name, 2)
    assert run_ranks(ranks, body) == [[3.0, 3.0]] * ranks


@pytest.mark.parametrize("parts", [0, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_does_not_happen_leaves_nothing_behind(name, parts):
    def body(comm):
        weight = nn.Parameter(torch.ones(2))
        strategy, workers = begin(name, [weight], comm, parts=parts)

        def step(number, value):
            agreed = None
            strategy.begin_step(Attempt(0, number, 1))
            while agreed is None:
                if comm.rank < workers:
                    strategy.begin_pass(1 / workers, last=True, unit=comm.rank)
                    strategy.gradient(0, torch.tensor([value, 3.0]))
                agreed = exchange(strategy, torch.ones(1, dtype=torch.float64))

        step(1, 2.0)
        agreed_on(name, strategy, [weight])
        before = {name: kept.clone() for name, kept in strategy.state().items()}
        step(2, 1e9)  # on a lattice: much too large for what was learnt
        strategy.abandon()
        assert weight.grad is None
        assert weight.tolist() == [1.0, 1.0]
        assert all(torch.equal(kept, before[name]) for name, kept in strategy.state().items())
        step(2, 4.0)
        return agreed_on(name, strategy, [weight])[0]

    try:
        given = run_ranks(ranks_of(name, 2), body)
    except SpecError:
        assert parts
        assert name != "all_reduce"
        pytest.skip("it refuses determinism = 'bits'")
    wanted = agreed_of(name, [torch.tensor([4.0, 3.0])]).tolist()
    assert [gradient.tolist() for gradient in given[:2]] == [wanted] * 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_options_in_the_row_of_a_strategy_are_those_that_it_takes(name):
    known, row = inspect.signature(STRATEGIES[name]).parameters.values(), STRATEGY_ROWS[name]
    apart = {"codec", *ROUND_OPTIONS}  # all with rounds have these
    assert row.options == {p.name: p.default for p in known if p.name not in apart}
    assert {p.name for p in known} & {*ROUND_OPTIONS} <= row.round_options
    assert row.unused.keys() <= row.options.keys()
