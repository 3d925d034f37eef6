"""The process of a pool's scheduler: journal, requests and runs of this machine, until it is ended.

Ended or killed, it disturbs no run. Where its journal cannot be written, as on a full disk, it
decides nothing, says so, and tries again. Way in: `serve`.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from instep.detached.warm import WarmStarts
from instep.errors import RunError
from instep.pool.local_runs import LocalRuns
from instep.pool.notice import SchedulerNotice
from instep.pool.pool_file import PoolFolder
from instep.pool.pool_journal import PoolJournal
from instep.pool.requests import pending
from instep.pool.scheduler import PoolScheduler
from instep.system.processes import interrupt, on_signals

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
    """
    journal = PoolJournal(pool.folder, write=True)
    warm, notice = WarmStarts(), SchedulerNotice(pool.folder)
    hands = LocalRuns(pool.jobs, pool.runs, warm.start)
    scheduler = PoolScheduler(journal.load(pool.empty), journal, hands)
    try:
        with suppress(KeyboardInterrupt), on_signals(interrupt):
            while True:
                if turn(pool, scheduler, notice, time.time()):
                    _wait(pool)
                else:
                    time.sleep(RETRY_S)
                warm.look()
    finally:
        warm.close()
        notice.close()
        journal.close()


def turn(pool: PoolFolder, scheduler: PoolScheduler, notice: SchedulerNotice, now: float) -> bool:
    """Take the requests of a pool, and do what follows.

    Returns:
        Whether it was done; if not, the notice says why, and what is journaled is as it was.
    """
    try:
        waiting = [*pending(pool.folder)]
        scheduler.turn([request for _, request in waiting], now)
        for path, _ in waiting:  # journaled
            path.unlink(missing_ok=True)
    except (OSError, RunError) as error:
        if notice.say(f"it waits, and starts or changes nothing: {error}"):
            with suppress(OSError):  # that of the log, which may be on the same disk
                print(f"warning {error} The scheduler tries again.", file=sys.stderr, flush=True)
        return False
    notice.say("")
    return True


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


def _wait(pool: PoolFolder) -> None:
    """Wait for the next turn, or until there is a request."""
    end = time.monotonic() + TURN_S
    while time.monotonic() < end and next(pending(pool.folder), None) is None:
        time.sleep(LOOK_S)
