"""Building a model that no single process has memory for.

`without_memory` builds it with parameters that have a shape and no values. `sharded.py` gives
memory to the rows of this rank, which are then read from a file (`state/load.py`). Buffers
are built as always: they are few, and some are in no file (tables of angles, masks). What they
are may follow from values that parameters do not have here; `drawn` finds what was drawn.

`in_files` builds it as always, with the values of parameters in files that the kernel may write to
disk whenever memory is short: for values that are in no file yet.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
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

    with _replaced(nn.Module, "register_parameter", register_meta):
        return make()


def in_files(make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Call `make` and move the values of every parameter to a file as soon as a module has it.

    Limits on memory do not count them; what is drawn and computed is what it would be in memory.
    The files have no names, and are gone with the last tensor that uses them. Do not run this
    while another thread builds a model.

    Args:
        make: builds the model.
        folder: on a disk with room for it.

    Raises:
        OSError: the disk has no room.
    """
    register = nn.Module.register_parameter
    apply, copy = vars(nn.Module)["_apply"], vars(nn.Parameter)["__deepcopy__"]
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() in moved or tensor.device.type != "cpu" or not tensor.numel():
            return tensor
        mapped = _mapped(tensor.detach(), folder)
        moved[mapped.data_ptr()] = mapped
        return mapped

    def register_moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            parameter.data = move(parameter.data)

    def apply_moved(module: nn.Module, function: Callable[[Tensor], Tensor], *more: Any) -> Any:
        return apply(module, lambda tensor: move(function(tensor)), *more)

    def copy_moved(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        known = id(parameter) in memo
        copied: nn.Parameter = copy(parameter, memo)
        if not known:
            copied.data = move(copied.data)
        return copied

    with (
        _replaced(nn.Module, "register_parameter", register_moved),
        _replaced(nn.Module, "_apply", apply_moved),
        _replaced(nn.Parameter, "__deepcopy__", copy_moved),
    ):
        return make()


@contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _mapped(tensor: Tensor, folder: Path) -> Tensor:
    """The same values in a file of their own."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # else a full disk kills the process
        data = np.memmap(file, np.uint8, "r+", 0, (tensor.nbytes,))
    plain = torch.from_numpy(data).view(tensor.dtype)
    return plain.as_strided(tensor.shape, _strides(tensor)).copy_(tensor)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()  # dense, in the same order


def drawn(one: nn.Module, other: nn.Module) -> str:
    """What two builds from different seeds have different, though it is no parameter.

    Without the values of its parameters a model draws other numbers for the rest. What a file
    has, parameters and persistent buffers, does not count.

    Returns:
        The name of a buffer or of another attribute of a module; empty if there is none.
    """
    for (name, mine), (_, theirs) in zip(one.named_modules(), other.named_modules(), strict=True):
        for own in mine._non_persistent_buffers_set:
            if not _same(mine._buffers.get(own), theirs._buffers.get(own)):
                return f"{name}.{own}".lstrip(".")
        for own, value in vars(mine).items():
            if own not in _OF_TORCH and not _same(value, vars(theirs).get(own)):
                return f"{name}.{own}".lstrip(".")
    return ""


_OF_TORCH = frozenset(vars(nn.Module()))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.is_meta or other.is_meta or is_split(one) or one.layout is not torch.strided:
            return True
        one, other = one.detach().cpu().float().numpy(), other.detach().cpu().float().numpy()
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    plain = isinstance(one, int | float | str) and isinstance(other, int | float | str)
    return not plain or one == other or one != one


def give_memory(root: nn.Module, device: torch.device) -> None:
    """Replace what is on the meta device by zeros, of a parameter as many as this rank holds.

    Raises:
        CheckpointError: a buffer that is in no file has no values.
    """
    given: dict[Tensor, nn.Parameter] = {}
    for path, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in given:
                    given[parameter] = _with_memory(parameter, device)
                module._parameters[name] = given[parameter]
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if name in module._non_persistent_buffers_set:
                where = f"{path}.{name}".removeprefix("model.")
                raise CheckpointError(
                    f"the buffer {where!r} is on the meta device, and nothing says its values: "
                    "build the model without torch.device('meta'); instep leaves the memory of its "
                    "parameters out by itself."
                )
            module._buffers[name] = torch.zeros_like(buffer, device=device)
    root.to(device)  # FSDP2 looks at its parameters again, and pads them once


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if not is_split(parameter):
        return nn.Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
    local = torch.zeros_like(parameter.to_local(), device=device)
    return nn.Parameter(split_like(parameter, local), parameter.requires_grad)
