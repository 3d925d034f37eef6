"""The workers of a preparation: started, given tasks, watched, and replaced when they are lost.

They are on this machine (`local_worker.py`), or on hosts (`hosts.py`); then those of this machine
do what needs the folder of results, if no host sees it. A task of a worker that was lost goes to
another; one that has cost several workers ends the command. What the tasks are is not known here.
Way in: `Crew`.
"""

from __future__ import annotations

import multiprocessing.connection
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from instep import errors
from instep.errors import InstepError, WorkerError
from instep.prepare.messages import NEAR, Answer, Beat, Done, Failed, Setup, Task
from instep.prepare.workers.hosts import Hosts
from instep.prepare.workers.local_worker import LocalWorker, Worker

MOST_LOST = 3
"""A task that has cost so many workers ends the command."""

TURN_S = 0.2
"""How long the crew waits for a message."""

Seats = list[LocalWorker | None]


class Interrupted(Exception):
    """A signal has asked for the end."""


class Crew:
    """Does tasks on several processes.

    Args:
        setup: the first message to each.
        workers: how many processes this machine has.
        say: prints a line.
        asked: signals that have come to stop; looked at several times a second.
        again: whether one more process tries records again.
        hosts: has the workers for all that does not need the folder of results.
    """

    def __init__(
        self,
        setup: Setup,
        workers: int,
        say: Callable[[str], None],
        asked: list[int],
        *,
        again: bool = False,
        hosts: Hosts | None = None,
    ) -> None:
        self._setup, self._say, self._asked, self._hosts = setup, say, asked, hosts
        self._workers: Seats = [None] * workers
        self._second: Seats = [None] if again else []
        self._logs = Path(setup.folder) / "logs"
        self._lost = Counter[int]()
        self.lost = 0
        """Workers that were lost."""

    def do(
        self,
        tasks: Iterable[Task],
        repeat: Callable[[Done], Task | None] = lambda _: None,
        again: Iterable[Task] = (),
    ) -> Iterator[Done]:
        """Do all tasks; results come in the order in which they are there.

        Args:
            tasks: numbers differ.
            repeat: what the second process is to try of a result.
            again: what it is to try of results that are there.

        Raises:
            InstepError: a task cannot be done.
            Interrupted: a signal has come.
        """
        left, open_again = deque(tasks), deque(again)
        numbers = {task.number for task in left}
        done = set[int]()
        while len(done) < len(numbers) or open_again or self._busy(self._second):
            if self._asked:
                raise Interrupted
            self._hand_out(left)
            self._hand_out_here(self._second, open_again)
            for worker, answer in self._answers():
                if isinstance(answer, Beat):
                    worker.at = answer
                    continue
                if isinstance(answer, Failed):
                    raise getattr(errors, answer.kind, InstepError)(answer.text)
                worker.task = None
                for number in (-1, answer.number):  # another part may have tasks of these numbers
                    self._lost.pop(number, None)
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

    def _busy(self, workers: Seats) -> bool:
        return any(worker is not None and worker.task is not None for worker in workers)

    def _hand_out(self, left: deque[Task]) -> None:
        """Give tasks to workers that have none; those of one call are all near, or all are not."""
        near = bool(left) and isinstance(left[0], NEAR)
        if self._hosts is not None and left:
            if not near:
                self._hosts.start()
            fit = [worker for worker in self._hosts.workers if worker.near or not near]
            for worker in fit:
                if left and worker.task is None and not worker.ended:
                    worker.give(left.popleft())
            if fit or not near:
                return
        self._hand_out_here(self._workers, left)

    def _hand_out_here(self, workers: Seats, tasks: deque[Task]) -> None:
        for number, worker in enumerate(workers):
            if not tasks:
                return
            if worker is None:
                name = f"worker-{number}.log" if workers is self._workers else "again.log"
                log = self._logs / name
                workers[number] = worker = LocalWorker(self._setup, log, self.lost)
            if worker.task is None and not worker.ended:
                worker.give(tasks.popleft())

    def _here(self) -> Iterator[tuple[Seats, int, LocalWorker]]:
        for workers in (self._workers, self._second):
            for number, worker in enumerate(workers):
                if worker is not None:
                    yield workers, number, worker

    def _answers(self) -> Iterator[tuple[Worker, Answer]]:
        """Messages that workers have sent."""
        by_connection = {w.connection: w for _, _, w in self._here() if not w.gone}
        hosts = [self._hosts] if self._hosts is not None and self._hosts.started else []
        if not by_connection and not hosts:
            return
        waited: list[Any] = [*by_connection, *hosts]
        for ready in multiprocessing.connection.wait(waited, TURN_S):
            worker = by_connection.get(ready)  # type: ignore[call-overload]
            try:
                while worker is not None and worker.connection.poll():
                    found = msgspec.msgpack.decode(worker.connection.recv_bytes(), type=Answer)
                    worker.lease.renew(time.monotonic())
                    yield worker, found
            except (EOFError, OSError):
                worker.gone = True
        for each in hosts:
            yield from each.turn(time.monotonic())

    def _watch(self, left: deque[Task], open_again: deque[Task]) -> None:
        now = time.monotonic()
        for workers, number, worker in list(self._here()):
            if not worker.ended:
                worker.turn(now)
                continue
            if not worker.gone and worker.connection.poll():
                continue  # its last messages come first
            self._lose(worker, left if workers is self._workers else open_again)
            workers[number] = None
        for lost in self._hosts.take_lost() if self._hosts is not None else []:
            self._lose(lost, left)

    def _lose(self, worker: Worker, tasks: deque[Task]) -> None:
        """A worker has ended: its task goes to another."""
        self.lost += 1
        task, how = worker.task, worker.how
        place = f" in {worker.at.where}" if worker.at.where else ""
        printed = f" The last one printed: {last}." if (last := worker.printed) else ""
        worker.close()
        number = task.number if task is not None else -1
        self._lost[number] += worker.blamed
        if self._lost[number] >= MOST_LOST:
            raise WorkerError(
                f"{MOST_LOST} workers were lost{place}, one after another: {how}.{printed} "
                f"What they printed is in {self._logs}."
            )
        self._say(f"a worker was lost{place}: {how}; another does its part again")
        if task is not None:
            tasks.appendleft(task)

    def close(self) -> None:
        """End all processes."""
        if self._hosts is not None:
            self._hosts.close()
        for workers, number, worker in list(self._here()):
            worker.kill()
            worker.close()
            workers[number] = None
