"""What cutting a batch changes is named before the first step; where nothing changes, it merges."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from instep.errors import RecipeError
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.recipe.weights import WeightedLoss
from instep.worker.trial.compared.spots import Spot
from instep.worker.trial.sameness import try_out
from lazily import Lazy

transformers = Lazy("transformers")

CPU = torch.device("cpu")
WHOLE = 64


def tried(model, batches, *, dtype=torch.float32, precision="float32", **parts):
    """The trial of a model on pairs of batches, which leaves the model as it was."""
    model = model if dtype is None else model.to(dtype)
    recipe = Recipe(model=model, train=[0], optimizer=lambda p: None, **parts)
    spots = [
        Spot((one, other), joined(one, other), (size(one), size(other))) for one, other in batches
    ]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    trial = try_out(Forward(recipe, model, CPU, precision), spots, whole=WHOLE, seed=7)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())
    return trial


def size(batch):
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def joined(one, other):
    if isinstance(one, dict):
        return {key: torch.cat([one[key], other[key]]) for key in one}
    return tuple(torch.cat(pair) for pair in zip(one, other, strict=True))


def pictures(dtype=torch.float32, *, classes=False):
    generator = torch.Generator().manual_seed(1)

    def batch(samples):
        inputs = torch.randn(samples, 1, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
        values = torch.randn(samples, 2, generator=generator, dtype=torch.float64).to(dtype)
        return inputs, values.argmax(1) if classes else values

    return [(batch(4), batch(3)), (batch(4), batch(4))]


def mlp(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), *between, nn.ReLU(), nn.Linear(6, 2))


class CentredByBatch(nn.Module):
    """A layer of the user's own that no list of layers could know."""

    def forward(self, x):
        return x - x.mean(0)


class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


class Mixed(nn.Module):
    """Draws which samples to mix."""

    def forward(self, x):
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


class Remembers(nn.Module):
    """Has a buffer that a pass moves in some way of its own."""

    def __init__(self, start, move):
        super().__init__()
        self.register_buffer("memory", start)
        self.move = move

    def forward(self, x):
        self.memory = self.move(self.memory, x.detach())
        return x


def queued(memory, x):
    return torch.cat([x, memory])[: len(memory)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "model",
    [
        lambda: mlp(),
        lambda: mlp(nn.LayerNorm(6)),
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 2)
        ),
        lambda: mlp(nn.Dropout(0.0)),
    ],
    ids=["MLP", "LayerNorm", "convolution", "dropout of nothing"],
)
def test_layers_that_treat_samples_apart_merge_and_the_verdict_is_yes(model, dtype):
    trial = tried(model(), pictures(dtype), dtype=dtype, loss=nn.MSELoss())
    assert (trial.merge, trial.verdict) == (True, "yes"), trial


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.5), Noisy(), nn.AlphaDropout(0.3)],
    ids=lambda layer: type(layer).__name__,
)
def test_draws_are_kept_apart_and_the_verdict_is_still_yes(layer):
    trial = tried(mlp(layer), pictures(), loss=nn.MSELoss())
    assert not trial.merge
    assert "random" in trial.reason
    assert trial.verdict == "yes"


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(6), ["BatchNorm1d '2'", "sees 4 at a time", "would see 64"]),
        (nn.BatchNorm1d(6, track_running_stats=False), ["BatchNorm1d '2'"]),
        (nn.Sequential(nn.Dropout(0.4), nn.BatchNorm1d(6)), ["BatchNorm1d '2.1'"]),
        (CentredByBatch(), ["CentredByBatch '2'", "looks at the other samples"]),
        (Mixed(), ["Mixed '2'"]),
        (Counting(), ["counts calls in Python"]),
        (OwnGenerator(), ["generator of its own"]),
        (Remembers(torch.zeros(8, 6), queued), ["buffer '2.memory'", "no running average"]),
        (Remembers(torch.tensor(0), lambda m, x: m + len(x)), ["buffer '2.memory'"]),
        (Remembers(torch.zeros(6), lambda m, x: 0.9 * m + 0.1 * x.sum(0)), ["buffer '2.memory'"]),
    ],
    ids=[
        "BatchNorm",
        "BatchNorm untracked",
        "BatchNorm after dropout",
        "own layer",
        "mixed samples",
        "counter in Python",
        "own generator",
        "queue",
        "count of samples",
        "moving sum",
    ],
)
def test_what_depends_on_the_batch_is_named_with_the_remedy(layer, words):
    trial = tried(mlp(layer), pictures(), loss=nn.MSELoss())
    assert not trial.merge
    assert trial.verdict.startswith("no: ")
    assert all(word in trial.verdict for word in [*words, "workers = 1"]), trial.verdict


class UntilStill(nn.Module):
    """Approaches z = tanh(w z + x), and stops where the batch as a whole moves by less."""

    def __init__(self, features, still):
        super().__init__()
        self.weight, self.still = nn.Linear(features, features), still

    def forward(self, x):
        z, moved = x, 1.0
        while moved > self.still:
            before, z = z, 0.8 * z + 0.2 * torch.tanh(0.3 * self.weight(z) + x)
            moved = float((z - before).detach().norm())
        return z


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_iteration_that_stops_by_a_tolerance_over_the_batch_is_named(dtype):
    trial = tried(mlp(UntilStill(6, 1e-6)), pictures(dtype), dtype=dtype, loss=nn.MSELoss())
    assert trial.verdict.startswith("no")
    assert "UntilStill" in trial.verdict


class InFloat32(nn.Module):
    """Computes in float32 whatever it is given."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        return self.way(x).to(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "way",
    [
        lambda x: x * torch.linspace(0.1, 0.9, x.shape[-1]).exp() / 3,
        lambda x: torch.empty(x.shape).copy_(x) * 0.1,
        lambda x: (
            torch.einsum("bi,i->b", torch.zeros(x.shape) + x.detach(), x[0] * 0 + 0.1)[:, None] + x
        ),
    ],
    ids=["a factor", "a copy", "a sum"],
)
def test_rounding_of_what_is_computed_in_float32_is_no_difference(way, dtype):
    trial = tried(mlp(InFloat32(way)), pictures(dtype), dtype=dtype, loss=nn.MSELoss())
    assert trial.verdict == "yes"


@pytest.mark.parametrize(
    "layer",
    [
        Remembers(torch.zeros(6), lambda m, x: 0.9 * m + 0.1 * x.mean(0)),
        Remembers(torch.tensor(0), lambda m, x: m + 1),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    ],
    ids=["moving mean", "count of steps", "spectral norm"],
)
def test_a_running_average_is_the_same_and_is_not_merged(layer):
    trial = tried(mlp(layer), pictures(), loss=nn.MSELoss())
    assert (trial.merge, trial.verdict) == (False, "yes"), trial


def test_a_zero_head_does_not_hide_what_is_behind_it():
    model = mlp(CentredByBatch())
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    trial = tried(model, pictures(), loss=nn.MSELoss())
    assert "CentredByBatch" in trial.verdict


def test_a_hook_on_a_gradient_is_named():
    model = mlp()
    model[1].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    trial = tried(model, pictures(), loss=nn.MSELoss())
    assert not trial.merge
    assert "hook on the gradient of '1.weight'" in trial.verdict


def test_a_hook_that_steps_an_optimizer_is_refused():
    model = mlp()
    steps = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: steps[own].step())
    with pytest.raises(
        RecipeError, match=r"a hook on the gradient of '1.weight' uses an optimizer"
    ):
        tried(model, pictures(), loss=nn.MSELoss())


CALLS = 0


def counting_global(loss):
    def counts():
        global CALLS
        CALLS += 1
        return loss * 9 if CALLS > 99 else loss

    return counts


def counting_in_closure(loss):
    calls = itertools.count()
    return lambda: loss * 9 if next(calls) > 99 else loss


def counting_in_list(loss):
    calls = [0]

    def counts():
        calls[0] += 1
        return loss * 9 if calls[0] > 99 else loss

    return counts


@pytest.mark.parametrize(
    ("made", "name"),
    [(counting_global, "CALLS"), (counting_in_closure, "calls"), (counting_in_list, "calls")],
)
def test_a_count_of_calls_that_may_act_later_is_named_and_put_back(made, name):
    counted = made(1.0)

    def compute_loss(model, batch):
        return counted() * functional.mse_loss(model(batch[0]), batch[1])

    trial = tried(mlp(), pictures(), compute_loss=compute_loss, weight=size)
    assert trial.verdict.startswith(f"not shown: each pass changes {name!r}, which is kept in")
    again = tried(mlp(), pictures(), compute_loss=compute_loss, weight=size)
    assert again == trial
    assert all(counted() == 1.0 for _ in range(90))


def test_a_count_in_a_module_is_named_and_what_a_first_pass_keeps_is_not():
    class Kept(nn.Module):
        calls, longest = 0, 0

        def __init__(self, counts):
            super().__init__()
            self.counts = counts

        def forward(self, x):
            self.longest = max(self.longest, len(x))
            self.calls = self.calls + 1 if self.counts else 0
            return x

    trial = tried(mlp(Kept(True)), pictures(), loss=nn.MSELoss())
    assert trial.verdict.startswith("not shown: each pass changes '2.calls'")
    assert tried(mlp(Kept(False)), pictures(), loss=nn.MSELoss()).verdict == "yes"


def test_samples_that_are_nan_are_not_taken_for_other_ones():
    def gap(model, batch):
        wanted = ~batch[1].isnan()
        return (model(batch[0]) - batch[1])[wanted].square().mean()

    given = [tuple((x, torch.where(y > 1, torch.nan, y)) for x, y in p) for p in pictures()]
    trial = tried(mlp(), given, compute_loss=gap, weight=size)
    assert trial.verdict.startswith("no: compute_loss is ")
    assert "Recipe.weight is not what it is a mean of" in trial.verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0])),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]), label_smoothing=0.1),
        functional.cross_entropy,
    ],
    ids=["class weights", "ignored class", "smoothed and weighted", "function"],
)
def test_losses_of_torch_know_what_they_are_a_mean_of(loss, dtype):
    if isinstance(loss, nn.Module):
        loss = loss.to(dtype)
    trial = tried(mlp(), pictures(dtype, classes=True), dtype=dtype, loss=loss)
    assert (trial.merge, trial.verdict) == (True, "yes"), trial


def tokens():
    """Batches of unequal numbers of tokens that count."""
    generator = torch.Generator().manual_seed(2)

    def batch(*lengths):
        inputs = torch.randn(len(lengths), 5, 3, generator=generator)
        mask = torch.arange(5) < torch.tensor(lengths)[:, None]
        return {"x": inputs, "mask": mask.float()}

    return [(batch(5, 1, 2), batch(1, 1, 1)), (batch(2, 2), batch(5, 4))]


def per_token(model, batch):
    return (model(batch["x"]).squeeze(-1) ** 2) * batch["mask"]


def mean_over_tokens(model, batch):
    return per_token(model, batch).sum() / batch["mask"].sum()


def test_a_mean_over_tokens_without_a_weight_is_named_and_with_one_is_the_same():
    model = nn.Linear(3, 1)
    bare = tried(model, tokens(), compute_loss=mean_over_tokens)
    assert bare.verdict.startswith("no: compute_loss is ")
    assert "Recipe.weight" in bare.verdict
    given = tried(model, tokens(), compute_loss=mean_over_tokens, weight=lambda b: b["mask"].sum())
    assert (given.merge, given.verdict) == (True, "yes")
    returned = tried(
        model,
        tokens(),
        compute_loss=lambda m, b: WeightedLoss(per_token(m, b).sum(), b["mask"].sum()),
    )
    assert (returned.merge, returned.verdict) == (True, "yes")
    wrong = tried(model, tokens(), compute_loss=mean_over_tokens, weight=lambda b: len(b["x"]))
    assert "Recipe.weight is not what it is a mean of" in wrong.verdict


def test_a_loss_of_the_users_own_is_not_trusted_for_two_lucky_batches():
    trial = tried(mlp(), pictures(), loss=lambda o, t: functional.mse_loss(o, t))
    assert not trial.merge
    assert trial.verdict.startswith("not shown: Recipe.loss is your own function")
    trusted = tried(
        mlp(), pictures(), loss=lambda o, t: functional.mse_loss(o, t), weight=lambda b: len(b[0])
    )
    assert (trusted.merge, trusted.verdict) == (True, "yes")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.MSELoss(reduction="sum"), "reduction = 'sum'"),
        (lambda o, t: ((o - t) ** 2).sum(), "twice as large with two micro-batches"),
    ],
)
def test_a_sum_is_refused(loss, words):
    with pytest.raises(RecipeError, match="it is a sum") as error:
        tried(mlp(), pictures(), loss=loss)
    assert words in str(error.value)
    assert "Divide by the batch size" in str(error.value)


def test_a_loss_that_compares_samples_is_named_with_how_many_it_sees():
    def contrastive(outputs, target):
        return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    trial = tried(mlp(), pictures(), loss=contrastive)
    assert trial.verdict.startswith("no: Recipe.loss is ")
    assert "sees 4 samples at a time; on one machine it would see 64" in trial.verdict


def test_a_batch_in_which_nothing_counts_does_not_disturb_the_trial():
    first, second = pictures(classes=True)
    silent = (first[0][0], torch.full((4,), -100))
    trial = tried(mlp(), [(silent, first[1]), second], loss=nn.CrossEntropyLoss())
    assert trial.verdict == "yes"


class Late(nn.Module):
    """Its buffer has no shape before the first pass."""

    def __init__(self, of, empty):
        super().__init__()
        self.of = of
        self.register_buffer("memory", torch.empty(0) if empty else None)

    def forward(self, x):
        self.memory = self.of(x.detach())
        return x


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    ("of", "verdict"),
    [
        (lambda x: x.mean(0), "yes"),
        (lambda x: x.amax(0), "no: the buffer '2.memory' is no running average"),
        (lambda x: x[:, 0], None),
    ],
)
def test_a_buffer_that_gets_its_shape_in_the_first_pass_is_compared(of, verdict, empty):
    model = mlp(Late(of, empty))
    if verdict is None:
        with pytest.raises(RecipeError, match=r"'memory' of a Late the shape \[3\] .* \[4\]"):
            tried(model, pictures(), loss=nn.MSELoss())
    else:
        assert tried(model, pictures(), loss=nn.MSELoss()).verdict.startswith(verdict)


def test_a_running_minimum_that_begins_at_infinity_is_no_running_average():
    class Lowest(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("lowest", torch.tensor([torch.inf, -torch.inf]))

        def forward(self, x):
            self.lowest[0] = torch.minimum(self.lowest[0], x.detach().min())
            return x

    trial = tried(mlp(Lowest()), pictures(), loss=nn.MSELoss())
    assert trial.verdict.startswith("no: the buffer '2.lowest' is no running average")


def test_statistics_that_lead_to_no_gradient_are_named_with_their_layer():
    class Watched(nn.Module):
        """Only looks on, as a monitor does."""

        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            self.norm(x.detach())
            return x

    trial = tried(mlp(Watched()), pictures(), loss=nn.MSELoss())
    assert trial.verdict.startswith("no: BatchNorm1d '2.norm' looks at the other samples")


@pytest.mark.parametrize("silent", [0, 1])
def test_a_running_average_is_one_too_where_nothing_counts_in_a_micro_batch(silent):
    first, second = pictures(classes=True)
    ignored = (first[silent][0], torch.full((size(first[silent]),), -100))
    pair = (ignored, first[1]) if silent == 0 else (first[0], ignored)
    average = Remembers(torch.zeros(6), lambda memory, x: 0.9 * memory + 0.1 * x.mean(0))
    trial = tried(mlp(average), [pair, second], loss=nn.CrossEntropyLoss())
    assert trial.verdict == "yes"


def penalised(net):
    """As a user of one process may write it."""
    return lambda outputs, target: (
        functional.mse_loss(outputs, target) + 1e-2 * net[1].weight.square().sum()
    )


def through(net):
    return lambda model, batch: functional.mse_loss(net(batch[0]), batch[1])


def test_what_reaches_the_model_by_a_closure_leaves_no_gradient_and_is_not_shown():
    net = mlp()
    for parts in ({"loss": penalised(net)}, {"compute_loss": through(net)}):
        trial = tried(net, pictures(), weight=size, **parts)
        assert trial.verdict.startswith("not shown: ")
        assert "uses a model that it was not given as an argument" in trial.verdict


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs, target):
        return self.scale * functional.mse_loss(outputs, target)


class WithCriterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.criterion = mlp(), Scaled()

    def forward(self, x):
        return self.body(x)


def test_a_criterion_that_is_part_of_the_model_is_copied_with_it():
    model = WithCriterion()
    assert tried(model, pictures(), weight=size, loss=model.criterion).verdict == "yes"


class ChangesItsInputs(nn.Module):
    def forward(self, x):
        return x.mul_(2).sub_(0.5)


def test_a_pass_may_change_what_it_is_given():
    model = nn.Sequential(ChangesItsInputs(), *mlp())
    assert tried(model, pictures(), loss=nn.MSELoss()).verdict == "yes"

    def popped(model, batch):
        target = batch.pop("y")
        return functional.mse_loss(model(batch["x"]), target)

    named = [tuple({"x": x, "y": y} for x, y in pair) for pair in pictures()]
    trial = tried(mlp(), named, weight=size, compute_loss=popped)
    assert trial.verdict == "yes"


def test_a_batch_keeps_its_kind_and_a_model_its_type_where_it_insists():
    def insists(model, batch):
        assert isinstance(batch, transformers.BatchEncoding)
        assert batch.x.dtype == torch.float32, "pictures are float32"
        return functional.mse_loss(model(batch.x), batch.y)

    def encoded(pair):
        return [transformers.BatchEncoding({"x": x, "y": y}) for x, y in pair]

    spots = []
    for pair in map(encoded, pictures()):
        whole = transformers.BatchEncoding(
            {key: torch.cat([each[key] for each in pair]) for key in pair[0]}
        )
        spots.append(Spot(tuple(pair), whole, tuple(len(each["x"]) for each in pair)))
    recipe = Recipe(
        model=mlp(),
        train=[0],
        optimizer=lambda p: None,
        compute_loss=insists,
        weight=lambda batch: len(batch["x"]),
    )
    forward = Forward(recipe, recipe.model, CPU, "float32")
    assert try_out(forward, spots, whole=WHOLE, seed=7).verdict == "yes"


def test_what_a_hugging_face_loss_is_a_mean_of_weighs_the_first_micro_batch_too():
    def texts(*counted):
        ids = torch.arange(8 * len(counted)).view(-1, 8) % 20
        labels = torch.full_like(ids, -100)
        for row, tokens in enumerate(counted):
            labels[row, :tokens] = ids[row, :tokens]
        return {"input_ids": ids, "labels": labels}

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    given = [(texts(8, 2), texts(3, 3)), (texts(2, 2), texts(8, 8))]
    trial = tried(
        transformers.GPT2LMHeadModel(config).eval(),
        given,
        compute_loss=lambda model, batch: model(**batch).loss,
    )
    assert trial.verdict == "yes"
    assert trial.derived == "next tokens"


def test_a_running_average_in_16_bits_is_named():
    def moving(memory, x):
        return (memory * 0.9).add(x.mean(0).to(torch.bfloat16), alpha=0.1)

    model = mlp(Remembers(torch.zeros(6, dtype=torch.bfloat16), moving))
    trial = tried(model, pictures(), dtype=None, loss=nn.MSELoss())
    assert trial.verdict.startswith("no: the buffer '2.memory' has 16 bits")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_what_happens_at_some_draws_alone_is_seen(share):
    class Sometimes(nn.Module):
        def forward(self, x):
            return x - x.mean(0) if torch.rand(()) < share else x

    pairs = [*pictures(), *pictures()]
    assert tried(mlp(Sometimes()), pairs, loss=nn.MSELoss()).verdict.startswith("no: Sometimes '2'")


def test_a_draw_stays_in_the_range_that_is_asked_for():
    class Bounded(nn.Module):
        def forward(self, x):
            drawn = torch.empty(x.shape, dtype=x.dtype).uniform_(1.5, 3)
            return x * (drawn - 1).sqrt()

    assert tried(mlp(Bounded()), pictures(), loss=nn.MSELoss()).verdict == "yes"


def test_draws_of_numpy_are_no_difference_of_the_model():
    class Noise(nn.Module):
        def forward(self, x):
            return x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)).to(x.dtype)

    trial = tried(mlp(Noise()), pictures(), loss=nn.MSELoss())
    assert trial.verdict.startswith("not shown: something draws from numpy's or Python's")


def test_a_loss_that_compares_samples_only_where_there_are_many_is_seen_in_a_whole_step():
    def hardest(outputs, target):
        each = (outputs - target).square().mean(1)
        return each.topk(max(8, len(each) // 2)).values.mean() if len(each) > 8 else each.mean()

    parts = [part for pair in pictures() for part in pair]
    whole = tuple(torch.cat(each) for each in zip(*parts, strict=True))
    recipe = Recipe(model=mlp(), train=[0], optimizer=lambda p: None, loss=hardest, weight=size)
    spots = [Spot(tuple(parts), whole, tuple(map(size, parts)))]
    forward = Forward(recipe, recipe.model, CPU, "float32")
    trial = try_out(forward, spots, whole=15, seed=7)
    assert trial.verdict.startswith("no: Recipe.loss is ")
    assert "for 4 micro-batches and" in trial.verdict


def test_a_loss_from_which_no_parameter_gets_a_gradient_is_refused():
    def anew(outputs, target):
        return torch.tensor(functional.mse_loss(outputs, target).item(), requires_grad=True)

    with pytest.raises(RecipeError, match="no parameter of the model gets a gradient from Recipe"):
        tried(mlp(), pictures(), weight=size, loss=anew)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_where_no_loss_is_finite_nothing_is_shown(value):
    trial = tried(
        mlp(), pictures(), weight=size, loss=lambda o, t: functional.mse_loss(o, t) + value
    )
    assert trial.verdict == "not shown: the loss is not finite on the batches that were tried"


def test_batches_that_are_made_otherwise_as_one_are_named_as_that():
    pairs = pictures()
    (one, other), second = pairs
    whole = joined(one, other)
    masked = whole[0] * 0.5, whole[1]
    recipe = Recipe(
        model=mlp(), train=[0], optimizer=lambda p: None, loss=nn.MSELoss(), weight=size
    )
    forward = Forward(recipe, recipe.model, CPU, "float32")
    spots = [Spot((one, other), masked, (4, 3)), Spot(second, joined(*second), (4, 4))]
    verdict = try_out(forward, spots, whole=WHOLE, seed=7).verdict
    assert verdict.startswith("no: the samples of a batch differ from those of its micro-batches")


def test_batches_that_are_made_otherwise_are_no_packing_where_time_comes_first():
    """[time, samples, ...], as of recurrent networks: nothing is packed there."""
    torch.manual_seed(2)
    one, other = torch.randn(5, 4, 3), torch.randn(5, 3, 3)
    whole = torch.cat([one, other], 1) * 0.5
    target = torch.zeros(5, 7, 2)
    recipe = Recipe(model=nn.Linear(3, 2), train=[0], optimizer=lambda p: None, loss=nn.MSELoss())
    spot = Spot(((one, target[:, :4]), (other, target[:, 4:])), (whole, target), (4, 3))
    forward = Forward(recipe, recipe.model, CPU, "float32")
    verdict = try_out(forward, [spot], whole=WHOLE, seed=7).verdict
    assert verdict.startswith("no: the samples of a batch differ from those of its micro-batches")


def test_a_model_that_came_in_evaluation_mode_is_tried_as_it_will_be_trained():
    """Pretrained models are often handed out so, and training switches the mode back."""
    assert (
        "BatchNorm1d" in tried(mlp(nn.BatchNorm1d(6)).eval(), pictures(), loss=nn.MSELoss()).verdict
    )


def test_draws_of_python_that_differ_by_sample_are_no_silent_yes():
    class Dropped(nn.Module):
        def forward(self, x):
            return torch.stack([row * random.random() for row in x])

    trial = tried(mlp(Dropped()), pictures(), loss=nn.MSELoss())
    assert not trial.same


def in_a_fork(x):
    with torch.random.fork_rng():
        return x + torch.randn_like(x)


def seeded(x):
    torch.manual_seed(0)
    return x + torch.randn_like(x)


def seeded_in_a_fork(x):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return x + torch.randn_like(x)


def of_a_new_generator(x):
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)


def one_matrix(x):
    torch.manual_seed(0)
    return x @ torch.randn(6, 6, dtype=x.dtype)


class Calls(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


@pytest.mark.parametrize("draws", [in_a_fork, one_matrix])
def test_draws_that_leave_no_trace_are_draws_and_a_seed_may_be_for_all_samples(draws):
    assert tried(mlp(Calls(draws)), pictures(), loss=nn.MSELoss()).verdict == "yes"


@pytest.mark.parametrize("draws", [seeded, seeded_in_a_fork, of_a_new_generator])
def test_a_forward_pass_that_seeds_what_it_draws_for_each_sample_is_no_yes(draws):
    """A whole batch draws for each of its samples; micro-batches would draw the same again."""
    model, x = mlp(Calls(draws)), torch.randn(8, 16)
    apart = torch.cat([model(part) for part in x.split(4)])
    assert not torch.allclose(apart, model(x), atol=1e-3)
    trial = tried(model, pictures(), loss=nn.MSELoss())
    assert not trial.same
    assert "draws from a seed of its own" in trial.verdict


def test_a_model_that_cannot_be_copied_is_told_to_be_untried():
    class Uncopied(nn.Module):
        def __deepcopy__(self, memo):
            raise RuntimeError("holds a connection")

        def forward(self, x):
            return x

    trial = tried(mlp(Uncopied()), pictures(), loss=nn.MSELoss())
    assert trial.verdict == "not shown: the model cannot be copied to try it (holds a connection)"


def test_low_precision_does_not_look_like_a_difference():
    trial = tried(mlp(nn.LayerNorm(6)), pictures(), precision="bfloat16", loss=nn.MSELoss())
    assert trial.verdict == "yes"
    trial = tried(
        mlp(nn.LayerNorm(6)), pictures(torch.bfloat16), dtype=torch.bfloat16, loss=nn.MSELoss()
    )
    assert trial.verdict == "yes"


class CentredABit(nn.Module):
    def forward(self, x):
        return x - 0.05 * x.mean(0)


class OfSixteenBits(nn.Module):
    """Made for its own type: it can be tried in no other."""

    def forward(self, x):
        return x @ torch.eye(x.shape[-1], dtype=torch.bfloat16)


def test_a_small_difference_shows_in_low_precision_too():
    low = {"dtype": torch.bfloat16, "loss": nn.MSELoss()}
    trial = tried(mlp(CentredABit()), pictures(torch.bfloat16), **low)
    assert trial.verdict.startswith("no: CentredABit '2' looks at the other samples")
    trial = tried(mlp(OfSixteenBits()), pictures(torch.bfloat16), **low)
    assert trial.verdict.startswith("not shown: the model can only be tried in its own 16")
    assert not trial.merge


class MakesAParameter(nn.Module):
    """As some libraries' modules do at their first call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def forward(self, x):
        if not hasattr(self, "more"):
            self.more = nn.Parameter(torch.zeros(2))
        return self.layer(x.flatten(1)) + self.more


def test_a_parameter_that_the_first_pass_makes_does_not_break_the_trial():
    assert tried(MakesAParameter(), pictures(), loss=nn.MSELoss()).same
