"""Loops over gradients and noise on the CPU, compiled by Numba: each number is read once.

Eager torch goes over all numbers once for each operation. What is rounded here has the bits that it
has there; norms and Gaussian numbers say how near they are. What is compiled is kept in files
(`comm/compiled.py`). All take contiguous arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy import float32, float64, int32, int64, rint, uint64

from instep.comm.compiled import compiled

_ROWS, _WHOLE = "float32[:, ::1]", "int32[::1]"
_FLOATS, _WIDE = "float32[::1]", "float64[::1]"
_BLOCK = 1 << 12
"""Numbers of a sum that stay in the cache while those of all samples are added."""


@compiled(_ROWS, _WIDE)
def squared_norms(numbers: Any, found: Any) -> None:
    """Sums of the squares of each row, in float64, in an order that is always the same."""
    for k in range(numbers.shape[0]):
        row, sums = numbers[k], np.zeros(16)  # which the processor adds side by side
        whole = row.size // 16
        for i in range(whole):
            part = row[16 * i : 16 * i + 16]
            for lane in range(16):
                sums[lane] += float64(part[lane]) * float64(part[lane])
        for lane in range(row.size - 16 * whole):
            sums[lane] += float64(row[16 * whole + lane]) * float64(row[16 * whole + lane])
        found[k] = sums.sum()


@compiled(_ROWS, _FLOATS, _WHOLE)
def add_rounded(numbers: Any, factors: Any, total: Any) -> None:
    """Multiply each row [count] by its factor, round, and add to the total [count]; rows whose
    factor is 0 count as nothing, whatever they hold."""
    for at in range(0, total.size, _BLOCK):
        sums = total[at : at + _BLOCK]
        for k in range(factors.size):
            factor, row = factors[k], numbers[k, at : at + _BLOCK]
            if factor != float32(0.0):
                for i in range(sums.size):
                    sums[i] += int32(rint(row[i] * factor))


@compiled(_ROWS, _ROWS, "int32[:, ::1]")
def add_products(sent: Any, read: Any, total: Any) -> None:
    """Multiply each number of a row of `sent` [samples, outputs] by the row of `read`
    [samples, inputs], round, and add to the total [outputs, inputs]. All are finite."""
    for output in range(total.shape[0]):
        for at in range(0, total.shape[1], _BLOCK):
            sums = total[output, at : at + _BLOCK]
            for k in range(sent.shape[0]):
                factor, row = sent[k, output], read[k, at : at + _BLOCK]
                if factor != float32(0.0):
                    for i in range(sums.size):
                        sums[i] += int32(rint(row[i] * factor))


_LOG = tuple(2.0 / n for n in range(19, 2, -2))
"""Factors of the series of log((1 + s) / (1 - s)) by s, after its first term; |s| < 0.1716, so what
is left out is below 2**-54 of it."""

_SINE = tuple((-1.0) ** (n // 2) / math.factorial(n) for n in range(15, 2, -2))
_COSINE = tuple((-1.0) ** (n // 2) / math.factorial(n) for n in range(16, 1, -2))
"""Factors of the series by powers; of angles up to pi / 4 less than 2**-54 is left out."""

_ROOT, _LOG_OF_TWO = math.sqrt(2.0), math.log(2.0)
_FRACTION, _ONE = int64((1 << 52) - 1), int64(1023 << 52)
_EIGHTH, _QUARTER, _TURN = uint64(1 << 61), uint64(62), 2.0**-62 * (math.pi / 2)


@njit(inline="always")
def _series(factors: Any, z: Any) -> Any:
    found = factors[0]
    for each in factors[1:]:
        found = found * z + each
    return found


@compiled("uint64[::1]", "float64", _WIDE, _WIDE, _WIDE)
def gaussian_pairs(words: Any, sigma: float, uniform: Any, radius: Any, found: Any) -> None:
    """Pairs of Gaussian numbers by Box and Muller, of pairs of words of 64 bits.

    The first word of a pair stands for a number between 0 and 1, which is left in `uniform`; minus
    two of its logarithms have the root `radius`. The second stands for an angle, in parts of a
    turn, whose quarter is exact as these are whole numbers. Of radius and angle, sine and cosine
    the relative errors are below 2**-49.
    """
    for i in range(radius.size):
        part = (float64(words[2 * i]) + 0.5) * 2.0**-64
        uniform[i] = part
        bits = float64(part).view(int64)
        fraction = int64((bits & _FRACTION) | _ONE).view(float64)
        above = fraction > _ROOT
        fraction = 0.5 * fraction if above else fraction
        power = float64((bits >> 52) - (1022 if above else 1023))
        s = (fraction - 1.0) / (fraction + 1.0)
        logarithm = power * _LOG_OF_TWO + (2.0 * s + s * (s * s) * _series(_LOG, s * s))
        radius[i] = np.sqrt(-2.0 * logarithm)

        quarter = uint64(uint64(words[2 * i + 1] + _EIGHTH) >> _QUARTER)
        rest = int64(words[2 * i + 1] - uint64(quarter << _QUARTER))
        x = (float64(rest) + 0.5) * _TURN
        z = x * x
        sine, cosine = x + x * z * _series(_SINE, z), 1.0 + z * _series(_COSINE, z)
        turned = (quarter & uint64(1)) != uint64(0)
        first, second = (sine, cosine) if turned else (cosine, sine)
        first = -first if quarter == uint64(1) or quarter == uint64(2) else first
        second = -second if quarter >= uint64(2) else second
        found[2 * i] = radius[i] * first * sigma
        found[2 * i + 1] = radius[i] * second * sigma


@compiled(_FLOATS, "float64", _WHOLE)
def scaled_and_rounded(numbers: Any, factor: float, found: Any) -> None:
    """Multiply in float64, and round."""
    for i in range(found.size):
        found[i] = int32(rint(float64(numbers[i]) * factor))


@compiled(_WHOLE, "float64", _FLOATS)
def unscaled(numbers: Any, unit: float, found: Any) -> None:
    """Multiply whole numbers in float64."""
    for i in range(found.size):
        found[i] = float32(float64(numbers[i]) * unit)


@compiled(_WHOLE, "int64[::1]", "float64", _FLOATS)
def unscaled_with_noise(numbers: Any, noise: Any, unit: float, found: Any) -> None:
    """Add whole numbers to whole numbers, and multiply in float64."""
    for i in range(found.size):
        found[i] = float32(float64(int64(numbers[i]) + noise[i]) * unit)
