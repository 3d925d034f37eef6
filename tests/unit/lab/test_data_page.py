"""The page of `instep data --html`, against counts of numpy and scipy over the same samples."""

import io
import json
import re
import tarfile
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from instep.cli import main
from instep.data.order import Order, key
from instep.data.shards.encode import encode
from instep.data.shards.manifest import Manifest, Shard, Source, write_manifest
from instep.data.shards.statistics import Figures, take_batch
from instep.data.shards.writer import ShardWriter
from instep.report.figures import shard_lengths
from lazily import Lazy

stats = Lazy("scipy.stats")

KINDS = ["<b>", "a & b", "c"]


class Page(HTMLParser):
    """What a page says, and its bars: of stacked ones text and width, of histograms the text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.words, self.bars, self.bins, self._inside = [], [], {}, [], ""
        self.feed(path.read_text())
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._inside, told = tag, dict(attributes)
        if tag == "svg":
            self.bins.append([])
        if tag == "i" and "title" in told:
            self.bars[told["title"]] = float(re.search(r"[\d.]+", told["style"])[0])

    def handle_data(self, data):
        if self._inside in ("style", "script"):
            return
        (self.bins[-1] if self._inside == "title" and self.bins else self.words).append(data)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """600 samples in 3 shards: `kind` out of balance, `x` of several lengths; and the samples."""
    monkeypatch.chdir(tmp_path)
    made, rng = tmp_path / "made", np.random.default_rng(3)
    made.mkdir()
    samples = [
        {
            "kind": KINDS[int(k)],
            "x": np.zeros(n, np.float32),
            "n": float(i),
            "id": 7000 + i,
            "width": 20 + i % 24,
        }
        for i, k, n in zip(
            range(600), rng.binomial(2, 0.3, 600), rng.geometric(0.05, 600), strict=True
        )
    ]
    shards, figures = [], [Figures() for _ in range(5)]
    for number, (first, stop) in enumerate([(0, 300), (300, 500), (500, 600)]):
        encoded = encode(samples[first:stop], None)
        with ShardWriter(made / f"{number}.arrow", encoded.columns) as writer:
            writer.write(encoded.views)
            writer.close()
        take_batch(figures, encoded.columns, encoded.views)
        shards.append(Shard(f"{number}.arrow", stop - first, writer.bytes))
    (made / "bad.jsonl").write_text(
        "".join(
            json.dumps({"where": f"raw<i>.csv, line {n}", "error": "no <u>", "record": "r"}) + "\n"
            for n in range(30)
        )
    )
    manifest = Manifest(
        columns=encoded.columns,
        samples=600,
        bytes=sum(shard.bytes for shard in shards),
        sha256="5ceb",
        bad=30,
        bad_file="bad.jsonl",
        shards=shards,
        statistics={
            column.name: own.as_table(column)
            for column, own in zip(encoded.columns, figures, strict=True)
        },
        sources=[Source("raw<i>.csv", 1234, 0, "abcd" * 16)],
        made_by={"asked": {"map": "clean.py:<record>"}},
    )
    write_manifest(made, manifest)
    return samples


def check_bins(bins, values):
    """Assert that the bins of a histogram hold all of these values, each where it belongs."""
    values, total = np.asarray(values), 0
    for text in bins:
        low, high, count = re.match(r"([\d,]+)(?: to ([\d,]+))?: ([\d,]+) sample", text).groups()
        low, count = int(low.replace(",", "")), int(count.replace(",", ""))
        high = int(high.replace(",", "")) if high else low
        assert count == ((values >= low) & (values <= high)).sum()
        total += count
    assert total == len(values)


def test_a_folder_is_drawn_as_it_is(folder, tmp_path, capsys):
    assert main(["data", "made", "--html", "page.html", "--sample", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["html"] == "page.html"
    page = Page(tmp_path / "page.html")
    counts = Counter(sample["kind"] for sample in folder)
    for kind, count in counts.items():
        width = page.bars[f"{kind}: all {count}"]
        assert width == pytest.approx(100 * count / max(counts.values()), abs=1e-3)
    for number, size in enumerate([300, 200, 100]):
        assert page.bars[f"{number}.arrow: samples {size}"] == pytest.approx(size / 3, abs=1e-3)
    assert "b" not in page.tags[: page.tags.index("svg")]
    assert "u" not in page.tags
    assert "raw<i>.csv, line 19 no <u>" in page.text
    assert "line 20 " not in page.text
    assert "20 of 30 records shown." in page.text
    assert "raw<i>.csv 1.2 kB" in page.text
    assert "clean.py:<record>" in page.text
    assert "Sample 5" in page.text
    assert "a folder has" not in page.text
    lengths = [len(sample["x"]) for sample in folder]
    of_text = [len(sample["kind"]) for sample in folder]
    kinds, xs, widths = page.bins
    check_bins(kinds, of_text)
    check_bins(xs, lengths)
    check_bins(widths, [sample["width"] for sample in folder])
    assert "7,000" in page.text  # the least of all, in the table of columns
    assert not [title for title in page.bars if title.startswith("7")]
    assert f"mean {np.mean(lengths):.4g}, median {np.median(lengths):.4g}" in page.text


def test_a_folder_in_a_terminal_has_bars_of_classes_and_bins_and_none_of_identifiers(
    folder, capsys
):
    assert main(["data", "made"]) == 0
    kind, x, _, ids, width = capsys.readouterr().out.split("column")[1:]
    counts = Counter(sample["kind"] for sample in folder)
    for name, count in counts.items():
        assert re.search(rf" {name} +#+ +{count} ", kind)
    assert "#" not in x + ids
    assert "600 different values" in ids
    drawn = re.findall(r"(\d+) to (\d+) +#* +(\d+) ", width.partition("values")[2])
    widths = np.array([sample["width"] for sample in folder])
    assert sum(int(count) for _, _, count in drawn) == 600
    for least, most, count in drawn:
        assert int(count) == ((int(least) <= widths) & (widths <= int(most))).sum()


@pytest.mark.parametrize("page", ["", "nowhere/page.html"])
def test_a_page_that_could_lie_nowhere_is_refused(folder, capsys, page):
    assert main(["data", "made", "--html", page]) == 2
    assert f"--html {page!r} names no file in a folder" in capsys.readouterr().err


def test_of_a_large_folder_a_part_is_measured_and_of_a_poor_one_what_there_is(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(shard_lengths, "MOST_LENGTHS", 100)
    monkeypatch.setattr(shard_lengths, "MOST_FILES", 2)
    (tmp_path / "made" / "0.arrow").unlink()
    assert main(["data", "made", "--html", "page.html"]) == 0
    page = Page(tmp_path / "page.html")
    assert "of 100 samples of 600, chosen at random" in page.text
    chosen = Order(300, key(0, shard_lengths._OF_SAMPLES)).indices(0, 0, 100)  # of the other files
    check_bins(page.bins[1], [len(folder[300 + index]["x"]) for index in chosen])
    assert "A sample: made/0.arrow cannot be read" in page.text
    (tmp_path / "made" / "1.arrow").write_bytes(b"")
    assert main(["data", "made", "--html", "page.html"]) == 0
    assert "Lengths: made/1.arrow has 0 bytes" in Page(tmp_path / "page.html").text


RECIPE = """
import torch
from torch import nn
import instep
from instep.data.sources import shards

def recipe():
    return instep.Recipe(
        model=nn.Linear(1, 1), train=shards("made"), compute_loss=lambda model, batch: batch["n"],
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )
"""
OWN = """
recipe = "in_parts.py:recipe"
[data]
labels = "kind"
split = "blocks"
validation = 0.25
[train]
global_batch = 9
[sync]
name = "averaging"
participants = 3
[sync.options]
partition = "blocks"
"""


def test_a_job_is_drawn_by_side_with_the_labels_of_each_participant(folder, tmp_path):
    (tmp_path / "in_parts.py").write_text(RECIPE)
    (tmp_path / "job.toml").write_text(OWN)
    assert main(["data", "job.toml", "--html", "page.html"]) == 0
    page = Page(tmp_path / "page.html")
    labels = np.array([sample["kind"] for sample in folder])
    train, validate = labels[:450], labels[450:]
    most = max(Counter(labels).values())
    for kind in KINDS:
        for side, of_side in (("train", train), ("validate", validate)):
            count = int((of_side == kind).sum())
            width = page.bars[f"{kind}: {side} {count}"]
            assert width == pytest.approx(100 * count / most, abs=1e-3)
    assert (page.bars["samples: train 450"], page.bars["samples: validate 150"]) == (75, 25)
    assert "0 of 150 samples to validate on have the content of one of 450" in page.text
    whole = [(train == kind).mean() for kind in KINDS]
    for number, part in enumerate(np.split(train, 3)):
        counts = [int((part == kind).sum()) for kind in KINDS]
        for kind, count in zip(KINDS, counts, strict=True):
            width = page.bars[f"participant {number}: {kind} {count}"]
            assert width == pytest.approx(100 * count / 150, abs=1e-3)
        assert f"150 (33.3%), {stats.entropy(counts, whole):.3f} nats" in page.text
    assert "Shards" in page.text


PLAIN = """
import torch
from torch import nn
import instep

class Many:
    def __len__(self):
        return 10**9
    def __getitem__(self, index):
        with open("reads", "a") as file:
            print(index, file=file)
        return torch.zeros(2), 1.0

def recipe():
    return instep.Recipe(
        model=nn.Linear(2, 1), train=Many(), loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )
"""


def test_what_is_not_known_is_said_and_a_huge_dataset_is_not_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many.py").write_text(PLAIN)
    (tmp_path / "job.toml").write_text('recipe = "many.py:recipe"\n')
    assert main(["data", "job.toml", "--html", "page.html"]) == 0
    text = Page(tmp_path / "page.html").text
    for unknown in (
        "Classes of the sides: nobody says the labels. Set data.labels",
        "Leaks: nothing is validated on.",
        "Lengths: 500 samples were read, and all have one size.",
        "Shards, bad records and sources: the dataset is no folder of instep prepare",
    ):
        assert unknown in text
    assert len((tmp_path / "reads").read_text().split()) == 500
    (tmp_path / "kept.txt").write_text("mine")
    assert main(["data", "job.toml", "--html", "kept.txt"]) == 2
    assert "--html 'kept.txt' exists already" in capsys.readouterr().err
    assert (tmp_path / "kept.txt").read_text() == "mine"


SOURCES = """
import torch
from PIL import Image
from torch import nn
import instep
from instep.data import sources

class Pictures(list):
    pass

def recipe(kind):
    train = {
        "images": lambda: sources.image_folder("images"),
        "text": lambda: sources.text("some.txt", 4),
        "tokens": lambda: sources.tokens("some.bin", 3),
        "webdataset": lambda: sources.webdataset("some.tar"),
        "pictures": lambda: [(Image.new("L", (3 + n, 2)), {"of": [n] * n}) for n in range(9)],
        "broken": lambda: [None] * 9,
    }[kind]()
    return instep.Recipe(
        model=nn.Linear(1, 1), train=train, compute_loss=lambda model, batch: None,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )
"""


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("images", ["Lengths: 0, dim 1 ", "Lengths: 0, dim 2 ", "of 4 samples that were read"]),
        ("text", ["Lengths: 95 samples were read, and all have one size."]),
        ("tokens", ["all have one size", "int64 [3]: "]),
        ("webdataset", ["Lengths: txt 1 to 4, mean 2.5, median 2.5", "txt a"]),
        ("pictures", ["Lengths: 1.of 0 to 8, mean 4, median 4", "<PIL.Image.Image image mode=L"]),
        ("broken", ["Sample ", "0 null"]),
    ],
)
def test_every_kind_of_source_has_a_page(tmp_path, monkeypatch, kind, wanted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sources.py").write_text(SOURCES)
    (tmp_path / "some.txt").write_text("instep" * 64)
    np.arange(30, dtype=np.uint16).tofile(tmp_path / "some.bin")
    with tarfile.open(tmp_path / "some.tar", "w") as tar:
        for number in range(4):
            entry = tarfile.TarInfo(f"{number}.txt")
            entry.size = number + 1
            tar.addfile(entry, io.BytesIO(b"a" * entry.size))
    for number in range(4):
        path = tmp_path / "images" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5 + number, 9 - number)).save(path)
    (tmp_path / "job.toml").write_text(
        f"recipe = 'sources.py:recipe'\n[arguments]\nkind = '{kind}'\n"
    )
    assert main(["data", "job.toml", "--html", "page.html"]) == 0
    text = Page(tmp_path / "page.html").text
    for words in [*wanted, "Classes of the sides: nobody says the labels"]:
        assert words in text
