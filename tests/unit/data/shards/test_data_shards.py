"""Samples that were written are read again as they were, and what is damaged is named."""

import hashlib
import io
import json
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from instep.data import SOURCES
from instep.data.shards import dataset, digest, rows, writer
from instep.data.shards.columns import Column
from instep.data.shards.dataset import Shards
from instep.data.shards.digest import BLOCK, blocks_of, digest_blocks, digest_of
from instep.data.shards.encode import ImageFile, encode
from instep.data.shards.manifest import Manifest, Shard, read_manifest, write_manifest
from instep.data.shards.verify import damaged
from instep.data.shards.writer import ShardFile, ShardWriter
from instep.errors import DataError
from instep.plain_file import crc32_of

KINDS = {
    "integer": st.integers(-(2**63), 2**63 - 1),
    "flag": st.booleans(),
    "float": st.floats(width=64, allow_nan=False),
    "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    "bytes": st.binary(max_size=9),
    "short": st.integers(-128, 127).map(np.int8),
    "matrix": st.integers(0, 255).map(lambda n: np.full((2, 3), n, np.uint8)),
    "tensor": st.floats(width=32, allow_nan=False).map(lambda x: torch.full((2,), x)),
    "ragged": st.lists(st.integers(-9, 9), max_size=4).map(lambda v: np.array(v, np.int32)),
    "rows": st.integers(0, 3).map(lambda n: np.arange(2 * n, dtype=np.float32).reshape(n, 2)),
}


def written(folder: Path, samples: list, cuts: list[int]) -> Manifest:
    """Samples in a folder, in a file for each range between cuts."""
    columns = encode(samples, None).columns
    bounds = [0, *sorted(cuts), len(samples)]
    shards = []
    for number, (first, stop) in enumerate(pairwise(bounds)):
        if stop > first:
            with ShardWriter(folder / f"{number}.arrow", columns) as writer:
                for at in range(first, stop, 7):
                    writer.write(encode(samples[at : min(at + 7, stop)], columns).views)
                writer.close()
            shards.append(Shard(f"{number}.arrow", stop - first, writer.bytes))
    files = [(folder / shard.file, shard.samples) for shard in shards]
    blocks = b"".join(digest_blocks(files, 0, blocks_of(len(samples))))
    (folder / "blocks").write_bytes(blocks)
    manifest = Manifest(
        columns=columns,
        samples=len(samples),
        bytes=sum(shard.bytes for shard in shards),
        sha256=digest_of(columns, len(samples), [blocks]),
        bad=0,
        shards=shards,
        blocks="blocks",
    )
    write_manifest(folder, manifest)
    return manifest


def numbered(count: int) -> list:
    """Samples with a number, a text and a ragged array."""
    return [{"n": i, "t": f"é{i}" * (i % 3), "r": list(range(i % 4))} for i in range(count)]


def assert_same(found: object, wanted: object) -> None:
    """A value as a dataset returns it, and as it was given."""
    if isinstance(wanted, (str, bytes)):
        assert found == wanted
        return
    assert isinstance(found, torch.Tensor)
    truth = torch.as_tensor(wanted)
    if truth.dtype == torch.float64:
        truth = truth.to(torch.get_default_dtype())
    assert found.dtype == truth.dtype or not truth.numel()
    assert torch.equal(found, truth.to(found.dtype))


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(kind, data, tmp_path_factory):
    values = data.draw(st.lists(KINDS[kind], min_size=1, max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=3))
    folder = tmp_path_factory.mktemp("shards")
    written(folder, [{"x": value} for value in values], cuts)
    dataset = pickle.loads(pickle.dumps(SOURCES["shards"](folder)))
    assert len(dataset) == len(values) == sum(dataset.shard_sizes)
    order = data.draw(st.lists(st.integers(-len(values), len(values) - 1), max_size=8))
    for index, sample in zip(order, dataset.__getitems__(order), strict=True):
        assert_same(sample["x"], values[index])
        assert_same(dataset[index]["x"], values[index])


def test_a_sample_may_be_changed_and_is_read_again_as_it_was(tmp_path):
    written(tmp_path, [{"x": np.ones(3, np.float32)}] * 4, [])
    dataset = Shards(tmp_path)
    dataset[1]["x"].zero_()
    dataset.__getitems__([1, 2])[0]["x"].zero_()
    assert dataset[1]["x"].sum() == 3


def test_a_column_is_read_without_the_others(tmp_path):
    samples = numbered(50)
    written(tmp_path, samples, [10, 33])
    dataset = Shards(tmp_path, columns=["n"])
    assert dataset.column("n").tolist() == [sample["n"] for sample in samples]
    assert dataset.column("t") == [sample["t"] for sample in samples]
    assert set(dataset[3]) == {"n"}
    with pytest.raises(DataError, match=r"column 'r' .* differ in length"):
        dataset.column("r")
    with pytest.raises(DataError, match=r"no column 'm'\. Known: n, r, t"):
        Shards(tmp_path, columns=["m"])


@pytest.mark.parametrize("how", ["hashed", "read"])
def test_only_some_of_a_file_is_in_memory_while_all_of_it_is_used(tmp_path, monkeypatch, how):
    path, count, seen = tmp_path / "a.arrow", 32, []
    rows = [{"x": np.full(1 << 16, n, np.float64)} for n in range(count)]  # 16 MB
    with ShardWriter(path, encode(rows, None).columns) as file:
        for row in rows:
            file.write(encode([row], file.columns).views)
        file.close()
    for module in (digest, writer):
        monkeypatch.setattr(module, "MOST_MAPPED", 1 << 20)
    if how == "read":
        for number, views in enumerate(writer.read_through(path, 0, count)):
            assert float(views[0].data.sum()) == number << 16
            seen.append(resident(path))
    else:
        was_read = digest._Mapped.was_read
        monkeypatch.setattr(
            digest._Mapped,
            "was_read",
            lambda *given: (seen.append(resident(path)), was_read(*given)),
        )
        (found,) = digest_blocks([(path, count)], 0, 1)
        assert found == hashlib.sha256(np.stack([row["x"] for row in rows]).tobytes()).digest()
    assert len(seen) == count
    assert max(seen) < 3 << 20


def test_labels_and_lengths_are_looked_up_where_they_lie(tmp_path):
    written(tmp_path, samples := numbered(50), [9, 30])
    dataset, some = Shards(tmp_path, ["t"]), np.array([49, 3, 30, 3, 8])
    assert dataset.labels_in("n")(some).tolist() == some.tolist()
    assert dataset.labels_in("t") is None
    assert dataset.lengths_in("n")(some).tolist() == some.tolist()
    assert dataset.lengths_in("r")(some).tolist() == [len(samples[i]["r"]) for i in some]
    sizes = [len(samples[i]["t"].encode()) for i in some]
    looked_up = pickle.loads(pickle.dumps(dataset.lengths_in("t")))  # as for a loader process
    assert looked_up(some).tolist() == sizes
    with pytest.raises(DataError, match="no column 'x'"):
        dataset.lengths_in("x")


def test_a_file_that_is_let_go_counts_no_pages_as_memory_and_can_be_read_again(tmp_path):
    samples = [{"x": np.full(1 << 16, n, np.float64)} for n in range(32)]  # 16 MB
    with ShardWriter(tmp_path / "a.arrow", encode(samples, None).columns) as file:
        file.write(encode(samples, None).views)
        file.close()
    assert file.crc32 == crc32_of(tmp_path / "a.arrow")
    mapped = ShardFile(tmp_path / "a.arrow")
    before = resident(tmp_path / "a.arrow")
    (view,) = mapped.views(0)
    assert float(view.data.sum()) == (1 << 16) * sum(range(32))
    assert resident(tmp_path / "a.arrow") > before + (12 << 20)
    mapped.let_go()
    assert resident(tmp_path / "a.arrow") <= before
    assert view.data[31, 0] == 31


def test_of_many_files_that_a_read_has_few_rows_of_no_page_stays_with_the_process(
    tmp_path, monkeypatch
):
    samples, here = numbered(120), tmp_path
    written(here, samples, [*range(10, 120, 10)])
    monkeypatch.setattr(rows, "MANY", 3)
    monkeypatch.setattr(dataset, "MOST_KEPT", 6)
    found, indices = Shards(here), [115, 3, 3, 62, 44, 29, 71, 80, 19, 98]
    for most, keeps in ((3, True), (5, True), (10, False)):
        for index, sample in zip(indices[:most], found.__getitems__(indices[:most]), strict=True):
            for name, value in samples[index].items():
                assert_same(sample[name], value)
        kept = sum(resident(here / f"{number}.arrow") for number in range(12))
        assert bool(kept) is keeps


def resident(path):
    """Bytes of a mapped file that count as memory of this process."""
    found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            of = line.endswith(str(path))
        elif of and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_the_digest_is_that_of_the_samples_and_not_of_files(tmp_path):
    samples, found = numbered(2 * BLOCK + 11), set()
    for number, cuts in enumerate([[], [5, BLOCK - 1, BLOCK + 2]]):
        (tmp_path / str(number)).mkdir()
        manifest = written(tmp_path / str(number), samples, cuts)
        found.add(manifest.sha256)
    kept = [["n", "number", "int64", []], ["t", "text", "", []], ["r", "array", "int64", [-1]]]
    whole = hashlib.sha256(json.dumps([kept, len(samples)]).encode())
    for at in range(0, len(samples), BLOCK):
        part = samples[at : at + BLOCK]
        texts = [sample["t"].encode() for sample in part]
        block = hashlib.sha256(np.array([s["n"] for s in part], "<i8").tobytes())
        block.update(np.array([len(text) for text in texts], "<i8").tobytes() + b"".join(texts))
        lengths = np.array([len(s["r"]) for s in part], "<i8").tobytes()
        block.update(lengths + np.array([v for s in part for v in s["r"]], "<i8").tobytes())
        whole.update(block.digest())
    assert found == {whole.hexdigest()}


def test_every_damage_is_found_and_named(tmp_path):
    manifest = written(tmp_path, numbered(2 * BLOCK), [BLOCK])
    assert damaged(tmp_path, manifest) == []
    path = tmp_path / "1.arrow"
    good = path.read_bytes()
    at = good.index(np.arange(BLOCK + 8, BLOCK + 12, dtype="<i8").tobytes())
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    (text,) = damaged(tmp_path, manifest)
    assert text == f"samples {BLOCK:,} to {2 * BLOCK - 1:,} are not what was written (1.arrow)"
    path.write_bytes(good[:-9])
    (text,) = damaged(tmp_path, manifest)
    assert f"{len(good) - 9:,} bytes, but {len(good):,} were written" in text
    with pytest.raises(DataError, match=r"were written\. Run the same instep prepare again"):
        Shards(tmp_path)[BLOCK]
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        Shards(tmp_path)[BLOCK]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "has no manifest.json: instep prepare SOURCE --to"),
        ("{", "is damaged"),
        ("[" * 5000, "is damaged"),
        ('{"format": 99, "columns": [], "samples": 0, "bytes": 0, "sha256": "", "bad": 0, '
         '"shards": []}', "newer instep"),
        ('{"columns": [], "samples": 1, "bytes": 0, "sha256": "", "bad": 0, '
         '"shards": [{"file": "../a", "samples": 1, "bytes": 1}]}', "does not lie beside it"),
        ('{"columns": [], "samples": 2, "bytes": 0, "sha256": "", "bad": 0, '
         '"shards": [{"file": "a", "samples": 1, "bytes": 1}]}', "another number of samples"),
    ],
)  # fmt: skip
def test_a_manifest_that_is_no_manifest_is_refused(text, wanted, tmp_path):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=wanted):
        read_manifest(tmp_path)


def test_an_image_file_is_read_as_its_pixels(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 255, (5, 4, 3), np.uint8)
    picture = Image.fromarray(pixels)
    file = io.BytesIO()
    picture.save(file, "PNG")
    written(tmp_path, [{"image": ImageFile(file.getvalue())}, {"image": picture}], [])
    for sample in Shards(tmp_path).__getitems__([0, 1]):
        assert torch.equal(sample["image"], torch.tensor(pixels).permute(2, 0, 1))


MISFITS = {
    "no dict": (5, "the sample is int, but a dict"),
    "other names": ({"y": 1}, "no column 'x' and a column 'y' that samples before have not"),
    "nothing": ({"x": None}, "column 'x' is None"),
    "another kind": ({"x": "1"}, "column 'x' is text, and int64 in the samples before"),
    "too large": ({"x": 2**70}, "int64 ends at"),
    "ragged": ({"x": [[1], [2, 3]]}, "lists of different lengths"),
    "objects": ({"x": np.array([{}])}, "no number type"),
    "another type": ({"x": {}}, "of type dict"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_sample_that_does_not_fit_is_named_and_the_others_stay(name):
    sample, wanted = MISFITS[name]
    found = encode([{"x": 1}, sample, {"x": 3}], None)
    assert found.columns == [Column("x", "number", "int64")]
    assert found.views[0].data.tolist() == [1, 3]
    ((number, text),) = found.misfits
    assert number == 1
    assert wanted in text


def test_columns_widen_and_never_narrow():
    first = encode([{"x": 1, "r": [1, 2]}], None)
    then = encode([{"x": 1.5, "r": [1, 2, 3]}, {"x": 2, "r": []}], first.columns)
    assert [str(column) for column in then.columns] == ["float64", "int64[n]"]
    assert then.views[0].data.tolist() == [1.5, 2.0]
    assert then.views[1].lengths.tolist() == [3, 0]
