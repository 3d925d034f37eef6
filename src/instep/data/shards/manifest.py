"""The manifest of a folder of shards: what its samples are, which files have them, where from.

It is replaced in one go once every file is whole, so a folder has the samples of its manifest and
no others, whatever was killed. Way in: `read_manifest` and `write_manifest`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from instep.data.shards.columns import Column
from instep.errors import DataError
from instep.plain_file import read_plain, replace_plain
from instep.undecodable import UNDECODABLE

NAME = "manifest.json"

FORMAT = 1


class Shard(msgspec.Struct, frozen=True):
    """One file."""

    file: str
    samples: int
    bytes: int
    crc32: int | None = None
    """Of all its bytes."""


class Source(msgspec.Struct, frozen=True):
    """One raw file."""

    path: str
    """Path, or URL without a password or a signature."""
    bytes: int
    modified_ns: int
    hash: str
    """SHA-256 over the CRC-32 of each 64 MiB of its bytes, as hexadecimal digits."""
    version: str = ""
    """ETag of a file at a URL, or the time of its change."""
    state: str = ""
    stamp: str = ""
    key: str = ""
    """Digests by which the next command knows it (`prepare/unchanged.py`)."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder has."""

    format: int = FORMAT
    columns: list[Column]
    samples: int
    bytes: int
    """Of all shards."""
    sha256: str
    """Of all samples in their order (`digest.py`)."""
    bad: int
    """Records that no sample was made of."""
    shards: list[Shard]
    blocks: str = ""
    """The file with the digest of each block of samples, 32 bytes each."""
    bad_file: str = ""
    """The file with the bad records: where each is, what is wrong, and its text."""
    tasks: str = ""
    """The file with the results of tasks: a repeated command does only what has changed."""
    statistics: dict[str, Any] = {}
    """Of each column: mean, deviation, lengths, classes."""
    sources: list[Source] = []
    made_by: dict[str, Any] = {}
    """The function with the hash of its source, options, versions."""


def read_manifest(folder: Path | str, read: Callable[[], bytes] | None = None) -> Manifest:
    """The manifest of a folder.

    Args:
        folder: for messages.
        read: gives the bytes of its file; by default from `folder`.

    Raises:
        DataError: there is none, or it is damaged.
    """
    path = f"{folder}/{NAME}"
    try:
        data = read() if read is not None else read_plain(Path(path))
        found = msgspec.json.decode(data, type=Manifest)
    except FileNotFoundError:
        left = Path(folder) / ".preparing"
        hint = (
            "its preparation has not ended: give the same instep prepare again"
            if left.is_dir()
            else f"instep prepare SOURCE --to {folder} makes one"
        )
        raise DataError(f"{folder} has no {NAME}: {hint}.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UNDECODABLE as error:
        raise DataError(f"{path} is damaged: {error}. Run instep prepare again.") from None
    if found.format > FORMAT:
        raise DataError(f"{path} is of a newer instep. Update instep to read it.")
    names = [shard.file for shard in found.shards]
    names += [found.blocks, found.bad_file, found.tasks]
    if any("/" in name or name in (".", "..") for name in names):
        raise DataError(f"{path} names a file that does not lie beside it.")
    if sum(shard.samples for shard in found.shards) != found.samples:
        raise DataError(f"{path} is damaged: its shards have another number of samples.")
    return found


def lines_of(tables: Sequence[dict[str, Any]]) -> bytes:
    """The tables as lines of JSON, for the file of bad records."""
    return "".join(json.dumps(table) + "\n" for table in tables).encode()


def kept_name(kind: str, data: bytes, suffix: str) -> str:
    """Name a file that the manifest names, by its bytes."""
    return f"{kind}-{hashlib.sha256(data).hexdigest()[:16]}{suffix}"


def is_kept(path: Path) -> bool:
    """Tell whether a file has the bytes that its name was made of."""
    kind, _, _ = path.stem.rpartition("-")
    with suppress(OSError):
        return kept_name(kind, read_plain(path), path.suffix) == path.name
    return False


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a folder, so that a crash leaves the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1).decode()
    replace_plain(folder / NAME, text + "\n", durable=True)
