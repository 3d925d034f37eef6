"""Every pair of model and loss: the result of one machine, or word of what differs.

Real workers under `instep.join`, held against a plain PyTorch loop: float64 and float32, on
1, 2 and 3 workers, and alone with one micro-batch. Two pairs run in `make test`, all of
them in `make parity`; with `--parity-table` what came out is written into the documents.
"""

from __future__ import annotations

import pytest
from judge import Outcome, complaints
from loops import Loops
from pair import MICRO_BATCHES, SAME, Refused, Same
from pairs import PAIRS
from table import Row, keep

pytestmark = pytest.mark.process

TWO = (
    "padded tokens, Recipe.weight",
    "ResNet, BatchNorm",
)
FEW = [
    (1, "float64", 1),
    *((workers, "float64", MICRO_BATCHES) for workers in (1, 2, 3)),
    (3, "float32", MICRO_BATCHES),
]
"""Workers, type, micro-batches."""
MORE = [*FEW, (1, "float32", MICRO_BATCHES), (2, "float32", MICRO_BATCHES)]
"""For pairs that should be the same."""


@pytest.fixture(scope="session")
def loops(tmp_path_factory):
    forking = Loops(tmp_path_factory.mktemp("loops"))
    yield forking
    forking.close()


def outcomes_of(name: str, loops: Loops, runs: list[tuple[int, str, int]]) -> list[Outcome]:
    pair = PAIRS[name]
    never_runs = isinstance(pair.expected, Refused) and pair.expected.alone
    references = None if never_runs else loops.plain(pair)
    return [
        loops.run(pair, references, workers, dtype, micro_batches=micro_batches)
        for workers, dtype, micro_batches in runs
    ]


def check(name: str, outcomes: list[Outcome]) -> None:
    wrong = [text for outcome in outcomes for text in complaints(PAIRS[name], outcome)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", TWO)
def test_one_of_the_two_is_the_same_or_the_run_says_what_differs(name, loops):
    check(name, outcomes_of(name, loops, FEW[::2]))


@pytest.mark.parity
@pytest.mark.parametrize("name", PAIRS)
def test_a_run_is_the_same_or_says_what_differs(name, loops, pytestconfig):
    runs = MORE if isinstance(PAIRS[name].expected, Same) else FEW
    outcomes = outcomes_of(name, loops, runs)
    if rows := getattr(pytestconfig, "parity_rows", None):
        keep(Row.of(PAIRS[name], outcomes), rows)
    else:
        check(name, outcomes)


def test_there_are_at_least_forty_pairs_and_the_two_are_among_them():
    assert len(PAIRS) >= 40
    assert set(TWO) <= set(PAIRS)
    assert sum(isinstance(pair.expected, Same) for pair in PAIRS.values()) >= 40


# ---- the judge can say no


@pytest.mark.tail
@pytest.mark.parametrize(("workers", "dtype"), [(1, "float64"), (3, "float32")])
@pytest.mark.parametrize("name", ["padded tokens, Recipe.weight", "transformer with dropout"])
def test_a_weight_that_is_wrong_by_one_per_cent_is_found(name, workers, dtype, loops):
    """The gradients of one worker count 1.01 times."""
    pair = PAIRS[name]
    assert pair.expected == SAME
    outcome = loops.run(pair, loops.plain(pair), workers, dtype, wrong_weight=1.01)
    assert any("its parameters are" in text for text in complaints(pair, outcome))
    assert outcome.distance is not None
    assert outcome.distance.trained > 100 * outcome.bound.trained
