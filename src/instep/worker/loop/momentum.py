"""Moves an optimizer's momentum to a codec that applies it before it chooses what to send."""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Optimizer

from instep.errors import RecipeError
from instep.sync.base import Strategy


def move_momentum(optimizer: Optimizer, strategy: Strategy, name: str) -> None:
    """If the strategy's codec applies momentum itself, take it from the optimizer.

    Args:
        optimizer: of the recipe; its momentum becomes 0.
        strategy: knows its codec.
        name: of the codec, for messages.

    Raises:
        RecipeError: it is no SGD, or has several sorts of momentum.
    """
    codec: Any = getattr(strategy, "codec", None)
    if not getattr(codec, "takes_momentum", False):
        return
    if type(optimizer) is not SGD:
        raise RecipeError(
            f"sync.codec = {name!r} takes the momentum of torch.optim.SGD, and the recipe's "
            f"optimizer is {type(optimizer).__name__}. Use SGD, or sync.codec = 'top_k', which "
            "goes with every optimizer."
        )
    kinds = {(g["momentum"], g["nesterov"], g["dampening"]) for g in optimizer.param_groups}
    if len(kinds) > 1 or any(dampening for *_, dampening in kinds):
        raise RecipeError(
            f"sync.codec = {name!r} needs one momentum, without dampening, for all parameters; the "
            f"groups of the recipe's SGD have (momentum, nesterov, dampening) {sorted(kinds)}."
        )
    codec.momentum, codec.nesterov, _ = next(iter(kinds))
    for group in optimizer.param_groups:
        group["momentum"], group["nesterov"] = 0.0, False

    def refuse_more(optimizer: Optimizer, *_: object) -> None:
        if any(group["momentum"] for group in optimizer.param_groups):
            raise RecipeError(
                f"the optimizer's momentum was set again, and sync.codec = {name!r} applies it "
                "already. Leave schedulers of the momentum out (cycle_momentum=False), and do not "
                "resume runs that began without this codec."
            )

    optimizer.register_step_pre_hook(refuse_more)
