"""How servers move their parts in a step: by a guess while gradients come, or once all is known.

Only when all have told their notes it is known whether the step is like the last one (`guess.py`).
Where it was not, servers undo what they have moved, and move all after the exchange; as they do
where something has to be known of the whole gradient, such as its norm. Workers have the new
parameters come.

Nothing here knows how gradients are gathered, nor votes.
Ways in: `PartMoves.move_early` while they come, `PartMoves.settle` after the exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.comm.buckets import laid_out_like
from instep.records import BEGINNING, Attempt
from instep.sync import norm
from instep.sync.generation import Piece
from instep.sync.servers.cuts import BucketSegment, pieces_of
from instep.sync.servers.guess import Guess
from instep.sync.servers.shared_parts import SharedParts
from instep.sync.servers.traffic import ServerTraffic
from instep.sync.sums import Sums


class PartMoves:
    """One rank's, in one generation.

    Args:
        comm: the group.
        servers: their ranks.
        shared: the parts.
        traffic: of the segments.
        sums: of the gradients.
        agreed: of each parameter, where its sum lies.
        early: whether servers may move what has come, before all has.
    """

    def __init__(
        self,
        comm: Comm,
        servers: Sequence[int],
        shared: SharedParts,
        traffic: ServerTraffic,
        sums: Sums,
        agreed: Mapping[int, Tensor],
        *,
        early: bool,
    ) -> None:
        self._comm, self._servers, self._shared = comm, servers, shared
        self._traffic, self._sums, self._agreed = traffic, sums, agreed
        self._mine = servers.index(comm.rank) if comm.rank in servers else -1
        self._may = early and shared.mover.by_element and not shared.mover.clips
        self._guess = Guess()
        self.early = False
        """Whether servers move in this step what has come, before all has."""
        self.attempt = BEGINNING
        """The commit that this step makes."""

    def begin_step(self, attempt: Attempt) -> None:
        """What the servers move from here on belongs to this commit."""
        self.attempt = attempt
        self.early = self._may and self._guess.counts(attempt.number)

    def move_early(self, segment: BucketSegment, *, give: bool) -> None:
        """If it may, move a segment of which the sum is there, and send it to the workers.

        Args:
            give: whether it is this server's own, and not one of its copy.
        """
        if self.early:
            there = self._guess.there
            gradients = self._gradients([segment], there, self._guess.scale, again=True)
            self._move([segment], gradients)
            if give:
                self._give([segment], there)

    def settle(self, there: Sequence[bool], scale: float) -> None:
        """If that has not been done yet: servers move their parts, and send them to the workers.

        Args:
            there: of each parameter, whether a rank has used it.
            scale: what gradients are multiplied by.
        """
        known = there if self._sums.finite() else []
        right = self._guess.compare(self.attempt.number, known, scale, used=self.early)
        factor, own, parts = 1.0, self._shared.own, self._shared.parts
        if self.early and not right:
            self.undo()
            self._sums.take_back()
        if own is not None and not (self.early and right):
            segments = parts[self._mine].segments
            kept = [segment for server in self._shared.held for segment in parts[server].segments]
            gradients = self._gradients(kept, there, scale)
            mine = {p: gradients[p] for p in pieces_of(segments) if p in gradients}
            factor = self._limit(mine, scale)
            if factor != 1.0:
                for gradient in gradients.values():
                    gradient.mul_(factor)
            self._move(kept, gradients)
            self._give(segments, there)
        elif not (self.early and right):
            for server, part in enumerate(parts):
                for segment in part.segments:
                    self._traffic.pull(server, segment)
            self._limit({}, scale)
        if own is not None:
            if own.rows is not None:
                own.rows.move(scale * factor)
            own.stage(self.attempt)

    def undo(self) -> None:
        """Be where the last commit left this server."""
        if self._shared.own is not None:
            self._shared.own.undo(self.attempt)

    def _gradients(
        self,
        segments: Sequence[BucketSegment],
        there: Sequence[bool],
        scale: float,
        again: bool = False,
    ) -> dict[Piece, Tensor]:
        """Gradients of segments of this server, for the parameters that have one.

        Args:
            again: whether the sums may be needed once more, as after a guess.
        """
        gradients = {}
        for piece in pieces_of(segments):
            if not there[piece.slot]:
                continue
            parameter = self._shared.mover.held[piece]
            whole = self._agreed[piece.slot].view(-1)
            agreed = whole[piece.start : piece.stop].view(parameter.shape)
            if again:
                agreed = agreed.clone()
            gradient = laid_out_like(self._sums.gradient(piece.slot, agreed), parameter)
            gradients[piece] = gradient.mul_(scale) if scale != 1.0 else gradient
        return gradients

    def _give(self, segments: Sequence[BucketSegment], there: Sequence[bool]) -> None:
        """Send what is new of segments of this server to the workers."""
        assert self._shared.own is not None, "a server gives"
        self._shared.own.give(self.attempt.number, segments, there)
        self._traffic.give(segments)

    def _move(self, segments: Sequence[BucketSegment], gradients: Mapping[Piece, Tensor]) -> None:
        """Have the optimizer move these segments by the gradients that there are."""
        assert self._shared.own is not None, "a server moves"
        self._shared.own.move(self.attempt.number, pieces_of(segments), gradients)

    def _limit(self, gradients: Mapping[Piece, Tensor], scale: float) -> float:
        """What gradients are multiplied by, so that the norm of all is within its limit; all ranks
        call it, servers with those of their parts. Those of embeddings are still to be scaled."""
        firsts, blocks, part = [], 0, self._shared.own
        for parameter in self._shared.parameters if self._shared.mover.clips else ():
            firsts.append(blocks)
            blocks += norm.blocks(parameter.numel())
        if not blocks:
            return 1.0
        squares = torch.zeros(blocks + len(self._servers), dtype=torch.float64)
        if part is not None and part.rows is not None:
            squares[blocks + self._mine] = part.rows.square(scale)
        for piece, gradient in gradients.items():
            first = firsts[piece.slot] + piece.start // norm.BLOCK
            own = norm.squares([gradient])
            squares[first : first + len(own)] = own
        self._comm.all_reduce(squares).wait()
        return self._shared.mover.limit(squares)

    def tell_sizes(self) -> list[int] | None:
        """Tell all what the sums were like; it returns once every server has staged its part.

        Else a server could be gone that had not, when all others have voted: for them the
        step happens, if none of them can know.
        """
        seen = self._sums.sizes()  # of each parameter; or nothing
        told = torch.zeros(len(self._servers), max(1, len(seen)), dtype=torch.float64)
        if self._mine >= 0 and seen:
            told[self._mine] = torch.tensor(seen, dtype=torch.float64)
        self._comm.all_reduce(told).wait()
        return [int(size) for size in told.amax(0).tolist()] if seen else None
