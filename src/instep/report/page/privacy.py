"""The part of the report page that says how much a private run reveals."""

from __future__ import annotations

from typing import Any

from instep.privacy.figures import privacy_words
from instep.report.page.markup import Html, section, tag


def privacy(summary: dict[str, Any]) -> Html:
    """Say what epsilon covers, of which neighbours it is, and what it does not cover."""
    found = summary["privacy"]
    if found is None:
        return Html("")
    words = privacy_words(found)
    covers = (
        "Epsilon covers the parameters after every step, which anybody may see. Two datasets are "
        f"neighbours: {found['adjacency']}. {found['released']:,} sums with noise were published."
    )
    return section(
        "Privacy",
        tag("p", f"{words[0].upper()}{words[1:]}."),
        tag("p", covers),
        tag("p", "It does not cover:"),
        tag("ul", *(tag("li", each) for each in found["not_covered"])),
    )
