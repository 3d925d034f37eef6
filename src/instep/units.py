"""Numbers formatted for people: bytes, seconds, counts, shares.

Inside instep all numbers are in SI units, with the unit in the name (`wait_s`,
`sent_bytes`). Only output for people is formatted here.
"""

from __future__ import annotations

import math
import re

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def readable_bytes(count: float) -> str:
    """`1234567` -> `'1.2 MB'`; powers of 1,000, one decimal below 100."""
    size = float(count)
    for unit in _BYTES[:-1]:
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} {_BYTES[-1]}"


def readable_seconds(seconds: float) -> str:
    """`0.0123` -> `'12 ms'`, `75` -> `'1m15s'`, `7384` -> `'2h03m'`."""
    if seconds < 0:
        return "-" + readable_seconds(-seconds)
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.00995 else f"{seconds * 1e3:.1f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


_SECONDS_IN = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_NUMBER = r"\d+(?:\.\d+)?"
_PARTS = "".join(rf"(?:{_NUMBER}\s*{unit}\s*)?" for unit in _SECONDS_IN)
_TIME = re.compile(rf"(?=\d)(?:{_PARTS}|{_NUMBER})")


def seconds_in(text: str) -> float:
    """`'90s'` -> 90.0, `'1h30m'` -> 5400.0, `'90'` -> 90.0; days, hours, minutes, seconds.

    Each unit at most once, the largest first.

    Raises:
        ValueError: it is no such text.
    """
    if not _TIME.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is no length of time")
    parts = re.findall(rf"({_NUMBER})\s*([dhms]?)", text)
    return sum(float(number) * _SECONDS_IN[unit or "s"] for number, unit in parts)


def bytes_in(text: str) -> int:
    """`'4GB'` -> 4000000000; the units of `readable_bytes`, and a bare number is bytes.

    Raises:
        ValueError: it is no such text.
    """
    found = re.fullmatch(rf"({_NUMBER})\s*([kMGTP]?B)?", text.strip())
    size = float(found[1]) * 1000 ** _BYTES.index(found[2] or "B") if found else math.inf
    if not math.isfinite(size):
        raise ValueError(f"{text!r} is no size in bytes, such as '64GB'")
    return int(size)


def host_and_port(text: str) -> tuple[str, int]:
    """`'node1:2222'` -> `('node1', 2222)`.

    Raises:
        ValueError: it is no such text, or the port is not from 1 to 65535.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is no machine with a port from 1 to 65535")
    return host, int(port)


def readable_count(count: float) -> str:
    """`9380` -> `'9,380'`: an integer with a comma for thousands."""
    return f"{count:,.0f}"


def readable_share(part: float, whole: float) -> str:
    """`readable_share(1, 4)` -> `'25 %'`; a dash if the whole is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "-"
