"""Workers that hang and were asked where they stand, until they have answered or had their time.

How a process is asked and its answer read is `stacks.py`'s; that it hangs,
`watch.py`'s. Way in: `Questions`.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path

from instep.control.hosts import Process
from instep.control.state import Hung
from instep.data.threads import ASK_READER
from instep.system.stacks import (
    ASK,
    deepest_line,
    is_whole,
    last_stack,
    stack_file,
    waits_for_reader,
)

LAST_WORD_S = 0.4
"""How long a process that hangs may take to tell where it stands."""


@dataclass
class _Asked:
    """A worker that was asked."""

    hung: Hung
    process: Process
    until: float
    since_bytes: int
    """Of its log, when it was."""
    told: int = 0
    """Length of its answer when the thread that reads was asked too; 0 before."""


class Questions:
    """Those that are open.

    Args:
        run: the run folder, with the logs of the workers.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._asked: dict[int, _Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def __contains__(self, worker: object) -> bool:
        return worker in self._asked

    def ask(self, hung: Hung, process: Process, now: float) -> None:
        """Have a worker's process tell where it stands; if it was stopped, it has to go on.

        Args:
            hung: the worker, and how it hangs.
            process: its process.
            now: seconds.
        """
        file = stack_file(self._run, hung.worker)
        size = file.stat().st_size if file.exists() else 0
        self._asked[hung.worker] = _Asked(hung, process, now + LAST_WORD_S, size)
        process.signal(ASK)
        process.signal(signal.SIGCONT)

    def answered(self, now: float) -> list[Hung]:
        """Who has answered, or has had its time, with what is known of where it stands."""
        over = []
        for worker, asked in self._asked.items():
            stack = self._stack(asked)
            whole = is_whole(stack) and len(stack) > asked.told
            if whole and not asked.told and waits_for_reader(stack):
                asked.told = len(stack)
                asked.process.signal(ASK_READER)
            elif whole or now > asked.until:
                over.append(worker)
        return [hung for worker in over for hung in self.close(worker)]

    def close(self, worker: int) -> list[Hung]:
        """Wait no longer for a worker; what is known of it, if it was asked."""
        asked = self._asked.pop(worker, None)
        if asked is None:
            return []
        return [replace(asked.hung, where=deepest_line(self._stack(asked)))]

    def _stack(self, asked: _Asked) -> str:
        return last_stack(stack_file(self._run, asked.hung.worker), asked.since_bytes)
