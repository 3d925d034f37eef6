"""Whole numbers with the distribution of a rounded Gaussian, drawn from a key.

`round(x)` of an exactly Gaussian x: the nearest whole number. It is computed in float64 with a
bound on the error, by the method of Box and Muller. Where the error could change the result, which
happens about once in ten million numbers, the number is computed again with as many bits as it
takes. So no floating-point rounding shows in what is drawn (Mironov 2012), and each machine draws
the same, whatever its logarithm rounds to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instep.privacy.kernels import gaussian_pairs
from instep.privacy.keys import Words, derived, words

Whole = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

BLOCK = 1 << 14
"""Numbers drawn at a time, so that they stay in the cache of a core; even."""

_USUAL = 2.0**-12
"""By how much a uniform number is above 0 and below 1 as a rule."""

_USUAL_ERROR = 2.0**-43
"""More than the error of such a number's radius times a cosine, by the bound of `_error`."""

_RELATIVE = 2.0**-46
"""More than the relative error of a logarithm, root, cosine and their product in float64, and of
an angle that was rounded to it."""

_LEAST_BITS = 64
"""By how many bits the two uniform numbers are known before more are asked for."""


def rounded_gaussian(key: bytes, sigma: float, first: int, count: int) -> Whole:
    """Numbers [first, first + count) of a key's noise.

    Args:
        key: of 256 bits; nothing else may be drawn from it.
        sigma: standard deviation before rounding; above 0, and below 2**40.
        first: an even number.
        count: how many.

    Returns:
        [count] int64; the same numbers however they are asked for in parts.
    """
    assert first % 2 == 0, "numbers are drawn in pairs"
    found = np.empty(count, np.int64)
    for at in range(0, count, BLOCK):
        some = min(BLOCK, count - at)
        found[at : at + some] = _block(key, sigma, first + at, some)
    return found


def _block(key: bytes, sigma: float, first: int, count: int) -> Whole:
    pairs = -(-count // 2)
    drawn = words(key, first, 2 * pairs)
    exact, error = _approximate(drawn, sigma)
    found = np.rint(exact)
    whole = found.astype(np.int64)
    exact -= found
    for place in np.flatnonzero(np.abs(exact, out=exact) + error >= 0.5).tolist():
        pair = place // 2
        two = int(drawn[2 * pair]), int(drawn[2 * pair + 1])
        whole[place] = _exactly(key, sigma, first + place, *two)
    return whole[:count]


def _approximate(drawn: Words, sigma: float) -> tuple[Floats, Floats]:
    """Numbers before they are rounded, [2 * pairs], and how far from them the true ones may be."""
    # a word stands for all numbers from it to the next: its middle is at most half a word away
    found, pairs = np.empty(len(drawn)), len(drawn) // 2
    uniform, radius = np.empty(pairs), np.empty(pairs)
    gaussian_pairs(drawn, sigma, uniform, radius, found)
    error = np.full(len(found), sigma * _USUAL_ERROR)
    rare = np.flatnonzero(np.abs(uniform - 0.5) > 0.5 - _USUAL)
    error[2 * rare] = error[2 * rare + 1] = sigma * _error(uniform[rare], radius[rare])
    return found, error


def _error(uniform: Floats, radius: Floats) -> Floats:
    """How far radius times a cosine may be from the truth, [count].

    The radius changes by d(uniform) / (uniform * radius), and near 1 by the root of what is left.
    """
    unknown = 2.0**-64 / uniform + 2.0**-52
    slope = np.minimum(2 * unknown / np.maximum(radius, 2.0**-30), np.sqrt(2 * unknown))
    found: Floats = (radius + 1.0) * _RELATIVE + slope
    return found


def _exactly(key: bytes, sigma: float, place: int, first: int, second: int) -> int:
    """One number, computed with as many bits as it takes.

    Args:
        key, sigma: as above.
        place: of the number in the noise.
        first, second: the words of its pair, which are the first bits of two uniform numbers.
    """
    from mpmath import iv, mp  # torch has brought it

    more = words(derived(key, "further bits", place // 2), 0, 64)
    bits = _LEAST_BITS
    for at in range(0, len(more), 2):
        with mp.workprec(2 * bits + 64):
            iv.prec = 2 * bits + 64
            width = iv.mpf(2) ** -bits
            uniform = (iv.mpf(first) + iv.mpf([0, 1])) * width
            angle = (iv.mpf(second) + iv.mpf([0, 1])) * width * 2 * iv.pi
            radius = iv.sqrt(-2 * iv.log(uniform)) if first and first + 1 < 1 << bits else None
            if radius is not None:
                number = radius * (iv.sin(angle) if place % 2 else iv.cos(angle))
                number = number * iv.mpf(sigma)
                low, high = int(mp.nint(number.a)), int(mp.nint(number.b))
                if low == high:
                    return low
        first, second = first << 64 | int(more[at]), second << 64 | int(more[at + 1])
        bits += 64
    raise AssertionError("a number so near to the middle of two whole numbers has no probability")
