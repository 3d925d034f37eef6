"""A model cut into stages, of which each rank of a group runs its own, part by part of a batch.

Made once in each process, from the whole model; afterwards the model has only this rank's
parameters, under the names that they have in the whole model. `run` is one micro-batch: it is cut
into parts, and each part goes forward and backward through all stages in the order of the schedule
(`schedule.py`). Gradients add up in `.grad`.

Replicas, optimizers and the job are not known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.dtensors import local_part
from instep.parallel.pipeline.arrivals import Arrival, Passed
from instep.parallel.pipeline.blocks import Call, find
from instep.parallel.pipeline.choose import choose, stages_of
from instep.parallel.pipeline.crossing import Entry, go_back
from instep.parallel.pipeline.links import Form, Incoming, Links, form_of
from instep.parallel.pipeline.parts import cut, rows_in
from instep.parallel.pipeline.schedule import Action, orders
from instep.parallel.pipeline.stages import Runner
from instep.parallel.pipeline.trial import compare_parts, total_of

_LEAVES = 64
"""Most tensors that cross one cut."""


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
        self._call, self._links = call, Links(group)
        self._rows = rows_in(batch, samples)
        links = self._links
        stages = stages_of(schedule, links.size, cuts)
        assert len(cuts) == stages - 1, "each rank would choose for itself"
        self._runner, example, size = _examined(model, call, batch, samples, parts, cuts)
        chain = self._runner.chain
        self._first, self._boundaries = choose(
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
        self._stop = [*self._first[1:], len(chain.blocks)]
        self._chunks = stages // links.size
        self._orders: dict[tuple[int, bool], list[Action]] = {}
        used = [self._runner.names(*stage) for stage in zip(self._first, self._stop, strict=True)]
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
        return [self.blocks[first] for first in self._first[1:]]

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
        one = _Batch(self, batch, samples, key, call or self._call, backward=True)
        with self._runner.ready(key):
            one.run()
        totals = [total_of(found) for found in one.results if found is not None]
        weights = [float(found[1]) for found in one.results if found is not None]
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
        one = _Batch(self, batch, samples, key, call, backward=False, parts=parts)
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

    # ---- what a batch needs of it

    def order(self, parts: int, backward: bool) -> list[Action]:
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


class _Batch:
    """One micro-batch on its way through this rank's stages.

    What a forward pass needs from another rank is expected before the pass that comes before it on
    this rank: gloo sends nothing until then. What has to be known for that is what parts of the
    same size had. A part that has something else is sent again.
    """

    def __init__(
        self,
        owner: Pipeline,
        batch: Any,
        samples: int,
        key: int,
        call: Call,
        *,
        backward: bool,
        parts: int | None = None,
    ) -> None:
        self._owner, self._links, self._runner = owner, owner._links, owner._runner
        parts = parts or owner.parts
        self._parts = cut(batch, samples, parts, owner._rows) if samples else []
        self._key, self._call, self._backward = key, call, backward
        self._stages = len(owner._first)
        self._entries: dict[tuple[int, int], Entry] = {}
        self._graphs: dict[tuple[int, int], tuple[list[Tensor], list[Incoming]]] = {}
        self._usual: dict[tuple[int, int], list[Form]] = {}
        self._ahead: deque[Action] = deque()
        self._early: dict[tuple[int, int], list[Incoming]] = {}
        self.results: list[Any] = []

    def run(self) -> None:
        """All that this rank has to do."""
        order = self._owner.order(len(self._parts), self._backward)
        self._ahead.extend(action for action in order if action.forward)
        for forward, stage, part in order:
            if forward:
                self._ahead.popleft()
                self._expect_next()
                self._go_forward(stage, part)
            else:
                self._go_back(stage, part)
        self._links.finish()

    def _go_forward(self, stage: int, part: int) -> None:
        batch, samples = self._parts[part]
        owner, call = self._owner, self._call

        received: list[Tensor] = []

        def receive(arrivals: list[Arrival]) -> list[Tensor]:
            boundary = owner._boundaries[stage - 1]
            boundary.expect(arrivals, owner.cuts[stage - 1])
            if not received:
                received[:] = self._received(stage, part, arrivals)
                self._expect_next()
            self._entries[stage, part] = entry = Entry()
            return entry.begin(received, boundary.differentiable)

        first, stop = owner._first[stage], owner._stop[stage]
        key = self._key, part
        passed = self._runner.forward(first, stop, lambda: call(batch, samples), key, receive)
        if passed.empty:  # on every stage
            self._graphs[stage, part] = [], []
            for each in self._early.pop((stage, part), []):
                each.wait()
            if stage + 1 < self._stages:
                self._send_usual(stage + 1, part)
            return
        if stage + 1 == self._stages:
            self.results.append(passed.result)
            total = total_of(passed.result) if self._backward else None
            self._graphs[stage, part] = ([total] if total is not None else [], [])
            return
        self._send(stage, part, passed)

    # ---- messages

    def _usual_of(self, stage: int, part: int) -> list[Form]:
        """What crossed the cut in front of a stage in an earlier part of the same size; both ranks
        at the cut know the same."""
        return self._usual.get((stage, self._parts[part][1]), [])

    def _is_usual(self, stage: int, part: int, forms: list[Form]) -> bool:
        """Whether a part has what others of its size had, as the first one has."""
        return self._usual.setdefault((stage, self._parts[part][1]), forms) == forms

    def _expect_next(self) -> None:
        """Begin to receive what the next forward pass needs, as soon as its forms are known."""
        if not self._ahead or self._links.size == 1:
            return
        _, stage, part = self._ahead[0]
        if (stage, part) not in self._early and (usual := self._usual_of(stage, part)):
            self._early[stage, part] = self._expect(usual, stage, part)

    def _expect(
        self, forms: list[Form], stage: int, part: int, *, again: bool = False
    ) -> list[Incoming]:
        rank = self._rank(stage - 1)
        return [
            self._links.expect(form, rank, self._tag(stage, part, leaf, again=again))
            for leaf, form in enumerate(forms)
        ]

    def _received(self, stage: int, part: int, arrivals: list[Arrival]) -> list[Tensor]:
        forms = [form_of(arrival.like) for arrival in arrivals]
        usual = self._is_usual(stage, part, forms)
        coming = self._early.pop((stage, part), None)
        coming = coming or self._expect(self._usual_of(stage, part), stage, part)
        found = [each.wait() for each in coming]
        if not usual:
            found = [each.wait() for each in self._expect(forms, stage, part, again=True)]
        return found

    def _send(self, stage: int, part: int, passed: Passed) -> None:
        boundary, rank = self._owner._boundaries[stage], self._rank(stage + 1)
        sent = boundary.sent(passed.leaves, self._owner.cuts[stage])
        usual = self._is_usual(stage + 1, part, [form_of(tensor) for tensor in sent])
        if not usual:
            self._send_usual(stage + 1, part)
        for leaf, tensor in enumerate(sent):
            self._links.send(tensor, rank, self._tag(stage + 1, part, leaf, again=not usual))
        if self._backward:
            going = boundary.returning(sent)
            coming = [
                self._links.expect(tensor, rank, self._tag(stage + 1, part, leaf, back=True))
                for leaf, tensor in enumerate(going)
            ]
            self._graphs[stage, part] = going, coming

    def _send_usual(self, stage: int, part: int) -> None:
        """Something for a rank that expects what other parts had."""
        for leaf, (shape, dtype, device) in enumerate(self._usual_of(stage, part)):
            nothing = torch.zeros(shape, dtype=dtype, device=device)
            self._links.send(nothing, self._rank(stage), self._tag(stage, part, leaf))

    def _go_back(self, stage: int, part: int) -> None:
        ends, coming = self._graphs.pop((stage, part))
        self._runner.show(self._owner._first[stage], self._owner._stop[stage])
        if stage + 1 < self._stages:
            go_back(ends, [each.wait() for each in coming])
        elif ends and ends[0].requires_grad:
            torch.autograd.backward(ends[0])
        if entry := self._entries.pop((stage, part), None):
            for leaf, grad in enumerate(entry.gradients()):
                tag = self._tag(stage, part, leaf, back=True)
                self._links.send(grad, self._rank(stage - 1), tag)

    def _rank(self, stage: int) -> int:
        return stage % self._links.size

    def _tag(
        self, stage: int, part: int, leaf: int, *, back: bool = False, again: bool = False
    ) -> int:
        """Of a tensor that crosses the cut in front of a stage."""
        return ((part * self._stages + stage) * 3 + back + 2 * again) * _LEAVES + leaf
