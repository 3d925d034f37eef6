"""Starting a model that no single process has memory for.

`without_memory` builds it with parameters that have a shape and no values. `sharded.py` gives
memory to the rows of this rank; `load_shards` fills them from a file and reads no others. Buffers
are built as always: they are few, and some are in no file (tables of angles, masks).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.weak import WeakTensorKeyDictionary

from instep.comm.dtensors import is_split, split_like
from instep.errors import CheckpointError

_PIECE_BYTES = 4 << 20
"""How much is read at once, or one row."""

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names of numbers in a safetensors file."""


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


def load_shards(model: nn.Module, path: Path) -> None:
    """Fill a model from a safetensors file; of each parameter only this rank's rows are read.

    A mapping of the whole file would count as memory of this process, so pieces of a few MB are
    read instead.

    Args:
        model: sharded, or not; parameters have memory.
        path: the file. A tensor that the model has under several names may be there under any one.

    Raises:
        CheckpointError: it is no such file, it lacks a tensor of the model, or one has another
            shape or a type of numbers that torch does not have.
    """
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            names.setdefault(buffer, []).append(name)
    with open(path, "rb", buffering=0) as file:
        try:
            length = int.from_bytes(file.read(8), "little")
            there = json.loads(file.read(length))
        except (ValueError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path} is no safetensors file: {error}.") from error
        for tensor, aliases in names.items():
            known = [each for each in aliases if each in there]
            if not known:
                raise CheckpointError(
                    f"{path} has no {' and no '.join(map(repr, aliases))}, which the model has: "
                    "it is the file of another model."
                )
            _load(tensor, file, 8 + length, known[0], there[known[0]])


@torch.no_grad()
def _load(tensor: Tensor, file: Any, begin: int, name: str, entry: dict[str, Any]) -> None:
    shape, kind = entry["shape"], _TYPES.get(entry["dtype"])
    if shape != list(tensor.shape) or kind is None:
        raise CheckpointError(
            f"{name!r} is {entry['dtype']} {shape} in the file and {tensor.dtype} "
            f"{list(tensor.shape)} in the model: it is the file of another model."
        )
    into, starts = tensor, (0,) * len(shape)
    if is_split(tensor):
        into = tensor.to_local()
        _, starts = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    if not into.numel():
        return
    if not shape:
        into, shape, starts = into.view(1), [1], (0,)
    row = math.prod(shape[1:]) * kind.itemsize
    inner = tuple(slice(a, a + n) for a, n in zip(starts[1:], into.shape[1:], strict=True))
    some = max(1, _PIECE_BYTES // row)
    for first in range(0, len(into), some):
        part = into[first : first + some]
        buffer = bytearray(len(part) * row)
        file.seek(begin + entry["data_offsets"][0] + (starts[0] + first) * row)
        _fill(buffer, file, name)
        piece = torch.frombuffer(buffer, dtype=kind).view(len(part), *shape[1:])
        part.copy_(piece[(slice(None), *inner)])


def _fill(buffer: bytearray, file: Any, name: str) -> None:
    view = memoryview(buffer)
    while view:
        count = file.readinto(view)
        if not count:
            raise CheckpointError(f"the file ends within {name!r}: it is truncated.")
        view = view[count:]


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if not is_split(parameter):
        return nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    local = torch.empty_like(parameter.to_local(), device=device)
    return nn.Parameter(split_like(parameter, local), parameter.requires_grad)
