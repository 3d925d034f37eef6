"""A loss over the global batch, whose gradients need no more memory than one micro-batch's pass.

Gradient caching (Gao et al. 2021, arXiv:2101.06983). Each micro-batch is embedded without
recording gradients. All workers get all embeddings, and compute the same loss and its gradient
for each embedding. Then each micro-batch is embedded again, and its backward pass begins with the
gradient of its own embeddings. The gradients add up to those of one pass over the whole batch.

The engine seeds generators, takes gradients and undoes what passes do to buffers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.errors import RecipeError
from instep.parallel.nested import leaves, on_tensors, tensors_in

Embed = Callable[[nn.Module, Any], tuple[Any, Any]]
"""From the model and a batch to (embeddings, targets)."""

BatchLoss = Callable[[nn.Module, Any, Any], Tensor]
"""From the model, and embeddings and targets of the whole global batch, to a loss."""


class _EmbeddedPart(NamedTuple):
    value: tuple[Any, Any]
    """Embeddings and targets, nested as in the recipe."""
    leaves: list[Tensor]
    """The tensors in it, in order."""


class CachedGradients:
    """One worker's part in one step. Call, in this order:

    1. `embed`, for each of its micro-batches;
    2. `gather`, on every worker, also without a micro-batch;
    3. `loss`, on every worker that has a micro-batch;
    4. `backward`, for each of its micro-batches, with generators set as for `embed`.

    Args:
        model: on which both functions are called.
        embed: `Recipe.embed`.
        batch_loss: `Recipe.batch_loss`; gives a scalar that can be differentiated.
        precision: makes the context in which both compute.
        go_back: runs a backward pass from the embeddings of a micro-batch and their gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        embed: Embed,
        batch_loss: BatchLoss,
        *,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        go_back: Callable[[list[Tensor], list[Tensor]], None] | None = None,
    ) -> None:
        self._model, self._embed, self._batch_loss = model, embed, batch_loss
        self._precision, self._go_back = precision, go_back or torch.autograd.backward
        self._parts: dict[int, _EmbeddedPart] = {}
        self._places: dict[int, tuple[int, int]] = {}  # of each micro-batch, rows [first, stop)
        self._gradients: list[Tensor | None] = []
        self._whole: list[Tensor] = []
        self.counts = False
        """Whether this worker contributes the gradients that the model's own parameters get in
        `loss`: they are the same on all workers, and count once. Known after `gather`."""
        self.rows = 0
        """Samples of the global batch; 0 if none could be read. Known after `gather`."""

    def embed(self, number: int, batch: Any, samples: int) -> None:
        """Embed a micro-batch, without recording gradients.

        Args:
            number: of the micro-batch in the step, in the order of the global batch.
            batch: on the model's device.
            samples: in it.

        Raises:
            RecipeError: the result is not (embeddings, targets) with a row for each sample.
        """
        with torch.no_grad():
            self._parts[number] = self._embedded(batch, samples)

    def join_in(self, batch: Any, *, record: bool = False) -> None:
        """Embed one sample on a worker without work, as its layers take part; nothing is kept."""
        with torch.set_grad_enabled(record), self._precision():
            self._embed(self._model, batch)

    def _embedded(self, batch: Any, samples: int) -> _EmbeddedPart:
        with self._precision():
            value = self._embed(self._model, batch)
        if not isinstance(value, tuple) or len(value) != 2:
            raise RecipeError(
                f"Recipe.embed returned a {type(value).__name__}, but (embeddings, targets) is "
                "wanted; targets may be None."
            )
        for leaf in leaves(value):
            if leaf is not None and not isinstance(leaf, Tensor):
                raise RecipeError(
                    f"Recipe.embed returned a {type(leaf).__name__} among embeddings and targets, "
                    "but tensors are wanted, in tuples, lists or dicts if there are several."
                )
        if not any(leaf.is_floating_point() for leaf in tensors_in(value[0])):
            raise RecipeError(
                "the embeddings that Recipe.embed returned hold no tensor of floating-point "
                "numbers: there is nothing that a loss could have a gradient of."
            )
        tensors = tensors_in(value)
        for leaf in tensors:
            if not leaf.dim() or leaf.shape[0] != samples:
                raise RecipeError(
                    f"Recipe.embed returned a tensor of shape {list(leaf.shape)} for {samples} "
                    f"samples: its first dimension must be the samples, {samples} of them. Two "
                    "views of each sample are a tuple of two tensors."
                )
        return _EmbeddedPart(value, tensors)

    def gather(self, comm: Comm, numbers: int, device: torch.device) -> None:
        """Exchange embeddings and targets with all workers.

        Args:
            comm: the workers.
            numbers: micro-batches of the step; all numbers are below it.
            device: where the model is.

        Raises:
            RecipeError: embeddings of two micro-batches do not fit together.
            PeerError: a worker was lost.
        """
        head = torch.zeros(numbers, 4, dtype=torch.int64, device=device)
        for number, part in self._parts.items():
            rows = len(part.leaves[0])
            row_bytes = sum(_row_bytes(leaf) for leaf in part.leaves)
            kind = zlib.crc32(repr(_kind(part.value)).encode())
            head[number] = torch.tensor([rows, row_bytes, kind, comm.rank], device=device)
        comm.all_reduce(head).wait()
        self.rows, first = 0, None
        for number, (rows, row_bytes, kind, rank) in enumerate(head.tolist()):
            if not rows:
                continue
            self._places[number] = self.rows, self.rows + rows
            self.rows += rows
            first = first or (number, row_bytes, kind, rank)
            if (row_bytes, kind) != first[1:3]:
                raise self._unlike(number, first[0])
        if first is None:  # none could be read anywhere
            return
        self.counts = first[3] == comm.rank
        flat = torch.zeros(self.rows * first[1], dtype=torch.uint8, device=device)
        for number, part in self._parts.items():
            for leaf, (begin, width) in zip(part.leaves, self._regions(part), strict=True):
                start, stop = (begin + width * row for row in self._places[number])
                flat[start:stop] = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
        comm.all_reduce(flat).wait()  # each byte is of one worker, and zero on the others
        if self._parts:
            part = next(iter(self._parts.values()))
            self._whole = [
                flat[begin : begin + width * self.rows]
                .clone()  # into memory that is aligned for the type
                .view(leaf.dtype)
                .view(self.rows, *leaf.shape[1:])
                for leaf, (begin, width) in zip(part.leaves, self._regions(part), strict=True)
            ]

    def _regions(self, part: _EmbeddedPart) -> Iterator[tuple[int, int]]:
        """Where each tensor of the global batch begins, and how wide its rows are; in bytes."""
        begin = 0
        for leaf in part.leaves:
            yield begin, _row_bytes(leaf)
            begin += _row_bytes(leaf) * self.rows

    def _unlike(self, number: int, first: int) -> RecipeError:
        own = {at: _kind(part.value) for at, part in self._parts.items() if at in (number, first)}
        seen = "; ".join(f"{kind} in micro-batch {at}" for at, kind in own.items())
        return RecipeError(
            f"Recipe.embed returned other shapes or types for micro-batch {number} than for "
            f"micro-batch {first}{f' ({seen})' if seen else ''}: apart from the samples they "
            "must be the same in all. Pad to one length."
        )

    def loss(self, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> Tensor:
        """The loss of the global batch, and its gradients.

        If `counts`, the model's parameters get theirs in a backward pass; otherwise they get none.

        Args:
            scale: applied to the loss before its gradients are taken.

        Returns:
            The loss itself, scalar and detached; the same on every worker.

        Raises:
            RecipeError: it does not depend on the embeddings.
        """
        for leaf in self._whole:
            leaf.requires_grad_(leaf.is_floating_point())
        given = iter(self._whole)
        whole = on_tensors(next(iter(self._parts.values())).value, lambda _: next(given))
        with self._precision():
            loss = self._batch_loss(self._model, *whole)
        wanted = [leaf for leaf in self._whole if leaf.requires_grad]
        if self.counts:
            scale(loss).backward()
            self._gradients = [leaf.grad for leaf in self._whole]
        else:
            found = iter(torch.autograd.grad(scale(loss), wanted, allow_unused=True))
            self._gradients = [next(found) if w.requires_grad else None for w in self._whole]
        if all(gradient is None for gradient in self._gradients):
            raise RecipeError(
                "the loss that Recipe.batch_loss returned does not depend on the embeddings: "
                "something detached it (no_grad, .item(), .data, or a new torch.tensor)."
            )
        self._whole = []
        return loss.detach()

    def backward(self, number: int, batch: Any) -> None:
        """Embed a micro-batch again, and run its backward pass from the gradients of `loss`.

        Args:
            number, batch: as for `embed`.

        Raises:
            RecipeError: the embeddings differ from the first ones, or do not depend on the model's
                parameters.
        """
        before = self._parts.pop(number).leaves
        part = self._embedded(batch, len(before[0]))
        for leaf, was in zip(part.leaves, before, strict=True):
            if leaf.shape != was.shape or not _alike(leaf.detach(), was):
                raise RecipeError(
                    "Recipe.embed returned different embeddings when the same samples were "
                    "embedded again, with the same random state: the model or embed has state that "
                    "each call changes, or draws from a generator of its own."
                )
        first, stop = self._places[number]
        pairs = [
            (leaf, gradient[first:stop])
            for leaf, gradient in zip(part.leaves, self._gradients, strict=True)
            if leaf.requires_grad and gradient is not None
        ]
        if not pairs:
            raise RecipeError(
                "the embeddings that Recipe.embed returned do not depend on the model's "
                "parameters: something detached them (no_grad, .item(), .data, or a new "
                "torch.tensor)."
            )
        self._go_back([leaf for leaf, _ in pairs], [given for _, given in pairs])


def of_one_pass(embed: Embed, batch_loss: BatchLoss) -> Callable[[nn.Module, Any], Tensor]:
    """The loss of one batch in one pass, for validation."""

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        return batch_loss(model, *embed(model, batch))

    return compute_loss


class LastEmbedded:
    """Keeps embeddings and targets of the last batch; no list, which were taken for a count."""

    def __init__(self) -> None:
        self._value: Any = None

    def keep(self, value: Any) -> None:
        """Keep these, and forget those before."""
        self._value = value

    def take(self) -> Any:
        """Return them, once; None if there are none."""
        value, self._value = self._value, None
        return value


def probe(embed: Embed, seen: LastEmbedded | None = None) -> Callable[[nn.Module, Any], Tensor]:
    """A mean over samples of a number that each embedding decides by itself.

    Used as the loss of the trial: it shows whether `embed` treats samples separately.

    Args:
        embed: `Recipe.embed`.
        seen: gets the last embeddings and targets.
    """

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        total, embedded = torch.zeros(()), embed(model, batch)
        if seen is not None:
            seen.keep(on_tensors(embedded, Tensor.detach))
        for leaf in tensors_in(embedded[0]):
            if leaf.is_floating_point():
                flat = leaf.reshape(len(leaf), -1)
                by = torch.linspace(0.5, 1.5, flat.shape[1], dtype=leaf.dtype, device=leaf.device)
                total = total.to(leaf) + (flat * by).sum(1).mean()
        return total

    return compute_loss


def _kind(value: Any) -> Any:
    """What must be equal in all micro-batches: nesting, types, and shapes without the samples."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape[1:]))}]"
    if isinstance(value, Mapping):
        return {key: _kind(each) for key, each in value.items()}
    return tuple(map(_kind, value)) if isinstance(value, (tuple, list)) else value


def _row_bytes(leaf: Tensor) -> int:
    return leaf[0].numel() * leaf.element_size()


def _alike(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    near = min(1e3 * torch.finfo(one.dtype).eps, 2e-2)
    gap, size = (one.double() - other.double()).norm(), other.double().norm()
    return not bool(gap > near * size)
