"""Remove what runs that are over have left: nothing that a command still reads, unless asked for.

Each run is locked while something of it is removed, so none can be resumed meanwhile, and a run
that is running is left alone. Ways in: `removals`, then `remove`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from instep.errors import CheckpointError, RunError
from instep.state.files.manifest import DELETING, FOLDER
from instep.state.files.model_file import check_hash
from instep.state.files.staging import SAVING
from instep.store.folder import ID, held, is_over, nothing_came_of
from instep.store.run_folder import RunFolder

QUIET_S = 60.0
"""A run without a recorded end counts as over once it has written nothing for so long."""


class Kinds(NamedTuple):
    """Beside what no command reads: which files of runs to remove."""

    checkpoints: bool = False
    """Those of runs that ended well, did not diverge, and whose model is whole."""
    failed: bool = False
    """Whole folders of runs that failed and have no checkpoint to resume from."""


class Removal(NamedTuple):
    """A file or folder to remove."""

    run: Path
    path: Path
    why: str
    size_bytes: int


def removals(runs: Path, kinds: Kinds) -> tuple[list[Removal], list[str]]:
    """Find what can be removed, and say which runs are left alone.

    Args:
        runs: a folder of run folders.
        kinds: what to remove beside what no command reads.

    Raises:
        RunError: there is no such folder.
    """
    if not runs.is_dir():
        raise RunError(f"there is no folder {runs}. Give the folder that has the run folders.")
    if (runs / "job.toml").is_file():
        raise RunError(f"{runs} is a run itself. Give the folder that has it: {runs.parent}")
    found, alone = list[Removal](), list[str]()
    for run in sorted(each.parent for each in runs.glob("*/job.toml")):
        if why := _left_alone(run):
            alone.append(f"{run} is left alone: {why}")
        else:
            found += _of_run(run, kinds)
    return found, alone


def remove(shown: list[Removal], kinds: Kinds) -> tuple[list[Removal], list[str]]:
    """Remove what was found, where that is still so; returns what is gone, and what is not.

    Args:
        shown: what `removals` found.
        kinds: the same as for it.
    """
    gone, alone = list[Removal](), list[str]()
    for run in dict.fromkeys(each.run for each in shown):
        wanted = {each.path for each in shown if each.run == run}
        try:
            if why := _left_alone(run):
                raise RunError(why)
            with held(run):
                for each in _of_run(run, kinds):
                    if each.path in wanted:
                        _delete(each.path)
                        gone.append(each)
        except (OSError, RunError) as error:
            alone.append(f"{run} is left alone: {error}")
    return gone, alone


def _left_alone(run: Path) -> str:
    """Why nothing of a run may be removed; empty if it is over."""
    if run.is_symlink() or not (run / ID).is_file():
        return "it is a link, or has no run.id"
    try:
        if not is_over(run):
            return "it is running, or its file system has no locks to tell"
        if RunFolder(run).outcome == "unfinished" and _age_s(run) < QUIET_S:
            return f"it was killed, or is running elsewhere, within the last {QUIET_S:.0f} s"
    except RunError as error:
        return str(error)
    return ""


def _age_s(run: Path) -> float:
    """Seconds since the run wrote something."""
    files = [run / name for name in ("events.jsonl", "ledger.bin", "journal.sqlite")]
    files += [run / "checkpoints", *(run / "logs").glob("*")]
    return time.time() - max(file.stat().st_mtime for file in files if file.exists())


def _of_run(run: Path, kinds: Kinds) -> Iterator[Removal]:
    folder, saved = RunFolder(run), run / "checkpoints"
    steps = sorted(path for path in saved.glob("step-*") if FOLDER.fullmatch(path.name))
    if nothing_came_of(run):
        yield _removal(run, run, "nothing came of this run: it has no step")
        return
    if kinds.failed and folder.outcome == "failed" and not steps:
        yield _removal(run, run, "it failed, and has no checkpoint to resume from")
        return
    for place in (run, saved):
        for begin in (SAVING, DELETING):
            for path in sorted(place.glob(f"{begin}*")):
                yield _removal(run, path, "half written or half deleted")
    ended = folder.outcome in ("completed", "stopped")
    if kinds.checkpoints and ended and not _diverged(folder) and _has_its_model(run):
        for path in steps:
            yield _removal(run, path, "checkpoint of a run that ended well")


def _diverged(folder: RunFolder) -> bool:
    """Whether it was stopped for that, or its last loss is not finite: then a checkpoint may be the
    last state of any use."""
    last = folder.steps["loss"][folder.steps["step"] == folder.last_step]
    return folder.ending.get("rule") == "diverged" or not bool(np.isfinite(last).all())


def _has_its_model(run: Path) -> bool:
    try:
        return check_hash(run / "model.safetensors", required=True)
    except CheckpointError:
        return False


def _removal(run: Path, path: Path, why: str) -> Removal:
    within = [path] if path.is_file() or path.is_symlink() else path.rglob("*")
    sizes = (each.lstat().st_size for each in within if each.is_symlink() or each.is_file())
    return Removal(run, path, why, sum(sizes))


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
