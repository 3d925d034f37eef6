"""What participants remember from one round to the next, where they do.

It has parts: an optimizer's state (`local_optimizers.py`), parameters that are not shared
(`local_parameters.py`), or a whole model (`local_models.py`). With a codec or with fragments it
stays with the worker that has computed the participant, as what the codec left out of it does
(`sync/rounds/carried.py`). Else every worker holds what all participants remember after a commit:
any worker can compute any of them, and a newcomer copies all from a peer together with the
parameters. What each costs is in `docs/decisions/0021`. When a state begins and counts, `rounds.py`
and the strategies know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.state.broadcast import broadcast_snapshot
from instep.state.flat import flatten, unflatten
from instep.state.snapshot import Snapshot

FLAT = "flat"
"""The name of a state that is one tensor."""

OPTIMIZER, PARAMETERS, MODEL = "optimizer", "parameters", "model"
"""Names of parts."""

VALUES = "values"
"""The name of all that a participant trains, in the part `MODEL`."""


class ParticipantPart(Protocol):
    """Something that each participant remembers."""

    def pack(self) -> dict[str, Tensor]:
        """As the participant leaves it; it may refer to tensors that no other moves.

        Raises:
            RecipeError: there is something in it that other processes cannot be given.
        """

    def resume(self, participant: int, tensors: Mapping[str, Tensor]) -> None:
        """Put in place a copy of what `pack` gave, at this participant's last commit."""


class LocalStates:
    """What all participants remember, as of the last commit and as of the next.

    Args:
        parts: by name.
        device: of the tensors that are sent.
        stays: whether a state is only where its participant is computed.
    """

    def __init__(
        self, parts: Mapping[str, ParticipantPart], device: torch.device, *, stays: bool = False
    ) -> None:
        self.parts, self.stays = dict(parts), stays
        self._device = device
        self._committed: Mapping[int, Mapping[str, Tensor]] = {}  # by participant
        self._next: dict[int, Mapping[str, Tensor]] = {}
        self._here: Mapping[int, Tensor] = {}  # flat, of those that are computed here in this round

    # ---- a participant

    def of(self, participant: int, part: str) -> dict[str, Tensor]:
        """What it remembers of this; nothing before its first round. Not to be changed."""
        if participant in self._here:
            return part_of(unflatten(self._here[participant]), part)
        return part_of(self._committed.get(participant, {}), part)

    def resume(self, participant: int) -> None:
        """Put in place what the participant remembers."""
        for name, part in self.parts.items():
            if found := self.of(participant, name):
                part.resume(participant, found)

    def pack(self) -> dict[str, Tensor]:
        """What the participant remembers that has just taken its steps.

        Raises:
            RecipeError: there is something in it that other processes cannot be given.
        """
        tensors = {
            f"{name}/{key}": tensor
            for name, part in self.parts.items()
            for key, tensor in part.pack().items()
        }
        return {FLAT: flatten(tensors, self._device)} if self.stays else tensors

    def computed(self, participant: int, state: Mapping[str, Tensor]) -> None:
        """A participant of this worker's is done with the round, and has this state."""
        self._next[participant] = state

    # ---- the commit

    def computed_here(self) -> Mapping[int, Tensor]:
        """The states of this worker's participants after the round."""
        return {participant: state[FLAT] for participant, state in self._next.items()}

    def recall(self, states: Mapping[int, Tensor]) -> None:
        """What a round begins from, for the participants that are computed here."""
        self._here = states

    def model_in(self, state: Tensor) -> Tensor:
        """The participant's own values of all that is trained, [elements] float32."""
        return part_of(unflatten(state), MODEL)[VALUES]

    def exchange(self, comm: Comm) -> None:
        """Give all workers the states of all participants of the round; every one calls it.

        Raises:
            PeerError: a worker went away.
        """
        own = {str(participant): dict(state) for participant, state in self._next.items()}
        for root in range(comm.size) if comm.size > 1 else ():
            mine = Snapshot(step=0, tensors=own, facts={}) if comm.rank == root else None
            given = broadcast_snapshot(mine, comm, root, self._device)
            self._next |= {int(number): state for number, state in given.tensors.items()}

    def apply(self) -> None:
        """The round happens: its states are those that the next one begins from."""
        if not self.stays:
            self._committed = {**self._committed, **self._next}
        self._next, self._here = {}, {}

    def abandon(self) -> None:
        """It does not."""
        self._next = {}

    # ---- of the last commit

    def state(self) -> dict[str, Tensor]:
        """All that every worker has, as `PARTICIPANT/NAME`."""
        return {
            f"{participant}/{name}": tensor
            for participant, state in self._committed.items()
            for name, tensor in state.items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        found = defaultdict[int, dict[str, Tensor]](dict)
        for name, tensor in state.items():
            participant, kept = name.split("/", 1)
            found[int(participant)][kept] = tensor
        self._committed, self._next = dict(found), {}


def part_of(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """What `LocalStates.pack` gave of one part."""
    begin = f"{part}/"
    return {n.removeprefix(begin): each for n, each in state.items() if n.startswith(begin)}
