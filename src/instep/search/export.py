"""Writes a search as a study of Optuna, for its dashboard and its plots. Way in: `export`."""

from __future__ import annotations

from pathlib import Path

from instep.errors import RunError
from instep.search.begin import SearchState
from instep.search.sampling import direction, distribution, frozen, optuna_module


def export(found: SearchState, to: Path) -> None:
    """Write what a search has come to into a new SQLite file.

    Raises:
        RunError: there is such a file, or it cannot be written.
        SpecError: Optuna is not installed.
    """
    optuna = optuna_module()
    if to.exists():
        raise RunError(f"{to} exists, and is not replaced. Give another file, or remove it.")
    if not to.absolute().parent.is_dir():
        raise RunError(f"there is no folder {to.absolute().parent} to write {to.name} into.")
    study = optuna.create_study(
        storage=f"sqlite:///{to.absolute()}",
        study_name=found.job.name,
        direction=direction(found.job.stop.upwards),
    )
    space = {key: distribution(optuna, each) for key, each in found.job.search.ranges.items()}
    for _, told in sorted(found.told.items()):
        study.add_trial(frozen(optuna, space, told))
