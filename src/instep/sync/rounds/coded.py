"""Sum what participants give with a codec: the same bits, whoever computed them.

What a participant gives is encoded by itself, together with what was left out of it before. Each
rank owns a stretch of the parameters: it decodes what all participants give of that, adds up in
the order of the participants, adds what was left out of the sums before, and encodes the sum
once. All ranks decode the same bytes. Whatever is encoded is cut into segments that depend on the
model alone, so that neither the number of ranks nor who has which participant shows in a bit.

What is left out (error feedback: Karimireddy et al. 2019, arXiv:1901.09847) belongs to its
participant, or, of the sums, to the elements, and goes to whoever computes these next: who needs
what another rank holds (`carried.py`), is given a copy at the beginning of `exchange`.

Way in: `Coded`, which `Averaging` holds in the place of `AllReduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

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
from instep.sync.rounds.carried import SUM, Carried, Move, Piece, kept_of, moves_to
from instep.sync.sums import Wide

_MOST_SEGMENTS, _LONGEST = 64, 16 * CUT

_PLAIN: Codec = Identity()


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
        self._lossy = not isinstance(codec, Identity)  # so that there is something to carry
        self.carried = Carried()
        """What is left out, and what optimizers of participants remember."""
        self._loaded: Mapping[str, Tensor] | None = None  # of a checkpoint, until `start`
        self._attempt = BEGINNING
        self._parameters: list[Parameter] = []
        self._forget()

    @property
    def laws(self) -> Mapping[str, Law]:
        """Of each participant what is left out, and its optimizer's state, and what is left out of
        each element of the sums: one rank has it, so that a checkpoint can have the sum over
        all."""
        if not self._lossy:
            return {}
        left = (f"residual-{of}" for of in sorted(self.carried.made))
        kept = (f"optimizer-{of}" for of in sorted(self.carried.lengths))
        return dict.fromkeys(["residual", *left, *kept], Law.SUM)

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
        if self._loaded is not None:
            self.carried.held, self._loaded = self._from_checkpoint(self._loaded), None
        memory = memory if self._device.type == "cpu" else None
        self.carried.start(comm, self._device, memory, at, draining, owners[0])
        everyone = mesh.everyone if mesh is not None else comm
        everyone.all_reduce(torch.zeros(1, device=self._device)).wait()  # all have theirs
        if comm.rank in draining:
            self.carried.held = {}
        self._forget()

    def resolve(self, generation: int) -> None:
        """What changes hands is copied, so nothing is in doubt."""

    def stop(self) -> None:
        """What was left out stays here."""

    # ---- a round

    def _forget(self) -> None:
        self._given: dict[int, Tensor] = {}  # by participant, weighted
        self._kept: Mapping[int, Tensor] = {}  # by participant: what its optimizer remembers
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

    def keep(self, states: Mapping[int, Tensor]) -> None:
        """What the optimizers of this rank's participants remember after this round [n] float32:
        it stays here, and counts with the round."""
        self._kept = states

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor:
        """All talking."""
        comm, rank = self._comm, self._comm.rank
        kept = {of: len(self._kept[of]) if of in self._kept else 0 for of in self._given}
        row = self.carried.row(kept)
        lengths = torch.zeros(comm.size, dtype=torch.float64)
        lengths[rank] = len(row)
        own = torch.tensor([*self._seen, self._weight], dtype=torch.float64)
        agreed = torch.cat([own, lengths, notes]).to(self._device)
        comm.all_reduce(agreed).wait()
        told, lengths, notes = agreed.cpu().split([len(own), comm.size, len(notes)])
        gives, holds = self.carried.rows(row, int(lengths.max()))
        held = self._collect(gives, holds)
        *marks, weight = told.tolist()
        total = self._sum(gives, held)
        self._agreed = total.mul_(weight) if self._median else total, marks
        return notes

    # ---- who has what

    def _wanted(self, gives: Sequence[Mapping[int, int]]) -> Iterator[tuple[int, Piece]]:
        """Rank and piece, of all that the ranks need for a round."""
        made = self.carried.made
        for rank, (start, stop) in enumerate(self._stretches):
            for of in gives[rank]:
                yield rank, Piece(of, 0, self._segments.length, made.get(of, 0))
            if stop > start:
                yield rank, Piece(SUM, start, stop, made.get(SUM, 0))

    def _collect(
        self, gives: Sequence[Mapping[int, int]], holds: Sequence[Sequence[Piece]]
    ) -> dict[int, Tensor]:
        """What this rank needs of what was left out before, by participant and `SUM`; zero where
        there was nothing, or nobody has it."""
        found, moves = dict[int, Tensor](), list[Move]()
        for rank, want in self._wanted(gives):
            if rank == self._comm.rank:
                size = want.stop - want.start
                found[want.of] = torch.zeros(size, device=self._device)
            moves += moves_to(rank, want, holds) if want.commit else []
        starts = {SUM: self._stretches[self._comm.rank][0]}
        self.carried.bring(
            moves, lambda move: found[move.of.of][move.within(starts.get(move.of.of, 0))]
        )
        return found

    # ---- the sum

    def _sum(self, gives: Sequence[Mapping[int, int]], before: Mapping[int, Tensor]) -> Tensor:
        """The sum over all participants; what is left out of it lies staged."""
        rank, number = self._comm.rank, self._attempt.number
        start, stop = self._stretches[rank]
        given = {of: length for ranks in gives for of, length in ranks.items()}
        new = [Piece(of, 0, self._segments.length, number) for of in sorted(self._given)]
        new += [Piece(SUM, start, stop, number)] if stop > start else []
        kept = {
            Piece(kept_of(of), 0, len(state), number): state
            for of, state in self._kept.items()
            if of in self._given
        }
        staged = self.carried.stage(self._attempt, [*new, *kept], given)
        for piece, state in kept.items():
            staged[piece].copy_(state)
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
        self.carried.staged()
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
        self, own: Mapping[int, Tensor], gives: Sequence[Mapping[int, int]]
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

    # ---- the commit

    def prepare(self, step: int, scale: float) -> float:
        """`exchange` did it all."""
        return scale

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
        if self._lossy:
            self.carried.apply()
        else:
            self.carried.abandon()
        self._end()
        return result

    def abandon(self) -> None:
        """It does not; a second call does nothing."""
        self.carried.abandon()
        self._end()

    def _end(self) -> None:
        self._forget()
        for parameter in self._parameters:
            parameter.grad = None

    # ---- between generations

    def state(self) -> dict[str, Tensor]:
        """In which commit each participant was last."""
        return self.carried.state() if self._lossy else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self.carried.load_state(state)

    def own_state(self) -> dict[str, Tensor]:
        """What this rank holds of the last rounds; zero for what others hold.

        The state of an optimizer stands with the first parameter, as the integers of its bits.
        """
        state, carried = dict[str, Tensor](), self.carried
        for of, commit in sorted(carried.made.items()):
            flat = torch.zeros(self._segments.length, device=self._device)
            for piece, tensor in carried.held.items():
                if piece.of == of and piece.commit == commit:
                    flat[piece.start : piece.stop] = tensor
            for slot, place in enumerate(self._segments.places):
                shape = self._parameters[slot].shape
                state[f"residual-{of}/{slot}"] = flat[place].view(shape).clone()
        for of, length in sorted(carried.lengths.items()):
            piece = Piece(kept_of(of), 0, length, carried.made[of])
            bits = torch.zeros(length, dtype=torch.int32, device=self._device)
            if piece in carried.held:
                bits.copy_(carried.held[piece].view(torch.int32))
            state[f"optimizer-{of}/0"] = bits
        return state

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Kept until `start`."""
        self.carried.abandon()
        self.carried.held, self._loaded = {}, dict(state)

    def _from_checkpoint(self, state: Mapping[str, Tensor]) -> dict[Piece, Tensor]:
        held, made = dict[Piece, Tensor](), self.carried.made
        for name, tensor in state.items():
            kind, slot = name.split("/")
            if kind.startswith("optimizer-"):
                of = int(kind.removeprefix("optimizer-"))
                bits = tensor.to(self._device).view(torch.float32)
                held[Piece(kept_of(of), 0, len(bits), made.get(of, 0))] = bits
                continue
            of = int(kind.removeprefix("residual-"))
            piece = Piece(of, 0, self._segments.length, made.get(of, 0))
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
        self.carried.load_left(tensors)

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
