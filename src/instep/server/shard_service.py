"""What the servers do that have no leases: hold gradients until they count, update, go back.

A worker leaves its gradient here under the token of its lease (`Stage`), and shows the token to the
first server, which alone decides what counts. That one then has all servers make the same update
(`Prepare`, `Apply`), one at a time. Each keeps a copy in memory that outlives it, beside that of
the update before: if one is lost in between, the others go back by one (`Be`).

Nothing here waits for anybody. It knows no leases, no files but those of checkpoints, and no
master. Way in: `Further.take_in`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.engine.state.host_copy import HostCopy
from instep.errors import CheckpointError
from instep.records import Attempt
from instep.server.door import Guest
from instep.server.messages import (
    Apply,
    Be,
    End,
    Give,
    Prepare,
    Pull,
    ServerAnswer,
    Stage,
    Write,
)
from instep.server.shard import Holding
from instep.state.files.manifest import FileEntry
from instep.state.files.room import LAST_RESERVE_BYTES, RESERVE_BYTES
from instep.state.files.staging import write_tensors
from instep.state.pieces import SHARD
from instep.state.save import CheckpointShard
from instep.state.snapshot import Snapshot
from instep.sync.norm import summed
from instep.system.host_memory import NoRoom

HELD = "held"
"""The group of a copy in which a server has what it holds."""


class Further:
    """A server that has no leases.

    Args:
        holding: what it has.
        copy: where copies are kept, and lie from the process before.
        place: which of the servers it is.
        first: number of the process that is the first server.
        names: of the parameters.
        at: course and number of the update at which `holding` is.
    """

    def __init__(
        self,
        holding: Holding,
        copy: HostCopy,
        *,
        place: int,
        first: int,
        names: Sequence[str],
        at: tuple[int, int],
    ) -> None:
        self._holding, self._copy, self._place = holding, copy, place
        self._first, self._names = first, list(names)
        self.at = at
        """Course and number of the last update."""
        self.ended: End | None = None
        """What the first server has said of the end."""
        self.generation = 0
        """In which updates are made."""
        self._met = False  # whether the first server has said what the last update is
        self._guests: dict[int, Guest] = {}  # the newest of each process
        self._staged: dict[int, Stage] = {}  # by worker; the gradient is its guest's body
        self._waiting: dict[Guest, Pull] = {}

    def take_in(self, guest: Guest, question: Any) -> None:
        """A question has arrived; or None in place of it, from one that is gone."""
        before = self._guests.get(guest.worker)
        if before is not guest and before is not None:
            if question is None:
                return
            self._leave(before)  # it came again
            before.close()
        if question is None:
            self._leave(guest)
            return
        self._guests[guest.worker] = guest
        if isinstance(question, Stage):
            self._staged[guest.worker] = question
            guest.answer(ServerAnswer())
        elif isinstance(question, Pull):
            self._waiting[guest] = question
        elif guest.worker != self._first:
            guest.close()
        elif isinstance(question, Give):
            given = self._holding.give(guest.worker, 0, self.at[1])
            self._holding.leave(guest.worker)
            guest.answer(ServerAnswer(), given.flats)
        else:
            guest.answer(self._answer(question))
        if self._met:
            for each, pull in self._waiting.items():
                given = self._holding.give(each.worker, pull.token, self.at[1])
                each.answer(ServerAnswer(since=given.since), given.flats)
            self._waiting.clear()

    def _leave(self, guest: Guest) -> None:
        self._guests.pop(guest.worker, None)
        self._staged.pop(guest.worker, None)
        self._waiting.pop(guest, None)
        self._holding.leave(guest.worker)

    def _answer(self, question: Prepare | Apply | Be | Write | End) -> ServerAnswer:
        match question:
            case Prepare():
                return self._prepare(question)
            case Apply():
                return self._apply(question)
            case Be(course, version):
                return self._be((course, version))
            case Write():
                return write_shard(question, self._place, self._holding, self._names)
            case End():
                self.ended = question
                return ServerAnswer()

    def _prepare(self, asked: Prepare) -> ServerAnswer:
        staged = self._staged.get(asked.worker)
        gave = self._holding.gave(asked.worker, asked.token)
        if staged is None or staged.token != asked.token or not gave:
            return ServerAnswer(fine=False)
        del self._staged[asked.worker]
        gradients = self._guests[asked.worker].body.pieces
        squares = self._holding.receive(asked.worker, asked.version, staged.present, gradients)
        return ServerAnswer(squares=summed(squares))

    def _apply(self, asked: Apply) -> ServerAnswer:
        course, version = self.at
        if asked.version != version + 1:  # it was sent before the first server came back
            return ServerAnswer(fine=False, keeps=self._copy.lasts)
        self._holding.take_options(asked.options)
        if asked.moves:
            self._holding.move(asked.version, asked.factor)
        self.at = course, asked.version
        if not asked.keeps and self._copy.lasts:
            self._copy.drop()
        self.keep()
        return ServerAnswer(keeps=self._copy.lasts)

    def late(self, guest: Guest, question: Any) -> bool:
        """Whether a question is answered that comes after the end; in the guest's thread.

        Workers are turned away: they ask the first server next, which tells them of the end. That
        one may ask again, as its connection broke.
        """
        if guest.worker != self._first:
            guest.close()
        elif isinstance(question, End):
            self.ended = question
            guest.answer(ServerAnswer())
        elif question == Be(*self.at):
            guest.answer(ServerAnswer())
        else:
            return False
        return True

    def end_in(self, generation: int) -> End | None:
        """The end, if the first server has said that the run ends in this generation or before."""
        early = self.ended is not None and self.ended.generation <= generation
        return self.ended if early else None

    def go_on(self, generation: int) -> None:
        """Forget an end in an earlier generation: somebody was lost before all had ended."""
        if self.ended is not None and self.ended.generation < generation:
            self.ended = None

    def keep(self) -> None:
        """Copy what is held into memory that outlives this process."""
        if not self._copy.lasts:
            return
        kept = Snapshot(step=0, tensors={HELD: self._holding.kept()}, facts={})
        try:
            self._copy.keep(kept, Attempt(*self.at, self.generation))
        except NoRoom:  # the first server says so
            self._copy.drop()

    def _be(self, at: tuple[int, int]) -> ServerAnswer:
        held = next((each for each in self._copy.held() if each[:2] == at), None)
        if self.at != at:
            if held is None:
                return ServerAnswer(fine=False)
            self._holding.take(self._copy.back_to(held).tensors[HELD])
            self._holding.forget()
            self._staged.clear()
            self.at = at
        elif held is None:
            self.keep()
        self._holding.drop()
        self._met = True
        return ServerAnswer()


def write_shard(asked: Write, place: int, holding: Holding, names: Sequence[str]) -> ServerAnswer:
    """Write the state of the optimizer for what a server holds, if there is any.

    Args:
        asked: where.
        place: which of the servers it is.
        holding: what it has.
        names: of the parameters.
    """
    shard = holding.shard(names)
    try:
        reserve = LAST_RESERVE_BYTES if asked.last else RESERVE_BYTES
        path = path_of(asked, place)
        entry = write_tensors(path, shard, reserve=reserve) if shard else None
    except CheckpointError as error:
        cause = error.__cause__
        errno = cause.errno if isinstance(cause, OSError) else None
        return ServerAnswer(fine=False, why=str(error), errno=errno or 0)
    return (
        ServerAnswer(size_bytes=entry.size_bytes, sha256=entry.sha256) if entry else ServerAnswer()
    )


def written_by(
    asked: Write, told: Sequence[ServerAnswer]
) -> tuple[dict[str, CheckpointShard], int | None]:
    """The files of a checkpoint that servers have written; or which server could not.

    Args:
        asked: of each of them.
        told: what each has answered.

    Returns:
        By the name of the group, the files; and None. If one could not write its file, those of all
        others are removed: none, and its place.
    """
    wrote = {place: each for place, each in enumerate(told) if each.size_bytes}
    failed = next((place for place, each in enumerate(told) if not each.fine), None)
    if failed is not None:
        for place in wrote:
            path_of(asked, place).unlink(missing_ok=True)
        return {}, failed
    return {
        f"{SHARD}{place}": CheckpointShard(
            path_of(asked, place), FileEntry(each.size_bytes, each.sha256)
        )
        for place, each in wrote.items()
    }, None


def path_of(asked: Write, place: int) -> Path:
    """The file of a server."""
    return Path(f"{asked.begins}{place}{asked.ends}")
