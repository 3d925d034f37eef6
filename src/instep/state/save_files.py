"""Files of a checkpoint that is being written, published or removed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from instep.errors import CheckpointError
from instep.state.files import manifest as page
from instep.state.files.staging import SAVING, sync_path
from instep.state.packing import Skeleton


def _plain_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """A copy of `facts` that later changes cannot reach, if they are JSON and nothing else."""
    packed = {key: fact for key, fact in facts.items() if type(fact) is Skeleton}
    facts = {key: fact for key, fact in facts.items() if key not in packed}
    try:
        copy: dict[str, Any] = json.loads(json.dumps(facts, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the facts of a snapshot are not plain JSON: {error}.") from error
    if copy != facts:
        wrong = next(key for key in facts if key not in copy or copy[key] != facts[key])
        raise CheckpointError(
            f"facts[{wrong!r}] would change in JSON (a tuple, or a number as a key?): put it "
            "through pack_state()."
        )
    return copy | packed


def publish(beside: Path, final: Path) -> None:
    """Give the folder its name; an earlier checkpoint of the same step is renamed first.

    That one stays readable under its other name until the new one is there.
    """
    if final.exists():
        old = final.with_name(final.name + page.REPLACED)
        if old.exists():
            delete(old)
        final.rename(old)
    beside.rename(final)
    sync_path(final.parent)


def delete(checkpoint: Path) -> None:
    """Delete a folder so that no half of it ever has the name of a checkpoint."""
    renamed = checkpoint.with_name(page.DELETING + checkpoint.name)
    if renamed.exists():
        shutil.rmtree(renamed)
    checkpoint.rename(renamed)
    shutil.rmtree(renamed)


def inode(path: Path) -> int:
    """Distinguishes a folder from another of the same name; 0 if it is gone."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


@contextmanager
def _folder_beside(final: Path) -> Iterator[Path]:
    """An empty folder to write in, locked as long as this process lives.

    An earlier writer may still be writing one of its own, even for the same step.
    """
    for number in count(1):
        more = f"-{number}" if number > 1 else ""
        beside = final.with_name(f"{SAVING}{final.name}{more}")
        with suppress(FileExistsError):  # the user may have deleted all checkpoints
            final.parent.mkdir()  # but a missing run folder is an error
        beside.mkdir(exist_ok=True)
        try:
            descriptor = os.open(beside, os.O_RDONLY)
        except FileNotFoundError:  # deleted before it was locked
            continue
        try:
            if _locked(descriptor) and beside.exists():
                for left in os.scandir(beside):
                    os.unlink(left)
                yield beside
                return
        finally:
            with suppress(OSError):  # a process forked meanwhile has it open, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Whether a folder's lock could be taken; True where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_in_use(path: Path) -> bool:
    """Whether a living writer has locked it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not _locked(descriptor)
    finally:
        os.close(descriptor)


def _delete_leftovers(folder: Path) -> None:
    for name in os.listdir(folder):
        if name.startswith((SAVING, page.DELETING)):
            path = folder / name
            with suppress(FileNotFoundError):  # its writer has finished by now
                if not path.is_dir():
                    path.unlink()
                elif not _is_in_use(path):
                    shutil.rmtree(path)
    for step, path in list(page.published(folder)):
        if path.name.endswith(page.REPLACED):
            plain = folder / page.folder_name(step)
            if plain.exists():
                delete(path)
            else:
                path.rename(plain)


def _never_preempt() -> None:
    """Never preempt training with this thread, which keeps its full share of the cores.

    A lower priority instead could starve it for long, at times while it holds
    the interpreter's lock.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a sandbox may forbid it, which costs a little time
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0 is the calling thread
