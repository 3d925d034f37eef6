"""Images in one folder for each class, decoded by Pillow when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from instep.data.pictures import opened_picture
from instep.data.raw.images import classes_of, images_of
from instep.data.sources.files import Sample
from instep.errors import DataError

_SHORT = ("PNG", "PPM")  # formats with 16 bits at most, which Pillow may hold in 32


class ImageFolder:
    """Image files, decoded when they are read.

    A sample is (inputs [3, height, width] float32 from 0 to 1, target [] int64).
    """

    def __init__(
        self, files: list[tuple[Path, int]], classes: list[str], size: tuple[int, int] | None
    ) -> None:
        self.files, self.classes, self.size = files, classes, size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path, target = self.files[index]
        return torch.from_numpy(_decoded(path, self.size)), torch.tensor(target)


def image_folder(folder: str | Path, size: int | tuple[int, int] | None = None) -> ImageFolder:
    """Images in one sub-folder for each class; classes are numbered by name.

    Args:
        folder: holds `CLASS/.../NAME.png`, or jpg, webp, bmp, gif, ppm, tiff.
        size: edge, or (height, width), to which each image is scaled; None if
            all have the same size.

    Raises:
        DataError: no such folder, no class, or a class without images; later, a
            file that cannot be decoded. Or Pillow is not installed.
    """
    _pillow()
    root = Path(folder)
    classes = classes_of(root)
    files = [
        (path, number) for number, name in enumerate(classes) for path in images_of(root, name)
    ]
    return ImageFolder(files, classes, (size, size) if isinstance(size, int) else size)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "image files are read by Pillow, which is not installed: pip install 'instep[images]'"
        ) from error
    return Image


def _decoded(path: Path, size: tuple[int, int] | None) -> Any:
    """[3, height, width] float32 from 0 to 1."""
    image = _pillow()
    try:
        with opened_picture(path) as file:
            largest = _largest(file, path)
            # `convert` would cut off whatever is above 255
            grey = None if largest == 255 else np.asarray(file).astype(np.float32)
            picture = file.convert("RGB") if grey is None else image.fromarray(grey)
    except (OSError, ValueError, MemoryError) as error:
        raise DataError(
            f"{path} cannot be decoded: {error}. It is damaged, or no image."
        ) from error
    if size is not None:
        picture = picture.resize(size[::-1], image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    channels = pixels if grey is None else np.stack([pixels] * 3, axis=2)
    return np.divide(channels.transpose(2, 0, 1), np.float32(largest), order="C")


def _largest(picture: Any, path: Path) -> int:
    """The value of white in a picture.

    Raises:
        DataError: its pixels are floats, or whole numbers of 32 bits.
    """
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in _SHORT):
        return 65535
    if picture.mode in ("I", "F"):
        kind = "floats" if picture.mode == "F" else "whole numbers of 32 bits"
        raise DataError(
            f"{path} has pixels of {kind}, and no defined white: images of 8 or 16 bits "
            "a channel are read. Convert it."
        )
    return 255
