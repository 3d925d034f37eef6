"""The process of a pool's scheduler: journal, requests and runs of this machine, until it is ended.

Ended or killed, it disturbs no run. Way in: `serve`.
"""

from __future__ import annotations

import time
from contextlib import suppress

from instep.detached.warm import WarmStarts
from instep.pool.local_runs import LocalRuns
from instep.pool.pool_file import PoolFolder
from instep.pool.pool_journal import PoolJournal
from instep.pool.requests import pending
from instep.pool.scheduler import PoolScheduler
from instep.system.processes import interrupt, on_signals

TURN_S = 0.1
"""Between two looks at the runs."""

LOOK_S = 0.02
"""Between two looks for requests."""


def serve(pool: PoolFolder) -> None:
    """Schedule until Ctrl-C or SIGTERM.

    Raises:
        RunError: the journal cannot be used.
    """
    journal = PoolJournal(pool.folder, write=True)
    warm = WarmStarts()
    hands = LocalRuns(pool.jobs, pool.runs, warm.start)
    scheduler = PoolScheduler(journal.load(pool.empty), journal, hands)
    try:
        with suppress(KeyboardInterrupt), on_signals(interrupt):
            while True:
                waiting = [*pending(pool.folder)]
                scheduler.turn([request for _, request in waiting], time.time())
                for path, _ in waiting:  # journaled
                    path.unlink(missing_ok=True)
                warm.look()
                _wait(pool)
    finally:
        warm.close()
        journal.close()


def check_journal(pool: PoolFolder) -> None:
    """Open the journal of a pool without a scheduler, as `serve` will.

    Raises:
        RunError: it cannot be used.
    """
    journal = PoolJournal(pool.folder, write=True)
    try:
        journal.load(pool.empty)
    finally:
        journal.close()


def _wait(pool: PoolFolder) -> None:
    """Wait for the next turn, or until there is a request."""
    end = time.monotonic() + TURN_S
    while time.monotonic() < end and next(pending(pool.folder), None) is None:
        time.sleep(LOOK_S)
