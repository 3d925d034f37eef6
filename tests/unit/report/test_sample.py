"""What is shown of one sample: little, whatever it holds, and as numpy has it."""

import json
import re
from collections import namedtuple

import numpy as np
import pytest
import torch

from instep.report.figures.lengths import MOST_BINS, histogram_of, lengths_of, sizes_of
from instep.report.figures.pixels import pixels_in
from instep.report.figures.sample import in_words, sample_table, summary_of
from instep.report.page.bars import image

Pair = namedtuple("Pair", "image label")
WIDE = np.arange(60).reshape(3, 4, 5)
MANY = dict.fromkeys(range(90), 0)


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
        ({"a": WIDE}, {"fields": {"a": summary_of(WIDE)}}, None),
        ({"shape": (480, 640)}, {"fields": {"shape": [480, 640]}}, "{shape: [480, 640]}"),
        ({"bytes": "abc"}, None, "{bytes: abc}"),
        ({"bytes": 123, "first": b"a"}, None, "{bytes: 123, first: 1 bytes: 61}"),
        ({"text": "a", "length": None}, None, "{text: a, length: null}"),
        ({"text": 3, "type": "b"}, None, "{text: 3, type: b}"),
        ({"fields": 5}, {"fields": {"fields": 5}}, "{fields: 5}"),
        (MANY, {"fields": {str(n): 0 for n in range(50)}, "length": 90}, None),
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


@pytest.mark.parametrize(
    ("shape", "dtype", "drawn"),
    [
        ((3, 28, 20), np.uint8, (28, 20)),
        ((64, 100, 3), np.uint8, (16, 25)),
        ((1, 32, 32), np.float32, (32, 32)),
        ((12, 12), np.uint8, (12, 12)),
        ((12, 12), np.float32, None),
        ((4, 30, 30), np.uint8, None),
        ((3, 4, 90), np.uint8, None),
    ],
)
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_what_looks_like_a_picture_is_drawn_pixel_by_pixel(shape, dtype, drawn, kind):
    values = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)
    found = pixels_in((kind(values), 1))
    if drawn is None:
        assert found == {}
        return
    step = max(shape) // 25 if max(shape) > 32 else 1
    whole = (
        values.reshape(*values.shape[:2], -1)
        if shape[0] not in (1, 3)
        else values.transpose(1, 2, 0)
    )
    wanted = np.broadcast_to(whole[::step, ::step], (*drawn, 3)).astype(float)
    if dtype == np.float32:
        wanted = 255 * (wanted - values.min()) / (values.max() - values.min())
    np.testing.assert_array_equal(found["0"], wanted.round())
    svg = image(found["0"])
    area = [int(w) for w in re.findall(r'width="(\d+)" height="1"', svg)]
    assert sum(area) == drawn[0] * drawn[1]
    red, green, blue = found["0"][0, 0]
    assert f'fill="#{red:02x}{green:02x}{blue:02x}"' in svg.partition("/>")[0]
