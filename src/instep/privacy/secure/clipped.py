"""Mean of what participants give, each clipped, as whole numbers on a grid that the job fixes.

A participant that came farther than `clip` gives less; then each number is divided by the grid's
unit and rounded. Whole numbers have one sum, whoever adds what first, and the range of that sum is
known before the first round: weights are shares of the samples of a round, so that no number of it
exceeds 2**30 by more than half the number of participants. So the sums can be masked: with `least`
nobody sees more than the sum of a round, not even how much a participant weighs, and what its
losses came to. Way in: `ClippedMean`, which `Averaging` holds in the place of `AllReduce`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm, Work
from instep.comm.buckets import Bucket, lay_out
from instep.errors import RecipeError, SpecError, WorkerError
from instep.privacy.grid import MARGIN
from instep.privacy.secure.masks import Mask, apply_masks
from instep.privacy.secure.members import check_enough
from instep.privacy.secure.over_ranks import SumOverRanks, sum_of_all
from instep.records import Attempt
from instep.sync.all_reduce import AllReduce
from instep.sync.base import Result
from instep.sync.norm import BLOCK
from instep.sync.sums import Plain, Sums

PER_CLIP = 2.0**30
"""Units in `clip`."""

_FINE, _MOST = 2.0**20, 2.0**40
"""Units in a weight or in a loss; the largest of them that is told."""


class Gift(NamedTuple):
    """Everything that one participant has to give."""

    weight: float
    """Samples that count: its losses are a mean of these."""
    total: float
    """Sum of its losses."""
    samples: float
    moved: Sequence[Tensor | None]
    """How far its parameters came, backwards."""

    @property
    def norm(self) -> float:
        """Length of all of it, with the same bits on any number of threads."""
        squares = list[float]()
        for each in (each for each in self.moved if each is not None):
            flat = each.detach().reshape(-1)
            whole = len(flat) // BLOCK * BLOCK
            for part in (flat[:whole].view(-1, BLOCK), flat[None, whole:]):
                norms = torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
                squares += norms.square().tolist()
        return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.inf


class ClippedMean(AllReduce):
    """Sums whole numbers of participants, masked perhaps.

    Args:
        clip: limit of how far a participant comes.
        participants: of the job.
        least: of a masked sum; 0 for open ones.
        job: 32 bytes that stand for the job.
        bucket_mb: as for `AllReduce`.
    """

    def __init__(
        self, clip: float, participants: int, *, least: int, job: bytes, bucket_mb: float = 8.0
    ) -> None:
        super().__init__(bucket_mb=bucket_mb)
        self._clip, self._unit = clip, clip / PER_CLIP
        self._participants, self._least, self._job = participants, least, job
        self._come: list[int] = []
        self._gifts: list[tuple[int, float, dict[int, Tensor]]] = []
        self._norms: dict[int, float] = {}
        self._masks: Sequence[Mask] = ()
        self._digest = b""
        """Digest of the parameters, once an attempt has asked for it."""
        self._opened: tuple[tuple[int, int], list[int]] | None = None
        """Course and number of the last round that was opened here, and of whom."""
        self.void = False
        """Whether the round moves nothing: its sums were opened of a participant that is gone."""

    @property
    def sealed(self) -> bool:
        """Whether sums are masked."""
        return self._least > 0

    def _make_sums(self, parameters: Sequence[Parameter], comm: Comm, parts: int) -> Sums:
        self._come, self._gifts = [], []
        return self._sums_on_grid(parameters)

    def _cut(
        self,
        parameters: Sequence[Tensor],
        types: Mapping[torch.dtype, torch.dtype],
        holders: Sequence[tuple[int, ...]] = (),
        spare: int = 0,
    ) -> list[Bucket]:
        """Cut off a small bucket first: while it is scaled and masked, nothing is on its way."""
        limits = [self._bucket_bytes // 8, self._bucket_bytes]
        return lay_out(parameters, limits, spare, types, holders)

    def _sums_on_grid(self, parameters: Sequence[Parameter]) -> Sums:
        return GridSums(parameters, self._unit)

    # ---- a round

    def figures(self, here: Mapping[int, Gift]) -> tuple[float, float]:
        """Sum up the losses of all participants, and what they are a mean of.

        Every rank calls it before `exchange`; those whose weight is 0, or who are not finite, have
        no part in the round. Where its sums were opened before, of one who is on no rank now,
        nobody has: the difference of the two could be what that one gave.

        Args:
            here: by participant of this rank.

        Raises:
            RecipeError: a loss is a mean of more than samples.
            WorkerError: a masked sum would be of too few.
            PeerError: a rank went away.
        """
        for gift in here.values():
            if gift.weight > gift.samples * (1 + 1e-6):
                raise RecipeError(
                    "sync.options.clip: the loss of a participant is a mean of more than its "
                    "samples (tokens, weights above 1), and the range of sums follows from the "
                    "number of samples. Have the loss be a mean over samples."
                )
        giving = self._giving(here)
        members = self._gathered(here, giving)
        if self.void:
            return math.nan, 0.0
        numbers = torch.zeros(4, dtype=torch.int64)
        for of in giving:
            gift, finite = here[of], math.isfinite(here[of].total)
            loss = max(-_MOST, min(_MOST, gift.total)) if finite else 0.0
            told = [1.0, gift.weight * _FINE, loss * _FINE, 0.0 if finite else 1.0]
            numbers += torch.tensor([round(each) for each in told])
        if self.sealed:
            check_enough(len(self._come), self._least, "have something to give")
            self._note_list()
            context = self._context("figures", members)
            sealed = SumOverRanks(
                self._comm, members, list(here), least=self._least, context=context
            )
            apply_masks(sealed.masks(giving), numbers.numpy())
            self._comm.all_reduce(numbers).wait()
            sealed.open(self._come)
            apply_masks(sealed.left, numbers.numpy())
        else:
            self._comm.all_reduce(numbers).wait()
        count, weight, loss, strange = numbers.tolist()
        if count != len(self._come):
            raise WorkerError(
                "the masks of a secure sum did not cancel: some process has another model, job or "
                "list of participants. Resume the run."
            )
        return (math.nan if strange else loss / _FINE), weight / _FINE

    def _gathered(self, here: Collection[int], giving: Sequence[int]) -> list[int]:
        """Tell the ranks who is on this one, and who has something to give; who is on any.

        Where the sums of the round were opened of one who is on no rank now, it is void, and nobody
        has a part in it.
        """
        table = torch.zeros(3, self._participants, dtype=torch.int32)
        opened = self._opened[1] if self._opened and self._opened[0] == self._round else []
        table[0, list(here)], table[1, giving], table[2, opened] = 1, 1, 1
        gathering = self._comm.all_reduce(table)
        if self.sealed:
            self._model()  # while others come
        gathering.wait()
        rows: list[list[int]] = [row.nonzero().flatten().tolist() for row in table]
        members, self._come, known = rows
        self.void = not set(known) <= set(members)
        if self.void:
            self._come, self._opened = [], (self._round, known)
        return members

    def _giving(self, here: Mapping[int, Gift]) -> list[int]:
        """Who of this rank has something to give; notes how much."""
        self._norms = {of: gift.norm for of, gift in here.items() if gift.weight > 0}
        return [of for of, norm in self._norms.items() if math.isfinite(norm)]

    def begin_step(self, attempt: Attempt) -> None:
        """Masks of this attempt are bound to the parameters as they are now."""
        super().begin_step(attempt)
        self._digest = b""

    def begin_pass(self, weight: float, *, last: bool, unit: int = 0) -> None:
        """Begin what is that participant's."""
        self._gifts.append((unit, weight, {}))

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Keep it until all of the participant's is there."""
        self._gifts[-1][2][slot] = gradient

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor | None:
        """Sum up what participants give; nothing else of them leaves this process."""
        given = [gift for gift in self._gifts if gift[0] in self._come]
        here = [unit for unit, _, _ in given]
        masks = list[Mask]()
        if self.sealed and self._come:
            context = self._context("moves", self._come)
            masks = sum_of_all(self._comm, self._come, here, least=self._least, context=context)
        self._gifts, self._masks = [], masks
        for number, (unit, weight, moved) in enumerate(given):
            factor = min(1.0, self._clip * (1 - MARGIN) / max(self._norms[unit], 1e-300))
            super().begin_pass(1.0, last=number == len(given) - 1)
            for slot in reversed(range(len(self._parameters))):  # as buckets fill, and leave
                each = moved.get(slot)
                each = torch.zeros_like(self._parameters[slot]) if each is None else each
                super().gradient(slot, _on_grid(each, factor * weight / self._unit))
        return super().exchange(notes)

    def _send(self, number: int, bucket: Bucket) -> Work:
        """Mask a bucket while the one before is on its way."""
        if self._masks and bucket.members:
            before = self._buckets[:number]
            place = sum(-(-4 * len(each.flat) // 16) * 16 for each in before)
            whole = bucket.flat[
                : len(bucket.flat) - len(bucket.spare)
            ]  # notes are no numbers of it
            apply_masks(self._masks, whole.numpy(), place)
        return super()._send(number, bucket)

    @property
    def _round(self) -> tuple[int, int]:
        """Course and number of the round that is summed."""
        return self._attempt.course, self._attempt.number

    def _note_list(self) -> None:
        """Refuse to open the sums of a round once more, unless of the same participants: before
        the first of them, as losses and weights tell of the one that is missing too."""
        at = self._round
        if self._opened is not None and self._opened[0] == at and self._opened[1] != self._come:
            raise self._opened_before(len(self._opened[1]))
        self._opened = at, list(self._come)

    def _opened_before(self, of: int) -> WorkerError:
        return WorkerError(
            f"round {self._attempt.number} was summed up of {of} participants before, and would be "
            f"of {len(self._come)} now: the difference could be what one of them has given. Resume "
            "the run from its last checkpoint."
        )

    def _context(self, what: str, members: Sequence[int]) -> bytes:
        """Digest that masks are bound to: of job, attempt at a round, model, and participants."""
        digest = hashlib.sha256(f"instep sum of {what} {tuple(self._attempt)}".encode() + self._job)
        digest.update(np.array(members, "<i8").tobytes() + self._model())
        return digest.digest()

    def _model(self) -> bytes:
        """Digest of the parameters, which are the same in all sums of an attempt."""
        if not self._digest:
            digest = hashlib.sha256()
            for each in self._parameters:
                digest.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
            self._digest = digest.digest()
        return self._digest

    def apply(self, update: Callable[[], Result]) -> Result | None:
        """Move by what was handed out."""
        self._come = []
        return super().apply(update)

    def abandon(self) -> None:
        """The round does not happen."""
        self._come, self._gifts, self._masks = [], [], ()
        super().abandon()


class GridSums(Plain):
    """Sums of whole numbers, which leave as floating-point numbers.

    Args:
        parameters: whose differences are summed.
        unit: of the grid.

    Raises:
        SpecError: a parameter is wider than the grid.
    """

    def __init__(self, parameters: Sequence[Tensor], unit: float) -> None:
        kinds = {each.dtype for each in parameters}
        self.types = dict.fromkeys(kinds, torch.int32)
        self._unit, self._kinds = unit, [each.dtype for each in parameters]
        if strange := kinds - {torch.float32, torch.bfloat16, torch.float16}:
            raise SpecError(
                f"sync.options.clip: the model has parameters of {strange.pop()}, and whole "
                "numbers of 32 bits are summed. Make them float32."
            )

    def add(self, index: int, gradient: Tensor, weight: float, into: Tensor, fresh: bool) -> None:
        """Add whole numbers."""
        assert gradient.dtype == torch.int32, "numbers on the grid"
        if fresh:
            into.copy_(gradient.view_as(into))
        else:
            into.add_(gradient.view_as(into))

    def gradient(self, index: int, agreed: Tensor) -> Tensor:
        """The sum, in units of the parameter."""
        kind = self._kinds[index]
        if agreed.device.type == "cpu" and kind == torch.float32:
            from instep.privacy.kernels import unscaled

            found = torch.empty(agreed.shape)
            unscaled(agreed.contiguous().view(-1).numpy(), self._unit, found.view(-1).numpy())
            return found
        return (agreed.to(torch.float64) * self._unit).to(kind)


def _on_grid(numbers: Tensor, factor: float) -> Tensor:
    """Multiply in float64 and round, to int32."""
    if numbers.device.type == "cpu" and numbers.dtype == torch.float32:
        from instep.privacy.kernels import scaled_and_rounded

        found = torch.empty(numbers.shape, dtype=torch.int32)
        scaled_and_rounded(
            numbers.detach().contiguous().view(-1).numpy(), factor, found.view(-1).numpy()
        )
        return found
    return numbers.to(torch.float64).mul_(factor).round_().to(torch.int32)
