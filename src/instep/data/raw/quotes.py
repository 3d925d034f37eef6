"""Where the records of a CSV file are: a machine that goes over its bytes, compiled by Numba.

It agrees with Python's `csv` and with pyarrow: a quote opens a field only as its first character;
within a quoted field two quotes are one, and line breaks and delimiters are text; '\\n', '\\r' and
'\\r\\n' end a record; blank lines are no records. Ways in: `Splitter`, and `passed` for what a
piece does to each state that it may begin in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from instep.comm.compiled import compiled

RECORD, FIELD, PLAIN, QUOTED, CLOSED = range(5)
"""Between records; at the start of a field; in one without quotes; in one with; behind a quote
there, which ends the field or is the first of two."""

STATES = 5

_NEVER = -(1 << 60)
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
def _pass(data: Any, delimiter: int, states: Any) -> None:
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


def passed(data: bytes, delimiter: int, states: Any) -> None:
    """Replace each of `states` [STATES] int64 by the state after the data."""
    if b'"' in data:
        _pass(np.frombuffer(data, np.uint8), delimiter, states)
    elif data:
        last = _after.py_func(PLAIN, data[-1], delimiter)
        states[states != QUOTED] = last


@compiled(_BYTES, "int64", "boolean[::1]", *[_PLACES] * 4, returns="int64")
def _split(
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


class Splitter:
    """Finds the records of bytes that are given block by block.

    Args:
        delimiter: code of the character between fields.
        state: before the first block.
    """

    def __init__(self, delimiter: int, state: int) -> None:
        self._delimiter = delimiter
        self._ends = np.zeros(256, bool)
        self._ends[[delimiter, _LF, _CR]] = True
        self._memory = np.array([state, 0, 0, _NEVER])
        self._room = np.empty((3, 0), np.int64)

    def split(self, data: bytes) -> tuple[Any, Any, Any]:
        """Of each record that ends in this block: where it begins, where it ends (before its line
        break) and how many fields it has. Places are from the start of the block, and below 0
        where a record begins before it. They are valid until the next call.
        """
        most = len(data) // 2 + 1
        if self._room.shape[1] < most:
            self._room = np.empty((3, most), np.int64)
        starts, stops, fields = self._room
        codes = np.frombuffer(data, np.uint8)
        found = _split(codes, self._delimiter, self._ends, self._memory, starts, stops, fields)
        self._memory[[1, 3]] -= len(data)
        return starts[:found], stops[:found], fields[:found]

    def copy(self) -> Splitter:
        """Another one that goes on from here."""
        other = Splitter(self._delimiter, self.state)
        other._memory = self._memory.copy()
        return other

    @property
    def state(self) -> int:
        """After all that was given."""
        return int(self._memory[0])

    @property
    def begun(self) -> int:
        """Bytes since the record began that has not ended."""
        return -int(self._memory[1])

    @property
    def opened(self) -> int:
        """Bytes since the last quote that opened a field."""
        return -int(self._memory[3])

    @property
    def fields(self) -> int:
        """Of the record that has not ended, so far."""
        return int(self._memory[2])
