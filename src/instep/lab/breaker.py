"""Does to a run what was drawn, each thing when it is due.

A `Breaker` looks at a run's files every few milliseconds, as anybody could. It
knows nothing of the roles' insides: it reads the log and the ledger, sends
signals (`roster.py`), and parts a network (`parting.py`). What is drawn is
`injections.py`'s. To add a kind of injection, say in `Breaker._turn` how it is
done. Way in: `Breaker`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from instep.errors import RunError
from instep.lab.injections import Injection
from instep.lab.parting import Parting
from instep.lab.roster import Known, Roster, send
from instep.lab.verdict import Fall, Injected, judge
from instep.report.figures.summary import finite
from instep.store.folder import numbered
from instep.store.ledger import last_step
from instep.store.run_folder import RunFolder

LOOK_S = 0.005
"""How often the run is looked at."""

TIMEOUT_S = 60.0
"""How long a process of the role may be awaited, a hang go unnoticed, a recovery take."""

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
    """Whose processes are killed and stopped; all that the run has, if none are given."""

    over_s: float = 0.0
    """Above 0: spread over so many seconds, rather than over the steps of the run."""

    @property
    def injections(self) -> int:
        """How many things there are to break."""
        return self.kills + self.hangs + self.partitions


Say = Callable[[str], None]


class Breaker:
    """Does to a run what was drawn, each thing when it is due.

    Args:
        run: the run folder.
        injections: in the order in which they are due.
        plan: what was asked for.
        say: told of each.
        begin: the step from which on they are spread.
        steps: of the whole run.
        timeout_s: how long a process of a role may be awaited, and a hang go unnoticed.
        parting: of its network, where partitions are drawn.
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
        parting: Parting | None = None,
    ) -> None:
        self.roster, self.falls = Roster(run), list[Fall]()
        self.injected: list[Injected] = []
        self._run, self._plan, self._say = run, plan, say
        self._begin, self._steps = begin, steps
        self._timeout_s, self._left = timeout_s, deque(injections)
        self._total, self._parting = len(injections), parting
        self._since = 0.0  # when the first step was seen
        self._due_at: float | None = None
        self._step, self._moved = 0, time.monotonic()
        self._try_at = self._asked = 0.0
        self._hanging: dict[int, Known] = {}  # place in `injected`, and who
        self._file = _free_name(run)

    def serve(self, goes_on: Callable[[], bool]) -> None:
        """Break what is due for as long as the run goes on; leaves nothing hanging."""
        try:
            while goes_on():
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
        """Whether all is done, and recovered from, as far as it ever will be."""
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
        if self._parting is not None:
            self._parting.serve()
        if not self._left or not self._is_due(self._left[0]) or time.time() < self._try_at:
            return
        if self._left[0].kind == "partition":
            self._part(self._left[0])
            return
        self.roster.listen()
        hanging = {each.pid for each in self._hanging.values()}
        there = self.roster.of(self._left[0].role)
        if free := [each for each in there if each.pid not in hanging] or there:
            self._strike(self._left[0], free)
        else:
            self._wait_for_one()

    def _look(self) -> None:
        step = last_step(self._run / "ledger.bin")
        if step < self._step:
            self.falls.append(Fall(time.time(), self._step, step))
        if step != self._step:
            self._step, self._moved = step, time.monotonic()

    def _is_due(self, injection: Injection) -> bool:
        """Whether its moment has come: its step or time, and then its delay."""
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

    def _strike(self, injection: Injection, there: Sequence[Known]) -> None:
        target = there[min(len(there) - 1, int(injection.pick * len(there)))]
        number = signal.SIGSTOP if injection.kind == "hang" else signal.SIGKILL
        self._look()
        if not send(target, number):
            self._wait_for_one()
            return
        done = Injected(
            kind=injection.kind,
            role=target.role,
            number=target.number,
            pid=target.pid,
            step=self._step,
            time=time.time(),  # no step that this process took part in ends after it
        )
        if injection.kind == "hang":
            self._hanging[len(self.injected)] = target
        self._take(done)

    def _part(self, injection: Injection) -> None:
        assert self._parting is not None
        self._look()
        moment = time.time()  # whatever ends later may already be without the hosts
        away = self._parting.part(injection.pick, injection.hold_s)
        self._take(
            Injected(
                kind=injection.kind,
                role=injection.role,
                step=self._step,
                time=moment,
                hosts=tuple(away),
            )
        )

    def _wait_for_one(self) -> None:
        """Nobody of that role is there: it is being replaced, or there is none."""
        injection = self._left[0]
        assert self._due_at is not None
        self._try_at = time.time() + _TRY_S
        if time.time() - self._due_at > self._timeout_s:
            missed = f"there was no {injection.role} process for {self._timeout_s:g} s"
            self._take(Injected(kind=injection.kind, role=injection.role, missed=missed))

    def _take(self, done: Injected) -> None:
        self._left.popleft()
        self._due_at = None
        self.injected.append(done)
        text = done.missed or f"{_told(done)} at step {done.step}"
        self._say(f"{len(self.injected)} of {self._total}: {text}")
        self.write({})

    def _release(self) -> None:
        """Wake processes that nobody has noticed to hang; forget those that are gone."""
        for place, known in list(self._hanging.items()):
            # with a worker that is stopped no step is committed; without the others some are
            noticed = known.role == "worker" and self._step >= self.injected[place].step + 2
            if noticed or not _lives(known.pid):
                del self._hanging[place]
            elif time.time() - self.injected[place].time > self._timeout_s:
                released = send(known, signal.SIGCONT)
                self.injected[place] = replace(self.injected[place], released=released)
                del self._hanging[place]

    def _end(self) -> None:
        """Wake all that still hang, heal the network; what has not been done could not be."""
        self._look()
        if self._parting is not None:
            self._parting.heal()
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
        beside = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            beside.write_text(json.dumps(finite(text), indent=2) + "\n", encoding="utf-8")
            beside.replace(self._file)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise RunError(f"{self._file} cannot be written: {error.strerror}.") from None


def _told(done: Injected) -> str:
    """What was done to whom."""
    if done.kind == "partition":
        one = len(done.hosts) == 1
        numbers = ", ".join(map(str, done.hosts))
        return f"cut off host{'' if one else 's'} {numbers}"
    whose = {"loader": "of worker ", "spare": "of host "}.get(done.role, "")
    what = "stopped" if done.kind == "hang" else "killed"
    return f"{what} {done.role} {whose}{done.number} (pid {done.pid})"


def _lives(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _free_name(run: Path) -> Path:
    """`chaos.json`, or numbered where the run was broken before."""
    files = (run / f"{name}.json" for name in numbered("chaos"))
    return next(file for file in files if not file.exists())
