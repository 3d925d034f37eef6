"""Windows of token files have the tokens that the file has, as the program that wrote it says."""

import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from datasets import load

from instep.data.loader import Loader, Slice
from instep.data.shard_sizes import shard_sizes
from instep.data.sources import tokens
from instep.errors import DataError

TOKENS = np.random.default_rng(3).integers(0, 50_000, 1003)
LENGTH = 10


def write_plain(path, dtype):
    TOKENS.astype(dtype).tofile(path)


def write_llm_c(path, magic=20240520, version=1, dtype=np.uint16):
    head = np.zeros(256, np.int32)
    head[:3] = magic, version, len(TOKENS)
    path.write_bytes(head.tobytes() + TOKENS.astype(dtype).tobytes())


def write_megatron(path, sequences, documents, dtype=np.uint16, code=8):
    """By the text of `megatron/core/datasets/indexed_dataset.py`."""
    bounds = np.cumsum([0, *sequences])
    TOKENS[: bounds[-1]].astype(dtype).tofile(path)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents))
    lengths = np.array(sequences, np.int32).tobytes()
    places = (bounds[:-1] * np.dtype(dtype).itemsize).astype(np.int64).tobytes()
    index = head + lengths + places + np.array(documents, np.int64).tobytes()
    path.with_suffix(".idx").write_bytes(index)


WRITERS = {
    "uint16.bin": lambda path: write_plain(path, np.uint16),
    "uint32.bin": lambda path: write_plain(path, np.uint32),
    "a.npy": lambda path: np.save(path, TOKENS.astype(np.int32)),
    "big.npy": lambda path: np.save(path, TOKENS.astype(">u4")),
    "gpt2.bin": write_llm_c,
    "llama3.bin": lambda path: write_llm_c(path, 20240801, 7, np.uint32),
    "megatron.bin": lambda path: write_megatron(path, [1003], [0, 1]),
    "wide.bin": lambda path: write_megatron(path, [1000, 3], [0, 2], np.int32, 4),
}


def given(name):
    return {"dtype": "uint32"} if name == "uint32.bin" else {}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("processes", [0, 2])
def test_windows_are_the_tokens_of_the_file_and_targets_are_one_ahead(tmp_path, name, processes):
    WRITERS[name](tmp_path / name)
    dataset = tokens(tmp_path / name, LENGTH, **given(name))
    assert len(dataset) == 100
    loader = Loader(dataset, seed=1, shuffle=False, processes=processes)
    batches = list(load(loader, [Slice(0, first, first + 25) for first in range(0, 100, 25)]))
    loader.close()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.flatten().tolist() == TOKENS[:1000].tolist()
    assert targets.flatten().tolist() == TOKENS[1:1001].tolist()
    assert torch.equal(dataset[-1][0], inputs[99])
    with pytest.raises(IndexError):
        dataset[100]


def masked(ends):
    """Targets and documents of all windows, by a loop: documents end before these places."""
    targets, documents = [], []
    for first in range(0, len(TOKENS) - LENGTH, LENGTH):
        number = 0
        for place in range(first, first + LENGTH):
            number += place > first and place in ends
            documents.append(number)
            targets.append(-100 if place + 1 in ends else int(TOKENS[place + 1]))
    return targets, documents


def columns(dataset):
    return [part.flatten().tolist() for part in dataset.batch_of(np.arange(len(dataset)))]


def test_documents_of_an_index_are_kept_from_each_other(tmp_path):
    write_megatron(tmp_path / "a.bin", [5, 18, 2, 0, 475, 503], [0, 1, 3, 3, 4, 5, 6])
    for path in (tmp_path / "a.bin", tmp_path / "a"):
        inputs, targets, documents = columns(tokens(path, LENGTH, documents=True))
        assert inputs == TOKENS[:1000].tolist()
        assert (targets, documents) == masked({5, 25, 500})
        assert columns(tokens(path, LENGTH)) == [inputs, targets]


def test_documents_that_a_token_ends_are_kept_from_each_other(tmp_path):
    end = int(TOKENS[25])
    write_plain(tmp_path / "a.bin", np.uint16)
    ends = {place + 1 for place in np.flatnonzero(end == TOKENS).tolist()}
    _, *found = columns(tokens(tmp_path / "a.bin", LENGTH, end=end, documents=True))
    assert tuple(found) == masked(ends)
    with pytest.raises(DataError, match=r"a.bin does not say where documents begin. .*end=50256"):
        tokens(tmp_path / "a.bin", LENGTH, documents=True)


def test_each_file_is_a_shard_and_no_window_goes_over_its_end(tmp_path):
    write_plain(tmp_path / "a.bin", np.uint16)
    np.save(tmp_path / "b.npy", TOKENS[:11])
    np.save(tmp_path / "short.npy", TOKENS[:10])
    named = [tmp_path / name for name in ("b.npy", "short.npy", "a.bin")]
    dataset = tokens(named, LENGTH)
    assert shard_sizes(dataset).tolist() == [1, 0, 100]
    found = columns(pickle.loads(pickle.dumps(dataset)))[0]
    assert found == [*TOKENS[:10].tolist(), *TOKENS[:1000].tolist()]
    assert len(pickle.dumps(dataset)) < 2000


def damage(path, cut=None, extra=b""):
    data = path.read_bytes()
    path.write_bytes(data[:cut] + extra)


def short_index(folder):
    damage(folder / "a.idx", -1)


def other_index(folder):
    (folder / "a.idx").write_bytes(b"TNTIDX\0\0" + b"\0" * 100)


def short_tokens(folder):
    damage(folder / "a.bin", -2)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (short_index, r"a.idx has 73 bytes: 74 are expected for 2 sequences and 2 bounds"),
        (other_index, r"a.idx begins with b'TNTIDX.*an index of Megatron, version 1, is expected"),
        (short_tokens, r"a.bin has 2,004 bytes: 2,006 are expected, as a.idx says"),
        (lambda folder: write_plain(folder / "a.bin", np.uint32), r"a.bin has 4,012 bytes"),
    ],
)
def test_a_damaged_pair_is_named_with_what_is_wanted(tmp_path, harm, message):
    write_megatron(tmp_path / "a.bin", [1000, 3], [0, 2])
    harm(tmp_path)
    with pytest.raises(DataError, match=message):
        tokens(tmp_path / "a.bin", LENGTH)


def test_what_is_no_file_of_tokens_is_refused_in_words(tmp_path):
    np.save(tmp_path / "f.npy", np.ones(100))
    np.save(tmp_path / "two.npy", np.ones((10, 10), np.int64))
    (tmp_path / "odd.bin").write_bytes(b"123")
    write_llm_c(tmp_path / "cut.bin")
    damage(tmp_path / "cut.bin", -1)
    for name, message in {
        "f.npy": "f.npy has float64: tokens are whole numbers",
        "two.npy": r"two.npy has shape \[10, 10\]: one axis",
        "odd.bin": "odd.bin has 3 bytes, no multiple of 2",
        "cut.bin": "cut.bin has 3,029 bytes: 3,030 are expected, as its header says",
        ".": "is a folder: name the files in it. The folder holds: cut.bin, f.npy",
    }.items():
        with pytest.raises(DataError, match=message):
            tokens(tmp_path / name, LENGTH)
    write_plain(tmp_path / "a.bin", np.uint16)
    with pytest.raises(DataError, match=r"1,003 tokens, and one window of length 1003 needs 1004"):
        tokens(tmp_path / "a.bin", 1003)
    with pytest.raises(DataError, match=r"dtype = 'float32': a type of whole numbers"):
        tokens(tmp_path / "a.bin", 8, dtype="float32")
    np.save(tmp_path / "b.npy", TOKENS)
    with pytest.raises(DataError, match=r"says itself that its tokens are int64, and dtype = 'ui"):
        tokens(tmp_path / "b.npy", 8, dtype="uint16")


MEGATRON = """
import sys, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
for name, dtype in (("a", "uint16"), ("b", "int32")):
    import numpy
    builder = IndexedDatasetBuilder(f"{sys.argv[1]}/{name}.bin", dtype=getattr(numpy, dtype))
    for size in (5, 20, 0, 975):
        builder.add_document(torch.arange(size) + size, [size // 2, size - size // 2])
    builder.finalize(f"{sys.argv[1]}/{name}.idx")
"""


def test_what_megatron_itself_has_written_is_read(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if "No module named 'megatron" in ended.stderr:
        pytest.skip("megatron-core is not installed")
    assert ended.returncode == 0, ended.stderr
    written = [torch.arange(size) + size for size in (5, 20, 975)]
    for name in ("a", "b"):
        dataset = tokens(tmp_path / name, 999, documents=True)
        ((inputs, targets, documents),) = dataset
        assert torch.equal(inputs, torch.cat(written)[:999])
        assert targets.eq(-100).nonzero().flatten().tolist() == [4, 24]
        assert documents.bincount().tolist() == [5, 20, 974]


def test_a_file_that_changes_while_it_is_used_is_named_and_one_that_is_removed_stays(tmp_path):
    for name in ("a.bin", "b.bin"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / name)
    dataset = tokens([tmp_path / "a.bin", tmp_path / "b.bin"], 10)
    whole = dataset[0], dataset[12]
    (tmp_path / "a.bin").unlink()
    assert torch.equal(dataset[0][0], whole[0][0])
    with open(tmp_path / "b.bin", "ab") as file:
        file.write(bytes(2))
    assert torch.equal(dataset[0][0], whole[0][0])
    with pytest.raises(DataError, match=r"b.bin has changed since it was opened\. Start again"):
        dataset[12]
