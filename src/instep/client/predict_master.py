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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from instep import spec_file
from instep.client.deadly_samples import DeadlySamples
from instep.client.results import failure
from instep.comm import messages as m
from instep.comm.channel import Peer
from instep.comm.endpoint import Switchboard
from instep.control.endings import signal_name
from instep.errors import InstepError, RecipeError, RunError, WorkerError
from instep.launch.local import LocalLauncher
from instep.plain_file import read_plain
from instep.spec import JobSpec
from instep.store.folder import host_log
from instep.store.joined import check_same
from instep.store.predictions import Damaged, Predictions
from instep.system.lease import Lease
from instep.system.limits import FLOOR_S, STEPS, UNKNOWN_S
from instep.system.processes import Watched
from instep.units import readable_seconds
from instep.words import plural

TICK_S = 0.05
"""How long the master waits for a message."""

IN_HAND = 4
"""Batches that a worker has at most, so that it can read ahead."""

FIRST_S = 600.0
"""How long a worker may take for a batch before one has been predicted: it may compile."""

MOST_OWN, MOST_KILLED = 3, 10
"""After so many workers were lost at one batch, by themselves or by SIGKILL, none is started."""

REPORT_S = 0.5
"""How long the fork server may take to report the end of a worker."""

SPARE_S = 2.0
"""How long the spare of a lost fork server may take to connect."""

MOST_SERVERS = 5
"""Fork servers that are started without one worker that gets ready."""

LEAVE_S = 2.0
"""How long workers may take to end when everything is predicted."""

SAID_S = 2.0
"""Seconds between two lines of progress."""

_START = -1
"""Stands for a batch where a worker was lost before it could predict."""


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
    handled: int = 0
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
        self._job, self._folder, self._batch, self._say = job, folder, batch, say
        self._numbers, self._asked = range(workers), asked
        self._began = time.time()
        self._board, self._launcher = Switchboard(), LocalLauncher()
        self._hub = self._board.hub
        self._host: Peer | None = None
        self._host_lease: Lease | None = None
        self._host_lost = time.monotonic()
        self._servers = 0
        self._workers: dict[int, _Worker] = {}
        self._starting: dict[int, float] = {}
        self._stopped: dict[int, float] = {}
        self._samples = 0
        self._confirmed = False
        self._done = folder.done()
        self._before = len(self._done)
        self._left: list[int] = []
        self._losses = Counter[int]()
        self._killed = Counter[int]()
        self._lost = 0
        self._longest_s: float | None = None
        self._known: dict[str, Any] | None = None
        self._deadly = DeadlySamples(skip=job.data.unreadable == "skip")
        self._said = time.monotonic()
        self._first_done: float | None = None

    def serve(self) -> Ended:
        """Until every batch has a part, or a signal has come; no process is left then.

        Raises:
            InstepError: a worker failed, or workers cannot be kept alive; the text says why.
        """
        try:
            self._start_server()
            while not self._complete and not self._asked:
                self._turn()
            interrupted = not self._complete
            if not interrupted:
                self._release()
        finally:
            self._launcher.stop()
            self._board.close()
            for worker in self._workers.values():
                worker.process.close()
        return Ended(self._samples, len(self._done) - self._before, self._lost, interrupted)

    @property
    def _batches(self) -> int:
        return -(-self._samples // self._batch)

    @property
    def _complete(self) -> bool:
        return self._confirmed and len(self._done) == self._batches

    def _turn(self) -> None:
        for peer, message in self._hub.receive(TICK_S):
            if message is None:
                self._closed(peer)
            elif isinstance(message, m.Hello):
                self._welcome(peer, message)
            else:
                self._receive(peer, message)
        now = time.monotonic()
        self._watch_server(now)
        for worker in list(self._workers.values()):
            self._watch(worker, now)
        self._start_missing(now)
        for worker in self._workers.values():
            self._hand_out(worker, now)
        self._progress(now)

    def _progress(self, now: float) -> None:
        if now - self._said < SAID_S or not self._samples:
            return
        self._said = now
        rate = ""
        new = len(self._done) - self._before
        if self._first_done is not None and new > 1:
            per_s = (new - 1) * self._batch / max(now - self._first_done, 1e-9)
            rate = f", {per_s:,.0f} samples/s"
        self._say(f"batch {len(self._done):,} of {self._batches:,}{rate}")

    # ---- the fork server

    def _start_server(self) -> None:
        self._servers += 1
        if self._servers > MOST_SERVERS:
            raise RunError(f"fork servers end again and again: {self._server_said()}")
        self._launcher.start(self._board.endpoint, self._folder.path / "logs")
        self._host_lost = time.monotonic()

    def _server_said(self) -> str:
        lines: list[str] = []
        with suppress(OSError):
            text = read_plain(host_log(self._folder.path / "logs", 0)).decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "they say nothing."

    def _watch_server(self, now: float) -> None:
        if self._host is not None:
            lease = self._host_lease
            if lease is not None and (how := lease.turn(now)):
                self._say(f"the fork server (pid {lease.pid}) is replaced: {how}")
                server = Watched(lease.pid)
                server.signal(signal.SIGKILL)
                server.close()
                self._hub.drop(self._host)
                self._closed(self._host)
            return
        code, away_s = self._launcher.ended(), now - self._host_lost
        if code is not None and (code >= 0 or away_s > SPARE_S):
            if code >= 0:  # it gave up by itself, and its spare with it
                raise RunError(f"the fork server ended with code {code}: {self._server_said()}")
            self._start_server()
        elif code is None and away_s > SPARE_S:
            self._launcher.end_if_stopped()

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
            marks=self._deadly.marks,
            role=m.PREDICTOR,
        )
        self._hub.send(peer, welcome)
        if host:
            self._host, self._host_lease = peer, Lease(hello.pid, now, first_s=math.inf)
            self._stopped.clear()
            self._starting.clear()  # what was asked of another server
            if there := [(n, worker.process.pid) for n, worker in self._workers.items()]:
                self._hub.send(peer, m.Adopt(workers=there))
            return
        self._starting.pop(hello.number)
        times = max(self._losses.values(), default=0)
        self._workers[hello.number] = _Worker(
            hello.number,
            peer,
            Watched(hello.pid),
            Lease(hello.pid, now, times=times),
            self._deadly.changes,
            now,
        )

    def _closed(self, peer: Peer) -> None:
        if peer is self._host:
            self._host, self._host_lease = None, None
            self._host_lost = time.monotonic()
        worker = self._of(peer)
        if worker is not None:
            worker.closed_at = time.monotonic()

    def _of(self, peer: Peer) -> _Worker | None:
        return next((w for w in self._workers.values() if w.peer is peer), None)

    def _receive(self, peer: Peer, message: m.AnyMessage) -> None:
        now = time.monotonic()
        if peer is self._host:
            if self._host_lease is not None:
                self._host_lease.renew(now)
            if isinstance(message, m.Heartbeat):
                self._end_stopped(message.stopped, now)
            elif isinstance(message, m.Exited):
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
                self._servers = 0
                del self._losses[_START], self._killed[_START]
            case m.Predicted(batch=batch):
                self._predicted(worker, batch, now)
            case m.Failed(kind="PeerError"):
                worker.killed = "its connection broke"
            case m.Failed():
                raise failure(worker.number, message, self._folder.path)

    def _count(self, worker: _Worker, samples: int) -> None:
        if self._samples and samples != self._samples:
            raise RecipeError(
                f"the dataset of worker {worker.number} has {samples:,} samples, and that of "
                f"another has {self._samples:,}: the function of --data has to return the same "
                "dataset in every process."
            )
        if not self._samples:
            self._samples = samples
            self._done &= set(range(self._batches))
            self._before = len(self._done)
            self._left = [n for n in range(self._batches) if n not in self._done]
        self._confirmed |= worker.number == 0  # it has compared the dataset with that of before

    def _predicted(self, worker: _Worker, batch: int, now: float) -> None:
        self._done.add(batch)
        self._moves(worker, now)
        if batch in worker.hand:
            worker.hand.remove(batch)
        if self._first_done is None:
            self._first_done = now
        self._compare(batch)

    def _moves(self, worker: _Worker, now: float) -> None:
        """A worker has made progress."""
        if worker.hand and self._done:
            self._longest_s = max(self._longest_s or 0.0, now - worker.since)
        worker.since = now

    def _compare(self, batch: int) -> None:
        """Refuse outputs of another shape at once, rather than at the end."""
        with suppress(Damaged):  # then it is predicted again
            head = self._folder.head(batch)
            if head["columns"] is None:
                return
            if self._known is None:
                self._known = head
            check_same(self._known, head)

    # ---- workers

    def _start_missing(self, now: float) -> None:
        if self._host is None or self._complete:
            return
        for number in self._numbers:
            if number not in self._workers and number not in self._starting:
                self._starting[number] = now
                log = str(self._folder.path / "logs" / f"worker-{number}.log")
                self._hub.send(self._host, m.StartWorker(number=number, log=log))

    def _hand_out(self, worker: _Worker, now: float) -> None:
        """Give a worker more batches; those that killed others go to one that knows of it."""
        if not worker.ready or not self._confirmed or worker.killed or not self._left:
            return
        fair = max(1, min(IN_HAND, len(self._left) // len(self._numbers)))
        if len(worker.hand) >= fair:
            return
        may = (n for n in self._left if self._deadly.needed.get(n, 0) <= worker.marks)
        given = [n for _, n in zip(range(fair - len(worker.hand)), may, strict=False)]
        if given:
            if not worker.hand:
                worker.since = now
            worker.hand += given
            self._left = [n for n in self._left if n not in set(given)]
            self._hub.send(worker.peer, m.Predict(batches=given))

    def _watch(self, worker: _Worker, now: float) -> None:
        if worker.process.ended:
            worker.ended_at = worker.ended_at or now
            if now - worker.ended_at > REPORT_S:  # no fork server reports it
                self._lose(worker, None, None)
            return
        how = worker.lease.turn(now)
        if now - worker.closed_at > FLOOR_S:
            how = "it hung up"
        at_work = worker.hand if worker.ready else worker.at[0] == m.READING
        if not how and at_work and now - worker.since > (limit_s := self._limit_s(worker)):
            how = f"it got nothing done for {readable_seconds(limit_s)}"
            worker.hung = True
        if how and not worker.killed:
            self._end(worker, how)

    def _limit_s(self, worker: _Worker) -> float:
        """How long it may take for what it does; each worker that was lost there doubles it."""
        usual = UNKNOWN_S
        if self._longest_s is not None:
            usual = max(usual, 2 * STEPS * self._longest_s)
        elif worker.at[0] != m.READING:
            usual = FIRST_S
        at = worker.hand[0] if worker.hand else _START
        return float(usual * 2 ** self._losses[at])

    def _end(self, worker: _Worker, how: str) -> None:
        worker.killed = how
        worker.process.signal(signal.SIGKILL)

    def _end_stopped(self, stopped: list[int], now: float) -> None:
        """Kill processes that were stopped before they could connect."""
        known = {worker.process.pid for worker in self._workers.values()}
        self._stopped = {pid: self._stopped.get(pid, now) for pid in stopped if pid not in known}
        for pid, since in self._stopped.items():
            if now - since > FLOOR_S and self._host is not None:
                self._hub.send(self._host, m.Signal(pid=pid, signals=[signal.SIGKILL]))

    def _exited(self, report: m.Exited) -> None:
        worker = self._workers.get(report.number)
        if worker is not None and worker.process.pid == report.pid:
            self._lose(worker, report.code, report.place)
        elif report.number in self._starting and worker is None:
            if not report.pid:
                raise WorkerError(
                    f"worker {report.number} cannot be started: {report.error}. End other "
                    "processes, or use fewer --workers."
                )
            self._starting.pop(report.number)
            self._blame(report.number, _START, report.code, None)

    def _lose(self, worker: _Worker, code: int | None, place: m.Whereabouts | None) -> None:
        """A worker has ended: its batches are left again, and another takes its number."""
        now = time.monotonic()
        for last in self._hub.drain(worker.peer):
            self._handle(worker, last, now)
        del self._workers[worker.number]
        worker.process.close()
        self._left = sorted({*self._left, *worker.hand})
        at = worker.hand[0] if worker.ready and worker.hand else _START
        if worker.ready and not worker.hand:
            self._lost += 1
            return  # it was idle
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
        """A worker was lost: give up if that has happened too often there."""
        self._lost += 1
        by_itself = not killed and code is not None and code != -signal.SIGKILL
        (self._losses if by_itself or killed else self._killed)[at] += 1
        how = killed or (_how(code) if code is not None else "it has ended")
        where = "while it got ready" if at == _START else f"at batch {at}"
        if (by_itself or hung) and self._deadly.learn(at, place, how):
            del self._losses[at]
        self._say(f"worker {number} was lost {where}: {how}; another takes its place")
        if self._losses[at] >= MOST_OWN or self._killed[at] >= MOST_KILLED:
            raise self._error(number, at, how, place)

    def _error(self, number: int, at: int, how: str, place: m.Whereabouts | None) -> InstepError:
        times = self._losses[at] + self._killed[at]
        if at == _START:
            where = "while they got ready"
        else:
            stop = min((at + 1) * self._batch, self._samples)
            where = f"at batch {at} (samples {at * self._batch} to {stop - 1})"
        reading = self._deadly.said(place)
        log = self._folder.path / "logs" / f"worker-{number}.log"
        return WorkerError(
            f"{plural(times, 'worker')} ended {where}: {how}{reading}. What was predicted is kept "
            f"in {self._folder.path}.\n  full log: {log}"
        )

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
