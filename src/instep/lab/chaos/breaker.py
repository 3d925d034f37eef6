"""Carries out injections in a run, each when it is due.

A `Breaker` looks at a run's files every few milliseconds, as any program could. It reads the
log and the ledger, sends signals (`run_processes.py`) and partitions a network
(`partitions.py`); it knows nothing of what happens inside the processes. `injections.py`
draws what to break. To add a kind, say in `Breaker._turn` how to do it. Way in: `Breaker`.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from instep.errors import RunError
from instep.lab.chaos.injections import Injection
from instep.lab.chaos.partitions import Partitions
from instep.lab.chaos.run_processes import Known, Processes, send
from instep.lab.chaos.verdict import Fall, Injected, judge
from instep.plain_file import replace_plain
from instep.report.figures.summary import finite
from instep.store.folder import numbered
from instep.store.ledger import last_step
from instep.store.run_folder import RunFolder
from instep.system.processes import has_ended

LOOK_S = 0.005
"""Seconds between two looks at the run."""

TIMEOUT_S = 60.0
"""How long to wait for a process of the role, for a hang to be noticed, for a recovery."""

_TRY_S, _RECORDS_S = 0.05, 0.25
_ENDED = "the run ended before"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was asked for."""

    kills: int
    hangs: int
    seed: int
    partitions: int = 0
    roles: tuple[str, ...] = ()
    """Roles whose processes are killed and stopped; empty: all that the run has."""

    over_s: float = 0.0
    """Above 0: spread over so many seconds, rather than over the steps of the run."""

    @property
    def injections(self) -> int:
        """How many things to break."""
        return self.kills + self.hangs + self.partitions


Say = Callable[[str], None]


class Breaker:
    """Carries out injections in a run, each when it is due.

    Args:
        run: the run folder.
        injections: in the order in which they are due.
        plan: what was asked for.
        say: prints a line for each.
        begin: the step from which on they are spread.
        steps: of the whole run.
        timeout_s: how long to wait for a process of a role, and for a hang to be noticed.
        network: to be partitioned, if partitions are drawn.
    """

    def __init__(
        self,
        run: Path,
        injections: Sequence[Injection],
        plan: Plan,
        say: Say,
        *,
        begin: int = 0,
        steps: int = 0,
        timeout_s: float = TIMEOUT_S,
        network: Partitions | None = None,
    ) -> None:
        self.processes, self.falls = Processes(run), list[Fall]()
        self.injected: list[Injected] = []
        self._run, self._plan, self._say = run, plan, say
        self._begin, self._steps = begin, steps
        self._timeout_s, self._left = timeout_s, deque(injections)
        self._total, self._network = len(injections), network
        self._since = 0.0  # when the first step was seen
        self._due_at: float | None = None
        self._step, self._moved = 0, time.monotonic()
        self._try_at = self._asked = 0.0
        self._hanging: dict[int, Known] = {}  # by place in `injected`
        files = (run / f"{name}.json" for name in numbered("chaos"))  # it may be broken again
        self._file = next(file for file in files if not file.exists())

    def serve(self, running: Callable[[], bool]) -> None:
        """Break what is due until `running` is false; leaves no process stopped."""
        try:
            while running():
                self._turn()
                time.sleep(LOOK_S)
        finally:
            self._end()

    @property
    def still_s(self) -> float:
        """Seconds since the ledger last changed."""
        return time.monotonic() - self._moved

    @property
    def settled(self) -> bool:
        """Whether everything is done and the run has recovered, or had the time to."""
        if self._left or self._hanging:
            return False
        done = [each.time for each in self.injected if not each.missed]
        if not done or time.time() > done[-1] + self._timeout_s:
            return True
        if time.time() < self._asked + _RECORDS_S:
            return False
        self._asked = time.time()
        run = RunFolder(self._run)
        return not math.isnan(judge(run, None, self.injected, going_on=True).recovery_s[-1])

    def _turn(self) -> None:
        self._look()
        if self._step and not self._since:
            self._since = time.time()
        self._release()
        if self._network is not None:
            self._network.serve()
        if not self._left or not self._is_due(self._left[0]) or time.time() < self._try_at:
            return
        injection = self._left[0]
        if injection.kind == "partition":
            self._partition(injection)
            return
        self.processes.update()
        hanging = {each.pid for each in self._hanging.values()}
        there = self.processes.of(injection.role)
        there = [each for each in there if each.pid not in hanging] or there
        if not (there and self._signal(injection, there)):
            self._wait_for_process(injection)

    def _look(self) -> None:
        step = last_step(self._run / "ledger.bin")
        if step < self._step:
            self.falls.append(Fall(time.time(), self._step, step))
        if step != self._step:
            self._step, self._moved = step, time.monotonic()

    def _is_due(self, injection: Injection) -> bool:
        """Whether its step or time has come, and then its delay is over."""
        now = time.time()
        if self._due_at is None:
            if self._plan.over_s:
                reached = self._since and now >= self._since + injection.at * self._plan.over_s
            else:
                span = max(1, self._steps - self._begin)
                reached = self._step and self._step >= self._begin + injection.at * span
            if not reached:
                return False
            self._due_at = now + injection.delay_s
        return now >= self._due_at

    def _signal(self, injection: Injection, there: Sequence[Known]) -> bool:
        """Kill or stop one of these processes; False if it has ended."""
        target = there[min(len(there) - 1, int(injection.pick * len(there)))]
        hang = injection.kind == "hang"
        self._look()
        if not send(target, signal.SIGSTOP if hang else signal.SIGKILL):
            return False
        if hang:
            self._hanging[len(self.injected)] = target
        # no step that this process took part in ends after `time`
        self._took(
            Injected(
                kind=injection.kind,
                role=target.role,
                number=target.number,
                pid=target.pid,
                step=self._step,
                time=time.time(),
            )
        )
        return True

    def _partition(self, injection: Injection) -> None:
        assert self._network is not None
        self._look()
        step, moment = self._step, time.time()  # a later step may already be without the hosts
        hosts = tuple(self._network.begin(injection.pick, injection.hold_s))
        kind, role = injection.kind, injection.role
        self._took(Injected(kind=kind, role=role, step=step, time=moment, hosts=hosts))

    def _wait_for_process(self, injection: Injection) -> None:
        """No process of that role is there: it is being replaced, or there is none."""
        assert self._due_at is not None
        self._try_at = time.time() + _TRY_S
        if time.time() - self._due_at > self._timeout_s:
            missed = f"there was no {injection.role} process for {self._timeout_s:g} s"
            self._took(Injected(kind=injection.kind, role=injection.role, missed=missed))

    def _took(self, done: Injected) -> None:
        self._left.popleft()
        self._due_at = None
        self.injected.append(done)
        text = done.missed or f"{_what(done)} at step {done.step}"
        self._say(f"{len(self.injected)} of {self._total}: {text}")
        self.write({})

    def _release(self) -> None:
        """Continue stopped processes that the run did not notice; forget those that ended."""
        for place, known in list(self._hanging.items()):
            # with a member that is stopped no step is committed; with another role some are
            noticed = (
                known.role in ("worker", "server") and self._step >= self.injected[place].step + 2
            )
            if noticed or has_ended(known.pid):
                del self._hanging[place]
            elif time.time() - self.injected[place].time > self._timeout_s:
                released = send(known, signal.SIGCONT)
                self.injected[place] = replace(self.injected[place], released=released)
                del self._hanging[place]

    def _end(self) -> None:
        """Continue every stopped process, heal the network; note what could not be done."""
        self._look()
        if self._network is not None:
            self._network.heal()
        for known in self._hanging.values():
            send(known, signal.SIGCONT)
        self._hanging.clear()
        while self._left:
            injection = self._left.popleft()
            self.injected.append(Injected(kind=injection.kind, role=injection.role, missed=_ENDED))
        self.write({})

    def write(self, verdict: dict[str, Any]) -> None:
        """Leave in the run folder what was broken, and when."""
        if not self._run.is_dir():
            return  # it has never begun
        text = {
            "asked": asdict(self._plan),
            "falls": [asdict(fall) for fall in self.falls],
            **(verdict or {"each": [asdict(each) for each in self.injected]}),
        }
        try:
            replace_plain(self._file, json.dumps(finite(text), indent=2) + "\n")
        except OSError as error:
            raise RunError(f"{self._file} cannot be written: {error.strerror}.") from None


def _what(done: Injected) -> str:
    if done.kind == "partition":
        numbers = ", ".join(map(str, done.hosts))
        return f"cut off host{'' if len(done.hosts) == 1 else 's'} {numbers}"
    whose = {"loader": "of worker ", "spare": "of host "}.get(done.role, "")
    what = "stopped" if done.kind == "hang" else "killed"
    return f"{what} {done.role} {whose}{done.number} (pid {done.pid})"
