"""States of datasets as bytes: plain values, and no pickle.

Tuples stay tuples, keys what they were, and integers may be of any size, as in the states of random
generators. Ways in: `has_state`, `packed`, `unpacked`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

_TUPLE, _PAIRS, _BIG, _ARRAY, _TENSOR, _SCALAR, _BYTES = range(1, 8)

_NOT_OF_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of tensors that numpy has not; a new one comes last."""


def has_state(owner: Any) -> bool:
    """Whether a dataset, or its iterator, says where it is and can be put there."""
    return callable(getattr(owner, "state_dict", None)) and callable(
        getattr(owner, "load_state_dict", None)
    )


def packed(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        TypeError: something in it is no plain value, array or tensor.
    """
    return msgspec.msgpack.encode(_plain(value))


def unpacked(body: bytes) -> Any:
    """The inverse of `packed`."""
    return msgspec.msgpack.decode(body, ext_hook=_restored)


def _plain(value: Any) -> Any:
    if isinstance(value, np.str_ | np.bytes_):
        return value.item()
    if isinstance(value, np.generic):
        return _ext(_SCALAR, _plain(np.asarray(value)))
    if value is None or isinstance(value, bool | float | str | bytes):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < 64 else _ext(_BIG, str(value))
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if type(value) is tuple:
        return _ext(_TUPLE, [_plain(each) for each in value])
    if isinstance(value, dict):
        return _ext(_PAIRS, [[_plain(each), _plain(of)] for each, of in value.items()])
    if isinstance(value, np.ndarray) and not (value.dtype.hasobject or value.dtype.names):
        return _ext(_ARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, torch.Tensor) and value.dtype in _NOT_OF_NUMPY:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _ext(_BYTES, [_NOT_OF_NUMPY.index(value.dtype), list(value.shape), _plain(flat)])
    if isinstance(value, torch.Tensor):
        return _ext(_TENSOR, _plain(value.detach().cpu().numpy()))
    raise TypeError(f"{type(value).__name__} in a state")


def _ext(kind: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(value))


def _restored(kind: int, body: memoryview) -> Any:
    value = unpacked(bytes(body))
    if kind == _TUPLE:
        return tuple(value)
    if kind == _PAIRS:
        return dict(value)
    if kind == _BIG:
        return int(value)
    if kind == _SCALAR:
        return value[()]
    if kind == _BYTES:
        number, shape, flat = value
        return flat.view(_NOT_OF_NUMPY[number]).reshape(shape)
    if kind == _ARRAY:
        dtype, shape, data = value
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
    return torch.from_numpy(value)
