"""When commits are copied into memory of the host, and what is done with the copies."""

from __future__ import annotations

import torch

from instep.comm.base import Comm
from instep.engine.member import Member
from instep.engine.state.committed import CommittedState
from instep.engine.state.host_copy import HostCopy
from instep.engine.state.own_state import OwnState
from instep.records import Attempt
from instep.system.host_memory import NoRoom
from instep.units import readable_bytes


class CopiedCommits:
    """Keeps a copy of the last commit of a rank of a mesh, while no other replica has it.

    Args:
        member: this worker's membership in the run.
        state, own: of the last commit.
    """

    def __init__(self, member: Member, state: CommittedState, own: OwnState) -> None:
        self._member, self._state, self._own = member, state, own
        self._ranks = member.job.mesh.ranks
        self._copy = HostCopy()
        self._uncopied = [0.0] * 3
        """Where this process has no room for its copy: 1, the bytes that it needs, those it has."""

    def take(self, comm: Comm, device: torch.device) -> int | None:
        """Take up what the processes before this replica's have left in memory of their host, if
        all of it is of one commit; all processes of the replica call it.

        Returns:
            The step; None where nothing was taken.
        """
        found = self._copy.of_all(comm, device)
        if found is None:
            return None
        self._state.take(found[1], "the memory of this host")
        self._own.take_what_was_left()
        step = self._state.progress.step
        self._state.settled = max(0, step - 1)  # what follows the commit may not have been done
        return step

    def begin(self, members: int, *, from_peers: bool) -> None:
        """Begin a generation of so many members.

        Args:
            from_peers: whether the state came from replicas that may be gone.
        """
        if members > self._ranks:
            self._copy.clear()  # it grows old, and the other replicas have the state
        if from_peers:
            self.keep()

    def keep(self) -> None:
        """Where no other replica could restore this one, copy the commit into host memory."""
        form, copy = self._member.form, self._copy
        if form is None or not copy.lasts or not self._member.recovers:
            return
        if len(form.members) > self._ranks:
            return
        course, number = self._state.progress.course, self._state.number
        try:
            copy.keep(self._state.for_another(), Attempt(course, number, form.generation))
        except NoRoom as error:
            copy.drop()
            self._uncopied = [1.0, float(error.needed), float(error.left)]

    @property
    def notes(self) -> list[float]:
        """What this process says in each step: whether it has no room, what it needs and has."""
        return self._uncopied

    def judge(self, uncopied: list[float], comm: Comm) -> None:
        """Go without copies, where a process of this replica has no room for its own.

        Args:
            uncopied: the notes of all, summed.
            comm: the group.
        """
        count, needed, left = uncopied
        if not count:
            return
        self._copy.drop()
        self._uncopied = [0.0] * len(uncopied)
        if comm.rank == 0:
            each, there = (readable_bytes(bytes_ / count) for bytes_ in (needed, left))
            self._member.emit(
                "warning",
                text=f"no memory for copies of the last commit: {count:.0f} of {comm.size} "
                f"processes need {each} each, and "
                f"{f'may take {there}' if left < needed else 'the system refuses it'}. Training "
                "continues without copies: if a process is lost, it goes on from the last "
                "checkpoint (checkpoint.every).",
            )

    def clear(self) -> None:
        """Forget what was copied: a checkpoint has the state."""
        self._copy.clear()
