"""Asks a worker that hangs for its stack, and waits a moment for the answer.

How a process is asked and its answer read is in `system/stacks.py`, that it hangs in
`watch.py`. Way in: `StackRequests`.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path

from instep.control.decisions.events import Hung
from instep.control.hosts.hosts import Process
from instep.data.reading.threads import ASK_READER, deepest_line, is_whole
from instep.system.stacks import (
    ASK,
    last_stack,
    stack_file,
    waits_for_loader,
    waits_for_reader,
)

LAST_WORD_S = 0.4
"""How long a process that hangs may take to write its stack."""

_IN_LOADER = "it waits for a loader process; data.loaders = 0 reads in the worker"


@dataclass
class _Asked:
    """A worker that was asked."""

    hung: Hung
    process: Process
    until: float
    since_bytes: int
    """Length of its log when it was asked."""
    answered_bytes: int = 0
    """Length of its answer when the thread that reads was asked too; 0 before that."""


class StackRequests:
    """The workers that were asked and have not answered.

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
        """Ask a worker's process for its stack; if it was stopped, wake it.

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
        """Workers that have answered or timed out, with the line of code if it is known."""
        over = []
        for worker, asked in self._asked.items():
            stack = self._stack(asked)
            whole = is_whole(stack) and len(stack) > asked.answered_bytes
            if whole and not asked.answered_bytes and waits_for_reader(stack):
                asked.answered_bytes = len(stack)
                asked.process.signal(ASK_READER)
            elif whole or now > asked.until:
                over.append(worker)
        return [hung for worker in over for hung in self.close(worker)]

    def close(self, worker: int) -> list[Hung]:
        """Wait no longer for a worker; returns what is known, if it was asked."""
        asked = self._asked.pop(worker, None)
        if asked is None:
            return []
        stack = self._stack(asked)
        where = _IN_LOADER if waits_for_loader(stack) else deepest_line(stack)
        return [replace(asked.hung, where=where)]

    def _stack(self, asked: _Asked) -> str:
        return last_stack(stack_file(self._run, asked.hung.worker), asked.since_bytes)
