"""A copy of the state as it was when it was last found right, to go back to.

It lies in this worker's memory, and costs as much of it as parameters and
optimizer do. Whether a state is right, this file does not know.
"""

from __future__ import annotations

from torch import Tensor, nn

from instep.state.snapshot import Snapshot, tied_names
from instep.worker.saving import TakenUp, aside, gather, take_up
from instep.worker.standing import Committed, Standing
from instep.worker.update import Update


class CleanCopy:
    """One copy at most, replaced by each newer one.

    Args:
        model: as the recipe builds it.
        update: has its optimizer, scheduler and scaler.
        standing: where this worker stands.
    """

    def __init__(self, model: nn.Module, update: Update, standing: Standing) -> None:
        self._model, self._update, self._standing = model, update, standing
        self._kept: Snapshot | None = None
        self._last: Committed | None = None
        self._carried = TakenUp()

    @property
    def step(self) -> int:
        """The last committed step that is in it; -1 where there is no copy."""
        return self._carried.step if self._kept is not None else -1

    def keep(self, strategy: dict[str, Tensor]) -> None:
        """Copy the state of the last commit, in place of the copy there was.

        Args:
            strategy: what the strategy remembers since that commit.
        """
        carried = self._standing.carried._replace(strategy=strategy)
        live = gather(carried, self._model, self._update)
        live.tensors["aside"] = aside(self._model, live.tensors["model"])
        before = self._kept.tensors if self._kept is not None else {}
        tensors = {
            group: _copied(tensors, before.get(group, {}))
            for group, tensors in live.tensors.items()
        }
        self._kept = Snapshot(step=live.step, tensors=tensors, facts=live.facts)
        self._carried, self._last = carried, self._standing.last

    def give_back(self) -> None:
        """This worker stands again where it stood when the copy was made; the copy stays."""
        assert self._kept is not None, "there is no copy"
        tensors = {group: _copied(kept, {}) for group, kept in self._kept.tensors.items()}
        fresh = Snapshot(step=self._kept.step, tensors=tensors, facts=self._kept.facts)
        standing = self._standing
        standing.carried = take_up(fresh, "the copy in memory", self._model, self._update)
        standing.last, standing.settled = self._last, self._kept.step


def _copied(tensors: dict[str, Tensor], room: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies by name, in the memory of `room` where they fit; tied ones stay so."""
    ties, copies = tied_names(tensors), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name in ties:
            copies[name] = copies[ties[name]]
            continue
        place = room.get(name)
        fits = place is not None and (place.shape, place.dtype, place.device, place.stride()) == (
            tensor.shape,
            tensor.dtype,
            tensor.device,
            tensor.stride(),
        )
        copies[name] = place.copy_(tensor) if place is not None and fits else tensor.clone()
    return copies
