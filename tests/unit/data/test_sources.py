"""Sources read the true formats, and name the file when it is not one."""

import gzip
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from datasets import load
from PIL import Image
from test_hugging_face_datasets import write_folder
from test_webdataset import write_tar
from torch.utils.data import DataLoader

from instep.data import SOURCES, pictures
from instep.data.loader import Loader, Slice
from instep.data.shards.encode import encode
from instep.data.shards.manifest import Manifest, Shard, write_manifest
from instep.data.shards.values import image_of
from instep.data.shards.writer import ShardWriter
from instep.data.sources import cifar10, image_folder, mnist, text
from instep.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 10
PARTS = [("train", True), ("t10k", False)]


def write_idx(path, array, magic=None):
    magic = 0x0800 + array.ndim if magic is None else magic
    data = struct.pack(f">I{array.ndim}I", magic, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_mnist(folder, part="train", end=""):
    write_idx(folder / f"{part}-images-idx3-ubyte{end}", IMAGES)
    write_idx(folder / f"{part}-labels-idx1-ubyte{end}", LABELS)


def write_cifar(folder, names):
    rng = np.random.default_rng(1)
    for number, name in enumerate(names):
        pixels = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        records = np.concatenate([np.full((4, 1), number, np.uint8), pixels], axis=1)
        records.tofile(folder / name)


CIFAR = [f"data_batch_{number}.bin" for number in range(1, 6)]


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize(("part", "train"), PARTS)
def test_mnist_gives_the_images_and_labels_of_its_files(tmp_path, part, train, end):
    write_mnist(tmp_path, part, end)
    dataset = mnist(tmp_path, train=train)
    assert len(dataset) == 12
    inputs, target = dataset[5]
    assert inputs.shape == (1, 28, 28)
    assert inputs.dtype == torch.float32
    assert target.dtype == torch.int64
    torch.testing.assert_close(inputs[0] * 255, torch.tensor(IMAGES[5]).float())
    assert [int(target) for _, target in dataset] == LABELS.tolist()


def damage_magic(folder):
    write_idx(folder / "train-images-idx3-ubyte", IMAGES, magic=0x801)


def damage_size(folder):
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])


def damage_header(folder):
    (folder / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08")


def damage_count(folder):
    write_idx(folder / "train-labels-idx1-ubyte", LABELS[:-1])


def damage_label(folder):
    write_idx(folder / "train-labels-idx1-ubyte", np.where(LABELS == 7, 200, LABELS).astype("u1"))


def remove_labels(folder):
    (folder / "train-labels-idx1-ubyte").unlink()


def damage_gz(folder):
    remove_labels(folder)
    data = gzip.compress(b"labels" * 100)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_magic, "train-images-idx3-ubyte begins with 0x00000801: 0x00000803 is expected"),
        (damage_size, r"train-images-idx3-ubyte has 9,423 bytes: 9,424 are expected for \[12, 28"),
        (damage_header, "train-images-idx3-ubyte begins with 0x000008"),
        (damage_count, "12 images and .*train-labels-idx1-ubyte 11 labels"),
        (damage_label, "train-labels-idx1-ubyte has label 200 at sample 7: 0 to 9 are valid"),
        (
            remove_labels,
            r"train-labels-idx1-ubyte does not exist, nor does .*\.gz\. The folder holds",
        ),
        (damage_gz, "train-labels-idx1-ubyte.gz cannot be decompressed"),
    ],
)
def test_a_damaged_mnist_file_is_named_with_what_is_wanted(tmp_path, damage, message):
    write_mnist(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        mnist(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    for source in (mnist, cifar10, image_folder):
        with pytest.raises(DataError, match=r"There is no folder .*nowhere"):
            source(tmp_path / "nowhere")


def test_cifar_gives_all_training_files_in_order(tmp_path):
    write_cifar(tmp_path, [*CIFAR, "test_batch.bin"])
    dataset = cifar10(tmp_path)
    assert [int(target) for _, target in dataset] == [n for n in range(5) for _ in range(4)]
    raw = np.fromfile(tmp_path / CIFAR[2], np.uint8).reshape(4, 3073)[1, 1:].reshape(3, 32, 32)
    torch.testing.assert_close(dataset[9][0] * 255, torch.tensor(raw).float())
    assert len(cifar10(tmp_path, train=False)) == 4


def test_a_damaged_or_missing_cifar_file_is_named(tmp_path):
    write_cifar(tmp_path, CIFAR)
    (tmp_path / CIFAR[1]).write_bytes(b"\x01" * 3000)
    with pytest.raises(DataError, match=r"data_batch_2.bin has 3,000 bytes: a multiple of 3,073"):
        cifar10(tmp_path)
    (tmp_path / CIFAR[1]).write_bytes(b"\x63" * 3073)
    with pytest.raises(DataError, match=r"data_batch_2.bin has label 99"):
        cifar10(tmp_path)
    (tmp_path / CIFAR[1]).unlink()
    with pytest.raises(DataError, match=r"data_batch_2.bin does not exist"):
        cifar10(tmp_path)


def write_pictures(folder, sizes):
    for number, (name, size) in enumerate(sizes.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (number, 10, 255)).save(path)


def test_an_image_folder_numbers_its_classes_by_name(tmp_path):
    write_pictures(tmp_path, {"dog/b.png": (4, 6), "cat/deep/a.PNG": (4, 6), "cat/c.png": (4, 6)})
    (tmp_path / "dog" / "notes.txt").write_text("good dog")
    dataset = image_folder(tmp_path)
    assert dataset.classes == ["cat", "dog"]
    assert [int(target) for _, target in dataset] == [0, 0, 1]
    inputs, target = dataset[2]
    assert inputs.shape == (3, 6, 4)
    assert inputs.dtype == torch.float32
    assert target.dtype == torch.int64
    torch.testing.assert_close(inputs[:, 0, 0] * 255, torch.tensor([0.0, 10.0, 255.0]))


def test_images_of_many_sizes_and_kinds_are_scaled_to_one(tmp_path):
    write_pictures(tmp_path, {"a/1.jpg": (9, 5), "a/2.png": (3, 3), "b/3.bmp": (7, 8)})
    assert {tuple(inputs.shape) for inputs, _ in image_folder(tmp_path, size=4)} == {(3, 4, 4)}
    assert image_folder(tmp_path, size=(2, 6))[0][0].shape == (3, 2, 6)


@pytest.mark.parametrize("end", ["png", "tif"])
def test_a_picture_of_16_bits_gives_what_the_same_one_of_8_bits_gives(tmp_path, end):
    grey = np.random.default_rng(2).integers(0, 256, (5, 7), dtype=np.uint8)
    for name, pixels in (("8", grey), ("16", grey.astype(np.uint16) * 257)):
        (tmp_path / name / "a").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / name / "a" / f"1.{end}")
    ((eight, _),), ((sixteen, _),) = (image_folder(tmp_path / name) for name in ("8", "16"))
    torch.testing.assert_close(eight[0] * 255, torch.tensor(grey).float())
    assert sixteen.shape == (3, 5, 7)
    assert sixteen.dtype == torch.float32
    torch.testing.assert_close(sixteen, eight)
    scaled = [image_folder(tmp_path / name, size=(3, 4))[0][0] for name in ("8", "16")]
    torch.testing.assert_close(scaled[1], scaled[0], atol=1 / 255, rtol=0)
    assert len(sixteen.unique()) > 20


def test_every_one_of_the_16_bits_counts(tmp_path):
    (tmp_path / "a").mkdir()
    steps = np.arange(0, 65536, 257 * 16 + 1, dtype=np.uint16).reshape(1, -1)
    Image.fromarray(steps).save(tmp_path / "a" / "1.png")
    inputs, _ = image_folder(tmp_path)[0]
    torch.testing.assert_close(inputs[2, 0].double() * 65535, torch.tensor(steps[0]).double())


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_a_picture_without_a_defined_white_is_refused(tmp_path, kind):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.ones((4, 4), kind)).save(tmp_path / "a" / "1.tif")
    with pytest.raises(DataError, match=r"1.tif has pixels of .* 8 or 16 bits .* are read"):
        image_folder(tmp_path)[0]


def test_a_damaged_picture_is_named(tmp_path):
    write_pictures(tmp_path, {"a/1.png": (4, 4)})
    (tmp_path / "a" / "2.png").write_bytes((tmp_path / "a" / "1.png").read_bytes()[:40])
    with pytest.raises(DataError, match=r"2.png cannot be decoded"):
        image_folder(tmp_path)[1]


def test_a_picture_with_more_pixels_than_memory_is_named(tmp_path, monkeypatch):
    write_pictures(tmp_path, {"a/1.png": (4, 4), "a/2.png": (9, 9)})
    monkeypatch.setattr(pictures, "MOST_PIXELS", 80)
    image_folder(tmp_path)[0]
    with pytest.raises(DataError, match=r"2.png cannot be decoded: it has 9 x 9 pixels, .* 80 "):
        image_folder(tmp_path)[1]
    with pytest.raises(ValueError, match="it has 9 x 9 pixels"):
        image_of((tmp_path / "a" / "2.png").read_bytes())


def test_a_class_without_images_is_named(tmp_path):
    write_pictures(tmp_path, {"a/1.png": (4, 4)})
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match=r"b holds no image: \.bmp"):
        image_folder(tmp_path)


def test_without_pillow_the_error_names_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'instep\[images\]'"):
        image_folder(tmp_path)


def test_text_windows_do_not_overlap_and_targets_are_one_ahead(tmp_path):
    data = bytes(range(256)) * 3
    path = tmp_path / "all.txt"
    path.write_bytes(data)
    dataset = text(path, length=10)
    assert len(dataset) == 76
    assert bytes(torch.cat([inputs for inputs, _ in dataset]).tolist()) == data[:760]
    assert bytes(torch.cat([target for _, target in dataset]).tolist()) == data[1:761]
    assert dataset[0][0].dtype == dataset[0][1].dtype == torch.int64
    assert torch.equal(dataset[-1][0], dataset[75][0])


@pytest.mark.parametrize("extra", [0, 1, 9])
def test_text_uses_all_the_windows_there_are(tmp_path, extra):
    (tmp_path / "a.txt").write_bytes(b"x" * (21 + extra))
    dataset = text(tmp_path / "a.txt", length=10)
    assert len(dataset) == 2
    with pytest.raises(IndexError):
        dataset[2]


def test_a_folder_of_text_is_joined_by_name(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.py").write_bytes(b"2222")
    (tmp_path / "a.py").write_bytes(b"1111")
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "sub" / "c.py").write_bytes(b"33333")
    (tmp_path / "a.txt").write_bytes(b"no")
    joined = text(tmp_path, length=4)
    assert bytes(torch.cat([inputs for inputs, _ in joined]).tolist()) == b"111122223333"
    listed = text([tmp_path / "b.py", tmp_path / "a.py"], length=3)
    assert bytes(listed[0][0].tolist()) == b"222"


def test_text_that_changes_while_it_is_mapped_is_named(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes(b"a" * 100)
    windows = text(path, length=10)
    windows[0]
    with open(path, "ab") as file:
        file.write(b"b")
    with pytest.raises(DataError, match=r"a.py has changed since it was opened\. Start again"):
        windows[0]


def test_too_little_text_and_no_text_are_errors(tmp_path):
    (tmp_path / "a.py").write_bytes(b"12345")
    with pytest.raises(DataError, match=r": 5 bytes, and one window of length 5 needs 6\."):
        text(tmp_path, length=5)
    with pytest.raises(DataError, match=r"holds no file that matches '\*\.md'"):
        text(tmp_path, length=5, pattern="*.md")
    with pytest.raises(DataError, match=r"none.py cannot be read: No such file"):
        text(tmp_path / "none.py", length=5)
    with pytest.raises(DataError, match="list of text files is empty"):
        text([], length=5)
    with pytest.raises(DataError, match="length = 0"):
        text(tmp_path, length=0)


def write_shards(folder):
    samples = [{"y": number, "x": np.full(3, number, np.float32)} for number in range(7)]
    columns, views, _ = encode(samples, None)
    with ShardWriter(folder / "a.arrow", columns) as writer:
        writer.write(views)
        writer.close()
    shard = Shard("a.arrow", 7, writer.bytes)
    whole = {"columns": columns, "samples": 7, "bytes": writer.bytes, "sha256": "", "bad": 0}
    write_manifest(folder, Manifest(**whole, shards=[shard]))


def made(name, folder):
    if name == "mnist":
        write_mnist(folder)
    elif name == "cifar10":
        write_cifar(folder, CIFAR)
    elif name == "image_folder":
        write_pictures(folder, {f"{c}/{i}.png": (4, 4) for c in "ab" for i in range(6)})
    elif name == "shards":
        write_shards(folder)
        return SOURCES[name](folder, transform=lambda sample: (sample["x"], sample["y"]))
    elif name == "hugging_face":
        write_folder(folder)
        return SOURCES[name](folder, transform=lambda sample: (sample["x"], sample["y"]))
    elif name == "webdataset":
        write_tar(folder / "a.tar", [{"npy": np.arange(3), "cls": i} for i in range(5)])
        return SOURCES[name](folder, transform=lambda sample: (sample["npy"], sample["cls"]))
    elif name == "tokens":
        np.arange(200, dtype=np.uint16).tofile(folder / "a.bin")
        return SOURCES[name](folder / "a.bin", length=10)
    else:
        (folder / "a.py").write_bytes(bytes(range(200)))
    return SOURCES[name](folder, **({"length": 10} if name == "text" else {}))


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_gives_the_same_batches_here_and_in_torchs_own_loader(tmp_path, name, monkeypatch):
    monkeypatch.setenv("INSTEP_CACHE", str(tmp_path / "cache"))
    dataset = made(name, tmp_path)
    loader = Loader(dataset, seed=1, shuffle=False, processes=0)
    (ours,) = load(loader, [Slice(0, 0, len(dataset))])
    loader.close()
    (theirs,) = DataLoader(dataset, batch_size=len(dataset))
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in theirs]
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_the_table_of_sources_is_listed_without_torch():
    code = "import sys, instep.data.order, instep.data.dealing; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
