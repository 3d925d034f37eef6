"""Time that layers spend waiting for other workers is waiting, and no part of a pass."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from instep.data.loader import Slice
from instep.data.order import Position
from instep.engine.clock import Clock
from instep.engine.passes import Pass
from instep.parallel.global_batch.reads import Reads
from instep.worker.passes.whole_batch import WholeBatch
from instep.worker.passes.works import LoadedPass

COMPUTES, WAITS = {"forward": 2.0, "backward": 3.0}, {"forward": 50.0, "backward": 7.0}


@pytest.fixture
def timed(monkeypatch):
    """Passes of a worker that computes and waits by a clock of their own."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    reads, part = Reads(["norm"], width=1), ""

    def let_pass(seconds):
        now[0] += seconds

    def all_reduce(_):
        return SimpleNamespace(wait=lambda: let_pass(WAITS.get(part, 0.0)))

    reads.join(SimpleNamespace(size=1, rank=0, all_reduce=all_reduce))

    def compute(which):
        nonlocal part
        part = which
        let_pass(COMPUTES[which])
        reads.ask(0, torch.zeros(1, dtype=torch.float64), backward=which == "backward")
        part = ""

    def loss(*_, **__):
        compute("forward")
        found = torch.ones((), requires_grad=True) * 2
        found.register_hook(lambda _: compute("backward"))
        return SimpleNamespace(loss=found, factor=1.0, weight=1.0, counts=True)

    nothing = lambda *_, **__: None  # noqa: E731
    engine = SimpleNamespace(
        clock=Clock(begin=1.0),
        passes=SimpleNamespace(begin=nothing, end=nothing, aside=nullcontext),
        turn=SimpleNamespace(
            update=SimpleNamespace(scaler=SimpleNamespace(scale=lambda each: each))
        ),
    )
    passes = WholeBatch.__new__(WholeBatch)
    passes._engine, passes._reads = engine, reads
    passes._forward = SimpleNamespace(loss=loss, kept=lambda batch, size: size)
    return passes


def test_what_a_pass_waits_in_its_layers_is_counted_as_waiting(timed):
    work = LoadedPass(Pass(Slice(0, 0, 4), 0), None, 4, [0], [4], True)
    timed._normed(Position(0, 0, 4), [work, work])
    clock = timed._engine.clock
    assert (clock.forward, clock.backward, clock.wait) == (4.0, 6.0, 114.0)
    assert clock.computing == 10.0  # by which work is dealt


def test_no_part_of_a_step_is_recorded_as_negative():
    clock = Clock(begin=5.0, forward=-3.0, wait=2.0)
    assert clock.parts == (5.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0)
