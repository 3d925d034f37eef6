"""A model cut into stages, of which each rank of a group runs its own, part by part of a batch.

Made once in each process, from the whole model; afterwards the model has only this rank's
parameters, under the names that they have in the whole model. `run` is one micro-batch: it is cut
into parts, and each part goes forward and backward through all stages in the order of the schedule
(`schedule.py`). Gradients add up in `.grad`.

Replicas, optimizers and the job are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.dtensors import local_part
from instep.parallel.pipeline.batch import BatchInParts
from instep.parallel.pipeline.blocks import Call, find
from instep.parallel.pipeline.choose import choose, stages_of
from instep.parallel.pipeline.links import StageLinks
from instep.parallel.pipeline.parts import cut, rows_in
from instep.parallel.pipeline.schedule import Action, orders
from instep.parallel.pipeline.stages import Runner
from instep.parallel.pipeline.trial import compare_parts, total_of


class Total(NamedTuple):
    """The loss of a micro-batch, on the last stage; both 0 on the others."""

    total: float
    """The losses of the parts, times their weights."""
    weight: float


class Pipeline:
    """This rank's stages.

    Args:
        model: whole, the same on every rank, in training mode.
        call: from a batch and its number of samples to its mean loss and weight, by calling
            `model`; None where nothing counts. Every rank gets the same batch.
        batch: an example, as large as a micro-batch.
        samples: in it.
        group: torch's process group of the stages, in order; None: all stages in this process.
        schedule: `1f1b`, `gpipe` or `interleaved`.
        parts: into how many parts a micro-batch is cut.
        cuts: names of the modules that begin a stage, in order, without the first stage; the same
            on every rank, as from `find_cuts`.

    Raises:
        RecipeError: the model is no sequence of blocks; the text names the module in the way.
        SpecError: the numbers of cuts and stages do not fit.
        PeerError: a rank was lost.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        batch: Any,
        samples: int,
        *,
        group: Any = None,
        schedule: str = "1f1b",
        parts: int = 1,
        cuts: Sequence[str] = (),
    ) -> None:
        self.module, self.parts, self.schedule = model, parts, schedule
        self._call, self._links = call, StageLinks(group)
        self._rows = rows_in(batch, samples)
        links = self._links
        stages = stages_of(schedule, links.size, cuts)
        assert len(cuts) == stages - 1, "each rank would choose for itself"
        self._runner, example, size = _examined(model, call, batch, samples, parts, cuts)
        chain = self._runner.chain
        self._cuts = choose(
            model,
            self._runner,
            call,
            example,
            size,
            ranks=links.size,
            stages=stages,
            cuts=cuts,
        )
        self._runner.examined = stages > 1
        stop = [*self._cuts.first[1:], len(chain.blocks)]
        self._chunks = stages // links.size
        self._orders: dict[tuple[int, bool], list[Action]] = {}
        used = [self._runner.names(*stage) for stage in zip(self._cuts.first, stop, strict=True)]
        self.holders = {
            name: sorted({s % self._links.size for s, names in enumerate(used) if name in names})
            for name in chain.parts
        }
        """For each parameter of the whole model, the ranks that have it; the first owns it."""
        self.held = {name for name, ranks in self.holders.items() if self._links.rank in ranks}
        """Names of the parameters that this rank has."""
        self._runner.drop(self.held)

    # ---- what it is

    @property
    def blocks(self) -> list[str]:
        """Names of all blocks, in order."""
        return list(self._runner.chain.blocks)

    @property
    def cuts(self) -> list[str]:
        """Names of the blocks that begin a stage, without the first stage."""
        return [self.blocks[first] for first in self._cuts.first[1:]]

    @property
    def owned(self) -> set[str]:
        """The parameters that count as this rank's where each is to count once."""
        return {name for name in self.held if self.holders[name][0] == self._links.rank}

    # ---- what it does

    def run(self, batch: Any, samples: int, key: int, call: Call | None = None) -> Total:
        """Forward and backward passes of one micro-batch. All ranks of the group call it.

        Gradients of the losses times their weights, summed over the parts, are added to `.grad`.
        Those of a parameter that several ranks have are complete after `sum_shared`.

        Args:
            batch: the same on every rank, of any shape that the model takes.
            samples: in it; there may be none.
            key: of the job, for this micro-batch; seeds all draws.
            call: instead of the one that the pipeline was made with.

        Raises:
            RecipeError: the model did not do what it did on the example.
            PeerError: a rank was lost.
        """
        results = self._results(batch, samples, key, call or self._call, backward=True)
        totals = [total_of(found) for found in results if found is not None]
        weights = [float(found[1]) for found in results if found is not None]
        return Total(
            sum(float(total.detach()) for total in totals if total is not None), sum(weights)
        )

    @torch.no_grad()
    def results(
        self, batch: Any, samples: int, key: int, call: Call, parts: int | None = None
    ) -> list[Any]:
        """What `call` returns for each part, on the last stage; empty on others. No gradients.

        Args:
            batch, samples, key, call: as for `run`.
            parts: how many; None: as many as in `run`.
        """
        return self._results(batch, samples, key, call, backward=False, parts=parts)

    def _results(
        self,
        batch: Any,
        samples: int,
        key: int,
        call: Call,
        *,
        backward: bool,
        parts: int | None = None,
    ) -> list[Any]:
        each = cut(batch, samples, parts or self.parts, self._rows) if samples else []
        order = self._order(len(each), backward)
        one = BatchInParts(
            self._links, self._runner, self._cuts, each, order, key, call, backward=backward
        )
        with self._runner.ready(key):
            one.run()
        return one.results

    @torch.no_grad()
    def sum_shared(self) -> None:
        """Sum the gradients of parameters that several ranks have, once a step. All ranks call it.

        The owner adds them up in the order of ranks, so all have the same bits. A parameter that
        no rank used keeps no gradient.
        """
        links, rank = self._links, self._links.rank
        parameters = dict(self.module.named_parameters())
        shared = [name for name, ranks in self.holders.items() if len(ranks) > 1]
        for tag, name in enumerate(shared):
            owner, *others = self.holders[name]
            if name not in self.held or not parameters[name].requires_grad:
                continue
            own = _flat(parameters[name])
            if rank == owner:
                for other in others:
                    own += links.expect(own, other, 2 * tag).wait()
                for other in others:
                    links.send(own, other, 2 * tag + 1)
            else:
                links.send(own, owner, 2 * tag)
                own = links.expect(own, owner, 2 * tag + 1).wait()
            _set_grad(parameters[name], own)
        links.finish()

    def _order(self, parts: int, backward: bool) -> list[Action]:
        """What this rank does with so many parts."""
        known = self._orders.get((parts, backward))
        if known is None:
            links = self._links
            every = orders(self.schedule, links.size, parts, chunks=self._chunks, backward=backward)
            known = self._orders[parts, backward] = every[links.rank]
        return known


def _flat(parameter: nn.Parameter) -> Tensor:
    """[1 + n]: whether there is a gradient, and this rank's part of it."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    local = local_part(grad.to_dense()).flatten()
    return torch.cat([local.new_full((1,), float(parameter.grad is not None)), local])


def _set_grad(parameter: nn.Parameter, flat: Tensor) -> None:
    if not flat[0]:
        return
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = torch.zeros_like(parameter)
    local = local_part(parameter.grad)
    local.copy_(flat[1:].view_as(local))


def _examined(
    model: nn.Module, call: Call, batch: Any, samples: int, parts: int, cuts: Sequence[str]
) -> tuple[Runner, Any, int]:
    """What runs the stages of a model that may be cut; and an example of a part, with its size."""
    compare_parts(model, call, batch, samples, parts)
    example, size = cut(batch, samples, parts)[0]
    return Runner(model, find(model, call, example, size, cuts)), example, size


def find_cuts(
    model: nn.Module,
    call: Call,
    batch: Any,
    samples: int,
    *,
    ranks: int,
    schedule: str,
    parts: int,
    cuts: Sequence[str] = (),
    others: Iterable[tuple[Any, int]] = (),
    timed: bool = True,
) -> tuple[list[str], list[str]]:
    """Where a pipeline of so many ranks cuts a model, found by one process alone.

    Args:
        model, call, batch, samples, schedule, parts: as for `Pipeline`.
        ranks: of the pipeline.
        cuts: as for `Pipeline`; empty: the best by the times of the blocks. What a message between
            ranks takes is not looked at.
        others: more batches with their samples, on which the cuts are tried too.
        timed: False: as if all blocks took the same time.

    Returns:
        Names of the blocks that begin a stage, without the first; and of all blocks, in order.

    Raises:
        RecipeError, SpecError: as `Pipeline`.
    """
    stages = stages_of(schedule, ranks, cuts)
    runner, example, size = _examined(model, call, batch, samples, parts, cuts)
    names = list(runner.chain.blocks)
    found = choose(
        model,
        runner,
        call,
        example,
        size,
        ranks=ranks,
        stages=stages,
        cuts=cuts,
        timed=timed,
        others=[cut(*other, parts)[0] for other in others],
    )
    return [names[first] for first in found.first[1:]], names
