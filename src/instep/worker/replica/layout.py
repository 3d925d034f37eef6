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
from instep.data.batches import Batches
from instep.data.loader import Loader, Slice
from instep.data.reading.generators import preserved
from instep.engine.member import Member
from instep.engine.passes import parts_of
from instep.errors import DataError, RecipeError, RunError
from instep.job.mesh import MeshSpec
from instep.job.spec import JobSpec
from instep.parallel.nested import on_tensors
from instep.plain_file import read_plain
from instep.recipe.forward import Forward, Found
from instep.state.broadcast import broadcast_bytes
from instep.undecodable import UNDECODABLE

if TYPE_CHECKING:  # imported where there is one: it takes a second
    from instep.parallel.layout import Example, MeshLayout


_EXAMPLES = 8
"""Micro-batches on which it is tried how a model can be cut into stages."""


def found_layout(member: Member, model: nn.Module, example: Example, *, timed: bool) -> MeshLayout:
    """The same for the first process of a replica; one that does not see the run's folder is told
    what worker 0 has found.

    Raises:
        InstepError: as `agreed_layout`.
        PeerError: there is no master any more.
    """
    from instep.parallel.layout import MeshLayout

    if not member.sees_run:
        member.phase = "meeting"
        return msgspec.json.decode(member.run_store.get("layout"), type=MeshLayout)
    layout = agreed_layout(member.run, member.job.mesh, model, example, timed=timed)
    if member.number == 0:
        member.run_store.set("layout", msgspec.json.encode(layout))
    return layout


def agreed_layout(
    run: Path, mesh: MeshSpec, model: nn.Module, example: Example, *, timed: bool = True
) -> MeshLayout:
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
    from instep.parallel.layout import MeshLayout, find_layout

    digest = zlib.crc32(msgspec.json.encode(mesh, order="sorted"))
    file = run / f"mesh-{digest:08x}.json"
    try:
        if not file.exists():
            with preserved():
                found = find_layout(model, mesh, example, timed=timed)
            _put(file, msgspec.json.format(msgspec.json.encode(found)))
        layout = msgspec.json.decode(read_plain(file), type=MeshLayout)
    except OSError as error:
        why = "cannot be written or read: " + (error.strerror or str(error))
        raise _unusable(file, why) from error
    except UNDECODABLE as error:
        raise _unusable(file, "is damaged: it is not what was written there") from error
    if other := sorted(_names(layout) - dict(model.named_modules()).keys()):
        raise _unusable(file, f"is of another model: there is no {other[0]!r} in this one")
    return layout


def _put(file: Path, text: bytes) -> None:
    """Write a file all at once, unless another process was first."""
    own = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        with own.open("xb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())  # else a crash of the host may leave an empty file
        with suppress(FileExistsError):
            os.link(own, file)
    finally:
        own.unlink(missing_ok=True)


def _names(layout: MeshLayout) -> set[str]:
    """The modules that a layout is about."""
    plan = layout.plan
    found = (
        [plan.cuts, plan.kept, plan.edits, plan.draws, plan.sequence] if plan is not None else []
    )
    return {*layout.cuts, *layout.blocks, *(name for each in found for name in each)}


def _unusable(file: Path, why: str) -> RunError:
    return RunError(
        f"{file} {why}. It says how the model is laid out on the run's [mesh]. Get access to it; "
        "or remove it, and the next start of the run finds another layout."
    )


def told_layout(comm: Comm, layout: MeshLayout | None, device: torch.device) -> MeshLayout:
    """The layout of a replica's first process, on all of them; each calls it. An empty one where
    it has none.

    Raises:
        PeerError: one of them was lost.
    """
    from instep.parallel.layout import MeshLayout

    text = msgspec.json.encode(layout or MeshLayout())
    return msgspec.json.decode(broadcast_bytes(text, comm, 0, device), type=MeshLayout)


def example_of(forward: Forward, loader: Loader, job: JobSpec, batches: Batches) -> Example:
    """The first micro-batches of the first steps.

    Args:
        forward: computes the loss of a batch.
        loader: of the training dataset.
        job: says how batches are cut.
        batches: what each commit takes.

    Raises:
        DataError: none can be read.
    """
    from instep.parallel.layout import Example
    from instep.parallel.pipeline.parts import cut

    slices = []
    for step in range(1, 1 + _EXAMPLES):
        where = batches.in_steps(job).of(step)
        ends = where.micro_batch(0, parts_of(where, job.train))
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
