"""Every pair of model and loss on a GPU, held against a plain PyTorch loop on the same GPU."""

from __future__ import annotations

import pytest
import torch
from judge import complaints
from loops import Loops
from pair import MICRO_BATCHES, Refused
from pairs import PAIRS

IN_NO_ORDER = ("recommender, sparse, SGD",)
"""A GPU adds the rows of equal words in no order: in float32 a plain loop differs from itself."""

pytestmark = [pytest.mark.process, pytest.mark.cuda]

RUNS = [("float64", 1), ("float64", MICRO_BATCHES), ("float32", 0)]
"""Type and micro-batches, 0 for those of the plain loop: a GPU computes products of other shapes by
other algorithms, which in float32 round otherwise than a bound of permuted loops allows.

A worker has a GPU of its own, so a machine with one runs one.
"""


@pytest.fixture(scope="session")
def loops(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU on this machine")
    forking = Loops(tmp_path_factory.mktemp("loops"), device="cuda")
    yield forking
    forking.close()


@pytest.mark.parametrize("name", PAIRS)
def test_a_run_is_the_same_or_says_what_differs(name, loops):
    pair = PAIRS[name]
    never_runs = isinstance(pair.expected, Refused) and pair.expected.alone
    references = None if never_runs else loops.plain(pair)
    wrong = []
    for dtype, wanted in RUNS[:2] if name in IN_NO_ORDER else RUNS:
        micro_batches = wanted or (MICRO_BATCHES if pair.draws else 1)
        outcome = loops.run(pair, references, 1, dtype, micro_batches=micro_batches)
        wrong += complaints(pair, outcome)
    assert not wrong, "\n".join(wrong)
