"""Sum what participants give with a codec: the same bits, whoever computed them.

What a participant gives is encoded by itself, together with what was left out of it before. Each
rank owns a stretch of the parameters: it decodes what all participants give of that, adds up in
the order of the participants, adds what was left out of the sums before, and encodes the sum
once. All ranks decode the same bytes. Whatever is encoded is cut into segments that depend on the
model alone, so that neither the number of ranks nor who has which participant shows in a bit.

What is left out (error feedback: Karimireddy et al. 2019, arXiv:1901.09847) belongs to its
participant, or, of the sums, to the elements, and goes to whoever computes these next: who needs
what another rank holds, is given a copy at the beginning of `exchange`. The number of the commit
tells a copy of an older round. A rank that leaves gives its copies away in `start`.

Way in: `Coded`, which `Averaging` holds in the place of `AllReduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm, Work
from instep.comm.buckets import laid_out_like
from instep.comm.codecs.base import CUT, Codec, aligned, draw_key
from instep.comm.codecs.none import Identity
from instep.errors import SpecError
from instep.records import BEGINNING, Attempt, Law
from instep.sync.base import InMesh, Memory, Price, Result, Servers
from instep.sync.sums import Wide

SUM = -1
"""Stands in a participant's place for the sum of all."""

_MOST_SEGMENTS, _LONGEST = 64, 16 * CUT

_PLAIN: Codec = Identity()


class Piece(NamedTuple):
    """What was left out, from one element to another, as of a commit."""

    of: int
    """The participant; or `SUM`."""
    start: int
    stop: int
    commit: int


class _Move(NamedTuple):
    """A part of what one rank holds, and another needs."""

    source: int
    to: int
    of: Piece
    start: int
    stop: int


class Segments:
    """The parameters one after the other, cut where neither ranks nor participants matter.

    A segment is of one parameter: values of others do not show in how it is encoded, so that all
    ranks of a mesh that have the same of a parameter decode the same bits.

    Args:
        parameters: what this rank has of them.
        plain: tells which of them are sent as they are; none, if it is left out.
    """

    def __init__(
        self, parameters: Sequence[Tensor], plain: Callable[[Tensor], bool] = lambda _: False
    ) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        each = -(-sum(sizes) // (_MOST_SEGMENTS * CUT)) * CUT
        each = max(CUT, min(each, _LONGEST))
        self.places = list[slice]()
        self.cuts: list[int] = []
        """Where segments begin, and where the last one ends."""
        self.plain: list[bool] = []
        """Of each segment, whether it is sent as it is."""
        self.length = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            begin, self.length = self.length, self.length + size
            self.places.append(slice(begin, self.length))
            self.cuts += range(begin, self.length, each)
            self.plain += [plain(parameter)] * (len(self.cuts) - len(self.plain))
        self.cuts.append(self.length)

    def of(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Number and place of the segments from one cut to another."""
        for number, (low, high) in enumerate(zip(self.cuts, self.cuts[1:], strict=False)):
            if start <= low and high <= stop:
                yield number, slice(low, high)

    def stretches(self, owners: Sequence[int], size: int) -> list[tuple[int, int]]:
        """By rank, from where to where it owns them; those that own nothing have an empty one."""
        end, count = self.length, len(owners)
        marks = [min(cut for cut in self.cuts if cut * count >= n * end) for n in range(count)]
        marks.append(end)
        found = [(end, end)] * size
        for place, rank in enumerate(owners):
            found[rank] = marks[place], marks[place + 1]
        return found


class Coded:
    """Sums of what participants give, as `AllReduce` sums gradients.

    Args:
        codec: `segmentable` and `fixed_size`.
        median: of each element, take the median over the participants, which count alike, instead
            of adding up.
        encode_vectors: encode also parameters of fewer than two dimensions; else they are sent as
            they are.

    Raises:
        SpecError: the codec is not.
    """

    start_in_doubt = -1

    def __init__(self, codec: Codec, *, median: bool = False, encode_vectors: bool = False) -> None:
        if hasattr(codec, "reducer") or not (codec.segmentable and codec.fixed_size):
            raise SpecError(
                "sync.codec: rounds need a codec that is segmentable and of fixed size. Use int8."
            )
        self._codec, self._median, self._encode_vectors = codec, median, encode_vectors
        self._lossy = not isinstance(codec, Identity)
        self._made: dict[int, int] = {}  # by participant and `SUM`: the commit it was last in
        self._held: dict[Piece, Tensor] = {}
        self._next: tuple[dict[Piece, Tensor], dict[int, int]] | None = None  # staged
        self._loaded: Mapping[str, Tensor] | None = None  # of a checkpoint, until `start`
        self._attempt = BEGINNING
        self._parameters: list[Parameter] = []
        self._memory: Memory | None = None
        self._forget()

    @property
    def laws(self) -> Mapping[str, Law]:
        """What is left out: of each participant, one rank has it, so that a checkpoint can have
        the sum over all; and in the sums, one rank of each element."""
        if not self._lossy:
            return {}
        return dict.fromkeys(
            ["residual", *(f"residual-{of}" for of in sorted(self._made))], Law.SUM
        )

    def start(
        self,
        parameters: Sequence[Parameter],
        comm: Comm,
        *,
        notes: int,
        parts: int = 0,
        memory: Memory | None = None,
        at: Attempt = BEGINNING,
        draining: Sequence[int] = (),
        servers: Servers | None = None,
        mesh: InMesh | None = None,
    ) -> None:
        """Lay out segments, and take over what those that leave hold."""
        if not self._lossy and any(p.dtype == torch.float64 for p in parameters):
            raise SpecError(
                "sync.options.combine = 'median': the model has parameters of torch.float64, and "
                "the median is taken in float32. Leave it out, or use float32."
            )
        Wide(parameters)  # refuses what is wider than float32
        self._parameters, self._comm, self._device = list(parameters), comm, parameters[0].device
        self._segments = Segments(parameters, lambda p: p.dim() < 2 and not self._encode_vectors)
        owners = [rank for rank in range(comm.size) if rank not in draining]
        self._stretches = self._segments.stretches(owners, comm.size)
        self._memory = memory if self._device.type == "cpu" else None
        if self._loaded is not None:
            self._held, self._loaded = self._from_checkpoint(self._loaded), None
        if draining:
            self._hand_over(draining, owners[0])
        if self._memory is not None:
            self._held = self._copied(self._held, at)
            self._memory.staged(*at)
        everyone = mesh.everyone if mesh is not None else comm
        everyone.all_reduce(torch.zeros(1, device=self._device)).wait()  # all have theirs
        if comm.rank in draining:
            self._held = {}
        self._forget()

    def resolve(self, generation: int) -> None:
        """What changes hands is copied, so nothing is in doubt."""

    def stop(self) -> None:
        """What was left out stays here."""

    # ---- a round

    def _forget(self) -> None:
        self._given: dict[int, Tensor] = {}  # by participant, weighted
        self._seen = [0.0] * len(self._parameters)
        self._now = (0, 0.0)  # participant and weight of this pass
        self._weight = 0.0  # of all that is given here
        self._agreed: tuple[Tensor, list[float]] | None = None

    def begin_step(self, attempt: Attempt) -> None:
        """What is left out from here on belongs to this commit."""
        self._attempt = attempt

    def begin_pass(self, weight: float, *, last: bool, unit: int = 0) -> None:
        """What comes now is another participant's."""
        self._now = unit, 1.0 if self._median else weight
        self._weight += weight

    @torch.no_grad()
    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Add what a participant gives for a parameter."""
        unit, weight = self._now
        if unit not in self._given:
            self._given[unit] = torch.zeros(self._segments.length, device=self._device)
        into = self._given[unit][self._segments.places[slot]].view(self._parameters[slot].shape)
        into.add_(gradient.to_dense() if gradient.is_sparse else gradient, alpha=weight)
        self._seen[slot] = 1.0

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor:
        """All talking."""
        comm, rank = self._comm, self._comm.rank
        row = self._row()
        lengths = torch.zeros(comm.size, dtype=torch.float64)
        lengths[rank] = len(row)
        own = torch.tensor([*self._seen, self._weight], dtype=torch.float64)
        agreed = torch.cat([own, lengths, notes]).to(self._device)
        comm.all_reduce(agreed).wait()
        told, lengths, notes = agreed.cpu().split([len(own), comm.size, len(notes)])
        gives, holds = self._rows(row, int(lengths.max()))
        held = self._collect(gives, holds)
        *marks, weight = told.tolist()
        total = self._sum(gives, held)
        self._agreed = total.mul_(weight) if self._median else total, marks
        return notes

    # ---- who has what

    def _row(self) -> list[int]:
        """What this rank tells the others: whom it gives, and what it holds."""
        pieces = [each for piece in self._held for each in piece]
        return [len(self._given), *sorted(self._given), *pieces]

    def _rows(self, own: list[int], longest: int) -> tuple[list[list[int]], list[list[Piece]]]:
        """By rank: the participants that it gives, and what it holds of the last rounds."""
        comm = self._comm
        row = torch.full((longest,), -2, dtype=torch.int64)
        row[: len(own)] = torch.tensor(own, dtype=torch.int64)
        table = torch.zeros(comm.size * longest, dtype=torch.int64, device=self._device)
        comm.all_gather(table, row.to(self._device)).wait()
        gives, holds = [], []
        for numbers in table.view(comm.size, longest).tolist():
            count = 1 + numbers[0]
            rest = [numbers[at : at + 4] for at in range(count, longest - 3, 4)]
            pieces = [Piece(*each) for each in rest if each[0] != -2]
            gives.append(numbers[1:count])
            holds.append([each for each in pieces if self._made.get(each.of) == each.commit])
        return gives, holds

    def _wanted(self, gives: Sequence[Sequence[int]]) -> Iterator[tuple[int, Piece]]:
        """Rank and piece, of all that the ranks need for a round."""
        for rank, (start, stop) in enumerate(self._stretches):
            for of in gives[rank]:
                yield rank, Piece(of, 0, self._segments.length, self._made.get(of, 0))
            if stop > start:
                yield rank, Piece(SUM, start, stop, self._made.get(SUM, 0))

    def _collect(
        self, gives: Sequence[Sequence[int]], holds: Sequence[Sequence[Piece]]
    ) -> dict[int, Tensor]:
        """What this rank needs of what was left out before, by participant and `SUM`; zero where
        there was nothing, or nobody has it."""
        found, moves = dict[int, Tensor](), list[_Move]()
        for rank, want in self._wanted(gives):
            if rank == self._comm.rank:
                size = want.stop - want.start
                found[want.of] = torch.zeros(size, device=self._device)
            moves += _moves(rank, want, holds) if want.commit else []
        starts = {SUM: self._stretches[self._comm.rank][0]}
        self._carry_out(
            moves, lambda move: found[move.of.of][_within(move, starts.get(move.of.of, 0))]
        )
        return found

    def _carry_out(self, moves: Sequence[_Move], into: Callable[[_Move], Tensor]) -> None:
        """Copy, send and receive; `into` says where what comes here belongs."""
        work, rank = list[Work](), self._comm.rank
        for move in moves:
            if move.source == rank:
                part = self._held[move.of][_within(move, move.of.start)]
                if move.to == rank:
                    into(move).copy_(part)
                else:
                    work.append(self._comm.send(part, move.to))
            elif move.to == rank:
                work.append(self._comm.receive(into(move), move.source))
        for each in work:
            each.wait()

    def _hand_over(self, draining: Sequence[int], taker: int) -> None:
        """What only ranks that leave hold, `taker` gets."""
        longest = torch.zeros(self._comm.size, device=self._device)
        row = self._row()
        longest[self._comm.rank] = len(row)
        self._comm.all_reduce(longest).wait()
        _, holds = self._rows(row, int(longest.max()))
        moves = [
            _Move(rank, taker, piece, piece.start, piece.stop)
            for rank in sorted(draining)
            for piece in holds[rank]
        ]
        if self._comm.rank == taker:
            gets = {each.of: torch.zeros(each.stop - each.start) for each in moves}
            self._held |= {of: new.to(self._device) for of, new in gets.items()}
        self._carry_out(moves, lambda move: self._held[move.of])

    # ---- the sum

    def _sum(self, gives: Sequence[Sequence[int]], before: Mapping[int, Tensor]) -> Tensor:
        """The sum over all participants; what is left out of it lies staged."""
        rank, number = self._comm.rank, self._attempt.number
        start, stop = self._stretches[rank]
        given = {of for ranks in gives for of in ranks}
        made = self._made | dict.fromkeys((*given, SUM), number)
        new = {Piece(of, 0, self._segments.length, number): None for of in sorted(self._given)}
        new |= {Piece(SUM, start, stop, number): None} if stop > start else {}
        kept = {p: t for p, t in self._held.items() if made.get(p.of) == p.commit}
        staged = self._staging({**new, **kept})
        for piece, residual in kept.items():
            staged[piece].copy_(residual)
        sent = {
            of: self._encoded(values.add_(before[of]), staged[piece], of, 0)
            for piece in new
            if (of := piece.of) != SUM
            for values in [self._given[of]]
        }
        come = self._to_owners(sent, gives)
        total = torch.zeros(stop - start, device=self._device)
        if self._median and given:
            every = torch.zeros(len(given), stop - start, device=self._device)
            for row, of in zip(every, sorted(given), strict=True):
                self._decode(row, come[of], start, stop)
            total = median(every)
        else:
            for of in sorted(given):
                self._decode(total, come[of], start, stop)
        out = torch.zeros(0, dtype=torch.uint8, device=self._device)
        if stop > start:
            left = staged[Piece(SUM, start, stop, number)]
            out = self._encoded(total.add_(before[SUM]), left, SUM, start)
        self._next = (staged, made) if self._lossy else ({}, {})
        if self._memory is not None:
            self._memory.staged(*self._attempt)
        result = torch.zeros(self._segments.length, device=self._device)
        for payload, (low, high) in zip(self._from_owners(out), self._stretches, strict=True):
            self._decode(result[low:high], payload, low, high)
        return result

    def _encoded(self, values: Tensor, left: Tensor, of: int, start: int) -> Tensor:
        """The payload of whole segments, from `start` on; what it leaves out is written."""
        stop = start + len(values)
        out = torch.zeros(self._bytes(start, stop), dtype=torch.uint8, device=self._device)
        at = 0
        for number, place in self._segments.of(start, stop):
            part = slice(place.start - start, place.stop - start)
            key = draw_key(self._attempt.number, of, number)
            codec = self._codec_of(number)
            codec.encode(values[part], out[at:], key=key, left=left[part])
            at += aligned(codec.size(place.stop - place.start))
        return out

    def _decode(self, total: Tensor, payload: Tensor, start: int, stop: int) -> None:
        """Add what a payload of these segments stands for."""
        at = 0
        for number, place in self._segments.of(start, stop):
            part, codec = total[place.start - start : place.stop - start], self._codec_of(number)
            size = codec.size(place.stop - place.start)
            codec.add_into(part, payload[at : at + size])
            at += aligned(size)

    def _bytes(self, start: int, stop: int) -> int:
        return sum(
            aligned(self._codec_of(number).size(place.stop - place.start))
            for number, place in self._segments.of(start, stop)
        )

    def _codec_of(self, segment: int) -> Codec:
        return _PLAIN if self._segments.plain[segment] else self._codec

    def _to_owners(
        self, own: Mapping[int, Tensor], gives: Sequence[Sequence[int]]
    ) -> dict[int, Tensor]:
        """Send each owner its part of what this rank's participants give; what comes here."""
        comm, work, come = self._comm, list[Work](), dict[int, Tensor]()
        sizes = [self._bytes(0, start) for start, _ in self._stretches]
        pairs = zip(sizes, self._stretches, strict=True)
        parts = [slice(at, at + self._bytes(*stretch)) for at, stretch in pairs]
        mine = parts[comm.rank]
        for step in range(
            comm.size
        ):  # to the next, the one after it, ...: no rank gets all at once
            to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
            if step == 0:
                come |= {of: payload[mine] for of, payload in own.items()}
                continue
            if own and parts[to].stop > parts[to].start:
                whole = torch.cat([own[of][parts[to]] for of in sorted(own)])
                work.append(comm.send(whole, to))
            if gives[source] and mine.stop > mine.start:
                each = mine.stop - mine.start
                room = torch.empty(each * len(gives[source]), dtype=torch.uint8)
                room = room.to(self._device)
                work.append(comm.receive(room, source))
                come |= dict(zip(gives[source], room.split(each), strict=True))
        for one in work:
            one.wait()
        nothing = torch.zeros(0, dtype=torch.uint8, device=self._device)
        return {of: come.get(of, nothing) for ranks in gives for of in ranks}

    def _from_owners(self, own: Tensor) -> list[Tensor]:
        """The payload of each rank's stretch of the sum."""
        comm, work = self._comm, list[Work]()
        found = [
            torch.empty(self._bytes(*each), dtype=torch.uint8, device=self._device)
            for each in self._stretches
        ]
        found[comm.rank] = own
        for step in range(1, comm.size):
            to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
            if len(own):
                work.append(comm.send(own, to))
            if len(found[source]):
                work.append(comm.receive(found[source], source))
        for one in work:
            one.wait()
        return found

    # ---- what is staged, and its commit

    def _staging(self, pieces: Mapping[Piece, object]) -> dict[Piece, Tensor]:
        """Memory for these, of the commit that is tried."""
        if self._memory is None:
            return {p: torch.zeros(p.stop - p.start, device=self._device) for p in pieces}
        self._memory.lay_out({_name(p): ((p.stop - p.start,), torch.float32) for p in pieces})
        slot = self._memory.stage(*self._attempt)
        return {piece: slot[_name(piece)] for piece in pieces}

    def _copied(self, held: Mapping[Piece, Tensor], at: Attempt) -> dict[Piece, Tensor]:
        """The same in memory that outlives the process, for a commit that has happened."""
        before, self._attempt = {piece: tensor.clone() for piece, tensor in held.items()}, at
        staged = self._staging(before)
        for piece, tensor in before.items():
            staged[piece].copy_(tensor)
        return staged

    def prepare(self, step: int, scale: float) -> None:
        """`exchange` did it all."""

    def hand_out(self) -> None:
        """Give each parameter the sum, where a rank gave something or something arrives late."""
        assert self._agreed is not None, "exchange comes first"
        total, marks = self._agreed
        for parameter, place, mark in zip(
            self._parameters, self._segments.places, marks, strict=True
        ):
            part = total[place].view(parameter.shape)
            parameter.grad = None
            if mark or bool(part.any()):
                parameter.grad = laid_out_like(part.to(parameter.dtype), parameter)

    def apply(self, update: Callable[[], Result]) -> Result:
        """The round happens: what is staged counts."""
        result = update()
        assert self._next is not None, "nothing is staged"
        (self._held, self._made), self._next = self._next, None
        self._end()
        return result

    def abandon(self) -> None:
        """It does not; a second call does nothing."""
        self._next = None
        self._end()

    def _end(self) -> None:
        self._forget()
        for parameter in self._parameters:
            parameter.grad = None

    # ---- between generations

    def state(self) -> dict[str, Tensor]:
        """In which commit each participant was last."""
        pairs = sorted(self._made.items())
        return {"made": torch.tensor(pairs, dtype=torch.int64)} if pairs else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self._made = dict(state["made"].tolist()) if "made" in state else {}

    def own_state(self) -> dict[str, Tensor]:
        """What this rank holds of the last rounds; zero for what others hold."""
        state = {}
        for of in sorted(self._made):
            flat = torch.zeros(self._segments.length, device=self._device)
            for piece, tensor in self._held.items():
                if piece.of == of and piece.commit == self._made[of]:
                    flat[piece.start : piece.stop] = tensor
            for slot, place in enumerate(self._segments.places):
                shape = self._parameters[slot].shape
                state[f"residual-{of}/{slot}"] = flat[place].view(shape).clone()
        return state

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Kept until `start`."""
        self._held, self._next, self._loaded = {}, None, dict(state)

    def _from_checkpoint(self, state: Mapping[str, Tensor]) -> dict[Piece, Tensor]:
        held = dict[Piece, Tensor]()
        for name, tensor in state.items():
            of, slot = name.removeprefix("residual-").split("/")
            piece = Piece(int(of), 0, self._segments.length, self._made.get(int(of), 0))
            if piece not in held:
                held[piece] = torch.zeros(self._segments.length, device=self._device)
            held[piece][self._segments.places[int(slot)]] = tensor.flatten().to(self._device)
        return held

    def load_left(
        self,
        tensors: Mapping[str, Tensor],
        parameters: Sequence[Parameter],
        holders: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """What a process that is gone held."""
        self._held = {_piece(name): tensor.clone() for name, tensor in tensors.items()}

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """With as many participants as replicas: each is sent to the owners, and sums to all."""
        return Price(2 * (replicas - 1) / replicas * parameter_bytes, 2 * (replicas - 1))


def median(values: Tensor) -> Tensor:
    """Of each column: [n], of [participants, n]; of the two in the middle, their mean.

    A value that is no number counts as a large one.
    """
    values = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(0).values
    low, high = (len(values) - 1) // 2, len(values) // 2
    return values[low] if low == high else (values[low] + values[high]) / 2


def _moves(rank: int, want: Piece, holds: Sequence[Sequence[Piece]]) -> Iterator[_Move]:
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
                yield _Move(source, rank, piece, low, high)
                rest += [each for each in ((start, low), (high, stop)) if each[0] < each[1]]
            missing = rest


def _within(move: _Move, start: int) -> slice:
    return slice(move.start - start, move.stop - start)


def _name(piece: Piece) -> str:
    return "/".join(map(str, piece))


def _piece(name: str) -> Piece:
    return Piece(*map(int, name.split("/")))
