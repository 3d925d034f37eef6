"""What callbacks and validations change that training reads is said in the verdict."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, Subset, TensorDataset

from instep.data.loader import Loader
from instep.engine.trial_result import Trial
from instep.errors import SpecError
from instep.recipe.forward import Forward
from instep.recipe.optimizers.plateau import Plateau
from instep.recipe.recipe import Recipe
from instep.recipe.rehearsal import try_validation
from instep.worker.training.callback_writes import CallbackWrites

SCALE, SEEN, CRITERION = 1.0, [], nn.CrossEntropyLoss()


class Curriculum(TensorDataset):
    visible = 8

    def __getitem__(self, index):
        if self.table is None:
            self.table = torch.ones(3)
        return super().__getitem__(index)


DATA = Curriculum(torch.zeros(4, 3), torch.zeros(4))


class Weighted(nn.Linear):
    alpha = None

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("running", torch.zeros(2))
        self.activation = functional.gelu

    def forward(self, x):
        if not self.training:
            self.alpha = (self.alpha or 0.0) + 0.5
        return super().forward(x) * (self.alpha or 1.0)


SETTINGS, WEIGHTS, LOG = {"margin": 1.0, "mode": "mean"}, [1.0, 0.5], [1.0]


def loss(outputs, target):
    assert LOG
    assert SETTINGS["margin"]
    return functional.mse_loss(outputs, target, reduction=SETTINGS["mode"]) * SCALE * WEIGHTS[0]


def in_settings(model):
    SETTINGS["margin"] /= 2


def a_mode_in_settings(model):
    SETTINGS["mode"] = "sum" if SETTINGS["mode"] == "mean" else "mean"


def a_new_setting(model):
    SETTINGS[f"more {len(SETTINGS)}"] = 1.0


def an_item(model):
    WEIGHTS[1] += 0.5


def a_longer_log(model):
    LOG.append(2.0)


def in_globals(model):
    global SCALE
    SCALE = SCALE / 2


def on_the_model(model):
    model.alpha = 0.5


def class_weights(model):
    CRITERION.weight = torch.ones(2)


def the_same_tensor(model):
    CRITERION.table[0] += 1


def while_a_table_is_loaded(model):
    DATA[0]


def the_dataset(model):
    DATA.visible = 16


def a_mode(model):
    CRITERION.reduction = "sum"


def an_activation(model):
    model.activation = functional.relu


def the_same_mode(model):
    CRITERION.reduction, model.activation = "".join(["me", "an"]), functional.gelu


def nothing(model):
    SEEN.append(SCALE)
    DATA.tensors[0][0].sum()


def its_statistics(model):
    model.running.add_(1)  # which are put back, and refused elsewhere


def watching(model, *, strict=False, updates=(), data=DATA):
    events = list[dict[str, object]]()
    job = SimpleNamespace(check=SimpleNamespace(strict=strict))
    member = SimpleNamespace(job=job, emit=lambda kind, **given: events.append(given))
    state = SimpleNamespace(
        trial=Trial(True, "", "yes"), progress=SimpleNamespace(step=7), events=events
    )
    return CallbackWrites(member, state, model, (loss, CRITERION), (data,), updates), state


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (in_globals, "SCALE"),
        (on_the_model, "alpha"),
        (class_weights, "weight"),
        (the_same_tensor, "table"),
        (while_a_table_is_loaded, ""),
        (in_settings, "SETTINGS"),
        (a_mode_in_settings, "SETTINGS"),
        (a_new_setting, "SETTINGS"),
        (an_item, "WEIGHTS"),
        (a_longer_log, ""),
        (the_dataset, "visible"),
        (a_mode, "reduction"),
        (an_activation, "activation"),
        (the_same_mode, ""),
        (nothing, ""),
        (its_statistics, ""),
    ],
)
def test_what_a_callback_changes_that_training_reads_is_said_once(call, named):
    CRITERION.weight, CRITERION.table, DATA.table = None, torch.zeros(3), None
    CRITERION.reduction = "mean"
    model = Weighted(3, 2)
    writes, state = watching(model)
    for _ in range(2):
        with writes.during("Mine.on_step_end"):
            call(model)
    if not named:
        assert (state.events, state.trial.verdict) == ([], "yes")
        return
    (event,) = state.events
    assert event["step"] == 7
    assert event["verdict"] == state.trial.verdict
    begins = f"not shown: Mine.on_step_end has changed {named!r}"
    assert state.trial.verdict.startswith(begins)


class Clipping(torch.optim.SGD):
    """Has numbers of its own."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.limit, self.window = 5.0, np.zeros(4)


def plateau(optimizer):
    return Plateau(lr_scheduler.ReduceLROnPlateau(optimizer), "Recipe.scheduler")


def chain(optimizer):
    first, second = (lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) for _ in range(2))
    return lr_scheduler.SequentialLR(optimizer, [first, second], [5])


HELD, FACTOR = {"factor": 1.0}, 1.0


def by_a_function(optimizer):
    held = HELD
    return lr_scheduler.LambdaLR(optimizer, lambda step: held["factor"] * FACTOR)


class Halving(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [each * FACTOR for each in self.base_lrs]


def in_globals_of_a_scheduler(optimizer, scheduler):
    global FACTOR
    FACTOR = FACTOR / 2


def in_group(name, value):
    return lambda o, s: o.param_groups[0].update({name: value})


def state_of(optimizer):
    return next(iter(optimizer.state.values()))


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "call", "named"),
    [
        ("AdamW", None, in_group("lr", 0.5), "'lr' of AdamW"),
        ("AdamW", None, in_group("betas", (0.9, 0.99)), "'betas' of AdamW"),
        ("AdamW", None, in_group("weight_decay", 0.0), "'weight_decay' of AdamW"),
        ("AdamW", None, lambda o, s: state_of(o)["exp_avg"].zero_(), "'exp_avg' of AdamW"),
        ("AdamW", None, lambda o, s: o.state.clear(), "'step' of AdamW"),
        ("SGD", None, lambda o, s: o.param_groups[0]["params"].pop(), "'params' of SGD"),
        ("Clipping", None, lambda o, s: setattr(o, "limit", 1.0), "'limit' of Clipping"),
        ("Clipping", None, lambda o, s: o.window.fill(1), "'window' of Clipping"),
        (
            "SGD",
            chain,
            lambda o, s: s._schedulers[1].base_lrs.clear(),
            "'base_lrs' of SequentialLR",
        ),
        ("SGD", chain, lambda o, s: setattr(s, "last_epoch", 9), "'last_epoch' of SequentialLR"),
        (
            "SGD",
            plateau,
            lambda o, s: setattr(s._scheduler, "patience", 1),
            "'patience' of Plateau",
        ),
        ("SGD", by_a_function, lambda o, s: HELD.update(factor=0.5), "'held' of LambdaLR"),
        ("SGD", by_a_function, in_globals_of_a_scheduler, "'FACTOR' of LambdaLR"),
        ("SGD", Halving, in_globals_of_a_scheduler, "'FACTOR' of Halving"),
        ("AdamW", chain, lambda o, s: (o.state_dict(), s.state_dict(), s.get_last_lr()), ""),
        ("Clipping", plateau, lambda o, s: SEEN.append(o.param_groups[0]["lr"] + o.limit), ""),
    ],
)
def test_what_a_callback_changes_of_an_optimizer_or_its_scheduler_is_said(
    optimizer, scheduler, call, named
):
    model = nn.Linear(3, 2)
    kind = Clipping if optimizer == "Clipping" else getattr(torch.optim, optimizer)
    made = kind(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    made.step()
    update = SimpleNamespace(optimizer=made, scheduler=scheduler and scheduler(made))
    writes, state = watching(model, updates=[update])
    with writes.during("Mine.on_evaluate"):
        call(made, update.scheduler)
    if not named:
        assert (state.events, state.trial.verdict) == ([], "yes")
        return
    begins = f"not shown: Mine.on_evaluate has changed {named}, which training reads: callbacks are"
    assert state.trial.verdict.startswith(begins)
    assert "a scheduler of the recipe, such as ReduceLROnPlateau" in state.trial.verdict
    assert len(state.events) == 1


class Labelled(Dataset):
    """Has labels in many forms, and keeps the shard that was read last."""

    def __init__(self):
        self.y, self.array, self.large = torch.zeros(9), np.zeros(9), np.zeros(1 << 20)
        self.targets, self.items = [0] * 5000, [("a.png", 1), ("b.png", 2)]
        self.named, self.parts = {"x": torch.zeros(3)}, (torch.zeros(2), torch.zeros(2))
        self.pseudo = self.shard = None
        self.transform, self.mode = torch.cos, "easy"
        self.half, self.shared = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3)
        self.shared.share_memory_()
        self.seen = {}

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        self.shard = np.full(3, index)
        self.seen[index] = 1
        return self.array[index] + self.targets[index]


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, [1, 2])])
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda data: data.y.__setitem__(2, 1.0), "Labelled.y"),
        (lambda data: data.y.numpy().__setitem__(2, 1.0), "Labelled.y"),
        (lambda data: data.shared.fill_(1.0), "Labelled.shared"),
        (lambda data: data.half.fill_(1.0), "Labelled.half"),
        (lambda data: data.array.__setitem__(2, 1.0), "Labelled.array"),
        (lambda data: data.large.fill(1.0), "Labelled.large"),
        (lambda data: setattr(data, "array", np.ones(9)), "Labelled.array"),
        (lambda data: setattr(data, "pseudo", torch.ones(9)), "Labelled.pseudo"),
        (lambda data: setattr(data, "extra", torch.ones(9)), "extra"),
        (lambda data: setattr(data, "transform", torch.sin), "Labelled.transform"),
        (lambda data: setattr(data, "mode", "hard"), "Labelled.mode"),
        (lambda data: setattr(data, "augment", torch.abs), "augment"),
        (lambda data: data.targets.__setitem__(slice(0, 90), [1] * 90), "Labelled.targets"),
        (lambda data: data.items.reverse(), "Labelled.items"),
        (lambda data: data.named["x"].fill_(1.0), "Labelled.named['x']"),
        (lambda data: data.parts[1].fill_(1.0), "Labelled.parts[1]"),
        (lambda data: [data[i] for i in range(9)], ""),
        (lambda data: (data.y.sum(), data.large.mean(), data.y.clone().add_(1)), ""),
    ],
)
def test_what_a_callback_writes_into_a_dataset_is_said(call, named, wrap):
    data = Labelled()
    writes, state = watching(nn.Linear(3, 2), data=wrap(data))
    data[3]
    with writes.during("Mine.on_step_end"):
        call(data)
    if named:
        assert (
            f"has changed {named!r}" in state.trial.verdict or f'"{named}"' in state.trial.verdict
        )
    else:
        assert (state.events, state.trial.verdict) == ([], "yes")


def test_tensors_of_torchs_own_dataset_and_of_collate_are_looked_at():
    table, x = np.zeros(4), torch.zeros(4)
    for data, call, named in [
        (TensorDataset(x), lambda: x.fill_(1.0), "TensorDataset.tensors[0]"),
        (lambda samples: table[samples], lambda: table.fill(1.0), "table"),
    ]:
        writes, state = watching(nn.Linear(3, 2), data=data)
        with writes.during("Mine.on_step_end"):
            call()
        assert f"has changed {named!r}" in state.trial.verdict


def test_memory_that_other_processes_may_write_to_is_left_to_torchs_counts(tmp_path):
    data = Labelled()
    data.array = np.memmap(tmp_path / "cache", dtype=np.float64, mode="w+", shape=9)
    writes, state = watching(nn.Linear(3, 2), data=data)
    with writes.during("Mine.on_step_end"):
        data.array[0] = data.shared.numpy()[0] = 1.0  # as a loader process would
    assert state.trial.verdict == "yes"


def test_strict_runs_end_there():
    model = Weighted(3, 2)
    writes, _ = watching(model, strict=True)
    with pytest.raises(SpecError, match="has changed 'alpha'"), writes.during("Mine.on_save"):
        on_the_model(model)


@pytest.mark.parametrize("kind", [Weighted, nn.Linear])
def test_what_a_validation_changes_is_found_and_put_back(kind):
    model = kind(3, 2)
    if kind is Weighted:
        model.alpha = 1.0
    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 2))
    recipe = Recipe(model=model, train=data, validate=data, optimizer=lambda p: None, loss=loss)
    loader = Loader(data, seed=7, shuffle=False, processes=0, name="validation")
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    rehearsed = try_validation(forward, loader, 4)
    assert rehearsed.found is not None
    assert rehearsed.changed == ("alpha" if kind is Weighted else "")
    assert getattr(model, "alpha", 1.0) == 1.0
