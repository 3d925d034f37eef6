"""What the trial says of optimizers before the first step: what they lose and amplify."""

import collections
import re
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import instep
from instep.engine.state.attributes import kept_beside
from instep.engine.trial_result import Trial
from instep.errors import RecipeError
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.recipe.build import build_optimizer
from instep.recipe.forward import Forward
from instep.recipe.tuning import NOTHING
from instep.worker.trial.kept.kept import try_kept
from instep.worker.trial.kept.persistence import try_batch_loss, try_optimizer
from instep.worker.trial.kept.rounding import amplifying, try_rounding
from instep.worker.trial.kept.stand_in import Maker

YES = Trial(True, "a trial showed no difference", "yes")


def maker(optimizer, dtype=torch.float32, scheduler=None, model=None, **loss):
    model = model or nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 96)).to(dtype)
    loss = loss or {"loss": nn.MSELoss()}
    recipe = instep.Recipe(model=model, train=[0], optimizer=optimizer, scheduler=scheduler, **loss)
    return Maker(recipe, model, 7, 10)


class Own(torch.optim.SGD):
    """One of which nothing is known."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, lr=lr, momentum=momentum)


class InState(Own):
    def step(self, closure=None):
        number = self.state["k"] = self.state.get("k", 0) + 1
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / number)


class InGroups(Own):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.5
        super().step()


class InAttribute(Own):
    k = 0

    def step(self, closure=None):
        self.k += 1
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(1 - 0.1 / self.k)


class EverySixth(Own):
    """Lookahead, with its slow weights outside the state."""

    def step(self, closure=None):
        super().step()
        every = self.param_groups[0]["params"]
        self.slow = getattr(self, "slow", None) or [each.detach().clone() for each in every]
        self.number = getattr(self, "number", 0) + 1
        if self.number % 6 == 0:
            with torch.no_grad():
                for slow, parameter in zip(self.slow, every, strict=True):
                    parameter.copy_(slow.lerp_(parameter, 0.5))


def in_closure(parameters):
    optimizer, count = Own(parameters), [0]

    def decay(optimizer, *_):
        count[0] += 1
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(1 - 0.1 / count[0])

    optimizer.register_step_post_hook(decay)
    return optimizer


def average_aside(parameters):
    """A hook that keeps an average which moves nothing."""
    optimizer = Own(parameters)
    kept = [each.detach().clone() for each in optimizer.param_groups[0]["params"]]

    def average(optimizer, *_):
        for own, parameter in zip(kept, optimizer.param_groups[0]["params"], strict=True):
            own.lerp_(parameter.detach(), 0.1)

    optimizer.register_step_post_hook(average)
    return optimizer


class NormsOfTheWarmUp:
    """ZClip: it collects norms, and clips by them after its warm-up."""

    def __init__(self):
        self.norms = []

    def __call__(self, optimizer, args, given):
        gradients = [each.grad for each in optimizer.param_groups[0]["params"]]
        if len(self.norms) < 25:
            self.norms.append(max(float(each.norm()) for each in gradients))
        else:
            torch.nn.utils.clip_grads_with_norm_(gradients, max(self.norms), torch.tensor(1e9))


def clipped_late(parameters):
    optimizer = Own(parameters)
    optimizer.register_step_pre_hook(NormsOfTheWarmUp())
    return optimizer


KEPT = {"sgd": Own, "state": InState, "groups": InGroups, "aside": average_aside}
LOST = {"attribute": InAttribute, "every sixth": EverySixth, "closure": in_closure}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_state_dict_has_is_kept(name):
    assert try_optimizer(maker(KEPT[name]), YES, served=False) == YES


def test_what_a_hook_before_steps_collects_is_said():
    verdict = try_optimizer(maker(clipped_late), YES, served=False).verdict
    assert verdict.startswith("not shown: NormsOfTheWarmUp.norms, which each step changes,")


@pytest.mark.parametrize("reads", [True, False])
def test_an_average_that_a_hook_keeps_is_said_where_the_loss_reads_it(reads):
    model = nn.Linear(3, 2)
    teacher = torch.optim.swa_utils.AveragedModel(model)

    def make(parameters):
        optimizer = Own(parameters)
        optimizer.register_step_post_hook(lambda *_: teacher.update_parameters(model))
        return optimizer

    def taught(student, batch):
        return functional.mse_loss(student(batch[0]), teacher(batch[0]))

    def plain(student, batch):
        return functional.mse_loss(student(batch[0]), batch[1])

    made = maker(make, model=model, compute_loss=taught if reads else plain)
    verdict = try_optimizer(made, YES, served=False).verdict
    assert verdict.startswith("not shown: n_averaged, which each step" if reads else "yes")
    assert int(teacher.n_averaged) == 0


ROUNDS = [0]


def test_a_count_of_a_hook_is_no_other_of_that_name_that_the_loss_reads():
    def make(parameters):
        ROUNDS = [0]
        optimizer = Own(parameters)
        optimizer.register_step_post_hook(lambda *_: ROUNDS.append(ROUNDS.pop() + 1))
        return optimizer

    def loss(model, batch):
        return functional.mse_loss(model(batch[0]), batch[1]) * (1 + ROUNDS[0])

    assert try_optimizer(maker(make, compute_loss=loss), YES, served=False) == YES


@pytest.mark.parametrize("name", LOST)
def test_what_no_checkpoint_has_is_named(name):
    verdict = try_optimizer(maker(LOST[name]), YES, served=False).verdict
    assert verdict.startswith("no: the optimizer ")
    assert "no checkpoint has it" in verdict
    assert name != "attribute" or "(InAttribute.k)" in verdict


class Seldom(Own):
    """Halves every twentieth step; its other attributes decide nothing."""

    def __init__(self, params):
        super().__init__(params)
        self.made_at, self.number, self.last = time.perf_counter(), 0, 0.0

    def step(self, closure=None):
        super().step()
        self.number, self.last = self.number + 1, self.param_groups[0]["lr"]
        if self.number % 20 == 0:
            self.param_groups[0]["lr"] *= 0.5


class Restoring(Seldom):
    def state_dict(self):
        return {**super().state_dict(), "number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]
        super().load_state_dict({k: v for k, v in state.items() if k != "number"})


def test_an_attribute_that_acts_after_the_trial_is_not_shown():
    said = try_optimizer(maker(Seldom), YES, served=False).verdict
    assert said.startswith("not shown: Seldom.number is not in state_dict() and has another value")
    restored = try_optimizer(maker(Restoring), YES, served=False)
    assert restored.verdict == "yes"
    assert set(restored.passing) == {"Restoring.made_at", "Restoring.last"}


def falling(count=None):
    def rate(step):
        if count is None:
            return 0.9**step
        count[0] += 1
        return 0.9 ** count[0]

    return rate


def replaced(optimizer):
    def step(closure=None, count=[0], then=optimizer.step):  # noqa: B006
        count[0] += 1
        optimizer.param_groups[0]["lr"] = 0.1 / count[0]
        return then(closure)

    optimizer.step = step
    return optimizer


SCHEDULED = {
    "torch's": (lambda o: lr_scheduler.StepLR(o, 2), True, "yes"),
    "in a sequence": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], [3]
        ),
        True,
        "yes",
    ),
    "a function": (lambda o: lr_scheduler.LambdaLR(o, falling()), False, "yes"),
    "a count": (lambda o: lr_scheduler.LambdaLR(o, falling([0])), False, "no: the optimizer SGD"),
    "a count in a chain": (
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LambdaLR(o, falling([0]))]),
        False,
        "no: the optimizer SGD",
    ),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedulers_of_torch_are_tried_where_they_call_functions_of_the_user(name):
    scheduler, is_known, verdict = SCHEDULED[name]
    tried = maker(lambda p: torch.optim.SGD(p, lr=0.1), scheduler=scheduler)
    assert tried.make().kept == is_known
    assert try_optimizer(tried, YES, served=False).verdict.startswith(verdict)


def test_a_step_that_the_user_has_replaced_is_tried():
    tried = maker(lambda p: replaced(torch.optim.SGD(p, lr=0.1)))
    assert not tried.make().kept
    assert try_optimizer(tried, YES, served=False).verdict.startswith("no: the optimizer SGD")


def test_a_hook_of_an_optimizer_may_use_the_model():
    model = nn.Sequential(nn.Linear(24, 96))
    averaged = torch.optim.swa_utils.AveragedModel(model)

    def optimizer(parameters):
        made = torch.optim.AdamW(parameters)
        made.register_step_post_hook(lambda *_: averaged.update_parameters(model))
        return made

    assert try_optimizer(maker(optimizer, model=model), YES, served=False) == YES
    assert int(averaged.n_averaged) == 0


def test_a_scheduler_that_loses_its_count_is_named():
    class Halving(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer):
            self.rates = iter([0.5**n for n in range(99)])
            super().__init__(optimizer)

        def get_lr(self):
            return [next(self.rates) for _ in self.optimizer.param_groups]

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    lost = maker(lambda p: torch.optim.SGD(p, lr=0.1), scheduler=Halving)
    assert "its scheduler keeps something" in try_optimizer(lost, YES, served=False).verdict


class Sharpness(Own):
    def step(self, closure=None):
        assert closure is not None, "SAM requires a closure"


class Curved(Own):
    def step(self, closure=None):
        raise RuntimeError("set create_graph to True: no gradient has a grad_fn")


class Both(torch.optim.Optimizer):
    """Hands all on to two others, and is no `Optimizer` itself but by name."""

    def __init__(self, parameters):
        every = list(parameters)
        self.both = [torch.optim.SGD(every[:1], lr=0.1), torch.optim.Adam(every[1:], lr=0.1)]

    @property
    def param_groups(self):
        return [group for each in self.both for group in each.param_groups]

    @property
    def state(self):
        return {p: of for each in self.both for p, of in each.state.items()}

    def zero_grad(self, set_to_none=True):
        for each in self.both:
            each.zero_grad(set_to_none)

    def step(self, closure=None):
        for each in self.both:
            each.step()

    def state_dict(self):
        return {str(number): each.state_dict() for number, each in enumerate(self.both)}

    def load_state_dict(self, state):
        for number, each in enumerate(self.both):
            each.load_state_dict(state[str(number)])


def test_an_optimizer_without_what_torchs_own_begins_with_is_tried_and_kept():
    assert try_optimizer(maker(Both), YES, served=False) == YES
    model = nn.Linear(3, 2)
    kept = kept_beside(Both(model.parameters()), None, model)
    assert "a hook before steps" not in kept


class Looking(Own):
    def state_dict(self):
        return {**super().state_dict(), "slow": collections.deque([torch.zeros(2)])}


class Listing(Own):
    def step(self, closure=None):
        self.state["last"] = torch.zeros(3)
        super().step()


@pytest.mark.parametrize(
    ("made", "served", "message"),
    [
        (Sharpness, False, "Sharpness.step.. wants a closure"),
        (Curved, False, "Curved.step.. wants gradients that have a graph"),
        (Looking, False, "Looking keeps what no checkpoint can have.*deque"),
        (Listing, True, "Listing keeps 'last' for no parameter"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_first_step(made, served, message):
    with pytest.raises(RecipeError, match=message):
        try_optimizer(maker(made), YES, served=served)


def test_the_trial_leaves_model_and_closures_as_they_are():
    model, calls = nn.Linear(64, 64), []
    before = [each.detach().clone() for each in model.parameters()]

    def make(_):
        optimizer = Own(model.parameters())  # not what it is given: the model itself
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return optimizer

    assert try_optimizer(maker(make, model=model), YES, served=False) == YES
    assert not calls
    assert all(map(torch.equal, before, model.parameters()))
    assert all(each.grad is None for each in model.parameters())


class Signs(Own):
    """Lion."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
            parameter.sub_(average.lerp(parameter.grad, 0.1).sign(), alpha=0.01)
            average.lerp_(parameter.grad, 0.01)


def own_class(kind, **options):
    return lambda p: type(f"Own{kind.__name__}", (kind,), {})(p, **options)


class Rotating(Own):
    """Moves in the basis of the gradient's singular vectors, as SOAP does."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                basis = torch.linalg.eigh(parameter.grad @ parameter.grad.T).eigenvectors
                turned = basis.T @ parameter.grad
                parameter.sub_(basis @ (turned / (turned.abs() + 1e-30)), alpha=0.01)


class RotatingLate(Rotating):
    """Begins with its sixth step, as Shampoo may."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["steps"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["steps"] += 1
        if self.param_groups[0]["steps"] > 5:
            super().step()
        else:
            Own.step(self)


STEADY = {
    "sgd": own_class(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": own_class(torch.optim.AdamW, lr=1e-3),
    "adafactor": own_class(torch.optim.Adafactor, lr=1e-3),
    "rmsprop": own_class(torch.optim.RMSprop, lr=1e-3),
    "lion": Signs,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STEADY)
def test_an_optimizer_that_hands_rounding_on_is_not_named(name, dtype):
    assert amplifying(maker(STEADY[name], dtype)) == ([], 0.0)


def muon(parameters):
    every = list(parameters)
    return [
        torch.optim.Muon([p for p in every if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for p in every if p.ndim != 2], lr=0.01),
    ]


@pytest.mark.parametrize(
    ("made", "dtype", "named"),
    [
        (muon, torch.float32, ["Muon"]),
        (muon, torch.float64, []),  # casts both gradients to the same bfloat16
        (Rotating, torch.float32, ["Rotating"]),
        (Rotating, torch.float64, ["Rotating"]),
        (RotatingLate, torch.float32, ["RotatingLate"]),
    ],
)
def test_an_optimizer_that_amplifies_rounding_is_named(made, dtype, named):
    assert amplifying(maker(made, dtype))[0] == named


class Refusing(Rotating):
    def step(self, closure=None):
        if any(torch.linalg.matrix_rank(p.grad) < 5 for p in self.parameters() if p.dim() == 2):
            raise RuntimeError("singular")
        super().step()

    def parameters(self):
        return self.param_groups[0]["params"]


class Failing(Own):
    def step(self, closure=None):
        raise RuntimeError("an extension is missing")


class Rooting(Own):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad.sqrt(), alpha=0.01)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (Refusing, "no: the optimizer Refusing amplifies"),
        (Failing, "not shown: the optimizer raises RuntimeError: an extension is missing"),
        (Rooting, "not shown: Rooting gives NaN with made-up gradients"),
    ],
)
def test_what_cannot_be_tried_for_rounding_is_not_shown(made, verdict):
    assert try_rounding(maker(made), YES).verdict.startswith(verdict)


def test_an_optimizer_that_moves_to_nan_is_not_shown_to_be_kept():
    said = try_optimizer(maker(Rooting), YES, served=False).verdict
    assert said.startswith("not shown: Rooting gives NaN with made-up gradients")


class Remembering:
    def __init__(self, after, held=None):
        self.memory, self.after, self.held, self.last = [], after, held, None

    def __call__(self, model, embeddings, targets):
        self.memory.append(embeddings)
        self.last = embeddings
        used = self.memory if len(self.memory) > self.after else [embeddings]
        return sum(each.square().mean() for each in used) / len(used)


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [
        (Remembering(10), "not shown: batch_loss keeps something from call to call"),
        (Remembering(0), "no: batch_loss gives another result"),
        (Remembering(0, threading.Lock()), "not shown: whether batch_loss keeps .* be tried"),
    ],
)
def test_a_loss_that_uses_its_memory_later_or_cannot_be_copied_is_not_shown(loss, verdict):
    said = try_batch_loss(loss, nn.Linear(1, 1), (torch.ones(4, 2), None), 0, YES).verdict
    assert re.match(verdict, said)
    assert not loss.memory


EARLIER, CALLS = [], 0


def counting_globally(model, embeddings, targets):
    global CALLS
    CALLS += 1
    EARLIER.append(embeddings)
    return embeddings.mean()


def remembering_globally(model, embeddings, targets):
    EARLIER.append(embeddings)
    return sum(each.square().mean() for each in EARLIER)


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [(counting_globally, "not shown: batch_loss keeps"), (remembering_globally, "no: batch_loss")],
)
def test_a_memory_in_a_global_is_named_and_left_as_it_is(loss, verdict):
    said = try_batch_loss(loss, nn.Linear(1, 1), (torch.ones(4, 2), None), 0, YES).verdict
    assert said.startswith(verdict)
    assert (EARLIER, CALLS) == ([], 0)


def test_a_loss_may_keep_what_it_was_last_given():
    class Last:
        def __call__(self, model, embeddings, targets):
            self.given = embeddings
            return embeddings.mean()

    assert try_batch_loss(Last(), nn.Linear(1, 1), (torch.ones(4, 2), None), 0, YES) == YES


def test_a_loss_that_remembers_earlier_batches_is_named_and_left_as_it_is():
    memory = []

    def remembering(_, embeddings, targets):
        memory.append(embeddings)
        return sum(each.square().mean() for each in memory) / len(memory)

    embedded = torch.ones(4, 2), None
    verdict = try_batch_loss(remembering, nn.Linear(1, 1), embedded, 0, YES).verdict
    assert verdict.startswith("no: batch_loss gives another result")
    assert not memory
    plain = try_batch_loss(lambda m, e, t: e.mean(), nn.Linear(1, 1), embedded, 0, YES)
    assert plain == YES


@pytest.mark.parametrize(
    ("made", "determinism", "verdict"),
    [
        (Rotating, "order", "no: the optimizer Rotating amplifies"),
        (Rotating, "bits", "yes"),
        (Seldom, "bits", "not shown: Seldom.number"),
        (None, "order", "yes"),
    ],
)
def test_what_is_tried_of_an_optimizer_depends_on_determinism(made, determinism, verdict):
    model = nn.Linear(24, 96)
    make = made or (lambda p: torch.optim.SGD(p, lr=0.1))
    recipe = instep.Recipe(model=model, train=[0], loss=nn.MSELoss(), optimizer=make)
    job = JobSpec(recipe="a.py:recipe", train=TrainSpec(determinism=determinism))
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    built = build_optimizer(recipe, model, 10)
    said = try_kept(forward, job, 10, YES, NOTHING, built).verdict
    assert said.startswith(verdict)
