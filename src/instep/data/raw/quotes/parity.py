"""Where the records of a CSV file are, by the parity of quotes, where that is right.

It is where each quote that is outside of a quoted field opens one, which holds for all files but
those with quotes in plain text, as in `5" pipe`. Then a byte is in a quoted field if an odd number
of quotes is before it, and numpy finds everything. None means: somebody else has to look. Ways in:
`split`, `passed`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from instep.data.raw.quotes.states import CLOSED, FIELD, PLAIN, QUOTED, RECORD

_QUOTE, _LF, _CR = 34, 10, 13

_MOST_QUOTES = 1024
"""So many quotes are looked at one by one, until all states have become one."""


class BetweenBlocks(NamedTuple):
    """Knowledge between two blocks; places are from the start of the next."""

    state: int
    start: int
    """Where the record begins that has not ended."""
    fields: int
    """Fields that it has so far."""
    opened: int
    """The last quote that opened a field."""


class RecordPlaces(NamedTuple):
    """The records that end in a block: [count] int64 each, and what is known behind it."""

    starts: Any
    stops: Any
    fields: Any
    memory: BetweenBlocks


def split(data: bytes, delimiter: int, before: BetweenBlocks) -> RecordPlaces | None:
    """The records that end in the data; None where a quote is text."""
    if not data:
        none = np.empty(0, np.int64)
        return RecordPlaces(none, none, none, before)
    state, start, count, opened = before
    codes = np.frombuffer(data, np.uint8)
    ends = (codes == delimiter) | (codes == _LF) | (codes == _CR)
    if b'"' in data:
        marks = np.flatnonzero(ends | (codes == _QUOTE))
        quotes = codes[marks] == _QUOTE
        places = marks[quotes]
        fresh = _fresh(codes, places, delimiter, state)
        if fresh is None:
            return None
        opened = int(fresh[-1]) if len(fresh) else opened
        odd = np.bitwise_xor.accumulate(quotes.view(np.uint8))
        ends = marks[~quotes & (odd == (state == QUOTED))]
        after = _behind(data, delimiter, _parity(state, len(places)))
    else:
        ends = np.flatnonzero(ends if state != QUOTED else ends[:0])
        after = _behind(data, delimiter, state)
    breaks = np.flatnonzero(codes[ends] != delimiter)
    stops = ends[breaks]
    if state == RECORD:
        start, count = 0, 1
    starts = np.concatenate([[start], stops[:-1] + 1])[: len(stops)]
    fields = np.diff(breaks, prepend=-count) if len(breaks) else breaks
    if len(breaks):
        has_text = stops > starts
        has_text[0] |= state != RECORD
        start, count = int(stops[-1]) + 1, len(ends) - int(breaks[-1])
        starts, stops, fields = starts[has_text], stops[has_text], fields[has_text]
    else:
        count += len(ends)
    return RecordPlaces(starts, stops, fields, BetweenBlocks(after, start, count, opened))


def passed(data: bytes, delimiter: int, states: list[int]) -> list[int] | None:
    """The states after the data, from those before it; None where a quote is text."""
    codes = np.frombuffer(data, np.uint8)
    places = np.flatnonzero(codes == _QUOTE)
    at = 0
    for number, place in enumerate(places[:_MOST_QUOTES].tolist(), 1):
        between = data[at:place]
        states = [_at_quote(_behind(between, delimiter, state)) for state in states]
        at = place + 1
        if len(set(states)) == 1:
            left = places[number:]
            if _fresh(codes[at:], left - at, delimiter, states[0]) is None:
                return None
            state = _parity(states[0], len(left)) if len(left) else states[0]
            return [_behind(data[at:], delimiter, state)] * len(states)
    if len(places) > _MOST_QUOTES:
        return None
    return [_behind(data[at:], delimiter, state) for state in states]


def _behind(data: bytes, delimiter: int, state: int) -> int:
    """The state after data, where `state` says whether their end is in a quoted field."""
    if state == QUOTED or not data:
        return state
    if data[-1] == _QUOTE:
        return CLOSED
    return {delimiter: FIELD, _LF: RECORD, _CR: RECORD}.get(data[-1], PLAIN)


def _parity(state: int, quotes: int) -> int:
    """`QUOTED`, or another state, behind so many quotes."""
    return QUOTED if (quotes + (state == QUOTED)) % 2 else PLAIN


def _at_quote(state: int) -> int:
    """The state behind a quote."""
    if state == QUOTED:
        return CLOSED
    return PLAIN if state == PLAIN else QUOTED


def _fresh(codes: Any, places: Any, delimiter: int, state: int) -> Any:
    """The quotes that open a field and not the second half of one; None if one is text."""
    opening = places[1:][::2] if state == QUOTED else places[::2]
    first = opening[:1] if len(opening) and opening[0] == 0 else opening[:0]
    if len(first) and state == PLAIN:
        return None
    rest = opening[len(first) :]
    before = codes[rest - 1]
    again = before == _QUOTE
    if not (again | (before == delimiter) | (before == _LF) | (before == _CR)).all():
        return None
    return np.concatenate([first[: state != CLOSED], rest[~again]])
