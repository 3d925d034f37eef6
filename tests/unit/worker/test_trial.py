"""What the trial reads, what it refuses, and which batches of a run it has not seen."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from instep.comm.memory import run_ranks
from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.data.order import position
from instep.engine.passes import share_of
from instep.engine.trial_result import Trial
from instep.errors import RecipeError
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.parallel.global_batch.batch_norm import make_global
from instep.recipe.build import build_optimizer
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.recipe.tuning import NOTHING
from instep.worker.passes.late_trial import LateTrial
from instep.worker.training.trials import agreed
from instep.worker.trial.gate import GradientGate, WholePass
from instep.worker.trial.kept.kept import try_kept
from instep.worker.trial.places import Places
from instep.worker.trial.reads import shapes_in, try_recipe, try_step
from instep.worker.trial.shapes import ShapeWatch

LONG, LEFT_OUT = 200, 70


class Sequences:
    """Sequences of 4 numbers; one of 9, and one that cannot be used; or else some of 9."""

    def __init__(self, count, long=(LONG,)):
        self.long = long
        generator = torch.Generator().manual_seed(1)
        self.values = torch.randn(count, 9, 1, generator=generator, dtype=torch.float64)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        if index == LEFT_OUT and len(self.long) == 1:
            return None
        values = self.values[index, : 9 if index in self.long else 4]
        return values, values.square()


def padded(samples):
    pairs = [sample for sample in samples if sample is not None]
    return tuple(
        nn.utils.rnn.pad_sequence(list(each), batch_first=True) for each in zip(*pairs, strict=True)
    )


def masked(model, batch):
    inputs, target = batch
    counts = (inputs != 0).double()
    return ((model(inputs) - target).square() * counts).sum() / counts.sum()


def length(batch):
    return float((batch[0] != 0).sum())


def trained(job, count, long=(LONG,), **loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    data = Sequences(count, long)
    recipe = Recipe(
        model=model, train=data, optimizer=lambda p: None, **({"collate": padded} | loss)
    )
    loader = Loader(data, seed=7, shuffle=False, collate=recipe.collate, processes=0)
    return Forward(recipe, model, torch.device("cpu"), "float32"), loader, job


def job_of(batch=16, parts=4, workers=2, **train):
    spec = TrainSpec(global_batch=batch, micro_batches=parts, **train)
    return JobSpec(recipe="a.py:recipe", train=spec, workers=workers)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ({"loss": nn.MSELoss()}, "no: nn.MSELoss is"),
        ({"compute_loss": masked, "weight": length}, "yes"),
    ],
    ids=["padding counts", "padding is masked"],
)
def test_a_seldom_length_is_tried_in_the_step_that_has_it(loss, kind):
    forward, loader, job = trained(job_of(), 320, **loss)
    trial = try_recipe(forward, loader, job, Batches.of_job(job, 320))
    assert trial.verdict == "yes"
    forward.derive(trial.derived, trial.each)
    watch, where = ShapeWatch(trial.shapes), position(1 + LONG // 16, 320, 16)
    (usual, *_, odd) = [*loader.read(Places.step(job.train, where).parts)][1:3]
    assert watch.odd(usual.batch, usual.size) == ""
    assert watch.odd(odd.batch, odd.size) == "[9, 1] instead of [4, 1]"
    late = try_step(forward, loader, job, where)
    assert late.verdict.startswith(kind)
    assert "one does that pads to the longest" in late.verdict or kind == "yes"
    watch.learn(late.shapes)
    assert (watch.odd(odd.batch, odd.size) == "") == (kind == "yes")


@pytest.mark.parametrize(
    ("first", "mixes", "other"), [(122, True, [7, 8]), (128, False, [8, 8])], ids=["within", "at"]
)
def test_samples_in_order_of_length_are_tried_where_the_length_changes(first, mixes, other):
    """Worker 0 has the first half of each step of 16, worker 1 the second."""
    forward, loader, job = trained(job_of(), 320, range(first, 320), loss=nn.MSELoss())
    trial = try_recipe(forward, loader, job, Batches.of_job(job, 320))
    assert trial.verdict == "yes"
    steps = [position(step, 320, 16) for step in range(1, 21)]
    odd = []
    for worker in (0, 1):
        watch = ShapeWatch(trial.shapes)
        for number, where in enumerate(steps):
            for read in loader.read(Places.step(job.train, where).parts[2 * worker :][:2]):
                if watch.odd(read.batch, read.size):
                    odd.append(number)
                    shapes = shapes_in(loader, job, where)
                    assert watch.mixed(shapes) == (mixes and number == 7)
                    watch.learn(shapes[-1], tried=False)
    assert sorted(odd) == sorted(other)
    forward.derive(trial.derived, trial.each)
    late = try_step(forward, loader, job, steps[7])
    assert late.verdict.startswith("no: nn.MSELoss is" if mixes else "yes")


def hard(model, batch):
    """Mean over the samples whose loss is above a threshold, as online hard example mining has it;
    of all where none are."""
    each = (model(batch[0]) - batch[1]).square().mean((1, 2))
    above = each[each > 1.0]
    return (above if len(above) else each).mean()


def late_trial(loss, model):
    model[2].bias.data += 30.0  # all are hard at the start
    data = Sequences(320, ())
    recipe = Recipe(model=model, train=data, optimizer=lambda p: None, weight=count, **loss)
    loader, job = Loader(data, seed=7, shuffle=False, processes=0), job_of()
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    trial = try_recipe(forward, loader, job, Batches.of_job(job, 320))
    assert trial.verdict == "yes"
    said = []
    state = SimpleNamespace(trial=trial, lost=[])
    member = SimpleNamespace(job=job, emit=lambda kind, **given: said.append(given))
    activity = SimpleNamespace(during=lambda phase: nullcontext())
    late = LateTrial(member, forward, loader, state, activity, last=40, alone=True)
    late.begin(trial)
    return late, state, said


def count(batch):
    return float(len(batch[0]))


def mean(outputs, target):
    return (outputs - target).square().mean()


@pytest.mark.parametrize(
    ("loss", "mixes"),
    [({"compute_loss": hard}, True), ({"loss": mean}, False)],
    ids=["hard", "all"],
)
def test_a_loss_that_leaves_samples_out_once_they_are_learnt_is_named_then(loss, mixes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    late, state, said = late_trial(loss, model)
    where = position(4, 320, 16)
    shares = [share_of(where, 4, 2, rank, merge=False) for rank in (0, 1)]
    model[2].bias.data -= 30.0
    before = [each.detach().clone() for each in model.parameters()]
    drawn = torch.get_rng_state()
    for step, share in ((15, shares[0]), (16, shares[1]), (65, shares[0])):
        late.try_trained(where, share, step)
        assert not said
    for step in (64, 256):
        late.try_trained(where, shares[0], step)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(map(torch.equal, before, model.parameters()))
    assert len(said) == mixes
    if mixes:
        assert said[0]["step"] == 64
        assert said[0]["verdict"].startswith("no: in step 64, compute_loss ")
    assert state.trial.same is not mixes


def test_where_work_is_dealt_by_speed_the_fastest_worker_tries_the_trained_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    late, _, said = late_trial({"compute_loss": hard}, model)
    where = position(4, 320, 16)
    slow, fast = (share_of(where, 4, 2, rank, merge=False, speeds=(1.0, 3.0)) for rank in (0, 1))
    model[2].bias.data -= 30.0
    late.try_trained(where, slow, 16, fastest=False)
    assert not said
    late.try_trained(where, fast, 16, fastest=True)
    assert said[0]["verdict"].startswith("no: in step 16, compute_loss ")


def squared_when_small(loss):
    loss.register_forward_hook(lambda module, given, found: found.square() if found < 99 else found)
    return loss


def test_a_hook_of_a_torch_loss_is_tried_with_the_trained_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    late, _, said = late_trial({"loss": squared_when_small(nn.MSELoss())}, model)
    where = position(4, 320, 16)
    share = share_of(where, 4, 2, 0, merge=False)
    late.try_trained(where, share, 16)
    assert not said
    model[2].bias.data -= 30.0
    late.try_trained(where, share, 64)
    assert [each["verdict"][:15] for each in said] == ["no: in step 64,"]


class Bootstrapped(Sequences):
    """Its targets are what the model says."""

    def __init__(self, model):
        super().__init__(320, ())
        self.model = model

    def __getitem__(self, index):
        inputs, _ = super().__getitem__(index)
        with torch.no_grad():
            return inputs, self.model(inputs)


@pytest.mark.parametrize("loaders", ["auto", 0])
def test_a_dataset_that_uses_the_model_is_not_shown_where_it_may_be_read_ahead(loaders):
    model = nn.Linear(1, 1).double()
    data = Bootstrapped(model)
    recipe = Recipe(model=model, train=data, optimizer=lambda p: None, loss=nn.MSELoss())
    loader, job = Loader(data, seed=7, shuffle=False, processes=0), job_of()
    job = structs.replace(job, data=structs.replace(job.data, loaders=loaders))
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    verdict = try_recipe(forward, loader, job, Batches.of_job(job, 320)).verdict
    if loaders == 0 and loader.mode == "inline":
        assert verdict == "yes"
    else:
        said = "not shown: what reads samples uses the model that is trained (Bootstrapped.model),"
        assert verdict.startswith(said)


class MixesLater(nn.Linear):
    """Looks at the other samples once it is told to."""

    begun = False

    def forward(self, inputs):
        return super().forward(inputs + inputs.mean(0) if self.begun else inputs)


def test_a_layer_that_looks_at_its_batch_later_is_named_in_the_last_step_too():
    torch.manual_seed(0)
    model = nn.Sequential(MixesLater(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    late, _, said = late_trial({"loss": nn.MSELoss()}, model)
    where = position(4, 320, 16)
    share = share_of(where, 4, 2, 0, merge=False)
    model[0].begun = True
    late.try_trained(where, share, 39)
    assert not said
    late.try_trained(where, share, 40)
    assert said[0]["verdict"].startswith("no: in step 40, ")


def test_what_a_restored_optimizer_lacks_is_said_once_before_its_first_step():
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    late, state, said = late_trial({"loss": nn.MSELoss()}, model)
    where = position(4, 320, 16)
    share = share_of(where, 4, 2, 0, merge=False)
    state.trial = state.trial._replace(passing=["Own.norm"])
    late.try_trained(where, share, 7)
    state.lost = ["Own.norm"]
    late.try_trained(where, share, 8)
    assert not said
    state.lost = ["Own.norm", "Own.slow"]
    late.try_trained(where, share, 9)
    late.try_trained(where, share, 10)
    assert [each["step"] for each in said] == [9]
    assert said[0]["verdict"].startswith("not shown: Own.slow is not in state_dict(), and step 9")


def test_only_different_shapes_of_one_place_were_compared_with_each_other():
    short, long = torch.zeros(2, 4), torch.zeros(2, 9)
    watch = ShapeWatch()
    watch.compared([(short, 2), (short, 2)])
    watch.compared([(long, 2), (long, 2)])
    assert watch.odd(long, 2)
    assert not watch.odd(short, 2)
    watch.compared([(short, 2), (long, 2)])
    assert not watch.odd(long, 2)


def test_a_loss_of_torch_weighs_what_collate_has_kept():
    forward, loader, job = trained(job_of(), 320, loss=nn.MSELoss())
    trial = try_recipe(forward, loader, job, Batches.of_job(job, 320))
    forward.derive(trial.derived, trial.each)
    place = Places.step(job.train, position(1 + LEFT_OUT // 16, 320, 16))
    *parts, whole = loader.read(place.slices)
    *found, plain = [forward.loss(read.batch, read.size) for read in (*parts, whole)]
    mean = sum(each.loss * each.weight for each in found) / sum(e.weight for e in found)
    torch.testing.assert_close(mean, plain.loss, rtol=1e-12, atol=0.0)
    assert [each.weight for each in found] == [4, 3, 4, 4]


def evenly(model, batch):
    assert len(batch[0]) % 2 == 0, "an even number is wanted"
    return functional.mse_loss(model(batch[0][:, 0]), batch[1][:, 0])


@pytest.mark.parametrize("mixes", [False, True])
def test_a_size_that_only_the_end_of_an_epoch_has_is_tried_before_the_start(mixes):
    def loss(model, batch):
        other = 0.3 * batch[0].flip(0) if mixes else 0.0
        return evenly(model, (batch[0] + other, batch[1]))

    def trial(count, **train):
        given = {"compute_loss": loss, "weight": lambda batch: len(batch[0])}
        forward, loader, job = trained(job_of(**train), count, collate=None, **given)
        data = torch.utils.data.TensorDataset(*2 * (Sequences(count).values[:, :4],))
        loader = Loader(data, seed=7, shuffle=False, processes=0)
        return try_recipe(forward, loader, job, Batches.of_job(job, count))

    with pytest.raises(RecipeError) as refused:
        trial(60 - 16 + 10)
    assert "AssertionError: an even number is wanted, on a micro-batch of 3" in str(refused.value)
    assert "the last batch of an epoch has 6 samples" in str(refused.value)
    assert "range(48))" in str(refused.value)
    kind = "no" if mixes else "yes"
    assert trial(48).verdict.startswith(kind)  # a size that the trial makes up may be refused
    assert trial(54, epochs=None, steps=2).verdict.startswith(kind)  # never gets there


class Ghost(nn.Module):
    """Normalises virtual batches of 8, or all at once."""

    def __init__(self, virtual):
        super().__init__()
        self.norm, self.virtual = nn.BatchNorm1d(4), virtual

    def forward(self, x):
        return torch.cat([self.norm(part) for part in x.split(self.virtual)])


@pytest.mark.parametrize(("virtual", "kind"), [(8, "no: BatchNorm1d '1.norm'"), (99, "yes")])
def test_a_layer_that_is_given_parts_of_a_global_batch_is_named(virtual, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Ghost(virtual), nn.Linear(4, 2)).double()
    make_global(model)
    values = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).double()
    data = torch.utils.data.TensorDataset(values, values[:, :2])
    recipe = Recipe(model=model, train=data, optimizer=lambda p: None, loss=nn.MSELoss())
    loader = Loader(data, seed=7, shuffle=False, processes=0)
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    trial = try_recipe(
        forward,
        loader,
        job_of(batch=32, parts=8, batch_norm="global"),
        Batches.of_job(job_of(batch=32, parts=8, batch_norm="global"), 64),
    )
    assert trial.verdict.startswith(kind)


class Between(nn.Module):
    """A frozen part in 16 bits before a trained one in float32; may see the whole batch."""

    def __init__(self, dtype, mixes):
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4).to(dtype), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.dtype, self.mixes = dtype, mixes

    def forward(self, x):
        x = x + self.trained(self.frozen(x.to(self.dtype)).tanh().float())
        return x - 0.02 * x.mean(0) if self.mixes else x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mixes", "kind"), [(False, "yes"), (True, "no: ")])
def test_frozen_parts_in_16_bits_are_tried_in_more(dtype, mixes, kind):
    torch.manual_seed(0)
    model = nn.Sequential(Between(dtype, mixes), Between(dtype, mixes), nn.Linear(4, 2))
    values = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(values, values[:, :2])
    recipe = Recipe(model=model, train=data, optimizer=lambda p: None, loss=nn.MSELoss())
    loader = Loader(data, seed=7, shuffle=False, processes=0)
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    assert try_recipe(forward, loader, job_of(), Batches.of_job(job_of(), 64)).verdict.startswith(
        kind
    )


class Stored(nn.Module):
    """Frozen weights of 8 bits, computed with in bfloat16, and a trained addition in float32."""

    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 4).mul(3).to(dtype))
        self.added = nn.Linear(4, 4)

    def forward(self, x):
        weight = self.codes.to(torch.bfloat16) / 4
        return functional.linear(x.bfloat16(), weight).type_as(x).tanh() + self.added(x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_frozen_weights_of_8_bits_are_tried_in_more(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(Stored(dtype), Stored(dtype), nn.Linear(4, 2))
    values = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(values, values[:, :2])
    recipe = Recipe(model=model, train=data, optimizer=lambda p: None, loss=nn.MSELoss())
    loader = Loader(data, seed=7, shuffle=False, processes=0)
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    assert try_recipe(forward, loader, job_of(), Batches.of_job(job_of(), 64)).verdict.startswith(
        "yes"
    )


class Weighed(nn.Module):
    """Notes what each pass takes: a third forward, and in float64 five times as long."""

    samples = "INSTEP_TEST_SAMPLES"  # in the environment: a number would be seen, and put back

    def forward(self, x):
        work = len(x) * (5.0 if x.dtype is torch.float64 else 1.0)
        self.took(work / 3)
        x = x.clone() if x.requires_grad else x.clone().requires_grad_()
        x.register_hook(lambda _: self.took(work * 2 / 3))
        return x

    @staticmethod
    def took(samples):
        os.environ[Weighed.samples] = str(float(os.environ[Weighed.samples]) + samples)


@pytest.mark.parametrize(
    ("batch", "parts", "batch_norm"),
    [
        *((32, parts, "micro_batch") for parts in (8, 5, 4)),
        *((64, parts, "global") for parts in (8, 16)),
    ],
)
def test_all_passes_of_a_trial_take_ten_steps_at_most(batch, parts, batch_norm, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(Weighed(), nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 1))
    if batch_norm == "micro_batch":
        model[2] = nn.Tanh()
    make_global(model)
    data = torch.utils.data.TensorDataset(torch.randn(1000, 64), torch.randn(1000, 1))
    recipe = Recipe(model=model, train=data, optimizer=lambda p: None, loss=nn.MSELoss())
    loader = Loader(data, seed=7, shuffle=False, processes=0)
    job, said = job_of(batch, parts, batch_norm=batch_norm), []
    monkeypatch.setenv(Weighed.samples, "0")
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    trial = try_recipe(
        forward, loader, job, Batches.of_job(job, 1000), lambda *done: said.append(done)
    )
    assert trial.verdict == "yes"
    assert 0 < float(os.environ[Weighed.samples]) <= 10 * batch
    assert said[-1] == (len(said) - 1,) * 2


def test_gradients_are_compared_where_a_place_is_also_a_whole_step():
    places = Places(job_of(12, 6), Batches(100, 12)).compared()
    assert [place.loss_alone for place in places[:2]] == [False, False]
    assert any(place.loss_alone for place in places[2:])


@pytest.mark.parametrize("packs", [False, True])
def test_a_mean_over_samples_that_cannot_be_counted_is_not_shown(packs):
    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(1, 1).double()
            self.register_buffer("mean", torch.zeros(1).double())

        def forward(self, x):
            self.mean.lerp_(x.detach().mean(), 0.1)
            return self.last(x.reshape(-1, 1))

    def packed(samples):
        return torch.stack(samples).reshape(1 if packs else len(samples), -1)

    def loss(model, batch):
        return model(batch).square().mean()

    given = {"compute_loss": loss, "weight": torch.numel, "collate": packed}
    data = [torch.rand(4).double() for _ in range(64)]
    recipe = Recipe(model=Seen(), train=data, optimizer=lambda p: None, **given)
    loader = Loader(data, seed=7, shuffle=False, collate=packed, processes=0)
    forward = Forward(recipe, recipe.model, torch.device("cpu"), "float32")
    verdict = try_recipe(forward, loader, job_of(), Batches.of_job(job_of(), 64)).verdict
    assert ("not shown: the buffer 'mean' is a mean over samples" in verdict) == packs
    assert packs or verdict == "yes"


class Adapted(nn.Module):
    """A frozen base in bfloat16 and, in float32, an adapter of low rank."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x.bfloat16()).float() + self.up(self.down(x)))


class Embedded(nn.Module):
    """A frozen table in float16."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8).half().requires_grad_(False)

    def forward(self, x):
        return self.table((x.abs() * 5).long().clamp(max=15)).float().mean(1)


class Cast(nn.Module):
    """Uses autocast itself."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.relu(self.wide(x)).float()


@pytest.mark.parametrize("kind", [Adapted, Embedded, Cast])
@pytest.mark.parametrize("mixes", [False, True])
def test_parts_in_16_bits_are_no_difference_and_hide_none(kind, mixes):
    torch.manual_seed(0)
    mixed = nn.BatchNorm1d(8) if mixes else nn.Identity()
    model = nn.Sequential(kind(), mixed, nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    recipe = Recipe(model=model, train=data, optimizer=lambda p: None, loss=nn.MSELoss())
    loader = Loader(data, seed=7, shuffle=False, processes=0)
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    verdict = try_recipe(forward, loader, job_of(), Batches.of_job(job_of(), 64)).verdict
    assert verdict.startswith("no: BatchNorm1d '1'" if mixes else "yes")


class Shrinking(nn.Linear):
    """Its pass writes to its weight, so that only the weight's values show it."""

    def __init__(self, above):
        super().__init__(8, 1)
        self.above = above

    def forward(self, x):
        if float(x[0, 0]) > self.above:
            self.weight.data.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize("above", [-1.0, 0.0], ids=["each pass", "not the first"])
def test_a_pass_that_writes_to_a_parameter_is_refused_whichever_it_is(above):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.arange(64.0).unsqueeze(1).expand(64, 8), torch.randn(64, 1)
    )
    recipe = Recipe(model=Shrinking(above), train=data, optimizer=lambda p: None, loss=nn.MSELoss())
    loader = Loader(data, seed=7, shuffle=False, processes=0)
    forward = Forward(recipe, recipe.model, torch.device("cpu"), "float32")
    with pytest.raises(RecipeError, match="wrote to the parameter 'weight'"):
        try_recipe(forward, loader, job_of(), Batches.of_job(job_of(), 64))


def test_a_reference_for_a_mesh_is_refused_where_a_later_pass_writes_to_a_parameter():
    model = Shrinking(0.5)
    recipe = Recipe(model=model, train=[0], optimizer=lambda p: None, loss=nn.MSELoss())
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    passes = [
        WholePass((torch.full((4, 8), value), torch.zeros(4, 1)), 4, [number], [4])
        for number, value in enumerate((0.0, 1.0, 1.0))
    ]
    with pytest.raises(RecipeError, match="wrote to the parameter 'weight'"):
        GradientGate(forward, 1).compute(passes)


class Counting(nn.Linear):
    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs) / self.calls


def remembering(memory):
    def loss(model, batch):
        memory.append(model(batch[0]).detach())
        return sum(each.square().mean() for each in memory) * model(batch[0]).mean()

    return loss


def plain_loss(model, batch):
    return model(batch[0]).mean()


class Drawing(nn.Sequential):
    """Dropout, batch normalisation, and a weight that a pass writes to: a checkpoint has them."""

    def __init__(self):
        super().__init__(nn.Linear(1, 4), nn.Dropout(), nn.Flatten(0, 1), nn.BatchNorm1d(4))

    def forward(self, inputs):
        with torch.no_grad():
            self[0].weight.mul_(0.5)
        return super().forward(inputs)


MEMORY = []


@pytest.mark.parametrize(
    ("model", "loss", "verdict"),
    [
        (nn.Linear(1, 1), plain_loss, "yes"),
        (Drawing(), plain_loss, "yes"),
        (Counting(1, 1), plain_loss, "no: the model or its loss gives another result"),
        (nn.Linear(1, 1), remembering(MEMORY), "no: the model or its loss gives another result"),
        (nn.Linear(1, 1), remembering(None), "not shown: whether the model or its loss"),
    ],
    ids=["plain", "drawing", "counting", "remembering", "failing"],
)
def test_one_micro_batch_a_step_is_run_twice_for_what_no_checkpoint_has(model, loss, verdict):
    data = Sequences(20)
    recipe = Recipe(
        model=model.double(), train=data, compute_loss=loss, optimizer=lambda p: None, weight=len
    )
    loader = Loader(data, seed=7, shuffle=False, processes=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    said = try_recipe(
        forward, loader, job_of(parts=1, workers=1), Batches.of_job(job_of(parts=1, workers=1), 20)
    ).verdict
    assert said == verdict if verdict == "yes" else said.startswith(verdict)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert getattr(model, "calls", 0) == 0
    assert not MEMORY


class Remembering:
    """A memory of earlier embeddings, whose loss is a mean over all of them (XBM)."""

    def __init__(self):
        self.kept = []

    def __call__(self, model, embeddings, targets):
        self.kept.append(embeddings.detach())
        return torch.stack([each.square().mean() for each in self.kept]).mean()


@pytest.mark.parametrize("parts", [1, 4])
def test_what_a_loss_over_the_global_batch_remembers_is_seen_however_it_is_cut(parts):
    memory = Remembering()
    recipe = Recipe(
        model=nn.Linear(3, 2),
        train=TensorDataset(torch.randn(64, 3), torch.zeros(64)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        embed=lambda model, batch: (model(batch[0]), batch[1]),
        batch_loss=lambda *given: memory(*given),
    )
    loader = Loader(recipe.train, seed=7, shuffle=False, processes=0)
    forward = Forward(recipe, recipe.model, torch.device("cpu"), "float32")
    job, built = job_of(parts=parts, workers=1), build_optimizer(recipe, recipe.model, 10)
    trial = try_recipe(forward, loader, job, Batches.of_job(job, 64))
    trial = try_kept(forward, job, 10, trial, NOTHING, built)
    assert trial.verdict.startswith("no: batch_loss gives another result"), trial
    assert not memory.kept


def test_every_worker_says_what_the_first_one_says_that_does_not_say_yes():
    yes = Trial(True, "", "yes")
    verdicts = ["yes", "not shown: 'größe' is kept in Python", "no: of another"]

    def agree(comm):
        trial = yes._replace(verdict=verdicts[comm.rank], merge=comm.rank != 2)
        return agreed(comm, torch.device("cpu"), trial, None)

    first, *others = run_ranks(3, agree)
    assert [first.verdict, *(each.verdict for each in others)] == [verdicts[1], *verdicts[1:]]
    assert not first.merge
    unrepeatable = [None, 7, 7]
    found = run_ranks(
        3, lambda comm: agreed(comm, torch.device("cpu"), yes, unrepeatable[comm.rank])
    )
    assert all("sample 7 " in each.verdict for each in found)
