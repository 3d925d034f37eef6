"""What the judge complains of, and what it lets pass."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from judge import EPSILON, NEAR, Distance, Outcome, apart, bound, complaints, distance, same_state
from pair import SAME, Pair, Parts, Refused, Said, Same, honest, refused, said
from pairs import PAIRS
from plain import State, Trained
from table import PAGE


def pair_that(expected):
    return Pair(
        name="tried", build=lambda: Parts, expected=expected, draws=False, train={}, needs=()
    )


SOUND = Outcome(
    2, 6, "float64", verdict="yes", said_before=True, steps=20, distance=Distance(1e-12, 0.0)
)
FAR = replace(SOUND, distance=Distance(1e-2, 0.0))
NO = replace(FAR, verdict="no: the buffer 'queue' is no running average")


def test_a_sound_run_passes():
    assert complaints(pair_that(SAME), SOUND) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"distance": Distance(2 * NEAR, 0.0)}, "parameters"),
        ({"distance": Distance(math.inf, 0.0)}, "parameters"),
        ({"distance": Distance(math.nan, 0.0)}, "parameters"),
        ({"distance": Distance(0.0, 2 * NEAR)}, "buffers"),
        ({"distance": Distance(0.0, 0.0, 1e-3)}, "losses"),
        ({"verdict": ""}, "does not say"),
        ({"verdict": "no: who knows"}, "no: who knows"),
        ({"verdict": "not shown: who knows"}, "not shown"),
        ({"said_before": False}, "not before"),
        ({"agree": False}, "different models"),
        ({"error": "no", "error_kind": "RecipeError"}, "failed"),
        ({"ended": False}, "did not end"),
        ({"steps": 19}, "stopped"),
    ],
)
def test_a_run_that_should_be_the_same_and_is_not_is_found(change, word):
    (found,) = complaints(pair_that(SAME), replace(SOUND, **change))
    assert word in found


def test_what_differs_has_to_be_said_by_name():
    assert complaints(pair_that(said("queue")), NO) == []
    assert "speak" in complaints(pair_that(said("codebook")), NO)[0]
    assert "says yes" in complaints(pair_that(said("queue")), FAR)[0]
    assert "not before" in complaints(pair_that(said("queue")), replace(NO, said_before=False))[0]
    assert "does not say" in complaints(pair_that(said("queue")), replace(NO, verdict=""))[0]
    assert "verdict" in complaints(pair_that(said("queue")), replace(NO, verdict="queue"))[0]


def test_alone_with_one_micro_batch_everything_is_the_same():
    alone = replace(SOUND, workers=1, micro_batches=1)
    for expected in (SAME, said("queue"), refused("sum", alone=False)):
        assert complaints(pair_that(expected), alone) == []
        far = replace(alone, distance=Distance(1e-2, 0.0))
        assert "parameters" in complaints(pair_that(expected), far)[0]


def test_what_differs_alone_as_well_has_to_be_said_there():
    alone = {"workers": 1, "micro_batches": 1}
    pair = pair_that(said("queue", alone=True))
    assert complaints(pair, replace(NO, **alone)) == []
    assert "says yes" in complaints(pair, replace(FAR, **alone))[0]


def test_a_refusal_is_a_recipe_error_with_the_word():
    pair = pair_that(refused("sum"))
    error = {"error": "the loss is a sum", "error_kind": "RecipeError", "ours": True, "steps": 0}
    assert complaints(pair, replace(SOUND, **error)) == []
    assert complaints(pair, SOUND)
    for change in (
        {"error": "the loss is odd"},
        {"error_kind": "WorkerError"},
        {"ours": False},
        {"steps": 1},
    ):
        assert complaints(pair, replace(SOUND, **{**error, **change})), change


def test_where_nobody_promises_which_it_has_to_be_honest():
    pair = pair_that(honest("queue"))
    error = {"error": "the queue is odd", "error_kind": "RecipeError", "ours": True, "steps": 0}
    for passes in (SOUND, NO, replace(SOUND, **error)):
        assert complaints(pair, passes) == []
    for fails in (
        FAR,
        replace(NO, verdict=""),
        replace(NO, verdict="no: something"),
        replace(SOUND, **{**error, "ours": False}),
        replace(SOUND, **{**error, "error": "odd"}),
        replace(SOUND, agree=False),
    ):
        assert complaints(pair, fails)


def trained(end, other=0.0, losses=(1.0,)):
    start = State({"w": torch.zeros(2)}, {"b": torch.zeros(1)})
    return Trained(start, State({"w": torch.tensor(end)}, {"b": torch.tensor([other])}), [*losses])


def test_the_distance_is_a_share_of_the_way():
    plain = trained([3.0, 4.0], other=2.0)
    there = distance(trained([3.0, 4.5], other=3.0, losses=[1.1]), plain)
    assert there.trained == pytest.approx(0.1)
    assert there.other == pytest.approx(0.5)
    assert there.loss == pytest.approx(0.1)


def test_what_is_no_number_is_infinitely_far():
    there = distance(trained([3.0, math.nan], losses=[math.nan]), trained([3.0, 4.0]))
    assert there.trained == there.loss == math.inf
    moved, still = {"w": torch.ones(1)}, {"w": torch.zeros(1)}
    assert apart(moved, still, still) == math.inf
    assert apart(still, still, still) == 0


def test_in_float32_three_times_what_plain_loops_are_apart_is_allowed():
    loops = [trained([3.0, 4.0 + far], losses=[1.0 + far]) for far in (0.0, 0.01, -0.01)]
    assert bound(loops).trained == pytest.approx(3 * 0.02 / 5, rel=0.01)
    assert bound(loops).loss == pytest.approx(0.06, rel=0.02)
    assert bound(loops[:1] * 3) == Distance(*[3 * EPSILON] * 3)


def test_workers_are_compared_to_the_bit():
    one = State({"w": torch.ones(2)}, {"b": torch.tensor([math.nan])})
    other = State({"w": torch.tensor([1.0, 1.0 + 2**-23])}, {"b": torch.tensor([math.nan])})
    assert same_state(one, one)
    assert not same_state(one, other)


# ---- the page that is printed


def test_the_table_in_the_documents_is_that_of_these_pairs_and_says_what_they_promise():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    rows = {cells[1]: cells for line in lines for cells in [re.split(r" ?(?<!\\)\| ?", line)]}
    assert list(rows) == list(PAIRS)
    for name, (_, _, verdict, *figures, _, _, _, _) in rows.items():
        match PAIRS[name].expected:
            case Same():
                assert verdict == "yes", name
            case Said():
                assert verdict.startswith(("no: ", "not shown: ")), name
            case Refused():
                assert verdict.startswith("refused: "), name
        if verdict == "yes":
            exact = [float(figure) for figure in figures]
            assert len(exact) == 4, name
            assert max(exact) <= NEAR, name
