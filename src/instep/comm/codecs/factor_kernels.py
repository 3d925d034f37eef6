"""Loops over the factors of matrices, compiled by Numba, with the same bits on every processor.

Each sum has a fixed order, and products are rounded before they are added, as the IEEE has it. A
library for matrix products may do otherwise on another processor or with other threads, and
replicas must not differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from instep.comm.compiled import compiled

_ROWS = "float32[:, ::1]"
_LANES = 8
_SMALL = 1e-6  # what is left of a row, of its length, that is nothing but rounding


@njit
def _dot(one: Any, other: Any) -> Any:
    """In as many sums as the processor may add side by side."""
    sums = np.zeros(_LANES)
    whole = one.size // _LANES
    for i in range(whole):
        first, second = one[i * _LANES : (i + 1) * _LANES], other[i * _LANES : (i + 1) * _LANES]
        for k in range(_LANES):
            sums[k] += first[k] * second[k]
    for k in range(one.size - whole * _LANES):
        sums[k] += one[whole * _LANES + k] * other[whole * _LANES + k]
    total = 0.0
    for k in range(_LANES):
        total += sums[k]
    return total


@compiled(_ROWS, _ROWS)
def orthonormalise(rows: Any, spare: Any) -> None:
    """Make [count, length] rows orthonormal, in their order, by Gram and Schmidt in float64.

    One that is a sum of those before it, to rounding, has the same row of `spare` in its place, or
    zeros if that has no rows. What is not finite stays so.
    """
    count, length = rows.shape
    made = np.zeros((count, length))
    for k in range(count):
        for turn in range(1 + min(spare.shape[0], 1)):
            row = made[k]
            row[:] = spare[k] if turn else rows[k]
            before = np.sqrt(_dot(row, row))
            for _ in range(2):  # the second time takes away what rounding has left
                for other in range(k):
                    along = _dot(made[other], row)
                    for i in range(length):
                        row[i] -= along * made[other, i]
            after = np.sqrt(_dot(row, row))
            if not after <= _SMALL * before:
                for i in range(length):
                    row[i] /= after
                break
            row[:] = 0.0
    for k in range(count):
        for i in range(length):
            rows[k, i] = made[k, i]


@compiled(_ROWS, _ROWS, _ROWS)
def multiply(left: Any, right: Any, out: Any) -> None:
    """The product of `left` [rank, rows], transposed, and `right` [rank, columns]."""
    for i in range(out.shape[0]):
        row = out[i]
        for j in range(row.size):
            row[j] = left[0, i] * right[0, j]
        for k in range(1, left.shape[0]):
            factor, across = left[k, i], right[k]
            for j in range(row.size):
                row[j] += factor * across[j]
