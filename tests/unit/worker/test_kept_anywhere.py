"""What the user's code keeps is seen however it lies, and by what comes of it for other batches."""

import contextvars
import functools
import gc
import itertools
import multiprocessing
import random
import sys
import threading
import types
import weakref
from collections import UserDict, deque
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import Dataset, Subset, TensorDataset

from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.data.reading.fetch import Fetch, Slice
from instep.errors import DataError, RecipeError
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.parallel.copies import copied
from instep.recipe.build import build_optimizer
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.recipe.tuning import NOTHING
from instep.usercode.counts import Counts, unchanged
from instep.worker.trial.kept.kept import try_kept
from instep.worker.trial.reads import try_recipe
from lazily import Lazy

preprocessing = Lazy("sklearn.preprocessing")

LATE = 1000
PARTS = pytest.mark.parametrize("parts", [1, 4])


def tried(parts, *, tells=False, **given):
    """The verdict of a trial, with 64 samples whose size grows."""
    torch.manual_seed(0)
    grows = torch.linspace(0.1, 3.0, 64).unsqueeze(1)
    recipe = Recipe(
        **{
            "model": nn.Linear(3, 2),
            "train": TensorDataset(torch.randn(64, 3) * grows, torch.randn(64, 2)),
            "loss": nn.MSELoss(),
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
            "weight": lambda batch: len(batch[0]),
        }
        | given
    )
    loader = Loader(
        recipe.train,
        seed=7,
        shuffle=False,
        processes=0,
        augment=recipe.augment,
        collate=recipe.collate,
        tells=tells,
    )
    forward = Forward(recipe, recipe.model, torch.device("cpu"), "float32")
    train = TrainSpec(global_batch=16, micro_batches=parts)
    job = JobSpec(recipe="a.py:recipe", train=train, workers=1)
    with closing(loader):
        trial = try_recipe(forward, loader, job, Batches.of_job(job, 64))
    built = build_optimizer(recipe, recipe.model, 10)
    return try_kept(forward, job, 10, trial, NOTHING, built).verdict


def late(loss, calls):
    return loss * (1 if calls < LATE else 2)


# ---- where it lies


class Meter:
    def __init__(self):
        self.calls = 0

    def count(self):
        self.calls += 1
        return self.calls


class Attributes(dict):
    """Items that are attributes too."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Numbers(NamedTuple):
    calls: int = 0


@dataclass(frozen=True)
class Frozen:
    calls: int = 0


@functools.cache
def the_meter():
    return Meter()


@functools.lru_cache(4)
def a_meter(name):
    return Meter()


METERS, NESTED, BY_NAME = [Meter()], {"state": {"calls": 0}}, {"meter": Meter()}
SPACE, FROZEN, NUMBERS = Attributes(calls=0), Frozen(), Numbers()
COUNTED, ON, TURN = np.int64(0), False, iter([0] * (2 * LATE))
TENSORS, RECENT, MANY = [torch.zeros(())], deque([0] * 4, maxlen=4), torch.zeros(20_000)
DRAWS, SHARED = random.Random(7), multiprocessing.Value("i", 0)
TWICE, LATER = [[0], [0]], itertools.chain([0] * LATE, itertools.repeat(LATE))
OF_THREAD, OF_CONTEXT, BOX = threading.local(), contextvars.ContextVar("calls"), UserDict(calls=0)
OF_THREAD.calls, MANY_METERS, PER_SAMPLE = 0, [Meter() for _ in range(150)], [0] * 2000
STATES, RECENT_PAIRS, SLIDING = {"inner": {"calls": 0}}, deque([(0, "a")], maxlen=1), {0, 1}
COMPLEX, COUNTS = torch.zeros(1, dtype=torch.complex64), np.zeros(20_000)
MANY_NUMBERS = np.zeros(70_000)

package = types.ModuleType("package_of_a_test")
package.inner = types.ModuleType("package_of_a_test.inner")


@pytest.fixture(autouse=True)
def with_a_package(monkeypatch):
    package.inner.calls = 0
    for each in (package, package.inner):
        each.__file__ = __file__
        monkeypatch.setitem(sys.modules, each.__name__, each)


def in_a_list():
    return METERS[0].count()


def in_a_dict_in_a_dict():
    NESTED["state"]["calls"] += 1
    return NESTED["state"]["calls"]


def in_a_list_in_a_list():
    TWICE[1][0] += 1
    return TWICE[1][0]


def in_an_object_in_a_dict():
    return BY_NAME["meter"].count()


def in_a_dict_of_the_users():
    SPACE.calls += 1
    return SPACE.calls


def in_a_tuple_with_names():
    global NUMBERS
    NUMBERS = NUMBERS._replace(calls=NUMBERS.calls + 1)
    return NUMBERS.calls


def in_a_frozen_object():
    global FROZEN
    FROZEN = replace(FROZEN, calls=FROZEN.calls + 1)
    return FROZEN.calls


def in_a_cached_object():
    return the_meter().count()


def in_a_cached_object_of_some():
    return a_meter("train").count()


def in_a_module_of_a_package():
    package.inner.calls += 1
    return package.inner.calls


def in_a_number_of_numpy():
    global COUNTED
    COUNTED += 1
    return COUNTED


def in_a_flag():
    global ON
    ON = not ON
    return 0


def in_an_iterator():
    return next(TURN)


def in_a_list_of_tensors():
    TENSORS[0] = TENSORS[0] + 1
    return float(TENSORS[0])


def in_a_full_deque():
    RECENT.append(RECENT[-1] + 1)
    return RECENT[-1]


def in_a_large_tensor():
    MANY[7] += 1
    return float(MANY[7])


def in_a_generator_of_its_own():
    return LATE if DRAWS.random() < 1e-9 else 0


def in_a_chain():
    return next(LATER)


def in_a_loop_of_a_generator():
    return next(LOOP)


def looped():
    for each in [0] * LATE:  # noqa: UP028
        yield each
    while True:
        yield LATE


LOOP = looped()


def in_a_thread():
    OF_THREAD.calls += 1
    return OF_THREAD.calls


def in_a_context():
    OF_CONTEXT.set(OF_CONTEXT.get(0) + 1)
    return OF_CONTEXT.get()


def in_a_dict_of_the_library():
    BOX["calls"] += 1
    return BOX["calls"]


def in_one_of_many():
    return MANY_METERS[140].count()


def in_a_long_list():
    PER_SAMPLE[1500] += 1
    return PER_SAMPLE[1500]


def in_a_dict_that_is_replaced():
    global STATES
    STATES = {**STATES, "inner": {"calls": STATES["inner"]["calls"] + 1}}
    return STATES["inner"]["calls"]


def in_a_pair_that_is_replaced():
    RECENT_PAIRS.append((RECENT_PAIRS[-1][0] + 1, "a"))
    return RECENT_PAIRS[-1][0]


@dataclass(frozen=True)
class Outer:
    inner: Frozen = Frozen()


def in_a_frozen_object_within_another():
    global OUTER
    OUTER = replace(OUTER, inner=Frozen(OUTER.inner.calls + 1))
    return OUTER.inner.calls


OUTER = Outer()


def in_a_set_that_keeps_its_length():
    SLIDING.remove(min(SLIDING))
    SLIDING.add(max(SLIDING) + 1)
    return max(SLIDING)


def in_a_complex_tensor():
    COMPLEX.add_(1)
    return float(COMPLEX.real)


def in_a_large_array():
    COUNTS[7] += 1
    return COUNTS[7]


def in_an_array_of_many():
    MANY_NUMBERS[60_007] += 1
    return MANY_NUMBERS[60_007]


def in_a_default(meter=Meter()):  # noqa: B008
    return meter.count()


class Counted(type):
    total = 0

    def tick(cls):
        Counted.total += 1
        return Counted.total


class Ticking(metaclass=Counted):
    pass


def in_the_class_of_a_class():
    return Ticking.tick()


def in_memory_of_many_processes():
    SHARED.value += 1
    return SHARED.value


NOT_PUT_BACK = in_a_chain, in_a_loop_of_a_generator, in_an_array_of_many
"""Nobody can set these back."""


@PARTS
@pytest.mark.parametrize(
    "count",
    [
        in_a_list,
        in_a_dict_in_a_dict,
        in_a_list_in_a_list,
        in_an_object_in_a_dict,
        in_a_dict_of_the_users,
        in_a_tuple_with_names,
        in_a_frozen_object,
        in_a_cached_object,
        in_a_cached_object_of_some,
        in_a_module_of_a_package,
        in_a_number_of_numpy,
        in_a_flag,
        in_an_iterator,
        in_a_list_of_tensors,
        in_a_full_deque,
        in_a_large_tensor,
        in_a_generator_of_its_own,
        in_memory_of_many_processes,
        in_a_chain,
        in_a_loop_of_a_generator,
        in_a_thread,
        in_a_context,
        in_a_dict_of_the_library,
        in_one_of_many,
        in_a_long_list,
        in_a_dict_that_is_replaced,
        in_a_pair_that_is_replaced,
        in_a_frozen_object_within_another,
        in_a_set_that_keeps_its_length,
        in_a_complex_tensor,
        in_a_large_array,
        in_an_array_of_many,
        in_a_default,
        in_the_class_of_a_class,
    ],
    ids=lambda count: count.__name__,
)
def test_a_count_is_seen_and_put_back_wherever_it_lies(count, parts):
    def loss(outputs, target):
        return late(functional.mse_loss(outputs, target), count())

    before, generator = count(), DRAWS.getstate()
    verdict = tried(parts, loss=loss)
    assert verdict.startswith("not shown: each pass changes")
    DRAWS.setstate(generator)
    assert count in NOT_PUT_BACK or count() in (before, before + 1)


class Sized(nn.Linear):
    """Gives a buffer its size in the first pass, and remembers that beside it."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.sized = False

    def forward(self, x):
        if not self.sized:
            self.sized = True
            self.register_buffer("table", torch.ones(2), persistent=False)
        return super().forward(x) * self.table


def test_a_sum_with_a_weight_is_named_as_one():
    said = tried(4, loss=lambda outputs, target: (outputs - target).square().sum())
    assert "as one batch: it is a sum, and a step takes the mean of its micro-batches" in said


def test_a_buffer_whose_size_is_remembered_elsewhere_is_named():
    with pytest.raises(
        RecipeError, match=r"'table' gets another shape in a pass.*attribute of its"
    ):
        tried(4, model=Sized())


class Preconditioned(torch.optim.Optimizer):
    """Keeps what goes into layers, as K-FAC does."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1})
        self.layers, self.seen = list(model), {}
        for layer in self.layers:
            layer.register_forward_pre_hook(self.look)

    def look(self, layer, inputs):
        self.seen[layer] = self.seen.get(layer, 0) + float(inputs[0].sum())


def test_an_optimizer_whose_methods_are_hooks_is_copied_with_the_model():
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = Preconditioned(model)
    copy = copied(model)
    (hook,) = copy[0]._forward_pre_hooks.values()
    other = hook.__self__
    assert other is not optimizer
    assert other.layers == [copy[0]]
    assert other.param_groups[0]["params"][0] is copy[0].weight
    copy(torch.ones(1, 3))
    assert (other.seen, optimizer.seen) == ({copy[0]: 3.0}, {})
    assert tried(4, model=model).startswith("not shown: each pass changes 'Preconditioned.seen'")
    optimizer.rates = (0.5**n for n in range(9))  # which cannot be copied
    (hook,) = copied(model)[0]._forward_pre_hooks.values()
    assert not hasattr(hook.__self__, "rates")


def test_a_private_number_on_a_model_of_torch_is_seen():
    model = nn.Sequential(nn.Linear(3, 2))
    model._calls = 0

    def compute_loss(model, batch):
        model._calls += 1
        return late(functional.mse_loss(model(batch[0]), batch[1]), model._calls)

    verdict = tried(4, model=model, loss=None, compute_loss=compute_loss)
    assert verdict.startswith("not shown: each pass changes '_calls'")


@PARTS
def test_what_an_estimator_of_a_library_learns_is_seen_and_put_back(parts):
    scaler = preprocessing.StandardScaler()

    def compute_loss(model, batch):
        outputs = model(batch[0])
        scaler.partial_fit(outputs.detach().numpy())
        return late(functional.mse_loss(outputs, batch[1]), scaler.n_samples_seen_)

    scaler.partial_fit(np.zeros((3, 2)))
    verdict = tried(parts, loss=None, compute_loss=compute_loss)
    assert verdict.startswith("not shown: each pass changes 'scaler'")
    assert scaler.n_samples_seen_ == 3
    assert not scaler.mean_.any()


@PARTS
def test_a_count_in_a_hook_of_all_modules_is_seen(parts):
    calls = [0]

    def hook(module, inputs, outputs):
        calls[0] += 1
        return late(outputs, calls[0]) if type(module) is nn.Linear else None

    handle = register_module_forward_hook(hook)
    try:
        assert tried(parts).startswith("not shown: each pass changes")
    finally:
        handle.remove()
    assert calls == [0]


class Counting(nn.Module):
    """A loss with a buffer, which is no buffer of the model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs, target):
        self.calls += 1
        return late(functional.mse_loss(outputs, target), float(self.calls))


CRITERION = Counting()


@PARTS
def test_a_buffer_of_a_loss_is_seen(parts):
    assert tried(parts, loss=Counting()).startswith("not shown: each pass changes 'calls'")


@PARTS
def test_a_buffer_of_a_module_that_a_loss_names_is_seen_and_put_back(parts):
    def compute_loss(model, batch):
        return CRITERION(model(batch[0]), batch[1])

    verdict = tried(parts, loss=None, compute_loss=compute_loss)
    assert verdict.startswith("not shown: each pass changes 'calls'")
    assert CRITERION.calls == 0


class Following(nn.Linear):
    """With a teacher that is in a list, so that it is not of the model."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.teacher = [nn.Linear(*sizes).requires_grad_(False)]

    def forward(self, x):
        with torch.no_grad():
            self.teacher[0].weight.lerp_(self.weight, 1e-4)
        return super().forward(x) + self.teacher[0](x)


@PARTS
def test_a_teacher_in_a_list_is_seen(parts):
    assert not tried(parts, model=Following(3, 2)).startswith("yes")


# ---- what comes of it for another batch


class Normalised(nn.Linear):
    """Is centred by its first batch (Kingma, Dhariwal 2018, section 3.1)."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.begun, self.centre = False, torch.zeros(sizes[1])

    def forward(self, x):
        found = super().forward(x)
        if not self.begun:
            self.begun, self.centre = True, found.detach().mean(0)
        return found - self.centre


class Maximum:
    def __init__(self, *, of_least=False):
        self.most, self.turn = 0.0, min if of_least else max

    def __call__(self, outputs, target):
        loss = functional.mse_loss(outputs, target)
        self.most = self.turn(self.most or float(loss.detach()), float(loss.detach()))
        return loss / self.most


class Least(Maximum):
    def __init__(self):
        super().__init__(of_least=True)


class Relative(Maximum):
    """To the first loss, by a sentinel that is a list (GradNorm, Chen et al. 2018)."""

    def __init__(self):
        self.first = []

    def __call__(self, outputs, target):
        loss = functional.mse_loss(outputs, target)
        if not self.first:
            self.first.append(float(loss.detach()))
        return loss / self.first[0]


class RelativeToZero(Relative):
    """By a sentinel that is a number."""

    def __init__(self):
        self.first = 0.0

    def __call__(self, outputs, target):
        loss = functional.mse_loss(outputs, target)
        self.first = self.first or float(loss.detach())
        return loss / self.first


class Classes:
    def __init__(self):
        self.seen = set()

    def __call__(self, outputs, target):
        self.seen |= {int(each) for each in (target[:, 0] * 4).round()}
        return functional.mse_loss(outputs, target) * len(self.seen)


@PARTS
@pytest.mark.parametrize("loss", [Maximum, Least, Relative, RelativeToZero, Classes])
def test_what_settles_on_one_batch_is_seen_by_another(loss, parts):
    verdict = tried(parts, loss=loss())
    assert verdict.startswith(("no: the model or its loss gives another result", "not shown: "))
    assert "keeps something" in verdict or "by its batch" in verdict or "each pass" in verdict


@PARTS
def test_what_a_flag_guards_is_seen_by_another_batch(parts):
    verdict = tried(parts, model=Normalised(3, 2))
    assert verdict.startswith("no: the model or its loss gives another result for a batch after")


class Scale(torch.autograd.Function):
    """Divides gradients by the size of the first."""

    first = 0.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Scale.first = Scale.first or float(gradient.abs().mean())
        return gradient / Scale.first


class Scaled(nn.Linear):
    def forward(self, x):
        return Scale.apply(super().forward(x))


def by_a_global(outputs, target):
    global FIRST_LOSS
    loss = functional.mse_loss(outputs, target)
    if "FIRST_LOSS" not in globals():
        FIRST_LOSS = float(loss.detach())
    return loss / FIRST_LOSS


@PARTS
def test_what_the_first_gradient_or_a_new_name_decides_is_seen_and_dropped(parts):
    said = tried(parts, model=Scaled(3, 2))
    assert said.startswith("no: the model or its loss gives another result for a batch after")
    assert Scale.first == 0.0
    assert tried(parts, loss=by_a_global).startswith("not shown: the first pass sets")
    assert "FIRST_LOSS" not in globals()


@PARTS
def test_a_cache_by_size_changes_nothing(parts):
    masks = {}

    def loss(outputs, target):
        mask = masks.setdefault(len(outputs), torch.ones(len(outputs), 1))
        return functional.mse_loss(outputs * mask, target)

    assert tried(parts, loss=loss) == "yes"


# ---- steps


class OfItsClass(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        OfItsClass.steps += 1
        for group in self.param_groups:
            group["lr"] = late(0.1, OfItsClass.steps)
        return super().step(closure)


PROGRESS = {"of": 0.0}


def with_a_hook(parameters):
    optimizer, calls = torch.optim.SGD(parameters, lr=0.1), [0]

    def hook(optimizer, args, given):
        calls[0] += 1

    optimizer.register_step_post_hook(hook)
    return optimizer


def telling(optimizer, steps):
    def rate(step):
        PROGRESS["of"] = step / steps
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def with_a_list(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step])


@PARTS
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"optimizer": OfItsClass}, "OfItsClass.steps"),
        ({"optimizer": with_a_hook}, ""),
        ({"scheduler": telling}, "PROGRESS"),
        ({"scheduler": with_a_list}, ""),
    ],
)
def test_what_steps_count_outside_state_dicts_is_said(given, named, parts):
    said = tried(parts, **given)
    assert said.startswith(f"not shown: {named}, which each step changes," if named else "yes")
    assert (OfItsClass.steps, PROGRESS) == (0, {"of": 0.0})


# ---- reading


class Labelled(Dataset):
    """Numbers its labels as they come."""

    def __init__(self, names="abcd"):
        self.known, self.names = {}, names

    def __len__(self):
        return 64

    def __getitem__(self, index):
        label = self.known.setdefault(self.names[index % len(self.names)], len(self.known))
        return torch.full((3,), index / 64), torch.full((2,), float(label))


class RareCount(Labelled):
    """Counts what it reads of one kind, or its epochs by the last sample."""

    def __init__(self, at):
        super().__init__()
        self.at, self.calls = at, 0

    def __getitem__(self, index):
        self.calls += index == self.at or (self.at < 0 and index % 4 == 1)
        return torch.full((3,), late(1.0, self.calls)), torch.zeros(2)


@pytest.mark.parametrize("at", [-1, 63])
def test_counts_of_some_samples_are_said(at):
    said = tried(4, train=RareCount(at))
    assert said.startswith("not shown: each reading of a sample changes 'RareCount.calls'")


class Cached(Labelled):
    """Keeps its samples."""

    def __getitem__(self, index):
        if index not in self.known:
            self.known[index] = torch.full((3,), index / 64), torch.zeros(2)
        return self.known[index]


@PARTS
def test_labels_that_are_numbered_as_they_come_are_said(parts):
    said = tried(parts, train=Labelled())
    assert said.startswith("not shown: each reading of a sample changes 'Labelled.known'")
    assert tried(parts, train=Cached()) == "yes"
    assert tried(parts, train=Labelled(["a"])) == "yes"


class CropsOnce(Labelled):
    """Keeps what it has drawn for a sample."""

    def __getitem__(self, index):
        if index not in self.known:
            self.known[index] = torch.rand(3)
        return self.known[index], torch.zeros(2)


class DrawsBeside(Cached):
    """Keeps a sample, and draws what it does with it."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(3), target


@PARTS
def test_a_cache_of_what_was_drawn_is_said(parts):
    said = tried(parts, train=CropsOnce())
    assert said.startswith("not shown: each reading of a sample changes 'CropsOnce.known'")
    assert tried(parts, train=DrawsBeside()) == "yes"


class Told(Labelled):
    """Makes something of the epochs that it is told."""

    def __init__(self, make):
        super().__init__()
        self.make, self.size, self.largest = make, 0.0, -1
        self.pairs = [f"{n / 64}" for n in range(64)]
        self.table, self.draws = np.arange(90_000.0), np.random.default_rng(1)

    def set_epoch(self, epoch):
        self.make(self, epoch)

    def __getitem__(self, index):
        inputs = torch.full((3,), float(self.pairs[index]) + self.table[-index] / 90_000)
        return inputs + self.size, torch.zeros(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda data, epoch: random.Random(epoch).shuffle(data.pairs),
        lambda data, epoch: setattr(data, "size", data.size + 0.1),
        lambda data, epoch: np.random.default_rng(epoch).shuffle(data.table),
        lambda data, epoch: setattr(data, "size", data.draws.random()),
        lambda data, epoch: setattr(data, "largest", max(epoch, data.largest)),
    ],
    ids=["list", "number", "array", "generator", "largest"],
)
def test_a_set_epoch_that_depends_on_earlier_calls_is_said(make):
    said = tried(4, train=Told(make), tells=True)
    assert said.startswith("not shown: what set_epoch(epoch) leaves behind depends on the calls")
    assert tried(4, train=Told(make)) == "yes"  # of what nobody calls


@pytest.mark.parametrize(
    "make",
    [
        lambda data, epoch: setattr(data, "size", 0.1 * epoch),
        lambda data, epoch: setattr(data, "draws", np.random.default_rng(epoch)),
        lambda data, epoch: setattr(data, "pairs", sorted(data.pairs, reverse=epoch % 2 == 1)),
    ],
    ids=["number", "generator", "list"],
)
def test_what_follows_from_the_epoch_alone_is_left_as_it_was(make):
    data = Told(make)
    assert tried(4, train=data, tells=True) == "yes"
    assert (data.size, data.pairs[0]) == (0.0, "0.0")


def drawing(data, epoch):
    random.shuffle(data.pairs)
    data.size = float(torch.rand(())) + np.random.rand()


def test_what_set_epoch_draws_follows_from_seed_and_epoch():
    found = []
    for epochs in ((0, 1, 2), (2,), (1, 2, 1, 2)):
        data = Told(lambda data, epoch: setattr(data, "size", np.random.rand() + random.random()))
        fetch = Fetch(data, seed=7, shuffle=False, tells=True)
        before = torch.get_rng_state()
        for epoch in epochs:
            (inputs, _), *_ = fetch(Slice(epoch, 0, 2))
        assert torch.equal(torch.get_rng_state(), before)
        found.append(inputs)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert tried(4, train=Told(drawing), tells=True).startswith("not shown: what set_epoch")


class Grows(Labelled):
    """Has another length in the second epoch, or in the third."""

    def __init__(self, when):
        super().__init__()
        self.when, self.size = when, 64

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        self.size = 72 if epoch == self.when else 64

    def __getitem__(self, index):
        return torch.full((3,), index / 64), torch.zeros(2)


def test_a_dataset_whose_length_changes_is_refused():
    said = r"set_epoch\(1\) changes the length of the dataset, from 64 to 72 samples"
    with pytest.raises(DataError, match=said):
        tried(4, train=Grows(1), tells=True)
    assert tried(4, train=Grows(2), tells=True) == "yes"  # it is said when it comes
    fetch = Fetch(Subset(Grows(2), range(64)), seed=7, shuffle=False, tells=True)
    fetch(Slice(2, 0, 1))
    fetch = Fetch(Grows(2), seed=7, shuffle=False, tells=True)
    fetch(Slice(1, 0, 1))
    with pytest.raises(DataError, match="from 64 to 72"):
        fetch(Slice(2, 0, 1))


def test_a_collate_that_wants_pairs_is_not_given_one_sample():
    def pairs(samples):
        assert len(samples) % 2 == 0, "Batch size should be even"
        return tuple(map(torch.stack, zip(*samples, strict=True)))

    loader = Loader(
        TensorDataset(torch.randn(64, 3), torch.randn(64, 2)),
        seed=7,
        shuffle=False,
        processes=0,
        collate=pairs,
    )
    loader.begin()
    assert tried(4, collate=pairs) == "yes"
    counted = tried(4, collate=pairs, train=RareCount(-1))
    assert counted.startswith("not shown: each reading of a sample changes 'RareCount.calls'")


@PARTS
@pytest.mark.parametrize("what", ["augment", "collate"])
def test_nested_counts_of_reading_are_said(what, parts):
    calls = {"of": [0]}

    def augment(sample, generator):
        calls["of"][0] += 1
        return sample

    def collate(samples):
        calls["of"][0] += 1
        return tuple(map(torch.stack, zip(*samples, strict=True)))

    said = tried(parts, **{what: locals()[what]})
    assert said.startswith("not shown: each reading of a sample changes")


class Samples(list):
    """A list to which there may be weak references."""


class Reloaded(Labelled):
    """Has other samples in each epoch."""

    def __init__(self):
        super().__init__()
        self.samples = Samples([0.0] * 64)

    def set_epoch(self, epoch):
        self.samples = Samples([float(epoch)] * 64)

    def __getitem__(self, index):
        return torch.full((3,), self.samples[index]), torch.zeros(2)


def test_what_a_dataset_lets_go_of_in_a_later_epoch_is_gone():
    data = Reloaded()
    fetch, first = Fetch(data, seed=7, shuffle=False, tells=True), weakref.ref(data.samples)
    for epoch in range(2):
        (inputs, _), *_ = fetch(Slice(epoch, 0, 1))
        assert float(inputs[0, 0]) == epoch
    gc.collect()
    assert first() is None


# ---- what is put back


def test_what_a_cache_has_from_a_trial_is_dropped():
    made = []

    @functools.cache
    def built(name):
        made.append(name)
        return Meter()

    with unchanged(lambda: built):
        built("a").count()
    assert built("a").count() == 1
    assert made == ["a"]


def test_a_list_of_the_users_is_filled_again_without_its_own_methods():
    class Loud(list):
        def append(self, item):
            raise AssertionError("this is for the user's own calls")

        clear = extend = append

    held = Loud([1, 2])
    counts = Counts([lambda: held])
    list.append(held, 3)
    assert counts.changed() == "held"
    counts.put_back()
    assert held == [1, 2]


def test_very_much_that_is_held_is_not_all_looked_at():
    held = [[[Meter() for _ in range(30)] for _ in range(30)] for _ in range(30)]
    with unchanged(lambda: held):
        held[0][0][0].count()
    assert held[0][0][0].calls in (0, 1)
