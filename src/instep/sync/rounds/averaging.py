"""Average the steps of participants: each takes some of its own, then all begin from the mean.

What is given here in a gradient's place is how far a participant moved, backwards: from
where its parameters are to where the round began. The weighted mean of these is what a step of
rate 1 takes off the parameters of the round's beginning (McMahan et al. 2017,
arXiv:1602.05629). So all of it is that of `AllReduce`, which it holds. One thing differs: local
steps are never taken twice. Where a sum did not fit its lattice, the participants' own
contributions, which are kept until the commit, are added up once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.comm.codecs.base import Codec
from instep.comm.codecs.none import Identity
from instep.errors import SpecError
from instep.records import Attempt, Law
from instep.sync.all_reduce import AllReduce
from instep.sync.base import Price, Result
from instep.sync.generation import Generation, InMesh
from instep.sync.rounds.carried import Carried
from instep.sync.rounds.coded import Coded
from instep.sync.rounds.kept import KEPT, Kept
from instep.sync.rounds.outer import OUTER, Outer
from instep.sync.rounds.spread import Contribution, Spread, spread


class Averaging:
    """Weighted mean of what participants give, each in one pass.

    Args:
        bucket_mb: megabytes of one message, at most.
        codec: how what participants give looks on the wire; None sends it as it is.
        encode_vectors: with a codec: encode also parameters of fewer than two dimensions.
        combine: `mean`, or `median` of each element over the participants.
        pull: how strongly participants are drawn back to where the round began; they do it.
        outer: moves the parameters at the end of a round; None moves them to the mean.

    Raises:
        SpecError: an option is refused.
    """

    def __init__(
        self,
        *,
        bucket_mb: float = 8.0,
        codec: Codec | None = None,
        encode_vectors: bool = False,
        combine: str = "mean",
        pull: float = 0.0,
        outer: Outer | None = None,
    ) -> None:
        if combine not in ("mean", "median"):
            raise SpecError(f"sync.options.combine = {combine!r}: needs to be 'mean' or 'median'.")
        plain = AllReduce(bucket_mb=bucket_mb, overlap=False, encode_vectors=encode_vectors)
        self._mean: AllReduce | Coded = plain
        if codec is not None or combine == "median":
            median = combine == "median"
            self._mean = Coded(codec or Identity(), median=median, encode_vectors=encode_vectors)
        self.pull, self._outer = pull, outer
        self.start_after = 0
        """Before the rounds, so many steps sum up gradients, and move by them as they are."""
        self._early = False  # this commit is one of them
        self._parameters: list[Parameter] = []
        self._given: list[Contribution] = []
        self._handed: list[Tensor | None] | None = None  # what was agreed on, by parameter
        self._mesh: InMesh | None = None
        self.spread: Spread | None = None
        """How far the participants of the last round were apart; None before it."""
        self._next_spread: Spread | None = None
        self._comm: Comm
        self.local: Collection[int] = ()
        """Parameters that stay with their participant: the shared ones become their mean."""
        self.kept: Kept | None = None
        """What participants remember; None where they begin each round anew."""
        self._hidden = False

    def sum_by(self, mean: AllReduce, *, hidden: bool) -> None:
        """Sum what participants give in another way; before the first `start`.

        Args:
            mean: sums it, and is given each participant's by itself.
            hidden: whether nothing is measured of a single participant.
        """
        self._mean, self._hidden = mean, hidden

    def start(self, parameters: Sequence[Parameter], comm: Comm, generation: Generation) -> None:
        """Lay out the buckets."""
        self._given, self._comm, self._parameters = [], comm, list(parameters)
        self._handed, self._mesh = None, generation.mesh
        if isinstance(self._mean, Coded):
            self._mean.start_after = self.start_after
        self._mean.start(parameters, comm, generation)

    @property
    def carried(self) -> Carried | None:
        """What belongs to participants and lies where they are computed; None without."""
        return self._mean.carried if isinstance(self._mean, Coded) else None

    @property
    def laws(self) -> Mapping[str, Law]:
        """What a codec has left out, and what becomes of it."""
        return self._mean.laws

    @property
    def start_in_doubt(self) -> int:
        """The generation whose `start` this rank is in doubt about."""
        return self._mean.start_in_doubt

    def resolve(self, generation: int) -> None:
        """What changes hands counts, or does not."""
        self._mean.resolve(generation)

    def begin_step(self, attempt: Attempt) -> None:
        """The participants of a round are about to give."""
        self._early = attempt.number <= self.start_after
        self._mean.begin_step(attempt)

    def begin_pass(self, weight: float, *, last: bool, unit: int = 0) -> None:
        """What comes now is that participant's."""
        self._given.append(Contribution(unit, weight, []))
        self._mean.begin_pass(weight, last=last, unit=unit)

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Add it up, and keep it."""
        self._given[-1].way.append((slot, gradient))
        self._mean.gradient(slot, gradient)

    def recall(self, participants: Collection[int]) -> None:
        """A round begins: what these remember comes to this rank; every rank calls it.

        Raises:
            PeerError: a rank went away.
        """
        if self.kept is not None and self.kept.stays:
            assert isinstance(self._mean, Coded), "what it carries stays with participants"
            found, _ = self._mean.carried.fetch(participants)
            self.kept.recall(found)

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor:
        """All talking. Where the lattices had to be chosen anew, it is done once more."""
        if self.kept is not None and self.kept.stays:
            assert isinstance(self._mean, Coded), "what it carries stays with participants"
            self._mean.keep(self.kept.computed_here())
        agreed = self._mean.exchange(notes)
        if agreed is None:
            for given in self._given:
                self._mean.begin_pass(given.weight, last=False, unit=given.unit)
                for slot, gradient in given.way:
                    self._mean.gradient(slot, gradient)
            agreed = self._mean.exchange(notes)
            assert agreed is not None, "the sum was to be computed for a third time"
        return agreed

    def predicts(self, probabilities: Tensor) -> None:
        """What the participant of this pass predicts on samples that stay the same."""
        self._given[-1] = self._given[-1]._replace(predicted=probabilities)

    def prepare(self, step: int, scale: float) -> float:
        """Every rank is told how far participants are apart, and gets what they remember."""
        left = self._mean.prepare(step, scale)
        self._next_spread, mesh = None, self._mesh
        if not self._early and not self._hidden:
            agreed = self._agreed_on()
            self._next_spread = spread(
                self._given,
                [mean if mean is None or scale == 1.0 else mean * scale for mean in agreed],
                self._comm if mesh is None else mesh.everyone,
                holders=[max(1, len(each)) for each in mesh.holders] if mesh else [1] * len(agreed),
                replicas=self._comm.size,
                first=self._comm.rank == 0,
                device=self._parameters[0].device,
                local=self.local,
            )
        self._given = []
        if not self._early and self.kept is not None and not self.kept.stays:
            self.kept.exchange(self._comm)
        return left

    def _agreed_on(self) -> list[Tensor | None]:
        """By parameter, what to take off it; the sums give that only once."""
        if self._handed is None:
            self._mean.hand_out()
            self._handed = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
        return self._handed

    def hand_out(self) -> None:
        """Give each parameter the mean, as its `.grad`."""
        for parameter, mean in zip(self._parameters, self._agreed_on(), strict=True):
            parameter.grad = mean

    def apply(self, update: Callable[[], Result]) -> Result | None:
        """Move by what was handed out, or by what the outer rule makes of it."""
        self._given, self._handed, self.spread = [], None, self._next_spread
        if self.kept is not None:
            self.kept.apply()
        if self._outer is not None and not self._early:
            self._outer.replace(self._parameters, self.local)
        return self._mean.apply(update)

    def abandon(self) -> None:
        """The round does not happen; what participants gave is given again."""
        self._given, self._handed = [], None
        if self.kept is not None:
            self.kept.abandon()
        self._mean.abandon()

    def stop(self) -> None:
        """Nothing to let go of."""
        self._mean.stop()

    def state(self) -> dict[str, Tensor]:
        """How fine lattices are, where there are any, what participants and the outer rule keep."""
        state = self._mean.state()
        for prefix, part in _parts(self.kept, self._outer).items():
            state |= {prefix + name: tensor for name, tensor in part.state().items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        rest = dict(state)
        for prefix, part in _parts(self.kept, self._outer).items():
            names = [name for name in rest if name.startswith(prefix)]
            part.load_state({name.removeprefix(prefix): rest.pop(name) for name in names})
        assert not any(name.startswith((KEPT, OUTER)) for name in rest), "it has no place yet"
        self._mean.load_state(rest)

    def own_state(self) -> dict[str, Tensor]:
        """What a codec has left out here."""
        return self._mean.own_state()

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `own_state` gave."""
        self._mean.load_own(state)

    def load_left(
        self,
        tensors: Mapping[str, Tensor],
        parameters: Sequence[Parameter],
        holders: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """The same, of a process that is gone."""
        self._mean.load_left(tensors, parameters, holders)

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """What a round costs; with `determinism = "bits"` twice that where lattices are new."""
        return AllReduce.price(parameter_bytes, replicas)


def _parts(kept: Kept | None, outer: Outer | None) -> dict[str, Kept | Outer]:
    """Parts that remember something, by how the names of their tensors begin."""
    parts: dict[str, Kept | Outer | None] = {KEPT: kept, OUTER: outer}
    return {prefix: part for prefix, part in parts.items() if part is not None}


def averaging(
    *,
    combine: str = "mean",
    bucket_mb: float = 8.0,
    codec: Codec | None = None,
    encode_vectors: bool = False,
) -> Averaging:
    """Parameters become the mean of those of the participants, or the median.

    Raises:
        SpecError: an option is refused.
    """
    return Averaging(
        bucket_mb=bucket_mb, codec=codec, encode_vectors=encode_vectors, combine=combine
    )
