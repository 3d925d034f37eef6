"""How two runs differ: in what they were told, and in what came out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_FIGURES = (
    "outcome",
    "steps",
    "samples",
    "loss",
    "workers",
    "seconds",
    "samples_per_second",
    "wire_bytes",
    "generations",
    "repeated_samples",
    "missing_samples",
    "parameters_sha256",
)


def differing_settings(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Keys of two jobs whose values differ, as (`section.key`, value, value).

    A key that only one of them gives reads `not given` in the other.
    """
    left, right = dict(flat(one)), dict(flat(other))
    keys = dict.fromkeys([*left, *right])
    pairs = [(key, left.get(key, "not given"), right.get(key, "not given")) for key in keys]
    return [(key, a, b) for key, a, b in pairs if a != b]


def figures(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The figures of two summaries side by side, validation metrics among them."""
    rows = [(name, one.get(name), other.get(name)) for name in _FIGURES]
    metrics = dict.fromkeys([*one["metrics"], *other["metrics"]])
    after_loss = _FIGURES.index("loss") + 1
    rows[after_loss:after_loss] = [
        (f"validation {name}", one["metrics"].get(name), other["metrics"].get(name))
        for name in metrics
    ]
    return rows


def flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested table as (`section.key`, value as text)."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield (
                f"{prefix}{key}",
                value if isinstance(value, str) else json.dumps(value, default=str),
            )
