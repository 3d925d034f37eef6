"""Builds the model of a replica of which no process is to have all in its memory.

Whether that is so is measured: the model is built once without memory, which takes no longer than
its code does. What a file or a checkpoint will give has no values until this process knows its
part. Where values come from nowhere else, or follow from what was drawn, they are computed as
always, in files that are gone when the model is split. So the outcome is that of a plain build.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import nn

from instep.errors import InstepError, RecipeError, SpecError
from instep.job.mesh import MeshSpec
from instep.job.spec import JobSpec
from instep.parallel.embeddings import is_sparse
from instep.parallel.meta_start import drawn, in_files, without_memory
from instep.recipe.recipe import Recipe
from instep.system.kernels import per_machine
from instep.system.malloc import return_freed_memory
from instep.system.memory import room
from instep.units import readable_bytes

TRIAL = 20
"""How often the bytes of its parameters a model takes while it is copied and tried, in float64."""


SMALL = 1 << 26
"""Bytes of embeddings that every process may have in memory while it starts."""


class Building(NamedTuple):
    """What decides how a process builds its model."""

    mesh: MeshSpec
    room: int
    """Bytes that this process may take."""
    folder: Path
    """Where files may be written while the model is built."""


def measured(job: JobSpec, folder: Path) -> Building:
    """What decides in a job; `folder` is that of the run."""
    processes = per_machine(job.workers, job.launch.count)
    return Building(job.mesh, room(processes), folder)


def size_of(model: nn.Module) -> int:
    """Bytes of a model's parameters."""
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def build_in_files(
    recipe: Recipe, seed: int, make: Callable[[Recipe, int], nn.Module], folder: Path
) -> nn.Module | None:
    """Build a model in files if its sparse embeddings, of which a process keeps no row, are large.

    Args:
        recipe, seed, make: as for `build_large`.
        folder: where files may be written.

    Returns:
        The model; None if it is to be built as always.

    Raises:
        RecipeError: the disk has no room.
    """
    if isinstance(recipe.model, nn.Module):
        return None
    try:
        empty = without_memory(lambda: make(recipe, seed))
    except InstepError:
        raise
    except Exception:  # it uses the values of parameters
        return None
    size = sum(size_of(layer) for layer in empty.modules() if is_sparse(layer))
    if size <= SMALL:
        return None
    folder = folder if folder.is_dir() else Path(tempfile.gettempdir())
    try:
        return in_files(lambda: make(recipe, seed), folder)
    except OSError as error:
        raise RecipeError(
            f"each process builds the model's embeddings in files first, in {folder}, which needs "
            f"{readable_bytes(size)} there: {error.strerror or error}. Make room, or use fewer "
            "processes on this machine."
        ) from error


def build_large(
    recipe: Recipe,
    seed: int,
    make: Callable[[Recipe, int], nn.Module],
    building: Building,
    *,
    filled: bool,
) -> tuple[nn.Module | None, bool]:
    """Build a model in parts, if it is so large or the job asks for it.

    Args:
        recipe: of the user.
        seed: of the job.
        make: makes the recipe's model from a seed.
        building: decides.
        filled: whether a file or a checkpoint has every parameter.

    Returns:
        The model, None if it is to be built as always; and whether it is small enough for one
        process to copy and try the whole of it. What tensor ranks and stages share is found out on
        the whole model, so with these it is always built as always.

    Raises:
        SpecError: the job asks for what cannot be done.
        RecipeError: the disk has no room, or the model cannot be built so.
    """
    mesh, forced = building.mesh, building.mesh.build == "parts"
    if mesh.build == "whole" or mesh.same_batch > 1:
        return None, True
    if isinstance(model := recipe.model, nn.Module):
        if forced:
            raise SpecError(
                "mesh.build = 'parts', and Recipe.model is a model that the recipe has built "
                "whole. Give the function that builds it: model=lambda: Net()."
            )
        return None, TRIAL * size_of(model) <= building.room
    try:
        empty = without_memory(lambda: make(recipe, seed))
    except InstepError:
        raise
    except Exception:  # it uses the values of parameters
        empty = None
    if not forced and (empty is None or TRIAL * size_of(empty) <= building.room):
        return None, True
    return_freed_memory()
    if empty is not None and filled:
        again = without_memory(lambda: make(recipe, seed + 1))
        if not drawn(empty, again):
            return empty, False
    folder = building.folder if building.folder.is_dir() else Path(tempfile.gettempdir())
    try:
        return in_files(lambda: make(recipe, seed), folder), False
    except OSError as error:
        needs = f"at most {readable_bytes(size_of(empty))}" if empty is not None else "room"
        raise RecipeError(
            f"each process of a replica builds the model in files first, in {folder}, which needs "
            f"{needs} there: {error.strerror or error}. Make room; or save the model "
            "once with safetensors.torch.save_model, and give the file as start.model: then each "
            "process reads its part of it."
        ) from error
