"""Sum what participants give with a codec: the same bits, on whichever rank they were computed.

What a participant gives is encoded by itself, together with what was left out of it before, and the
sum once more (`exchange.py`). Whatever is encoded is cut into segments that depend on the model
alone (`segments.py`), so that neither the number of ranks nor who has which participant shows in a
bit.

What is left out (error feedback: Karimireddy et al. 2019, arXiv:1901.09847) belongs to its
participant, or, of the sums, to the elements, and goes to whoever computes these next: who needs
what another rank holds (`carried.py`), is given a copy at the beginning of `exchange`. Before the
rounds participants give gradients, and what is left out of these is not added to a round's. Of a
parameter that nobody gave a gradient of, what was left out before stays so.

Way in: `Coded`, which `Averaging` holds in the place of `AllReduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.comm.buckets import laid_out_like
from instep.comm.codecs.base import Codec
from instep.comm.codecs.none import Identity
from instep.errors import SpecError
from instep.records import Law
from instep.sync.base import Price, Result
from instep.sync.gathering import sparse_mark, sparse_of
from instep.sync.generation import Generation
from instep.sync.rounds.carried import SUM, CarriedPiece, kept_of
from instep.sync.rounds.carrying import Carrying
from instep.sync.rounds.checkpointed import laws_of, pieces_from, tensors_of
from instep.sync.rounds.exchange import RoundExchange
from instep.sync.rounds.segments import Segments
from instep.sync.sparse_rows import SparseRows, with_rows
from instep.sync.sums import Wide


class Coded(Carrying):
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

    def __init__(self, codec: Codec, *, median: bool = False, encode_vectors: bool = False) -> None:
        self._codec, self._median = check_codec(codec), median
        self._encode_vectors = encode_vectors
        self._lossy = not isinstance(codec, Identity)  # so that there is something to carry
        self.start_after = 0
        """The last commit before the rounds: to it, what is given are gradients."""
        self._rows = SparseRows()
        super().__init__()  # carries what is left out, and what optimizers of participants remember

    @property
    def laws(self) -> Mapping[str, Law]:
        """Of each participant what is left out, and its optimizer's state, and what is left out of
        each element of the sums: one rank has it, so that a checkpoint can have the sum over
        all."""
        if not self._lossy:
            return {}
        return laws_of(self.carried, self.carried.made)

    def start(self, parameters: Sequence[Parameter], comm: Comm, generation: Generation) -> None:
        """Lay out segments, and take over what those that leave hold."""
        if not self._lossy and any(p.dtype == torch.float64 for p in parameters):
            raise SpecError(
                "sync.options.combine = 'median': the model has parameters of torch.float64, and "
                "the median is taken in float32. Leave it out, or use float32."
            )
        Wide(parameters)  # refuses what is wider than float32
        self._parameters, self._comm, self._device = list(parameters), comm, parameters[0].device
        self._segments = Segments(parameters, lambda p: p.dim() < 2 and not self._encode_vectors)
        owners = [rank for rank in range(comm.size) if rank not in generation.draining]
        self._sum = RoundExchange(self._codec, self._segments, comm, owners, self._device)
        self._take_over(comm, generation, generation.everyone(comm))

    # ---- a round

    def _forget(self) -> None:
        self._given: dict[int, Tensor] = {}  # by participant, weighted
        self._kept: Mapping[int, Tensor] = {}  # by participant: what its optimizer remembers
        self._seen = [0.0] * len(self._parameters)
        self._now = (0, 0.0)  # participant and weight of this pass
        self._weight = 0.0  # of all that is given here
        self._agreed: tuple[Tensor, list[float]] | None = None
        self._rows.forget()

    def begin_pass(self, weight: float, *, last: bool, unit: int = 0) -> None:
        """What comes now is another participant's."""
        self._now = unit, 1.0 if self._median else weight
        self._weight += weight

    @torch.no_grad()
    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Add what a participant gives for a parameter."""
        unit, weight = self._now
        if unit not in self._given:
            self._given[unit] = torch.zeros(
                self._segments.length, dtype=torch.float32, device=self._device
            )
        into = self._given[unit][self._segments.places[slot]].view(self._parameters[slot].shape)
        into.add_(gradient.to_dense() if gradient.is_sparse else gradient, alpha=weight)
        if gradient.is_sparse:
            self._seen[slot] = sparse_mark(self._seen[slot])
            self._rows.add(slot, gradient)
        else:
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
        self._rows.agree(sparse_of(marks), self._parameters, comm)
        total = self._summed(gives, held, marks)
        self._agreed = total.mul_(weight) if self._median else total, marks
        return notes

    def _collect(
        self, gives: Sequence[Mapping[int, int]], holds: Sequence[Sequence[CarriedPiece]]
    ) -> dict[int, Tensor]:
        """What this rank needs of what was left out before, by participant and `SUM`; zero where
        there was nothing, or nobody has it."""
        (start, stop), length, rank = self._sum.own, self._segments.length, self._comm.rank
        found = {
            of: torch.zeros(length, dtype=torch.float32, device=self._device) for of in gives[rank]
        }
        if stop > start:
            found[SUM] = torch.zeros(stop - start, dtype=torch.float32, device=self._device)
        of_rounds = self._attempt.number > self.start_after
        whats = {
            of: (of, commit)
            for of, commit in self.carried.made.items()
            if (commit > self.start_after) == of_rounds
        }
        starts = {SUM: start}
        self.carried.bring(
            list(self._sum.moves(gives, holds, whats)),
            lambda move: found[move.of.of][move.within(starts.get(move.of.of, 0))],
        )
        return found

    def _summed(
        self,
        gives: Sequence[Mapping[int, int]],
        before: dict[int, Tensor],
        marks: Sequence[float],
    ) -> Tensor:
        """The sum over all participants; what is left out of it lies staged."""
        number, (start, stop) = self._attempt.number, self._sum.own
        given = {of: length for ranks in gives for of, length in ranks.items()}
        room = {
            of: CarriedPiece(of, 0, self._segments.length, number) for of in sorted(self._given)
        }
        if stop > start:
            room[SUM] = CarriedPiece(SUM, start, stop, number)
        kept = {
            CarriedPiece(kept_of(of), 0, len(state), number): state
            for of, state in self._kept.items()
            if of in self._given
        }
        made = dict.fromkeys((*given, SUM), number)
        staged = self.carried.stage(self._attempt, [*room.values(), *kept], made, given)
        for piece, state in kept.items():
            staged[piece].copy_(state)
        for of, values in self._given.items():
            before[of] = values.add_(before[of])
        left = {of: staged[piece] for of, piece in room.items()}
        owed = list[tuple[Tensor, Tensor]]()
        for of, values in before.items():
            for part in self._unused(marks, start if of == SUM else 0):
                owed.append((left[of][part], values[part].clone()))
                values[part] = 0.0
        own = self._sum.add_up(before, left, gives, number=number, median=self._median)
        for later, still in owed:
            later.copy_(still)
        self.carried.staged()
        return self._sum.gather(own)

    def _unused(self, marks: Sequence[float], start: int) -> Iterator[slice]:
        """Where the parameters lie that nobody has given anything of, from an element on."""
        for place, each in zip(self._segments.places, marks, strict=True):
            if not each:
                yield slice(max(place.start - start, 0), max(place.stop - start, 0))

    # ---- the commit

    def prepare(self, step: int, scale: float) -> float:
        """`exchange` did it all."""
        return scale

    def hand_out(self) -> None:
        """Give each parameter the sum, where a rank gave something."""
        assert self._agreed is not None, "exchange comes first"
        total, marks = self._agreed
        sparse = set(sparse_of(marks))
        every = zip(self._parameters, self._segments.places, marks, strict=True)
        for slot, (parameter, place, each) in enumerate(every):
            parameter.grad = None
            if each:
                grad = total[place].view(parameter.shape).to(parameter.dtype)
                grad = with_rows(grad, self._rows.agreed.get(slot)) if slot in sparse else grad
                parameter.grad = laid_out_like(grad, parameter)

    def apply(self, update: Callable[[], Result]) -> Result:
        """The round happens: what is staged counts."""
        result = update()
        if self._lossy:
            self.carried.apply()
        else:
            self.carried.abandon()
        self._end()
        return result

    # ---- between generations

    def state(self) -> dict[str, Tensor]:
        """In which commit each participant was last."""
        return self.carried.state() if self._lossy else {}

    def own_state(self) -> dict[str, Tensor]:
        """What this rank holds of the last rounds; zero for what others hold."""
        left = {of: [of] for of in self.carried.made}
        given = self.carried, self._segments, self._parameters, left, self._device
        return tensors_of(*given)

    def _from_checkpoint(self, state: Mapping[str, Tensor]) -> dict[CarriedPiece, Tensor]:
        return pieces_from(state, self.carried, self._segments, self._place_of, self._device)

    def _place_of(self, of: int) -> list[CarriedPiece]:
        return [CarriedPiece(of, 0, self._segments.length, self.carried.made.get(of, 0))]

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """With as many participants as replicas: each is sent to the owners, and sums to all."""
        return Price(2 * (replicas - 1) / replicas * parameter_bytes, 2 * (replicas - 1))


def check_codec(codec: Codec) -> Codec:
    """The codec, if rounds can use it.

    Raises:
        SpecError: they cannot.
    """
    if hasattr(codec, "reducer") or not (codec.segmentable and codec.fixed_size):
        raise SpecError(
            "sync.codec: rounds need a codec that is segmentable and of fixed size. Use int8."
        )
    return codec
