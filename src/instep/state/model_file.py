"""Whether a model file is the one that was written: its hash, compared by every reader.

The model that a run leaves carries its own SHA-256 in its header, so the hash travels
with every copy: the hash is that of the whole file with the digits of the hash as zeros.
The file of a checkpoint has its hash in the manifest beside it. A safetensors file from
elsewhere has neither; there is only its structure to look at (`header.py`). It imports
no torch. Way in: `check_hash`.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from instep.errors import CheckpointError
from instep.state.header import spans
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

KEY = "file_sha256"
"""Of the entry of the header's metadata."""

BLANK = "0" * 64
"""What stands there while the hash is taken."""

_OF_A_RUN = "run.id"  # beside the model of a run, which always carries its hash
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CHUNK_BYTES = 1 << 20


def check_hash(path: Path, *, sealed: bool = False, source: Path | None = None) -> bool:
    """Compare a safetensors file with the hash that was recorded for it.

    Args:
        path: the file.
        sealed: whether it must carry its hash; the model of a run folder must in any case.
        source: what to call it in messages, where it is a copy.

    Returns:
        False where nothing was recorded: then only its structure was looked at.

    Raises:
        CheckpointError: it is no sound safetensors file, or not the one that was written.
    """
    if path.name in (files := _listed(path.parent)):
        check_file(path, files[path.name])
        return True
    spans(path, source)
    return _check_own(path, sealed or (path.parent / _OF_A_RUN).is_file(), source or path)


def _listed(folder: Path) -> dict[str, FileEntry]:
    """What the manifest of a checkpoint lists; nothing where the folder is none."""
    page = folder / MANIFEST
    try:
        ours = is_checkpoint(folder) or FORMAT.encode() in page.read_bytes()
    except OSError:
        return {}
    return read_manifest(folder).files if ours and page.exists() else {}


def _check_own(path: Path, wanted: bool, source: Path) -> bool:
    with open_regular(path) as file:
        try:
            start = file.read(8)
            head = file.read(int.from_bytes(start, "little"))
            recorded = (json.loads(head).get("__metadata__") or {}).get(KEY, "")
            if not _SHA256.fullmatch(recorded):
                if wanted or recorded:
                    raise CheckpointError(
                        f"{source} is damaged: its header does not tell its SHA-256, as that of "
                        "every model that a run leaves does."
                    )
                return False
            digest = hashlib.sha256(start + head.replace(recorded.encode(), BLANK.encode(), 1))
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"{source} cannot be read: {reason(error)}.") from error
    if digest.hexdigest() != recorded:
        raise CheckpointError(
            f"{source} is damaged: its SHA-256 is {digest.hexdigest()[:12]}... and should be "
            f"{recorded[:12]}..., as its header says. Where another program has changed it on "
            f"purpose, have that leave {KEY!r} out of its metadata."
        )
    return True
