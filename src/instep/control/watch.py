"""Finds workers that hang, by timeouts learnt from their heartbeats: no user sets any.

A heartbeat says a few times a second what a worker is doing, how much it has done, and
for how long a processor was busy with it. A worker hangs when its heartbeats stop (SIGSTOP, or
inside native code), or when its heartbeats show no progress (an endless loop, a read that
never ends). The timeouts follow from how long steps take, and how long the same activity
took before. A worker that waits for others, or for a disk, does not hang; a read that keeps
a processor busy does not wait for a disk. Processes that share a replica wait for each other
inside a pass: of these the one that holds up the others hangs. Before they are ready, they hang
if all of them wait.

Under `instep.join` workers cannot be replaced, and one that hangs ends the run:
the others would wait for it without end. There the timeouts are longer, and only silence
counts (`Watch.silent`): a loop of the user's own may compute, compile or download for any
time. Where all are silent at once, as after Ctrl-Z, a user may wake them.

Processes of other roles have a `lease.py`. Pure: times are given, and no action is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from instep.comm.protocol.messages import COMPILING, READING, Heartbeat
from instep.control.seen import MEETING, OF_A_STEP, WAITING, WORKED_S, Hang, KnownWorker, Silent
from instep.system.limits import BUSY, FLOOR_S, LOOK_S, STEPS, UNKNOWN_S

STILL_S = 0.5
"""A worker without a heartbeat for so long may be stopped together with others."""

MEETS_S = 2 * UNKNOWN_S
"""How long all processes of a replica may be idle in it: then they wait for each other for ever, as
where a model takes other ways in one of them."""

AFTER_A_PASS = frozenset(["joining", "exchange"])
"""Where a worker of a replica is after the passes of a step, or when it has left its group."""

BLAMED_S = UNKNOWN_S / STEPS
"""At most so much is learnt from a read that was ended: it may be an endless loop."""

_NO_HEARTBEAT = Heartbeat(step=0, phase="joining", progress=0)
"""Stands for a worker that was sent `Form`, and has sent no heartbeat since."""

_GETTING_READY = Heartbeat(phase="recipe")
"""Stands for a worker that has connected, and has sent no heartbeat since."""

FORGET = 0.98
"""The factor by which the longest duration seen shrinks with each committed step."""

FORGET_BUSY = 0.9995
"""The same, of the longest busy time: one slow sample in a thousand steps is remembered."""


SILENT_S = 60.0
"""How long a worker that cannot be replaced may be silent while another is not: a call that keeps
the interpreter's lock, such as a compilation, makes it so."""

ALL_SILENT_S = 600.0
"""How long all workers may be silent, where none can be replaced."""


def away_s(before: float | None, now: float) -> float:
    """How long the watchdog itself did not run since its last look; 0.0 for a moment."""
    gap_s = now - before if before is not None else 0.0
    return gap_s if gap_s > LOOK_S else 0.0


def _done(heartbeat: Heartbeat) -> tuple[int, str, int]:
    """What changes when a worker makes progress."""
    return heartbeat.step, heartbeat.phase, heartbeat.progress


def _raise_to(longest: dict[str, float], phase: str, seconds: float) -> None:
    longest[phase] = max(longest.get(phase, 0.0), seconds)


@dataclass
class Watch:
    """Learns from the steps and heartbeats of a run's workers."""

    step_s: float | None = None
    """How long a step takes in total; None before the first."""
    ranks: int = 1
    """Processes of a replica; their numbers follow each other."""
    load_s: float = 0.0
    """How long a worker waits for the data of a step."""
    _stretches: dict[str, float] = field(default_factory=dict)
    _busy: dict[str, float] = field(default_factory=dict)
    _seen: dict[int, KnownWorker] = field(default_factory=dict)
    _blamed: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Step and phase of a busy read with which a worker was lost; until it commits."""
    _now: float | None = None
    _all_still: bool = False
    """Whether all ready workers were stopped at once at the last look."""
    _all_silent_s: float = 0.0
    """How long all workers have been silent."""
    _passed_s: float = 0.0
    """How long the watchdog has seen them since the look before."""

    def take_up(self, step_s: float, load_s: float) -> None:
        """Know how long the last steps took under another master."""
        self.step_s, self.load_s = step_s, load_s

    def turn(self, now: float) -> None:
        """Let time pass; where the watchdog itself did not run for long, no worker is blamed."""
        away = away_s(self._now, now)
        self._passed_s = min(now - self._now, LOOK_S) if self._now is not None else 0.0
        self._now = now
        for seen in self._seen.values() if away else ():
            seen.last_heartbeat += away
            seen.since += away
            seen.worked += away

    def begins(self, worker: int, now: float, *, ready: bool = True) -> None:
        """Expect heartbeats of a worker; before it is ready only its reads have a timeout."""
        self.leaves(worker)
        self._seen[worker] = KnownWorker(now, now, ready=ready)

    def forms(self, worker: int, now: float) -> None:
        """A worker was sent `Form`; the time of its last heartbeat stays."""
        before = self._seen.get(worker, KnownWorker(now, now))
        self._seen[worker] = KnownWorker(
            before.last_heartbeat, now, cpu_s=before.cpu_s, steps=before.steps
        )

    def leaves(self, worker: int) -> None:
        """Expect no more of a worker; a read during which it was lost is learnt from."""
        seen = self._seen.pop(worker, None)
        if seen is None or seen.heartbeat is None or not seen.blamed_s:
            return
        phase = seen.heartbeat.phase
        self._blamed[worker] = seen.heartbeat.step, phase
        if phase == READING or phase in self._busy:
            _raise_to(self._busy, phase, min(seen.blamed_s, BLAMED_S))

    def heartbeat(self, worker: int, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat has come."""
        seen = self._seen.get(worker)
        if seen is None:
            return
        before, silent = seen.heartbeat, now - seen.last_heartbeat
        moves = before is None or _done(before) != _done(heartbeat)
        if self._all_still and (
            moves or silent > STILL_S
        ):  # the first to wake up is not ahead of the others
            self._all_still = False
            seen.since += silent
            for other in self._seen.values():
                if other is not seen:
                    other.last_heartbeat = other.since = now
        seen.last_heartbeat, seen.alone_s, self._all_silent_s = now, 0.0, 0.0
        if moves:
            first = before is not None and before.phase in OF_A_STEP and not seen.steps
            if before is not None and before.phase not in WAITING and not first:
                _raise_to(self._stretches, before.phase, now - seen.since)
                again = self._blamed.get(worker) == (before.step, before.phase)
                if seen.steps or again:  # else it may open what all later reads use
                    _raise_to(self._busy, before.phase, seen.busy_s)
            seen.since, seen.cpu_s, seen.blamed_s = now, heartbeat.cpu_s, 0.0
        if seen.since == now or heartbeat.cpu_s > seen.worked_cpu_s + WORKED_S:
            seen.worked, seen.worked_cpu_s = now, heartbeat.cpu_s
        seen.heartbeat = heartbeat

    def commits(self, worker: int, steps: int, seconds: float, load_s: float = 0.0) -> None:
        """A worker has committed steps, of so many seconds each, `load_s` of these for data."""
        first = self.step_s is None
        self.load_s = load_s if first else 0.8 * self.load_s + 0.2 * load_s
        self.step_s = seconds if self.step_s is None else 0.8 * self.step_s + 0.2 * seconds
        fade, slowly = FORGET**steps, FORGET_BUSY**steps
        self._stretches = {phase: s * fade for phase, s in self._stretches.items()}
        self._busy = {phase: s * slowly for phase, s in self._busy.items()}
        self._blamed.pop(worker, None)
        if worker in self._seen:
            self._seen[worker].steps += steps

    def limit_s(self, worker: int, now: float, times: int = 0) -> float:
        """How long a worker may get nothing done, where it was lost so often already."""
        seen = self._seen[worker]
        phase = seen.heartbeat.phase if seen.heartbeat else ""
        computes = phase in OF_A_STEP
        stretch = (self._stretches if computes else self._busy).get(phase, 0.0)
        known = computes or phase == READING or phase in self._busy
        usual = STEPS * max(self.load_s if phase == READING else self.step_s or 0.0, stretch)
        seen_before = seen.has_read if phase == READING else self.step_s and seen.steps
        usual = max(usual, FLOOR_S if known and seen_before else UNKNOWN_S)
        if phase == READING and now - seen.since > FLOOR_S / 2:
            long = times > 0 or usual >= UNKNOWN_S  # it gets enough, also if all others compute
            least = FLOOR_S / 2 if long else usual / 2
            if seen.busy_s >= max(least, BUSY * (now - seen.since)):
                return max(UNKNOWN_S, usual) if times else usual
        if not computes and seen.busy_s < max(usual * 2**times / 2, BUSY * (now - seen.since)):
            usual = max(UNKNOWN_S, usual, STEPS * self._stretches.get(phase, 0.0))
        return float(usual * 2**times)

    def hangs(
        self,
        now: float,
        times: dict[int, int],
        is_stopped: Callable[[int], bool] = lambda worker: False,
        least_s: float = FLOOR_S,
    ) -> list[Hang]:
        """Who hangs.

        Args:
            now: seconds, on the clock of the rest.
            times: how often each worker was lost at this very place.
            is_stopped: whether the system knows that a worker's process does not run; asked
                about one that is silent while it gets ready.
            least_s: nobody hangs for less.
        """
        found: list[Hang] = []
        excused: list[Hang] = []  # where all stop at once, the cause is hardly one of them
        loops: dict[int, float] = {}  # one that keeps a processor busy is not stopped
        still = {
            worker for worker, seen in self._seen.items() if now - seen.last_heartbeat > STILL_S
        }
        for worker, seen in self._seen.items():
            silent, idle = now - seen.last_heartbeat, now - seen.since
            if silent <= least_s and idle <= least_s:
                continue  # as a rule no limit is less; of many workers nearly all are skipped here
            often = times.get(worker, 0)
            at = seen.heartbeat or (_NO_HEARTBEAT if seen.ready else _GETTING_READY)
            if self._is_silent(seen, silent / 2**often, partial(is_stopped, worker)):
                how = f"gave no sign of life for {silent:.1f} s"
                among = excused if seen.ready and silent <= UNKNOWN_S else found
            elif self._may_hang(seen, at) and idle > self.limit_s(worker, now, often):
                if self._waits_for_fellow(worker, now):
                    continue
                how = f"got nothing done for {idle:.1f} s"
                loops |= {worker: idle} if seen.reads_busily(now) else {}
                among = found if idle > UNKNOWN_S else excused
            elif self._never_meets(worker, now, often):
                how = f"got nothing done for {now - seen.worked:.1f} s"
                among = found
            else:
                continue
            among.append(Hang(worker, at.step, at.phase, how, worker in loops))
        all_of_them = sorted([*found, *excused])
        still |= {hang.worker for hang in all_of_them}
        ready = {worker for worker, seen in self._seen.items() if seen.ready}
        named = all_of_them
        if ready <= still:  # of those that loop, one at a time: the others hold the state
            longest = max(loops, key=loops.__getitem__, default=None)
            named = [hang for hang in all_of_them if hang in found or hang.worker == longest]
        self._all_still = bool(all_of_them) and not named
        named = self._one_of_each_replica(named)
        for worker in loops.keys() & {hang.worker for hang in named}:
            self._seen[worker].blamed_s = now - self._seen[worker].since
        return named

    def _never_meets(self, worker: int, now: float, times: int) -> bool:
        """Whether all processes of its replica wait for each other before they are ready."""
        first = worker - worker % self.ranks
        fellows = [self._seen.get(n) for n in range(first, first + self.ranks)]
        return self.ranks > 1 and all(
            seen
            and seen.heartbeat
            and seen.heartbeat.phase == MEETING
            and now - seen.worked > MEETS_S * 2**times
            for seen in fellows
        )

    def _waits_for_fellow(self, worker: int, now: float) -> bool:
        """Whether another process of its replica holds it up, inside a pass that all run at once.

        That is one that is silent, that has not come as far, or that computes meanwhile.
        """
        seen, first = self._seen[worker], worker - worker % self.ranks
        others = [self._seen.get(n) for n in range(first, first + self.ranks) if n != worker]
        if seen.heartbeat is None or seen.heartbeat.phase == READING:
            return False
        return any(other and self._holds_up(other, seen, seen.heartbeat, now) for other in others)

    def _holds_up(self, one: KnownWorker, other: KnownWorker, at: Heartbeat, now: float) -> bool:
        if one.heartbeat is None or now - one.last_heartbeat > STILL_S:
            return True
        in_a_pass = one.heartbeat.phase in OF_A_STEP or one.heartbeat.phase in AFTER_A_PASS
        if one.heartbeat.step < at.step or not (in_a_pass or one.heartbeat.phase == at.phase):
            return True
        return one.is_busy(now) and not other.is_busy(now)

    def _one_of_each_replica(self, hangs: list[Hang]) -> list[Hang]:
        """Of those that share a replica, the one that has got nothing done for longest."""
        longest: dict[int, Hang] = {}
        for hang in sorted(hangs, key=lambda hang: self._seen[hang.worker].since):
            longest.setdefault(hang.worker // self.ranks, hang)
        return [hang for hang in hangs if hang in longest.values()]

    def _may_hang(self, seen: KnownWorker, at: Heartbeat) -> bool:
        """Whether it must make progress; before it is ready that holds for its reads only."""
        return at.phase not in WAITING if seen.ready else at.phase == READING

    def _is_silent(self, seen: KnownWorker, seconds: float, is_stopped: Callable[[], bool]) -> bool:
        """Whether seconds without a sign are too many.

        A compiler may keep the interpreter's lock for longer than a step does.
        """
        usual = UNKNOWN_S / 3 if self.step_s is None else max(FLOOR_S, STEPS * self.step_s)
        if seconds <= usual:
            return False
        compiles = seen.heartbeat is not None and seen.heartbeat.phase == COMPILING
        return (seen.ready and not compiles) or seconds > UNKNOWN_S or is_stopped()

    def stuck_s(self, members: Iterable[int], now: float, times: int = 0) -> float:
        """How long all members have been in one exchange that does not move; 0.0 if they are not.

        More than a moment, which is what an exchange may take, or `UNKNOWN_S` before the first
        step; twice as long for each time that the group has come apart already.
        """
        seen = [self._seen.get(worker) for worker in members]
        if len(seen) < 2:
            return 0.0
        waits = []
        for each in seen:
            if each is None or each.heartbeat is None or each.heartbeat.phase != "exchange":
                return 0.0
            waits.append(now - each.since)
        usual = UNKNOWN_S if self.step_s is None else max(FLOOR_S, STEPS * self.step_s)
        limit_s = usual * 2 ** min(times, 6)
        return min(waits) if min(waits) > limit_s else 0.0

    def silent(self, now: float) -> Silent | None:
        """A worker that was silent for too long, where none can be replaced."""
        silent = {n: seen for n, seen in self._seen.items() if now - seen.last_heartbeat > FLOOR_S}
        if len(silent) == len(self._seen):
            self._all_silent_s += self._passed_s if silent else 0.0
        else:
            self._all_silent_s = 0.0
            for seen in silent.values():
                seen.alone_s += self._passed_s
        everybody = self._all_silent_s > ALL_SILENT_S
        late = [n for n, seen in silent.items() if everybody or seen.alone_s > SILENT_S]
        if not late:
            return None
        first = min(late, key=lambda worker: (silent[worker].last_heartbeat, worker))
        return Silent(first, now - silent[first].last_heartbeat, everybody)
