"""Statistics of columns against numpy's, however the samples are divided."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.data.shards.encode import encode
from instep.data.shards.statistics import MOST_CLASSES, Figures, take_batch

RNG = np.random.default_rng(3)
SAMPLES = [
    {
        "x": float(RNG.normal(1e6, 1)),
        "y": int(RNG.integers(4)),
        "t": str(RNG.choice(["a", "bb", "ccc"])),
        "v": RNG.normal(size=int(RNG.integers(5))),
    }
    for _ in range(100)
]
COLUMNS = encode(SAMPLES, None).columns


def figures_of(cuts):
    found = [Figures() for _ in COLUMNS]
    bounds = [0, *sorted(cuts), len(SAMPLES)]
    for first, stop in pairwise(bounds):
        if stop > first:
            own = [Figures() for _ in COLUMNS]
            take_batch(own, COLUMNS, encode(SAMPLES[first:stop], COLUMNS).views)
            for one, other in zip(found, own, strict=True):
                one.take(other)
    return {c.name: f.as_table(c) for c, f in zip(COLUMNS, found, strict=True)}


@given(st.lists(st.integers(0, len(SAMPLES)), max_size=6))
def test_they_are_numpys_however_samples_are_divided(cuts):
    found = figures_of(cuts)
    for name, values in (
        ("x", [s["x"] for s in SAMPLES]),
        ("y", [s["y"] for s in SAMPLES]),
        ("v", np.concatenate([s["v"] for s in SAMPLES])),
    ):
        assert found[name]["mean"] == pytest.approx(np.mean(values), rel=1e-12)
        assert found[name]["deviation"] == pytest.approx(np.std(values), rel=1e-9)
        assert (found[name]["least"], found[name]["largest"]) == (np.min(values), np.max(values))
    for name in ("y", "t"):
        wanted = Counter(str(sample[name]) for sample in SAMPLES)
        assert found[name]["classes"] == dict(wanted)
    lengths = [len(sample["v"]) for sample in SAMPLES]
    assert found["v"]["lengths"]["mean"] == pytest.approx(np.mean(lengths))


def test_a_column_of_many_values_has_no_classes_and_what_is_not_finite_no_mean():
    samples = [{"y": i, "x": float(i % 2)} for i in range(MOST_CLASSES + 1)]
    samples += [{"y": 0, "x": float("nan")}, {"y": 0, "x": float("inf")}]
    encoded = encode(samples, None)
    found = [Figures() for _ in encoded.columns]
    take_batch(found, encoded.columns, encoded.views)
    tables = [f.as_table(c) for f, c in zip(found, encoded.columns, strict=True)]
    assert "classes" not in tables[0]
    assert tables[1]["mean"] == pytest.approx(500 / 1001)
