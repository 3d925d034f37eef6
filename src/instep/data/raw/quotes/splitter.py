"""Where the records of a CSV file are: a machine that goes over its bytes.

It agrees with Python's `csv` and with pyarrow: a quote opens a field only as its first character;
within a quoted field two quotes are one, and line breaks and delimiters are text; '\\n', '\\r' and
'\\r\\n' end a record; blank lines are no records. Numba compiles it, which takes 150 MB, so it
is loaded where the parity of quotes does not suffice (`parity.py`). Ways in: `Splitter`, and
`passed` for what a piece does to each state that it may begin in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instep.data.raw.quotes import parity
from instep.data.raw.quotes.parity import BetweenBlocks
from instep.data.raw.quotes.states import FIELD, PLAIN, QUOTED, RECORD

_NEVER = -(1 << 60)
_QUOTE, _LF, _CR = 34, 10, 13


def passed(data: bytes, delimiter: int, states: Any) -> None:
    """Replace each of `states` [STATES] int64 by the state after the data."""
    if b'"' in data:
        found = parity.passed(data, delimiter, states.tolist())
        if found is not None:
            states[:] = found
            return
        from instep.data.raw.quotes.loops import pass_over

        pass_over(np.frombuffer(data, np.uint8), delimiter, states)
    elif data:
        last = {delimiter: FIELD, _LF: RECORD, _CR: RECORD}.get(data[-1], PLAIN)
        states[states != QUOTED] = last


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
        known = parity.split(data, self._delimiter, BetweenBlocks(*self._memory.tolist()))
        if known is not None:
            self._memory[:] = known.memory
            self._memory[[1, 3]] -= len(data)
            return known.starts, known.stops, known.fields
        from instep.data.raw.quotes.loops import split

        most = len(data) // 2 + 1
        if self._room.shape[1] < most:
            self._room = np.empty((3, most), np.int64)
        starts, stops, fields = self._room
        codes = np.frombuffer(data, np.uint8)
        found = split(codes, self._delimiter, self._ends, self._memory, starts, stops, fields)
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
