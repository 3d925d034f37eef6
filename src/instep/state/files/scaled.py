"""Weights that a file has as codes of 8 bits, with scales beside them; and packed ones.

`layer.weight` in float8 with `layer.weight_scale_inv` (as DeepSeek's checkpoints have it, one scale
for each block of 128 by 128) or `layer.weight_scale` (as compressed-tensors and others write it:
one for all, for each row, or for each block) stands for their product; a `layer.weight_zero_point`
is subtracted before. No shape says how large blocks are, since the last may be smaller: the
`config.json` beside the file does. What is packed (GPTQ, AWQ, bitsandbytes, four bits) is known by
its names and refused: the codes are never weights.
Way in: `scales_of`, `WeightScale.decode`, `refuse_undecoded`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from instep.errors import CheckpointError
from instep.state.files.model_file import TensorEntry

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
_SCALE = re.compile(
    r"(^|[._])((de|re)?scales?|amax|absmax|zero_?points?|q?zeros|zp|g_idx|codebook)(_|\.|$)"
)
_ACTIVATIONS = re.compile(r"(^|\.)(input|output|k|v|q|kv)_(scale(_inv)?|zero_point|amax)$")

REMEDY = (
    "Start from the model's weights in 16 or 32 bits; or have the library that made the file "
    "decode them (transformers: model.dequantize(), then model.save_pretrained(FOLDER))."
)


class WeightScale:
    """The scales of one weight.

    Args:
        values: as the file has them.
        shape: of the weight.
        zero: the code of 0, for each scale; None if it is 0.
        block: rows and columns that have one scale; None if nothing says so.

    Raises:
        ValueError: they do not fit it; says how.
    """

    def __init__(
        self,
        values: Tensor,
        shape: tuple[int, ...],
        zero: Tensor | None = None,
        block: Sequence[int] | None = None,
    ) -> None:
        if zero is not None and zero.shape != values.shape:
            raise ValueError(f"zero points of shape {[*zero.shape]} for scales {[*values.shape]}")
        self._values = _with_dims(values.float(), shape)
        self._zero = None if zero is None else _with_dims(zero.float(), shape)
        self._blocks = _blocks(shape, tuple(self._values.shape), block)

    def decode(self, codes: Tensor, first: int) -> Tensor:
        """The weights of some rows.

        Args:
            codes: [rows, ...] as the file has them.
            first: number of the first row.
        """
        weights = codes.float()
        if self._zero is not None:
            weights = weights - self._spread(self._zero, codes.shape, first)
        return weights * self._spread(self._values, codes.shape, first)

    def _spread(self, values: Tensor, shape: Sequence[int], first: int) -> Tensor:
        for dim, (size, block) in enumerate(zip(shape, self._blocks, strict=True)):
            places = torch.arange(size) + (first if dim == 0 else 0)
            values = values.index_select(dim, places // block)
        return values


def _with_dims(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    if values.numel() == 1:
        return values.reshape([1] * len(shape))
    if values.dim() == 1 and shape and len(values) == shape[0]:
        return values.reshape(-1, *[1] * (len(shape) - 1))
    return values


def _blocks(
    shape: tuple[int, ...], scales: tuple[int, ...], given: Sequence[int] | None
) -> tuple[int, ...]:
    """How many places along each dim have one scale."""
    whole = tuple(max(1, size) for size in shape)
    if scales == (1,) * len(shape):
        return whole
    if scales == (*shape[:1], *[1] * len(shape[1:])):
        return (1, *whole[1:])
    block = tuple(given) if given else (_BLOCK,) * len(shape)
    if len(block) == len(shape) == len(scales):
        pairs = list(zip(shape, block, strict=True))
        even = given or all(size % each == 0 or size < each for size, each in pairs)
        if even and scales == tuple(-(-size // each) for size, each in pairs):
            return block
    wanted = " by ".join(map(str, block))
    raise ValueError(
        f"scales of shape {[*scales]} for {[*shape]} are neither one for all, nor one for each "
        f"row, nor one for each block of {wanted}"
        + ("" if given else " (of which size they are, no config.json beside the file says)")
    )


def block_beside(path: Path) -> list[int] | None:
    """The `weight_block_size` that the configuration beside a file gives; None if none does."""
    try:
        config = json.loads((path.parent / "config.json").read_bytes())
        block = config["quantization_config"]["weight_block_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    good = isinstance(block, list) and all(type(each) is int and each > 0 for each in block)
    return block if good else None


def scales_of(
    entries: Mapping[str, TensorEntry], wanted: Container[str]
) -> dict[str, tuple[str, ...]]:
    """Weights that are codes; and the name of their scales, and of their zero points if any.

    Args:
        entries: of the file.
        wanted: names in the model; a scale that the model has itself is no scale to apply here.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, entry in entries.items():
        zero = f"{name}_zero_point"
        if entry.dtype not in _CODES or zero in wanted:
            continue
        for suffix in _SUFFIXES:
            scale = name + suffix
            if scale not in wanted and scale in entries and entries[scale].dtype in _FLOATS:
                found[name] = (scale, zero) if zero in entries else (scale,)
    return found


def refuse_undecoded(
    path: Path,
    entries: Mapping[str, TensorEntry],
    left: Iterable[str],
    loaded: Iterable[str],
    decoded: Iterable[str],
) -> None:
    """Make sure that nothing in a file says that other weights are codes.

    Args:
        path: for the message.
        entries: of the file.
        left: its names that the model does not have, and that are no scales known to apply.
        loaded: those that are taken as they are.
        decoded: those that are decoded by their scales.

    Raises:
        CheckpointError: something does.
    """
    left = list(left)
    packed = next((name for name in left if _is_packed(name, entries.get(name))), None)
    if packed is not None:
        raise CheckpointError(
            f"{path} has packed weights ({packed!r}), as GPTQ, AWQ, bitsandbytes and other ways to "
            f"store a model in few bits write them: codes are no weights. {REMEDY}"
        )
    unknown = [n for n in left if _SCALE.search(n) and not _ACTIVATIONS.search(n)]
    codes = next((name for name in loaded if entries[name].dtype in _CODES), None)
    if codes is not None and unknown:
        raise _unknown(path, codes, entries[codes].dtype, unknown[0])
    for name in decoded:
        for beside in unknown:
            if beside.startswith((f"{name}_", f"{name}.")):
                raise _unknown(path, name, entries[name].dtype, beside)


def _unknown(path: Path, name: str, dtype: str, beside: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {name!r} is {dtype}, and {beside!r} beside it may say how to decode it, in a "
        f"form that is not known here. {REMEDY}"
    )


def _is_packed(name: str, entry: TensorEntry | None) -> bool:
    integers = entry is not None and entry.dtype[0] in "IU"
    return bool(_OF_PACKED.search(name) or (integers and _PACKED.search(name)))
