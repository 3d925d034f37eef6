"""The sign of each gradient by a majority of voters, each with a momentum of its own.

Every micro-batch of a step is a voter (signSGD with majority vote: Bernstein et al. 2018,
arXiv:1810.05291). It adds its gradient to its momentum and votes for the sign of that; the agreed
gradient is the sign of all votes together: -1, 1, or 0 where as many are for the one as for the
other. Micro-batches are the job's, and votes are counted in whole numbers: neither the number of
ranks, nor who has which voter, shows in a bit.

A rank sends what its voters say together: the sum of their votes, in as few bits as that takes, to
the rank that owns the stretch of the parameters. The owner adds up, and sends the signs to all.

A voter's momentum belongs to the voter, and goes to the rank that computes it next
(`rounds/carried.py`).

Way in: `SignVote`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm, Work
from instep.comm.buckets import laid_out_like
from instep.errors import SpecError
from instep.records import Law
from instep.sync import ballots
from instep.sync.base import Price, Result
from instep.sync.generation import Generation
from instep.sync.rounds.carried import SUM, CarriedPiece, Move, moves_to
from instep.sync.rounds.carrying import Carrying
from instep.sync.sparse_rows import SparseRows, with_rows

_KIND = "momentum-"
"""Begins the name of what a voter remembers; its number follows."""

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class SignVote(Carrying):
    """Majority of the signs of voters, every step.

    Args:
        momentum: of each voter: what is left of its former gradients when it adds a new one. 0:
            it votes for the sign of the gradient, and nothing is remembered.

    Raises:
        SpecError: it is no number from 0 to below 1.
    """

    def __init__(self, *, momentum: float = 0.9) -> None:
        number = isinstance(momentum, (int, float)) and not isinstance(momentum, bool)
        if not (number and 0 <= momentum < 1):
            raise SpecError(
                f"sync.options.momentum = {momentum!r}: needs a number from 0 to below 1."
            )
        self._momentum = float(momentum)
        self._rows = SparseRows()
        super().__init__()

    @property
    def laws(self) -> Mapping[str, Law]:
        """Of each voter its momentum: one rank has it, so that a checkpoint can have the sum over
        all."""
        if not self._momentum:
            return {}
        voters = (f"{_KIND}{of}" for of in self._voters)
        return dict.fromkeys([_KIND, *voters], Law.SUM)

    @property
    def _voters(self) -> list[int]:
        """Those that remember something, on any rank."""
        return sorted(of for of in self.carried.made if of != SUM)

    # ---- generations

    def start(self, parameters: Sequence[Parameter], comm: Comm, generation: Generation) -> None:
        """Lay out the parameters one after the other, and take over what those that leave hold."""
        for strange in {p.dtype for p in parameters}.difference(_TYPES):
            raise SpecError(
                f"the model has parameters of {strange}, and sync.name = 'sign_vote' has momenta "
                "of float32: it takes float32, bfloat16 and float16. Use sync.name = 'all_reduce'."
            )
        self._parameters, self._comm, self._device = list(parameters), comm, parameters[0].device
        self._places, self._length = list[slice](), 0
        for parameter in parameters:
            begin, self._length = self._length, self._length + parameter.numel()
            self._places.append(slice(begin, self._length))
        owners = [rank for rank in range(comm.size) if rank not in generation.draining]
        each = -(-self._length // len(owners))
        self._stretches = [slice(0, 0)] * comm.size
        for place, rank in enumerate(owners):
            begin, end = place * each, (place + 1) * each
            self._stretches[rank] = slice(min(begin, self._length), min(end, self._length))
        everyone = generation.everyone(comm) if self._momentum else None
        self._take_over(comm, generation, everyone)

    # ---- a step

    def _forget(self) -> None:
        self._given: dict[int, Tensor] = {}  # by voter
        self._has: dict[int, set[int]] = {}  # by voter: of which parameters
        self._dense: set[int] = set()
        self._now = (0, 0.0)  # voter and weight of this pass
        self._agreed: tuple[Tensor, Tensor] | None = None
        self._rows.forget()

    def begin_pass(self, weight: float, *, last: bool, unit: int = 0) -> None:
        """What comes now is that voter's."""
        self._now = unit, weight

    @torch.no_grad()
    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Keep it for the voter, as what it adds to the gradient of the global batch."""
        unit, weight = self._now
        if not weight:  # nothing in it counts
            return
        if unit not in self._given:
            self._given[unit] = torch.zeros(self._length, dtype=torch.float32, device=self._device)
        into = self._given[unit][self._places[slot]].view(self._parameters[slot].shape)
        into.add_(gradient.to_dense() if gradient.is_sparse else gradient, alpha=weight)
        self._has.setdefault(unit, set()).add(slot)
        if gradient.is_sparse:
            self._rows.add(slot, gradient)
        else:
            self._dense.add(slot)

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor:
        """All talking: who votes, what voters remember elsewhere, votes, and their sums."""
        comm, count = self._comm, len(self._parameters)
        row = self.carried.row(dict.fromkeys(self._given, 0))
        lengths = torch.zeros(comm.size, dtype=torch.float32)
        marks = torch.zeros(2, count, dtype=torch.float32)
        lengths[comm.rank] = len(row)
        marks[0, list(set().union(*self._has.values()))] = 1.0
        marks[1, list(self._dense)] = 1.0
        agreed = torch.cat([lengths.double(), marks.flatten().double(), notes]).to(self._device)
        comm.all_reduce(agreed).wait()
        lengths, marks, notes = agreed.cpu().split([comm.size, 2 * count, len(notes)])
        gives, holds = self.carried.rows(row, int(lengths.max()))
        counts, ties = self._vote(self._collect(gives, holds) if self._momentum else {})
        told = torch.zeros(
            comm.size + 1, max(comm.size, count), dtype=torch.float32, device=self._device
        )
        told[comm.rank, : comm.size] = ties
        told[-1, :count] = self._broken()
        comm.all_reduce(told).wait()
        if self._momentum:
            self._stage({of for voters in gives for of in voters})
        signs = self._count(counts, [len(voters) for voters in gives], told.cpu() > 0)
        has, dense = marks.view(2, count)
        self._agree_on_rows(((has > 0) & (dense == 0)).nonzero().flatten().tolist())
        kinds = torch.stack([has, dense, told[-1, :count].cpu().double()])
        self._agreed = signs, kinds
        return notes

    def _collect(
        self, gives: Sequence[Mapping[int, int]], holds: Sequence[Sequence[CarriedPiece]]
    ) -> dict[int, Tensor]:
        """What this rank's voters remember, from the rank that has it; nothing of those that
        remember nothing."""
        found, moves, made = dict[int, Tensor](), list[Move](), self.carried.made
        for rank, voters in enumerate(gives):
            for of in voters:
                want = CarriedPiece(of, 0, self._length, made.get(of, 0))
                found_at = list(moves_to(rank, want, holds)) if want.commit else []
                moves += found_at
                if found_at and rank == self._comm.rank:
                    found[of] = torch.empty(self._length, dtype=torch.float32, device=self._device)
        self.carried.bring(moves, lambda move: found[move.of.of])
        return found

    def _vote(self, before: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Make what voters gave their momenta; the sum of their votes [n], and for each rank's
        stretch whether somebody abstains there [ranks]."""
        dtype = torch.int8 if len(self._given) < 64 else torch.int16
        counts = torch.zeros(self._length, dtype=dtype, device=self._device)
        voted = torch.zeros_like(counts)
        for of, momentum in self._given.items():
            old, silent = before.get(of), [*self._silent(of)]
            if old is not None:
                momentum.add_(old, alpha=self._momentum)
            votes = momentum.sign().to(dtype)
            for place in silent:  # without a gradient there is no vote, and nothing to remember
                votes[place] = 0
                momentum[place] = old[place] if old is not None else 0.0
            counts += votes
            voted += votes.abs()
        every = len(self._given)
        ties = [float(not (voted[part] == every).all()) for part in self._stretches]
        return counts, torch.tensor(ties, device=self._device)

    def _agree_on_rows(self, sparse: Sequence[int]) -> None:
        """Of what voters gave, and of what they remember."""
        for slot in sparse:
            for of, momentum in self._given.items():
                if slot in self._has[of]:
                    values = momentum[self._places[slot]].view(self._parameters[slot].shape)
                    self._rows.add_values(slot, values)
        self._rows.agree(sparse, self._parameters, self._comm)

    def _silent(self, voter: int) -> list[slice]:
        """Where a voter has no gradient."""
        has = self._has[voter]
        return [place for slot, place in enumerate(self._places) if slot not in has]

    def _broken(self) -> Tensor:
        """For each parameter, whether a voter's momentum is not finite there [parameters]."""
        broken = torch.zeros(len(self._places), dtype=torch.float32, device=self._device)
        for momentum in self._given.values():
            if not momentum.isfinite().all():
                every = [momentum[place].isfinite().all() for place in self._places]
                broken += torch.stack(every).logical_not_()
        return broken

    def _stage(self, voters: set[int]) -> None:
        """Write down what this rank's voters remember from this commit on."""
        number = self._attempt.number
        pieces = [CarriedPiece(of, 0, self._length, number) for of in sorted(self._given)]
        made = dict.fromkeys((*voters, SUM), number)
        staged = self.carried.stage(self._attempt, pieces, made, {})
        for piece in pieces:
            staged[piece].copy_(self._given[piece.of])
        self.carried.staged()

    def _count(self, counts: Tensor, voters: Sequence[int], told: Tensor) -> Tensor:
        """The sign of all votes [n] int8.

        Args:
            counts: of this rank's voters [n].
            voters: how many each rank has.
            told: [ranks, ranks or more] bool: whether a rank's voters abstain somewhere in the
                stretch of another.
        """
        rank, sizes = self._comm.rank, [part.stop - part.start for part in self._stretches]
        mine, own, every = voters[rank], sizes[rank], sum(voters)
        if not every:
            return torch.zeros(self._length, dtype=torch.int8, device=self._device)
        sent = [
            ballots.pack(*ballots.ballot(counts[part], mine, ties=bool(told[rank, owner])))
            if mine
            else ballots.none(counts)
            for owner, part in enumerate(self._stretches)
        ]
        bases = [
            ballots.base_of(each, ties=bool(told[source, rank]))
            for source, each in enumerate(voters)
        ]
        sums = [ballots.size(own, base) if base else 0 for base in bases]
        total = torch.zeros(own, dtype=torch.int16, device=self._device)
        for payload, base, each in zip(self._swap(sent, sums), bases, voters, strict=True):
            if base:
                total += ballots.read_votes(ballots.unpack(payload, own, base), each, base)
        # with an odd number of votes nobody is in the middle, unless somebody abstains
        ties = [bool(told[:-1, owner].any()) or every % 2 == 0 for owner in range(len(sizes))]
        result = ballots.pack(*ballots.ballot(total.sign(), 1, ties=ties[rank]))
        bases = [ballots.base_of(1, ties=each) for each in ties]
        gets = [ballots.size(size, base) for size, base in zip(sizes, bases, strict=True)]
        come = self._swap([result] * len(sizes), gets)
        return torch.cat(
            [
                ballots.read_votes(ballots.unpack(payload, size, base), 1, base).to(torch.int8)
                for payload, size, base in zip(come, sizes, bases, strict=True)
            ]
        )

    def _swap(self, out: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send each rank its message, and receive one of this size from each; none is empty."""
        comm, work = self._comm, list[Work]()
        found = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in sizes]
        found[comm.rank] = out[comm.rank]
        for step in range(1, comm.size):  # to the next, the one after it, ...
            to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
            if len(out[to]):
                work.append(comm.send(out[to], to))
            if len(found[source]):
                work.append(comm.receive(found[source], source))
        for each in work:
            each.wait()
        return found

    # ---- the commit

    def prepare(self, step: int, scale: float) -> float:
        """`exchange` did it all, and a sign has no scale."""
        return 1.0

    @torch.no_grad()
    def hand_out(self) -> None:
        """Give each parameter its signs, where a voter had a gradient; not a number, where one of
        them was not."""
        assert self._agreed is not None, "exchange comes first"
        signs, kinds = self._agreed
        for slot, (parameter, place) in enumerate(zip(self._parameters, self._places, strict=True)):
            has, dense, broken = kinds[:, slot].tolist()
            parameter.grad = None
            if not has:
                continue
            grad = signs[place].view(parameter.shape).to(parameter.dtype)
            if broken:
                grad.fill_(torch.nan)
            grad = grad if dense else with_rows(grad, self._rows.agreed.get(slot))
            parameter.grad = laid_out_like(grad, parameter)

    def apply(self, update: Callable[[], Result]) -> Result:
        """Move by what was handed out; what voters remember counts."""
        result = update()
        if self._momentum:
            self.carried.apply()
        self._end()
        return result

    # ---- between generations

    def state(self) -> dict[str, Tensor]:
        """In which commit each voter was last."""
        return self.carried.state() if self._momentum else {}

    def own_state(self) -> dict[str, Tensor]:
        """What the voters that are here remember; zero for those of others."""
        state, held, made = dict[str, Tensor](), self.carried.held, self.carried.made
        for of in self._voters:
            flat = held.get(CarriedPiece(of, 0, self._length, made[of]))
            for slot, (parameter, place) in enumerate(
                zip(self._parameters, self._places, strict=True)
            ):
                nothing = torch.zeros(parameter.shape, dtype=torch.float32, device=self._device)
                part = nothing if flat is None else flat[place].view(parameter.shape).clone()
                state[f"{_KIND}{of}/{slot}"] = part
        return state

    def _from_checkpoint(self, state: Mapping[str, Tensor]) -> dict[CarriedPiece, Tensor]:
        held = dict[CarriedPiece, Tensor]()
        for name, tensor in state.items():
            voter, slot = name.removeprefix(_KIND).split("/")
            piece = CarriedPiece(int(voter), 0, self._length, self.carried.made.get(int(voter), 0))
            if piece not in held:
                held[piece] = torch.zeros(self._length, dtype=torch.float32, device=self._device)
            held[piece][self._places[int(slot)]] = tensor.flatten().to(self._device)
        return held

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """With a voter on each replica, and an odd number of them: a bit each way."""
        return Price(2 * (replicas - 1) / replicas * parameter_bytes / 32, 2 * (replicas - 1))
