"""`workers = "auto"` in a job file: the number is left to a plan, which `instep run` makes.

Everywhere else a job has a number. Ways in: `AUTO`, `is_planned`, `without_auto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from instep.errors import SpecError

AUTO = "auto"
"""In the place of a number of workers."""

_AXES = "shard", "tensor", "stages"


def is_planned(table: Mapping[str, Any]) -> bool:
    """Whether the workers of raw tables are left to a plan."""
    return table.get("workers") == AUTO


def without_auto(table: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with the workers of one replica, where they were left to a plan."""
    if not is_planned(table):
        return dict(table)
    mesh = table.get("mesh")
    sizes = [mesh.get(axis, 1) for axis in _AXES] if isinstance(mesh, Mapping) else []
    whole = all(isinstance(size, int) and size > 0 for size in sizes)
    return {**table, "workers": prod(sizes) if whole else 1}


def refuse_auto(table: Mapping[str, Any], source: str) -> None:
    """Refuse tables whose workers are left to a plan, where none is made.

    Raises:
        SpecError: they are.
    """
    if is_planned(table):
        raise SpecError(
            f"{source}: workers = 'auto' is for instep run, which plans the number. Give it here: "
            "--set workers=2, or in the file."
        )
