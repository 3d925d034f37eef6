"""Which block each parameter is gathered with, and which parameters cannot be cut into rows.

Structure alone; processes are not known here.
"""

from __future__ import annotations

import torch
from torch import nn


def owners_of(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Name of the block that each parameter is gathered with; "" for the rest of the model."""
    inside: dict[nn.Module, str] = {}
    owners: dict[nn.Parameter, str] = {}
    for name, block in blocks.items():
        for module in block.modules():
            inside[module] = "" if module in inside else name
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owner = inside.get(module, "")
            owners[parameter] = owner if owners.get(parameter, owner) == owner else ""
    return owners


def unshardable(model: nn.Module, owners: dict[nn.Parameter, str]) -> set[nn.Parameter]:
    """Parameters that FSDP2 cannot cut into rows."""
    whole: set[nn.Parameter] = {p for p in model.parameters() if p.dim() == 0 or p.numel() == 0}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            whole.update(module.parameters(recurse=False))
    sizes: dict[str, dict[torch.dtype, int]] = {}
    for parameter, owner in owners.items():
        if parameter not in whole and parameter.requires_grad:
            types = sizes.setdefault(owner, {})
            types[parameter.dtype] = types.get(parameter.dtype, 0) + parameter.numel()
    for parameter, owner in owners.items():
        types = sizes.get(owner, {})
        if (
            parameter.requires_grad
            and types
            and parameter.dtype != max(types, key=types.__getitem__)
        ):
            whole.add(parameter)
    return whole
