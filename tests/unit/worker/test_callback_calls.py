"""Which call of a callback a worker is said to be at."""

from types import MappingProxyType, SimpleNamespace

import torch
from torch import nn

from instep.data.batches import Batches
from instep.data.order import Position
from instep.worker.loop.callbacks import Callbacks


class Watches:
    """Has two moments, and may raise in the second."""

    def __init__(self, *, raises):
        self.raises = raises

    def on_step_end(self, context):
        pass

    def on_evaluate(self, context, metrics):
        if self.raises:
            raise ValueError("of the user")


def after_one_step(
    folder, callback, notes=9, metrics=MappingProxyType({"accuracy": 1.0}), gather=lambda: None
):
    """The calls of a worker whose disk is full after so many notes; and what was raised."""
    left = iter(range(notes))

    def while_held(write):
        if next(left, None) is None:
            raise OSError("no room")
        write()
        return True

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = SimpleNamespace(
        model=model,
        comm=SimpleNamespace(rank=0),
        state=SimpleNamespace(progress=SimpleNamespace(course=0, step=1)),
        turns=[SimpleNamespace(update=SimpleNamespace(optimizer=optimizer))],
        records=SimpleNamespace(ledger=SimpleNamespace(while_held=while_held)),
    )
    job = SimpleNamespace(mesh=SimpleNamespace(ranks=1))
    member = SimpleNamespace(
        run=folder, job=job, lease=SimpleNamespace(check=lambda: None), emit=lambda *_, **__: 0
    )
    calls = Callbacks(member, engine, [callback], Batches(1, 1))
    calls.gather = gather
    calls.form(anew=False)
    done = SimpleNamespace(step=1, loss=0.5, norm=None, ends=False)
    try:
        calls.after_step(done, Position(0, 0, 1), metrics, {})
    except (OSError, ValueError) as error:
        return calls, error
    return calls, None


def test_a_call_that_has_returned_is_not_said_to_be_made(tmp_path):
    calls, error = after_one_step(tmp_path, Watches(raises=False))
    assert (calls.present, error) == ("", None)


def test_a_call_that_has_raised_is_named_until_the_worker_goes_on(tmp_path):
    calls, error = after_one_step(tmp_path, Watches(raises=True))
    assert isinstance(error, ValueError)
    assert calls.present == "Watches.on_evaluate"
    calls.form(anew=False)
    assert calls.present == ""


def test_what_fails_between_two_calls_is_not_said_to_be_the_first(tmp_path):
    calls, error = after_one_step(tmp_path, Watches(raises=False), notes=1)
    assert isinstance(error, OSError)
    assert calls.present == ""


class Evaluates:
    """Wants validations alone."""

    def on_evaluate(self, context, metrics):
        pass


def test_a_model_is_gathered_for_calls_and_for_nothing_else(tmp_path):
    for callback, metrics, calls in (
        (Watches(raises=False), None, 1),
        (Watches(raises=False), {"accuracy": 1.0}, 2),
        (Evaluates(), None, 0),
        (Evaluates(), {"accuracy": 1.0}, 1),
    ):
        gathered = []
        folder = tmp_path / f"{type(callback).__name__}-{metrics is not None}"
        folder.mkdir()
        after_one_step(folder, callback, metrics=metrics, gather=lambda: gathered.append(1))  # noqa: B023
        assert len(gathered) == calls
