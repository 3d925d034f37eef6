"""A folder of images with a sub-folder for each class, as records of encoded bytes.

Classes are numbered by name, over all folders of one source. Pieces are ranges of the sorted images
of one class. Records have the bytes of the files; `undecodable` says which of them are no image.
Ways in: `Images`; `classes_of` and `images_of` for whoever reads such a folder in another way.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from instep.data.pictures import opened_picture
from instep.data.raw.base import Chunk, Piece, SingleFiles
from instep.errors import DataError, one_line
from instep.words import folder_contents

PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

LARGEST = 256 << 20
"""Bytes of an image at most."""

_BYTES, _RECORDS = 4 << 20, 1024
"""Of a chunk: about, and at most."""

_BITS = 32
"""Lowest bits of a place: the number of the image in its class, the number of the class above. And
of a piece's state: the label, above it the number of the class in this folder."""


def classes_of(root: Path) -> list[str]:
    """The sub-folders, sorted by name; hidden ones do not count.

    Raises:
        DataError: there is none, or no such folder.
    """
    found = root.iterdir() if root.is_dir() else ()
    classes = sorted(path.name for path in found if path.is_dir() and path.name[0] != ".")
    if not classes:
        raise DataError(
            f"{root} has no sub-folders: each class needs one, with its images. "
            f"{folder_contents(root)}"
        )
    return classes


def images_of(root: Path, name: str) -> list[Path]:
    """The images of a class, sorted by path.

    Raises:
        DataError: it has none.
    """
    images = [p for p in sorted((root / name).rglob("*")) if p.suffix.lower() in PICTURES]
    if not images:
        raise DataError(
            f"{root / name} holds no image: {', '.join(PICTURES)} are known. "
            "Remove the folder if it is no class."
        )
    return images


@lru_cache(4)
def _images_at(root: str, name: str, modified_ns: int) -> list[Path]:
    """As `images_of`, once for the pieces that follow each other."""
    return images_of(Path(root), name)


class Images(SingleFiles):
    """A dict for each image: `image` (encoded bytes), `label` (int), `class` and `path` (str)."""

    suffixes = PICTURES

    def files(self, path: Path) -> list[Path]:
        """All images, class by class."""
        return [image for name in classes_of(path) for image in images_of(path, name)]

    def learn(self, paths: Sequence[Path], types: Mapping[str, str] | None = None) -> str:
        """The classes of all folders; a label is a number in this list."""
        names = {name for path in paths for name in classes_of(path)}
        return msgspec.json.encode(sorted(names)).decode()

    def cut(self, path: Path, target: int, learned: str = "") -> list[Piece]:
        """Cut each class by the bytes of its images. A piece has learned the name of its class."""
        names = msgspec.json.decode(learned or self.learn([path]))
        labels = {name: label for label, name in enumerate(names)}
        pieces = []
        for number, name in enumerate(classes_of(path)):
            start, size, images = 0, 0, images_of(path, name)
            for i, image in enumerate(images, 1):
                size += image.stat().st_size
                if size >= target or i == len(images):
                    state = number << _BITS | labels[name]
                    pieces.append(Piece(str(path), "images", start, i, state, name))
                    start, size = i, 0
        return pieces

    def read(self, piece: Piece) -> Iterator[Chunk]:
        """Read images; one that is empty or too large is bad."""
        root, name = Path(piece.path), piece.learned
        label, first = piece.state & (1 << _BITS) - 1, piece.state >> _BITS << _BITS
        images = _images_at(piece.path, name, _modified_ns(root / name))
        if len(images) < piece.stop:
            raise DataError(
                f"{root / name} has {len(images):,} images, and had {piece.stop:,} or more when it "
                "was cut: it has changed. Start again, and leave it as it is meanwhile."
            )
        chunk, size = Chunk(list[Any](), list[int](), []), 0
        for number in range(piece.start, piece.stop):
            data = _bytes_of(images[number])
            if isinstance(data, str):
                chunk.bad.append((first + number, data))
                continue
            relative = images[number].relative_to(root).as_posix()
            record = {"image": data, "label": label, "class": name, "path": relative}
            _append(chunk, record, first + number)
            size += len(data)
            if size >= _BYTES or len(chunk.rows) >= _RECORDS:
                yield chunk
                chunk, size = Chunk(list[Any](), list[int](), []), 0
        yield chunk

    def where(self, path: Path, place: int) -> str:
        """The path within the folder."""
        name = classes_of(path)[place >> _BITS]
        image = images_of(path, name)[place & (1 << _BITS) - 1]
        return image.relative_to(path).as_posix()


def undecodable(data: bytes) -> str:
    """What is wrong with the bytes of an image file; empty if it is one, or Pillow is missing."""
    try:
        from PIL import UnidentifiedImageError
    except ImportError:
        return ""
    try:
        with opened_picture(io.BytesIO(data)) as image:
            image.load()
    except (OSError, ValueError, MemoryError) as error:
        unknown = isinstance(error, UnidentifiedImageError)
        return f"the image cannot be decoded: {'no known format' if unknown else one_line(error)}"
    return ""


def _append(chunk: Chunk, record: Any, place: int) -> None:
    assert isinstance(chunk.rows, list)
    assert isinstance(chunk.places, list)
    chunk.rows.append(record)
    chunk.places.append(place)


def _modified_ns(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from error


def _bytes_of(path: Path) -> bytes | str:
    """The bytes of an image, or what is wrong with it."""
    try:
        size = path.stat().st_size
        if size > LARGEST:
            return f"the image is larger than {LARGEST >> 20:,} MB, and none may be"
        return path.read_bytes() or "the file is empty"
    except OSError as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}.") from error
