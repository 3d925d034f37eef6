"""The settings of a job as one list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested table as (`section.key`, value as text)."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text
