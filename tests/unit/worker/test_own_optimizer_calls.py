"""What calls of a scaler come to where a step is taken once more, as a worker was lost in it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from instep.data.loader import Slice
from instep.engine.passes import Pass, Share
from instep.errors import PeerError
from instep.worker.own.iteration import Iteration, OwnStep
from instep.worker.own.optimizer_calls import OptimizerCalls

SCALE = 4.0


class Loop:
    """A user's loop over one parameter at 1, whose optimizer moves by its gradient."""

    def __init__(self):
        self.parameter = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
        self.scaler.scale(torch.zeros(1))  # which makes its state
        self.step, nothing = OwnStep(), lambda *_: None
        progress = SimpleNamespace(step=0)
        self.calls = OptimizerCalls(
            self.optimizer,
            None,
            self.scaler,
            engine=SimpleNamespace(
                step=1,
                state=SimpleNamespace(two_points=None, progress=progress),
                hand_out=nothing,
                commit=lambda move: [move(1), "done"][1],
            ),
            update=SimpleNamespace(clip=nothing, clips=False),
            step=self.step,
            backward=None,
            guard=SimpleNamespace(
                check_written=nothing, check_zeros=nothing, check_trained=nothing
            ),
            shared=SimpleNamespace(follow=nothing),
            seed=0,
            per_epoch=1,
            advances=False,
            agree=lambda: self.step.agree(lambda: "agreed"),
        )

    def begin(self, gradient):
        """Come to where the workers have agreed on a gradient."""
        self.step.begin(Share([], 0, 0))
        now = self.step.enter(Iteration(Pass(Slice(0, 0, 1), 0), 1, last=True))
        now.begun = now.computed = True
        self.parameter.grad = torch.tensor([gradient * SCALE])
        self.calls.exchange()

    def end(self):
        """Move, as far as the step still counts; where the parameter is."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step.now = None
        return self.parameter.item()


@pytest.fixture
def loop():
    made = Loop()
    yield made
    made.calls.give_back()


def test_the_gradients_of_each_step_are_unscaled(loop):
    for moved in (0.75, 0.5):
        loop.begin(0.25)
        loop.scaler.unscale_(loop.optimizer)
        assert loop.parameter.grad.item() == 0.25
        assert loop.end() == moved


@pytest.mark.parametrize("lost", [0.25, float("inf")])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("by_hand", [True, False])
def test_gradients_that_were_unscaled_and_came_to_nothing_are_forgotten(loop, lost, times, by_hand):
    for _ in range(times):
        loop.begin(lost)
        loop.scaler.unscale_(loop.optimizer)
        loop.step.breaks(PeerError("another worker is gone."))
        assert loop.end() == 1.0
    loop.begin(0.5)
    if by_hand:
        loop.scaler.unscale_(loop.optimizer)
        assert loop.parameter.grad.item() == 0.5
    assert loop.end() == 0.5
    assert loop.scaler.get_scale() == SCALE
