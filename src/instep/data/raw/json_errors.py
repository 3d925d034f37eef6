"""What is wrong with a line of JSON, in words, and numbers that nothing can hold later."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from instep.errors import one_line

_HIGH, _THREES, _SIX = np.uint32(0xF0F0F0F0), np.uint32(0x30303030), np.uint32(0x06060606)
"""A byte is a digit if its high half is 3, also after 6 was added."""

_LEAST, _MOST = -(2**63), 2**64 - 1


def long_numbers(text: bytes) -> Any:
    """Where 19 digits in a row may be, [count] int64: no shorter number is beyond 64 bits.

    Any 19 have four whole words of four bytes, which are looked for, since that is ten times as
    fast as a search; and three more digits around these.
    """
    padded = np.frombuffer(b"    " + text + b" " * (4 + -len(text) % 4), np.uint32)
    digits = (padded & _HIGH) == _THREES
    digits &= ((padded + _SIX) & _HIGH) == _THREES
    pairs = digits[1:] & digits[:-1]
    places = 4 * np.flatnonzero(pairs[2:] & pairs[:-2])
    if not len(places):
        return places
    codes = padded.view(np.uint8)
    is_digit = (codes >= 48) & (codes <= 57)
    around = np.zeros(len(places), np.int64)
    for steps in ((-1, -2, -3), (16, 17, 18)):
        row = np.ones(len(places), bool)
        for step in steps:
            row &= is_digit[places + step]
            around += row
    return places[around >= 3] - 4


def beyond_64_bits(record: Any) -> str:
    """What is wrong with a record that has a whole number beyond 64 bits; else empty."""
    todo = [record]
    while todo:
        value = todo.pop()
        if type(value) is int and not _LEAST <= value <= _MOST:
            return f"the number {str(value)[:40]} does not fit in 64 bits: write it as a string"
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return ""


def sentence(line: bytes, error: Exception) -> str:
    """What is wrong with a line that cannot be decoded."""
    if isinstance(error, RecursionError):
        return "the line is nested too deeply"
    try:
        line.decode()
    except UnicodeDecodeError as wrong:  # which not every msgspec calls so
        return f"the line is no UTF-8: {wrong.reason}"
    found = list[str]()
    try:
        json.loads(line, parse_constant=found.append)
    except (ValueError, RecursionError):
        return f"the line is no JSON: {one_line(error)}"
    if found:
        return f"{found[0]} is no number of JSON: write null"
    if "out of range" in str(error):
        return "a number does not fit in 64 bits"
    if b"\\u" in line:
        return "a string has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    return f"the line is no JSON: {one_line(error)}"
