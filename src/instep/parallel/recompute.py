"""Activation checkpointing by block: inside a block nothing is kept, and it runs again in backward.

Works with and without sharding, before `shard` only: FSDP2 must see the block, not its inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from instep.errors import RecipeError
from instep.parallel.blocks import repeated_blocks


def checkpoint_blocks(model: nn.Module) -> None:
    """Have each block of `repeated_blocks` keep only its inputs for the backward pass, in place.

    Names, parameters and classes stay as they are. Random numbers are drawn again as before.

    Raises:
        RecipeError: the model has no repeated blocks.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise RecipeError(
            "mesh.checkpointing = 'blocks', but the model has no list of repeated blocks "
            "(a ModuleList or Sequential of modules of one class): leave the key out."
        )
    for block in blocks.values():
        block.__dict__["forward"] = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return run
