"""One micro-batch on its way through the stages of this rank, part by part.

It knows neither parameters nor schedules: the order is given. Way in: `BatchInParts`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from instep.parallel.pipeline.arrivals import Arrival, Passed
from instep.parallel.pipeline.blocks import Call
from instep.parallel.pipeline.choose import Cuts
from instep.parallel.pipeline.crossing import StageEntry, go_back
from instep.parallel.pipeline.links import Incoming, StageLinks, TensorForm, form_of
from instep.parallel.pipeline.schedule import Action
from instep.parallel.pipeline.stages import Runner
from instep.parallel.pipeline.trial import total_of

_LEAVES = 64
"""Most tensors that cross one cut."""


class BatchInParts:
    """One micro-batch on its way through this rank's stages.

    What a forward pass needs from another rank is expected before the pass that comes before it on
    this rank: gloo sends nothing until then. What has to be known for that is what parts of the
    same size had. A part that has something else is sent again.

    Args:
        links: to the ranks of the other stages.
        runner: of the stages of this rank.
        cuts: of the model, into all stages.
        parts: of the batch, each with its number of samples.
        order: in which this rank passes them forward and backward.
        key: of the job, for this batch; seeds all draws.
        call: the pass of the whole model.
        backward: whether there are backward passes.
    """

    def __init__(
        self,
        links: StageLinks,
        runner: Runner,
        cuts: Cuts,
        parts: list[tuple[Any, int]],
        order: list[Action],
        key: int,
        call: Call,
        *,
        backward: bool,
    ) -> None:
        self._links, self._runner, self._boundaries = links, runner, cuts.boundaries
        self._parts, self._order = parts, order
        self._key, self._call, self._backward = key, call, backward
        self._names = list(runner.chain.blocks)
        self._first, self._stop = cuts.first, [*cuts.first[1:], len(self._names)]
        self._stages = len(cuts.first)
        self._entries: dict[tuple[int, int], StageEntry] = {}
        self._graphs: dict[tuple[int, int], tuple[list[Tensor], list[Incoming]]] = {}
        self._usual: dict[tuple[int, int], list[TensorForm]] = {}
        self._ahead: deque[Action] = deque()
        self._early: dict[tuple[int, int], list[Incoming]] = {}
        self.results: list[Any] = []

    def run(self) -> None:
        """All that this rank has to do."""
        self._ahead.extend(action for action in self._order if action.forward)
        for forward, stage, part in self._order:
            if forward:
                self._ahead.popleft()
                self._expect_next()
                self._go_forward(stage, part)
            else:
                self._go_back(stage, part)
        self._links.finish()

    def _go_forward(self, stage: int, part: int) -> None:
        batch, samples = self._parts[part]
        call = self._call
        received: list[Tensor] = []

        def receive(arrivals: list[Arrival]) -> list[Tensor]:
            boundary = self._boundaries[stage - 1]
            boundary.expect(arrivals, self._names[self._first[stage]])
            if not received:
                received[:] = self._received(stage, part, arrivals)
                self._expect_next()
            self._entries[stage, part] = entry = StageEntry()
            return entry.begin(received, boundary.differentiable)

        first, stop = self._first[stage], self._stop[stage]
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

    def _usual_of(self, stage: int, part: int) -> list[TensorForm]:
        """What crossed the cut in front of a stage in an earlier part of the same size; both ranks
        at the cut know the same."""
        return self._usual.get((stage, self._parts[part][1]), [])

    def _is_usual(self, stage: int, part: int, forms: list[TensorForm]) -> bool:
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
        self, forms: list[TensorForm], stage: int, part: int, *, again: bool = False
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
        boundary, rank = self._boundaries[stage], self._rank(stage + 1)
        sent = boundary.sent(passed.leaves, self._names[self._first[stage + 1]])
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
        self._runner.show(self._first[stage], self._stop[stage])
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
