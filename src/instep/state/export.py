"""Take the model out of a checkpoint that was kept, every byte of it checked.

It imports no torch: a file is copied, and hashed on the way. Way in: `choose`,
then `copy_model`; `copy_own` for the model that a run left at its end.
Before all, `check_target`, or `check_page` for a report: neither may cost a run what it
needs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from instep.errors import CheckpointError, RunError, SpecError
from instep.state.manifest import (
    file_name,
    open_regular,
    published,
    read_manifest,
    reason,
)
from instep.state.model_file import check_hash
from instep.state.retention import Best, measured

_CHUNK_BYTES = 1 << 20
_OF_A_RUN = ("run.id", "ledger.bin")
"""Whatever folder has one of these is that of a run."""


def choose(folder: Path, *, step: int | None = None, best: Best | None = None) -> Path:
    """The checkpoint of a step, or the best one by a metric.

    Args:
        folder: where the checkpoints of a run lie.
        step: whose checkpoint; or
        best: by what the best is told.

    Raises:
        CheckpointError: there is none; the text says which there are.
    """
    kept = sorted({number for number, _ in published(folder)})
    there = f"{folder} has those of step {', '.join(map(str, kept))}" if kept else "none was kept"
    if step is not None:
        if step not in kept:
            raise CheckpointError(f"there is no checkpoint of step {step}: {there}.")
        return next(path for number, path in published(folder) if number == step)
    assert best is not None
    values = measured(folder, best)
    if not values:
        raise CheckpointError(
            f"no checkpoint tells the best by {best.metric!r}: {there}, and a figure is kept only "
            "where a validation came at the same step. Set checkpoint.keep_best, or name a --step."
        )
    return choose(folder, step=best.choose(values)[0])


def check_target(target: Path, run: Path, start: str) -> None:
    """Refuse to write over what a run has, or begins with.

    Args:
        target: the file that is to be written; need not exist.
        run: the run folder; nothing in it may be written, nor in any other.
        start: the file or folder that the run's model started from; empty if there was none.

    Raises:
        SpecError: names the target, and says where it may be.
    """
    place = target.parent.resolve() / target.name
    if (folder := _run_around(place, run)) is not None:
        raise SpecError(
            f"--to '{target}' lies in the run folder {folder}, which is the run's own: it could "
            "lose what it needs to go on. Name a file elsewhere."
        )
    if start and place.resolve().is_relative_to(Path(start).resolve()):
        raise SpecError(
            f"--to '{target}' would change {start}, from which the model of {run} started: "
            "a replay needs it. Name another file."
        )


def check_page(target: Path, run: Path) -> None:
    """Refuse to write a report over what is no report.

    Args:
        target: the file that is to be written; need not exist.
        run: the run folder; its own reports may be written anew.

    Raises:
        SpecError: names the target, and says where it may be.
    """
    place = target.resolve()
    folder = _run_around(place, run)
    own = folder == run.resolve() == place.parent and fnmatchcase(place.name, "report*.html")
    if folder is not None and not own:
        raise SpecError(
            f"--to '{target}' lies in the run folder {folder}, where the files are the run's own. "
            "Name a file elsewhere, or leave --to out."
        )
    if place.is_file() and not _is_page(place):
        raise SpecError(
            f"--to '{target}' is there already, and is no HTML page. Name another file."
        )


def _run_around(place: Path, run: Path) -> Path | None:
    """The run folder in which a file lies, if it lies in one."""
    for folder in place.parents:
        if folder == run.resolve() or any((folder / name).is_file() for name in _OF_A_RUN):
            return folder
    return None


def _is_page(file: Path) -> bool:
    with file.open("rb") as page:
        start = page.read(9)
    return not start or start.lower() == b"<!doctype"


def copy_model(checkpoint: Path, target: Path) -> int:
    """Write the model of a checkpoint to `target`, whole or not at all.

    Returns:
        Its size in bytes.

    Raises:
        CheckpointError: the checkpoint has no model, or its bytes are not those
            that were saved; nothing is written.
        OSError: `target` cannot be written.
    """
    name = file_name("model")
    entry = read_manifest(checkpoint).files.get(name)
    if entry is None:
        raise CheckpointError(f"{checkpoint} has no {name}: it is the checkpoint of no model.")
    with _whole(target) as beside:
        with open_regular(checkpoint / name) as source, beside.open("wb") as copy:
            size, found = _copy(source, copy, checkpoint / name)
        if (size, found) != (entry.size_bytes, entry.sha256):
            raise CheckpointError(
                f"{checkpoint / name} is damaged: it has {size} bytes with SHA-256 "
                f"{found[:12]}... and should have {entry.size_bytes} with {entry.sha256[:12]}..."
            )
    return size


def copy_own(source: Path, target: Path) -> None:
    """Copy the model that a run left, whole and as it was saved, or not at all.

    Raises:
        CheckpointError: it is not as it was saved; nothing is written.
        OSError: it cannot be read, or `target` not written.
    """
    with _whole(target) as beside:
        shutil.copyfile(source, beside)
        check_hash(beside, sealed=True, source=source)


@contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Writes in the context go to a file that the user has named with `--to`; makes its folder.

    Raises:
        RunError: it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise RunError(
            f"{target} cannot be written: {error.strerror}. Choose another --to."
        ) from None


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A file to write, which takes the target's place if the context ends well."""
    beside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield beside
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _copy(source: IO[bytes], copy: IO[bytes], name: Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    while piece := _read(source, name):
        digest.update(piece)
        size += copy.write(piece)
    return size, digest.hexdigest()


def _read(source: IO[bytes], name: Path) -> bytes:
    try:
        return source.read(_CHUNK_BYTES)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {reason(error)}.") from error
