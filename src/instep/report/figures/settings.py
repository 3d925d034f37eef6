"""The settings of a job as one list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from instep.words import without_secrets


def flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested table as (`section.key`, value as text), URLs without passwords."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            shown = without_secrets(value)
            text = shown if isinstance(shown, str) else json.dumps(shown, default=str)
            yield f"{prefix}{key}", text
