"""What a checkpoint consists of, as its sealed manifest says, and where checkpoints are.

A checkpoint is a folder `step-00000123` with one safetensors file for each
group of tensors and `manifest.json`: step, versions, facts, and of every file
its size and SHA-256. Where a replica is a mesh, `part-N` has what its rank N wrote of model and
optimizer state. The last entry, `seal`, is the SHA-256 of all the bytes
before it, so that no bit of the folder can change unnoticed. Files that the
manifest does not list are not read. It imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from instep import formats
from instep.errors import CheckpointError
from instep.plain_file import NotPlain, plain

FORMAT = "instep checkpoint"
MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
AVERAGE = "average"
"""The group of tensors that has the moving average of the parameters."""

REPLACED = ".old"
"""Ends the name of a checkpoint while a new one of the same step takes its place."""

DELETING = ".deleting-"
"""Begins the name of a checkpoint that is no longer used; the next writer deletes it."""

FOLDER = re.compile(r"step-(\d{8,})(\.old)?", re.ASCII)
"""What the folder of a checkpoint is called."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", re.ASCII)
_PART = re.compile(r"part-\d+\.safetensors", re.ASCII)
_TABLE = re.compile(r"table-\d+\.safetensors", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SEAL = re.compile(rb'"seal": "([0-9a-f]{64})"\n}\n\Z')


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and hash of one file."""

    size_bytes: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The contents of `manifest.json`."""

    format: str = FORMAT
    version: int = formats.FORMAT
    step: int
    instep: str
    torch: str
    files: dict[str, FileEntry]
    facts: dict[str, Any]


def folder_name(step: int) -> str:
    """`123` -> `'step-00000123'`."""
    return f"step-{step:08d}"


def file_name(group: str) -> str:
    """`'model'` -> `'model.safetensors'`.

    Raises:
        CheckpointError: the group's name cannot be part of a file's.
    """
    name = group + SUFFIX
    if not _FILE.fullmatch(name):
        raise CheckpointError(
            f"a group of tensors is called {group!r}: use letters, digits, '_', '-' and '.'."
        )
    return name


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return FOLDER.fullmatch(folder.name) is not None


def is_meshed(manifest: CheckpointManifest) -> bool:
    """Whether ranks of a mesh have saved parts of the tensors."""
    return any(_PART.fullmatch(name) for name in manifest.files)


def is_table(name: str) -> bool:
    """Whether a server has saved its rows of embeddings in a file of this name."""
    return _TABLE.fullmatch(name) is not None


def encode(manifest: CheckpointManifest) -> bytes:
    """The bytes of `manifest.json`: one entry a line, and the seal."""
    entries = msgspec.to_builtins(manifest)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
    return seal(("{\n" + ",\n".join(lines) + ',\n"seal": "').encode("ascii"))


def seal(text: bytes) -> bytes:
    """Append the seal to `text`, which ends where its digits begin."""
    return text + hashlib.sha256(text).hexdigest().encode("ascii") + b'"\n}\n'


def decode(data: bytes, source: Path) -> CheckpointManifest:
    """Read the bytes of a manifest, after checking the seal over them.

    Args:
        source: the file they came from, for messages.

    Raises:
        CheckpointError: damaged, edited, of another program, or of a newer instep.
    """
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is damaged: it is not JSON ({error}).") from error
    if not isinstance(entries, dict) or entries.get("format") != FORMAT:
        raise CheckpointError(f"{source} is not a manifest of an instep checkpoint.")
    version = entries.get("version")
    if type(version) is not int:
        raise CheckpointError(f"{source} is not a valid manifest: its version is {version!r}.")
    if version != formats.FORMAT:
        raise CheckpointError(formats.other_format(source, version, entries.get("instep")))
    sealed = _SEAL.search(data)
    if sealed is None or seal(data[: sealed.start(1)]) != data:
        raise CheckpointError(f"{source} was damaged or edited: its seal does not fit its text.")
    del entries["seal"]
    try:
        manifest = msgspec.convert(entries, CheckpointManifest, strict=True)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source} is not a valid manifest: {error}.") from error
    _check_fields(manifest, source)
    return manifest


def _check_fields(manifest: CheckpointManifest, source: Path) -> None:
    if manifest.step < 0:
        raise CheckpointError(f"{source} has step {manifest.step}: steps are never negative.")
    for name, entry in manifest.files.items():
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"{source} lists {name!r}, which no file of a checkpoint is.")
        if entry.size_bytes < 0 or not _SHA256.fullmatch(entry.sha256):
            raise CheckpointError(f"{source} lists {name} with no valid size and SHA-256.")


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """The manifest of a checkpoint folder.

    Raises:
        CheckpointError: there is none, it is invalid, or it is of another step.
    """
    source = checkpoint / MANIFEST
    with open_regular(source) as file:
        manifest = decode(_read(file, source), source)
    named = FOLDER.fullmatch(checkpoint.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"{source} is of step {manifest.step}, but its folder is called {checkpoint.name}."
        )
    return manifest


def _read(file: BufferedReader, source: Path) -> bytes:
    try:
        return file.read()
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {reason(error)}.") from error


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; never blocks, whatever is at `path`.

    Raises:
        CheckpointError: it is missing, unreadable, or not a plain file.
    """
    try:
        return open(path, "rb", opener=plain)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except NotPlain as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}.") from error


def check_file(path: Path, entry: FileEntry, source: Path | None = None) -> None:
    """Compare size and SHA-256 of a file with its entry; `source` is a copy's name for messages.

    Raises:
        CheckpointError: missing, unreadable, truncated, or changed.
    """
    name = source or path
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry.size_bytes:
            how = "truncated" if size < entry.size_bytes else "changed"
            raise CheckpointError(
                f"{name} is {how}: it has {size} bytes and should have {entry.size_bytes}."
            )
        try:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {reason(error)}.") from error
    if found != entry.sha256:
        raise CheckpointError(
            f"{name} is damaged: its SHA-256 is {found[:12]}... and should be "
            f"{entry.sha256[:12]}..."
        )


def published(folder: Path) -> Iterator[tuple[int, Path]]:
    """Every (step, checkpoint) in `folder`, newest first, intact or not.

    Raises:
        CheckpointError: the folder cannot be listed; one that is missing has none.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {reason(error)}.") from error
    matches = [match for match in map(FOLDER.fullmatch, names) if match]
    found = [(int(match[1]), match[2] is None, match[0]) for match in matches]
    for step, _, name in sorted(found, reverse=True):
        yield step, folder / name


def reason(error: OSError) -> str:
    """`'No space left on device (ENOSPC)'`."""
    name = errno.errorcode.get(error.errno or 0, "no errno")
    return f"{error.strerror or error} ({name})"
