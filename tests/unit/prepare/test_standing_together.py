"""Which columns of prepared samples are sorted by class is said; those that are mixed are not."""

import json
import random
from pathlib import Path

import pytest
from test_prepare import ask, made

from instep.prepare import plan
from instep.prepare.prepare import Prepared


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(labels)`: a raw file with a record of each, which several tasks read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "SMALLEST", 2000)

    def written(labels):
        rows = [{"y": y, "name": f"c{y}", "id": n, "x": n / 7} for n, y in enumerate(labels)]
        Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return written


SORTED = sorted(n % 10 for n in range(2000))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (SORTED, ["y", "name"]),
        (random.Random(1).sample(SORTED, 2000), []),
        ([*range(10)] * 200, []),
        ([0] * 2000, []),
        (SORTED[:1000] + random.Random(1).sample(SORTED, 1000), ["y", "name"]),
        ([n % 7 for n in range(20)], []),  # of one task
    ],
)
def test_columns_whose_equal_values_stand_together_are_named(write, labels, said):
    write(labels)
    _, job, _ = made(ask(sources=["a.jsonl"]))
    assert job.together == said


def test_a_shuffle_mixes_them_and_the_terminal_says_what_to_do(write):
    write(SORTED)
    manifest, job, _ = made(ask(sources=["a.jsonl"]))
    found = Prepared(Path("out"), manifest, 5, 0, 0, 0, 1, 1.0, [], job.together)
    text = "\n".join(found.lines())
    assert "equal values of y, name stand together" in text
    assert "--shuffle" in text
    assert found.as_table()["sorted_by"] == ["y", "name"]
    _, job, _ = made(ask(sources=["a.jsonl"], to="mixed", shuffle=True))
    assert job.together == []
