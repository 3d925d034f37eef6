"""Weights that a file has as codes of 8 bits, with scales beside them; and packed ones.

`layer.weight` in float8 with `layer.weight_scale_inv` (as DeepSeek's checkpoints have it, one scale
for each block of 128 by 128) or `layer.weight_scale` (as compressed-tensors and others write it:
one for all, for each row, or for each block) stands for their product. What is packed (GPTQ, AWQ,
bitsandbytes, four bits) is known by its names and refused: the codes are never weights.
Way in: `scales_of`, `Scale.decode`, `refuse_undecoded`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from instep.errors import CheckpointError
from instep.state.model_file import Entry

_CODES = ("F8_E4M3", "F8_E5M2", "I8")
_SUFFIXES = ("_scale_inv", "_scale")
_FLOATS = ("F64", "F32", "F16", "BF16")
_BLOCK = 128
_PACKED = re.compile(r"(^|\.)(qweight|\w+_packed|\w+_blocks)$")
"""Names of packed codes, where they are integers."""
_OF_PACKED = re.compile(
    r"(^|\.)(SCB|\w+_scale_2|\w+\.(absmax|quant_map|nested_absmax|quant_state\..*))$"
)
"""Names of what lies beside packed codes."""
_SCALE = re.compile(r"(^|[._])scales?(_|\.|$)")
_ACTIVATIONS = re.compile(r"(^|\.)(input|output|k|v|q|kv)_scale(_inv)?$")

_REMEDY = (
    "Start from the model's weights in 16 or 32 bits; or have the library that made the file "
    "decode them (transformers: model.dequantize(), then model.save_pretrained(FOLDER))."
)


class Scale:
    """The scales of one weight.

    Args:
        values: as the file has them.
        shape: of the weight.

    Raises:
        ValueError: they do not fit it; says how.
    """

    def __init__(self, values: Tensor, shape: tuple[int, ...]) -> None:
        values = values.float()
        if values.numel() == 1:
            values = values.reshape([1] * len(shape))
        elif values.dim() == 1 and shape and len(values) == shape[0]:
            values = values.reshape(-1, *[1] * (len(shape) - 1))
        if values.dim() != len(shape):
            raise ValueError(f"scales of shape {list(values.shape)} for {list(shape)}")
        self._values = values
        self._blocks = [_block(*each) for each in zip(shape, values.shape, strict=True)]

    def decode(self, codes: Tensor, first: int) -> Tensor:
        """The weights of some rows.

        Args:
            codes: [rows, ...] as the file has them.
            first: number of the first row.
        """
        scale = self._values
        for dim, (size, block) in enumerate(zip(codes.shape, self._blocks, strict=True)):
            places = torch.arange(size) + (first if dim == 0 else 0)
            scale = scale.index_select(dim, places // block)
        return codes.float() * scale


def _block(size: int, scales: int) -> int:
    """How many places along a dim have one scale."""
    if scales == 1:
        return max(1, size)
    if scales == -(-size // _BLOCK):
        return _BLOCK
    if scales and size % scales == 0:
        return size // scales
    raise ValueError(f"{scales} scales along a dim of {size}, in blocks of no known size")


def scales_of(entries: Mapping[str, Entry], wanted: Container[str]) -> dict[str, str]:
    """Weights that are codes, and the name of their scales.

    Args:
        entries: of the file.
        wanted: names in the model; a scale that the model has itself is no scale to apply here.
    """
    return {
        name: name + suffix
        for name, entry in entries.items()
        if entry.dtype in _CODES
        for suffix in _SUFFIXES
        if name + suffix not in wanted
        and name + suffix in entries
        and entries[name + suffix].dtype in _FLOATS
    }


def refuse_undecoded(
    path: Path, entries: Mapping[str, Entry], left: Iterable[str], loaded: Iterable[str]
) -> None:
    """Make sure that nothing in a file says that other weights are codes.

    Args:
        path: for the message.
        entries: of the file.
        left: its names that the model does not have, and that are no scales known to apply.
        loaded: those that are taken as they are.

    Raises:
        CheckpointError: something does.
    """
    left = list(left)
    packed = next((name for name in left if _is_packed(name, entries.get(name))), None)
    if packed is not None:
        raise CheckpointError(
            f"{path} has packed weights ({packed!r}), as GPTQ, AWQ, bitsandbytes and other ways to "
            f"store a model in few bits write them: codes are no weights. {_REMEDY}"
        )
    unknown = [n for n in left if _SCALE.search(n) and not _ACTIVATIONS.search(n)]
    codes = next((name for name in loaded if entries[name].dtype in _CODES), None)
    if codes is not None and unknown:
        raise CheckpointError(
            f"{path}: {codes!r} is {entries[codes].dtype}, and {unknown[0]!r} beside it may be its "
            f"scale, in a form that is not known here. {_REMEDY}"
        )


def _is_packed(name: str, entry: Entry | None) -> bool:
    integers = entry is not None and entry.dtype[0] in "IU"
    return bool(_OF_PACKED.search(name) or (integers and _PACKED.search(name)))
