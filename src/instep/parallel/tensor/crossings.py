"""Where the sequence is split or gathered as tensors go into modules and out of them.

Which modules, and which of their tensors, is said by a plan; how ranks exchange them by `links.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from instep.parallel.nested import on_tensors
from instep.parallel.tensor.links import Links
from instep.parallel.tensor.plan import Crossing


def cross(module: nn.Module, name: str, crossings: Sequence[Crossing], links: Links) -> list[Any]:
    """Have the tensors of a module split or gathered in each call; returns the hooks' handles."""
    inputs: dict[int, Crossing] = {}
    outputs: dict[int, Crossing] = {}
    for each in crossings:
        if each.change == "sum_split":  # the layer's own sum does it
            links.scattered[name] = each
        else:
            (inputs if each.side == "input" else outputs)[each.number] = each

    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        return _crossed((args, kwargs), f"the input of {name}", inputs, links)

    def leave(_: Any, args: Any, made: Any) -> Any:
        return _crossed(made, f"the output of {name}", outputs, links)

    handles: list[Any] = []
    if inputs:
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    if outputs:
        handles.append(module.register_forward_hook(leave))
    return handles


def _crossed(value: Any, site: str, crossings: Mapping[int, Crossing], links: Links) -> Any:
    numbers = iter(range(1 << 30))

    def change(tensor: Tensor) -> Tensor:
        at = crossings.get(next(numbers))
        return tensor if at is None else links.cross(tensor, site, at)

    return on_tensors(value, change)
