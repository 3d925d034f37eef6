"""Finds the checkpoint to resume from: the newest of which every byte is right.

It reads and hashes whole files. It imports no torch and knows no tensors: `load.py` reads
those. Way in: `newest_intact`; `discard_newer` and `discard_after` for those that are not used.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from instep.errors import CheckpointError
from instep.state.files.manifest import (
    DELETING,
    CheckpointManifest,
    check_file,
    published,
    read_manifest,
    reason,
)


def check(checkpoint: Path) -> CheckpointManifest:
    """Compare every byte of a checkpoint with its sealed manifest.

    Returns:
        The manifest, verified.

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
    folder: Path, accept: Callable[[Path, CheckpointManifest], None] = lambda *_: None
) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in `folder` of which every byte is right.

    Args:
        folder: where the checkpoints of a run lie.
        accept: called with an intact one and its manifest; raises `CheckpointError`
            if it cannot be used for another reason.

    Returns:
        Its folder, or None where there is none; and for each newer one that
        cannot be acceptd a sentence that says which file and why, newest first.

    Raises:
        CheckpointError: `folder` is there but cannot be listed.
    """
    refused = []
    for _, checkpoint in published(folder):
        try:
            accept(checkpoint, check(checkpoint))
        except CheckpointError as error:
            refused.append(str(error))
        else:
            return checkpoint, refused
    return None, refused


def discard_newer(chosen: Path) -> None:
    """Rename every checkpoint that is newer than the chosen one, so that none is loaded later.

    The next writer deletes them.

    Raises:
        CheckpointError: one cannot be renamed, or the folder not be listed.
    """
    for _, checkpoint in published(chosen.parent):
        if checkpoint == chosen:
            return
        _discard(checkpoint)


def discard_after(folder: Path, step: int) -> None:
    """The same for every checkpoint of a later step.

    Raises:
        CheckpointError: one cannot be renamed, or the folder not be listed.
    """
    for its_step, checkpoint in published(folder):
        if its_step > step:
            _discard(checkpoint)


def _discard(checkpoint: Path) -> None:
    renamed = checkpoint.with_name(DELETING + checkpoint.name)
    try:
        if renamed.is_dir():
            shutil.rmtree(renamed)
        checkpoint.rename(renamed)
    except OSError as error:
        if not checkpoint.exists():
            return  # another process did it meanwhile
        raise CheckpointError(
            f"{checkpoint} must not be used and cannot be renamed: {reason(error)}."
        ) from error
