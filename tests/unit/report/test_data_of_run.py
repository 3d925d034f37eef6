"""The section of the report about a run's data, against what its log and manifest say."""

import html
import re

import pytest

from instep.data.shards.columns import Column
from instep.data.shards.encode import encode
from instep.data.shards.manifest import Manifest, Shard, Source, write_manifest
from instep.data.shards.writer import ShardWriter
from instep.events import read_events
from instep.report.page.page import render
from instep.store.run_folder import RunFolder
from lazily import Lazy
from made_up_runs import BEGIN_S, make_run, write_events

stats = Lazy("scipy.stats")

SPLIT = {
    "split": "stratified",
    "samples": 1300,
    "train": 1000,
    "validation": 250,
    "fold": 1,
    "folds": 5,
    "digests": [1, 2],
    "looked_at": [900, 250],
    "duplicates": 3,
    "example": [40, 7],
    "classes": [{"<b>": 800, "dog": 200, "gone": 0}, {"<b>": 200, "dog": 50, "gone": 0}],
}

NEWER = ("looked_at", "duplicates", "example", "classes")


def page_of(tmp_path, *events):
    """The page of a run whose log has these events too, its text, its bars with their widths."""
    path = make_run(tmp_path / "digits")
    first, *rest = read_events(path / "events.jsonl")
    more = [{"time": BEGIN_S + 1, "event": name, **fields} for name, fields in events]
    write_events(path, [first, *more, *rest])
    page = render(RunFolder(path))
    bars = re.findall(r'style="width:([\d.]+)%" title="([^"]*)"', page)
    shown = re.sub(r"<[^>]*>", " ", page[page.index("<main>") : page.index("</main>")])
    words = " ".join(html.unescape(shown).split())
    return page, words, {html.unescape(title): float(width) for width, title in bars}


def known(folder, sha256="5ceb"):
    fields = {"samples": 1000, "contents": [], "differed": [], "prepared": [[str(folder), sha256]]}
    return "dataset_known", {"dataset": "training", **fields}


def test_the_sides_of_a_run_their_classes_and_what_is_on_both(tmp_path):
    page, words, bars = page_of(tmp_path, ("data_split", SPLIT))
    assert "<h2>Data</h2>" in page
    assert "<b>: train" not in page
    of_sides = {"train": 1000, "validate": 250, "neither": 50}
    for side, count in of_sides.items():
        assert bars[f"samples: {side} {count:,}"] == pytest.approx(count / 13, abs=1e-3)
    for side, counts in zip(("train", "validate"), SPLIT["classes"], strict=True):
        for name in ("<b>", "dog"):
            assert bars[f"{name}: {side} {counts[name]}"] == pytest.approx(counts[name] / 10)
    assert "gone" not in words
    assert "By data.split = 'stratified', fold 2 of 5." in words
    assert "2 classes; the largest has 4 times as many samples as the smallest." in words
    assert (
        "3 of 250 samples to validate on that were compared have the content of one of 900" in words
    )
    assert "sample 40 of the dataset is sample 7." in words


def test_the_data_of_each_participant_and_the_shards_that_are_still_there(tmp_path):
    manifest = Manifest(
        columns=[Column("kind", "text"), Column("x", "number", "float64")],
        samples=1000,
        bytes=9000,
        sha256="5ceb",
        bad=0,
        shards=[Shard("a.arrow", 600, 5000), Shard("b.arrow", 400, 4000)],
        statistics={
            "kind": {"classes": {"<i>": 750, "o": 250}},
            "x": {"mean": 0.25, "deviation": 2.0, "least": -3.0, "largest": 1e300},
        },
        sources=[Source("raw.csv", 10, 0, "ab")],
    )
    write_manifest(tmp_path, manifest)
    divided = ("data_divided", {"sizes": [750, 250], "digest": 1})
    page, words, bars = page_of(tmp_path, known(tmp_path), divided)
    assert bars["participant 1: samples 250"] == pytest.approx(100 / 3, abs=1e-3)
    assert "250 (25.0%)" in words
    assert bars["b.arrow: samples 400"] == pytest.approx(200 / 3, abs=1e-3)
    assert bars["<i>: all 750"] == 100
    assert "x float64 values -3 1e+300 0.25 2" in words
    assert "<i>" not in page
    for other, said in (
        (known(tmp_path, "else"), "has other samples now"),
        (known("/no"), "has no manifest.json"),
        (
            known("s3://KEY:word@b/a", "url"),
            "Shards and columns: s3://KEY@b/a is not read for a report.",
        ),
    ):
        (tmp_path / other[1]["prepared"][0][1]).mkdir()
        _, words, bars = page_of(tmp_path / other[1]["prepared"][0][1], other)
        assert said in words
        assert "b.arrow: samples 400" not in bars


def test_the_labels_of_each_participant_and_how_far_they_are_from_all(tmp_path):
    each = [{"<u>": 300, "o": 100}, {"o": 100}, {"<u>": 100}]
    divided = {"sizes": [400, 100, 100], "digest": 1, "labels": each}
    page, words, bars = page_of(tmp_path, ("data_divided", divided))
    assert bars["participant 0: <u> 300"] == pytest.approx(75)
    assert bars["participant 1: o 100"] == pytest.approx(25)
    whole = [400 / 600, 200 / 600]
    shares = ([3 / 4, 1 / 4], "400 (66.7%)"), ([0, 1], "100 (16.7%)"), ([1, 0], "100 (16.7%)")
    for own, samples in shares:
        assert f"{samples}, {stats.entropy(own, whole):.3f} nats" in words
    assert "counts and draws them" not in words
    assert "<u>" not in page
    damaged = {**divided, "labels": [{"o": -1}, 3, {}]}
    (tmp_path / "damaged").mkdir()
    _, words, bars = page_of(tmp_path / "damaged", ("data_divided", damaged))
    assert bars["participant 1: samples 100"] == pytest.approx(25)
    assert "nats" not in words


def test_the_lengths_of_samples_in_the_shards_that_a_run_has_read(tmp_path):
    samples = [{"text": "a" * (1 + n % 30), "y": n} for n in range(90)]
    shards = []
    for number, some in enumerate([samples[:50], samples[50:]]):
        encoded = encode(some, None)
        with ShardWriter(tmp_path / f"{number}.arrow", encoded.columns) as writer:
            writer.write(encoded.views)
            writer.close()
        shards.append(Shard(f"{number}.arrow", len(some), writer.bytes))
    size = sum(shard.bytes for shard in shards)
    of = {"samples": 90, "bytes": size, "sha256": "5ceb", "bad": 0, "statistics": {}, "sources": []}
    write_manifest(tmp_path, Manifest(columns=encoded.columns, shards=shards, **of))
    page, words, _ = page_of(tmp_path, known(tmp_path))
    assert "Lengths: text (bytes) 1 to 30, mean 15.5, median 15.5" in words
    assert "of 90 samples" in words
    assert page.count(": 3 samples</title>") == 30
    (tmp_path / "1.arrow").write_bytes(b"")
    (tmp_path / "again").mkdir()
    _, words, _ = page_of(tmp_path / "again", known(tmp_path))
    assert "Lengths" not in words
    assert "Shards 2 files" in words


@pytest.mark.parametrize(
    "events",
    [
        [],
        [("data_split", {**SPLIT, "classes": [1, {"a": "b"}], "looked_at": [1], "example": [2]})],
        [("data_split", {key: value for key, value in SPLIT.items() if key not in NEWER})],
        [("dataset_known", {**known("/no")[1], "prepared": [1, ["a"], [1, 2]]})],
        [("parts_placed", {"sizes": [500, None, 500], "held": {}})],
    ],
    ids=["nothing", "damaged", "older", "no folders", "parts"],
)  # fmt: skip
def test_a_log_with_less_has_a_report_with_less(tmp_path, events):
    page, words, _ = page_of(tmp_path, *events)
    assert ("<h2>Data</h2>" in page) == (events != [] and events[0][0] != "dataset_known")
    assert "Classes" not in words
