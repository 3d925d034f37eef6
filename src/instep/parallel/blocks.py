"""The repeated blocks of a model: what is gathered, computed and freed one at a time.

Found from the structure alone: the children of lists (ModuleList, Sequential, ModuleDict) that
have the same class, as encoder or decoder layers have. Outer lists come first: a block's own lists
stay part of it. Devices and processes are not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Every block of every outermost list of repeated blocks, by name, in the model's order.

    A block has parameters and a `forward`. One that the model has under several names is given
    once. A model without such a list has no blocks.
    """
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    for name, block in _find("", model):
        if block not in seen:
            seen.add(block)
            found[name] = block
    return found


def _find(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = {name: child for name, child in module.named_children() if _has_parameters(child)}
    kinds = Counter(_kind(child) for child in children.values())
    for name, child in children.items():
        path = f"{prefix}{name}"
        repeated = isinstance(module, LISTS) and kinds[_kind(child)] > 1
        if repeated and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield path, child
        else:
            yield from _find(f"{path}.", child)


def _kind(module: nn.Module) -> object:
    """What blocks have in common: their class, for a Sequential also the classes within."""
    if type(module) in LISTS:
        return type(module), tuple(_kind(child) for child in module.children())
    return type(module)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
