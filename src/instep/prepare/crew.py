"""The workers of a preparation: started, given tasks, watched, and replaced when they are lost.

Each is watched by its exit and by its silence (`system/lease.py`). A task of a worker that was lost
goes to another; one that has cost several workers ends the command. What the tasks are is not known
here. Way in: `Crew`.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from instep import errors
from instep.control.endings import signal_name
from instep.errors import MOST_OF_A_TEXT, InstepError, WorkerError
from instep.prepare.messages import Answer, Beat, Done, Failed, Setup, Task
from instep.system.environment import POOLS
from instep.system.lease import Lease
from instep.system.processes import start_with_retries
from instep.words import printable

MOST_LOST = 3
"""A task that has cost so many workers ends the command."""

_MOST_TIMES = 4

TURN_S = 0.2
"""How long the crew waits for a message."""


class Interrupted(Exception):
    """A signal has asked for the end."""


class Worker:
    """One process.

    Args:
        setup: its first message.
        log: file for what it prints.
        times: how many were lost before; each doubles how long one may be silent.
    """

    def __init__(self, setup: Setup, log: Path, times: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.connection: Connection = ours
        command = [sys.executable, "-m", "instep.prepare.process", str(theirs.fileno())]
        environment = {**os.environ, **dict.fromkeys(POOLS, "1")}  # workers are as many as cores
        package = str(Path(__file__).parents[2])  # also where instep is only on sys.path
        paths = [package, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with open(log, "ab") as file:
            self.process = start_with_retries(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        theirs.close()
        self.log = log
        self.task: Task | None = None
        self.at = Beat()
        self.killed, self.gone = "", False
        self.lease = Lease(self.process.pid, time.monotonic(), times=min(times, _MOST_TIMES))
        self.send(setup)

    def send(self, message: msgspec.Struct) -> None:
        """Send it a message; if it is gone, that is seen elsewhere."""
        with suppress(OSError):
            self.connection.send_bytes(msgspec.msgpack.encode(message))

    def give(self, task: Task) -> None:
        """Give it a task."""
        self.task = task
        self.send(task)

    def kill(self, how: str = "") -> None:
        """End it at once."""
        self.killed = self.killed or how
        self.process.kill()

    def close(self) -> None:
        """Wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self.connection.close()

    @property
    def how(self) -> str:
        """How it ended."""
        code = self.process.wait()
        if self.killed:
            return self.killed
        return (
            f"it was killed by {signal_name(-code)}" if code < 0 else f"it ended with code {code}"
        )


class Crew:
    """Does tasks on several processes.

    Args:
        setup: the first message to each.
        workers: how many processes.
        say: prints a line.
        asked: signals that have come to stop; looked at several times a second.
        again: whether one more process tries records again.
    """

    def __init__(
        self,
        setup: Setup,
        workers: int,
        say: Callable[[str], None],
        asked: list[int],
        *,
        again: bool = False,
    ) -> None:
        self._setup, self._say, self._asked = setup, say, asked
        self._workers: list[Worker | None] = [None] * workers
        self._second: list[Worker | None] = [None] if again else []
        self._logs = Path(setup.folder) / "logs"
        self._lost = Counter[int]()
        self.lost = 0
        """Workers that were lost."""

    def do(
        self, tasks: Iterable[Task], repeat: Callable[[Done], Task | None] = lambda _: None
    ) -> Iterator[Done]:
        """Do all tasks; results come in the order in which they are there.

        Args:
            tasks: numbers differ.
            repeat: what the second process is to try of a result.

        Raises:
            InstepError: a task cannot be done.
            Interrupted: a signal has come.
        """
        left, open_again = deque(tasks), deque[Task]()
        numbers = {task.number for task in left}
        done = set[int]()
        while len(done) < len(numbers) or open_again or self._busy(self._second):
            if self._asked:
                raise Interrupted
            self._hand_out(self._workers, left)
            self._hand_out(self._second, open_again)
            for worker, answer in self._answers():
                if isinstance(answer, Beat):
                    worker.at = answer
                    continue
                if isinstance(answer, Failed):
                    raise getattr(errors, answer.kind, InstepError)(answer.text)
                worker.task = None
                self._second_result(worker, answer)
                if worker not in self._second and answer.number not in done:
                    done.add(answer.number)
                    if self._second and (task := repeat(answer)) is not None:
                        open_again.append(task)
                    yield answer
            self._watch(left, open_again)

    def _second_result(self, worker: Worker, answer: Done) -> None:
        if worker in self._second and answer.value:
            raise errors.RecipeError(
                f"the function gives other samples when it is called again: {answer.value}. It may "
                "depend on the record alone: on no time, no order of a set or dict of hashes, no "
                "file that changes; random draws come from random, numpy.random or torch."
            )

    def where(self) -> list[Beat]:
        """Where each worker is."""
        return [worker.at for worker in self._workers if worker is not None and worker.task]

    def _busy(self, workers: list[Worker | None]) -> bool:
        return any(worker is not None and worker.task is not None for worker in workers)

    def _hand_out(self, workers: list[Worker | None], tasks: deque[Task]) -> None:
        for number, worker in enumerate(workers):
            if not tasks:
                return
            if worker is None:
                name = f"worker-{number}.log" if workers is self._workers else "again.log"
                workers[number] = worker = Worker(self._setup, self._logs / name, self.lost)
            if worker.task is None and worker.process.poll() is None:
                worker.give(tasks.popleft())

    def _all(self) -> Iterator[tuple[list[Worker | None], int, Worker]]:
        for workers in (self._workers, self._second):
            for number, worker in enumerate(workers):
                if worker is not None:
                    yield workers, number, worker

    def _answers(self) -> Iterator[tuple[Worker, Answer]]:
        """What has come."""
        by_connection = {w.connection: w for _, _, w in self._all() if not w.gone}
        if not by_connection:
            return
        for ready in multiprocessing.connection.wait(list(by_connection), TURN_S):
            worker = by_connection[ready]  # type: ignore[index]
            try:
                while worker.connection.poll():
                    found = msgspec.msgpack.decode(worker.connection.recv_bytes(), type=Answer)
                    worker.lease.renew(time.monotonic())
                    yield worker, found
            except (EOFError, OSError):
                worker.gone = True

    def _watch(self, left: deque[Task], open_again: deque[Task]) -> None:
        now = time.monotonic()
        for workers, number, worker in list(self._all()):
            if worker.process.poll() is None:
                if how := "it hung up" if worker.gone else worker.lease.turn(now):
                    worker.kill(how)
                continue
            if not worker.gone and worker.connection.poll():
                continue  # its last messages come first
            self._lose(worker, left if workers is self._workers else open_again)
            workers[number] = None

    def _lose(self, worker: Worker, tasks: deque[Task]) -> None:
        """A worker has ended: its task goes to another."""
        self.lost += 1
        task, how = worker.task, worker.how
        place = f" in {worker.at.where}" if worker.at.where else ""
        last = _last_line(worker.log)
        printed = f" The last one printed: {last}." if last else ""
        worker.close()
        number = task.number if task is not None else -1
        self._lost[number] += 1
        if self._lost[number] >= MOST_LOST:
            raise WorkerError(
                f"{MOST_LOST} workers were lost{place}, one after another: {how}.{printed} "
                f"All that they printed is in {self._logs}."
            )
        self._say(f"a worker was lost{place}: {how}; another does its part again")
        if task is not None:
            tasks.appendleft(task)

    def close(self) -> None:
        """End all processes."""
        for workers, number, worker in list(self._all()):
            worker.process.send_signal(signal.SIGKILL)
            worker.close()
            workers[number] = None


def _last_line(log: Path) -> str:
    """The last that a process printed, shortened."""
    with suppress(OSError):
        lines = log.read_text(errors="replace").split("\n")
        return next(
            (printable(line.strip()[:MOST_OF_A_TEXT]) for line in reversed(lines) if line.strip()),
            "",
        )
    return ""
