"""Which file a run starts from, and whether it can be one; looked at before any process starts.

It imports no torch: a client asks it first, and each worker again. What is
done with the file is for `tuning.py`.
"""

from __future__ import annotations

from pathlib import Path

from instep.errors import SpecError, near_miss
from instep.job.start import StartSpec
from instep.recipe.start.converting import how_to_convert
from instep.recipe.start.url import local_copy
from instep.state.files.manifest import FOLDER, read_manifest
from instep.state.files.sharded import MODEL, model_in, open_model
from instep.store.folder import ID
from instep.words import command, is_url, shown_url


def start_file(start: StartSpec) -> Path | None:
    """The safetensors file of `start.model`, or the index of several, with headers checked.

    None if the job names none.

    Raises:
        SpecError: there is no such file, or the folder has no model in it.
        RunError: the folder is of a run of another format.
        CheckpointError: it is not a valid safetensors file, or of a checkpoint of another format.
        DataError: it is at a URL, and cannot be read.
    """
    if not start.model:
        return None
    named = f"start.model = {shown_url(start.model)!r}"
    path = local_copy(start)[0] if is_url(start.model) else Path(start.model)
    if path.is_dir():
        if not (model := model_in(path)).is_file():
            if any(path.glob("part-*.safetensors")):
                step = path.name.removeprefix("step-").lstrip("0")
                again = command(
                    "export", path.parent.parent, f"--step {step} --to FILE.safetensors"
                )
                raise SpecError(
                    f"{named}: the ranks of a mesh saved this checkpoint in "
                    f"parts. Make one file of its model, and give that: {again}"
                )
            if convert := how_to_convert(_names_in(path), str(path)):
                raise SpecError(f"{named}: {convert}")
            raise SpecError(
                f"{named}: this folder holds no {MODEL}. "
                "Give the folder of a run that has ended, or a safetensors file."
            )
        if all((path / name).is_file() for name in ("job.toml", ID)):
            from instep.store.run_files import check_format  # which imports numpy

            check_format(path)
        elif FOLDER.fullmatch(path.name):
            read_manifest(path)
        path = model
    if not path.exists():
        beside = [each.name for each in path.parent.glob("*.safetensors")]
        near = near_miss(path.name, beside) if beside else "It is relative to the job file."
        raise SpecError(f"{named}: there is no such file. {near}")
    with open_model(path):
        return path


def _names_in(folder: Path) -> list[str]:
    found = [*folder.iterdir(), *folder.glob("global_step*/*.pt")]
    return [str(each.relative_to(folder)) for each in found]
