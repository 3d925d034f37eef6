"""What process 0 does for a run under `instep.join`: its folder, and a watchdog of the master.

The master is a process of its own, as under `instep run`; a thread of process 0 is its
client (`watchdog.py`) and replaces a master that is lost or hangs. It ends with process 0.
The other processes find the master where all meet (`meeting.py`). If the run cannot
begin or is complete, process 0 tells them so in the master's place (`refusal.py`). It
knows nothing of models and loops. Ways in: `Host` for process 0, `meet` for the others.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from instep.client.copying import check_not_elsewhere, followed
from instep.client.job_checks import with_options
from instep.client.join import meeting as meetings
from instep.client.join import refusal
from instep.client.join.meet import call
from instep.client.join.meeting import Meeting
from instep.client.join.placement import Placement, host_address, is_loopback
from instep.client.results import about, failure, finish, recipe_sha256, refused
from instep.client.watchdog import MasterWatchdog
from instep.comm.encryption.certificates import Authority, Identity
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.messages import Over, Welcome
from instep.control.changed_job import check_changes
from instep.control.journal import Begin, Journal
from instep.control.resume import prepare
from instep.engine.member import Member
from instep.errors import InstepError, RunError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.plain_file import read_plain
from instep.report.terminal.closing import show_ending
from instep.store.folder import (
    BEGINNING,
    StartPoint,
    held,
    id_of,
    make_run_folder,
    remove_run_folder,
    resume_hint,
)
from instep.store.run_folder import RunFolder
from instep.system import causes
from instep.words import some_workers


class Host:
    """The run folder of a start, and its master or the answer in its place.

    Args:
        place: of this process, the first of its start.
        job: what to run.
        runs: folder of run folders.
        meeting: where the others look for its master.
        quiet: print no progress.
        resume: continue the run of this name, if there is one.
        own_loop: the script has its own training loop, so the job does not know its length.

    Raises:
        InstepError: the run cannot begin. The other processes raise the same.
    """

    def __init__(
        self,
        place: Placement,
        job: JobSpec,
        runs: Path,
        meeting: Meeting,
        *,
        quiet: bool,
        resume: bool,
        own_loop: bool,
    ) -> None:
        self._meeting = meeting
        self._hold = ExitStack()
        self._over: Over | None = None
        self._broke: BaseException | None = None
        self._quiet = quiet
        self._note = {"quiet": quiet, "json": True, "about": {**about(job), "started_by": "join"}}
        self._job, self._place, self._start_point = job, place, BEGINNING
        with refusal.announced(place, meeting):
            meetings.remove_old(runs)
            with contextlib.suppress(OSError):
                meeting.remove(meetings.ENDPOINT)  # of a former start
            address = meeting.host or host_address(place)
            private = job.network == "private" or is_loopback(address)
            self._switchboard = Switchboard(address, authority=None if private else Authority())
        self._failed: Collection[int] = ()  # processes that failed before they connected
        self._late = threading.Timer(meetings.SAY_AFTER_S, self._say_who_is_missing)
        self._late.daemon = True
        self._began = time.time()
        try:
            self._check_notes()
            start_point = self._take_folder(runs, resume, own_loop)
            self._to_train = start_point is not None
            if start_point is not None:
                self._start_point = start_point
                Journal(self.folder, Begin(time.time(), start_point)).close()
            if place.size > 1:
                self._say_where()
                try:
                    self._check_notes()  # again: reading a checkpoint takes time
                except InstepError:
                    if start_point == BEGINNING:
                        remove_run_folder(self.folder)
                    raise
        except BaseException as error:
            self._hold.close()
            if isinstance(error, Exception):
                self._refuse(error)
            self._switchboard.close()
            meeting.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="instep master", daemon=True)
        self._thread.start()
        if place.size > 1 and self._to_train:
            self._late.start()

    def _say_where(self) -> None:
        """Let the other processes find the master."""
        board = self._switchboard
        try:
            meetings.write(self._meeting, board.endpoint, board.authority, self.folder.name)
        except OSError as error:
            raise RunError(
                f"{error.filename2 or error.filename}: {error.strerror}, so the processes of this "
                "start cannot meet there. Remove it, or give rendezvous='HOST:PORT'."
            ) from None

    def _check_notes(self) -> None:
        """Refuse to begin if a process failed before it could connect."""
        notes = refusal.notes(self._meeting, 0)
        self._failed = {*self._failed, *notes}
        for number, error in notes.items():
            error.args = (f"process {number} failed: {error}",)
            raise error

    def _take_folder(self, runs: Path, resume: bool, own_loop: bool) -> StartPoint | None:
        """Lock a run folder; returns where training starts, None if the run is complete."""
        job = self._job
        if not (resume and (runs / job.name / "job.toml").is_file()):
            if resume:
                check_not_elsewhere(job, runs)
            job = self._job = with_options(job)
            self.folder = make_run_folder(runs, job, named=False)
            self._hold.enter_context(held(self.folder))
            return BEGINNING
        self.folder = (runs / job.name).resolve()
        self._hold.enter_context(held(self.folder))
        run = RunFolder(self.folder)
        job = self._job = with_options(job, run.spec)
        # a numbered run is found by its folder's name, which is not its job's
        check_changes(msgspec.structs.replace(run.spec, name=job.name), job)
        if not own_loop and is_complete(run, job):
            return None
        return prepare(self.folder, job, recipe_sha256=recipe_sha256(job), at_its_end=True)

    def _refuse(self, error: Exception) -> None:
        """Make the other processes raise what this one is about to raise."""
        answer = causes.refused(error)
        others = self._place.size - 1 - len(self._failed)
        with contextlib.suppress(OSError):  # if no file can be written, none can be read
            if others > 0:
                board = self._switchboard
                meetings.write(self._meeting, board.endpoint, board.authority)
                refusal.answer_all(self._switchboard, others, answer, self._meeting)
            else:
                self._meeting.remove(meetings.ENDPOINT)

    def _serve(self) -> None:
        board, note = self._switchboard, self._note
        try:
            if self._to_train:
                # in this thread: the kernel ends a master with the thread that started it
                with followed(self.folder, self._job, bool(note["quiet"])) as events:
                    self._over = MasterWatchdog(
                        self.folder, board, None, note, events=events
                    ).serve()
            else:
                job, now = spec_file.dump(self._job), time.time()
                answer = Welcome(
                    job=job,
                    run=str(self.folder),
                    run_id=id_of(self.folder),
                    started=now,
                    complete=True,
                    last_step=RunFolder(self.folder).last_step,
                )
                size = self._place.size
                refusal.answer_all(board, size, answer, self._meeting)
        except InstepError as error:
            self._broke = error
            with contextlib.suppress(OSError):  # who was not told yet finds no master, and comes
                why, brief_s, size = causes.refused(error), refusal.BRIEFLY_S, self._place.size
                refusal.answer_all(board, size, why, self._meeting, timeout_s=brief_s)
        except BaseException as error:
            self._broke = error
        finally:
            self._switchboard.close()  # a process that still waits learns that the master is gone

    def member(self) -> Member:
        """Process 0 is worker 0 of its own master."""
        board = self._switchboard
        return call(replace(board.endpoint, credentials=board.issue(Identity("worker", 0))), 0)

    def formed(self) -> None:
        """All processes are here. The meeting stays open, so that a late process is refused."""
        self._late.cancel()

    def _missing(self) -> list[int]:
        """Processes that have not connected in this session of the run."""
        joined = RunFolder(self.folder).named("worker_joined")
        there = {0, *(event["worker"] for event in joined if event["time"] >= self._began)}
        return [number for number in range(self._place.size) if number not in there]

    def _say_who_is_missing(self) -> None:
        """In a thread: print which processes are missing, also if the run is quiet."""
        if missing := self._missing():
            who = some_workers(missing).replace("workers", "processes").replace("worker", "process")
            print(
                f"instep: waiting for {who} of {self._place.size} to call instep.join",
                file=sys.stderr,
            )

    def end(self) -> dict[str, Any]:
        """Wait for the run's end, write its report, and unlock its folder.

        Raises:
            InstepError: a worker failed.
        """
        with contextlib.closing(self._meeting):
            try:
                self._thread.join()
                self._late.cancel()
                self._meeting.remove(meetings.ENDPOINT)
                if isinstance(self._broke, RunError):
                    raise RunError(f"{self._broke}{resume_hint(self.folder)}")
                if isinstance(self._broke, InstepError):
                    raise self._broke
                if self._broke is not None:
                    raise RunError(f"the run's master failed: {self._broke!r}.") from self._broke
                over = self._over
                failed = over.failed if over is not None else None
                missing = self._missing() if failed is not None else []
                if failed is not None and refused(failed, self.folder, self._start_point):
                    remove_run_folder(self.folder)
                else:
                    summary = self._summary()
            finally:
                self._hold.close()
            if over is not None and failed is not None:
                error = failure(over.worker, failed, self.folder)
                refusal.leave_notes(self._meeting, missing, error)
                raise error
        if not self._quiet:
            show_ending(summary, self.folder)
        return summary

    def _summary(self) -> dict[str, Any]:
        file = self.folder / "summary.json"
        if self._to_train or not file.is_file():
            return finish(self.folder)
        try:
            there = json.loads(read_plain(file))
        except (OSError, ValueError, RecursionError):
            there = None
        if isinstance(there, dict):
            return there
        return finish(self.folder)  # the file is damaged


def is_complete(run: RunFolder, job: JobSpec) -> bool:
    """Whether a run completed, and the job asks for no more steps."""
    length = run.plan.batches_of(job).length(job)
    return run.outcome == "completed" and 0 < length <= run.last_step
