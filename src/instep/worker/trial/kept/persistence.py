"""Tests before the first step whether a checkpoint has all that optimizers and losses keep.

An optimizer may count its steps in an attribute, or a loss remember embeddings of earlier batches.
What continues from a checkpoint then begins without that: a run that is resumed, a worker that
is replaced or joins. So two steps are taken, saved, and loaded into what the recipe makes anew;
further steps must move both alike. A loss over the global batch is called again on the same
embeddings, after others. All of it happens on small copies (`stand_in.py`).
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from instep.engine.beside import beside, with_each
from instep.engine.served.written import kept_as
from instep.engine.state.attributes import kept_beside, lost
from instep.engine.state.kept_buffers import KeptBuffers
from instep.engine.trial_result import Trial
from instep.engine.update import options_of
from instep.errors import CheckpointError, RecipeError, one_line
from instep.parallel.nested import on_tensors
from instep.recipe.build import set_generators
from instep.recipe.isolated import isolated
from instep.state.packing import pack_state, unpack_state
from instep.usercode.counts import Counts
from instep.usercode.digests import digest_of
from instep.worker.trial.kept.nearly import equal
from instep.worker.trial.kept.stand_in import Maker, StandIn
from instep.worker.trial.named_globals import globals_of, unchanged_globals

STEPS = 2
"""Steps before saving."""

_SPIKE = 30.0
"""How much larger the first gradient after loading is: what decides by the gradients of earlier
steps is to decide something."""

_WHO = "a resumed run, and a worker that takes another's place or joins, would begin without it"


def try_optimizer(maker: Maker, trial: Trial, *, served: bool) -> Trial:
    """The trial's result, or what no checkpoint has of what the optimizer keeps.

    Args:
        maker: of stand-ins.
        trial: so far.
        served: whether servers have the optimizer.

    Raises:
        RecipeError: the optimizer cannot take a step as instep takes it, keeps what can be put
            into no checkpoint, or on no server, or has frozen parameters need gradients later.
    """
    name = "the optimizer"
    try:
        first, anew = maker.make(), maker.make()
        unlike = _differing(first, anew)  # the time, say
        name = " and ".join(dict.fromkeys(type(each).__name__ for each in first.optimizers))
        for number in range(STEPS):
            counts = Counts((first.model, *first.called), but=first.stateful)
            hooks = [*first.called_after]
            after = Counts((first.model, *hooks), but=first.stateful) if hooks else None
            _take(number, maker, first)
        counted = counts.changed()
        if after is not None and not counted:
            counted = after.changed(among=maker.shared_with_losses())
    except Exception as error:  # of the user's functions
        if maker.copy_models():  # a hook of theirs may use the model
            return try_optimizer(maker, trial, served=served)
        return _could_not_step(name, error, trial)
    saved, loaded = _saved(first, name, served=served), False
    try:
        _load(anew, first, saved)
        loaded = True
        named = [each for each in _differing(first, anew) if each not in unlike]
        still = _take_further(maker, first, anew, named)
    except Exception as error:  # of the user's functions
        if maker.copy_models():
            return try_optimizer(maker, trial, served=served)
        if loaded:
            return _could_not_step(name, error, trial)
        what = f"cannot load its own state_dict() ({type(error).__name__}: {one_line(error)})"
        return trial._replace(verdict=f"no: the optimizer {name} {what}: {_WHO}")
    _refuse_unfrozen(first, name)
    if still is None:
        return _lost(trial, name, named)
    if counted:
        return _may_be_lost(trial, f"{counted}, which each step changes,", "")
    if still:
        return _may_be_lost(trial, still[0])
    if any(bool(own.isnan().any()) for own in first.parameters.values()):
        why = "gives NaN with made-up gradients, so whether a checkpoint has all that it keeps"
        return _if_same(trial, f"{name} {why} cannot be tried")
    return trial._replace(passing=(*unlike, *named))


def _take(number: int, maker: Maker, *stand_ins: StandIn, times: float = 1.0) -> None:
    given = [(name, gradient * times) for name, gradient in maker.gradients(number)]
    for each in stand_ins:
        each.step([(name, gradient.clone()) for name, gradient in given], number, maker.seed)


def _take_further(
    maker: Maker, first: StandIn, anew: StandIn, named: list[str]
) -> list[str] | None:
    """Take further steps of both, one of which was loaded.

    Returns:
        Which of the attributes that differed after loading still do after one step; None if the
        steps moved the two differently.
    """
    still = named
    for number in range(STEPS, STEPS + first.steps):
        _take(number, maker, first, anew, times=_SPIKE if number == STEPS else 1.0)
        if not _alike(first, anew):
            return None
        if number == STEPS and named:
            now = _differing(first, anew)
            still = [each for each in named if each in now]
    return still


def _refuse_unfrozen(stand_in: StandIn, name: str) -> None:
    every = stand_in.model.named_parameters()
    late = next((n for n, p in every if p.requires_grad and n not in stand_in.parameters), None)
    if late is not None:
        raise RecipeError(
            f"the optimizer {name}, a hook of it or its scheduler has the parameter {late!r} need "
            "a gradient in a later step, and it does not when training begins: gradients are "
            "exchanged only of parameters that need one then. To train it later, let it need one "
            "from the beginning, and detach() what the layer gives until then."
        )


def _could_not_step(name: str, error: Exception, trial: Trial) -> Trial:
    if "closure" in str(error) or "'NoneType' object is not callable" in str(error):
        raise RecipeError(
            f"{name}.step() wants a closure ({type(error).__name__}: {one_line(error)}): instep "
            "calls step() without arguments, once a step, with the gradients of all workers. An "
            f"optimizer that evaluates the loss itself cannot be used; if {name} wraps another "
            "one, give that."
        ) from error
    if "create_graph" in str(error):
        raise RecipeError(
            f"{name}.step() wants gradients that have a graph ({type(error).__name__}: "
            f"{one_line(error)}), to differentiate them again: a step has the sum of all workers' "
            "gradients, which has none. Second-order optimizers of this kind cannot be used."
        ) from error
    why = f"cannot be tried ({type(error).__name__}: {one_line(error)})"
    return _if_same(trial, f"whether a checkpoint has all that {name} keeps {why}")


def _saved(stand_in: StandIn, name: str, *, served: bool) -> list[Any]:
    """What a checkpoint would have of each optimizer and its scheduler."""
    saved = list[Any]()
    for optimizer, scheduler in stand_in.made:
        for of, each in ((name, optimizer), (f"scheduler {type(scheduler).__name__}", scheduler)):
            if each is None:
                saved.append(None)
                continue
            try:
                tensors, skeleton = pack_state(each.state_dict())
            except (CheckpointError, AttributeError, TypeError) as error:
                what = "optimizer " if each is optimizer else ""
                raise RecipeError(
                    f"the {what}{of} keeps what no checkpoint can have: {one_line(error)}. Without "
                    "a checkpoint nothing can be saved, resumed or given to a new worker. Use "
                    "another one."
                ) from error
            own = {key: value.clone() for key, value in tensors.items()}
            saved.append(unpack_state(own, json.loads(json.dumps(skeleton))))
        if served:
            _check_servers(optimizer)
    return saved


def _check_servers(optimizer: Any) -> None:
    others = beside(optimizer.state)
    for parameter, kept in optimizer.state.items():
        for key, value in with_each(kept, others).items() if parameter not in others else ():
            kept_as(key, value, optimizer, "sync.servers")


def _load(anew: StandIn, first: StandIn, saved: list[Any]) -> None:
    with torch.no_grad():
        for name, parameter in anew.parameters.items():
            parameter.copy_(first.parameters[name])
    states = iter(saved)
    for made in anew.made:
        for each in made:
            state = next(states)
            if each is not None:
                each.load_state_dict(state)


def _alike(one: StandIn, other: StandIn) -> bool:
    for (mine, _), (theirs, _) in zip(one.made, other.made, strict=True):
        groups = zip(mine.param_groups, theirs.param_groups, strict=True)
        if not all(equal(options_of(own), options_of(their)) for own, their in groups):
            return False
    return all(equal(own, other.parameters[name]) for name, own in one.parameters.items())


def _differing(one: StandIn, other: StandIn) -> list[str]:
    """Attributes of optimizers and schedulers that have other values in the other one."""
    return [
        name
        for mine, theirs in zip(one.made, other.made, strict=True)
        for name in lost(kept_beside(*mine, one.model), kept_beside(*theirs, other.model))
    ]


def _lost(trial: Trial, name: str, named: list[str]) -> Trial:
    of = f" ({named[0]})" if named else ""
    return trial._replace(
        verdict=f"no: the optimizer {name} or its scheduler keeps something outside its "
        f"state_dict(){of}, so no checkpoint has it: {_WHO}. Undisturbed, the run loses nothing. "
        "Keep it in state_dict(): as self.state['name'], or in param_groups"
    )


def _may_be_lost(
    trial: Trial, named: str, how: str = " and has another value after loading"
) -> Trial:
    return _if_same(
        trial,
        f"{named} is not in state_dict(){how}: "
        f"{_WHO}. That changed nothing in the few steps that were tried, and may later. Keep it "
        "in state_dict(): as self.state['name'], or in param_groups",
    )


def try_batch_loss(
    batch_loss: Any, model: nn.Module, embedded: Any, seed: int, trial: Trial
) -> Trial:
    """The trial's result, or that `Recipe.batch_loss` keeps something from call to call.

    Args:
        batch_loss: of the recipe; copies of it and of what it closes over are called.
        model: as it is given.
        embedded: embeddings and targets of some samples.
        seed: of the random draws.
        trial: so far.
    """
    losses = list[float]()
    try:
        own, given = isolated([batch_loss, model], {})
        buffers, known = KeptBuffers(given), {id(given): "model"}
        with unchanged_globals(own):
            for turn in range(3):  # others between: a memory of equals may not change a mean
                set_generators(seed)
                buffers.put_back()  # which a checkpoint has
                with torch.no_grad():
                    inputs = on_tensors(embedded, Tensor.clone if turn % 2 == 0 else _others)
                    losses.append(float(own(given, *inputs)))
                if turn == 0:
                    once = digest_of([own, globals_of(own)], known)
            kept = digest_of([own, globals_of(own)], known) != once
    except Exception as error:  # of the user's function, which the first step will call too
        why = f"{type(error).__name__}: {one_line(error)}"
        return _if_same(
            trial, f"whether batch_loss keeps something from call to call cannot be tried ({why})"
        )
    if equal(losses[0], losses[2]):
        if not kept:
            return trial
        return _if_same(
            trial,
            "batch_loss keeps something from call to call, as a count of calls or a memory of "
            f"earlier batches, and no checkpoint has that: {_WHO}. That changed nothing in the few "
            "calls that were tried, and may later",
        )
    return trial._replace(
        verdict="no: batch_loss gives another result when the same embeddings are given again, as "
        "it keeps something from call to call (a memory of earlier batches), and no checkpoint "
        f"has that: {_WHO}. Undisturbed, the run loses nothing"
    )


def _if_same(trial: Trial, why: str) -> Trial:
    return trial._replace(verdict=f"not shown: {why}") if trial.same else trial


def _others(tensor: Tensor) -> Tensor:
    """Other embeddings, of the same targets."""
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.flip(0) * torch.linspace(-1.0, 2.0, tensor.numel()).view_as(tensor).to(tensor)
