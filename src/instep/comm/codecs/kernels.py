"""Loops over float32 values on the CPU, compiled by Numba: each value is read and written once.

Eager torch goes over the values once for each operation, which takes several times as long. What
is compiled is kept in files, so only the first run of an installation compiles (about 5 s). The
bytes are those of the operations in torch (`blocks.py`), which run on CUDA.

Blocks are cut out as slices: with indices into the whole, LLVM makes no vectors of the loops.
All take contiguous arrays: `values`, `left` and `total` [n] float32, `scales` [ceil(n / block)]
float32, or the bits of bfloat16. Of a block with a value that is not finite, the scale is NaN, and
nothing is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy import float32, int8, int32, rint, uint8, uint32

from instep.comm.compiled import compiled

SMALLEST = float(np.finfo(float32).tiny)
"""Scales below it have lost bits of their precision, and may be flushed to zero."""

_TINY, _ONE, _NAN = float32(SMALLEST), float32(1.0), float32(np.nan)
_INFINITE = int32(0x7F800000)
_MAGNITUDE = int32(0x7FFFFFFF)
_FLOATS, _BITS, _BYTES = "float32[::1]", "int32[::1]", "uint8[::1]"
_SHORT = "uint16[::1]"
"""Bits of bfloat16."""


@njit(inline="always")
def _scale_of(bits: Any, top: Any, largest_scale: Any) -> Any:
    """The distance of two levels, where the largest magnitude is the level `top`; or NaN."""
    largest = int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & _MAGNITUDE)
    if largest >= _INFINITE:
        return _NAN
    scale = int32(largest).view(float32) / top
    return min(_ONE if scale < _TINY else scale, largest_scale)


@compiled(_FLOATS, _BITS, "int64", "float32", "float32", _FLOATS, "int8[::1]", _FLOATS)
def encode_bytes(
    values: Any, bits: Any, block: int, top: float, largest: float, scales: Any, out: Any, left: Any
) -> None:
    """Levels from -`top` to `top`, one in a byte. `bits`: the values, seen as integers; `left` may
    be empty."""
    for number in range(scales.size):
        first, stop = number * block, min((number + 1) * block, values.size)
        given, levels = values[first:stop], out[first:stop]
        scale = scales[number] = _scale_of(bits[first:stop], top, largest)
        if np.isnan(scale):
            levels[:] = 0
            left[first:stop] = 0.0
        elif left.size:
            rest = left[first:stop]
            for i in range(given.size):
                level = rint(given[i] / scale)
                levels[i] = int8(int32(level))
                rest[i] = given[i] - level * scale
        else:
            for i in range(given.size):
                levels[i] = int8(int32(rint(given[i] / scale)))


@njit(inline="always")
def _rounded(value: Any, scale: Any, place: Any, low: Any, high: Any, top: Any) -> Any:
    """The level below or above a value, drawn so that the mean is the value.

    Drawn are 16 bits of a hash of the place and the key (constants of "lowbias32" by C. Wellons).
    They stand for the middles of 65,536 equal parts, so that -`top` and `top` stay what they are.
    """
    x = uint32(uint32(place) ^ low)
    x = uint32(uint32(x ^ (x >> uint32(16))) * uint32(0x7FEB352D))
    x = uint32(uint32(x ^ (x >> uint32(15)) ^ high) * uint32(0x846CA68B))
    part = float32(int32(x >> uint32(16))) + float32(0.5)
    level = np.floor(value / scale + part * float32(2.0**-16))
    return min(max(level, -top), top)


@compiled(
    *(_FLOATS, _BITS, "int64", "float32", "float32"),
    *(_FLOATS, "int8[::1]", _FLOATS, "uint32", "uint32"),
)
def draw_bytes(
    values: Any, bits: Any, block: int, top: float, largest: float,
    scales: Any, out: Any, left: Any, low: int, high: int,
) -> None:  # fmt: skip
    """As `encode_bytes`, rounded at random by the two halves of a key."""
    for number in range(scales.size):
        first, stop = number * block, min((number + 1) * block, values.size)
        given, levels = values[first:stop], out[first:stop]
        scale = scales[number] = _scale_of(bits[first:stop], top, largest)
        if np.isnan(scale):
            levels[:] = 0
            left[first:stop] = 0.0
            continue
        for i in range(given.size):
            levels[i] = int8(int32(_rounded(given[i], scale, first + i, low, high, top)))
        if left.size:
            rest = left[first:stop]
            for i in range(given.size):
                rest[i] = given[i] - float32(levels[i]) * scale


@compiled(_FLOATS, "int8[::1]", _FLOATS, "int64", "float32")
def add_bytes(total: Any, levels: Any, scales: Any, block: int, weight: float) -> None:
    """Add `weight` times level times scale."""
    for number in range(scales.size):
        first, stop = number * block, min((number + 1) * block, total.size)
        sums, given, scale = total[first:stop], levels[first:stop], scales[number]
        for i in range(sums.size):
            sums[i] += weight * float32(given[i]) * scale


@njit(inline="always")
def _from_bfloat16(bits: Any) -> Any:
    return uint32(uint32(bits) << uint32(16)).view(float32)


@njit(inline="always")
def _short_scale_of(bits: Any, top: Any, largest_scale: Any) -> Any:
    """As `_scale_of`, rounded up to bfloat16: its bits."""
    scale = _scale_of(bits, top, float32(np.inf))
    short = uint32(uint32(float32(scale).view(uint32) + uint32(0xFFFF)) >> uint32(16))
    most = uint32(float32(largest_scale).view(uint32) >> uint32(16))
    return short if np.isnan(scale) else min(short, most)


@compiled(_FLOATS, _BITS, "int64", "float32", "float32", _SHORT, _BYTES, _FLOATS)
def encode_halves(
    values: Any, bits: Any, block: int, top: float, largest: float, scales: Any, out: Any, left: Any
) -> None:
    """Levels from -`top` to `top`, two in a byte: 8 more than the level, the first one low."""
    for number in range(scales.size):
        first, stop = number * block, min((number + 1) * block, values.size)
        given = values[first:stop]
        pairs = out[first // 2 : (stop + 1) // 2]
        scales[number] = _short_scale_of(bits[first:stop], top, largest)
        scale = _from_bfloat16(scales[number])
        if np.isnan(scale):
            pairs[:] = uint8(0x88)
            left[first:stop] = 0.0
            continue
        for i in range(given.size // 2):
            low, high = rint(given[2 * i] / scale), rint(given[2 * i + 1] / scale)
            pairs[i] = uint8((int32(low) + 8) | ((int32(high) + 8) << 4))
        if given.size % 2:
            pairs[given.size // 2] = uint8((int32(rint(given[-1] / scale)) + 8) | 0x80)
        if left.size:
            rest = left[first:stop]
            for i in range(given.size):
                rest[i] = given[i] - rint(given[i] / scale) * scale


@compiled(
    *(_FLOATS, _BITS, "int64", "float32", "float32"),
    *(_SHORT, _BYTES, _FLOATS, "uint32", "uint32"),
)
def draw_halves(
    values: Any, bits: Any, block: int, top: float, largest: float,
    scales: Any, out: Any, left: Any, low: int, high: int,
) -> None:  # fmt: skip
    """As `encode_halves`, rounded at random by the two halves of a key."""
    for number in range(scales.size):
        first, stop = number * block, min((number + 1) * block, values.size)
        given = values[first:stop]
        pairs = out[first // 2 : (stop + 1) // 2]
        scales[number] = _short_scale_of(bits[first:stop], top, largest)
        scale = _from_bfloat16(scales[number])
        if np.isnan(scale):
            pairs[:] = uint8(0x88)
            left[first:stop] = 0.0
            continue
        for i in range(given.size // 2):
            one = _rounded(given[2 * i], scale, first + 2 * i, low, high, top)
            other = _rounded(given[2 * i + 1], scale, first + 2 * i + 1, low, high, top)
            pairs[i] = uint8((int32(one) + 8) | ((int32(other) + 8) << 4))
        if given.size % 2:
            one = _rounded(given[-1], scale, stop - 1, low, high, top)
            pairs[given.size // 2] = uint8((int32(one) + 8) | 0x80)
        if left.size:
            rest = left[first:stop]
            for i in range(given.size):
                rest[i] = given[i] - _rounded(given[i], scale, first + i, low, high, top) * scale


@compiled(_FLOATS, _BYTES, _SHORT, "int64", "float32")
def add_halves(total: Any, levels: Any, scales: Any, block: int, weight: float) -> None:
    """Add `weight` times level times scale."""
    for number in range(scales.size):
        first, stop = number * block, min((number + 1) * block, total.size)
        sums, scale = total[first:stop], _from_bfloat16(scales[number])
        pairs = levels[first // 2 : (stop + 1) // 2]
        for i in range(sums.size // 2):
            pair = int32(pairs[i])
            sums[2 * i] += weight * float32((pair & 15) - 8) * scale
            sums[2 * i + 1] += weight * float32((pair >> 4) - 8) * scale
        if sums.size % 2:
            sums[-1] += weight * float32((int32(pairs[-1]) & 15) - 8) * scale


@njit(inline="always")
def _mean_of(values: Any) -> Any:
    """The mean magnitude, or NaN; in sixteen sums, which the processor adds side by side."""
    sums = np.zeros(16)
    whole = values.size // 16
    for i in range(whole):
        part = values[16 * i : 16 * i + 16]
        for k in range(16):
            sums[k] += abs(np.float64(part[k]))
    for k in range(values.size - 16 * whole):
        sums[k] += abs(np.float64(values[16 * whole + k]))
    mean = sums.sum() / values.size
    if not np.isfinite(mean):
        return _NAN
    return float32(mean) if mean >= SMALLEST else float32(0.0)


@compiled(_FLOATS, "int64", _FLOATS, _BYTES, _FLOATS)
def encode_signs(values: Any, block: int, scales: Any, out: Any, left: Any) -> None:
    """Eight signs in a byte, the first one lowest: 1 where a value is negative."""
    for number in range(scales.size):
        first, stop = number * block, min((number + 1) * block, values.size)
        given = values[first:stop]
        packed = out[first // 8 : (stop + 7) // 8]
        scale = scales[number] = _mean_of(given)
        if np.isnan(scale):
            packed[:] = uint8(0)
            left[first:stop] = 0.0
            continue
        for place in range(packed.size):
            eight = given[8 * place : min(8 * place + 8, given.size)]
            byte = int32(0)
            for k in range(eight.size):
                byte |= int32(eight[k] < 0) << k
            packed[place] = uint8(byte)
        if left.size:
            rest = left[first:stop]
            for i in range(given.size):
                rest[i] = given[i] + (scale if given[i] < 0 else -scale)


@compiled(_FLOATS, _BYTES, _FLOATS, "int64", "float32")
def add_signs(total: Any, signs: Any, scales: Any, block: int, weight: float) -> None:
    """Add `weight` times the scale, with its sign."""
    for number in range(scales.size):
        first, stop = number * block, min((number + 1) * block, total.size)
        sums, step = total[first:stop], weight * scales[number]
        packed = signs[first // 8 : (stop + 7) // 8]
        for place in range(packed.size):
            eight = sums[8 * place : min(8 * place + 8, sums.size)]
            byte = int32(packed[place])
            for k in range(eight.size):
                eight[k] += -step if (byte >> k) & 1 else step


@compiled("uint32[::1]", _FLOATS, "uint16[::1]", _FLOATS)
def encode_bfloat16(bits: Any, values: Any, out: Any, left: Any) -> None:
    """To the nearest, and to the largest instead of infinity. `bits`: the values as integers."""
    for i in range(out.size):
        near = (bits[i] + uint32(0x7FFF) + ((bits[i] >> uint32(16)) & uint32(1))) >> uint32(16)
        overflown = (near & uint32(0x7FFF)) >= uint32(0x7F80)
        near = (near & uint32(0x8000)) | uint32(0x7F7F) if overflown else near
        finite = (bits[i] & uint32(0x7FFFFFFF)) < uint32(0x7F800000)
        same = (bits[i] >> uint32(16)) | uint32(0x0040 if np.isnan(values[i]) else 0)
        out[i] = near if finite else same
    for i in range(left.size):
        finite = (bits[i] & uint32(0x7FFFFFFF)) < uint32(0x7F800000)
        left[i] = values[i] - _from_bfloat16(out[i]) if finite else float32(0.0)


@compiled(_FLOATS, "uint16[::1]", "float32")
def add_bfloat16(total: Any, given: Any, weight: float) -> None:
    """Add `weight` times each."""
    for i in range(total.size):
        total[i] += weight * _from_bfloat16(given[i])


_HALF = float32(0.5)
_HALF_BITS = uint32(0x3F000000)
_LEAST16 = uint32(113 << 23)  # 2^-14, the smallest float16 with all its bits of precision
_LEAST16_VALUE = float32(2.0**-14)
_SIGN, _UNSIGNED, _INFINITE_BITS = uint32(0x80000000), uint32(0x7FFFFFFF), uint32(0x7F800000)


@njit(inline="always")
def _to_float16(bits: Any) -> Any:
    """The nearest float16, as its bits; the largest one instead of infinity."""
    size = uint32(bits & _UNSIGNED)
    # a sum with 0.5 has the bits of a subnormal float16 as its lowest, rounded by the processor
    subnormal = uint32(float32(size.view(float32) + _HALF).view(uint32) - _HALF_BITS)
    # another bias of the exponent, and half a unit of the last place, or a little less
    odd = uint32(size >> uint32(13)) & uint32(1)
    normal = uint32(uint32(size + uint32(0xC8000FFF)) + odd) >> uint32(13)
    near = min(uint32(subnormal if size < _LEAST16 else normal), uint32(0x7BFF))
    strange = uint32(0x7E00) if size > _INFINITE_BITS else uint32(0x7C00)
    found = uint32(strange if size >= _INFINITE_BITS else near)
    return uint32(uint32(bits & _SIGN) >> uint32(16)) | found


@njit(inline="always")
def _from_float16(half: Any) -> Any:
    bits = uint32(half)
    size = uint32(uint32(bits & uint32(0x7FFF)) << uint32(13))
    subnormal = float32(uint32(size + _LEAST16).view(float32) - _LEAST16_VALUE).view(uint32)
    normal = uint32(size + uint32(112 << 23))
    strange = uint32(size + uint32(224 << 23))
    found = uint32(strange if size >= uint32(0x0F800000) else normal)
    found = uint32(subnormal if size < uint32(0x00800000) else found)
    return uint32(found | uint32(uint32(bits & uint32(0x8000)) << uint32(16))).view(float32)


@compiled("uint32[::1]", _FLOATS, "uint16[::1]", _FLOATS)
def encode_float16(bits: Any, values: Any, out: Any, left: Any) -> None:
    """To the nearest, and to the largest instead of infinity. `bits`: the values as integers."""
    for i in range(out.size):
        out[i] = _to_float16(bits[i])
    for i in range(left.size):
        finite = (bits[i] & ~_SIGN) < _INFINITE_BITS
        left[i] = values[i] - _from_float16(out[i]) if finite else float32(0.0)


@compiled(_FLOATS, "uint16[::1]", "float32")
def add_float16(total: Any, given: Any, weight: float) -> None:
    """Add `weight` times each."""
    for i in range(total.size):
        total[i] += weight * _from_float16(given[i])
