"""What callbacks and validations change that training reads is said in the verdict."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from instep.data.loader import Loader
from instep.engine.trial_result import Trial
from instep.errors import SpecError
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.recipe.rehearsal import try_validation
from instep.worker.training.callback_writes import CallbackWrites

SCALE, SEEN, CRITERION = 1.0, [], nn.CrossEntropyLoss()


class Curriculum(TensorDataset):
    visible = 8


DATA = Curriculum(torch.zeros(4, 3), torch.zeros(4))


class Weighted(nn.Linear):
    alpha = None

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("running", torch.zeros(2))

    def forward(self, x):
        if not self.training:
            self.alpha = (self.alpha or 0.0) + 0.5
        return super().forward(x) * (self.alpha or 1.0)


def loss(outputs, target):
    return functional.mse_loss(outputs, target) * SCALE


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
    DATA.table = torch.ones(3)


def the_dataset(model):
    DATA.visible = 16


def nothing(model):
    SEEN.append(SCALE)
    DATA.tensors[0][0].sum()


def its_statistics(model):
    model.running.add_(1)  # which are put back, and refused elsewhere


def watching(model, *, strict=False):
    events = list[dict[str, object]]()
    job = SimpleNamespace(check=SimpleNamespace(strict=strict))
    member = SimpleNamespace(job=job, emit=lambda kind, **given: events.append(given))
    state = SimpleNamespace(
        trial=Trial(True, "", "yes"), progress=SimpleNamespace(step=7), events=events
    )
    return CallbackWrites(member, state, model, (loss, CRITERION), (DATA,)), state


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (in_globals, "SCALE"),
        (on_the_model, "alpha"),
        (class_weights, "weight"),
        (the_same_tensor, "table"),
        (while_a_table_is_loaded, ""),
        (the_dataset, "visible"),
        (nothing, ""),
        (its_statistics, ""),
    ],
)
def test_what_a_callback_changes_that_training_reads_is_said_once(call, named):
    CRITERION.weight, CRITERION.table, DATA.table = None, torch.zeros(3), None
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
