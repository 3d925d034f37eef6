"""One pass over several micro-batches draws what each draws in a pass of its own."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from helpers import run_processes
from instep.data.order import key
from instep.errors import RecipeError
from instep.parallel.draws import ByMicroBatch
from instep.parallel.global_batch.batch_norm import make_global

SIZES = (4, 3, 5)
KEYS = [key(7, 1, 20, number) for number in range(3)]


class Noise(nn.Module):
    def __init__(self, time_major=False):
        super().__init__()
        self.time_major = time_major

    def forward(self, x):
        if self.time_major:
            return self.noisy(x.view(len(x), 6, 8).transpose(0, 1)).transpose(0, 1).flatten(1)
        return self.noisy(x)

    def noisy(self, x):
        x = x + torch.randn_like(x) * torch.rand(*x.shape[:2], *[1] * (x.dim() - 2))
        kept = torch.bernoulli(torch.full_like(x, 0.7))
        return x * kept + torch.empty_like(x).exponential_() + torch.randint(3, x.shape)


class Attention(nn.Module):
    def forward(self, x):
        x = x.view(len(x), 2, 3, 8)
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.4).flatten(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.inner(x.view(len(x), 6, 8))[0].flatten(1)


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (6, 8)), layer, nn.Flatten())


def image(layer, *shape):
    return nn.Sequential(nn.Unflatten(1, shape), layer, nn.Flatten())


LAYERS = {
    "dropout": lambda: nn.Dropout(0.4),
    "dropout in place": lambda: nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.4, inplace=True)),
    "dropout1d": lambda: image(nn.Dropout1d(), 8, 6),
    "dropout2d": lambda: image(nn.Dropout2d(), 4, 3, 4),
    "dropout2d channels last": lambda: image(nn.Dropout2d(), 4, 3, 4).to(
        memory_format=torch.channels_last
    ),
    "dropout3d": lambda: image(nn.Dropout3d(), 4, 3, 2, 2),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "feature alpha dropout": lambda: image(nn.FeatureAlphaDropout(0.3), 4, 12),
    "rrelu": lambda: nn.RReLU(0.1, 0.9),
    "attention": Attention,
    "transformer": transformer,
    "lstm": Recurrent,
    "noise": Noise,
    "noise in a time-major sequence": lambda: Noise(time_major=True),
    "positions as samples": lambda: nn.Sequential(
        nn.Unflatten(1, (6, 8)), nn.Flatten(0, 1), nn.Dropout()
    ),
}


def apart(model, x):
    """Each micro-batch in a pass of its own: outputs, joined."""
    outputs = []
    for number, part in zip(KEYS, x.split(SIZES), strict=True):
        torch.manual_seed(number)
        outputs.append(model(part))
    return torch.cat(outputs)


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_that_draws_gives_what_it_gives_apart(kind):
    torch.manual_seed(0)
    model, x = LAYERS[kind](), torch.randn(12, 48)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted = apart(model, other)
    with ByMicroBatch(KEYS, SIZES):
        found = model(mine)
        found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(mine.grad, other.grad)
    torch.manual_seed(1)
    assert not torch.allclose(model(x), found), "it draws nothing, and the test shows nothing"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_repeats_the_draws_of_each_micro_batch(reentrant):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(48, 48), nn.Dropout(), nn.Tanh(), nn.Dropout())
    x = torch.randn(12, 48)

    def model(x):
        x = functional.dropout(x)
        return functional.dropout(checkpoint(inner, x, use_reentrant=reentrant))

    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    with ByMicroBatch(KEYS, SIZES):
        model(mine).square().sum().backward()
    apart(
        lambda x: functional.dropout(inner(functional.dropout(x))), other
    ).square().sum().backward()
    torch.testing.assert_close(mine.grad, other.grad)


def test_a_micro_batch_of_which_no_sample_could_be_read_draws_nothing():
    x = torch.ones(9, 30)
    with ByMicroBatch([1, *KEYS], (0, 4, 0, 5)):
        found = functional.dropout(x)
    wanted = []
    for number, part in ((KEYS[0], x[:4]), (KEYS[2], x[4:])):
        torch.manual_seed(number)
        wanted.append(functional.dropout(part))
    assert torch.equal(found, torch.cat(wanted))


def test_a_seed_that_the_forward_pass_sets_itself_is_that_of_each_micro_batch():
    def model(x):
        torch.manual_seed(5)
        return functional.dropout(functional.dropout(x))

    x = torch.ones(12, 48)
    with ByMicroBatch(KEYS, SIZES):
        found = model(x)
    assert torch.equal(found, apart(model, x))


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: x * torch.rand(1), r"torch's rand of shape \[1\]"),
        (lambda x: x[torch.randperm(len(x))], r"torch's randperm of shape \[12\]"),
        (lambda x: x + torch.randn(5, 48)[0], r"torch's randn of shape \[5, 48\]"),
        (lambda x: x * random.random(), "from numpy's or Python's generators"),
    ],
    ids=["one for all", "a permutation", "another dimension", "Python"],
)
def test_draws_that_belong_to_no_micro_batch_are_refused(draw, name):
    with pytest.raises(RecipeError, match=name), ByMicroBatch(KEYS, SIZES):
        draw(torch.ones(12, 48))


def test_one_micro_batch_may_draw_as_it_likes():
    torch.manual_seed(KEYS[0])
    wanted = torch.rand(1), torch.randperm(5)
    with ByMicroBatch(KEYS[:1], [4]):
        assert torch.equal(torch.rand(1), wanted[0])
        assert torch.equal(torch.randperm(5), wanted[1])
        random.random()


def test_what_does_not_draw_is_left_alone_whatever_its_shape():
    """Attention without dropout is an operation that may draw, and does not."""
    x = torch.randn(1, 2, 3, 8)
    with ByMicroBatch(KEYS, SIZES):
        functional.scaled_dot_product_attention(x, x, x)
        functional.dropout(x, 0.0)
        functional.dropout(x, training=False)


class Net(nn.Module):
    """Batch normalisation and dropout, one behind the other."""

    def __init__(self, drop):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.again, self.drop = nn.BatchNorm1d(8), drop

    def forward(self, x):
        x = self.drop(torch.tanh(self.norm(self.first(x))))
        return self.last(self.drop(self.again(x)))


def net(drop):
    torch.manual_seed(2)
    return Net(drop).double()


def plain_loop(x, target):
    """The whole batch in one pass, dropout drawn micro-batch by micro-batch; torch alone."""
    states = []
    for number in KEYS:
        torch.manual_seed(number)
        states.append(torch.get_rng_state())

    def drop(x):
        made = []
        for number, part in enumerate(x.split(SIZES)):
            torch.set_rng_state(states[number])
            made.append(functional.dropout(part, 0.4))
            states[number] = torch.get_rng_state()
        return torch.cat(made)

    model = net(drop)
    functional.cross_entropy(model(x), target).backward()
    return model


def a_worker(comm):
    """Worker 0 has two micro-batches, worker 1 one, worker 2 none."""
    torch.manual_seed(4)
    x, target = torch.randn(12, 6, dtype=torch.float64), torch.randint(0, 3, (12,))
    wanted = plain_loop(x, target)
    model = net(nn.Dropout(0.4))
    reads = make_global(model)
    reads.join(comm)
    own, rows = [(range(2), slice(0, 7)), (range(2, 3), slice(7, 12)), ([0], slice(0, 1))][
        comm.rank
    ]
    works = comm.rank < 2
    sizes = [SIZES[n] for n in own] if works else [1]
    with ByMicroBatch([KEYS[n] for n in own], sizes), reads.one_pass(counts=works):
        loss = functional.cross_entropy(model(x[rows]), target[rows])
        reads.backward(loss, sum(sizes) / 12 if works else 0.0)
    for (name, mine), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
        grad = mine.grad if works else torch.zeros_like(mine)
        comm.all_reduce(grad).wait()
        torch.testing.assert_close(grad, other.grad, rtol=1e-12, atol=1e-12, msg=name)
    return True


@pytest.mark.process
def test_batch_norm_and_dropout_on_three_processes_are_those_of_the_plain_loop(tmp_path):
    assert run_processes(3, a_worker, tmp_path) == [True, True, True]
