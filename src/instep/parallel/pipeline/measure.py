"""How long each block of a chain takes, forward and backward, in passes of the whole model.

Each pass measures all blocks, so a neighbour on the machine that disturbs one pass disturbs none
of them more than the others. Blocks that look alike are timed one by one: a window or a dilation is
no parameter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from instep.parallel.nested import tensors_in
from instep.parallel.pipeline.blocks import Call, Chain
from instep.parallel.pipeline.calls import intercepted
from instep.parallel.pipeline.trial import total_of

ROUNDS, MOST_ROUNDS = 6, 24
"""Passes that are measured; more while their times drift."""

DRIFT = 0.05
"""How far the two halves of the passes may be apart."""


def measure(
    model: nn.Module,
    chain: Chain,
    call: Call,
    batch: Any,
    samples: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Time the blocks on one batch; gradients are left as they were.

    Args:
        model: with all its parameters.
        chain: its blocks.
        call: the pass of the whole model.
        batch: as large as the parts that the pipeline will run.
        samples: in it.
        clock: seconds.

    Returns:
        [blocks] seconds of each block, forward and backward, with the code after it; the first
        also with what is before it.
    """
    before = [(p, p.grad) for p in model.parameters()]
    watch = _BlockTimes(chain, clock)
    try:
        watch.one_pass(call, batch, samples)  # the first pass allocates
        rounds: list[list[float]] = []
        while len(rounds) < MOST_ROUNDS and (len(rounds) < ROUNDS or _drifts(rounds)):
            rounds.append(watch.one_pass(call, batch, samples))
            for parameter, _ in before:
                parameter.grad = None
    finally:
        for parameter, grad in before:
            parameter.grad = grad
    return [_low(list(one)) for one in zip(*rounds, strict=True)]


class _BlockTimes:
    """Notes the time wherever a block begins, in both directions."""

    def __init__(self, chain: Chain, clock: Callable[[], float]) -> None:
        self._blocks, self._clock = chain.blocks, clock
        self._places = {name: place for place, name in enumerate(chain.blocks)}
        self._forward: list[float] = []
        self._backward: dict[int, float] = {}

    def one_pass(self, call: Call, batch: Any, samples: int) -> list[float]:
        """Seconds of each block."""
        self._forward, self._backward = [], {}
        began = self._clock()
        with intercepted(self._blocks, self._called):
            loss = total_of(call(batch, samples))
        ended = self._clock()
        begins = [began, *self._forward[1:], ended]
        seconds = [stop - first for first, stop in pairwise(begins)]
        if loss is not None and loss.requires_grad:
            torch.autograd.backward(loss)
        self._backward[0] = self._clock()
        since = ended
        for place in range(len(seconds) - 1, -1, -1):
            until = self._backward.get(place, since)
            seconds[place] += until - since
            since = until
        return seconds

    def _called(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        place = self._places[name]
        if place < len(self._forward):  # an activation checkpoint computes it again
            return run(*args, **kwargs)
        moving = (each for each in tensors_in((args, kwargs)) if each.requires_grad)
        if (first := next(moving, None)) is not None:
            first.register_hook(self._stamp(place))
        self._forward.append(self._clock())
        return run(*args, **kwargs)

    def _stamp(self, place: int) -> Callable[[Tensor], None]:
        def stamp(_: Tensor) -> None:
            self._backward[place] = self._clock()

        return stamp


def _low(times: list[float]) -> float:
    """The lower quartile: what disturbs a pass only makes it longer."""
    return statistics.quantiles(times, n=4, method="inclusive")[0]


def _drifts(rounds: list[list[float]]) -> bool:
    totals = [sum(one) for one in rounds]
    first, second = _low(totals[: len(totals) // 2]), _low(totals[len(totals) // 2 :])
    return abs(first - second) > DRIFT * min(first, second)
