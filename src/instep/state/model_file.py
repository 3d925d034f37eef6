"""A safetensors file: is it one, and is it the one that was written?

The model that a run leaves has its own SHA-256 in its header, so the hash travels with every
copy: it is the hash of the whole file with the digits of the hash as zeros. A checkpoint's
file has its hash in the manifest beside it. A safetensors file from elsewhere has neither;
only its structure is checked then. Nothing is ever unpickled, and nothing here imports torch.
Way in: `check_header` for the structure, `check_hash` for every byte.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from instep.errors import CheckpointError
from instep.state.manifest import (
    FORMAT,
    MANIFEST,
    FileEntry,
    check_file,
    is_checkpoint,
    open_regular,
    read_manifest,
    reason,
)

HASH_KEY = "file_sha256"
"""The entry of the header's metadata."""

HASH_BLANK = "0" * 64
"""Its value while the hash is computed."""

_PICKLES = (b"PK\x03\x04", b"\x80\x02")  # how files of torch.save begin, new and old
_OF_A_RUN = "run.id"  # beside the model of a run, which always has its hash
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CHUNK_BYTES = 1 << 20


def open_tensors(path: Path, framework: str, source: Path | None = None) -> Any:
    """Open a safetensors file; its header is checked against its size.

    Args:
        path: the file.
        framework: what tensors become, `numpy` or `pt`.
        source: the name for messages, where the file is a copy.

    Returns:
        A `safetensors.safe_open`, to be used as a context.

    Raises:
        CheckpointError: it is missing, unreadable, of another kind, truncated or damaged.
    """
    name = source or path
    with open_regular(path) as file:
        size, start = os.fstat(file.fileno()).st_size, file.read(4)
    try:
        return safe_open(str(path), framework=framework)
    except (SafetensorError, OSError) as error:
        if start.startswith(_PICKLES):  # so may a safetensors file, if its header has 640 bytes
            raise CheckpointError(
                f"{name} is a file of torch.save, which may hold code, and no safetensors file. "
                "If you trust it, convert it with safetensors.torch.save_file(state_dict, path)."
            ) from error
        raise CheckpointError(
            f"{name} is no safetensors file, or it is truncated or damaged ({size} bytes): {error}."
        ) from error


def check_header(path: Path) -> None:
    """Check in a millisecond whether a file can be a safetensors file.

    Raises:
        CheckpointError: as `open_tensors`.
    """
    with open_tensors(path, "numpy"):
        pass


def check_hash(path: Path, *, required: bool = False, source: Path | None = None) -> bool:
    """Compare a safetensors file with the hash that was recorded for it.

    Args:
        path: the file.
        required: whether it must have its hash; the model of a run folder must in any case.
        source: the name for messages, where the file is a copy.

    Returns:
        False where no hash was recorded: then only the structure was checked.

    Raises:
        CheckpointError: it is no valid safetensors file, or not the one that was written.
    """
    if path.name in (files := _listed(path.parent)):
        check_file(path, files[path.name])
        return True
    with open_tensors(path, "numpy", source) as tensors:
        recorded = (tensors.metadata() or {}).get(HASH_KEY, "")
    name = source or path
    if not _SHA256.fullmatch(recorded):
        if recorded or required or (path.parent / _OF_A_RUN).is_file():
            raise CheckpointError(
                f"{name} is damaged: its header does not have its SHA-256, as that of every model "
                "that a run leaves does."
            )
        return False
    found = _own_hash(path, recorded, name)
    if found != recorded:
        raise CheckpointError(
            f"{name} is damaged: its SHA-256 is {found[:12]}... and should be {recorded[:12]}..., "
            "as its header says. If another program has changed it on purpose, have that leave "
            f"{HASH_KEY!r} out of its metadata."
        )
    return True


def _listed(folder: Path) -> dict[str, FileEntry]:
    """What the manifest of a checkpoint lists; empty where the folder is none."""
    page = folder / MANIFEST
    try:
        ours = is_checkpoint(folder) or FORMAT.encode() in page.read_bytes()
    except OSError:
        return {}
    return read_manifest(folder).files if ours and page.exists() else {}


def _own_hash(path: Path, recorded: str, name: Path) -> str:
    """SHA-256 of a file in whose header the recorded hash is blank."""
    with open_regular(path) as file:
        try:
            start = file.read(8)
            head = file.read(int.from_bytes(start, "little"))
            blank = head.replace(recorded.encode(), HASH_BLANK.encode(), 1)
            digest = hashlib.sha256(start + blank)
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {reason(error)}.") from error
    return digest.hexdigest()
