"""Which raw files a user names, and of which format each is."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from instep.data.raw.base import FORMATS
from instep.errors import SpecError, file_beside
from instep.words import plural

COMPRESSED = (".gz", ".zst")

_FOLDERS = "Name the folder that has a sub-folder for each class, with its images."


def format_of(path: str | Path) -> str:
    """The format of a file by its suffix: a key of `FORMATS`.

    Raises:
        DataError: no format has this suffix; or it is an image, of which folders are read.
    """
    name = _format_of(Path(path))
    if name is None:
        raise SpecError(f"{path}: its format is not known by its name. Known: {_known()}.")
    if name == "images":
        raise SpecError(f"{path} is one image. {_FOLDERS}")
    return name


def _format_of(path: Path) -> str | None:
    by_suffix = {suffix: name for name in FORMATS for suffix in FORMATS[name].suffixes}
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSED:
        name = by_suffix.get(suffixes[0]) if len(suffixes) > 1 else None
        return name if name and FORMATS[name].compressed else None
    return by_suffix.get(suffixes[-1]) if suffixes else None


def _known() -> str:
    plain = [suffix for name in FORMATS for suffix in FORMATS[name].suffixes]
    return ", ".join(plain) + "; .gz or .zst behind those of lines"


def sources(patterns: Sequence[str]) -> list[tuple[Path, str]]:
    """The files that paths, globs and folders name, sorted by path, and their formats.

    A file counts once, however often and by whatever link it is named.

    Raises:
        SpecError: a pattern names nothing, or a folder with files of several formats; or the format
            of a file is not known.
    """
    found, real = dict[Path, str](), set[str]()
    for pattern in patterns:
        named = _named(pattern)
        if not named:
            raise SpecError(f"{pattern!r} names no file. {_beside(pattern)}")
        for path in named:
            for file, name in _in_folder(path) if path.is_dir() else [(path, format_of(path))]:
                if (same := os.path.realpath(file)) not in real:
                    real.add(same)
                    found[file] = name
    return sorted(found.items(), key=lambda item: str(item[0]))


def _named(pattern: str) -> list[Path]:
    if os.path.lexists(pattern):  # also where its name has a '*' or a '['
        return [Path(pattern)]
    return [Path(name) for name in glob.glob(pattern, recursive=True)]


def _beside(pattern: str) -> str:
    folder = Path(pattern).parent
    return file_beside(Path(pattern), "*") if folder.is_dir() else f"There is no folder {folder}."


def _in_folder(folder: Path) -> list[tuple[Path, str]]:
    """The files of a folder that have one format; hidden ones and those as '_SUCCESS' do not count.

    Raises:
        SpecError: they have several, or one of them has none that is known; or there is no file.
    """
    formats, unknown = dict[str, list[Path]](), list[Path]()
    for path in _walk(folder):
        name = _format_of(path)
        if name is None:
            unknown.append(path)
        else:
            formats.setdefault(name, []).append(path)
    if len(formats) == 1 and not unknown:
        ((name, paths),) = formats.items()
        if name == "images":
            if any(path.parent == folder for path in paths):
                raise SpecError(f"the folder {folder} has images without a class. {_FOLDERS}")
            return [(folder, name)]
        return [(path, name) for path in paths]
    if not formats and not unknown:
        raise SpecError(f"the folder {folder} holds no file.")
    raise SpecError(
        f"the folder {folder} does not hold files of one format: "
        f"it has {_mixture(formats, unknown)}. "
        f"Name those that are meant, as '{folder}/*.csv'. Known: {_known()}."
    )


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        yield from (Path(parent, name) for name in sorted(names) if name[0] not in "._")


def _mixture(formats: dict[str, list[Path]], unknown: list[Path]) -> str:
    parts = [f"{plural(len(paths), 'file')} of {name}" for name, paths in formats.items()]
    if unknown:
        parts.append(f"{plural(len(unknown), 'other')}, such as {unknown[0].name}")
    return ", ".join(parts)
