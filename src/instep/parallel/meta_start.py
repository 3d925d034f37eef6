"""Starting a model that no single process has memory for.

`without_memory` builds it with parameters that have a shape and no values. `sharded.py` gives
memory to the rows of this rank, which are then read from a file (`state/load.py`). Buffers
are built as always: they are few, and some are in no file (tables of angles, masks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from instep.comm.dtensors import is_split, split_like
from instep.errors import CheckpointError


def without_memory(make: Callable[[], nn.Module]) -> nn.Module:
    """Call `make` and let every parameter go to the meta device as soon as a module has it.

    At most one parameter has memory at a time. Parameters that share a tensor still do. Do not
    run this while another thread builds a model.
    """
    register = nn.Module.register_parameter
    known = WeakTensorKeyDictionary()

    def register_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or parameter.is_meta:
            return
        if parameter not in known:
            empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            known[parameter] = empty
        module._parameters[name] = known[parameter]

    module: Any = nn.Module
    module.register_parameter = register_meta
    try:
        return make()
    finally:
        module.register_parameter = register


def give_memory(root: nn.Module, device: torch.device) -> None:
    """Replace each parameter on the meta device by one with memory for what this rank holds.

    Its values are undefined. Buffers must not be on the meta device.

    Raises:
        CheckpointError: a buffer has no values.
    """
    for name, buffer in root.named_buffers():
        if buffer.is_meta:
            raise CheckpointError(
                f"the buffer {name.removeprefix('model.')!r} is on the meta device, and nothing "
                "says its values: build the model without `torch.device('meta')`, instep leaves "
                "the memory of its parameters out by itself."
            )
    given: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in given:
                    given[parameter] = _with_memory(parameter, device)
                module._parameters[name] = given[parameter]
    root.to(device)  # FSDP2 looks at its parameters again, and pads them once


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if not is_split(parameter):
        return nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    local = torch.empty_like(parameter.to_local(), device=device)
    return nn.Parameter(split_like(parameter, local), parameter.requires_grad)
