"""The equality gate of a job: the gradients of its first global batch, on one process and a mesh.

The reference is what the recipe's model computes while it is whole, on one rank, for which nothing
of a mesh is used. How a mesh computes, and what its ranks hold, is for the caller to say; what
counts as the same is decided in `parallel/gate.py`.

The order: a `GradientGate` of the whole model on every rank; `compute` on rank 0; the mesh is made;
its ranks `agree`, and compute the same batch within `moved`; `compare` on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.data.batches import Batches
from instep.data.loader import Loader, Skipped, Slice
from instep.engine.passes import parts_of, share_of
from instep.engine.turns import key_of_pass
from instep.job.spec import JobSpec
from instep.parallel.draws import ByMicroBatch
from instep.parallel.gate import Box, GateVerdict, GradientPiece, check
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward
from instep.worker.trial.model import Copied, TrialModel
from instep.worker.trial.moves import Moves

STEP = 1
"""Whose global batch is compared."""


class WholePass(NamedTuple):
    """One pass of the process that computes alone."""

    batch: Any
    size: int
    """Samples in it."""
    keys: Sequence[int]
    """Of each of its micro-batches, for its random draws."""
    sizes: Sequence[int]
    """Samples of each of these."""
    part: int = 0
    """Its number among the parts of a micro-batch that a pipeline cuts."""


def whole_passes(
    loader: Loader,
    job: JobSpec,
    batches: Batches,
    turn: int = 0,
    skipped: list[Skipped] | None = None,
) -> list[WholePass]:
    """The first global batch as one process runs it: a pass for each micro-batch, or with
    `train.batch_norm = "global"` one pass over all.

    Args:
        loader: of the training dataset.
        job: decides how the batch is cut.
        batches: what each step takes.
        turn: of a recipe with several updates in a step.
        skipped: gets the samples that could not be read.
    """
    where = batches.of(STEP)
    parts, together = parts_of(where, job.train), job.train.batch_norm == "global"
    share = share_of(where, parts, 1, 0, merge=False, whole=together)
    passes = []
    with closing(loader.read([part.samples for part in share.passes])) as reads:
        for part, read in zip(share.passes, reads, strict=True):
            lost = {each.sample for each in read.skipped}
            if skipped is not None:
                skipped += read.skipped
            numbers = range(part.number, part.number + part.micro_batches)
            cuts = [where.micro_batch(number, parts) for number in numbers]
            indices = [loader.indices(Slice(where.epoch, *cut)).tolist() for cut in cuts]
            keys = [key_of_pass(job.seed, STEP, number, turn) for number in numbers]
            sizes = [sum(index not in lost for index in each) for each in indices]
            if read.size:
                passes.append(WholePass(read.batch, read.size, keys, sizes))
    return passes


def in_parts(passes: Iterable[WholePass], parts: int) -> list[WholePass]:
    """The same, with each micro-batch in the parts that a pipeline cuts it into."""
    from instep.parallel.pipeline.parts import cut

    return [
        WholePass(batch, size, each.keys, [size], number)
        for each in passes
        for number, (batch, size) in enumerate(cut(each.batch, each.size, parts))
    ]


class GradientGate:
    """Compares the gradients of a mesh with those of one process.

    Args:
        forward: its model is whole, and is left as it is.
        seed: of the moves of parameters.
    """

    def __init__(self, forward: Forward, seed: int) -> None:
        model, trained = forward.model, forward.trained
        self._forward, self._seed, self._moves = forward, seed, Moves(model, seed)
        self._shapes = {
            name: parameter.shape
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and (trained is None or name in trained)
        }
        self._reference: dict[str, Tensor] = {}

    def compute(
        self, passes: Iterable[WholePass], blocks: Sequence[str] = (), *, copied: bool = False
    ) -> None:
        """Compute the reference, on a copy of the model in float32 without autocast; on rank 0.

        Args:
            passes: of the global batch.
            blocks: names of modules at which the draws of a pass are keyed anew, as in stages.
            copied: whether the model is a copy already, and need not stay as it is.

        Raises:
            Exception: of whatever kind, the model cannot be copied.
            RecipeError: what `Forward.loss` raises.
        """
        forward = self._forward
        original = Copied(forward.model, forward.losses)
        own = original if copied else original.again(by_batch=True)
        with forward.on(own.model, "float32", own.losses):
            model = TrialModel(forward, own, original, self._seed)
            model.move()
            weight = 0.0
            for batch, size, keys, sizes, part in passes:
                model.draws = partial(_draws, keys, sizes)
                if blocks:
                    model.draws = partial(_drawn_by_block, own.model, blocks, (keys[0], part))
                found = model.run(batch, size)
                if found is None:  # nothing in it counts
                    continue
                weight += found.weight
                for name, gradient in found.gradients.items():
                    total = gradient * (found.weight or 1.0)
                    before = self._reference.get(name)
                    self._reference[name] = total if before is None else before.add_(total)
            model.refuse_written()
        for gradient in self._reference.values():
            gradient.div_(weight or 1.0)

    def agree(self, comm: Comm) -> None:
        """Take from rank 0 what only who has the whole model knows; all ranks of the mesh call
        this."""
        self._moves.agree(comm, self._forward.device)

    def moved(self, parts: Iterable[tuple[str, Box, Tensor]]) -> AbstractContextManager[None]:
        """In this context the parameters of a mesh are where those of the reference were.

        Args:
            parts: of this rank: name in the whole model, box, and values, moved in place.
        """
        return self._moves.moved(parts)

    def compare(
        self, held: Mapping[str, tuple[Box, Tensor | None]], comm: Comm, mesh: str = ""
    ) -> GateVerdict:
        """Compare the gradients of the mesh with the reference of rank 0.

        Args:
            held: of each parameter that this rank holds a part of: its name in the whole model,
                the box, and the gradient [box] of the batch's mean loss; None if it has none.
            comm: all ranks of the mesh; each calls this.
            mesh: the job's, for the message.

        Raises:
            RecipeError: naming the first parameter, in order of registration, whose gradient
                differs; on every rank.
        """
        device = self._forward.device
        return check(self._pieces(held, comm, device), comm, device=device, mesh=mesh)

    def _pieces(
        self, held: Mapping[str, tuple[Box, Tensor | None]], comm: Comm, device: torch.device
    ) -> Iterator[GradientPiece]:
        there = torch.tensor([name in self._reference for name in self._shapes], device=device)
        there = there.double()
        comm.broadcast(there)
        for (name, shape), known in zip(self._shapes.items(), there.tolist(), strict=True):
            whole = None
            if known:
                whole = torch.empty(shape, device=device)
                if comm.rank == 0:
                    whole.copy_(self._reference.pop(name))
                comm.broadcast(whole)
            box, mesh = held.get(name, (None, None))
            if box is None:
                yield GradientPiece(name, shape, None, None, None)
                continue
            cut = tuple(slice(first, stop) for first, stop in box)
            yield GradientPiece(name, shape, box, None if whole is None else whole[cut], mesh)


@contextmanager
def _draws(keys: Sequence[int], sizes: Sequence[int]) -> Iterator[None]:
    set_generators(keys[0])
    if len(keys) == 1:
        yield
        return
    with ByMicroBatch(keys, sizes):
        yield


def _drawn_by_block(
    model: nn.Module, blocks: Sequence[str], key: tuple[int, int]
) -> AbstractContextManager[None]:
    from instep.parallel.pipeline.stages import drawn_by_block

    return drawn_by_block(model, blocks, key)
