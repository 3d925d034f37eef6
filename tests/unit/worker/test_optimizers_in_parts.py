"""Optimizers that need the whole model are refused where each process, or server, has a part of it,
though they show it only at some sizes of gradients or weights, or after some steps."""

import statistics
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.engine.served.optimizer import ServedUpdate
from instep.errors import RecipeError
from instep.recipe.optimizers.made_up import STEPS, MadeUp, moving
from instep.sync.generation import Piece
from instep.worker.mesh_trial import optimizers
from instep.worker.mesh_trial.optimizers import OptimizerCheck


def model_of(dtype):
    torch.manual_seed(3)
    layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 2)]
    nn.init.zeros_(layers[3].weight)
    return nn.Sequential(*layers).to(dtype)


class Looking(torch.optim.Adam):
    """Adam that does something to all gradients before its step."""

    def __init__(self, parameters, **how):
        super().__init__(parameters, lr=0.01)
        self.how, self.norms = how, []

    @torch.no_grad()
    def step(self, closure=None):
        own = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norms.append(float(torch.stack([p.grad.double().norm() for p in own]).norm()))
        self.look(own, **self.how)
        super().step()


class Clipped(Looking):
    def look(self, own, bound, after=0, until=10**6):
        if after < len(self.norms) <= until:
            nn.utils.clip_grad_norm_(own, bound)


class AutoClipped(Looking):
    def look(self, own, warm_up):
        if len(self.norms) > warm_up:
            nn.utils.clip_grad_norm_(own, statistics.median(self.norms))


class Skips(Looking):
    def look(self, own, bound):
        if self.norms[-1] > bound:
            for parameter in own:
                parameter.grad.zero_()


class SkipsSpikes(Looking):
    def look(self, own, times):
        if len(self.norms) > 5 and self.norms[-1] > times * statistics.mean(self.norms[-6:-1]):
            for parameter in own:
                parameter.grad.zero_()


class Lifts(Looking):
    def look(self, own, bound):
        if self.norms[-1] < bound:
            for parameter in own:
                parameter.grad.mul_(bound / self.norms[-1])


class Centred(Looking):
    def look(self, own):
        mean = sum(float(p.grad.sum()) for p in own) / sum(p.numel() for p in own)
        for parameter in own:
            parameter.grad.sub_(mean)


class ClippedSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        own = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_(own, 5.0)
        super().step()


class Each(Looking):
    """Clips each gradient by its own norm."""

    def look(self, own, bound):
        self.steps = getattr(self, "steps", 0) + 1
        for parameter in own:
            nn.utils.clip_grad_norm_([parameter], bound)


class Layerwise(torch.optim.SGD):
    """Scales each move by the norm of its weights over that of its gradient, within bounds."""

    def __init__(self, parameters, low, high, by_gradient=True):
        super().__init__(parameters, lr=0.1)
        self.low, self.high, self.by_gradient = low, high, by_gradient

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in [p for g in self.param_groups for p in g["params"]]:
            norm = parameter.grad.norm() if self.by_gradient else 1.0
            trust = (parameter.norm() / norm).clamp(self.low, self.high)
            parameter.sub_(0.1 * trust * parameter.grad)


class ScheduleFree(torch.optim.SGD):
    """Keeps weights of its own, and gives those in between."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in [p for g in self.param_groups for p in g["params"]]:
            state = self.state[parameter]
            count = state["count"] = state.get("count", 0) + 1
            fast = state.setdefault("fast", parameter.clone())
            fast.sub_(parameter.grad, alpha=0.1)
            parameter.lerp_(fast, 1 / (count + 1))


WHOLE = {
    "clips at 5": lambda p: Clipped(p, bound=5.0),
    "clips at 0.01": lambda p: Clipped(p, bound=0.01),
    "clips at 100": lambda p: Clipped(p, bound=100.0),
    "clips at 10 000": lambda p: Clipped(p, bound=1e4),
    "clips after ten steps": lambda p: Clipped(p, bound=5.0, after=10),
    "clips in its first steps": lambda p: Clipped(p, bound=5.0, until=9),
    "clips by what it has seen": lambda p: AutoClipped(p, warm_up=10),
    "skips above 0.05": lambda p: Skips(p, bound=0.05),
    "skips above 1": lambda p: Skips(p, bound=1.0),
    "skips above 7": lambda p: Skips(p, bound=7.0),
    "skips above 400": lambda p: Skips(p, bound=400.0),
    "skips spikes": lambda p: SkipsSpikes(p, times=4.0),
    "lifts small ones": lambda p: Lifts(p, bound=0.01),
    "subtracts a mean": lambda p: Centred(p),
    "SGD that clips": lambda p: ClippedSGD(p, lr=0.1),
}
"""They look at all parameters."""

BY_PARAMETER = {
    "clips each": lambda p: Each(p, bound=1.0),
    "layer-wise": lambda p: Layerwise(p, 0.0, 10.0),
    "layer-wise, rarely": lambda p: Layerwise(p, 20.0, 1e9, by_gradient=False),
    "at most a bound": lambda p: Layerwise(p, 0.0, 0.002),
}
"""They look at each parameter by itself, and at all its elements."""

BY_ELEMENT = {
    **{
        kind.__name__: kind
        for kind in (
            *(torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam),
            *(torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
            *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
        )
    },
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1.0, amsgrad=True, foreach=True),
    "schedule-free": lambda p: ScheduleFree(p, lr=0.1),
}

FLOATS = (torch.float64, torch.float32, torch.bfloat16)


def in_parts(make, dtype=torch.float64, *, rows=False):
    """Compare an optimizer on two stages, or two parts of all rows; what the trial says."""
    whole, *owns = [model_of(dtype) for _ in range(3)]  # not in threads: they are drawn
    boxes = {}

    def body(comm):
        own = owns[comm.rank]
        check = OptimizerCheck(
            whole,
            lambda model: make(list(model.parameters())),
            7,
            first=comm.rank == 0,
            needed=True,
            small=True,
            stages=1 if rows else 2,
        )
        if not rows:
            own = nn.ModuleDict({str(2 * comm.rank + n): own[2 * comm.rank + n] for n in range(2)})
        for parameter in own.parameters() if rows else ():
            cut = -(-len(parameter) // 2)
            first, stop = (0, cut) if comm.rank == 0 else (cut, len(parameter))
            others = tuple((0, size) for size in parameter.shape[1:])
            boxes[id(parameter)] = ((first, stop), *others)
            parameter.data = parameter.data[first:stop].clone()
        replica = SimpleNamespace(
            comm=comm, device=torch.device("cpu"), slots=lambda own: own, gather=lambda own: [own]
        )
        before = [parameter.detach().clone() for parameter in own.parameters()]
        try:
            return check.run(replica, own)
        finally:
            assert all(map(torch.equal, before, own.parameters()))

    box_of = optimizers.box_of
    optimizers.box_of = lambda tensor: boxes.get(id(tensor)) or box_of(tensor)
    try:
        return run_ranks(2, body)[0]
    finally:
        optimizers.box_of = box_of


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_looks_at_all_parameters_is_refused_in_stages(name):
    with pytest.raises(RecipeError, match="would train another model with"):
        in_parts(WHOLE[name])


@pytest.mark.parametrize("name", [*WHOLE, *BY_PARAMETER])
def test_an_optimizer_that_looks_at_more_than_its_rows_is_refused_in_a_shard(name):
    with pytest.raises(RecipeError, match="would train another model with"):
        in_parts((WHOLE | BY_PARAMETER)[name], rows=True)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [*BY_PARAMETER, *BY_ELEMENT])
def test_an_optimizer_that_needs_no_other_parameter_is_taken_in_stages(name, dtype):
    assert in_parts((BY_PARAMETER | BY_ELEMENT)[name], dtype) == ""


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", BY_ELEMENT)
def test_an_optimizer_that_needs_no_other_element_is_taken_in_a_shard(name, dtype):
    assert in_parts(BY_ELEMENT[name], dtype, rows=True) == ""


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_optimizers_of_matrices_are_taken_in_stages(name):
    def make(parameters):
        large = [each for each in parameters if each.dim() > 1 or name == "Adafactor"]
        return getattr(torch.optim, name)(large, lr=0.1)

    with torch.no_grad():
        assert in_parts(make, torch.float32) == ""


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["clips at 5", "skips above 7", "SGD that clips"])
def test_they_are_refused_in_any_type(name, dtype):
    with pytest.raises(RecipeError, match="would train another model with"):
        in_parts(WHOLE[name], dtype)


def warming_up(parameters):
    optimizer = Clipped(parameters, bound=5.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    return optimizer


def test_a_rate_that_begins_with_zero_hides_nothing():
    with pytest.raises(RecipeError, match="would train another model with"):
        in_parts(warming_up)
    with pytest.raises(RecipeError, match="moves parameters otherwise"):
        served(warming_up)


class Breaks(torch.optim.SGD):
    """Makes NaN of large gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in [p for g in self.param_groups for p in g["params"]]:
            large = parameter.grad.abs().max() > 1e3
            parameter.sub_(parameter.grad * (float("nan") if large else 0.1))


def test_one_that_makes_nan_of_gradients_is_not_called_the_same():
    assert in_parts(lambda p: Breaks(p, lr=0.1)) == "Breaks makes NaN of made-up gradients"
    served(lambda p: Breaks(p, lr=0.1))


# ---- on servers


def served(make, dtype=torch.float64):
    parameters = list(model_of(dtype).parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = make(parameters)
    rates = [group["lr"] for group in optimizer.param_groups]
    update = ServedUpdate(optimizer, None, parameters, seed=0, max_grad_norm=None, scaler=scaler)
    pieces = {Piece(0, 0, parameters[0].numel()): nn.Parameter(parameters[0].detach().clone())}
    update.hold(pieces)
    assert all(map(torch.equal, before, parameters))
    assert rates == [group["lr"] for group in optimizer.param_groups]
    assert not getattr(optimizer, "norms", None)
    assert not hasattr(optimizer, "steps")


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_looks_at_all_parameters_is_refused_on_servers(name):
    with pytest.raises(RecipeError, match="moves parameters otherwise"):
        served(WHOLE[name])


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [*BY_PARAMETER, "schedule-free"])
def test_an_optimizer_that_needs_no_other_parameter_is_taken_on_servers(name, dtype):
    served((BY_PARAMETER | BY_ELEMENT)[name], dtype)


# ---- what is made up


def test_what_is_made_up_has_the_sizes_of_its_steps():
    shapes = {"a": torch.Size((300, 40)), "b": torch.Size((7,)), "c": torch.Size(())}
    made = MadeUp(shapes, 5)
    for number, step in enumerate(STEPS):
        every = [made.gradient(name, number) for name in shapes]
        assert [each.shape for each in every] == [*shapes.values()]
        norm = float(torch.cat([each.view(-1) for each in every]).norm())
        assert norm == pytest.approx(step.norm * max(1, step.spike), rel=0.1)
    assert torch.equal(made.gradient("a", 3), MadeUp(shapes, 5).gradient("a", 3))


def test_rows_of_a_large_parameter_differ():
    made = MadeUp({"a": torch.Size((2048, 1024))}, 5).gradient("a", 0)
    assert len(made.sum(1).unique()) > 2000


def test_groups_move_whatever_their_rate_is():
    groups = [{"lr": 0.0}, {"lr": 0.5, "initial_lr": 0.1}, {"lr": 1e-9, "initial_lr": 0.1}, {}]
    moving(groups)
    assert [group.get("lr") for group in groups] == [1e-3, 0.5, 0.1, None]
