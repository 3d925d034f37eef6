"""The master of predictions: hands out batches, and watches whoever predicts them.

A batch needs no other, so there is no group, no generation and no commit, and most of the
master of a training (`control/master.py`) has nothing to decide here. What is the same is the
way processes start, and who watches whom: the launcher starts a fork server, which forks
workers and reports their ends; workers and server send heartbeats, and one that is silent, or
gets nothing done, is killed. A worker that ended is replaced, and its batches go to whoever
comes first. This master lives in the client: if it is killed, the others end, and the parts
that are there are taken up by the same command.
"""

from __future__ import annotations

import hmac
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from instep import spec_file
from instep.client.batches import START, Batches
from instep.client.own_server import OwnServer
from instep.client.results import failure
from instep.comm import messages as m
from instep.comm.channel import Peer
from instep.comm.endpoint import Switchboard
from instep.control.endings import signal_name
from instep.control.watch import away_s
from instep.errors import RecipeError, WorkerError
from instep.spec import JobSpec
from instep.store.joined import check_same
from instep.store.predictions import Damaged, Predictions
from instep.system.lease import Lease
from instep.system.limits import FLOOR_S, STEPS, UNKNOWN_S
from instep.system.processes import Watched
from instep.units import readable_seconds

TICK_S = 0.05
"""How long the master waits for a message."""

FIRST_S = 600.0
"""How long a worker may take to predict the first batch of all: it may compile."""

REPORT_S = 0.5
"""How long the fork server may take to report the end of a worker."""

LEAVE_S = 2.0
"""How long workers may take to end when everything is predicted."""

SAID_S = 2.0
"""Seconds between two lines of progress."""


class Ended(NamedTuple):
    """How the predictions ended."""

    samples: int
    """In the dataset; 0 if that is not known."""
    predicted: int
    """Batches that were predicted now."""
    lost: int
    """Workers that were lost, and replaced."""
    interrupted: bool


@dataclass
class _Worker:
    """A process that predicts."""

    number: int
    peer: Peer
    process: Watched
    lease: Lease
    marks: int
    """How many changes of the marks of samples it knows."""
    since: float
    """When it made progress last."""
    ready: bool = False
    hand: list[int] = field(default_factory=list)
    """Batches that it was given and has not finished, in order."""
    handled: int = 0
    """Messages of its that were handled."""
    at: tuple[str, int] = ("", -1)
    """Phase and progress of its last heartbeat."""
    killed: str = ""
    """Why it was killed from here."""
    hung: bool = False
    """Whether it was killed because it got nothing done."""
    closed_at: float = math.inf
    """When its connection closed."""
    ended_at: float | None = None
    """When it was seen to have ended."""


class PredictMaster:
    """Has a folder's batches predicted.

    Args:
        job: what the workers are told.
        folder: with a plan; takes the parts.
        batch: samples of a batch.
        workers: how many processes predict.
        say: prints a line.
        asked: the signals that have come to stop; looked at several times a second.
    """

    def __init__(
        self,
        job: JobSpec,
        folder: Predictions,
        batch: int,
        workers: int,
        say: Callable[[str], None],
        asked: list[int],
    ) -> None:
        self._job, self._folder, self._say = job, folder, say
        self._numbers, self._asked = range(workers), asked
        self._began = time.time()
        self._board = Switchboard()
        self._hub = self._board.hub
        self._server = OwnServer(self._board, folder.path / "logs", say)
        self._batches = Batches(folder.done(), batch, skip=job.data.unreadable == "skip")
        self._workers: dict[int, _Worker] = {}
        self._starting: dict[int, float] = {}  # when the fork server was asked for them
        self._confirmed = False  # whether the dataset is the one of the parts that are there
        self._lost = 0
        self._longest_s: float | None = None  # without progress, of a worker that continued
        self._known: dict[str, Any] | None = None  # the head of a part, to compare others with
        self._now = self._said = time.monotonic()
        self._first_done: float | None = None

    def serve(self) -> Ended:
        """Until every batch has a part, or a signal has come; no process is left then.

        Raises:
            InstepError: a worker failed, or workers cannot be kept alive; the text says why.
        """
        try:
            self._server.start()
            while not self._complete and not self._asked:
                self._turn()
            if self._complete:
                self._release()
        finally:
            self._server.stop()
            self._board.close()
            for worker in self._workers.values():
                worker.process.close()
        batches = self._batches
        predicted = len(batches.done) - batches.before
        return Ended(batches.samples, predicted, self._lost, not self._complete)

    @property
    def _complete(self) -> bool:
        return self._confirmed and self._batches.complete

    def _turn(self) -> None:
        for peer, message in self._hub.receive(TICK_S):
            if message is None:
                self._closed(peer)
            elif isinstance(message, m.Hello):
                self._welcome(peer, message)
            else:
                self._receive(peer, message)
        now = time.monotonic()
        away, self._now = away_s(self._now, now), now
        for worker in self._workers.values():
            worker.since += away  # nobody is to blame for a time in which this process slept
        self._server.watch(now)
        for worker in list(self._workers.values()):
            self._watch(worker, now)
        self._start_missing(now)
        for worker in self._workers.values():
            self._hand_out(worker, now)
        self._progress(now)

    def _progress(self, now: float) -> None:
        batches = self._batches
        if now - self._said < SAID_S or not batches.samples:
            return
        self._said, rate = now, ""
        new = len(batches.done) - batches.before
        if self._first_done is not None and new > 1:
            per_s = (new - 1) * batches.size / max(now - self._first_done, 1e-9)
            rate = f", {per_s:,.0f} samples/s"
        self._say(f"batch {len(batches.done):,} of {batches.total:,}{rate}")

    # ---- connections

    def _welcome(self, peer: Peer, hello: m.Hello) -> None:
        known = hmac.compare_digest(hello.token.encode(), self._board.endpoint.token.encode())
        if not known or hello.version != m.VERSION or hello.role not in ("worker", "host"):
            self._hub.drop(peer)
            return
        now, host = time.monotonic(), hello.role == "host"
        if not host and (hello.number not in self._starting or hello.number in self._workers):
            self._hub.drop(peer)  # one that was given up, or has lost its connection
            process = Watched(hello.pid)
            process.signal(signal.SIGKILL)
            process.close()
            return
        self._hub.trust(peer)
        welcome = m.Welcome(
            job=spec_file.dump(self._job),
            run=str(self._folder.path),
            started=self._began,
            recovers=True,
            marks=self._batches.deadly.marks,
            role=m.PREDICTOR,
        )
        self._hub.send(peer, welcome)
        if host:
            self._starting.clear()  # what was asked of another server
            there = [(n, worker.process.pid) for n, worker in self._workers.items()]
            self._server.connects(peer, hello.pid, now, there)
            return
        self._starting.pop(hello.number)
        lease = Lease(hello.pid, now, times=self._batches.most_times)
        marks = self._batches.deadly.changes
        worker = _Worker(hello.number, peer, Watched(hello.pid), lease, marks, now)
        self._workers[hello.number] = worker

    def _closed(self, peer: Peer) -> None:
        if peer is self._server.peer:
            self._server.leaves()
        worker = self._of(peer)
        if worker is not None:
            worker.closed_at = time.monotonic()

    def _of(self, peer: Peer) -> _Worker | None:
        return next((w for w in self._workers.values() if w.peer is peer), None)

    def _receive(self, peer: Peer, message: m.AnyMessage) -> None:
        now = time.monotonic()
        if peer is self._server.peer:
            known = (worker.process.pid for worker in self._workers.values())
            self._server.hears(now, message, known)
            if isinstance(message, m.Exited):
                self._exited(message)
            return
        worker = self._of(peer)
        if worker is None:
            self._hub.drop(peer)
            return
        worker.lease.renew(now)
        if not isinstance(message, m.Heartbeat):
            worker.handled += 1
        if isinstance(message, (m.Heartbeat, m.Failed)):
            self._hub.send(peer, m.Ack(count=worker.handled))
        self._handle(worker, message, now)

    def _handle(self, worker: _Worker, message: m.AnyMessage, now: float) -> None:
        match message:
            case m.Heartbeat(phase=phase, progress=progress):
                if worker.at != (phase, progress):
                    worker.at = phase, progress
                    self._moves(worker, now)
            case m.Emit(name="dataset_known", fields=fields):
                self._count(worker, int(fields["samples"]))
            case m.Emit(name="warning", fields=fields):
                self._say(f"worker {worker.number}: {fields['text']}")
            case m.Built():
                worker.ready, worker.since = True, now
                self._server.started = 0
                self._batches.starts()
            case m.Predicted(batch=batch):
                self._predicted(worker, batch, now)
            case m.Failed(kind="PeerError"):
                worker.killed = "its connection broke"
            case m.Failed():
                raise failure(worker.number, message, self._folder.path)

    def _count(self, worker: _Worker, samples: int) -> None:
        known = self._batches.samples
        if known and samples != known:
            raise RecipeError(
                f"the dataset of worker {worker.number} has {samples:,} samples, and that of "
                f"another has {known:,}: the function of --data has to return the same dataset in "
                "every process."
            )
        if not known:
            self._batches.count(samples)
        self._confirmed |= worker.number == 0  # it has compared the dataset with that of before

    def _predicted(self, worker: _Worker, batch: int, now: float) -> None:
        self._batches.done.add(batch)
        self._moves(worker, now)
        if batch in worker.hand:
            worker.hand.remove(batch)
        if self._first_done is None:
            self._first_done = now
        with suppress(Damaged):  # then it is predicted again, at the end
            head = self._folder.head(batch)
            if head["columns"] is not None:
                self._known = self._known or head
                check_same(self._known, head)  # at once, rather than at the end

    def _moves(self, worker: _Worker, now: float) -> None:
        """A worker has made progress."""
        if worker.hand and self._first_done is not None:
            self._longest_s = max(self._longest_s or 0.0, now - worker.since)
        worker.since = now

    # ---- workers

    def _start_missing(self, now: float) -> None:
        if self._server.peer is None or self._complete:
            return
        for number in self._numbers:
            asked = self._starting.get(number, -math.inf)
            if number not in self._workers and now - asked > UNKNOWN_S:
                self._starting[number] = now
                self._server.fork(number)

    def _hand_out(self, worker: _Worker, now: float) -> None:
        if not worker.ready or not self._confirmed or worker.killed:
            return
        given = self._batches.take(len(worker.hand), len(self._numbers), worker.marks)
        if given:
            if not worker.hand:
                worker.since = now
            worker.hand += given
            self._hub.send(worker.peer, m.Predict(batches=given))

    def _watch(self, worker: _Worker, now: float) -> None:
        if worker.process.ended:
            worker.ended_at = worker.ended_at or now
            if now - worker.ended_at > REPORT_S:  # no fork server reports it
                self._lose(worker, None, None)
            return
        if worker.killed:
            return
        how = worker.lease.turn(now)
        at_work = worker.hand if worker.ready else worker.at[0] == m.READING
        if now - worker.closed_at > FLOOR_S:
            how = "it hung up"
        elif not how and at_work and now - worker.since > (limit_s := self._limit_s(worker)):
            how = f"it got nothing done for {readable_seconds(limit_s)}"
            worker.hung = True
        if how:
            worker.killed = how
            worker.process.signal(signal.SIGKILL)

    def _limit_s(self, worker: _Worker) -> float:
        """How long it may take for what it does; each worker that was lost there doubles it."""
        usual = UNKNOWN_S
        if self._longest_s is not None:
            usual = max(usual, 2 * STEPS * self._longest_s)
        elif worker.at[0] != m.READING:
            usual = FIRST_S
        at = worker.hand[0] if worker.hand else START
        return float(usual * 2 ** self._batches.times(at))

    def _exited(self, report: m.Exited) -> None:
        """The fork server reports that a process has ended, or could not be started."""
        number, worker = report.number, self._workers.get(report.number)
        if worker is not None and worker.process.pid == report.pid:
            self._lose(worker, report.code, report.place)
        elif worker is None and number in self._starting:
            if report.pid:
                del self._starting[number]
                self._blame(number, START, report.code, report.place)
            elif self._workers and self._confirmed:  # asked again in a while
                self._say(f"worker {number} cannot be started: {report.error}; others go on")
            else:
                raise WorkerError(
                    f"worker {number} cannot be started: {report.error}. End other processes, or "
                    "use fewer --workers."
                )

    def _lose(self, worker: _Worker, code: int | None, place: m.Whereabouts | None) -> None:
        """A worker has ended: its batches are left again, and another takes its number."""
        now = time.monotonic()
        for last in self._hub.drain(worker.peer):
            self._handle(worker, last, now)
        del self._workers[worker.number]
        worker.process.close()
        self._batches.give_back(worker.hand)
        at = worker.hand[0] if worker.ready and worker.hand else START
        self._blame(worker.number, at, code, place, killed=worker.killed, hung=worker.hung)

    def _blame(
        self,
        number: int,
        at: int,
        code: int | None,
        place: m.Whereabouts | None,
        *,
        killed: str = "",
        hung: bool = False,
    ) -> None:
        """A worker was lost: give up if that has happened too often there.

        Raises:
            WorkerError: it has.
        """
        self._lost += 1
        itself = not killed and code is not None and code != -signal.SIGKILL
        how = killed or (_how(code) if code is not None else "it has ended")
        often = self._batches.lost(at, how, place, own=itself or bool(killed), dies=itself or hung)
        where = "before it had a batch" if at == START else f"at batch {at}"
        self._say(f"worker {number} was lost {where}: {how}; another takes its place")
        if often:
            log = self._folder.path / "logs" / f"worker-{number}.log"
            reading = self._batches.deadly.said(place)
            text = f"{self._batches.said(at)}: {how}{reading}.\n  full log: {log}"
            raise WorkerError(text)

    def _release(self) -> None:
        """Have the workers end by themselves."""
        for worker in self._workers.values():
            self._hub.send(worker.peer, m.Release())
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline:
            if all(worker.process.ended for worker in self._workers.values()):
                return
            for _ in self._hub.receive(TICK_S):
                pass


def _how(code: int) -> str:
    return f"it was killed by {signal_name(code)}" if code < 0 else f"it ended with code {code}"
