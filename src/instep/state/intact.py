"""Which checkpoint a run can go on from: the newest of which every byte is right.

`manifest.latest` looks at sizes and answers at once; this reads and hashes
whole files, as long as it takes. It imports no torch, and knows nothing of
tensors: what the files mean is `load.py`'s. Way in: `newest_intact`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from instep.errors import CheckpointError
from instep.state.manifest import (
    DELETING,
    Manifest,
    check_file,
    published,
    read_manifest,
    reason,
)


def check(checkpoint: Path) -> Manifest:
    """Compare every byte of a checkpoint with its sealed manifest.

    Returns:
        The manifest, which can be believed.

    Raises:
        CheckpointError: a file is damaged, truncated, foreign or missing; the
            text says which, and why.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is no checkpoint: there is no such folder.")
    manifest = read_manifest(checkpoint)
    for name, entry in manifest.files.items():
        check_file(checkpoint / name, entry)
    return manifest


def newest_intact(
    folder: Path, believe: Callable[[Path, Manifest], None] = lambda *_: None
) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in `folder` of which every byte is right.

    Args:
        folder: where the checkpoints of a run lie.
        believe: given one that is whole, and its manifest; raises `CheckpointError`
            if it is not to be used for another reason.

    Returns:
        Its folder, or None where there is none; and for each newer one that
        cannot be believed a sentence that says which file and why, newest first.

    Raises:
        CheckpointError: `folder` is there but cannot be listed.
    """
    refused = []
    for _, checkpoint in published(folder):
        try:
            believe(checkpoint, check(checkpoint))
        except CheckpointError as error:
            refused.append(str(error))
        else:
            return checkpoint, refused
    return None, refused


def discard_newer(chosen: Path) -> None:
    """Rename every checkpoint that is newer than the chosen one: none of them is taken up later.

    The next writer deletes them.

    Raises:
        CheckpointError: one cannot be renamed, or the folder not be listed.
    """
    for _, checkpoint in published(chosen.parent):
        if checkpoint == chosen:
            return
        _set_aside(checkpoint)


def discard_after(folder: Path, step: int) -> None:
    """The same with every checkpoint of a later step than this.

    Raises:
        CheckpointError: one cannot be renamed, or the folder not be listed.
    """
    for its_step, checkpoint in published(folder):
        if its_step > step:
            _set_aside(checkpoint)


def _set_aside(checkpoint: Path) -> None:
    doomed = checkpoint.with_name(DELETING + checkpoint.name)
    try:
        if doomed.is_dir():
            shutil.rmtree(doomed)
        checkpoint.rename(doomed)
    except OSError as error:
        if not checkpoint.exists():
            return  # another process did it meanwhile
        raise CheckpointError(
            f"{checkpoint} is not to be used and cannot be renamed: {reason(error)}."
        ) from error
