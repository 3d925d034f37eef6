"""What came of one family on one mesh, in the words of the table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from judge import Distance, Outcome, complaints, distance
from loops import Loops
from pair import Pair

from instep.job.mesh import MeshSpec

OTHER_DRAWS = "no: with mesh.stages each block draws its own random numbers"
"""What a run in stages says; it is held against a plain loop whose blocks draw so."""

PARTS = MeshSpec().pipeline_batches

NEAR = Distance(1e-10, 1e-10)
"""How far parameters and buffers may be in float64."""

LIMIT_S = 300.0
"""For one run; T5, the longest, takes ten seconds on a quiet machine."""

RIGHT, REFUSED, SILENT, ERROR = "right", "refused", "SILENTLY DIFFERENT", "error"


@dataclass(frozen=True, eq=False)
class Column:
    """A mesh, and how many processes train on it."""

    name: str
    workers: int
    job: Mapping[str, Any] = field(default_factory=dict)


def on_mesh(workers: int, **mesh: int | str) -> Column:
    """A column for one mesh."""
    return Column(", ".join(f"{k} = {v}" for k, v in mesh.items()), workers, {"mesh": mesh})


COLUMNS = (
    Column("1 worker", 1),
    Column("2 workers", 2),
    Column("2 workers, bits", 2, {"train": {"determinism": "bits"}}),
    on_mesh(2, shard=2),
    on_mesh(2, shard=2, zero=2),
    on_mesh(2, tensor=2),
    on_mesh(2, stages=2),
)


@dataclass(frozen=True)
class Cell:
    """What came of it."""

    kind: str
    """`RIGHT`, `REFUSED`, `SILENT` or `ERROR`."""
    text: str = ""
    """The distance, the refusal or the error."""


def cell(
    pair: Pair, column: Column, loops: Loops, dtype: str = "float64", near: Distance = NEAR
) -> Cell:
    """Train a family on a mesh, and hold it against the plain loop."""
    outcome = loops.run(pair, None, column.workers, dtype, job=column.job, limit_s=LIMIT_S)
    outcome.bound, blocks, parts = near, [], 1
    if pair.draws and outcome.verdict.startswith(OTHER_DRAWS):
        (layout,) = outcome.run.glob("mesh-*.json")
        blocks = json.loads(layout.read_text())["blocks"]
        parts = column.job["mesh"].get("pipeline_batches", PARTS)
        outcome.verdict = "yes"  # with the draws that it has said
    if outcome.trained is not None:
        plain = loops.by_block(pair, blocks, parts, dtype)
        outcome.distance = distance(outcome.trained, plain)
    return judged(pair, outcome)


def judged(pair: Pair, outcome: Outcome) -> Cell:
    """The cell of an outcome."""
    if outcome.ours and not outcome.steps and outcome.error_kind in ("RecipeError", "SpecError"):
        return Cell(REFUSED, outcome.error)
    wrong = complaints(pair, outcome)
    if not wrong:
        assert outcome.distance is not None
        return Cell(RIGHT, f"{max(outcome.distance.trained, outcome.distance.other):.0e}")
    ran = outcome.ended and not outcome.error
    says = outcome.verdict if outcome.said_before else ""
    return Cell(SILENT if ran and says in ("", "yes") else ERROR, "; ".join(wrong))
