"""25 families of models on each mesh: right, or refused before the first step; never otherwise.

Real workers under `instep.join`, in float64, held against the plain loop of `tests/parity`. Two
cells run in `make test`, all of them in `make families`, which prints the table; with
`--families-table` it is written into the documents.
"""

from __future__ import annotations

import pytest
from cells import COLUMNS, ERROR, NEAR, REFUSED, RIGHT, SILENT, Cell, cell, judged
from families_table import PAGE, counts, markdown, write
from judge import Distance, Outcome
from loops import Loops
from twenty_five import PAIRS, VARIANTS

pytestmark = pytest.mark.process

ONE, TWO, BITS, SHARDED, SHARDED_2, TENSOR, STAGES = COLUMNS

LEAST = {ONE: 25, TWO: 25, BITS: 23, SHARDED: 25, SHARDED_2: 25, TENSOR: 25, STAGES: 17}
"""How many families are right. With "bits" there is no batch normalisation over a global batch;
stages need a sequence of blocks."""


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    forking = Loops(tmp_path_factory.mktemp("loops"), "twenty_five")
    yield forking
    forking.close()


@pytest.mark.tail
@pytest.mark.parametrize(
    ("name", "column"), [("MLP", TWO), ("two heads", SHARDED), ("MLP", STAGES)]
)
def test_a_family_on_two_workers_is_right(name, column, loops):
    found = cell(PAIRS[name], column, loops)
    assert found.kind == RIGHT, found.text


def test_there_are_twenty_five_families():
    assert len(PAIRS.keys() - set(VARIANTS)) == 25
    assert set(VARIANTS) <= PAIRS.keys()


@pytest.mark.tail
def test_a_weight_that_is_wrong_by_a_millionth_is_silently_different(loops):
    pair = PAIRS["MLP"]
    outcome = loops.run(pair, loops.exact(pair), 2, "float64", wrong_weight=1 + 1e-6)
    outcome.bound = NEAR
    assert judged(pair, outcome).kind == SILENT


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, RIGHT),
        ({"distance": Distance(2e-10, 0.0)}, SILENT),
        ({"distance": Distance(0.0, 2e-10)}, SILENT),
        ({"distance": Distance(0.0, 0.0, 1e-3)}, SILENT),
        ({"distance": Distance(1e-3, 0.0), "verdict": "no: another model"}, ERROR),
        ({"distance": Distance(1e-3, 0.0), "said_before": False}, SILENT),
        ({"steps": 9}, SILENT),
        ({"ended": False}, ERROR),
        ({"error": "no", "error_kind": "RecipeError", "ours": True, "steps": 0}, REFUSED),
        ({"error": "no", "error_kind": "SpecError", "ours": True, "steps": 0}, REFUSED),
        ({"error": "no", "error_kind": "RecipeError", "ours": True, "steps": 1}, ERROR),
        ({"error": "no", "error_kind": "PeerError", "ours": True, "steps": 0}, ERROR),
        ({"error": "no", "error_kind": "ValueError", "steps": 0}, ERROR),
    ],
)
def test_what_came_of_a_run_has_one_of_four_names(changes, kind):
    sound = {
        "verdict": "yes", "said_before": True, "steps": 10,
        "distance": Distance(1e-12, 0.0), "bound": NEAR,
    }  # fmt: skip
    assert judged(PAIRS["MLP"], Outcome(2, 6, "float64", **{**sound, **changes})).kind == kind


def test_the_table_counts_families_and_gives_each_sentence_a_number():
    refused = Cell(REFUSED, "cannot.")
    table = {
        ONE: {"MLP": Cell(RIGHT, "0"), "LSTM": refused, VARIANTS[0]: Cell(RIGHT, "0")},
        TWO: {"MLP": refused, "LSTM": Cell(SILENT, "is away"), VARIANTS[0]: Cell(RIGHT, "0")},
    }
    assert counts(table).splitlines() == [
        "1 worker: 1 of 2 right, 1 refused",
        "2 workers: 0 of 2 right, 1 refused, 1 SILENTLY DIFFERENT",
    ]
    assert "| LSTM | (1) | **SILENTLY DIFFERENT** (2) |" in markdown(table)
    assert "1. cannot." in markdown(table)


@pytest.mark.tail
def test_the_table_in_the_documents_has_every_family_and_no_silent_difference():
    text = PAGE.read_text()
    rows = [line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| ")][1:]
    families = [row for row, name in zip(rows, PAIRS, strict=True) if name not in VARIANTS]
    right = [
        [cell.strip() for cell in column].count("right") for column in zip(*families, strict=True)
    ]
    assert all(count >= LEAST[column] for count, column in zip(right, COLUMNS, strict=True))
    assert [f"| {name} |" for name in PAIRS if f"| {name} |" not in text] == []
    assert SILENT not in text
    assert f"**{ERROR}**" not in text


# ---- the whole table


@pytest.fixture(scope="module")
def table(pytestconfig):
    made = {}
    yield made
    if len(made) == len(COLUMNS) and pytestconfig.getoption("--families-table", default=False):
        write(made)


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS, ids=[column.name for column in COLUMNS])
def test_a_mesh_is_right_or_refused_on_every_family(column, loops, table, capsys):
    table[column] = cells = {name: cell(pair, column, loops) for name, pair in PAIRS.items()}
    with capsys.disabled():
        print(f"\n{markdown({column: cells})}")
    wrong = [f"{n}: {c.kind}: {c.text}" for n, c in cells.items() if c.kind in (SILENT, ERROR)]
    assert not wrong, "\n".join(wrong)
    right = [n for n, c in cells.items() if c.kind == RIGHT and n not in VARIANTS]
    assert len(right) >= LEAST[column]
