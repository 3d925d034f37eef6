"""MNIST and CIFAR-10 in the formats they are published in."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from instep.data.order import Indices
from instep.data.sources.files import BatchDataset, Bytes
from instep.errors import DataError
from instep.words import folder_contents

_IMAGES_MAGIC, _LABELS_MAGIC = 0x00000803, 0x00000801
_CLASSES = 10
_CIFAR_RECORD = 1 + 3 * 32 * 32


class Images(BatchDataset):
    """Images held as bytes, returned as floats.

    A sample is (inputs [channels, height, width] float32 from 0 to 1, target
    [] int64).

    Args:
        pixels: [samples, channels, height, width] uint8.
        labels: [samples] uint8.
    """

    def __init__(self, pixels: Bytes, labels: Bytes) -> None:
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def batch_of(self, indices: Indices) -> list[Tensor]:
        """[inputs [count, ...] float32, targets [count] int64] of [count] indices."""
        pixels = self.pixels[indices]
        inputs = torch.empty(pixels.shape)
        np.divide(pixels, np.float32(255), out=inputs.numpy())
        return [inputs, torch.tensor(self.labels[indices], dtype=torch.int64)]


def mnist(folder: str | Path, train: bool = True) -> Images:
    """MNIST, or another set of its format with ten classes (Fashion-MNIST, KMNIST).

    Args:
        folder: holds the IDX files under their usual names, such as
            `train-images-idx3-ubyte`, plain or with `.gz`.
        train: the 60,000 images to train on, or the 10,000 to test on.

    Returns:
        [1, 28, 28] images, or of the size that the file says.

    Raises:
        DataError: a file is missing, damaged, or does not fit the other.
    """
    part = "train" if train else "t10k"
    image_path, images = _read(Path(folder), f"{part}-images-idx3-ubyte")
    label_path, labels = _read(Path(folder), f"{part}-labels-idx1-ubyte")
    pixels = _idx(image_path, images, _IMAGES_MAGIC, axes=3)
    classes = _idx(label_path, labels, _LABELS_MAGIC, axes=1)
    if len(pixels) != len(classes):
        raise DataError(
            f"{image_path} holds {len(pixels)} images and {label_path} {len(classes)} labels: "
            "each image needs one label. The files are from different sets."
        )
    _check_labels(label_path, classes)
    return Images(pixels[:, np.newaxis], classes)


def cifar10(folder: str | Path, train: bool = True) -> Images:
    """CIFAR-10, the binary version.

    Args:
        folder: holds `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.
        train: the five, or else the one.

    Returns:
        [3, 32, 32] images.

    Raises:
        DataError: a file is missing or damaged.
    """
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] if train else ["test_batch.bin"]
    records = np.concatenate([_cifar_records(Path(folder), name) for name in names])
    return Images(records[:, 1:].reshape(-1, 3, 32, 32), np.ascontiguousarray(records[:, 0]))


def _cifar_records(folder: Path, name: str) -> Bytes:
    path, data = _read(folder, name)
    if not data or len(data) % _CIFAR_RECORD:
        raise DataError(
            f"{path} has {len(data):,} bytes: a multiple of {_CIFAR_RECORD:,} is expected (records "
            "of a label and 3 x 32 x 32 pixels). It is truncated, or not the binary version."
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, _CIFAR_RECORD)
    _check_labels(path, records[:, 0])
    return records


def _idx(path: Path, data: bytes, magic: int, axes: int) -> Bytes:
    header = 4 + 4 * axes
    if len(data) < header or int.from_bytes(data[:4], "big") != magic:
        raise DataError(
            f"{path} begins with 0x{data[:4].hex()}: 0x{magic:08x} is expected "
            f"(IDX, unsigned bytes, {axes} axes). It is another file, or damaged."
        )
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4)]
    wanted = header + int(np.prod(shape, dtype=object))
    if len(data) != wanted:
        raise DataError(
            f"{path} has {len(data):,} bytes: {wanted:,} are expected for {shape}, as its header "
            "says. It is truncated or damaged."
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _check_labels(path: Path, labels: Bytes) -> None:
    wrong = np.flatnonzero(labels >= _CLASSES)
    if len(wrong):
        raise DataError(
            f"{path} has label {labels[wrong[0]]} at sample {wrong[0]}: "
            f"0 to {_CLASSES - 1} are valid. The file is damaged."
        )


def _read(folder: Path, name: str) -> tuple[Path, bytes]:
    """The path and the contents of `name` or `name.gz`, decompressed."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path, _unpacked(path)
    raise DataError(
        f"{folder / name} does not exist, nor does {name}.gz. {folder_contents(folder)}"
    )


def _unpacked(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} cannot be decompressed: {error}. It is truncated or damaged."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
