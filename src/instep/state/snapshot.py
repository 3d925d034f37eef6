"""The state of a run at one commit: named tensors and plain JSON.

It knows no files and no clock. A checkpoint is one `Snapshot`; its parts are packed by
`packing.py`:

    tensors, skeleton = pack_state(optimizer.state_dict())
    Snapshot(step, {"model": model_tensors(model), "optimizer": tensors},
             {"optimizer": skeleton, ...})

After loading, `unpack_state(tensors, skeleton)` gives what `load_state_dict` takes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from instep.comm.dtensors import is_split
from instep.errors import CheckpointError
from instep.state.boxes import BoxCut, local

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Every tensor type that can be saved, and its name in a safetensors file."""

TYPES = {name: dtype for dtype, name in DTYPES.items()}
"""The types by these names."""

RESERVED = "__metadata__"
"""A name that safetensors reserves."""

PART = "part"
"""Group of a rank of a mesh: its parts of model and optimizer state, as `model/NAME` and
`optimizer/PARAMETER/NAME`. In a checkpoint each rank's is a group of its own, `part-NUMBER`."""

COPIES = "copies"
"""The same, of what another rank of its replica writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a run at one commit."""

    step: int
    """The last committed step; counts from 1, 0 before any."""

    tensors: dict[str, dict[str, Tensor]]
    """Group (`"model"`, `"optimizer"`, ...) to name to tensor. Equal storage means tied."""

    facts: dict[str, Any]
    """Everything else, plain JSON: data position, skeletons of packed states, versions."""

    cuts: dict[str, BoxCut] = field(default_factory=dict)
    """Of the tensors in the groups `PART` and `COPIES`, which part they are; others are whole."""

    pieces: Any = None
    """A checkpoint from which tensors are read one by one (`pieces.Pieces`), where they are not
    in `tensors`."""


def model_tensors(model: nn.Module, *, empty: bool = False) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name: the tensors of `model.state_dict()`.

    Buffers registered as not persistent are left out: the model makes them
    itself. Tied weights have each of their names, and one storage.

    Args:
        model: of the user.
        empty: whether some may be on the meta device.

    Raises:
        CheckpointError: a module's extra state is not a tensor.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} of the model is a {type_name(value)}: extra state can be kept only "
                "as a tensor. Let get_extra_state() return one."
            )
        if not is_supported(value) and not (empty and value.is_meta):  # cheap: training waits
            check_tensor(value, f"{name} of the model")
        tensors[name] = value
    return tensors


def parameters_sha256(model: nn.Module) -> str:
    """SHA-256 over parameters and persistent buffers, sorted by name.

    Raw little-endian bytes one after the other, each tensor row by row, a
    tied weight under each of its names; equal on every device.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for _, tensor in sorted(model_tensors(model).items()):
        digest.update(raw_bytes(tensor).numpy().data)
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8 on the CPU: a tensor's values row by row, in its own memory if they lie so."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that already have an earlier name.

    Returns:
        Later name to first name, for tensors with the same memory, shape and
        strides; mere overlap does not count. Of DTensors the parts that this rank has
        count, unless they are empty (see `model_ties`).
    """
    if any(map(is_split, tensors.values())):
        tensors = {name: local(tensor) for name, tensor in tensors.items()}
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    addresses = Counter(map(Tensor.data_ptr, tensors.values()))
    if len(addresses) == len(tensors):  # the common case, which a save waits for
        return tied
    for name, t in tensors.items():
        if addresses[t.data_ptr()] > 1 and t.numel() and not t.is_meta:
            memory = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg())
            if (original := first.setdefault(memory, name)) != name:
                tied[name] = original
    return tied


def model_ties(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """As `tied_names` of a model's own tensors, also where this rank has nothing of a weight.

    Args:
        model: whose state dict `tensors` is.
        tensors: as `model_tensors` gave them.
    """
    tied, first = tied_names(tensors), dict[int, str]()
    own = dict[str, Tensor](model.named_parameters(remove_duplicate=False))
    for name in tensors:
        if name in own and (original := first.setdefault(id(own[name]), name)) != name:
            tied[name] = original
    return tied


def is_supported(tensor: Tensor) -> bool:
    """Whether a safetensors file can hold `tensor`."""
    return tensor.dtype in DTYPES and tensor.layout is torch.strided and not tensor.is_meta


def check_tensor(tensor: Tensor, where: str) -> None:
    """Raise `CheckpointError` with the reason where a safetensors file cannot hold `tensor`."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(f"{where} is a {kind} tensor: only dense ones can be kept.")
    if tensor.is_meta:
        raise CheckpointError(f"{where} is on the meta device: it has no values to keep.")
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{where} is a tensor of {tensor.dtype}, which a safetensors file cannot hold."
        )


def type_name(value: Any) -> str:
    """`torch.Size`, `dict`: the type of a value, for messages."""
    kind = type(value)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return home + kind.__qualname__
