"""Loops that choose the largest values of each chunk, and pack where they are, compiled by Numba.

The bytes are those of the operations in torch (`top_k.py`). A chunk fits into the processor's first
cache, so that it may be gone over several times: values at least as large as a threshold are
counted until there are not many more than wanted, and only these are looked at one by one. The
threshold of one chunk is where the search of the next one begins; the choice does not depend on it.

All take contiguous arrays: `values`, `left` and `total` [chunks * width] float32, `scales` [chunks]
bfloat16 as whole numbers, `levels` [chunks * chosen], `places` [chunks * bytes].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy import float32, int8, int32, int64, rint, uint8, uint16, uint64

from instep.comm.codecs.kernels import SMALLEST
from instep.comm.compiled import compiled

TOP = 127
"""The largest level."""

MAGNITUDE = 0x7FFFFFFF
"""Of a float32, seen as a whole number; magnitudes are in the order of these numbers."""

LARGEST_SCALE = float(
    (np.array([np.finfo(float32).max / TOP], float32).view(int32) & ~0xFFFF).view(float32)[0]
)
"""In bfloat16; a larger one, times `TOP`, would be infinite."""

_TOP, _TINY, _ONE, _NAN = float32(TOP), float32(SMALLEST), float32(1.0), float32(np.nan)
_MAGNITUDE, _INFINITE, _CAP = int32(MAGNITUDE), int32(0x7F800000), float32(LARGEST_SCALE)
_BYTE_NUMBERS = uint64(0x0001020304050607)  # times a 1 in byte k: k in the highest byte
_NEAR = 1 << 18  # the distance of two magnitudes that differ by about 3 %
_FLOATS, _BITS, _BYTES, _SHORTS = "float32[::1]", "int32[::1]", "uint8[::1]", "uint16[::1]"


@njit(inline="always")
def _count(bits: Any, least: Any) -> Any:
    """How many magnitudes are at least `least`."""
    found = int32(0)
    for i in range(bits.size):
        found += int32((bits[i] & _MAGNITUDE) >= least)
    return found


@njit
def _search(bits: Any, wanted: Any, most: Any, guess: Any) -> Any:
    """A threshold that at least `wanted` magnitudes reach: if possible `most` of them, at most,
    and else the largest one. `guess`: where to begin."""
    low, high = int64(0), int64(1) << 31  # enough reach `low`, and too few reach `high`
    step, middle = int64(4 * _NEAR), min(max(int64(guess), int64(1)), high - 1)
    while high - low > 1:
        found = _count(bits, int32(middle))
        if found >= wanted:
            low = middle
            if found <= most:
                break
        else:
            high = middle
        if low == 0:
            middle = max(high - step, int64(1))
        elif high == int64(1) << 31:
            middle = min(low + step, high - 1)
        else:
            middle = (low + high) // 2
        step *= 2
    return int32(low)


@njit
def _mark(bits: Any, least: Any, marks: Any) -> Any:
    """A 1 for each magnitude of at least `least`, else a 0; returns how many there are."""
    found = int32(0)
    for i in range(bits.size):
        large = (bits[i] & _MAGNITUDE) >= least
        marks[i] = uint8(large)
        found += int32(large)
    return found


@njit
def _gather(bits: Any, eights: Any, some: Any, magnitudes: Any, where: Any) -> None:
    """Collect the magnitudes that are marked, in their order.

    `eights` are the marks, eight in a number, and zeros after them; `some` has room for as many.
    """
    count = uint64(0)
    for n in range(uint64(eights.size)):
        some[count] = n  # without a branch, which would often be wrong
        count += uint64(eights[n] != uint64(0))
    found = uint64(0)
    for k in range(count):
        rest = eights[some[k]]
        while rest:
            lowest = rest & (~rest + uint64(1))
            at = some[k] * uint64(8) + (lowest * _BYTE_NUMBERS >> uint64(56))
            magnitudes[found] = bits[at] & _MAGNITUDE
            where[found] = int64(at)
            found += uint64(1)
            rest ^= lowest


@njit
def _keep_largest(magnitudes: Any, where: Any, wanted: Any, guess: Any) -> None:
    """Bring the `wanted` largest to the front of `where`, in their order; of equals the first."""
    least = _search(magnitudes, wanted, wanted, guess)
    ties: Any = int64(wanted) - _count(magnitudes, least + int32(1))
    kept = 0
    for i in range(magnitudes.size):
        if magnitudes[i] == least:
            ties -= 1
        if magnitudes[i] > least or (magnitudes[i] == least and ties >= 0):
            where[kept] = where[i]
            kept += 1


@njit
def _pack(where: Any, low: Any, edge: Any, packed: Any) -> None:
    """Write places that ascend: the `low` lowest bits of each in `edge` bytes, then the rest in
    unary, as a 1 for each place after as many 0 as it is further on."""
    packed[:] = uint8(0)
    mask = (int64(1) << low) - 1
    waiting, bits, at = int64(0), int64(0), 0
    for i in range(where.size):
        waiting |= (where[i] & mask) << bits
        bits += low
        while bits >= 8:
            packed[at] = uint8(waiting & 255)
            waiting >>= 8
            bits -= 8
            at += 1
        one = (where[i] >> low) + i
        packed[edge + (one >> 3)] |= uint8(1 << (one & 7))
    if bits:
        packed[at] = uint8(waiting)


@njit
def _read(packed: Any, low: Any, edge: Any, where: Any) -> None:
    """The reverse of `_pack`."""
    mask = (int64(1) << low) - 1
    waiting, bits, at, done = int64(0), int64(0), 0, 0
    for place in range(edge, packed.size):
        byte = int32(packed[place])
        for k in range(8):
            if (byte >> k) & 1 and done < where.size:
                while bits < low:
                    waiting |= int64(packed[at]) << bits
                    bits += 8
                    at += 1
                where[done] = ((8 * (place - edge) + k - done) << low) + (waiting & mask)
                waiting >>= low
                bits -= low
                done += 1


@njit(inline="always")
def _upwards(scale: Any) -> Any:
    """To bfloat16, away from zero."""
    bits = float32(scale).view(int32)
    return int32((bits + int32(0xFFFF)) & int32(-0x10000)).view(float32)


@compiled(_FLOATS, _BITS, "int64", "int64", "int64", _SHORTS, "int8[::1]", _BYTES, _FLOATS)
def encode_largest(
    values: Any,
    bits: Any,
    width: int,
    chosen: int,
    low: int,
    scales: Any,
    levels: Any,
    places: Any,
    left: Any,
) -> None:
    """Choose and pack. `bits`: the values as integers; `left` may be empty."""
    each, edge = places.size // scales.size, (chosen * low + 7) // 8
    most = max(2 * chosen, chosen + 16)
    magnitudes, where = np.empty(width, int32), np.empty(width, int64)
    marks, some = np.zeros((width + 7) // 8 * 8, uint8), np.empty((width + 7) // 8 + 1, uint64)
    guess = int64(0x3F800000)
    for number in range(scales.size):
        first = number * width
        given, seen = values[first : first + width], bits[first : first + width]
        sent = levels[number * chosen : (number + 1) * chosen]
        least = int32(min(max(guess, int64(0)), int64(_MAGNITUDE)))
        found = int64(_mark(seen, least, marks))
        if not chosen <= found <= most:
            least = _search(seen, chosen, most, guess)
            found = int64(_mark(seen, least, marks))
        _gather(seen, marks.view(uint64), some, magnitudes, where)
        guess = int64(least) + (_NEAR if 2 * found > 3 * chosen else 0)
        guess -= _NEAR if 4 * found < 5 * chosen else 0
        if found > chosen:
            _keep_largest(magnitudes[:found], where[:found], chosen, int64(least) + _NEAR)
        picked = where[:chosen]
        _pack(picked, low, edge, places[number * each : (number + 1) * each])
        largest = int32(0)
        for i in range(chosen):
            largest = max(largest, seen[picked[i]] & _MAGNITUDE)
        if largest >= _INFINITE:
            scales[number] = uint16(0x7FC0)
            sent[:] = int8(0)
            left[first : first + width] = 0.0
            continue
        scale = int32(largest).view(float32) / _TOP
        scale = float32(min(_upwards(_ONE if scale < _TINY else scale), _CAP))
        scales[number] = uint16(float32(scale).view(int32) >> 16)
        for i in range(chosen):
            level = min(max(rint(given[picked[i]] / scale), -_TOP), _TOP)
            sent[i] = int8(int32(level))
        if left.size:
            rest = left[first : first + width]
            rest[:] = given
            for i in range(chosen):
                rest[picked[i]] -= float32(sent[i]) * scale


@compiled(_FLOATS, "int64", "int64", "int64", _SHORTS, "int8[::1]", _BYTES, "float32")
def add_chosen(
    total: Any,
    width: int,
    chosen: int,
    low: int,
    scales: Any,
    levels: Any,
    places: Any,
    weight: float,
) -> None:
    """Add `weight` times level times scale, where each belongs."""
    each, edge = places.size // scales.size, (chosen * low + 7) // 8
    where = np.zeros(chosen, int64)
    for number in range(scales.size):
        sums = total[number * width : (number + 1) * width]
        packed = places[number * each : (number + 1) * each]
        scale = int32(int32(scales[number]) << 16).view(float32)
        if np.isnan(scale):
            for i in range(width):
                sums[i] += scale
            continue
        sent = levels[number * chosen : (number + 1) * chosen]
        _read(packed, low, edge, where)
        for i in range(chosen):
            if where[i] < width:
                sums[where[i]] += weight * float32(sent[i]) * scale


@compiled("int64[::1]", "int64", "int64", _BYTES)
def pack_places(where: Any, low: int, edge: int, packed: Any) -> None:
    """As `places.packed`, of one row; the low bits take `edge` bytes."""
    _pack(where, low, edge, packed)


@compiled(_BYTES, "int64", "int64", "int64[::1]")
def read_places(packed: Any, low: int, edge: int, where: Any) -> None:
    """As `places.unpacked`, of one row."""
    _read(packed, low, edge, where)
