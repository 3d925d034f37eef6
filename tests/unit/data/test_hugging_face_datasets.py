"""Hugging Face datasets give the samples that the package `datasets` gives of them."""

import io
import json
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import load  # of this folder, and not the package
from PIL import Image

from instep.data.loader import Loader, Slice
from instep.data.shard_sizes import shard_sizes
from instep.data.sources import hugging_face
from instep.errors import DataError

KINDS = {
    "x": pa.list_(pa.float32(), 3),
    "y": pa.int64(),
    "text": pa.string(),
    "ragged": pa.list_(pa.int64()),
    "matrix": pa.list_(pa.list_(pa.int32())),
    "raw": pa.binary(),
    "flag": pa.bool_(),
}
FEATURES = {"y": {"_type": "ClassLabel"}, "matrix": {"_type": "Array2D", "shape": [2, 2]}}


def row(i):
    return {
        "x": [float(i)] * 3,
        "y": i % 3,
        "text": f"number {i}, é",
        "ragged": list(range(i % 4)),
        "matrix": [[i, 1], [2, -i]],
        "raw": bytes([i, 0, 255]),
        "flag": i % 2 == 0,
    }


ROWS = [row(i) for i in range(40)]


def write_file(path, rows, kinds=None, features=None, each=5):
    info = json.dumps({"info": {"features": FEATURES if features is None else features}})
    schema = pa.schema(list((kinds or KINDS).items()), {b"huggingface": info.encode()})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for first in range(0, len(rows), each):
            writer.write_batch(pa.RecordBatch.from_pylist(rows[first : first + each], schema))


def write_folder(folder, sizes=(14, 13, 13), rows=None, **options):
    rows, names, first = ROWS if rows is None else rows, [], 0
    for number, size in enumerate(sizes):
        names.append(f"data-{number:05d}-of-{len(sizes):05d}.arrow")
        write_file(folder / names[-1], rows[first : first + size], **options)
        first += size
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))


def plain(sample):
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in sample.items()}


def test_a_folder_has_the_samples_of_its_files_in_their_order(tmp_path):
    write_folder(tmp_path)
    dataset = pickle.loads(pickle.dumps(hugging_face(tmp_path)))
    assert [plain(dataset[i]) for i in range(40)] == ROWS
    wanted = [39, 0, -1, 17, 17, 14]
    assert [plain(sample) for sample in dataset.__getitems__(wanted)] == [ROWS[i] for i in wanted]
    first = dataset[0]
    assert first["matrix"].dtype == torch.int32
    assert first["x"].dtype == torch.float32
    assert first["flag"].dtype == torch.bool
    assert first["ragged"].dtype == torch.int64
    assert shard_sizes(dataset).tolist() == [14, 13, 13]
    assert dataset.column("y").tolist() == [row["y"] for row in ROWS]
    with pytest.raises(IndexError, match="sample 40 of 40"):
        dataset[40]


@pytest.mark.parametrize("processes", [0, 2])
def test_loaders_give_batches_of_chosen_columns(tmp_path, processes):
    write_folder(tmp_path)
    dataset = hugging_face(tmp_path, ["x", "y"], lambda sample: (sample["x"], sample["y"]))
    loader = Loader(dataset, seed=1, shuffle=False, processes=processes)
    batches = list(load(loader, [Slice(0, first, first + 10) for first in range(0, 40, 10)]))
    loader.close()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert x.tolist() == [row["x"] for row in ROWS]
    assert y.tolist() == [row["y"] for row in ROWS]


class Indices:
    """The mapping of a dataset that was shuffled or filtered, as `datasets` has it."""

    def __init__(self, rows):
        self.rows = rows

    def column(self, number):
        assert number == 0
        return pa.chunked_array([pa.array(self.rows, pa.uint64())])


class Dataset:
    """As much of a `datasets.Dataset` as is looked at."""

    def __init__(self, rows, indices=None, **form):
        self.data = pa.Table.from_pylist(rows, pa.schema(list(KINDS.items())))
        self.format = {"type": None, "columns": list(KINDS), **form}
        self._indices = None if indices is None else Indices(indices)


@pytest.mark.parametrize(
    ("order", "sizes"),
    [(None, [40]), (range(3, 40, 4), [10]), ([7, 0, 39, 7], None), ([5, 4], None)],
)
def test_an_object_has_the_rows_of_its_mapping(order, sizes):
    chosen = [name for name in KINDS if name != "matrix"]  # lists of lists of unknown lengths
    dataset = pickle.loads(pickle.dumps(hugging_face(Dataset(ROWS, order), chosen)))
    wanted = [
        {name: ROWS[i][name] for name in chosen} for i in (range(40) if order is None else order)
    ]
    assert [plain(dataset[i]) for i in range(len(dataset))] == wanted
    assert plain(dataset[-1]) == wanted[-1]
    found = shard_sizes(dataset)
    assert (None if found is None else found.tolist()) == sizes
    assert dataset.column("text") == [row["text"] for row in wanted]


def test_columns_of_an_objects_format_are_those_of_its_samples():
    dataset = hugging_face(Dataset(ROWS, type="torch", columns=["y", "x"]))
    assert list(dataset[1]) == ["y", "x"]
    with pytest.raises(DataError, match=r"a transform of its own .* Give it as transform="):
        hugging_face(Dataset(ROWS, type="custom"))
    with pytest.raises(DataError, match=r"a datasets.Dataset is wanted, and a dict was given: nam"):
        hugging_face({"train": Dataset(ROWS)})


def test_images_are_decoded_when_they_are_read(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    rows = []
    for each in pixels:
        Image.fromarray(each).save(file := io.BytesIO(), "PNG")
        rows.append({"image": {"bytes": file.getvalue(), "path": "1.png"}})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    write_folder(tmp_path, [4], rows, kinds={"image": kind}, features={"image": {"_type": "Image"}})
    for number, sample in enumerate(hugging_face(tmp_path)):
        assert torch.equal(sample["image"], torch.from_numpy(pixels[number]).permute(2, 0, 1))


def test_arrays_whose_first_dim_varies_keep_their_shape(tmp_path):
    rows = [{"a": [[i, 2]] * (i % 3)} for i in range(6)]
    features = {"a": {"_type": "Array2D", "shape": [None, 2]}}
    kinds = {"a": pa.list_(pa.list_(pa.int32()))}
    write_folder(tmp_path, [6], rows, kinds=kinds, features=features)
    dataset = hugging_face(tmp_path)
    assert [tuple(sample["a"].shape) for sample in dataset] == [(i % 3, 2) for i in range(6)]
    assert [sample["a"].tolist() for sample in dataset] == [row["a"] for row in rows]


def test_a_missing_number_is_nan_and_what_else_is_missing_is_named_with_its_row(tmp_path):
    rows = [{"f": None if i == 2 else 1.5, "t": None if i == 7 else "a"} for i in range(9)]
    write_folder(tmp_path, [9], rows, kinds={"f": pa.float64(), "t": pa.string()}, features={})
    assert torch.isnan(hugging_face(tmp_path)[2]["f"])
    with pytest.raises(DataError, match=r"00001.arrow, row 7: column 't' is empty\. Leave the col"):
        hugging_face(tmp_path)[7]


def test_what_cannot_be_read_is_refused_in_words(tmp_path):
    write_folder(tmp_path)
    nested = {"y": pa.int64(), "d": pa.struct([("a", pa.string())])}
    for name in ("nested", "cut", "gone", "splits"):
        (tmp_path / name).mkdir()
    write_folder(tmp_path / "nested", [1], [{"y": 1, "d": {"a": "b"}}], kinds=nested)
    assert list(hugging_face(tmp_path / "nested", ["y"])[0]) == ["y"]
    write_folder(tmp_path / "cut", [40])
    path = tmp_path / "cut" / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:-2000])
    write_folder(tmp_path / "gone", [40])
    (tmp_path / "gone" / "data-00000-of-00001.arrow").unlink()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for name, message in {
        "nested": r"column 'd' of .* is struct<a: string>, .* Choose others: columns=\['y'\]",
        "cut": r"00001.arrow cannot be read: .* missing, or damaged",
        "gone": r"00001.arrow cannot be read: ",
        "splits": r"no state.json, .* It has several datasets: name one of them\. The folder holds",
    }.items():
        with pytest.raises(DataError, match=message):
            hugging_face(tmp_path / name)
    with pytest.raises(DataError, match=r"has no column 'z'\. Known: "):
        hugging_face(tmp_path, ["z"])


PEER = """
import pickle, sys
from datasets import Array2D, ClassLabel, Dataset, Features, List, Value, load_from_disk
from instep.data.sources import hugging_face
folder = sys.argv[1]
kinds = {
    "x": List(Value("float32"), length=3),
    "y": ClassLabel(names=["a", "b", "c"]),
    "text": Value("string"),
    "ragged": List(Value("int64")),
    "matrix": Array2D((2, 2), "int32"),
    "raw": Value("binary"),
    "flag": Value("bool"),
}
rows = pickle.load(open(folder + "/rows", "rb"))
whole = Dataset.from_list(rows, features=Features(kinds))
chosen = whole.shuffle(seed=1), whole.select(range(5, 30)), whole.filter(lambda row: row["y"])
for given in (whole, *chosen):
    given.save_to_disk(folder + "/saved", num_shards=3)
    loaded = load_from_disk(folder + "/saved")
    for dataset in map(hugging_face, (given, loaded, folder + "/saved")):
        found = [{k: getattr(v, "tolist", lambda: v)() for k, v in s.items()} for s in dataset]
        assert found == list(given) == list(loaded)
print("all equal")
"""


def test_samples_are_those_of_the_package_itself(tmp_path):
    """In a process of its own: a module of this folder has the package's name, too."""
    (tmp_path / "rows").write_bytes(pickle.dumps(ROWS))
    command = [sys.executable, "-W", "ignore", "-c", PEER, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    if "No module named 'datasets'" in ended.stderr:
        pytest.skip("Hugging Face datasets is not installed")
    assert "all equal" in ended.stdout, ended.stderr
