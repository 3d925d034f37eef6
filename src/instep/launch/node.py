"""What a node of a cluster needs for a run, and which of it is missing there.

The same instep and torch, the recipe's file, and the run's folder, at the same paths as here.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from instep.formats import INSTEP
from instep.job.spec import JobSpec
from instep.store.folder import id_of

_SHARED = "Put recipe, data and runs into folders that all nodes share."


@dataclass(frozen=True)
class Needs:
    """What each node needs: as it is where the run was started."""

    recipe: str
    sha256: str
    versions: tuple[tuple[str, str], ...]
    folder: str
    """Where the run was started."""

    @classmethod
    def of(cls, job: JobSpec) -> Needs:
        """As it is here."""
        file = job.recipe.rpartition(":")[0]
        return cls(file, _sha256(file), versions(), os.getcwd())

    def in_copy(self, copy: str) -> Needs:
        """The same, with the recipe's file in a copy of a folder above it, if it is not in its own
        place here; and begun in the copy, if the folder of the start is not here.

        Args:
            copy: a folder of this node, such as Ray's `working_dir`.
        """
        folder = self.folder if os.path.isdir(self.folder) else copy
        parts = Path(self.recipe).parts
        places = [self.recipe, *(os.path.join(copy, *parts[n:]) for n in range(1, len(parts)))]
        recipe = next((place for place in places if _sha256(place) == self.sha256), self.recipe)
        return replace(self, recipe=recipe, folder=folder)

    def missing(self) -> str:
        """What this node does not have, as a sentence without its subject; empty if it has all."""
        for (name, here), (_, wanted) in zip(versions(), self.versions, strict=True):
            if here != wanted:
                return f"has {name} {here}, and this machine {wanted}. Install the same there."
        if _sha256(self.recipe) == self.sha256:
            return ""
        there = Path(self.recipe).is_file()
        what = "has another recipe in" if there else "does not have the recipe's file"
        return f"{what} {self.recipe}. {_SHARED}"


def missing_at(needs: Needs, run: Path, known: str) -> str:
    """What this node does not have, as `Needs.missing` says it, or that it lacks the run's folder.

    Args:
        needs: of the run.
        run: its folder.
        known: the run's id, where it was started.
    """
    missing = needs.missing()
    if not missing and id_of(run) != known:
        missing = f"does not see the run's folder {run}. {_SHARED}"
    return missing


def enter(needs: Needs, logs: Path, known: str) -> str:
    """Be in the folder where the run was started, for a fork server; or what is missing here.

    Args:
        needs: of the run.
        logs: in the run's folder.
        known: the run's id, where it was started.
    """
    missing = missing_at(needs, logs.parent, known)
    if not missing:
        os.chdir(needs.folder if os.path.isdir(needs.folder) else logs)
    return missing


def versions() -> tuple[tuple[str, str], ...]:
    """Of what must be the same on all machines of a run."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not at all"
    return ("instep", INSTEP), ("torch", torch)


def _sha256(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""
