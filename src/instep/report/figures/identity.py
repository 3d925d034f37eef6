"""Settings of jobs, and hashes of runs: by these, runs are told apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

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


def _without_equal(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Jobs without the sections in which they are all equal."""
    encoded = [{key: msgspec.json.encode(value) for key, value in job.items()} for job in jobs]
    first = encoded[0].items() if encoded else ()
    equal = {key for key, text in first if all(each.get(key) == text for each in encoded)}
    return [{key: value for key, value in job.items() if key not in equal} for job in jobs]


def differing_settings(*jobs: dict[str, Any]) -> list[tuple[str, ...]]:
    """Keys of jobs whose values differ, as (`section.key`, value, value, ...).

    A key that a job does not have reads `not given` there.
    """
    tables = [dict(flat(job)) for job in _without_equal(jobs)]
    keys = dict.fromkeys(key for each in tables for key in each)
    rows = [(key, *(each.get(key, "not given") for each in tables)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def hashes_of(last: Callable[[str], dict[str, Any]]) -> dict[str, str]:
    """SHA-256 of a run, in hexadecimal digits, by what each is of; those that it has.

    Args:
        last: gives the newest event of one name, or an empty dict.
    """
    found = {
        "recipe": last("run_started").get("recipe_sha256"),
        "model it started from": last("model_loaded").get("sha256"),
        "parameters": last("model_saved").get("parameters_sha256"),
    }
    return {name: str(value) for name, value in found.items() if value}
