"""Activation checkpointing by block: inside a block nothing is kept, and it runs again in backward.

Works with and without sharding, before `shard` only: FSDP2 must see the block, not its inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from instep.errors import RecipeError
from instep.parallel.blocks import repeated_blocks

_CACHES = ("past_key_values", "past_key_value", "cache_params")


def checkpoint_blocks(model: nn.Module, blocks: Mapping[str, nn.Module] | None = None) -> None:
    """Have each block of `repeated_blocks` keep only its inputs for the backward pass, in place.

    Names, parameters and classes stay as they are. Random numbers are drawn again as before.

    Args:
        model: has the blocks.
        blocks: as they were found while the model was whole; None: they are found now.

    Raises:
        RecipeError: the model has no repeated blocks.
    """
    blocks = repeated_blocks(model) if blocks is None else blocks
    if not blocks:
        raise RecipeError(
            "mesh.checkpointing = 'blocks', but the model has no list of repeated blocks "
            "(a ModuleList or Sequential of modules of one class): leave the key out."
        )
    for block in blocks.values():
        own = block.__dict__.get("forward")
        block.__dict__["forward"] = functools.partial(_again, block, own)  # a copy has its own


def within(block: nn.Module, make: Callable[[], AbstractContextManager[Any]]) -> None:
    """When a block runs again, it does so in such a context: its hooks are not called again."""
    block.__dict__[_WITHIN] = make


_WITHIN = "_runs_again_within"


def _again(
    block: nn.Module, own: Callable[..., Any] | None, *arguments: Any, **options: Any
) -> Any:
    """The block's forward pass; its class's, unless the block has one of its own."""
    forward = own or functools.partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    make = block.__dict__.get(_WITHIN, nullcontext)
    return checkpoint(
        forward,
        *arguments,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), make()),
        **without_caches(options),
    )


def without_caches(options: dict[str, Any]) -> dict[str, Any]:
    """The same without a transformer's cache of keys: it would grow when a block runs again, and
    nothing is generated while gradients are recorded."""
    return options | {name: None for name in _CACHES if name in options}
