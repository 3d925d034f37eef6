"""The share of a global batch that could be read, by which its mean is corrected."""

import pytest

from instep.engine.skipping import share_read
from instep.errors import DataError


@pytest.mark.parametrize(
    ("skipped", "samples", "left_out", "share"),
    [
        (0, 8, 0, 1.0),
        (2, 8, 0, 0.75),
        (0, 8, 2, 0.75),
        (2, 8, 4, 0.25),
        (
            2,
            8,
            6,
            0.125,
        ),  # what was read was all left out: one counts
        (0, 8, 8, 0.125),
        (0, 0, 0, 1.0),
    ],
)
def test_it_is_what_was_read_and_kept_over_all(skipped, samples, left_out, share):
    assert share_read(skipped, samples, left_out) == share


@pytest.mark.parametrize("skipped", [8, 9])
def test_a_batch_of_which_nothing_can_be_read_is_refused(skipped):
    with pytest.raises(DataError, match="none of the 8 samples"):
        share_read(skipped, 8)
