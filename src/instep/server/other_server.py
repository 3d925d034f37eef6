"""A server without leases, as a process of a run: it answers until the first server ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from instep.comm.alone import AloneComm
from instep.comm.protocol.messages import Heartbeat
from instep.engine.trial_result import Trial
from instep.errors import PeerError
from instep.server.connect import tell
from instep.server.door import Door
from instep.server.messages import Question
from instep.server.server import TrainingServer
from instep.server.shard_service import Further
from instep.server.tensor_channel import LOOK_S
from instep.worker.loop.after_commit import Step

FLUSH_S = 1.0
"""How often the bytes that this process has sent and received are told."""

_NOWHERE = -1, -1


class Following(TrainingServer):
    """One of the servers after the first; as `TrainingServer`."""

    _door: Door | None = None
    _further: Further | None = None

    def _try(self) -> Trial:
        return Trial(merge=False, reason="a server runs no pass", verdict="yes")

    def join(self) -> None:
        """Begin to answer, with what the process before this one has left, if it has."""
        self.member.holds = bool(self._copy.held())
        super().join()

    def _form(self) -> None:
        member, form = self.member, self.member.form
        assert form is not None, "no generation yet"
        if form.checkpoint is not None:
            self._copy.clear()
            self.engine.begin(AloneComm(), AloneComm())
            self._open()
        elif self._further is None:
            self._open()
        self.engine.state.inside(form.generation)
        self.sized(len(form.members))
        member.formed()

    def _open(self) -> None:
        member, progress = self.member, self.engine.state.progress
        assert member.form is not None, "no generation yet"
        at = progress.course, self._portions.before(progress.step)
        if self._copy.held() or (member.form.checkpoint is None and member.checkpoint is not None):
            at = _NOWHERE  # the first server says where
        if self._door is not None:
            self._door.close()
        holding = self._made_holding()
        self._further = Further(
            holding,
            self._copy,
            place=self._place,
            first=member.number - self._place,
            names=self._names,
            at=at,
        )
        given = member.outside, holding.room, member.credentials
        self._door = Door(
            *given,
            token=member.token,
            most=2 * member.job.workers,  # all may come at once
            asks=Question,
            sums=holding.coded,
        )
        tell(member, self._place, self._door)

    def _report_ready(self) -> None:
        self._announce()

    # ---- until the end

    def steps(self) -> Iterator[Step]:
        """Answer to the end of the run; yields nothing."""
        yield from ()
        while not self._serve():
            self._regroup()
        self.close()

    def _serve(self) -> bool:
        """Answer to the end of a generation; whether the run ends with it."""
        further, door = self._further, self._door
        assert further is not None, "join() comes first"
        assert door is not None, "it is opened with the rest"

        def take_in() -> None:
            if (arrived := door.next(LOOK_S)) is not None:
                further.take_in(*arrived)

        self.activity.enter("exchange")
        flushed = time.monotonic()
        further.go_on(self.engine.state.generation)
        door.go_on()
        while (end := further.end_in(self.engine.state.generation)) is None:
            try:
                self._keep_up()
            except PeerError as error:  # another process may have this one's place
                self.member.broken(error, holds=True)
                return False
            further.generation = self.engine.state.generation
            take_in()
            if time.monotonic() - flushed > FLUSH_S:
                self.member.records.flush()
                flushed = time.monotonic()
        door.end(further.late)
        # the first server may yet have to do again what follows its last step
        return self.member.done(end.step, end.rule, finite=end.finite, meanwhile=take_in)

    def _heartbeat(self) -> Heartbeat:
        found = super()._heartbeat()
        done = self._further.at[1] if self._further is not None else 0
        return msgspec.structs.replace(found, progress=found.progress + max(0, done))

    def close(self) -> None:
        """Close all connections too."""
        super().close()
        if self._door is not None:
            self._door.close()
