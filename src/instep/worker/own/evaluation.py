"""Evaluation in the user's own loop: whole batches dealt to the processes, outputs gathered.

Batch k holds the samples that it would hold in a plain `DataLoader`, on whichever process. A
*part* is every so-many-th batch; each process has one, and keeps it where the
ranks change. What goes into the models, and what comes out, is the user's.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as nested

from instep.comm.base import Comm
from instep.data.loader import Loader, Slice
from instep.engine.engine import Engine
from instep.errors import DataError, SpecError
from instep.state.snapshot import DTYPES, TYPES
from instep.worker.own.as_loader import AsLoader

NONE = -1
"""The number of a batch that another process has: what comes of it does not count."""


class EvaluationPiece(NamedTuple):
    """What one process has to give."""

    number: int
    """Of the batch that it comes from; `NONE` if it does not count."""
    leaves: list[Tensor]


class Round:
    """The batches that the processes have at the same time."""

    def __init__(self, number: int, expected: range) -> None:
        self.number, self.expected, self.gathered = number, expected, False


class Evaluates(Protocol):
    """Loop of the user's that an evaluation takes place in."""

    engine: Engine
    round: Round | None
    """Batches that are evaluated now."""

    def begin_evaluation(self) -> tuple[int, int]:
        """Parts of the dataset, and which of them is this process's."""


class EvaluationLoader(AsLoader):
    """Iterates over this process's batches of a dataset, in its natural order.

    Every process that gathers what comes of them has as many iterations: where there is
    no batch for it in the last round it gets another's once more, and that does not count.

    Args:
        loop: of the session.
        loader: of the dataset, in its natural order.
        samples: in it.
        batch: samples of one batch.
        dataset: of the loader, as it was given.
    """

    def __init__(
        self, loop: Evaluates, loader: Loader, samples: int, batch: int, dataset: Any
    ) -> None:
        super().__init__(dataset)
        self._loop, self._loader, self._samples, self._batch = loop, loader, samples, batch
        self._count = -(-samples // batch)

    @property
    def batch_size(self) -> int:
        """As of `AsLoader`."""
        return self._batch

    def __len__(self) -> int:
        return -(-self._count // self._loop.engine.comm.size)

    def __iter__(self) -> Iterator[Any]:
        parts, part = self._loop.begin_evaluation()
        rounds = -(-self._count // parts)
        numbers = [min(each * parts + part, self._count - 1) for each in range(rounds)]
        reads = self._loader.read(map(self._slice, numbers))
        gathers = False
        try:
            for each in range(rounds):
                first = each * parts
                own = part < parts and first + part < self._count
                if not own and each and not gathers:
                    return
                expected = range(first, min(first + parts, self._count))
                now = Round(first + part if own else NONE, expected)
                self._loop.round = now
                read = next(reads)
                if not read.size:
                    raise DataError(
                        f"no sample of batch {numbers[each]} of an evaluation dataset can be read."
                    )
                yield read.batch
                gathers = now.gathered
                if not own and not gathers:
                    raise SpecError(
                        f"an evaluation dataset has {self._count} batches for {parts} processes, "
                        "and what came of them was not gathered: a process without a batch of its "
                        "own was given another's, which would count twice. Use "
                        "session.gather_for_metrics in the loop, or a smaller batch_size."
                    )
        finally:
            self._loop.round = None
            reads.close()

    def _slice(self, number: int) -> Slice:
        first = number * self._batch
        return Slice(0, first, min(first + self._batch, self._samples))


def flatten(tensors: Any) -> tuple[list[Tensor], Any]:
    """The tensors of any nesting of tuples, lists and dicts, and its form.

    Raises:
        SpecError: something else is in there.
    """
    leaves, form = nested.tree_flatten(tensors)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dtype not in DTYPES:
            raise SpecError(
                f"session.gather_for_metrics was given {leaf!r:.60}: tensors are wanted, or "
                "tuples, lists and dicts of them."
            )
    return [leaf.detach() for leaf in leaves], form


def build_again(leaves: Sequence[Tensor], form: Any) -> Any:
    """The same nesting, of other tensors."""
    return nested.tree_unflatten(list(leaves), form)


def exchange(
    comm: Comm, device: torch.device, name: str, piece: EvaluationPiece
) -> list[EvaluationPiece]:
    """Every process's piece, on each in the order of the ranks, on the CPU.

    Args:
        comm: the group.
        device: where tensors travel.
        name: of the call that this is for.
        piece: of this process; tensors may be of other shapes in each.

    Raises:
        SpecError: the processes are in different calls.
        PeerError: a process went away.
    """
    leaves = [leaf.detach().cpu().contiguous() for leaf in piece.leaves]
    text = json.dumps([name, [[DTYPES[leaf.dtype], list(leaf.shape)] for leaf in leaves]])
    said = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    data = [leaf.reshape(-1).view(torch.uint8) for leaf in leaves if leaf.numel()]
    flat = torch.cat([said, *data])
    head = torch.tensor([zlib.crc32(name.encode()), piece.number, said.numel(), flat.numel()])
    heads = _gathered(comm, head.to(device)).cpu()
    if (heads[:, 0] != head[0]).any():
        other = int((heads[:, 0] != head[0]).nonzero()[0])
        raise SpecError(
            f"process {comm.rank} called {name}, and process {other} called something else: every "
            "process needs to make the same calls in the same order."
        )
    longest = int(heads[:, 3].max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: flat.numel()] = flat
    rows = _gathered(comm, padded.to(device)).cpu()
    return [
        EvaluationPiece(number, _leaves(row[:length], said_bytes))
        for row, (_, number, said_bytes, length) in zip(rows, heads.tolist(), strict=True)
    ]


def _gathered(comm: Comm, own: Tensor) -> Tensor:
    every = torch.empty(comm.size * own.numel(), dtype=own.dtype, device=own.device)
    comm.all_gather(every, own).wait()
    return every.view(comm.size, -1)


def _leaves(row: Tensor, said_bytes: int) -> list[Tensor]:
    _, kinds = json.loads(bytes(row[:said_bytes].numpy()))
    at, leaves = said_bytes, []
    for kind, shape in kinds:
        dtype = TYPES[kind]
        size = torch.Size(shape).numel() * dtype.itemsize
        leaves.append(row[at : at + size].clone().view(dtype).view(shape))
        at += size
    return leaves


def joined(pieces: Sequence[EvaluationPiece]) -> list[Tensor]:
    """Each tensor of those that count, one behind the other in the order of their batches.

    Raises:
        SpecError: they do not fit together.
    """
    counted = sorted((each for each in pieces if each.number != NONE), key=lambda p: p.number)
    try:
        return [
            torch.cat([leaf if leaf.dim() else leaf[None] for leaf in of_all])
            for of_all in zip(*(each.leaves for each in counted), strict=True)
        ]
    except (ValueError, RuntimeError) as error:
        raise SpecError(
            f"session.gather_for_metrics: the tensors of the processes do not fit together "
            f"({error}). Give tensors with a row for each sample, of one type and width."
        ) from None
