"""Jobs that plan nothing of their data end with the parameters that they had before data could be
planned: the hashes are those of the commit before 75d0fe74.

All sums are of whole numbers, and the batch is a power of two, so every machine has the same bits.
"""

import pytest
from started import RECIPES

import instep
from marks import tail

pytestmark = pytest.mark.process

RECORDED = {
    "global": "125e00fbe7550de0d31844508bad48e1dd1b1b675502fa90ca5adbf8ef09e36d",
    "windowed": "ff5aa33e948202940d8068aa7ecccda8ff517c3c38c93e1f8f29ac4d292f9f10",
    "dataset": "cced376dd645690ad1a16428228db66f6e79dc08b5252934efa1bd9f5d447d4b",
}


@pytest.mark.parametrize("order", ["global", tail("windowed"), tail("dataset")])
def test_a_job_that_plans_nothing_of_its_data_has_the_parameters_of_before(tmp_path, order):
    run = instep.train(
        f"{RECIPES / 'adds_up.py'}:in_whole_numbers",
        runs=tmp_path,
        workers=2,
        seed=5,
        quiet=True,
        train={"steps": 4, "global_batch": 32, "micro_batches": 4},  # one of the second epoch
        data={"order": order, "window": 16},
    )
    assert run.summary["parameters_sha256"] == RECORDED[order]
