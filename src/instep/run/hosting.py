"""Process 0's other half under `instep.join`: the run folder, and the master in a thread.

The other processes find the master by the meeting file (`placement.py`).
Where there is nothing for them to do, because the run cannot go on or is
complete, they are told so in the master's stead (`one_answer.py`). Models
and loops are none of its business.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from instep import spec_file
from instep.comm.messages import Refused, Welcome
from instep.errors import InstepError, PeerError, RunError
from instep.report.run_folder import RunFolder
from instep.run import blame, placement
from instep.run.client import about, failure, finish, recipe_sha256, refused
from instep.run.folder import BEGINNING, Origin, held, make_run_folder, remove_run_folder
from instep.run.launch.base import Switchboard
from instep.run.master import Master, Outcome
from instep.run.member import Member
from instep.run.one_answer import answer_all
from instep.run.placement import Placement
from instep.run.resume import check_changes, prepare
from instep.spec import JobSpec


class Host:
    """The run folder of a start, and whoever answers its processes.

    Args:
        place: of this process, the first of its start.
        job: what to run.
        runs: folder of run folders.
        quiet: print no progress.
        resume: go on with the run of this name, if there is one.
        own_loop: its length is the script's business, not the job's.

    Raises:
        InstepError: there is nothing to join. The other processes raise the same.
    """

    def __init__(
        self,
        place: Placement,
        job: JobSpec,
        runs: Path,
        *,
        quiet: bool,
        resume: bool,
        own_loop: bool,
    ) -> None:
        self._meeting = placement.meeting_file(runs, place)
        self._hold = ExitStack()
        self._master: Master | None = None
        self._outcome: Outcome | None = None
        self._broke: BaseException | None = None
        self._job, self._place, self._origin = job, place, BEGINNING
        self._switchboard = Switchboard(placement.host_address(place))
        try:
            origin = self._take_folder(runs, resume, own_loop)
            if origin is not None:
                self._origin = origin
                self._master = self._make_master(origin, quiet)
            if place.size > 1:
                placement.invite(self._meeting, self._switchboard.seat)
        except BaseException as error:
            self._hold.close()
            if isinstance(error, Exception):
                self._refuse(error)
            self._switchboard.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="instep master", daemon=True)
        self._thread.start()

    def _take_folder(self, runs: Path, resume: bool, own_loop: bool) -> Origin | None:
        """Hold a run folder; from where the run goes on, None where it is complete."""
        job = self._job
        if not (resume and (runs / job.name / "job.toml").is_file()):
            self.folder = make_run_folder(runs, job, named=False)
            self._hold.enter_context(held(self.folder))
            return BEGINNING
        self.folder = (runs / job.name).resolve()
        self._hold.enter_context(held(self.folder))
        run = RunFolder(self.folder)
        # one that was numbered has its job's name, but is found by its folder's
        check_changes(msgspec.structs.replace(run.spec, name=job.name), job)
        if not own_loop and is_complete(run, job):
            return None
        return prepare(self.folder, job, recipe_sha256=recipe_sha256(job), at_its_end=True)

    def _make_master(self, origin: Origin, quiet: bool) -> Master:
        return Master(
            self._job,
            self.folder,
            self._switchboard,
            views=[] if quiet else [_lines(self._job, self.folder)],
            hosted=False,
            started=time.time(),
            about={**about(self._job), "started_by": "join"},
            origin=origin,
        )

    def _refuse(self, error: Exception) -> None:
        """Have the other processes raise what this one is about to raise."""
        word = blame.failed(error, 0, "")
        answer = Refused(kind=word.kind, text=word.cause, exit_code=word.exit_code)
        others = self._place.size - 1
        with contextlib.suppress(OSError):  # where no file can be written, none can be read
            if others:
                placement.invite(self._meeting, self._switchboard.seat)
                answer_all(self._switchboard, others, answer, self._meeting)

    def _serve(self) -> None:
        try:
            if self._master is not None:
                self._outcome = self._master.serve()
            else:
                answer_all(self._switchboard, self._place.size, self._over(), self._meeting)
        except BaseException as error:
            self._broke = error
        finally:
            self._switchboard.close()  # whoever still waits for the master learns that it is gone

    def _over(self) -> Welcome:
        job = spec_file.dump(self._job)
        return Welcome(job=job, run=str(self.folder), started=time.time(), complete=True)

    def member(self) -> Member:
        """Process 0 is worker 0 of its own master."""
        return Member(self._switchboard.seat, 0)

    def uninvite(self) -> None:
        """All have come; the meeting file has done its work."""
        self._meeting.unlink(missing_ok=True)

    def end(self) -> dict[str, Any]:
        """Wait for the run's end, write its report, and let go of its folder.

        Raises:
            InstepError: a worker failed.
        """
        try:
            self._thread.join()
            self.uninvite()
            if isinstance(self._broke, InstepError):
                raise self._broke
            if self._broke is not None:
                raise RunError(f"the run's master failed: {self._broke!r}.") from self._broke
            blamed = self._outcome.blame if self._outcome is not None else None
            if blamed is not None and refused(blamed.failed, self.folder, self._origin):
                remove_run_folder(self.folder)
            else:
                summary = self._summary()
        finally:
            self._hold.close()
        if blamed is not None:
            raise failure(blamed.worker, blamed.failed, self.folder)
        return summary

    def _summary(self) -> dict[str, Any]:
        file = self.folder / "summary.json"
        if self._master is not None or not file.is_file():
            return finish(self.folder)
        there: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return there


def is_complete(run: RunFolder, job: JobSpec) -> bool:
    """Whether a run came to its end, and that end is not before the job's."""
    length = job.train.steps or job.train.passes * run.epoch_steps
    return run.outcome == "completed" and 0 < length <= run.last_step


def meet(meeting: Path, rank: int) -> Member:
    """Join the master that process 0 runs; a left-over invitation is waited out.

    Raises:
        InstepError: process 0 refused to begin, or does not come.
    """
    stale: str | None = None
    while True:
        seat = placement.find(meeting, stale)
        try:
            return Member(seat, rank)
        except PeerError:
            stale = seat.token


def _lines(job: JobSpec, folder: Path) -> Any:
    from instep.report.live import make_view

    return make_view(job, folder, json=True)  # several processes may share this terminal
