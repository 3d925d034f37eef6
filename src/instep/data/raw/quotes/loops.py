"""The loops of `splitter.py`, compiled by Numba; imported where the parity of quotes fails."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from instep.comm.compiled import compiled
from instep.data.raw.quotes.states import CLOSED, FIELD, PLAIN, QUOTED, RECORD, STATES

_QUOTE, _LF, _CR = 34, 10, 13
_BYTES, _PLACES = "Array(uint8, 1, 'C', readonly=True)", "int64[::1]"


@njit(inline="always")
def _after(state: Any, code: Any, delimiter: Any) -> Any:
    if state == QUOTED:
        return CLOSED if code == _QUOTE else QUOTED
    if code == _QUOTE:
        return PLAIN if state == PLAIN else QUOTED
    if code == delimiter:
        return FIELD
    return RECORD if code in (_LF, _CR) else PLAIN


@compiled(_BYTES, "int64", _PLACES)
def pass_over(data: Any, delimiter: int, states: Any) -> None:
    """Replace each state by that after the data. After a few bytes there are at most two."""
    done, many = 0, True
    one, other = states[0], states[0]
    while many and done < data.size:
        many, one, other = False, _after(states[0], data[done], delimiter), np.int64(-1)
        for k in range(STATES):
            state = states[k] = _after(states[k], data[done], delimiter)
            if state != one:
                many = many or bool(other >= 0 and state != other)
                other = state
        done += 1
    if done == data.size:
        return
    is_one = states == one
    other = one if other < 0 else other
    for i in range(done, data.size):
        one, other = _after(one, data[i], delimiter), _after(other, data[i], delimiter)
    for k in range(STATES):
        states[k] = one if is_one[k] else other


@compiled(_BYTES, "int64", "boolean[::1]", *[_PLACES] * 4, returns="int64")
def split(
    data: Any, delimiter: int, ends: Any, memory: Any, starts: Any, stops: Any, fields: Any
) -> int:
    """Note each record that ends in the data; how many do. `ends`: which codes end a field."""
    state, start, count, opened = memory[0], memory[1], memory[2], memory[3]
    found = 0
    for i in range(data.size):
        code = data[i]
        if state == QUOTED:
            if code == _QUOTE:
                state = CLOSED
            continue
        if state == PLAIN and not ends[code]:
            continue
        after = _after(state, code, delimiter)
        if after == RECORD:
            if state != RECORD:
                starts[found], stops[found], fields[found] = start, i, count
                found += 1
        else:
            if state == RECORD:
                start, count = i, 1
            if after == FIELD:
                count += 1
            elif after == QUOTED and state != CLOSED:
                opened = i
        state = after
    memory[0], memory[1], memory[2], memory[3] = state, start, count, opened
    return found
