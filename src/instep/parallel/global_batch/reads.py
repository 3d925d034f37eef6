"""Reads: during a pass, a layer asks the same layer of the passes on all other workers.

A read changes nothing, so a step in which one fails has not happened. Every worker runs the same
layers in the same order, so their reads match; a worker without work runs a pass that does not
count. All messages of a model have the same size, and name their layer. So a worker that runs
other layers is detected, and its numbers are not mistaken for those of this layer.

What the layers read is in `batch_norm.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from instep.comm.base import Comm
from instep.errors import PeerError, RecipeError

_END = 0.0
"""The tag of the last message of a pass; a layer has 1 + twice its place, and 1 more backward."""

_HEAD = 2
"""Numbers at the front of each message: its number in the pass, and its tag."""


class _Made(NamedTuple):
    """An output of a layer that reads, without its values."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Reads:
    """One model's reads, for as long as the model lives.

    Args:
        layers: names of the layers that read, in one order on every worker.
        width: the most numbers in one message.
    """

    def __init__(self, layers: Sequence[str] = (), width: int = 0) -> None:
        self._layers, self._width = list(layers), width
        self._comm: Comm | None = None
        self._waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._made: list[_Made] = []
        self._calls = 0
        self.goes_back = False
        """Whether the backward pass of the present pass is under way."""
        self.active = False
        """Whether a pass is under way; outside, layers are as torch has them."""
        self.counts = True
        """Whether the present pass counts; otherwise it only receives."""
        self.tells = True
        """Whether this worker's numbers are told; of those that run the same batch, one tells."""
        self.late = False
        """Whether a pass runs to its end where a worker was lost, since other processes of the
        replica wait for it; then `failed` says so after it."""
        self.failed: PeerError | None = None
        """Why this generation's passes count nothing any more."""
        self._waited_s = 0.0

    def __deepcopy__(self, memo: Any) -> Reads:
        """A copy of the model has no group."""
        return Reads(self._layers, self._width)

    def __reduce__(self) -> tuple[Any, ...]:
        """Neither has one that is loaded from a file."""
        return Reads, (self._layers, self._width)

    @property
    def size(self) -> int:
        """Workers in the group."""
        assert self._comm is not None, "join comes first"
        return self._comm.size

    def join(
        self, comm: Comm, waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """A generation begins.

        Args:
            comm: the workers. Nothing else may use it while passes run.
            waiting: a context in which this worker only waits for others.
        """
        self._comm, self._waiting, self.failed = comm, waiting, None

    def take_waited(self) -> float:
        """Seconds spent in reads, since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    @contextmanager
    def one_pass(self, *, counts: bool = True) -> Iterator[None]:
        """The forward and backward pass of one worker in a step; all workers run one at a time.

        Args:
            counts: False for the pass of a worker without work.

        Raises:
            RecipeError: the workers did not run the same layers.
            PeerError: a worker was lost.
        """
        assert not self.active, "a pass within a pass"
        self.active, self.counts, self._calls, self.goes_back = True, counts, 0, False
        try:
            yield
            if self._layers:
                self._ask(_END, torch.zeros(0))
        finally:
            self.active = self.goes_back = False
            self._made.clear()

    def made(self, output: Tensor) -> None:
        """A layer made `output`, through which gradients of other workers may come back."""
        if output.requires_grad and not self.goes_back:  # else it is recomputed
            edge = get_gradient_edge(output)
            self._made.append(_Made(edge, output.shape, output.dtype, output.device))

    def backward(self, loss: Tensor | None, weight: float) -> None:
        """The backward pass of the present pass: gradients are of `weight` times its loss.

        Gradients from other workers are of the loss of the whole step. So this worker's loss is
        scaled to its share of that too, and the strategy adds its gradient with weight 1.

        Args:
            loss: of the pass, scalar: its mean or its total; None if no sample counts.
            weight: scales the loss to its share of the loss of the step; if 0, the loss may be
                anything, also NaN.
        """
        assert loss is not None or not weight, "a weight without a loss"
        if loss is not None and (weight or math.isfinite(float(loss.detach()))):
            self.backward_from([loss * weight])
        elif self._made:
            self.backward_from(
                [made.edge for made in self._made],
                [
                    torch.zeros((), dtype=m.dtype, device=m.device).expand(m.shape)
                    for m in self._made
                ],
            )

    def backward_from(
        self, outputs: Sequence[Any], gradients: Sequence[Tensor] | None = None
    ) -> None:
        """The backward pass of the present pass, from gradients of the loss of the whole step."""
        self.goes_back = True
        torch.autograd.backward(outputs, gradients)

    def ask(self, layer: int, own: Tensor, *, backward: bool) -> Tensor:
        """Send the numbers of this worker's layer, and receive those of all workers.

        Args:
            layer: its index among the layers.
            own: [numbers] float64; in a pass that does not count, only its length matters.
            backward: whether they are of the layer's backward pass.

        Returns:
            [workers, numbers] float64, in the order of ranks; the same bits on each.

        Raises:
            RecipeError: the workers do not run the same layers.
            PeerError: a worker was lost.
        """
        return self._ask(1.0 + 2 * layer + backward, own)

    def _ask(self, tag: float, own: Tensor) -> Tensor:
        comm = self._comm
        assert comm is not None, "join comes first"
        table = torch.zeros(comm.size, _HEAD + self._width, dtype=torch.float64, device=own.device)
        row = table[comm.rank]
        row[0], row[1] = self._calls, tag
        if self.counts and self.tells:
            row[_HEAD : _HEAD + len(own)] = own
        self._calls += 1
        since, alone = time.perf_counter(), table.clone() if self.late else table
        try:
            if self.failed is None:
                with self._waiting():
                    comm.all_reduce(table).wait()
        except PeerError as error:
            if not self.late:
                raise
            self.failed = error
        self._waited_s += time.perf_counter() - since
        if self.failed is not None:
            return alone[:, _HEAD : _HEAD + len(own)]
        heads = table[:, :_HEAD].tolist()
        for rank, head in enumerate(heads):
            if head != heads[comm.rank]:
                raise self._mismatch(heads[comm.rank], rank, head)
        return table[:, _HEAD : _HEAD + len(own)]

    def no_second(self, layer: int) -> RecipeError:
        """The error of a gradient that is not taken in `backward`, or of a second derivative."""
        return RecipeError(
            f"a gradient was taken through the layer {self._layers[layer]!r} outside of the "
            "backward pass of the step, as a gradient penalty and an attack on the inputs do: it "
            "would mix losses of several workers that are not weighted yet. Leave "
            "train.batch_norm = 'global' out, or that term of the loss."
        )

    def _mismatch(self, mine: list[float], rank: int, theirs: list[float]) -> RecipeError:
        assert self._comm is not None
        return RecipeError(
            "the workers do not run the same layers of batch normalisation: "
            f"rank {self._comm.rank} is at {self._in_words(mine)}, and rank {rank} at "
            f"{self._in_words(theirs)}. train.batch_norm = 'global' needs a model that runs the "
            "same layers in the same order for every batch (and no activation checkpointing with "
            "use_reentrant = True). Leave train.batch_norm out."
        )

    def _in_words(self, head: list[float]) -> str:
        calls, tag = int(head[0]), int(head[1])
        if tag == _END:
            return f"its end, after {calls} reads"
        layer, backward = divmod(tag - 1, 2)
        way = "backward" if backward else "forward"
        return f"read {calls + 1}, of {self._layers[layer]!r} {way}"
