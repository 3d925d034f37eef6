"""What belongs to participants, or to elements of the sum: who holds it, and who needs it next.

A rank holds what it was the last to compute, in memory that outlives the process. Whoever computes
a participant next, or owns these elements, is given a copy. The number of the commit tells a copy
of an older round. A rank that leaves gives its copies away first. What the numbers mean, the
others know: what a codec left out (`coded.py`), and what participants remember, as bits
(`worker/rounds/local_states.py`).

Way in: `Carried`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm, Work
from instep.records import BEGINNING, Attempt
from instep.sync.generation import Memory

SUM = -1
"""Stands in a participant's place for the sum of all."""

_NOTHING = -(1 << 40)
"""Fills rows."""

_APART = 1 << 32
"""More than there are participants."""


class CarriedPiece(NamedTuple):
    """Numbers from one to another, as of a commit."""

    of: int
    """The participant; or `SUM`; or one of these `within` a fragment; or `kept_of` a
    participant."""
    start: int
    stop: int
    commit: int


class Move(NamedTuple):
    """A part of what one rank holds, and another needs."""

    source: int
    to: int
    of: CarriedPiece
    start: int
    stop: int

    def within(self, start: int) -> slice:
        """Its place in what begins with this number."""
        return slice(self.start - start, self.stop - start)


def kept_of(participant: int) -> int:
    """Stands in a piece for what the participant remembers."""
    return SUM - 1 - participant


def whose(of: int) -> int:
    """The participant that a piece belongs to; or `SUM`; or what `within` gave."""
    return of if of >= SUM else SUM - 1 - of


def within(of: int, fragment: int) -> int:
    """Stands in a piece for what a participant, or `SUM`, has left out of one fragment."""
    return of + (fragment + 1) * _APART


class Carried:
    """Of one rank."""

    def __init__(self) -> None:
        self.made: dict[int, int] = {}
        """By participant and `SUM`, or these `within` a fragment: the commit it was last in. The
        same on every rank."""
        self.lengths: dict[int, int] = {}
        """By participant: how many numbers it remembers. The same on every rank."""
        self.held: dict[CarriedPiece, Tensor] = {}
        self.lost: dict[int, int] = {}
        """Participants that began anew because no rank held what they remembered, and the commit
        that was of. The reader that reports them takes them out."""
        self._missing: dict[int, int] = {}  # the same, of those that `rows` found
        self._next: tuple[dict[CarriedPiece, Tensor], dict[int, int], dict[int, int]] | None = None
        self._memory: Memory | None = None
        self._attempt = BEGINNING

    def start(
        self,
        comm: Comm,
        device: torch.device,
        memory: Memory | None,
        at: Attempt,
        draining: Sequence[int],
        taker: int,
    ) -> None:
        """A generation begins; what ranks that leave hold, `taker` gets."""
        self._comm, self._device, self._memory = comm, device, memory
        if draining:
            self._hand_over(draining, taker)
        if memory is not None:
            self.held = self._copied(at)
            memory.staged(*at)

    # ---- who has what

    def row(self, gives: Mapping[int, int]) -> list[int]:
        """What this rank tells the others: a number for each of its participants, and what it
        holds."""
        pieces = [each for piece in self.held for each in piece]
        return [len(gives), *(each for pair in sorted(gives.items()) for each in pair), *pieces]

    def rows(
        self, own: list[int], longest: int | None = None
    ) -> tuple[list[dict[int, int]], list[list[CarriedPiece]]]:
        """By rank, what `row` was given, and what it holds of the last rounds.

        Args:
            own: this rank's row.
            longest: row of all ranks; they tell each other if it is left out.
        """
        comm = self._comm
        if longest is None:
            lengths = torch.zeros(comm.size, dtype=torch.float32, device=self._device)
            lengths[comm.rank] = len(own)
            comm.all_reduce(lengths).wait()
            longest = int(lengths.max())
        row = torch.full((longest,), _NOTHING, dtype=torch.int64)
        row[: len(own)] = torch.tensor(own, dtype=torch.int64)
        table = torch.zeros(comm.size * longest, dtype=torch.int64, device=self._device)
        comm.all_gather(table, row.to(self._device)).wait()
        gives, holds = [], []
        for numbers in table.view(comm.size, longest).tolist():
            end = 1 + 2 * numbers[0]
            rest = [numbers[at : at + 4] for at in range(end, longest - 3, 4)]
            pieces = [CarriedPiece(*each) for each in rest if each[0] != _NOTHING]
            gives.append(dict(zip(numbers[1:end:2], numbers[2:end:2], strict=True)))
            holds.append([each for each in pieces if self._is_last(each)])
        there = {whose(each.of) for pieces in holds for each in pieces}
        self._missing = {
            of: commit for of, commit in self.made.items() if SUM < of < _APART and of not in there
        }
        return gives, holds

    def _is_last(self, piece: CarriedPiece) -> bool:
        return self.made.get(whose(piece.of)) == piece.commit

    def bring(self, moves: Sequence[Move], into: Callable[[Move], Tensor]) -> None:
        """Copy, send and receive; `into` says where what comes here belongs."""
        work, rank = list[Work](), self._comm.rank
        for move in moves:
            if move.source == rank:
                part = self.held[move.of][move.within(move.of.start)]
                if move.to == rank:
                    into(move).copy_(part)
                else:
                    work.append(self._comm.send(part, move.to))
            elif move.to == rank:
                work.append(self._comm.receive(into(move), move.source))
        for each in work:
            each.wait()

    def fetch(
        self, participants: Collection[int]
    ) -> tuple[dict[int, Tensor], list[list[CarriedPiece]]]:
        """What these remember, from the rank that has it; every rank calls it.

        Returns:
            By participant; nothing for one that remembers nothing. Not to be changed. And what
            each rank holds of the last rounds.
        """
        asks, holds = self.rows(self.row(dict.fromkeys(participants, 0)))
        found, moves, rank = dict[int, Tensor](), list[Move](), self._comm.rank
        for to, numbers in enumerate(asks):
            for number in numbers:
                count = self.lengths.get(number, 0)
                want = CarriedPiece(kept_of(number), 0, count, self.made.get(number, 0))
                if to == rank and want in self.held:
                    found[number] = self.held[want]
                elif count and want not in holds[to]:
                    found_at = list(moves_to(to, want, holds))
                    moves += found_at
                    if to == rank and found_at:
                        found[number] = torch.empty(count, dtype=torch.float32, device=self._device)
        self.bring(moves, lambda move: found[whose(move.of.of)])
        return found, holds

    def _hand_over(self, draining: Sequence[int], taker: int) -> None:
        _, holds = self.rows(self.row({}))
        moves = [
            Move(rank, taker, piece, piece.start, piece.stop)
            for rank in sorted(draining)
            for piece in holds[rank]
        ]
        if self._comm.rank == taker:
            gets = {
                each.of: torch.zeros(each.stop - each.start, dtype=torch.float32) for each in moves
            }
            self.held |= {of: new.to(self._device) for of, new in gets.items()}
        self.bring(moves, lambda move: self.held[move.of])

    # ---- what is staged, and its commit

    def stage(
        self,
        attempt: Attempt,
        new: Collection[CarriedPiece],
        made: Mapping[int, int],
        given: Mapping[int, int],
    ) -> dict[CarriedPiece, Tensor]:
        """Where to write what this rank holds from this commit on; what stays is written.

        Args:
            attempt: at the commit.
            new: what is written anew.
            made: of all that is, on any rank: the commit.
            given: by participant of the round, on any rank, the length of what it remembers.
        """
        kept = {of: commit for of, commit in self.made.items() if of not in self._missing}
        self._attempt, made = attempt, {**kept, **made}
        stays = {p: t for p, t in self.held.items() if made.get(whose(p.of)) == p.commit}
        staged = self._staging([*new, *stays])
        for piece, values in stays.items():
            staged[piece].copy_(values)
        lengths = {of: n for of, n in {**self.lengths, **given}.items() if n and of in made}
        self._next = staged, made, lengths
        return staged

    def staged(self) -> None:
        """All that was to be written is."""
        if self._memory is not None:
            self._memory.staged(*self._attempt)

    def _staging(self, pieces: Collection[CarriedPiece]) -> dict[CarriedPiece, Tensor]:
        """Memory for these, of the commit that is tried."""
        if self._memory is None:
            return {
                p: torch.zeros(p.stop - p.start, dtype=torch.float32, device=self._device)
                for p in pieces
            }
        self._memory.lay_out({_name(p): ((p.stop - p.start,), torch.float32) for p in pieces})
        slot = self._memory.stage(*self._attempt)
        return {piece: slot[_name(piece)] for piece in pieces}

    def _copied(self, at: Attempt) -> dict[CarriedPiece, Tensor]:
        """What is held, in memory that outlives the process, for a commit that has happened."""
        before, self._attempt = {piece: tensor.clone() for piece, tensor in self.held.items()}, at
        staged = self._staging(before)
        for piece, tensor in before.items():
            staged[piece].copy_(tensor)
        return staged

    def apply(self) -> None:
        """The round happens: what is staged counts."""
        assert self._next is not None, "nothing is staged"
        (self.held, self.made, self.lengths), self._next = self._next, None
        self.lost |= self._missing
        self._missing = {}

    def abandon(self) -> None:
        """It does not."""
        self._next = None

    # ---- between generations

    def state(self) -> dict[str, Tensor]:
        """In which commit each participant was last, and how much it remembers."""
        rows = [(of, commit, self.lengths.get(of, 0)) for of, commit in sorted(self.made.items())]
        return {"made": torch.tensor(rows, dtype=torch.int64)} if rows else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        rows = [(*row, 0)[:3] for row in state["made"].tolist()] if "made" in state else []
        self.made = {of: commit for of, commit, _ in rows}
        self.lengths = {of: length for of, _, length in rows if length}

    def load_left(self, tensors: Mapping[str, Tensor]) -> None:
        """What a process that is gone held."""
        pieces = {CarriedPiece(*map(int, name.split("/"))): each for name, each in tensors.items()}
        self.held = {piece: tensor.clone() for piece, tensor in pieces.items()}


def moves_to(
    rank: int, want: CarriedPiece, holds: Sequence[Sequence[CarriedPiece]]
) -> Iterator[Move]:
    """From where a rank gets what it needs: from itself, else from the lowest that has it."""
    missing = [(want.start, want.stop)]
    for source in sorted(range(len(holds)), key=lambda n: (n != rank, n)):
        for piece in holds[source]:
            if piece.of != want.of:
                continue
            rest = []
            for start, stop in missing:
                low, high = max(start, piece.start), min(stop, piece.stop)
                if low >= high:
                    rest.append((start, stop))
                    continue
                yield Move(source, rank, piece, low, high)
                rest += [each for each in ((start, low), (high, stop)) if each[0] < each[1]]
            missing = rest


def _name(piece: CarriedPiece) -> str:
    return "/".join(map(str, piece))
