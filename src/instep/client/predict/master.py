"""The master of predictions: hands out batches, and watches the workers that predict them.

A batch needs no other, so there is no group, no generation and no commit, and most of the
master of a training (`control/master.py`) has nothing to decide here. What is the same is the
way processes start, and who watches whom: the launcher starts a fork server, which forks
workers and reports their ends; workers and server send heartbeats, and one that is silent, or
gets nothing done, is killed. A worker that ended is replaced, with all of its replica, and its
batches go to the first worker that asks. This master lives in the client: if it is killed, the
others end, and the parts that are there are taken up by the same command.
"""

from __future__ import annotations

import hmac
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from instep.client.predict.batches import START, PredictBatches
from instep.client.predict.fork_server import OwnServer
from instep.client.predict.losses import PredictLosses
from instep.client.predict.pace import Pace
from instep.client.predict.replicas import PredictProcess, PredictReplica
from instep.client.results import failure
from instep.comm.protocol import messages as m
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.hub import Peer
from instep.control.keys import Keys
from instep.control.watch import away_s
from instep.errors import RecipeError, WorkerError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.store.joined import check_same
from instep.store.predictions import Damaged, Predictions
from instep.system.lease import Lease
from instep.system.limits import UNKNOWN_S
from instep.system.processes import Watched

TICK_S = 0.05
"""How long the master waits for a message."""

LEAVE_S = 2.0
"""How long workers may take to end when everything is predicted."""


class PredictEnded(NamedTuple):
    """How the predictions ended."""

    samples: int
    """In the dataset; 0 if that is not known."""
    predicted: int
    """Batches that were predicted now."""
    lost: int
    """Workers that were lost, and replaced."""
    interrupted: bool


class PredictMaster:
    """Has a folder's batches predicted.

    Args:
        job: what the workers are told.
        folder: with a plan; takes the parts.
        batch: samples of a batch.
        say: prints a line.
        asked: the signals that have come to stop; looked at several times a second.
    """

    def __init__(
        self,
        job: JobSpec,
        folder: Predictions,
        batch: int,
        say: Callable[[str], None],
        asked: list[int],
    ) -> None:
        self._job, self._folder, self._say = job, folder, say
        self._asked, self._keys = asked, Keys()
        self._began, self._now = time.time(), time.monotonic()
        self._board = Switchboard()
        self._hub = self._board.hub
        self._server = OwnServer(self._board, folder.path / "logs", say)
        self._batches = PredictBatches(folder.done(), batch, skip=job.data.unreadable == "skip")
        replicas = range(job.workers // job.mesh.ranks)
        self._replicas = [PredictReplica(number, job.mesh) for number in replicas]
        self._starting: dict[int, float] = {}  # when the fork server was asked for them
        self._confirmed = False  # whether the dataset is the one of the parts that are there
        self._losses = PredictLosses(self._batches, folder.path / "logs", say)
        self._known: dict[str, Any] | None = None  # the head of a part, to compare others with
        self._pace = Pace(self._batches, self._now)

    def serve(self) -> PredictEnded:
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
            for process in self._processes:
                process.system.close()
        batches = self._batches
        predicted = len(batches.done) - batches.before
        return PredictEnded(batches.samples, predicted, self._losses.count, not self._complete)

    @property
    def _processes(self) -> list[PredictProcess]:
        return [p for replica in self._replicas for p in replica.processes.values()]

    def _replica(self, number: int) -> PredictReplica:
        """The one that a worker's number is in."""
        return self._replicas[number // self._job.mesh.ranks]

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
        for process in self._processes:
            process.since += away  # no process is to blame for a time in which this one slept
        self._server.watch(now)
        for process in self._processes:
            if process.watch(now):  # no fork server reports it
                self._lose(process, None, None)
        for replica in self._replicas:
            self._pace.end_hung(replica, now)
        self._start_missing(now)
        for replica in self._replicas:
            self._hand_out(replica, now)
        if line := self._pace.line(now):
            self._say(line)

    # ---- connections

    def _welcome(self, peer: Peer, hello: m.Hello) -> None:
        known = hmac.compare_digest(hello.token.encode(), self._board.endpoint.token.encode())
        if not known or hello.version != m.VERSION or hello.role not in ("worker", "host"):
            self._hub.drop(peer)
            return
        if hello.role == "host":
            self._hub.trust(peer)
            self._hub.send(peer, self._welcome_of(0))
            self._starting.clear()  # what was asked of another server
            there = [(process.number, process.system.pid) for process in self._processes]
            self._server.connects(peer, hello.pid, time.monotonic(), there)
        else:
            self._welcome_worker(peer, hello)

    def _welcome_worker(self, peer: Peer, hello: m.Hello) -> None:
        number, now, system = hello.number, time.monotonic(), Watched(hello.pid)
        if number not in self._starting or number in self._replica(number).processes:
            self._hub.drop(peer)  # one that was given up, or has lost its connection
            system.signal(signal.SIGKILL)
            system.close()
            return
        self._hub.trust(peer)
        replica = self._replica(number)
        self._hub.send(peer, self._welcome_of(replica.restarts))
        del self._starting[number]
        lease = Lease(hello.pid, now, times=self._batches.most_times)
        marks = self._batches.deadly.changes
        replica.processes[number] = PredictProcess(number, peer, system, lease, marks, now)

    def _welcome_of(self, restarts: int) -> m.Welcome:
        return m.Welcome(
            job=spec_file.dump(self._job),
            run=str(self._folder.path),
            started=self._began,
            recovers=True,
            marks=self._batches.deadly.marks,
            role=m.PREDICTOR,
            restarts=restarts,
        )

    def _closed(self, peer: Peer) -> None:
        if peer is self._server.peer:
            self._server.leaves()
        if (process := self._of(peer)) is not None:
            process.closed_at = time.monotonic()

    def _of(self, peer: Peer) -> PredictProcess | None:
        return next((process for process in self._processes if process.peer is peer), None)

    def _receive(self, peer: Peer, message: m.AnyMessage) -> None:
        now = time.monotonic()
        if peer is self._server.peer:
            known = (process.system.pid for process in self._processes)
            self._server.take(now, message, known)
            if isinstance(message, m.Exited):
                self._exited(message)
            return
        process = self._of(peer)
        if process is None:
            self._hub.drop(peer)
            return
        process.lease.renew(now)
        if not isinstance(message, m.Heartbeat):
            process.handled += 1
        if isinstance(message, (m.Heartbeat, m.Failed)):
            self._hub.send(peer, m.Ack(count=process.handled))
        self._handle(process, message, now)

    def _handle(self, process: PredictProcess, message: m.AnyMessage, now: float) -> None:
        match message:
            case m.Heartbeat(phase=phase, progress=progress):
                if process.at != (phase, progress):
                    process.at = phase, progress
                    self._pace.moves(self._replica(process.number), process, now)
            case m.Emit(name="dataset_known", fields=fields):
                self._count(process, int(fields["samples"]))
            case m.Emit(name="warning", fields=fields):
                self._say(f"worker {process.number}: {fields['text']}")
            case m.StoreSet(key=key, value=value):
                for waiting, answer in self._keys.leave(key, value):
                    self._hub.send(waiting, answer)
            case m.StoreGet():
                if (there := self._keys.find(message, process.peer)) is not None:
                    self._hub.send(process.peer, there)
            case m.Built():
                process.ready, process.since = True, now
                self._server.started = 0
                self._batches.starts()
            case m.Predicted(batch=batch):
                self._predicted(process, batch, now)
            case m.Failed(kind="PeerError"):
                process.killed = "its connection broke"
            case m.Failed() if process.to_blame:
                raise failure(process.number, message, self._folder.path)

    def _count(self, process: PredictProcess, samples: int) -> None:
        known = self._batches.samples
        if known and samples != known:
            raise RecipeError(
                f"the dataset of worker {process.number} has {samples:,} samples, and that of "
                f"another has {known:,}: the function of --data has to return the same dataset in "
                "every process."
            )
        if not known:
            self._batches.count(samples)
        self._confirmed |= process.number == 0  # it has compared the dataset with that of before

    def _predicted(self, process: PredictProcess, batch: int, now: float) -> None:
        self._batches.done.add(batch)
        replica = self._replica(process.number)
        self._pace.moves(replica, process, now)
        self._pace.predicts(now)
        replica.finish(batch)
        with suppress(Damaged):  # then it is predicted again, at the end
            head = self._folder.head(batch)
            if head["columns"] is not None:
                self._known = self._known or head
                check_same(self._known, head)  # at once, rather than at the end

    # ---- workers

    def _start_missing(self, now: float) -> None:
        if self._server.peer is None or self._complete:
            return
        for replica in self._replicas:
            for number in replica.numbers:
                asked = self._starting.get(number, -math.inf)
                if number not in replica.processes and now - asked > UNKNOWN_S:
                    self._starting[number] = now
                    self._server.fork(number)

    def _hand_out(self, replica: PredictReplica, now: float) -> None:
        if not replica.ready or not self._confirmed:
            return
        has, sharing = len(replica.turns), len(self._replicas)
        turns = self._batches.take(has, sharing, replica.marks, self._job.mesh.shard)
        if not turns:
            return
        replica.give(turns)
        for process in replica.processes.values():
            if not has:
                process.since = now
            for turn in turns:
                self._hub.send(process.peer, m.Predict(batches=turn))

    # ---- processes that are lost

    def _exited(self, report: m.Exited) -> None:
        """The fork server reports that a process has ended, or could not be started."""
        number = report.number
        process = self._replica(number).processes.get(number)
        if process is not None and process.system.pid == report.pid:
            self._lose(process, report.code, report.place)
        elif process is None and number in self._starting:
            if report.pid:
                del self._starting[number]
                self._losses.add(self._replica(number), number, START, report.code, report.place)
            elif self._processes and self._confirmed:  # asked again in a while
                self._say(f"worker {number} cannot be started: {report.error}; others continue")
            else:
                raise WorkerError(
                    f"worker {number} cannot be started: {report.error}. End other processes, or "
                    "use fewer --workers."
                )

    def _lose(self, process: PredictProcess, code: int | None, place: m.Whereabouts | None) -> None:
        """A process has ended: its replica starts again, and another takes its number."""
        now = time.monotonic()
        for last in self._hub.drain(process.peer):
            self._handle(process, last, now)
        replica = self._replica(process.number)
        at = replica.batch_of(process)
        del replica.processes[process.number]
        process.system.close()
        if process.to_blame:
            self._restart(replica, f"worker {process.number} of its replica was lost")
            given = replica, process.number, at, code, place
            self._losses.add(*given, killed=process.killed, hung=process.hung)

    def _restart(self, replica: PredictReplica, why: str) -> None:
        """Have all processes of a replica start again; its batches are left again."""
        self._batches.give_back(replica.drop())
        self._keys.forget(m.keys_of_replica(replica.number))
        replica.restarts += 1
        for process in replica.processes.values():
            process.kill(why, to_blame=False)

    def _release(self) -> None:
        """Have the workers end by themselves."""
        for process in self._processes:
            self._hub.send(process.peer, m.Release())
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline:
            if all(process.system.ended for process in self._processes):
                return
            for _ in self._hub.receive(TICK_S):
                pass
