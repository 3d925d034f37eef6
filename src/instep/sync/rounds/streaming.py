"""Streaming: parameters agree one fragment after the other, while participants compute.

Douillard et al. 2025 (arXiv:2501.18512). Each participant has a model of its own all the time, and
the ranks share another, the *shared* one. In a commit every participant takes its local steps, then
the fragment whose turn it is agrees: what participants are away from the shared values, on average,
is the gradient of an outer step. Without a delay that is a part of the commit. With a delay
the sum begins with the next commit, in another thread, from what the commit before has left, and
participants take up its result after so many of their steps. So a commit is a function of the one
before, and what is under way when a rank is lost begins again. In the job's last commit all
fragments agree, at its end.

What participants have of their own lies in what `Carried` keeps; the ranks' parameters are the
shared ones. How a participant takes up a fragment, the worker knows
(`worker/rounds/local_models.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.comm.codecs.base import Codec
from instep.comm.codecs.none import Identity
from instep.records import Law
from instep.sync.base import Price, Result
from instep.sync.generation import Generation
from instep.sync.rounds.carried import CarriedPiece, kept_of
from instep.sync.rounds.carrying import Carrying
from instep.sync.rounds.checkpointed import laws_of, pieces_from, tensors_of
from instep.sync.rounds.coded import check_codec
from instep.sync.rounds.fragment_sum import Agreed, FragmentSum, given_by, left_out, places_left_out
from instep.sync.rounds.kept import Kept
from instep.sync.rounds.late import LateFragment, in_thread
from instep.sync.rounds.outer import OUTER, Outer
from instep.sync.rounds.segments import Segments, Stretch, check_fragments
from instep.sync.rounds.spread import Contribution, Spread, spread
from instep.sync.sums import Wide


class Streaming(Carrying):
    """Fragments of what participants train agree in turn.

    Args:
        fragments: how many.
        outer: moves the shared values.
        delay: local steps that participants take before they have what was agreed.
        mixing: how much of its own values a participant keeps then; the rest is the shared ones.
        codec, encode_vectors: as for averaging.

    Raises:
        SpecError: the codec cannot be used.
    """

    start_after, pull = 0, 0.0

    def __init__(
        self,
        *,
        fragments: int,
        outer: Outer,
        delay: int = 0,
        mixing: float = 0.5,
        codec: Codec | None = None,
        encode_vectors: bool = False,
    ) -> None:
        self._codec = check_codec(codec or Identity())
        self._fragments, self._outer, self._encode_vectors = fragments, outer, encode_vectors
        self.delay, self.mixing = delay, mixing
        self._leaving = range(0 if isinstance(self._codec, Identity) else fragments)
        """The fragments of which something is left out."""
        self.last: int | None = None
        """The number of the job's last commit, after which nothing is under way."""
        self.local: Collection[int] = ()
        self.participants = 0
        """Of the job."""
        self.begin = in_thread
        """Begins to compute what participants need later."""
        self.kept: Kept | None = None
        """Has the models of participants."""
        self.spread: Spread | None = None
        """How far participants were apart in what agreed last; None before."""
        self._next_spread: Spread | None = None
        self._commits = torch.zeros(fragments, dtype=torch.int64)
        """By fragment: the commit whose local models have agreed."""
        self._shares = torch.zeros(0, dtype=torch.float64)
        """By participant: its weight in the last commit; they add up to 1."""
        self._late: LateFragment | None = None
        super().__init__()

    @property
    def laws(self) -> Mapping[str, Law]:
        """Of each participant what it has of its own, and what is left out; one rank has it."""
        return laws_of(self.carried, left_out(self.carried, self.participants, self._leaving))

    def start(self, parameters: Sequence[Parameter], comm: Comm, generation: Generation) -> None:
        """Cut the fragments, and take over what those that leave hold."""
        check_fragments(parameters, self._fragments)
        Wide(parameters)
        self._parameters, self._comm, self._device = list(parameters), comm, parameters[0].device
        self._segments = segments = Segments(
            parameters,
            lambda p: p.dim() < 2 and not self._encode_vectors,
            fragments=self._fragments,
        )
        owners = [rank for rank in range(comm.size) if rank not in generation.draining]
        self._sums = [
            FragmentSum(self._codec, segments, comm, owners, self._device, self.carried, fragment)
            for fragment in range(self._fragments)
        ]
        self._take_over(comm, generation, comm)

    def stop(self) -> None:
        """Nothing is under way any more; what was staged stays."""
        if self._late is not None and not self._late.agreed.done():
            self._comm.interrupt()
            wait([self._late.agreed])

    # ---- the passes of a commit

    def _forget(self) -> None:
        self._given: dict[int, Contribution] = {}  # by participant, what it gives in this commit
        self._moved: dict[int, Tensor] = {}  # the same, of all elements
        self._now = 0
        self._holds: Sequence[Sequence[CarriedPiece]] = []
        self._next: dict[int, Agreed] = {}  # by fragment
        self._next_shares = self._shares
        self._late = None

    @property
    def _models(self) -> Kept:
        assert self.kept is not None, "participants have models of their own"
        return self.kept

    @property
    def _due(self) -> Sequence[int]:
        """The fragments that agree at the end of this commit."""
        if self._attempt.number == self.last:
            return range(self._fragments)
        return [] if self.delay else [(self._attempt.number - 1) % self._fragments]

    def recall(self, participants: Collection[int]) -> None:
        """A commit begins: what these have of their own comes to this rank, and the fragment that
        the commit before has left begins to agree; every rank calls it.

        Raises:
            PeerError: a rank went away.
        """
        found, self._holds = self.carried.fetch(participants)
        self._models.recall(found)
        before, last = self._attempt.number - 1, self._attempt.number == self.last
        fragment = (before - 1) % self._fragments
        if self.delay and not last and before > int(self._commits[fragment]):
            # participants move the parameters meanwhile
            shared = self._segments.read(self._parameters, self._segments.fragments[fragment])
            agreed = self.begin(lambda: self._agree_late(fragment, before, shared))
            self._late = LateFragment(fragment, shared, agreed)

    def landed(self) -> tuple[Stretch, Tensor] | None:
        """The new shared values of the fragment that was under way: which, and [elements]. None
        where there is none.

        Raises:
            PeerError: a rank went away.
        """
        if self._late is None:
            return None
        fragment, shared, agreed = self._late
        self._next[fragment] = agreed.result()
        way, _ = self._outer.moved(fragment, self._next[fragment].mean)
        return self._segments.fragments[fragment], shared - way

    def agreed_since(self, participant: int) -> Iterator[Stretch]:
        """The fragments that have agreed since, or with, the participant's last commit: of these
        it takes the shared values."""
        commit = self.carried.made.get(participant, 0)
        for fragment, stretch in enumerate(self._segments.fragments):
            if int(self._commits[fragment]) >= commit:
                yield stretch

    def begin_pass(self, weight: float, *, last: bool, unit: int = 0) -> None:
        """What comes now is that participant's."""
        self._now = unit
        self._given[unit] = Contribution(unit, weight, [])
        if self._due:
            self._moved[unit] = torch.zeros(
                self._segments.length, dtype=torch.float32, device=self._device
            )

    @torch.no_grad()
    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Keep how far it is from the shared values, where that is to agree."""
        if self._now in self._moved:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            self._moved[self._now][self._segments.places[slot]] = dense.flatten().float()

    def predicts(self, probabilities: Tensor) -> None:
        """What the participant of this pass predicts on samples that stay the same."""
        self._given[self._now] = self._given[self._now]._replace(predicted=probabilities)

    # ---- the agreement

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor:
        """All talking."""
        comm, rank, number = self._comm, self._comm.rank, self._attempt.number
        self.landed()
        kept = dict(self._models.computed_here())
        row = self.carried.row({of: len(state) for of, state in kept.items()})
        lengths = torch.zeros(comm.size, dtype=torch.float64)
        lengths[rank] = len(row)
        shares = torch.zeros(self.participants, dtype=torch.float64)
        for of, given in self._given.items():
            shares[of] = given.weight
        told = torch.cat([shares, lengths, notes]).to(self._device)
        comm.all_reduce(told).wait()
        self._next_shares, lengths, notes = told.cpu().split([len(shares), comm.size, len(notes)])
        gives, holds = self.carried.rows(row, int(lengths.max()))
        for fragment in self._due:
            start, stop = self._segments.fragments[fragment]
            ways = {of: self._moved[of][start:stop] for of in kept if of in self._moved}
            self._next[fragment] = self._sums[fragment].agree(
                number, number, ways, gives, holds, self._next_shares
            )
        self._stage(kept, gives)
        return notes

    def _stage(self, kept: Mapping[int, Tensor], gives: Sequence[Mapping[int, int]]) -> None:
        """Everything that this rank holds from this commit on lies in memory."""
        number = self._attempt.number
        new = {
            CarriedPiece(kept_of(of), 0, len(state), number): state for of, state in kept.items()
        }
        given = {of: length for ranks in gives for of, length in ranks.items()}
        made = dict.fromkeys(given, number)
        for agreed in self._next.values():
            new |= agreed.left
            made |= dict.fromkeys(agreed.made, number)
        staged = self.carried.stage(self._attempt, new, made, given)
        for piece, tensor in new.items():
            staged[piece].copy_(tensor)
        self.carried.staged()

    def _agree_late(self, fragment: int, commit: int, shared: Tensor) -> Agreed:
        """Have a fragment agree on what participants had in a former commit; another thread."""
        gives: list[dict[int, int]] = [{} for _ in range(self._comm.size)]
        for of in sorted(self.carried.lengths):
            want = CarriedPiece(kept_of(of), 0, self.carried.lengths[of], commit)
            holders = [rank for rank, held in enumerate(self._holds) if want in held]
            if holders:
                gives[holders[0]][of] = 0
        start, stop = self._segments.fragments[fragment]
        ways = {}
        for of in gives[self._comm.rank]:
            held = self.carried.held[CarriedPiece(kept_of(of), 0, self.carried.lengths[of], commit)]
            ways[of] = shared - self._models.model_in(held)[start:stop]
        number = self._attempt.number
        return self._sums[fragment].agree(commit, number, ways, gives, self._holds, self._shares)

    def prepare(self, step: int, scale: float) -> float:
        """Every rank is told how far participants are apart."""
        self._next_shares = self._next_shares * scale
        for fragment in self._due:
            agreed = self._next[fragment]
            self._next[fragment] = agreed._replace(mean=agreed.mean * scale)
        self._next_spread = None
        if self._next:
            self._next_spread = spread(
                given_by(self._given, self._next, self._shares),
                [self._next[f].mean if f in self._next else None for f in range(self._fragments)],
                self._comm,
                holders=[1] * self._fragments,
                replicas=self._comm.size,
                first=self._comm.rank == 0,
                device=self._device,
            )
        return 1.0

    # ---- the commit

    def hand_out(self) -> None:
        """Give each parameter the mean, where it has a part in what agrees."""
        stretches = self._segments.fragments
        self._segments.give(
            self._parameters, {stretches[f]: agreed.mean for f, agreed in self._next.items()}
        )

    @torch.no_grad()
    def apply(self, update: Callable[[], Result]) -> Result:
        """Move the shared values by what the outer rule makes of the mean."""
        stretches = self._segments.fragments
        moved = {f: self._outer.moved(f, agreed.mean) for f, agreed in self._next.items()}
        self._segments.give(self._parameters, {stretches[f]: way for f, (way, _) in moved.items()})
        result = update()
        for fragment, (_, kept) in moved.items():
            self._outer.keep(fragment, kept)
            self._commits[fragment] = self._next[fragment].commit
        self._shares, self.spread = self._next_shares, self._next_spread
        self.carried.apply()
        self._models.apply()
        self._end()
        return result

    def abandon(self) -> None:
        """The commit does not happen; a second call does nothing. What is under way ends with
        `stop`."""
        late = self._late
        if self.kept is not None:
            self.kept.abandon()
        super().abandon()
        self._late = late

    # ---- between generations

    def state(self) -> dict[str, Tensor]:
        """Which local models have agreed, what participants weigh, and what the outer rule
        keeps."""
        outer = {OUTER + name: tensor for name, tensor in self._outer.state().items()}
        own = {"commits": self._commits.clone(), "shares": self._shares}
        return self.carried.state() | own | outer

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        outer = {name: each for name, each in state.items() if name.startswith(OUTER)}
        self._outer.load_state({name.removeprefix(OUTER): each for name, each in outer.items()})
        nothing = torch.zeros(self._fragments, dtype=torch.int64)
        self._commits = state.get("commits", nothing).cpu().clone()
        self._shares = state.get("shares", torch.zeros(0, dtype=torch.float64)).cpu().clone()
        super().load_state(state)

    def own_state(self) -> dict[str, Tensor]:
        """What this rank holds of participants and sums; zero for what others hold."""
        left = left_out(self.carried, self.participants, self._leaving)
        return tensors_of(self.carried, self._segments, self._parameters, left, self._device)

    def _from_checkpoint(self, state: Mapping[str, Tensor]) -> dict[CarriedPiece, Tensor]:
        places = partial(places_left_out, self.carried, self._segments)
        return pieces_from(state, self.carried, self._segments, places, self._device)

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """Of all fragments together, with as many participants as replicas."""
        return Price(2 * (replicas - 1) / replicas * parameter_bytes, 2 * (replicas - 1))
