"""HTML as values: text is escaped unless it is already markup.

`tag` escapes every child that is not `Html`, so nothing a run recorded (a
name, an error, a path) can become markup by being forgotten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from instep.units import readable_count

MOST_TEXT = 2000
"""Characters of one recorded text that a page shows."""

MOST_ROWS = 40
"""Rows of a table that grows with the run."""

_VOID = frozenset({"br", "input", "line", "path", "rect", "circle", "meta"})

_TURNING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Html(str):
    """Markup that needs no escaping."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | bool | None) -> Html:
    """One element; `class_` and `view_box` style names, `None` and `False` are left out."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        words.append(shown if value is True else f'{shown}="{_escaped(value)}"')
    inside = " ".join(words)
    # inside an SVG an empty element stays open unless it closes itself
    return Html(f"<{inside}/>" if name in _VOID else f"<{inside}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Html:
    """Children one after another, text among them escaped."""
    return Html("".join(c if isinstance(c, Html) else _escaped(c) for c in children))


def _escaped(value: object) -> str:
    """Text as markup; half a surrogate pair, which no UTF-8 file can hold, as `\\ud800`, and so
    control characters and those that turn the direction of what follows."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return escape(_TURNING.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int = 1) -> Html:
    """A table that scrolls by itself on a narrow page.

    Columns from `numbers_from` on are set to the right; a row's first cell is its header.
    """
    side = ["num" if at >= numbers_from else None for at in range(len(head))]
    top = tag("tr", *(tag("th", text, class_=s) for text, s in zip(head, side, strict=True)))
    body = [
        tag(
            "tr",
            *(
                tag("td" if at else "th", cell, class_=s, scope=None if at else "row")
                for at, (cell, s) in enumerate(zip(row, side, strict=True))
            ),
        )
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", top), tag("tbody", *body)), class_="scroll")


def section(title: str, *body: str, note: str = "", id_: str | None = None) -> Html:
    """A part of the page: a heading, one quiet line under it, and its body."""
    heading = [tag("h2", title)]
    if note:
        heading.append(tag("p", note, class_="note"))
    return tag("section", *heading, *body, id_=id_)


def embedded_json(data: Any) -> Html:
    """Data as JSON that is safe inside a `<script>` element, whatever it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def figure(value: Any, readable: Any = None) -> str:
    """A figure for people: a dash for None, four digits of a fraction."""
    if value is None:
        return "-"
    if readable is not None:
        return str(readable(value))
    return f"{value:.4g}" if isinstance(value, float) else shortened(value)


def hash_of(text: str) -> Html:
    """A hash, which a click selects whole, with a button that copies it."""
    return join([tag("code", text, class_="whole"), tag("button", "copy", type="button")])


def listing(
    head: Sequence[str],
    items: Sequence[Any],
    row: Callable[[Any], Sequence[str]],
    noun: str,
    *,
    newest: bool = False,
    numbers_from: int = 1,
) -> Html:
    """A table with a row for each item, at most `MOST_ROWS`: the first, or the `newest`."""
    shown = items[-MOST_ROWS:] if newest else items[:MOST_ROWS]
    rows = table(head, map(row, shown), numbers_from=numbers_from)
    return join([rows, more(len(items), len(shown), noun)])


def more(whole: int, shown: int, noun: str) -> Html:
    """A quiet line that says how much of a list was left out; nothing if none was."""
    if whole <= shown:
        return Html("")
    return tag(
        "p", f"{readable_count(shown)} of {readable_count(whole)} {noun} shown.", class_="note"
    )


def shortened(value: Any, most: int = MOST_TEXT) -> str:
    """A recorded value as text of bounded length; markup passes as it is."""
    if isinstance(value, Html):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= most else text[: most - 1] + "…"
