"""Copy the model out of a checkpoint, and check every byte of it.

It imports no torch, unless the model lies in several files. Way in: `choose`, then `copy_model`;
`copy_own` for the final model of a run. Before that `check_target`, or `check_page` for a report:
what the user names with `--to` must not overwrite anything that a run needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from instep.errors import CheckpointError, RunError, SpecError
from instep.state.files.manifest import (
    AVERAGE,
    check_file,
    file_name,
    is_meshed,
    is_table,
    published,
    read_manifest,
)
from instep.state.files.model_file import check_hash
from instep.state.retention import Best, metric_values

_OF_A_RUN = ("run.id", "ledger.bin")
"""A folder that has one of these is a run folder."""


def choose(folder: Path, *, step: int | None = None, best: Best | None = None) -> Path:
    """The checkpoint of a step, or the best one by a metric, or the newest.

    Args:
        folder: where the checkpoints of a run lie.
        step: whose checkpoint; or
        best: the rule that chooses the best.

    Raises:
        CheckpointError: there is none; names those there are.
    """
    kept = sorted({number for number, _ in published(folder)})
    there = f"{folder} has those of step {', '.join(map(str, kept))}" if kept else "none was kept"
    if step is not None:
        if step not in kept:
            raise CheckpointError(f"there is no checkpoint of step {step}: {there}.")
        return next(path for number, path in published(folder) if number == step)
    if best is None:
        if not kept:
            raise CheckpointError(f"there is no checkpoint: {there}.")
        return next(path for _, path in published(folder))
    values = metric_values(folder, best)
    if not values:
        raise CheckpointError(
            f"no checkpoint has the metric {best.metric!r}: {there}, and a metric is kept only if "
            "the step was validated. Set checkpoint.keep_best, or name a --step."
        )
    return choose(folder, step=best.choose(values)[0])


def check_target(target: Path, run: Path, start: str) -> None:
    """Refuse to overwrite a file of a run, or the file that its model started from.

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
            f"--to '{target}' lies in the run folder {folder}: it could overwrite what the run "
            "needs to resume. Name a file elsewhere."
        )
    if start and place.resolve().is_relative_to(Path(start).resolve()):
        raise SpecError(
            f"--to '{target}' would change {start}, from which the model of {run} started: "
            "a replay needs it. Name another file."
        )


def check_page(target: Path, run: Path | None, option: str = "--to") -> None:
    """Refuse to overwrite anything but a report.

    Args:
        target: the file that is to be written; need not exist.
        run: the run folder; its own reports may be overwritten. None if it is about no run.
        option: what it was named with.

    Raises:
        SpecError: names the target, and says where it may be.
    """
    place = target.resolve()
    folder = _run_around(place, run)
    own = run is not None and folder == run.resolve() == place.parent
    own = own and fnmatchcase(place.name, "report*.html")
    if folder is not None and not own:
        raise SpecError(
            f"{option} '{target}' lies in the run folder {folder}, which holds only the run's "
            f"files. Name a file elsewhere, or leave {option} out."
        )
    if place.is_file() and not _is_page(place):
        raise SpecError(
            f"{option} '{target}' exists already, and is no HTML page. Name another file."
        )


def _run_around(place: Path, run: Path | None) -> Path | None:
    """The run folder in which a file lies, if it lies in one."""
    for folder in place.parents:
        if (run and folder == run.resolve()) or any(
            (folder / name).is_file() for name in _OF_A_RUN
        ):
            return folder
    return None


def _is_page(file: Path) -> bool:
    with file.open("rb") as page:
        start = page.read(9)
    return not start or start.lower() == b"<!doctype"


def copy_model(checkpoint: Path, target: Path, *, with_format: bool = False) -> int:
    """Write the model of a checkpoint to `target`, atomically: what was validated, so with the
    moving average of its parameters if there is one.

    Args:
        checkpoint: its folder.
        target: the file.
        with_format: whether the file's metadata must name the format, as `from_pretrained` wants.

    Returns:
        Its size in bytes.

    Raises:
        CheckpointError: the checkpoint has no model, or one that changed since it
            was saved; nothing is written.
        OSError: `target` cannot be written.
    """
    name, manifest = file_name("model"), read_manifest(checkpoint)
    parts = is_meshed(manifest) or any(map(is_table, manifest.files))
    if parts or file_name(AVERAGE) in manifest.files or (with_format and name in manifest.files):
        from instep.state.export.whole import extract  # which imports torch

        return extract(checkpoint, target)
    entry = manifest.files.get(name)
    if entry is None:
        raise CheckpointError(f"{checkpoint} has no {name}: it is the checkpoint of no model.")
    source = checkpoint / name
    check_file(source, entry)
    with _atomic(target) as temporary:
        shutil.copyfile(source, temporary)
        check_file(temporary, entry, source)
    return entry.size_bytes


def copy_own(source: Path, target: Path) -> None:
    """Copy the final model of a run, atomically.

    Raises:
        CheckpointError: it changed since it was saved; nothing is written.
        OSError: it cannot be read, or `target` not written.
    """
    with _atomic(target) as temporary:
        shutil.copyfile(source, temporary)
        check_hash(temporary, required=True, source=source)


@contextmanager
def writing_to(target: Path, option: str = "--to") -> Iterator[None]:
    """A context that writes a file named with `option`; makes its folder.

    Raises:
        RunError: it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise RunError(
            f"{target} cannot be written: {error.strerror}. Choose another {option}."
        ) from None


@contextmanager
def _atomic(target: Path) -> Iterator[Path]:
    """A temporary file, which replaces the target if the context ends without an error."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
