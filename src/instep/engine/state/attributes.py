"""What optimizers and schedulers keep beside their state dicts: whether a new one has the same.

No checkpoint has an attribute of the user's optimizer that `state_dict()` leaves out. So a snapshot
says what such attributes were, in digests; the process that is given its state compares.
Optimizers and schedulers of torch keep nothing so, and are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer, lr_scheduler

from instep.parallel.nested import tensors_in
from instep.recipe.optimizers.combined import CombinedOptimizer, parts_of, step_hooks
from instep.recipe.optimizers.plateau import Plateau
from instep.usercode.digests import digest_of, digests

_OF_TORCH = frozenset(
    (
        *("defaults", "param_groups", "_step_count", "_is_initial", "_get_lr_called_within_step"),
        *("_last_lr", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
        *("_step_supports_amp_scaling", "_opt_called"),
        *(
            f"_optimizer_{moment}_{when}_hooks"  # under numbers that no two processes share
            for moment in ("step", "state_dict", "load_state_dict")
            for when in ("pre", "post")
        ),
    )
)
"""Attributes that `state_dict()` has, or that decide nothing."""

_CALLING = lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR
"""Schedulers that call functions of the user's."""


def kept_beside(optimizer: Optimizer, scheduler: Any, model: nn.Module) -> dict[str, str]:
    """Digests of what optimizers and their scheduler have in attributes, as `CLASS.NAME`.

    Args:
        optimizer, scheduler: between two steps.
        model: what they move; its parameters and buffers are in every snapshot.
    """
    parts = [*parts_of(optimizer), scheduler]
    every = [each for each in parts if _is_looked_at(each)]
    hooks = [step_hooks(each)[0] for each in dict.fromkeys((optimizer, *parts[:-1]))]
    if not every and not any(hooks):
        return {}
    known = {id(model): "model", id(optimizer): "optimizer"}
    for names in (model.named_parameters(), model.named_buffers()):
        known |= {id(each): name for name, each in names}
    saved = optimizer.state_dict()
    known |= {id(each): "saved" for each in tensors_in(saved) if id(each) not in known}
    found = dict[str, str]()
    for each in every:
        name = type(each).__name__
        but = _OF_TORCH | {"optimizer" if each is scheduler else "state"}
        found |= {f"{name}.{key}": made for key, made in digests(each, known, but).items()}
        if each is optimizer and (
            state := {p: of for p, of in getattr(each, "state", {}).items() if of}
        ):
            found[f"{name}.state"] = digest_of(state, known)
    if any(hooks):
        found["a hook before steps"] = digest_of(hooks, known)
    return found


def lost(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of what is another now than it was."""
    return [name for name, digest in saved.items() if now.get(name) != digest]


def _is_looked_at(each: Any) -> bool:
    if each is None or isinstance(each, Plateau | CombinedOptimizer):
        return False
    return not type(each).__module__.startswith("torch.optim") or isinstance(each, _CALLING)
