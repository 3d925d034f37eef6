"""Agreement of one replica's processes around steps: on their generation, and on continuing.

A group of all workers may break for some of them and not for others; but what a replica computes,
all its processes compute. So each asks the others before it continues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.errors import PeerError
from instep.worker.replica.replica import Replica


class FellowFailed(PeerError):
    """Another process of this replica lost a peer, and this one may not have noticed."""

    def __init__(self) -> None:
        super().__init__("another process of this replica has lost the group.")


class NoFellows:
    """Stands for the other processes of a replica that has none."""

    def meet(self) -> None:
        """Wait until all of them have the new generation.

        Raises:
            ReplicaBroken: this process is to end.
        """

    def agree(self, well: bool) -> bool:
        """Ask whether all of them can continue; each calls it once after it has tried to join a
        group, and after every step."""
        return well

    def go_on(self) -> None:
        """After a step, continue only if all of them can: none may wait in a pass for one that has
        left the group.

        Raises:
            FellowFailed: one of them cannot.
        """
        if not self.agree(True):
            raise FellowFailed

    def broke(self, error: PeerError) -> None:
        """End, where the group inside a replica came apart: its processes start again.

        Raises:
            ReplicaBroken: this process is to end.
        """


class Fellows(NoFellows):
    """The other processes of a replica that is a mesh.

    Args:
        replica, member, engine: this process's.
        interrupt: aborts what this process exchanges with other replicas.
    """

    def __init__(
        self, replica: Replica, member: Member, engine: Engine, interrupt: Callable[[], None]
    ) -> None:
        self._replica, self._member, self._engine = replica, member, engine
        self._interrupt = interrupt

    def meet(self) -> None:
        """Wait as `NoFellows.meet` says."""
        while True:  # as often as the one that is furthest behind has generations to wait for
            form = self._member.form
            assert form is not None, "no generation yet"
            own = form.generation
            present = self._ask(own)
            if min(present) == max(present):
                return
            if own < max(present):
                self._member.wait_for_group()

    def agree(self, well: bool) -> bool:
        """Ask as `NoFellows.agree` says."""
        if not well:
            self._interrupt()  # one of them may wait for this process, and not know
        return bool(min(self._ask(int(well))))

    def _ask(self, own: int) -> list[int]:
        """A number of each; all call it at the same time."""
        try:
            return self._replica.gather(own)
        except PeerError as error:
            self.broke(error)

    def broke(self, error: PeerError) -> NoReturn:
        """End as `NoFellows.broke` says."""
        if self._engine.started:
            self._member.broken(error, holds=False)
        self._member.wait_to_be_killed()
