"""The master's shell: receives, asks its mind (`decide.py`), and does what it says.

One thread serves every connection, writes the run's files and lets the view
draw. It never imports torch and never waits for a worker. Whoever calls it
gives it a run folder, views, and the launcher that starts the processes;
under torchrun or Slurm there is none, and a worker that hangs up counts as one
that has ended.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from instep import spec_file
from instep.comm import messages as m
from instep.comm.channel import LARGEST, Peer
from instep.events import LEDGER, STEPS, Appender, EventLog, cut_torn_record, read_records
from instep.report.live import View
from instep.run import decide as mind
from instep.run.folder import BEGINNING, Origin
from instep.run.launch.base import Launcher, Switchboard
from instep.run.resume import go_back
from instep.run.stop_rules import Rules
from instep.spec import JobSpec, as_table

TICK_S = 0.1
"""How often the master looks up when nothing arrives."""


class Outcome(Exception):
    """How a run ended; raised inside the shell to leave its loop, returned by `serve`."""

    def __init__(self, finish: mind.Finish, blame: mind.Blame | None) -> None:
        super().__init__(finish.outcome)
        self.finish, self.blame = finish, blame


class Master:
    """Serves one run until it is over.

    Args:
        job: what to run.
        run: its folder; must exist.
        switchboard: to which the processes connect.
        views: told of everything that is written.
        launcher: brings the workers up; None if somebody else does.
        started: Unix seconds at which the user's command began.
        origin: from where the run goes on.
        about: further fields of the `run_started` event.
    """

    def __init__(
        self,
        job: JobSpec,
        run: Path,
        switchboard: Switchboard,
        *,
        views: list[View],
        launcher: Launcher | None,
        started: float,
        about: Mapping[str, Any],
        origin: Origin = BEGINNING,
    ) -> None:
        self._job, self._run, self._views, self._launcher = job, run, list(views), launcher
        self._started, self._origin = started, origin
        self._hub, self._token = switchboard.hub, switchboard.seat.token
        now, limit_s = time.monotonic(), job.stop.time_limit_s
        limit = mind.TimeLimit(limit_s, now, origin.spent_s) if limit_s else None
        self._state = mind.State(
            workers=job.workers,
            recovers=launcher is not None,
            since=now,
            generation=origin.generations,
            origin=str(origin.checkpoint or ""),
            time_limit=limit,
        )
        self._rules = Rules(job.stop)
        self._rules.replay(origin.heard)
        self._judged: dict[tuple[int, bool], str] = {}
        self._peers: dict[int, Peer] = {}
        self._names: dict[Peer, tuple[str, int]] = {}
        self._store: dict[str, bytes] = {}
        self._waiting: dict[str, list[Peer]] = {}
        self._last_step: dict[int, int] = {}
        self._ready: set[int] = set()
        self._interrupts: list[str] = []
        self._log = EventLog(run / "events.jsonl")
        cut_torn_record(run / "steps.bin", STEPS)
        self._steps = Appender(run / "steps.bin")
        resumed = {"resumed_step": origin.step} if origin.generations else {}
        self._emit("run_started", {"job": as_table(job), **about, **resumed})
        for text in origin.warnings:
            self._emit("warning", {"text": text})
        before = read_records(run / "ledger.bin", LEDGER)
        self._show(lambda view: view.records(before, np.empty(0, STEPS)))

    def interrupt(self, by: str) -> None:
        """Ask for a stop; may be called from a signal handler or another thread."""
        self._interrupts.append(by)

    def serve(self) -> Outcome:
        """Run to the end, whatever the end is."""
        try:
            while True:
                self._turn()
        except Outcome as outcome:
            finish = outcome.finish
            fields = {"outcome": finish.outcome, "rule": finish.rule, "step": finish.step}
            self._emit("run_finished", {**fields, "seconds": time.time() - self._started})
            return outcome
        finally:
            self._close()

    def _turn(self) -> None:
        for peer, message in self._hub.receive(TICK_S):
            if message is None:
                self._hung_up(peer)
            elif isinstance(message, m.Hello):
                self._welcome(peer, message)
            elif peer in self._names:
                try:
                    self._hear(peer, message)
                except (AssertionError, TypeError, ValueError):  # it does not know the rules
                    self._hub.drop(peer)
                    self._hung_up(peer)
            else:
                self._hub.drop(peer)  # who does not introduce himself is not heard
        while self._interrupts:
            ready = len(self._ready) == self._job.workers
            self._think(mind.Interrupted(self._interrupts.pop(0), ready, self._committed))
        self._watch_host()
        self._think(mind.Tick(self._committed))
        self._show(lambda view: view.tick(time.monotonic()))

    def _close(self) -> None:
        self._log.close()
        self._steps.close()

    # ---- what arrives

    def _welcome(self, peer: Peer, hello: m.Hello) -> None:
        known = hmac.compare_digest(hello.token.encode(), self._token.encode())
        if not known or hello.version != m.VERSION or not self._may_come(peer, hello):
            self._hub.drop(peer)
            return
        peer.frames.largest = LARGEST
        self._names[peer] = (hello.role, hello.number)
        checkpoint = self._origin.checkpoint
        self._hub.send(
            peer,
            m.Welcome(
                job=spec_file.dump(self._job),
                run=str(self._run),
                started=self._started,
                checkpoint=str(checkpoint or ""),
                recovers=self._state.recovers,
            ),
        )
        if hello.role == "host":
            for number in range(self._job.workers):
                self._start_worker(number)
            return
        self._peers[hello.number] = peer
        seconds = time.time() - self._started
        self._emit("worker_joined", {"worker": hello.number, "pid": hello.pid, "seconds": seconds})
        self._think(mind.Joined(hello.number))

    def _start_worker(self, number: int) -> None:
        """Have the host bring up a process under this number."""
        log = str(self._run / "logs" / f"worker-{number}.log")
        for peer, (role, _) in self._names.items():
            if role == "host":
                self._hub.send(peer, m.StartWorker(number=number, log=log))

    def _go_back(self) -> None:
        """Begin again from the newest checkpoint: nobody is left who has more."""
        self._origin = go_back(self._run, self._job)
        self._rules = Rules(self._job.stop)
        self._rules.replay(self._origin.heard)
        self._judged.clear()
        self._last_step = dict.fromkeys(self._last_step, self._origin.step)
        path = str(self._origin.checkpoint or "")
        self._emit("went_back", {"resumed_step": self._origin.step, "path": path})
        for text in self._origin.warnings:
            self._emit("warning", {"text": text})
        self._think(mind.WentBack(path))

    def _may_come(self, peer: Peer, hello: m.Hello) -> bool:
        """Whether nobody sits there yet: one host, and one process for each worker's number."""
        taken = peer in self._names or (hello.role, hello.number) in self._names.values()
        known = hello.role == "host" or 0 <= hello.number < self._job.workers
        return known and hello.role in ("host", "worker") and not taken

    def _hear(self, peer: Peer, message: m.AnyMessage) -> None:
        _, number = self._names[peer]
        match message:
            case m.StoreSet(key=key, value=value):
                self._store[key] = value
                for waiting in self._waiting.pop(key, []):
                    self._hub.send(waiting, m.StoreValue(key=key, value=value))
            case m.StoreGet(key=key):
                if key in self._store:
                    self._hub.send(peer, m.StoreValue(key=key, value=self._store[key]))
                else:
                    self._waiting.setdefault(key, []).append(peer)
            case m.Records(ledger=ledger, steps=steps):
                self._record(number, ledger, steps)
            case m.Emit(name=name, fields=fields):
                self._ready |= {number} if name == "worker_ready" else set()
                self._emit(name, fields)
            case m.Figures():
                self._judge(peer, message)
            case m.Built(recovers=recovers):
                self._think(mind.Built(number, recovers))
            case m.Formed(generation=generation):
                self._think(mind.Formed(number, generation))
            case m.Broken(generation=generation):
                self._think(mind.Broke(number, generation))
            case m.Done() | m.Failed():
                self._think(mind.Said(number, message))
            case m.Exited(number=worker, pid=pid, code=code):
                if worker in self._peers:  # a child of it may hold its connection open
                    peer = self._peers[worker]
                    for last in self._hub.drain(peer):
                        self._hear(peer, last)
                    self._names.pop(self._peers.pop(worker), None)
                self._emit("process_ended", {"worker": worker, "pid": pid, "code": code})
                self._think(mind.Ended(worker, code, self._in_flight(worker), self._committed))
            case _:
                self._hub.drop(peer)
                self._hung_up(peer)

    def _judge(self, peer: Peer, figures: m.Figures) -> None:
        """Let the rules decide on committed figures, and tell whoever sent them."""
        asked = figures.step, figures.metrics is not None
        if asked not in self._judged:  # told again, where a member was lost after the commit
            fired = self._rules.hear(figures)
            if fired is not None:
                self._think(fired)
            self._judged[asked] = fired.rule if fired else ""
        self._hub.send(peer, m.Verdict(step=figures.step, rule=self._judged[asked]))
        for old in [each for each in self._judged if each[0] < figures.step - 1]:
            del self._judged[old]

    @property
    def _committed(self) -> int:
        return max(self._last_step.values(), default=0)

    def _hung_up(self, peer: Peer) -> None:
        role, number = self._names.pop(peer, ("", -1))
        if role == "worker":
            self._peers.pop(number, None)
            if self._launcher is None:  # nobody else tells us that it has ended
                code = 0 if number in self._state.done else 1
                self._think(mind.Ended(number, code, self._in_flight(number)))

    def _in_flight(self, worker: int) -> int:
        return self._last_step[worker] + 1 if worker in self._last_step else 0

    def _watch_host(self) -> None:
        code = self._launcher.ended() if self._launcher is not None else None
        if code is not None:
            self._think(mind.HostLost(code, _last_line(self._run / "logs" / "host.log")))

    # ---- what follows

    def _think(self, news: mind.News) -> None:
        self._state, actions = mind.decide(self._state, news, time.monotonic())
        for action in actions:
            self._act(action)

    def _act(self, action: mind.Action) -> None:
        match action:
            case mind.Send(worker, message):
                if worker in self._peers:
                    self._hub.send(self._peers[worker], message)
            case mind.Log(name, fields):
                if name == "generation_started":  # nobody looks for the keys of the one before
                    self._store.clear()
                    self._waiting.clear()
                self._emit(name, fields)
            case mind.KillAll():
                for peer, (role, _) in list(self._names.items()):
                    if role == "host":
                        self._hub.send(peer, m.KillAll())
                    elif self._launcher is None:
                        self._hub.drop(peer)  # it takes a lost master for the end
                        self._hung_up(peer)
            case mind.GoBack():
                self._go_back()
            case mind.Start(worker):
                self._ready.discard(worker)
                self._start_worker(worker)
            case mind.Finish():
                raise Outcome(action, self._state.blame)

    def _record(self, worker: int, ledger: bytes, steps: bytes) -> None:
        done, timed = np.frombuffer(ledger, LEDGER), np.frombuffer(steps, STEPS)
        self._steps.write(steps)
        if len(timed):
            self._last_step[worker] = int(timed["step"][-1])
        self._show(lambda view: view.records(done, timed))

    def _emit(self, name: str, fields: Mapping[str, Any]) -> None:
        event = self._log.emit(name, **fields)
        self._show(lambda view: view.event(event))

    def _show(self, what: Callable[[View], None]) -> None:
        """Tell every view; one that fails is let go, for a picture is not worth a run."""
        for view in list(self._views):
            try:
                what(view)
            except Exception as error:
                self._views.remove(view)
                text = f"a view of the run failed and was closed: {error!r}."
                self._emit("warning", {"text": text})


def _last_line(log: Path) -> str:
    """What a process said last before it ended."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
