"""What participants' optimizers remember from one round to the next, where that is kept.

With a codec, a state stays with the worker that has computed the participant, as what the codec
left out of it does (`sync/rounds/carried.py`). Without one, every worker holds the states of all
participants after a commit: any worker can compute any of them, and a newcomer copies all from a
peer together with the parameters. What each costs is in `docs/decisions/0021`. When a state begins
and counts, `rounds.py` and `sync/rounds/averaging.py` know.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.comm.base import Comm
from instep.comm.dtensors import is_split, split_like
from instep.errors import CheckpointError, RecipeError
from instep.state.broadcast import broadcast_snapshot
from instep.state.flat import flatten, unflatten
from instep.state.packing import pack_state, unpack_state
from instep.state.snapshot import Snapshot
from instep.worker.step.capture import lay_out_state

SKELETON = "skeleton"
"""The name of the bytes that say what the other tensors of a state are."""

FLAT = "flat"
"""The name of a state that is one tensor."""


class LocalOptimizers:
    """The optimizer states of all participants, as of the last commit and as of the next.

    Args:
        optimizer: takes every participant's steps, one participant after the other.
        stays: whether a state is only where its participant is computed.
    """

    def __init__(self, optimizer: Optimizer, *, stays: bool = False) -> None:
        self.stays = stays
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._device = self._parameters[0].device
        self._committed: Mapping[int, Mapping[str, Tensor]] = {}  # by participant
        self._next: dict[int, Mapping[str, Tensor]] = {}
        self._here: Mapping[int, Tensor] = {}  # flat, of those that are computed here in this round

    # ---- a participant

    def resume(self, participant: int) -> None:
        """Give the optimizer a copy of the participant's state; none before its first round."""
        if participant in self._here:
            tensors = unflatten(self._here[participant])
        elif participant in self._committed:
            tensors = dict(self._committed[participant])
        else:
            return
        skeleton = json.loads(bytes(tensors.pop(SKELETON).cpu().numpy()))
        on_cpu = set(skeleton["on_cpu"])
        copies = {
            name: tensor.to("cpu" if name in on_cpu else self._device, copy=True)
            for name, tensor in tensors.items()
        }
        state = unpack_state(copies, skeleton["state"])
        for number, name in skeleton["split"]:
            parameter = self._parameters[number]
            assert is_split(parameter), "the mesh is that of the run"
            state[number][name] = split_like(parameter, state[number][name])
        self._optimizer.state = defaultdict(
            dict, {self._parameters[number]: kept for number, kept in state.items()}
        )
        lay_out_state(self._optimizer.state)

    def pack(self) -> dict[str, Tensor]:
        """The optimizer's state; it refers to the optimizer's own tensors, if it is to be sent.

        Raises:
            RecipeError: there is something in it that other processes cannot be given.
        """
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        split = list[tuple[int, str]]()
        try:
            state = {numbers[p]: dict(kept) for p, kept in self._optimizer.state.items()}
            for number, kept in state.items():
                for name, value in kept.items():
                    if isinstance(value, Tensor) and is_split(value):
                        split.append((number, name))
                        kept[name] = value.to_local()
            tensors, packed = pack_state(state)
        except (CheckpointError, KeyError) as error:
            raise RecipeError(
                f"the optimizer {type(self._optimizer).__name__} has a state that other processes "
                f"cannot be given, as sync.options.local_optimizers = 'kept' needs: {error} Use "
                "'reset'."
            ) from error
        on_cpu = [name for name, tensor in tensors.items() if tensor.device.type == "cpu"]
        text = json.dumps({"state": packed, "on_cpu": on_cpu, "split": split})
        skeleton = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        tensors[SKELETON] = skeleton
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
