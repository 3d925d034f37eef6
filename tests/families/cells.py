"""What came of one family on one mesh, in the words of the table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from judge import Distance, Outcome, complaints, distance
from loops import Loops
from pair import Pair

from instep.spec import MeshSpec

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


def on_mesh(workers: int, **mesh: int) -> Column:
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


def cell(pair: Pair, column: Column, loops: Loops) -> Cell:
    """Train a family on a mesh, in float64, and hold it against the plain loop."""
    outcome = loops.run(
        pair, loops.exact(pair), column.workers, "float64", job=column.job, limit_s=LIMIT_S
    )
    outcome.bound = NEAR
    if pair.draws and outcome.trained is not None and outcome.verdict.startswith(OTHER_DRAWS):
        (layout,) = outcome.run.glob("mesh-*.json")
        blocks = json.loads(layout.read_text())["blocks"]
        outcome.distance = distance(outcome.trained, loops.by_block(pair, blocks, PARTS))
        outcome.verdict = "yes"  # with the draws that it has said
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
