"""Batch normalisation over the global batch, against one plain pass over the whole batch."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks
from instep.errors import PeerError, RecipeError
from instep.parallel.global_batch.batch_norm import make_global, use_running_statistics
from instep.recipe.weights import class_weights

SHARES = [(5, 2, 0), (7,), (0, 3), (1, 1, 1), (2, 0, 0, 6)]
"""Samples of each worker; who has none joins with a pass that counts nothing."""

NEAR = {torch.float64: 1e-12, torch.float32: 3e-5}


class Net(nn.Module):
    """Layers in a row, as an attribute, used twice, frozen, and without each of their parts."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.twice = nn.BatchNorm2d(6, momentum=None)
        self.bare = nn.BatchNorm1d(6, affine=False)
        self.untracked = nn.BatchNorm1d(6, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(6)
        self.frozen.running_var.fill_(2.0)
        self.head = nn.Linear(6, 4)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        x = self.twice(self.stem(x))
        x = self.twice(x.square()).mean((2, 3))
        x = self.untracked(torch.tanh(self.bare(x)) + x)
        return self.head(self.frozen(x))


def made(kind, dtype=torch.float64):
    torch.manual_seed(3)
    models = {
        "net": Net,
        "sync": lambda: nn.Sequential(nn.Linear(3, 5), nn.SyncBatchNorm(5), nn.Linear(5, 4)),
        "volume": lambda: nn.Sequential(
            nn.Conv3d(1, 3, 2), nn.BatchNorm3d(3), nn.Flatten(), nn.Linear(24, 4)
        ),
        "sequence": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(15, 4)),
    }
    shapes = {"net": (2, 4, 4), "sync": (3,), "volume": (1, 3, 3, 3), "sequence": (3, 5)}
    return models[kind]().to(dtype), lambda n: torch.randn(n, *shapes[kind], dtype=dtype)


def outcome(model):
    """What a step leaves: gradients and buffers by name."""
    grads = {n: p.grad for n, p in model.named_parameters()}
    return grads, {n: b.detach().clone() for n, b in model.named_buffers()}


def plain(model, x, loss, context=nullcontext):
    """One pass over the whole batch, with nothing of ours."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.SyncBatchNorm):  # which torch refuses on a CPU
            other = nn.BatchNorm1d(layer.num_features).to(layer.weight.dtype)
            other.load_state_dict(layer.state_dict())
            model.set_submodule(name, other)
    with context():
        value = loss(model(x), slice(0, len(x)))
    value.backward()
    return outcome(model)


def dealt(comm, model, x, loss, weigh, shares, context=nullcontext):
    """The same batch in parts: this rank's sum of gradients over all ranks, and its buffers."""
    model = copy.deepcopy(model)
    reads = make_global(model)
    reads.join(comm)
    bounds = [sum(shares[:n]) for n in range(len(shares) + 1)]
    own = slice(*bounds[comm.rank : comm.rank + 2])
    whole = sum(weigh(slice(*bounds[n : n + 2])) for n in range(len(shares)) if shares[n])
    works = shares[comm.rank] > 0
    with reads.one_pass(counts=works):
        rows = own if works else slice(0, 1)  # a borrowed sample
        with context():
            value = loss(model(x[rows]), rows)
        reads.backward(value, weigh(rows) / whole if works else 0.0)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not works:
            parameter.grad.zero_()
        comm.all_reduce(parameter.grad).wait()
    return outcome(model), works


def assert_same(found, wanted, near):
    (grads, buffers), works = found
    for name, grad in wanted[0].items():
        torch.testing.assert_close(
            grads[name], grad, rtol=near, atol=near, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, buffer in wanted[1].items():
        if works:
            torch.testing.assert_close(buffers[name], buffer, rtol=near, atol=near)


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float64) for kind in ("net", "sync", "volume", "sequence")),
        ("net", torch.float32),
    ],
    ids=str,
)
def test_gradients_and_statistics_are_those_of_one_pass_over_the_whole_batch(kind, shares, dtype):
    model, inputs = made(kind, dtype)
    x, target = inputs(sum(shares)), torch.randint(0, 4, (sum(shares),))

    def loss(outputs, rows):
        return functional.cross_entropy(outputs, target[rows])

    wanted = plain(model, x, loss)
    for found in run_ranks(
        len(shares), dealt, model, x, loss, lambda rows: float(rows.stop - rows.start), shares
    ):
        assert_same(found, wanted, NEAR[dtype])


@pytest.mark.parametrize("ignored", [(), (5, 6)], ids=["all count", "one worker has nothing"])
def test_weighted_losses_with_ignored_targets_are_those_of_the_whole_batch(ignored):
    """Where no target of a worker counts its loss is 0 / 0; its samples are in the statistics."""
    model, inputs = made("net")
    x, target = inputs(7), torch.tensor([0, 3, -100, 1, 2, 2, 1])
    target[list(ignored)] = -100
    weights = torch.tensor([1.0, 3.0, 0.25, 2.0], dtype=torch.float64)

    def loss(outputs, rows):
        return functional.cross_entropy(outputs, target[rows], weight=weights)

    def weigh(rows):
        return class_weights(target[rows], weights)

    wanted = plain(model, x, loss)
    for found in run_ranks(3, dealt, model, x, loss, weigh, (5, 2, 0)):
        assert_same(found, wanted, 1e-12)


def test_nothing_cancels_in_float32_where_means_are_a_thousand_times_the_spread():
    x = torch.randn(999, 4, generator=torch.Generator().manual_seed(1)) + 1e3

    def statistics(comm):
        model = nn.BatchNorm1d(4, momentum=1.0)
        reads = make_global(model)
        reads.join(comm)
        with reads.one_pass():
            model(x[[slice(0, 500), slice(500, 990), slice(990, 999)][comm.rank]])
        return model.running_mean, model.running_var

    variance, mean = torch.var_mean(x.double(), 0)
    for found in run_ranks(3, statistics):
        torch.testing.assert_close(found[0].double(), mean, rtol=1e-7, atol=0)
        torch.testing.assert_close(found[1].double(), variance, rtol=1e-6, atol=0)


def test_running_statistics_of_many_steps_are_those_of_the_plain_loop():
    model, inputs = made("net")
    batches = [inputs(size) for size in (6, 6, 3)]
    reference = copy.deepcopy(model)
    for batch in batches:
        reference(batch)

    def steps(comm):
        mine = copy.deepcopy(model)
        reads = make_global(mine)
        reads.join(comm)
        for batch in batches:
            with reads.one_pass():
                mine(batch[:2] if comm.rank == 0 else batch[2:])
        return dict(mine.named_buffers())

    for found in run_ranks(2, steps):
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(found[name], buffer, rtol=1e-12, atol=1e-12)


def test_under_autocast_the_result_differs_by_the_rounding_of_16_bits():
    model, inputs = made("net", torch.float32)
    x, target = inputs(8), torch.arange(8) % 4

    def loss(outputs, rows):
        return functional.cross_entropy(outputs.float(), target[rows])

    def context():
        return torch.autocast("cpu", torch.bfloat16)

    wanted, exact = plain(model, x, loss, context), plain(model, x, loss)
    gap = max(float((wanted[0][n] - g).abs().max()) for n, g in exact[0].items() if g is not None)
    for found in run_ranks(2, dealt, model, x, loss, lambda r: r.stop - r.start, (5, 3), context):
        assert_same(found, wanted, 2 * gap)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.reentrant = nn.Linear(3, 5), reentrant
        self.inner = nn.Sequential(nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.last = nn.Linear(5, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_activation_checkpointing_all_is_as_in_a_plain_loop_with_it(reentrant):
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant).double(), torch.randn(7, 3, dtype=torch.float64)

    def loss(outputs, rows):
        return outputs.square().mean()

    wanted = plain(model, x, loss)
    for found in run_ranks(3, dealt, model, x, loss, lambda r: r.stop - r.start, (5, 2, 0)):
        assert_same(found, wanted, 1e-12)


def test_reentrant_checkpointing_is_refused_where_nothing_counts_for_one_worker():
    """The gradients of the others would have to come back through a loss that is no number."""
    torch.manual_seed(0)
    model, x = Checkpointed(True), torch.randn(7, 3)

    def loss(outputs, rows):
        return outputs.square().sum() / (0.0 if rows.start else 5.0)

    with pytest.raises(RecipeError, match="no activation checkpointing with use_reentrant = True"):
        run_ranks(2, dealt, model, x, loss, lambda rows: 0.0 if rows.start else 5.0, (5, 2))


def test_a_layer_stays_the_object_that_it_was():
    model, inputs = made("net")
    layer, calls = model.stem[1], []
    layer.register_forward_hook(lambda *_: calls.append(1))
    names, identities = list(model.state_dict()), [id(p) for p in model.parameters()]
    make_global(model)
    assert model.stem[1] is layer
    assert isinstance(layer, nn.BatchNorm2d)
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == identities
    model.eval()(inputs(2))
    assert calls == [1]


def test_outside_a_pass_and_in_evaluation_nobody_is_asked():
    model, inputs = made("net")
    other, x = copy.deepcopy(model), inputs(5)
    reads = make_global(model)
    assert torch.equal(model(x), other(x))  # no group has formed at all
    assert torch.equal(model.eval()(x), other.eval()(x))
    reads.join(AloneComm())
    copied = copy.deepcopy(model).train()
    with reads.one_pass():
        assert torch.equal(copied(x), other.train()(x))
    model.train().stem(x)


def test_a_copy_that_is_held_still_treats_each_sample_apart():
    model, inputs = made("net")
    make_global(model)
    copied, x = copy.deepcopy(model), inputs(5)
    use_running_statistics(copied)
    before = copy.deepcopy(dict(copied.named_buffers()))
    torch.testing.assert_close(copied(x)[:2], copied(x[:2]), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(buffer, before[name]) for name, buffer in copied.named_buffers())
    assert not torch.allclose(model(x)[:2], model(x[:2]))


def test_a_model_without_such_layers_reads_nothing():
    assert make_global(nn.Linear(2, 2)) is None


def test_a_layer_with_a_forward_pass_of_its_own_is_refused_by_name():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) + 1

    with pytest.raises(
        RecipeError, match=r"the layer '1' is a Own, .* in a forward\(\) of its own"
    ):
        make_global(nn.Sequential(nn.Linear(2, 2), Own(2)))


def test_a_batch_of_one_value_per_channel_is_refused_as_by_torch():
    def body(comm):
        model = nn.BatchNorm1d(3)
        reads = make_global(model)
        reads.join(comm)
        with reads.one_pass(counts=comm.rank == 0):
            model(torch.ones(1, 3))

    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        run_ranks(2, body)


def test_a_step_of_which_no_worker_could_read_a_sample_passes_by():
    def body(comm):
        model, inputs = made("sync")
        reads = make_global(model)
        reads.join(comm)
        with reads.one_pass(counts=False):
            reads.backward(model(inputs(1)).sum(), 0.0)
        return [float(p.grad.abs().sum()) for p in model.parameters()]

    assert run_ranks(2, body) == [[0.0] * 6] * 2


class Forked(nn.Module):
    """Runs another layer, or one more, where its batch says so."""

    def __init__(self, kind):
        super().__init__()
        self.one, self.other, self.kind = nn.BatchNorm1d(2), nn.BatchNorm1d(2), kind

    def forward(self, x):
        special = bool(x[0, 0] > 10)
        if self.kind == "another":
            return self.other(x) if special else self.one(x)
        return self.one(self.one(x)) if special else self.one(x)


@pytest.mark.parametrize("kind", ["another", "one more"])
def test_workers_that_run_other_layers_are_told_so(kind):
    def body(comm):
        model = Forked(kind)
        reads = make_global(model)
        reads.join(comm)
        with reads.one_pass():
            reads.backward(model(torch.randn(4, 2) + 100 * comm.rank).sum(), 0.5)

    with pytest.raises(RecipeError, match=r"do not run the same layers .* rank . is at read "):
        run_ranks(2, body)


@pytest.mark.parametrize("penalty", [True, False], ids=["a penalty", "an attack"])
def test_gradients_taken_while_the_loss_is_computed_are_refused(penalty):
    model, inputs = made("sync")
    x = inputs(4)

    def body(comm):
        mine, given = copy.deepcopy(model), x.clone().requires_grad_()
        reads = make_global(mine)
        reads.join(comm)
        with reads.one_pass():
            loss = mine(given).square().mean()
            (gradient,) = torch.autograd.grad(loss, given, create_graph=penalty)
            reads.backward(loss + gradient.square().sum(), 0.5)

    with pytest.raises(
        RecipeError, match="taken through the layer '1' outside of the backward pass"
    ):
        run_ranks(2, body)


def test_a_worker_that_goes_away_in_a_pass_breaks_it_with_a_peer_error_and_moves_nothing():
    def body(comm, at):
        model, inputs = made("sync")
        reads = make_global(model)
        reads.join(comm)
        asked = 0
        original = comm.all_reduce

        def all_reduce(tensor):
            nonlocal asked
            asked += 1
            if comm.rank == 1 and asked == at:
                raise Gone
            return original(tensor)

        comm.all_reduce = all_reduce
        try:
            with reads.one_pass():
                reads.backward(model(inputs(3)).sum(), 0.5)
        except PeerError:
            seen.append((at, reads.active))
            raise

    class Gone(Exception):
        pass

    seen = []
    for at in (1, 2, 3):  # forward, backward, the end
        with pytest.raises(Gone):
            run_ranks(2, body, at)
    assert seen == [(1, False), (2, False), (3, False)]
