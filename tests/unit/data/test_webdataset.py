"""Tar files give the samples that the package `webdataset` gives of them, at random."""

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import torch
from datasets import load
from PIL import Image

from instep.data.loader import Loader, Slice
from instep.data.shard_sizes import shard_sizes
from instep.data.sources import tar_index, webdataset
from instep.errors import DataError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 4, 5, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("INSTEP_CACHE", str(folder))
    return folder


def encoded(field, value):
    end = field.rpartition(".")[2]
    if end == "npy":
        np.save(file := io.BytesIO(), value)
        return file.getvalue()
    if end == "png":
        Image.fromarray(value).save(file := io.BytesIO(), "PNG")
        return file.getvalue()
    if end == "json":
        return json.dumps(value).encode()
    return value if isinstance(value, bytes) else str(value).encode()


def write_tar(path, samples, first=0):
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples, first):
            for field, value in sample.items():
                add(tar, f"some.folder/{number:04d}.{field}", encoded(field, value))


def add(tar, name, data):
    about = tarfile.TarInfo(name)
    about.size = len(data)
    tar.addfile(about, io.BytesIO(data))


def sample(i):
    return {
        "cls": i % 3,
        "txt": f"number {i}, é",
        "seg.PNG": encoded("png", PIXELS[i]),
        "json": {"a": [i, None]},
        "npy": np.full((2, i % 4), i, np.float32),
        "txt2.txt.gz": gzip.compress(b"packed"),
        "bin": bytes([i, 0]),
    }


SAMPLES = [sample(i) for i in range(12)]
SIZES = (5, 1, 6)


def write_all(folder):
    first = 0
    for number, size in enumerate(SIZES):
        write_tar(folder / f"train-{number}.tar", SAMPLES[first : first + size], first)
        first += size


def check(found, i):
    assert found["__key__"] == f"some.folder/{i:04d}"
    assert (found["cls"].dtype, int(found["cls"])) == (torch.int64, i % 3)
    assert found["txt"] == f"number {i}, é"
    assert torch.equal(found["seg.png"], torch.from_numpy(PIXELS[i]).permute(2, 0, 1))
    assert found["json"] == {"a": [i, None]}
    assert torch.equal(found["npy"], torch.full((2, i % 4), float(i)))
    assert found["txt2.txt.gz"] == "packed"
    assert found["bin"] == bytes([i, 0])
    assert len(found) == 8


def test_any_sample_has_the_members_of_its_key(tmp_path):
    write_all(tmp_path)
    for named in (tmp_path, tmp_path / "train-*.tar", sorted(tmp_path.glob("*.tar"))):
        dataset = pickle.loads(pickle.dumps(webdataset(named)))
        for i in (11, 0, 5, 4, 6, 3):
            check(dataset[i], i)
        check(dataset[-1], 11)
        assert shard_sizes(dataset).tolist() == list(SIZES)
        with pytest.raises(IndexError):
            dataset[12]


@pytest.mark.parametrize("processes", [0, 2])
def test_loaders_give_batches_of_chosen_fields(tmp_path, processes):
    write_all(tmp_path)
    fields = ["seg.png", "cls"]
    dataset = webdataset(tmp_path, fields, lambda each: tuple(each[field] for field in fields))
    loader = Loader(dataset, seed=1, shuffle=False, processes=processes)
    batches = list(load(loader, [Slice(0, first, first + 4) for first in (0, 4, 8)]))
    loader.close()
    pixels, classes = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert torch.equal(pixels, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert classes.tolist() == [each["cls"] for each in SAMPLES]


def test_headers_are_read_once_on_a_host_until_the_file_changes(tmp_path, cache, monkeypatch):
    write_all(tmp_path)
    made = []
    monkeypatch.setattr(
        tar_index,
        "records_of",
        lambda path, of=tar_index.records_of: (made.append(path.name), of(path))[1],
    )
    for _ in range(2):
        check(webdataset(tmp_path)[7], 7)
    assert sorted(made) == ["train-0.tar", "train-1.tar", "train-2.tar"]
    write_tar(tmp_path / "train-1.tar", SAMPLES[5:7])
    assert len(webdataset(tmp_path)) == 13
    for path in (cache / "tars").iterdir():
        path.write_bytes(path.read_bytes()[:-5])
    assert len(webdataset(tmp_path)) == 13
    assert len(made) == 7


def test_a_field_that_is_missing_or_cannot_be_decoded_is_named_with_its_sample(tmp_path):
    write_tar(tmp_path / "a.tar", [{"cls": 1}, {"cls": "x", "txt": "b"}, {"npy": b"junk"}])
    dataset = webdataset(tmp_path / "a.tar", ["txt"])
    assert dataset[1] == {"txt": "b"}
    with pytest.raises(
        DataError, match=r"a.tar, sample 'some.folder/0000' has no 'txt'\. Known: c"
    ):
        dataset[0]
    for number, field in ((1, "cls"), (2, "npy")):
        with pytest.raises(
            DataError, match=rf"sample .*/000{number}': '{field}' cannot be decoded"
        ):
            webdataset(tmp_path / "a.tar")[number]


def cut(path):
    path.write_bytes(path.read_bytes()[:3000])


def compress(path):
    path.write_bytes(gzip.compress(path.read_bytes()))


def divide(path):
    with tarfile.open(path, "w") as tar:
        for name in ("a.cls", "b.cls", "a.txt"):
            add(tar, name, b"1")


def repeat(path):
    with tarfile.open(path, "w") as tar:
        for name in ("a.cls", "a.CLS"):
            add(tar, name, b"1")


def misname(path):
    with tarfile.open(path, "w") as tar:
        add(tar, "a\udcff.cls", b"1")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (misname, r"a.tar, record 'a\\udcff': the name of the member .* is no UTF-8"),
        (cut, "a.tar is damaged or cut short"),
        (compress, "a.tar is compressed, .* Decompress it"),
        (divide, "a.tar, record 'a': its members are in two places"),
        (repeat, "a.tar, record 'a': the member 'a.cls' is there twice"),
        (lambda path: path.write_bytes(b"no tar" * 200), "a.tar is damaged"),
        (os.unlink, "a.tar cannot be read: No such file"),
    ],
)
def test_a_damaged_file_is_refused_in_words(tmp_path, harm, message):
    write_tar(tmp_path / "a.tar", SAMPLES[:3])
    harm(tmp_path / "a.tar")
    with pytest.raises(DataError, match=message):
        webdataset(tmp_path / "a.tar")


@pytest.mark.parametrize("how", ["in place", "another file", "longer"])
def test_a_file_that_changes_while_it_is_used_is_named_and_never_mixed(tmp_path, how):
    path = tmp_path / "a.tar"
    write_tar(path, SAMPLES[:3])
    dataset, written = pickle.loads(pickle.dumps(webdataset(path))), path.stat().st_mtime_ns
    check(dataset[1], 1)
    if how == "longer":
        path.write_bytes(path.read_bytes() + bytes(512))
    else:
        new = path if how == "in place" else tmp_path / "new"
        write_tar(new, SAMPLES[3:6])
        new.replace(path)
    os.utime(path, ns=(0, written + 10**9))  # a clock that is coarse has not moved yet
    with pytest.raises(DataError, match=r"a.tar has changed since it was opened\. Start again"):
        dataset[1]


def test_no_file_at_all_is_refused_in_words(tmp_path):
    with pytest.raises(DataError, match=r"no file matches .*x-\*.tar"):
        webdataset(tmp_path / "x-*.tar")
    with pytest.raises(DataError, match="list of tar files is empty"):
        webdataset([])


PEER = """
import pickle, sys, glob
import webdataset as wds
files = sorted(glob.glob(sys.argv[1] + "/*.tar"))
found = list(wds.WebDataset(files, shardshuffle=False).decode("torchrgb8"))
kept = [{k: v for k, v in s.items() if not k.startswith("__") or k == "__key__"} for s in found]
pickle.dump(kept, open(sys.argv[1] + "/found", "wb"))
"""


def test_samples_are_those_of_the_package_itself(tmp_path):
    write_all(tmp_path)
    with tarfile.open(tmp_path / "z.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("__meta__.json", "./a/é.cls", "no_dot", "./a/é.x.txt", "./a/b.cls", ".h.cls"):
            add(tar, name, b"1")
    command = [sys.executable, "-W", "ignore", "-c", PEER, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    if "No module named 'webdataset'" in ended.stderr:
        pytest.skip("webdataset is not installed")
    assert ended.returncode == 0, ended.stderr
    wanted = pickle.loads((tmp_path / "found").read_bytes())
    for ours, theirs in zip(webdataset(tmp_path), wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for field, value in theirs.items():
            mine = ours[field]
            if isinstance(mine, torch.Tensor):
                assert np.array_equal(mine.numpy(), np.asarray(value)), field
            else:
                assert mine == value, field
