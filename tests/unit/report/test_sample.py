"""What is shown of one sample: little, whatever it holds, and as numpy has it."""

import json
from collections import namedtuple

import numpy as np
import pytest
import torch

from instep.report.figures.lengths import MOST_BINS, histogram_of, lengths_of, sizes_of
from instep.report.figures.sample import in_words, sample_table, summary_of

Pair = namedtuple("Pair", "image label")
WIDE = np.arange(60).reshape(3, 4, 5)


class Odd:
    def __repr__(self):
        return "<odd>" * 1000


@pytest.mark.parametrize(
    ("value", "summary", "words"),
    [
        (3, 3, "3"),
        (torch.tensor(2.5), 2.5, "2.5"),
        (np.float32("nan"), "nan", "nan"),
        (None, None, "null"),
        ("short", "short", "short"),
        ("x" * 900, {"text": "x" * 200, "length": 900}, "x" * 200 + " ... (900 characters)"),
        (b"\x01\xff", {"bytes": 2, "first": "01ff"}, "2 bytes: 01ff"),
        (WIDE, None, "int64 [3, 4, 5]: 0, 1, 2, 3, 4, 5, 6, 7, ..."),
        (torch.tensor(WIDE).permute(2, 0, 1), None, None),
        (np.zeros((9, 1, 2)), None, None),
        (np.zeros((0, 3), np.int8), None, "int8 [0, 3]: "),
        (torch.tensor([1.0, float("inf")]), None, "float32 [2]: 1, inf"),
        (torch.eye(3, dtype=torch.bfloat16), None, None),
        (torch.eye(3).to_sparse(), {"shape": [3, 3], "dtype": "float32"}, "float32 [3, 3]: ..."),
        ([1, [2, "a"]], [1, [2, "a"]], '[1, [2, "a"]]'),
        (list(range(100)), {"length": 100, "first": list(range(8))}, None),
        ({"a": WIDE}, {"a": summary_of(WIDE)}, None),
        (Odd(), None, None),
    ],
)  # fmt: skip
def test_a_value_in_plain_json_and_in_words(value, summary, words):
    found = summary_of(value)
    assert len(json.dumps(found, allow_nan=False)) < 1000
    if summary is not None or value is None:
        assert found == summary
    elif hasattr(value, "shape"):
        whole = torch.as_tensor(value)
        assert found["shape"] == list(whole.shape)
        assert list(map(float, found["first"])) == whole.flatten()[:8].tolist()
    assert words is None or in_words(found) == words


def test_a_huge_array_is_not_copied():
    huge = torch.empty(1).expand(1 << 20, 1 << 20, 3).permute(2, 1, 0)
    assert summary_of(huge)["shape"] == [3, 1 << 20, 1 << 20]
    assert sample_table(4, Pair(huge, 1))["values"]["1"] == 1


def test_sizes_that_differ_are_lengths_and_others_are_not():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 50, 300)
    samples = [
        {"x": np.zeros((3, n)), "text": "é" * n, "same": torch.zeros(7), "of": (b"k" * n, 5)}
        for n in sizes
    ]
    found = {each.name: each for each in lengths_of(map(sizes_of, samples))}
    assert set(found) == {"x, dim 1", "text", "of.0"}
    np.testing.assert_array_equal(found["text"].values, 2 * sizes)
    wanted = {"samples": 300, "mean": sizes.mean(), "deviation": sizes.std(), "least": sizes.min()}
    assert found["of.0"].as_table() == pytest.approx({**wanted, "largest": sizes.max()})


@pytest.mark.parametrize(
    "values", [[3, 9], [0, 0, 0, 5000], [7] * 9 + [8], range(1000), [1, 2, 3, 1 << 40], [0, 1]]
)
def test_a_histogram_has_each_sample_once_in_few_bins_of_whole_numbers(values):
    values = np.array(values, np.int64)
    counts, edges = histogram_of(values)
    assert counts.sum() == len(values)
    assert len(counts) <= MOST_BINS
    assert (np.diff(edges) > 0).all()
    for count, first, stop in zip(counts, edges, edges[1:], strict=False):
        assert count == sum(first <= value < stop for value in values)
