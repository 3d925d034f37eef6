"""The judge: a plain PyTorch loop in one process, the whole global batch in one forward pass.

Of instep it takes which samples a step has and, for models that draw random numbers, the
job's keys. Between loss and update there is nothing but torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pair import GLOBAL_BATCH, MICRO_BATCHES, SEED, Pair, Parts
from torch import Tensor, nn
from torch.utils.data import default_collate

from instep.data.order import Order, key, micro_batch, position
from instep.parallel.pipeline.parts import cut
from instep.parallel.pipeline.stages import drawn_by_block

OF_PASS, OF_UPDATE = 1, 2
"""What a key is drawn for."""


@dataclass(frozen=True)
class State:
    """A model, at one moment."""

    trained: dict[str, Tensor]
    """Parameters that need gradients, each once."""
    other: dict[str, Tensor]
    """Buffers, and parameters that need none."""


def state_of(model: nn.Module) -> State:
    """A copy of everything that a model holds, on the CPU."""
    trained, other = {}, {}
    for name, parameter in model.named_parameters():
        (trained if parameter.requires_grad else other)[name] = parameter.detach().cpu().clone()
    for name, buffer in model.named_buffers():
        other[name] = buffer.detach().cpu().clone()
    return State(trained, other)


@dataclass(frozen=True)
class Trained:
    """What a loop left behind."""

    start: State
    end: State
    losses: list[float]
    """Of each step, the mean over its global batch."""


AS_IT_IS, PERMUTED, PERMUTED_AGAIN = 0, 1, 2
"""Orders of the samples within a global batch (or of its micro-batches, if the model draws)."""


def train(
    pair: Pair,
    dtype: torch.dtype,
    way: int = AS_IT_IS,
    micro_batches: int = MICRO_BATCHES,
    blocks: Sequence[str] = (),
    pieces: int = 1,
    device: str = "cpu",
) -> Trained:
    """Train a pair for its steps with nothing but PyTorch.

    Args:
        pair: of model and loss.
        dtype: of its parameters and data.
        way: in which order the samples of a global batch are, or its micro-batches are added.
        micro_batches: of a step of the job, for a model that draws; others have one pass a step.
        blocks: names of modules that draw numbers of their own, as in a pipeline.
        pieces: parts of a micro-batch that such a pipeline cuts.
        device: where it computes.
    """
    parts = pair.make(dtype)
    model, start = parts.model.to(device).train(), state_of(parts.model)
    if isinstance(parts.loss, nn.Module):
        parts.loss.to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    given = parts.parameters(model) if parts.parameters else parameters
    optimizer = parts.optimizer(given)
    scheduler = parts.scheduler(optimizer) if parts.scheduler else None
    limit = pair.train.get("max_grad_norm")
    precision = pair.train.get("precision", "float32")
    losses = []
    for step in range(1, pair.steps + 1):
        optimizer.zero_grad()
        if pair.draws:
            losses.append(
                _micro_batches(parts, step, way, micro_batches, blocks, pieces, precision)
            )
        else:
            losses.append(_whole(parts, step, way, precision))
        if limit is not None:
            nn.utils.clip_grad_norm_(parameters, limit)
        _set_generators(key(SEED, OF_UPDATE, step))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return Trained(start, state_of(model), losses)


def _whole(parts: Parts, step: int, way: int, precision: str) -> float:
    """The whole global batch in one pass."""
    _, first, stop = position(step, len(parts.train), GLOBAL_BATCH)
    (batch,) = _batches(parts, step, [(first, stop)], way)
    with _autocast(precision, _device(parts).type):
        loss = parts.mean_loss(batch)
    loss.backward()
    return float(loss.detach())


def _micro_batches(
    parts: Parts,
    step: int,
    way: int,
    micro_batches: int,
    blocks: Sequence[str],
    pieces: int,
    precision: str,
) -> float:
    """The job's micro-batches one after the other, each with its key."""
    _, first, stop = position(step, len(parts.train), GLOBAL_BATCH)
    number_of = -(-(stop - first) * micro_batches // GLOBAL_BATCH)
    cuts = [micro_batch(first, stop, number, number_of) for number in range(number_of)]
    batches = list(_batches(parts, step, cuts, AS_IT_IS))
    weights = [parts.of(batch) for batch in batches]
    numbers = list(range(number_of))
    if way == PERMUTED:
        numbers.reverse()
    if way == PERMUTED_AGAIN:
        numbers = numbers[1:] + numbers[:1]
    mean = 0.0
    for number in numbers:
        if not weights[number]:
            continue
        keyed = key(SEED, OF_PASS, step, number)
        _set_generators(keyed)
        low, high = cuts[number]
        for piece, (batch, _) in enumerate(cut(batches[number], high - low, pieces)):
            drawn = drawn_by_block(parts.model, blocks, (keyed, piece)) if blocks else nullcontext()
            with drawn, _autocast(precision, _device(parts).type):
                loss = parts.mean_loss(batch) * (parts.of(batch) / sum(weights))
            loss.backward()
            mean += float(loss.detach())
    return mean


def _autocast(precision: str, device: str) -> Any:
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device, getattr(torch, precision))


def _batches(parts: Parts, step: int, cuts: list[tuple[int, int]], way: int) -> Iterator[Any]:
    """The samples at some positions of a step's epoch, each cut collated."""
    samples = len(parts.train)
    epoch = position(step, samples, GLOBAL_BATCH).epoch
    for first, stop in cuts:
        indices = Order(samples, SEED).indices(epoch, first, stop).tolist()
        if way != AS_IT_IS:
            random.Random(1000 * way + step).shuffle(indices)
        batch = (parts.collate or default_collate)([parts.train[i] for i in indices])
        yield batch if _device(parts).type == "cpu" else _moved(batch, _device(parts))


def _device(parts: Parts) -> torch.device:
    return next(parts.model.parameters()).device


def _moved(batch: Any, device: torch.device) -> Any:
    """Every tensor of a batch, as a plain loop moves them."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(each, device) for name, each in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [_moved(each, device) for each in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def _set_generators(number: int) -> None:
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)
