"""The layout of a run's model on its mesh: found by one process, the same in all.

The first that has found it puts it into the run's folder, in one step; a process that finds another
takes that one. So replicas that start later, or again, split the model as those that train already.
"""

from __future__ import annotations

import os
import uuid
import zlib
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.data.loader import Loader, Slice
from instep.data.order import micro_batch, position
from instep.data.reading.generators import preserved
from instep.errors import DataError, RecipeError, RunError
from instep.parallel.nested import on_tensors
from instep.recipe.forward import Forward, Found
from instep.spec import JobSpec, MeshSpec
from instep.state.broadcast import broadcast_bytes
from instep.worker.step.passes import parts_of

if TYPE_CHECKING:  # imported where there is one: it takes a second
    from instep.parallel.layout import Example, Layout


_EXAMPLES = 8
"""Micro-batches on which it is tried how a model can be cut into stages."""


def agreed_layout(
    run: Path, mesh: MeshSpec, model: nn.Module, example: Example, *, timed: bool = True
) -> Layout:
    """The layout that the processes of a run use.

    Args:
        run: the folder of the run.
        mesh: of the job; a run that is resumed on another finds another layout.
        model: whole.
        example: of what it is trained on.
        timed: whether cuts may be measured, so that another run has others.

    Raises:
        RecipeError, SpecError: the model cannot be laid out so.
        RunError: the file cannot be written or read.
    """
    from instep.parallel.layout import Layout, find_layout

    digest = zlib.crc32(msgspec.json.encode(mesh, order="sorted"))
    file = run / f"mesh-{digest:08x}.json"
    own = run / f"{file.name}.{uuid.uuid4().hex}"
    try:
        if not file.exists():
            with preserved():
                found = find_layout(model, mesh, example, timed=timed)
            own.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
            with suppress(FileExistsError):  # another process was first
                os.link(own, file)
            own.unlink(missing_ok=True)
        return msgspec.json.decode(file.read_bytes(), type=Layout)
    except (OSError, msgspec.DecodeError) as error:
        raise RunError(
            f"{file}: the layout of the model on its mesh cannot be kept or read ({error}). Make "
            "the folder writable, or remove the file."
        ) from error


def told_layout(comm: Comm, layout: Layout | None, device: torch.device) -> Layout:
    """The layout of a replica's first process, on all of them; each calls it. An empty one where
    it has none.

    Raises:
        PeerError: one of them was lost.
    """
    from instep.parallel.layout import Layout

    text = msgspec.json.encode(layout or Layout())
    return msgspec.json.decode(broadcast_bytes(text, comm, 0, device), type=Layout)


def example_of(forward: Forward, loader: Loader, job: JobSpec, samples: int) -> Example:
    """The first micro-batches of the first steps.

    Args:
        forward: computes the loss of a batch.
        loader: of the training dataset.
        job: says how batches are cut.
        samples: in the dataset.

    Raises:
        DataError: none can be read.
    """
    from instep.parallel.layout import Example
    from instep.parallel.pipeline.parts import cut

    slices = []
    for step in range(1, 1 + _EXAMPLES):
        where = position(step, samples, job.train.global_batch)
        ends = micro_batch(where.first, where.stop, 0, parts_of(where, job.train))
        slices.append(Slice(where.epoch, *ends))
    with closing(loader.read(slices)) as reads:
        found = [(read.batch, read.size) for read in reads if read.size]
    if not found:
        raise DataError("none of the samples can be read with which the splitting is to be tried.")
    pieces = job.mesh.pipeline_batches if job.mesh.stages > 1 else 1
    counting = [each for each in found if forward.counts(*cut(*each, pieces)[0])]
    (batch, size), *others = counting or found

    def call(batch: Any, samples: int) -> Found | None:
        return forward.loss(batch, samples, plain=True)

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        with forward.on(model, "float32"):
            found = call(on_tensors(batch, Tensor.clone), size)
        if found is None:
            raise RecipeError(
                "nothing counts in the first micro-batch, so that no tensor plan can be tried. "
                "Order the dataset otherwise, or give mesh.plan."
            )
        return found.loss

    return Example(batch, size, call, others, compute_loss)
