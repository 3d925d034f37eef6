"""What strategies share whose participants, or voters, remember something that one rank has.

It keeps the state (`carried.py`) over generations, and knows nothing of what is agreed on. Way in:
`Carrying`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.records import BEGINNING, Attempt
from instep.sync.generation import Generation
from instep.sync.rounds.carried import Carried, CarriedPiece


class Carrying:
    """To inherit from; its `__init__` comes last."""

    start_in_doubt = -1

    def __init__(self) -> None:
        self.carried = Carried()
        """What is remembered."""
        self._loaded: Mapping[str, Tensor] | None = None  # of a checkpoint, until `start`
        self._attempt = BEGINNING
        self._parameters: list[Parameter] = []
        self._forget()

    def _forget(self) -> None:
        """A commit is over, or a generation begins."""
        raise NotImplementedError

    def _from_checkpoint(self, state: Mapping[str, Tensor]) -> dict[CarriedPiece, Tensor]:
        """What `own_state` gave, summed over ranks."""
        raise NotImplementedError

    # ---- generations

    def _take_over(self, comm: Comm, generation: Generation, everyone: Comm | None) -> None:
        """Take up what a checkpoint or memory has, and what those that leave hold.

        Args:
            comm, generation: as for `Strategy.start`.
            everyone: all ranks of the run, who continue together; None where nothing is remembered.
        """
        device = self._parameters[0].device
        if self._loaded is not None:
            self.carried.held, self._loaded = self._from_checkpoint(self._loaded), None
        lasts = everyone is not None and device.type == "cpu"  # a GPU's own is lost with it
        at, draining = generation.at, generation.draining
        taker = next(rank for rank in range(comm.size) if rank not in draining)
        memory = generation.memory if lasts else None
        self.carried.start(comm, device, memory, at, draining, taker)
        if everyone is not None:
            everyone.all_reduce(
                torch.zeros(1, dtype=torch.float32, device=device)
            ).wait()  # all have theirs
            if comm.rank in draining:
                self.carried.held = {}
        self._forget()

    def resolve(self, generation: int) -> None:
        """What changes hands is copied, so nothing is in doubt."""

    def stop(self) -> None:
        """What is remembered stays here."""

    # ---- a commit

    def begin_step(self, attempt: Attempt) -> None:
        """What is remembered from here on belongs to this commit."""
        self._attempt = attempt

    def abandon(self) -> None:
        """It does not happen; a second call does nothing."""
        self.carried.abandon()
        self._end()

    def _end(self) -> None:
        self._forget()
        for parameter in self._parameters:
            parameter.grad = None

    # ---- between generations

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self.carried.load_state(state)

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Kept until `start`."""
        self.carried.abandon()
        self.carried.held, self._loaded = {}, dict(state)

    def load_left(
        self,
        tensors: Mapping[str, Tensor],
        parameters: Sequence[Parameter],
        holders: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """What a process that is gone held."""
        self.carried.load_left(tensors)
