"""State of an optimizer for pieces of parameters, as tensors with names, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from instep.engine.beside import BESIDE, put_back
from instep.errors import CheckpointError, RecipeError

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The tensors in which numbers of an optimizer's state lie, under names that end with `:int`."""


def kept_as(name: Any, value: Any, optimizer: object, where: str) -> tuple[str, Tensor]:
    """State of an optimizer for a parameter, as a tensor with a name; `taken` is the inverse.

    Args:
        name, value: as in its state.
        optimizer: whose it is, for the message.
        where: the setting that has parameters in parts, for the message.

    Raises:
        RecipeError: it is neither a tensor nor a number; or a tensor that is no number, and of no
            parameter.
    """
    kind = type(value)
    if kind in NUMBERS:
        name, value = f"{name}:{kind.__name__}", torch.tensor(value, dtype=NUMBERS[kind])
    large = isinstance(value, Tensor) and value.dim() and str(name).startswith(BESIDE)
    if large or not isinstance(value, Tensor) or type(name) is not str or "/" in name:
        if str(name).startswith(BESIDE):
            raise RecipeError(
                f"the optimizer {type(optimizer).__name__} keeps {name.removeprefix(BESIDE)!r} for "
                f"no parameter in its state: with {where} that can be a number. Use all_reduce."
            )
        raise RecipeError(
            f"the optimizer {type(optimizer).__name__} keeps {name!r} as "
            f"{kind.__name__} in its state: with {where} it can keep "
            "tensors and numbers. Use an optimizer of torch.optim, or all_reduce."
        )
    return name, value


def taken(name: str, value: Tensor) -> tuple[str, Any]:
    """State that an optimizer kept, and its name; a tensor is copied."""
    name, _, kind = name.partition(":")
    numbers: dict[str, Any] = {number.__name__: number for number in NUMBERS}
    return name, numbers[kind](value.item()) if kind else value.clone()


def put_together(shards: Mapping[str, Tensor], model: nn.Module) -> dict[Any, dict[str, Any]]:
    """An optimizer's state for whole parameters, from that of pieces.

    Args:
        shards: as `PARAMETER/NAME/START:STOP`; of all servers.
        model: has the parameters.

    Raises:
        CheckpointError: pieces are missing, or belong to another model.
    """
    parameters = dict(model.named_parameters())
    pieces: defaultdict[tuple[str, str], list[tuple[int, int, Tensor]]] = defaultdict(list)
    for name, tensor in shards.items():
        parameter, kept, elements = name.rsplit("/", 2)
        start, stop = elements.split(":")
        pieces[parameter, kept].append((int(start), int(stop), tensor))
    whole: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for (name, kept), found in pieces.items():
        found.sort(key=lambda piece: piece[:2])
        own = parameters.get(name)
        ends = [0, *(stop for _, stop, _ in found)]
        if own is None or [start for start, *_ in found] != ends[:-1] or ends[-1] != own.numel():
            raise CheckpointError(
                f"the optimizer's {kept!r} for {name!r} is not in one piece in its shards."
            )
        joined = found[0][2]  # a number is the same in all pieces
        if len(found) > 1 and joined.dim():
            joined = torch.cat([tensor for *_, tensor in found]).view(own.shape)
        kept, value = taken(kept, joined)
        whole[own][kept] = value
    put_back(whole)
    return whole
