"""What a first pass takes from the parameters, and what a pass writes to them later, is seen."""

import functools
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.errors import RecipeError
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.worker.trial.reads import try_recipe

PARTS = pytest.mark.parametrize("parts", [1, 4])
WORDS, WIDTH = 40, 3


def tried(parts, model, loss=None):
    """The verdict of a trial on words of a small vocabulary."""
    torch.manual_seed(0)
    words = torch.randint(0, WORDS, (64, 2))
    inputs = words if isinstance(model, Words) else functional.one_hot(words).flatten(1).float()
    given = {"loss": nn.MSELoss()} if loss is None else {"compute_loss": loss}
    recipe = Recipe(
        model=model,
        train=TensorDataset(inputs, torch.randn(64, 2)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        weight=lambda batch: len(batch[0]),
        **given,
    )
    loader = Loader(recipe.train, seed=7, shuffle=False, processes=0)
    train = TrainSpec(global_batch=16, micro_batches=parts)
    job = JobSpec(recipe="a.py:recipe", train=train, workers=1)
    with closing(loader):
        forward = Forward(recipe, model, torch.device("cpu"), "float32")
        return try_recipe(forward, loader, job, Batches.of_job(job, 64)).verdict


class Penalty:
    """Follows how far the parameters are from where a first call found them."""

    start = None

    def __init__(self, copied=torch.clone, kept=list):
        self.copied, self.kept = copied, kept

    def __call__(self, model, batch):
        now = [*model.parameters()]
        if self.start is None:
            self.start = self.kept(self.copied(each.detach()) for each in now)
        far = sum((own - start).square().sum() for own, start in zip(now, self.start, strict=True))
        return functional.mse_loss(model(batch[0]), batch[1]) + 0.1 * far


class Ball(nn.Linear):
    """Keeps the length that its weight had in the first pass."""

    length = None

    def forward(self, x):
        if self.length is None:
            self.length = float(self.weight.detach().norm())
        return functional.linear(x, self.weight * (self.length / self.weight.norm()), self.bias)


class Cached(nn.Linear):
    """Keeps, of each sample, the outputs that it had when it came first."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.first = {}

    def forward(self, x):
        outputs = super().forward(x)
        for sample, own in zip(x.tolist(), outputs.detach(), strict=True):
            self.first.setdefault(tuple(sample), own.clone())
        return outputs - 0.5 * torch.stack([self.first[tuple(each)] for each in x.tolist()])


class Remembered(nn.Linear):
    @functools.lru_cache  # noqa: B019
    def length(self):
        return self.weight.detach().norm()

    def forward(self, x):
        return super().forward(x) / self.length()


class InBuffer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("length", None)

    def forward(self, x):
        if self.length is None:
            self.length = self.weight.detach().norm()
        return functional.linear(x, self.weight * (self.length / self.weight.norm()), self.bias)


class Table(nn.Linear):
    """Has a table that follows from no parameter, and its last outputs for a person to see."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0.5, 1.0, self.out_features)
        self.last = super().forward(x) * self.table
        return self.last


@PARTS
@pytest.mark.parametrize(
    ("make", "loss", "name"),
    [
        (nn.Linear, Penalty(), "Penalty.start"),
        (nn.Linear, Penalty(kept=tuple), "Penalty.start"),
        (Ball, None, "length"),
        (Cached, None, "first"),
        (Remembered, None, "length"),
    ],
)
def test_what_a_first_pass_takes_from_the_parameters_is_named(make, loss, name, parts):
    verdict = tried(parts, make(2 * WORDS, 2), loss)
    assert verdict.startswith("not shown: the first pass sets '"), verdict
    assert name in verdict
    assert "by the parameters as they are then" in verdict


@PARTS
@pytest.mark.parametrize("make", [InBuffer, Table])
def test_what_checkpoints_have_or_each_pass_makes_anew_is_no_memory(make, parts):
    assert tried(parts, make(2 * WORDS, 2)) == "yes"


class Words(nn.Module):
    """Embeds words; their vectors are so short at first that nothing shortens them."""

    def __init__(self, shorten):
        super().__init__()
        self.shorten, self.out = shorten, nn.Linear(2 * WIDTH, 2)
        self.vectors = nn.Parameter(torch.randn(WORDS, WIDTH) / 100)

    def forward(self, words):
        return self.out(self.shorten(words, self.vectors).flatten(1))


def shorten_rows(words, vectors):
    return functional.embedding(words, vectors, max_norm=1.0)


def shorten_by_hand(words, vectors):
    with torch.no_grad():
        rows = words.unique()
        vectors[rows] = vectors[rows].clamp(-1, 1)
    return vectors[words]


def shorten_all(words, vectors):
    with torch.no_grad():
        vectors.clamp_(-1, 1)
    return vectors[words]


@pytest.mark.parametrize("shorten", [shorten_rows, shorten_by_hand])
def test_a_pass_that_will_write_to_the_rows_of_its_batch_is_refused_before(shorten):
    with pytest.raises(RecipeError, match="wrote to the parameter 'vectors'"):
        tried(4, Words(shorten))


@pytest.mark.parametrize("shorten", [shorten_rows, shorten_all])
def test_one_pass_a_step_and_a_write_that_no_batch_decides_are_not_refused(shorten):
    assert tried(4 if shorten is shorten_all else 1, Words(shorten)) == "yes"


class CachedNorms(nn.Linear):
    """Keeps the norms of its rows in a cache of a method of its own."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.norms = functools.lru_cache(None)(self._norms)

    def _norms(self, ord):
        return self.weight.detach().norm(ord, dim=1).clone()

    def forward(self, x):
        return super().forward(x) / self.norms(2)


@PARTS
def test_a_cache_of_a_method_of_one_object(parts):
    assert "by the parameters as they are then" in tried(parts, CachedNorms(2 * WORDS, 2))
