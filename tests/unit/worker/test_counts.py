"""What models, losses and optimizers keep in Python is seen and put back, wherever it is."""

import functools
import gc
import itertools
import sys
import types
from collections import deque
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset

from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.parallel.global_batch import cached
from instep.recipe.build import build_optimizer
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.recipe.tuning import NOTHING
from instep.usercode.counts import Counts, unchanged
from instep.worker.trial.kept.kept import try_kept
from instep.worker.trial.reads import try_recipe

LATE = 1000


def test_a_count_in_embed_is_seen_where_instep_lies_among_libraries_too(monkeypatch):
    place = "/home/me/venv/lib/site-packages/instep/parallel/global_batch/cached.py"
    monkeypatch.setattr(cached, "__file__", place)
    calls = 0

    def embed(model, batch):
        nonlocal calls
        calls += 1
        return model(batch), None

    found = Counts([cached.probe(embed)])
    embed(nn.Linear(1, 1), torch.ones(2, 1))
    assert found.changed() == "calls"
    found.put_back()
    assert calls == 0


class InClass(nn.Linear):
    calls = 0

    def forward(self, x):
        InClass.calls += 1
        return super().forward(x) * (1 if InClass.calls < LATE else 2)


class Private(nn.Linear):
    _calls = 0

    def forward(self, x):
        self._calls += 1
        return super().forward(x) * (1 if self._calls < LATE else 2)


class Memory(nn.Linear):
    """Used once it is full."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.kept = deque(maxlen=LATE)

    def forward(self, x):
        found = super().forward(x)
        self.kept.append(found.detach().mean(0))
        return found if len(self.kept) < LATE else found + self.kept[0]


class Teacher(nn.Linear):
    """Begins as the model's equal and follows it, outside its parameters and buffers."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.followed = [self.weight.detach().clone()]

    def forward(self, x):
        self.followed[0].lerp_(self.weight.detach(), 0.5)
        return super().forward(x) + x @ self.followed[0].T


class OfTheLast(nn.Linear):
    """Keeps something of the last batch, and a mask for each size: nothing comes of it."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.rows, self._masks, self._rows = [], {}, 0

    def forward(self, x):
        self.rows, self._rows = [float(each) for each in x[:, 0]], len(x)
        mask = self._masks.setdefault(len(x), torch.ones(len(x), 1))
        return super().forward(x) * mask.to(x)


class Object:
    def __init__(self):
        self.calls = 0

    def __call__(self, outputs, target):
        self.calls += 1
        return functional.mse_loss(outputs, target) * (1 if self.calls < LATE else 2)


def by_default(outputs, target, calls=[]):  # noqa: B006
    calls.append(1)
    return functional.mse_loss(outputs, target) * (1 if len(calls) < LATE else 2)


def of_function(outputs, target):
    of_function.calls = getattr(of_function, "calls", 0) + 1
    return functional.mse_loss(outputs, target) * (1 if of_function.calls < LATE else 2)


def given(state, outputs, target):
    state["calls"] += 1
    return functional.mse_loss(outputs, target) * (1 if state["calls"] < LATE else 2)


STATE = {"calls": 0}


def count():
    STATE["calls"] += 1


def in_globals(outputs, target):
    count()
    return functional.mse_loss(outputs, target) * (1 if STATE["calls"] < LATE else 2)


IN_PARTIAL = partial(given, {"calls": 0})


class Hooked(nn.Linear):
    """Counts in a hook, and in a property that a helper has."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        calls = itertools.count()
        self.register_forward_hook(lambda *it: it[2] * (1 if next(calls) < LATE else 2))


class Proper(nn.Linear):
    @property
    def scale(self):
        count()
        return 1 if STATE["calls"] < LATE else 2

    def forward(self, x):
        return super().forward(x) * self.scale


def tried(parts, loaders=0, **given):
    torch.manual_seed(0)
    recipe = Recipe(
        **{
            "model": nn.Linear(3, 2),
            "train": TensorDataset(torch.randn(64, 3), torch.randn(64, 2)),
            "loss": nn.MSELoss(),
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
            "weight": lambda batch: len(batch[0]),
        }
        | given
    )
    loader = Loader(recipe.train, seed=7, shuffle=False, processes=loaders, augment=recipe.augment)
    forward = Forward(recipe, recipe.model, torch.device("cpu"), "float32")
    train = TrainSpec(global_batch=16, micro_batches=parts)
    job = JobSpec(recipe="a.py:recipe", train=train, workers=1)
    with closing(loader):
        trial = try_recipe(forward, loader, job, Batches.of_job(job, 64))
    return try_kept(forward, job, 10, trial, NOTHING, build_optimizer(recipe, recipe.model, 10))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kind", [InClass, Private, Memory, Hooked, Proper, OfTheLast])
def test_what_a_model_keeps_in_python_is_seen_before_anything_comes_of_it(kind, parts):
    verdict = tried(parts, model=kind(3, 2)).verdict
    named = {InClass: "'InClass.calls'", Private: "'_calls'", Memory: "'kept'"}
    named |= {Hooked: "'calls'", Proper: "'STATE'"}
    assert verdict.startswith(
        f"not shown: each pass changes {named[kind]}" if kind in named else "yes"
    )
    assert (InClass.calls, STATE) == (0, {"calls": 0})


def test_a_teacher_that_begins_as_the_models_equal_is_seen_in_one_micro_batch():
    said = tried(1, model=Teacher(3, 2)).verdict
    assert said.startswith("no: the model or its loss gives another result")


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("loss", [Object(), by_default, of_function, in_globals, IN_PARTIAL])
def test_what_a_loss_keeps_in_python_is_seen_and_put_back(loss, parts):
    assert tried(parts, loss=loss).verdict.startswith("not shown: each pass changes")
    assert getattr(loss, "calls", 0) == 0  # also where there was none
    assert (by_default.__defaults__, STATE) == (([],), {"calls": 0})
    assert IN_PARTIAL.args == ({"calls": 0},)


MOMENTA = {}


class Kept(torch.optim.Optimizer):
    """Its momenta are in a global variable, and its steps are counted in its class."""

    steps = 0

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        Kept.steps += 1
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            momentum = MOMENTA.setdefault(number, torch.zeros_like(parameter))
            parameter.add_(momentum.add_(parameter.grad), alpha=-0.1 / Kept.steps)


def test_the_trial_of_an_optimizer_leaves_its_class_and_its_globals_as_they_were():
    verdict = tried(1, optimizer=lambda p: Kept(p)).verdict
    assert verdict.startswith("no: the optimizer Kept or its scheduler keeps something outside")
    assert Kept.steps == 0
    assert not MOMENTA


def test_what_is_held_has_the_same_objects_again():
    kept, first = deque([torch.zeros(1)], maxlen=2), {"a": object()}

    def holds():
        kept.append(torch.ones(1))
        first["b"] = kept

    before = list(kept), dict(first)
    with unchanged(holds):
        holds()
        holds()
        assert len(first) == 2
    assert len(kept) == 1
    assert kept[0] is before[0][0]
    assert first == before[1]


class Centred(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("centre", torch.zeros(2))


def centred(model, embeddings, targets):
    loss = functional.mse_loss(embeddings - model.centre, targets)
    model.centre.lerp_(embeddings.detach().mean(0), 0.5)
    return loss


def test_what_a_loss_over_the_global_batch_keeps_in_buffers_of_the_model_is_in_checkpoints():
    given = {"embed": lambda model, batch: (model(batch[0]), batch[1]), "batch_loss": centred}
    assert tried(4, model=Centred(), loss=None, weight=None, **given).verdict == "yes"


class ForAPerson(nn.Linear):
    """Its hook adds to a list that nobody reads."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        shapes = []
        self.register_forward_hook(lambda *it: shapes.append(it[2].shape))


class InAnAttribute(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.shapes_of_all = deque()

    def forward(self, x):
        self.shapes_of_all.append(x.shape)
        return super().forward(x)


class ReadBesides(nn.Linear):
    """Has the same list under another name."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.of_all = self.all = deque()

    def forward(self, x):
        self.all.append(x.shape)
        return super().forward(x) * (1 if len(self.of_all) < LATE else 2)


class WithinAnother(nn.Linear):
    """Has the same list within another."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.every = deque()
        self.logs = [self.every]

    def forward(self, x):
        self.every.append(x.shape)
        return super().forward(x) * (1 if len(self.logs[0]) < LATE else 2)


class ReadByItsHook(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        passes = []
        self.register_forward_pre_hook(lambda *it: passes.append(it[1]))
        self.register_forward_hook(lambda *it: it[2] * (1 if len(passes) < LATE else 2))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kind", [ForAPerson, InAnAttribute])
def test_a_list_that_is_only_added_to_changes_nothing(kind, parts):
    assert tried(parts, model=kind(3, 2)).verdict == "yes"


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kind", [ReadBesides, WithinAnother, ReadByItsHook])
def test_a_list_that_is_read_under_any_name_is_said(kind, parts):
    assert tried(parts, model=kind(3, 2)).verdict.startswith("not shown: each pass changes")


class Scaled(nn.Linear):
    """Divides by what the first batch gave."""

    first = None

    def forward(self, x):
        found = super().forward(x)
        if self.first is None:
            self.first = float(found.detach().std())
        return found / self.first


class Appearing(nn.Linear):
    """The same, in an attribute that only the first pass makes."""

    def forward(self, x):
        found = super().forward(x)
        if not hasattr(self, "first"):
            self.first = found.detach().std()
        return found / self.first


class InArray(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = np.zeros(1)

    def forward(self, x):
        self.calls[0] += 1
        return super().forward(x) * (1 if self.calls[0] < LATE else 2)


class InTensor(InArray):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = torch.zeros(1)


TURNING = itertools.cycle([1] * LATE + [2])


class Turning(nn.Linear):
    def forward(self, x):
        return super().forward(x) * next(TURNING)


class Generated(nn.Linear):
    def forward(self, x):
        return super().forward(x) * next(GENERATED)


def generated():
    for call in itertools.count():
        yield 1 if call < LATE else 2


GENERATED = generated()


class Lazily(nn.Linear):
    """Sets a constant in its first pass, and keeps something of the last one."""

    scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale, self.ones = len(self.weight) ** -0.5, torch.ones(2)
        self.last = x.detach().mean()
        return super().forward(x) * self.scale * self.ones


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Scaled, "the first pass sets 'first'"),
        (Appearing, "the first pass sets 'first'"),
        (InArray, "each pass changes 'calls'"),
        (InTensor, "each pass changes 'calls'"),
        (Turning, "each pass changes 'TURNING'"),
        (Generated, "each pass changes 'GENERATED'"),
    ],
)
def test_what_is_kept_of_the_first_batch_and_in_arrays_is_seen(kind, how, parts):
    model = kind(3, 2)
    assert tried(parts, model=model).verdict.startswith(f"not shown: {how}")
    assert getattr(model, "calls", 0) == 0
    assert getattr(model, "first", None) is None


@pytest.mark.parametrize("parts", [1, 4])
def test_a_constant_that_the_first_pass_makes_changes_nothing(parts):
    assert tried(parts, model=Lazily(3, 2)).verdict == "yes"


class CountsReads(Dataset):
    """Changes what it gives after many reads."""

    def __init__(self, samples):
        self.samples, self.reads, self.last = samples, 0, None

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads, self.last = self.reads + 1, index
        inputs, target = self.samples[index]
        return inputs * (1 if self.reads < LATE else 2), target


class KeepsTheLast(CountsReads):
    def __getitem__(self, index):
        self.last = index
        return self.samples[index]


def augmented(sample, generator):
    count()
    return sample


DATA = TensorDataset(torch.randn(64, 3), torch.randn(64, 2))


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_dataset_that_counts_its_reads_is_said(loaders):
    for given, named in (
        ({"train": CountsReads(DATA)}, "'CountsReads.reads'"),
        ({"train": Subset(CountsReads(DATA), range(64))}, "'CountsReads.reads'"),
        ({"train": KeepsTheLast(DATA), "augment": augmented}, "'STATE'"),
    ):
        verdict = tried(4, loaders=loaders, **given).verdict
        assert verdict.startswith(f"not shown: each reading of a sample changes {named}")
        STATE["calls"] = 0
    assert tried(4, loaders=loaders, train=KeepsTheLast(DATA)).verdict == "yes"


class Built(nn.Linear):
    """Builds a table when a flag says that there is none yet."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.built = False

    def forward(self, x):
        if not self.built:
            self.table = torch.ones(2, dtype=x.dtype)
            self.built = True
        return super().forward(x) * self.table


class Flags:
    __slots__ = ("built",)

    def __init__(self):
        self.built = False


class BuiltElsewhere(nn.Linear):
    """Its flag lies where nobody looks."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.flags, self.table = Flags(), None

    def forward(self, x):
        if not self.flags.built:
            self.table, self.flags.built = torch.ones(2, dtype=x.dtype), True
        return super().forward(x) * self.table


MEAN, BUILT = torch.zeros(2), False


def of_the_first(outputs, target):
    global MEAN, BUILT
    if not BUILT:
        MEAN, BUILT = torch.ones(2), True
    return functional.mse_loss(outputs * MEAN.to(outputs), target)


class BuiltInALoss:
    """No copy is made of it where a step has several micro-batches."""

    __slots__ = ("built", "calls", "table")

    def __init__(self):
        self.built, self.table, self.calls = False, None, 0

    def __call__(self, outputs, target):
        if not self.built:
            self.table, self.built = torch.ones(2), True
        return functional.mse_loss(outputs * self.table.to(outputs), target)


class CountsInSlots(BuiltInALoss):
    __slots__ = ()

    def __call__(self, outputs, target):
        self.calls += 1
        return functional.mse_loss(outputs, target) * (1 if self.calls < LATE else 2)


@pytest.mark.parametrize("parts", [1, 4])
def test_slots_are_looked_at_and_put_back(parts):
    built, counting = BuiltInALoss(), CountsInSlots()
    assert tried(parts, loss=built).verdict == "yes"
    assert (built.built, built.table) == (False, None)
    assert tried(parts, loss=counting).verdict.startswith("not shown: each pass changes")
    assert counting.calls == 0


class Expanded(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.one = torch.ones(1)
        self.two = self.one.expand(4)

    def forward(self, x):
        return super().forward(x) * self.two[0]


class GrowingTable(nn.Linear):
    """Has a table for the largest batch so far."""

    table = None

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.ones(len(x), 1, dtype=x.dtype)
        return super().forward(x) * self.table[: len(x)]


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kind", [Built, BuiltElsewhere, Expanded, GrowingTable])
def test_what_is_built_once_is_whole_after_the_trial(kind, parts):
    model = kind(3, 2)
    before = dict(vars(model))
    assert tried(parts, model=model).verdict == "yes"
    assert vars(model).keys() == before.keys()
    assert torch.equal(model(torch.ones(16, 3)), kind.forward(model, torch.ones(16, 3)))


@pytest.mark.parametrize("parts", [1, 4])
def test_a_flag_and_what_it_guards_are_put_back_together(parts):
    assert tried(parts, loss=of_the_first).verdict == "yes"
    assert (BUILT, MEAN.tolist()) == (False, [0.0, 0.0])


class Within:
    def __init__(self):
        self.calls = 0


class InAnObject(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.state = Within()

    def forward(self, x):
        self.state.calls += 1
        return super().forward(x) * (1 if self.state.calls < LATE else 2)


class InALambda(nn.Linear):
    def forward(self, x):
        return (lambda y: y * (1 if count() or STATE["calls"] < LATE else 2))(super().forward(x))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kind", [InAnObject, InALambda])
def test_what_objects_and_inner_functions_count_is_seen(kind, parts):
    model = kind(3, 2)
    assert tried(parts, model=model).verdict.startswith("not shown: each pass changes")
    assert STATE == {"calls": 0}
    assert getattr(getattr(model, "state", None), "calls", 0) == 0


class Doubling(torch.autograd.Function):
    """Doubles gradients after many passes."""

    calls = 0

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        Doubling.calls += 1
        return gradient * (1 if Doubling.calls < LATE else 2)


class Backward(nn.Linear):
    def forward(self, x):
        return Doubling.apply(super().forward(x))


class BackwardHook(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_full_backward_hook(lambda *it: count())


class TensorHook(nn.Linear):
    calls = 0

    def forward(self, x):
        found = super().forward(x)
        found.register_hook(self.later)
        return found

    def later(self, gradient):
        self.calls += 1
        return gradient * (1 if self.calls < LATE else 2)


class InATuple(nn.Linear):
    state = 0, "calls"

    def forward(self, x):
        self.state = self.state[0] + 1, "calls"
        return super().forward(x) * (1 if self.state[0] < LATE else 2)


class Mixed(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.state = {"name": "warm-up", "calls": 0, "last": None}

    def forward(self, x):
        self.state["calls"] += 1
        self.state["last"] = x.detach()
        return super().forward(x) * (1 if self.state["calls"] < LATE else 2)


class OfMany(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = [0] * 100

    def forward(self, x):
        self.seen[len(x)] += 1
        return super().forward(x) * (1 if self.seen[len(x)] < LATE else 2)


class Elsewhere(nn.Linear):
    def forward(self, x):
        counters.calls += 1
        return super().forward(x) * (1 if counters.calls < LATE else 2)


class ImportedInside(nn.Linear):
    def forward(self, x):
        import counters_of_a_test as own

        own.calls += 1
        return super().forward(x) * (1 if own.calls < LATE else 2)


@functools.wraps(functional.mse_loss)
def wrapped(*given):
    count()
    return functional.mse_loss(*given) * (1 if STATE["calls"] < LATE else 2)


def counted_weight(batch):
    count()
    return len(batch[0])


counters = types.ModuleType("counters_of_a_test")
counters.__file__ = str(Path(__file__).with_name("counters_of_a_test.py"))


@pytest.fixture
def counting(monkeypatch):
    counters.calls = 0
    monkeypatch.setitem(sys.modules, counters.__name__, counters)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(
    "given",
    [
        *({"model": each} for each in (Backward, BackwardHook, TensorHook)),
        *({"model": each} for each in (InATuple, Mixed, OfMany, Elsewhere, ImportedInside)),
        {"loss": wrapped},
        {"weight": counted_weight},
    ],
    ids=lambda given: next(each.__name__ for each in given.values()),
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.usefixtures("counting")
def test_counts_of_backward_passes_of_modules_and_beside_other_things_are_seen(given, parts):
    if "model" in given:
        given = {"model": given["model"](3, 2)}
    before = {**vars(given["model"])} if "model" in given else {}
    assert tried(parts, **given).verdict.startswith("not shown: each pass changes")
    assert (Doubling.calls, STATE, counters.calls) == (0, {"calls": 0}, 0)
    if before:
        assert vars(given["model"]).keys() == before.keys()


class InTurns(nn.Linear):
    """Keeps names and tensors, now of one kind and then of another: nothing comes of it."""

    names, last = ("a",), None

    def forward(self, x):
        found = super().forward(x)
        self.names = ("a", "b") if len(self.names) == 1 else ("a",)
        self.last = [found.detach()] if self.last is None or type(self.last) is tuple else (found,)
        return found


NET = nn.Linear(3, 2)


def of_a_global(model, batch):
    """Do not use the model that is given."""
    return functional.mse_loss(NET(batch[0]), batch[1])


@pytest.mark.parametrize("parts", [1, 4])
def test_names_and_tensors_that_change_are_no_counts(parts):
    assert tried(parts, model=InTurns(3, 2)).verdict == "yes"


@pytest.mark.parametrize("parts", [1, 4])
def test_a_model_that_a_loss_has_of_its_own_keeps_no_gradient_of_the_trial(parts):
    said = tried(parts, model=NET, loss=None, compute_loss=of_a_global).verdict
    assert said.startswith("not shown: compute_loss uses a model that it was not given")
    assert all(parameter.grad is None for parameter in NET.parameters())


HISTORY = []


def remembered(outputs, target):
    loss = functional.mse_loss(outputs, target)
    HISTORY.append(loss.item())
    return loss


@pytest.mark.parametrize("parts", [1, 4])
def test_a_global_list_that_is_only_added_to_changes_nothing(parts):
    gc.unfreeze()  # else it does not show what refers to the list, as after a fork
    assert tried(parts, loss=remembered).verdict == "yes"
    gc.freeze()


class Drawn(KeepsTheLast):
    """Keeps what it has drawn for the last sample, and a log that nobody reads."""

    def __getitem__(self, index):
        self.angle = float(torch.rand(()))
        self.log_of_reads = [index]
        inputs, target = self.samples[index]
        return inputs * self.angle, target


@pytest.mark.parametrize("parts", [1, 4])
def test_what_was_drawn_for_the_last_sample_may_be_kept(parts):
    assert tried(parts, train=Drawn(DATA)).verdict == "yes"
