"""The process of a pool's scheduler: journal, requests, hosts and runs, until it is ended.

Ended or killed, it disturbs no run. Where its journal cannot be written, as on a full disk, it
decides nothing, says so, and tries again. Way in: `serve`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from instep.detached.warm import WarmStarts
from instep.errors import RunError
from instep.launch.join_folder import JoinFolder
from instep.plain_file import read_plain
from instep.pool.hosts.host_gate import HostGate
from instep.pool.hosts.placement import all_away
from instep.pool.jobs import PoolEvent
from instep.pool.local_runs import LocalRuns, gate_file
from instep.pool.notice import SchedulerNotice
from instep.pool.pool_file import PoolFolder
from instep.pool.pool_journal import PoolJournal
from instep.pool.requests import pending
from instep.pool.scheduler import PoolScheduler
from instep.system.processes import interrupt, on_signals
from instep.units import host_and_port

STARTED = "hosts"
"""Folder of what was started on hosts: files that are locked, and output."""

TURN_S = 0.1
"""Between two looks at the runs."""

LOOK_S = 0.02
"""Between two looks for requests."""

RETRY_S = 1.0
"""Before the journal is tried again, where it could not be written."""


def serve(pool: PoolFolder) -> None:
    """Schedule until Ctrl-C or SIGTERM.

    Raises:
        RunError: the journal cannot be used.
        SpecError: nothing can listen where hosts are to join.
    """
    spec = pool.spec
    gate = _gate(pool) if spec.hosts else None
    journal = PoolJournal(pool.folder, write=True)
    warm, notice = WarmStarts(), SchedulerNotice(pool.folder)
    address = host_and_port(spec.listen)[0] if spec.hosts else ""
    hands = LocalRuns(pool.jobs, pool.runs, warm.start, [*spec.hosts], address)
    state = all_away(journal.load(pool.empty), time.time())
    scheduler, seen = PoolScheduler(state, journal, hands), list[PoolEvent]()
    try:
        with suppress(KeyboardInterrupt), on_signals(interrupt):
            while True:
                if gate is not None:
                    seen += [*gate.turn(), *gate.gone(pool.folder / STARTED)]
                if turn(pool, scheduler, notice, time.time(), seen):
                    seen.clear()
                    if gate is not None:
                        gate.noted()
                    _wait(pool)
                else:
                    time.sleep(RETRY_S)
                if gate is not None:
                    gate.attend(scheduler.state, _gate_of(pool))
                    gate.start_missing(pool.folder / STARTED, scheduler.state)
                    seen += gate.give_back(scheduler.state)
                warm.look()
        if gate is not None:  # ended, not killed
            gate.end_started(pool.folder / STARTED)
    finally:
        if gate is not None:
            gate.close()
        warm.close()
        notice.close()
        journal.close()


def turn(
    pool: PoolFolder,
    scheduler: PoolScheduler,
    notice: SchedulerNotice,
    now: float,
    seen: Sequence[PoolEvent] = (),
) -> bool:
    """Take the requests of a pool, and what was seen of its hosts, and do what follows.

    Returns:
        Whether it was done; if not, the notice says why, and what is journaled is as it was.
    """
    try:
        waiting = [*pending(pool.folder)]
        scheduler.turn([*seen, *(request for _, request in waiting)], now)
        for path, _ in waiting:  # journaled
            path.unlink(missing_ok=True)
    except (OSError, RunError) as error:
        if notice.say(f"it waits, and starts or changes nothing: {error}"):
            with suppress(OSError):  # that of the log, which may be on the same disk
                print(f"warning {error} The scheduler tries again.", file=sys.stderr, flush=True)
        return False
    notice.say("")
    return True


def _gate(pool: PoolFolder) -> HostGate:
    spec, folder = pool.spec, JoinFolder(pool.certificates)
    folder.prepare(len(spec.hosts))

    def say(text: str) -> None:
        print(f"host    {text}", file=sys.stderr, flush=True)

    return HostGate(host_and_port(spec.listen), spec.hosts, folder, say)


def _gate_of(pool: PoolFolder) -> Callable[[str], str]:
    """Tell where the client of a job's run listens for hosts; empty if it does not yet."""

    def find(job: str) -> str:
        with suppress(OSError, UnicodeDecodeError):
            return read_plain(gate_file(pool.jobs, job)).decode()
        return ""

    return find


def check_journal(pool: PoolFolder) -> None:
    """Open the journal of a pool without a scheduler, as `serve` will.

    Raises:
        RunError: it cannot be used.
    """
    journal = PoolJournal(pool.folder, write=True)
    try:
        journal.load(pool.empty)
        journal.check()
    finally:
        journal.close()


def check_listening(pool: PoolFolder) -> None:
    """Listen for a moment where the hosts of a pool without a scheduler join, as `serve` will.

    Raises:
        SpecError: nothing can listen there.
    """
    if pool.spec.hosts:
        _gate(pool).close()


def _wait(pool: PoolFolder) -> None:
    """Wait for the next turn, or until there is a request."""
    end = time.monotonic() + TURN_S
    while time.monotonic() < end and next(pending(pool.folder), None) is None:
        time.sleep(LOOK_S)
