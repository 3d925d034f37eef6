"""Numbers: of Python, of numpy, and those in small arrays and tensors."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LONG = 50_000
"""Numbers of which a copy is made at most."""
_WHOLE = torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
_REAL = torch.float16, torch.bfloat16, torch.float32, torch.float64
_COMPLEX = torch.complex64, torch.complex128
_NUMBERS = bool, int, float, complex, Decimal, Fraction
_IN_ORDER, _MOST = 1 << 24, 1 << 28
"""Bytes of an array of which a checksum is taken that knows their order, and a sum at most."""
_FEW = 300
"""Items of a list that are looked at."""
_ROUNDED = 1e-5
"""Relative: what the order of a GPU's sums may change."""


def alike(one: Any, other: Any) -> bool:
    """Compare two numbers, arrays or tensors, up to the order of a GPU's sums."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            return False
        near = _ROUNDED if one.is_cuda else 0.0
        with torch.no_grad():
            return torch.allclose(one, other, rtol=near, atol=0.0, equal_nan=True)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def is_number(value: Any) -> bool:
    """Whether it is one, of Python or numpy."""
    return type(value) in _NUMBERS or isinstance(value, (np.number, np.bool_))


def numeric(value: Any) -> bool:
    """Whether it is a number, or a small array or tensor."""
    return is_number(value) or is_small_tensor(value) or is_small_array(value)


def numbers_in(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Find numbers, small arrays and tensors of any size in a list, tuple, dict or module.

    Args:
        path: the name of `value`.
    """
    if numeric(value) or is_large_tensor(value):
        yield path, value
    elif issubclass(type(value), nn.Module):
        for each in (value.named_parameters(), value.named_buffers()):
            yield from ((f"{path}.{name}", own) for name, own in each if is_large_tensor(own))
    elif type(value) in (list, tuple, dict) and len(value) <= _FEW:
        for key, each in value.items() if type(value) is dict else enumerate(value):
            if numeric(each) or is_large_tensor(each):
                yield f"{path}[{key!r}]", each


def sample_of(tensor: Tensor) -> Tensor:
    """Copy every so many elements of a large tensor: other sizes give other numbers of them."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // LONG)].clone()


def _is_dense(value: Any) -> bool:
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.dtype in (*_WHOLE, *_REAL, *_COMPLEX)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested)
        # its memory is its own, and there
        and value.untyped_storage().nbytes() >= value.numel() * value.element_size()
    )


def is_small_tensor(value: Any) -> bool:
    """Whether a tensor can be copied."""
    return _is_dense(value) and value.numel() <= LONG


def is_large_tensor(value: Any) -> bool:
    """Whether it is one, of which autograd knows how often it was written to."""
    return _is_dense(value) and not value.is_inference()


def is_small_array(value: Any) -> bool:
    """Whether an array of numpy's can be copied, and written to."""
    return _is_written(value) and value.size <= LONG


def is_large_array(value: Any) -> bool:
    """Whether an array of numpy's can be written to, and read fast."""
    return _is_written(value) and value.flags.forc and type(value) is not np.memmap


def _is_written(value: Any) -> bool:
    return (
        issubclass(type(value), np.ndarray)
        and value.dtype.kind in "biufc"
        and bool(value.flags.writeable)
    )


def sum_of_bytes(array: np.ndarray) -> tuple[Any, ...]:
    """Sum up what an array has, so that a number of it that is written to shows.

    Args:
        array: as `is_large_array`.
    """
    flat = array.ravel("K").view(np.uint8)
    whole = flat[: min(len(flat), _MOST) // 8 * 8].view(np.uint64)
    parts = zlib.crc32(flat[:_IN_ORDER].data), int(np.add.reduce(whole)), flat[-8:].tobytes()
    return array.shape, array.dtype.str, *parts
