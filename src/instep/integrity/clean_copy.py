"""A copy of the last state that was checked and found right, to go back to.

It is in this worker's memory, and as large as parameters and optimizer state together. The
checks themselves are in `corruption.py`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from instep.engine.state.committed import Commit, CommittedState
from instep.state.snapshot import Snapshot, tied_names


class CleanCopy:
    """One copy at most, replaced by each newer one.

    Args:
        state: what this worker holds.
    """

    def __init__(self, state: CommittedState) -> None:
        self._state = state
        self._kept: Snapshot | None = None
        self._last: Commit | None = None

    @property
    def step(self) -> int:
        """The step of the copy; -1 if there is none."""
        return self._kept.step if self._kept is not None else -1

    def keep(self) -> None:
        """Copy the state of the last commit, in place of the copy there was."""
        live = self._state.capture()
        before = self._kept.tensors if self._kept is not None else {}
        tensors = {
            group: _copied(tensors, before.get(group, {}))
            for group, tensors in live.tensors.items()
        }
        self._kept = replace(live, tensors=tensors)
        self._last = self._state.last

    def give_back(self) -> None:
        """Restore the state of the copy, and keep the copy.

        A new course begins, so commits after the copy do not count any more.
        """
        assert self._kept is not None, "there is no copy"
        tensors = {group: _copied(kept, {}) for group, kept in self._kept.tensors.items()}
        fresh = replace(self._kept, tensors=tensors)
        state, course = self._state, self._state.progress.course + 1
        state.restore(fresh, "the copy in memory")
        state.progress = state.progress._replace(course=course)
        state.last, state.settled = self._last, self._kept.step


def _copied(tensors: dict[str, Tensor], room: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies by name, in the memory of `room` where they fit; tied tensors stay tied."""
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
