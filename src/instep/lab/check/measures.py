"""Bytes and seconds that one process needs for a model, counted and measured in this process.

Parameters move: what is tried on the model, is tried before. Ways in: `of_model`, `of_pass`,
`of_optimizer`, `of_buckets`, `sent`, `together`.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.comm.alone import AloneComm
from instep.data.loader import Read
from instep.engine.gradients import Gradients
from instep.job.spec import JobSpec
from instep.lab.check.live_bytes import LiveBytes
from instep.parallel.nested import tensors_in
from instep.recipe.build import Built
from instep.recipe.forward import Forward
from instep.sync.base import Price, strategy_of
from instep.sync.generation import Generation

_TIMED, _LONG_S = 3, 0.1
"""Passes, and steps of the optimizer, that are timed, unless they take so long; the fastest counts,
as a neighbour only makes one slower."""


class OfPass(NamedTuple):
    """Needs of one forward and backward pass."""

    samples: int
    seconds: float
    activation_bytes: int
    """Most bytes of tensors at once, beside model and batch; gradients leave as they come."""
    gradient_bytes: int


class OfOptimizer(NamedTuple):
    """Needs of one step of the optimizer, and the state that it keeps."""

    name: str
    seconds: float
    state_bytes: int


def of_model(model: nn.Module) -> dict[str, Any]:
    """Numbers and bytes of parameters and buffers; what two names share counts once."""
    parameters = list(model.parameters())
    trained = [each for each in parameters if each.requires_grad]
    buffers = list(model.buffers())
    return {
        "type": type(model).__name__,
        "parameters": _numbers(parameters),
        "trained": _numbers(trained),
        "parameter_bytes": _bytes(parameters),
        "trained_bytes": _bytes(trained),
        "buffers": _numbers(buffers),
        "buffer_bytes": _bytes(buffers),
    }


def of_pass(forward: Forward, read: Read) -> OfPass:
    """Run passes of one micro-batch; the first is counted, and others are timed.

    Gradients of the last are there afterwards.

    Args:
        forward: of the model, which is trained.
        read: the micro-batch.
    """
    model = forward.model.train()
    parameters = [each for each in model.parameters() if each.requires_grad]
    known = [*model.parameters(), *model.buffers(), *tensors_in(read.batch)]
    _forget_gradients(model)
    leaving = Gradients(parameters, lambda slot, gradient: None)
    with LiveBytes(known) as counted:
        _pass(forward, read)
    leaving.close()

    seconds = seconds_of_pass(forward, read)
    gradients = _bytes(p.grad for p in parameters if p.grad is not None)
    return OfPass(read.size, seconds, counted.peak, gradients)


def seconds_of_pass(forward: Forward, read: Read) -> float:
    """Time passes of a batch."""

    def again() -> None:
        _forget_gradients(forward.model)
        _pass(forward, read)

    return _fastest(again, forward.device)


def has_room(size: int) -> bool:
    """Whether this machine has several times as much memory to spare."""
    available: int = psutil.virtual_memory().available
    return 4 * size < available


def _pass(forward: Forward, read: Read) -> None:
    for number in range(max(1, len(forward.recipe.turns))):
        forward.take_turn(number if forward.recipe.turns else -1)
        found = forward.loss(read.batch, read.size, always=True)
        if found is not None:
            found.loss.backward()


def of_optimizer(built: Built, device: torch.device) -> OfOptimizer:
    """Take steps with the gradients that are there; the first makes the optimizer's state."""
    optimizers = [turn.optimizer for turn in built.turns] or [built.optimizer]

    def step() -> None:
        for each in optimizers:
            each.step()

    step()
    seconds = _fastest(step, device)
    names = " and ".join(dict.fromkeys(type(each).__name__ for each in optimizers))
    return OfOptimizer(names, seconds, _bytes(_states(optimizers)))


def _states(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [
        tensor for each in optimizers for kept in each.state.values() for tensor in tensors_in(kept)
    ]


def sent(job: JobSpec, parameters: Sequence[Sequence[nn.Parameter]]) -> Price | None:
    """Return what one worker sends for one commit; None where a codec or a server decides.

    Args:
        job: without a mesh.
        parameters: of each update of a step.
    """
    if job.sync.served or job.sync.codec != "none":
        return None
    strategy = strategy_of(job.sync, job.seed)
    prices = [strategy.price(_bytes(trained), job.workers) for trained in parameters]
    return Price(sum(each.sent_bytes for each in prices), sum(each.messages for each in prices))


def of_buckets(job: JobSpec, parameters: Sequence[Sequence[nn.Parameter]]) -> int | None:
    """Count bytes of the buckets in which gradients are summed, and lie until the update.

    None for strategies that hold more, as far as other processes decide.

    Args:
        job, parameters: as for `sent`.
    """
    if job.sync.served or job.sync.own_state or job.sync.rounds is not None:
        return None
    exact = job.per_commit.micro_batches if job.train.determinism == "bits" else 0
    held = 0
    for trained in parameters:
        strategy = strategy_of(job.sync, job.seed)
        with LiveBytes(trained) as counted:
            strategy.start(trained, AloneComm(), Generation(notes=0, parts=exact))
        held += counted.live
    return held


def together(parts: dict[str, int | None]) -> dict[str, int | None]:
    """The memory of a worker by part, with the sum of those that are known."""
    return {**parts, "total_bytes": sum(each or 0 for each in parts.values())}


def resident_bytes() -> int:
    """The most resident memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def _fastest(action: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    while len(times) < _TIMED and sum(times) < _LONG_S:
        _wait_for(device)
        begin = time.perf_counter()
        action()
        _wait_for(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_held(tensor) for tensor in tensors)


def _held(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes
