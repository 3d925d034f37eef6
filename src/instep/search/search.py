"""Runs a search: chooses trials in a fixed order, keeps their runs going, and tells their results.

Which trials there are follows from the job and from results alone: trial n is chosen when those up
to n - width are told, in the order of their numbers. Where a run is, how many workers it has, and
what is killed on the way decide only the time. All is written before it is done (`record.py`), and
a search that is started again continues. Way in: `Search.conduct`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from instep import detached
from instep.client.running import scale
from instep.errors import DataError, InstepError, RecipeError, RunError, SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.plain_file import read_plain, replace_plain
from instep.search.allotment import allot
from instep.search.clients import Clients, job_file, log_of
from instep.search.plan import trial_job
from instep.search.pruning import bounds_of
from instep.search.record import SearchRecord
from instep.search.results import (
    Result,
    ToldTrial,
    best_of,
    check_metric,
    is_over,
    name_of,
    result_of,
)
from instep.search.sampling import TrialSampler
from instep.store.run_folder import RunFolder

LOOK_S = 0.05
"""Between two looks at the processes of trials."""

SCALE_S = 2.0
"""A trial gets another number of workers at most so often."""

MOST_FAILURES = 4
"""Ends of a trial's run without a step more than at the end before."""

REFUSED = {error.exit_code: error for error in (SpecError, RecipeError, DataError)}
"""The next try would end in the same way."""


class Search:
    """One search, in a folder that this process has locked.

    Args:
        folder: of the search.
        job: that all trials share.
        record: of the search.
        capacity: worker processes that there is room for at once; or a file that says how many,
            which is read again and again.
        tell: called with the number of a trial that is over, and its result.
        look: called with the search at every look at its processes; must not block.
    """

    def __init__(
        self,
        folder: Path,
        job: JobSpec,
        record: SearchRecord,
        capacity: int | Path,
        tell: Callable[[int, ToldTrial], object],
        look: Callable[[Search], object] = lambda search: None,
    ) -> None:
        self.folder, self.job, self.upwards = folder, job, job.stop.upwards
        self._record, self._tell, self._look = record, tell, look
        self._room, self.capacity = capacity, job.mesh.ranks
        self.read_capacity()
        self._sampling = TrialSampler(job.search, job.seed, upwards=self.upwards)
        self.trials = self._sampling.trials
        self.chosen, self.results = record.chosen(), record.results()
        self._clients = Clients(folder)
        self.workers: dict[int, int] = {}
        """Workers of each trial that is running."""
        self._failures: dict[int, list[int]] = {}  # last step at each end of a run in vain
        self._scaled: dict[int, float] = {}
        self._least_wait: dict[int, float] = {}
        self._parked: set[int] = set()  # trials that were asked to stop, as there is no room

    def conduct(self) -> None:
        """Go on until every trial has its result.

        Raises:
            InstepError: trials cannot be run at all; the text says why.
            KeyboardInterrupt: Ctrl-C or SIGTERM came; the runs have stopped, and are saved.
        """
        (self.folder / "jobs").mkdir(exist_ok=True)
        with self._clients.warm():
            try:
                while len(self.results) < self.trials:
                    self.read_capacity()
                    self.choose()
                    self._settle()
                    self._place()
                    self._clients.look()
                    self._look(self)
                    time.sleep(LOOK_S)
            except KeyboardInterrupt:
                for number in self.workers.keys() - self._parked:
                    self._clients.interrupt(number)
                while any(self._clients.is_alive(number) for number in self.workers):
                    time.sleep(LOOK_S)
                raise

    def read_capacity(self) -> None:
        """Take how many workers there is room for."""
        if isinstance(self._room, int):
            self.capacity = self._room
            return
        with suppress(OSError, ValueError):  # then as before
            self.capacity = max(self.job.mesh.ranks, int(read_plain(self._room)))

    @property
    def told(self) -> int:
        """How many trials are told: those before the first that is not over."""
        return next((n for n in range(len(self.chosen)) if n not in self.results), len(self.chosen))

    @property
    def best(self) -> int | None:
        """The number of the best trial that has completed."""
        return next(iter(best_of(self.results, self.upwards)), None)

    @property
    def _none_got_anywhere(self) -> bool:
        return all(told.result.state == "failed" for told in self.results.values())

    def choose(self) -> None:
        """Choose the trials whose turn it is, and write them down."""
        width = self.job.search.width
        while (number := len(self.chosen)) < self.trials:
            known = max(0, number - width + 1)
            if self.told < known:
                return
            told = [self.results[each] for each in range(known)]
            running = [values for values, _ in self.chosen[known:]]
            values = self._sampling.values(number, told, running)
            bounds = bounds_of(self.job.search, told, upwards=self.upwards)
            trial_job(self.job, number, values, bounds)  # refuses what is impossible
            self._record.choose(number, values, bounds)
            self.chosen.append((values, bounds))

    def _settle(self) -> None:
        """Look which runs are over."""
        for number in [*self.workers]:
            if not self._clients.is_alive(number):
                del self.workers[number]
                self._ended(number)

    def _ended(self, number: int) -> None:
        """No process is at a trial's run: it is over, or has to be continued."""
        run = None
        with suppress(RunError):
            run = RunFolder(self.folder / name_of(number))
        if run is not None and is_over(run):
            result = result_of(run, self.job)
            if result.state == "failed" and self._none_got_anywhere:
                check_metric(run, self.job.stop.metric)
            self.over(number, result)
            return
        if number in self._parked:
            self._parked.discard(number)
            return
        step = run.last_step if run is not None else 0
        if run is not None and run.outcome == "interrupted":
            return
        code, why = (
            self._clients.exit_code(number),
            detached.last_words(log_of(self.folder, number)),
        )
        in_vain = self._failures.setdefault(number, [])
        if in_vain and step > in_vain[-1]:
            in_vain.clear()
        in_vain.append(step)
        self._least_wait[number] = time.monotonic() + 0.2 * len(in_vain)
        refused = REFUSED.get(code or 0)
        if refused is not None and self._none_got_anywhere:
            raise refused(f"{name_of(number)}: {why}")
        if refused is not None or len(in_vain) >= MOST_FAILURES:
            why = why or f"its run ended {len(in_vain)} times at step {step}"
            self.over(number, Result("failed", None, steps=step, why=why))

    def over(self, number: int, result: Result) -> None:
        """Write down what a trial has come to; only the best keep their models."""
        self._record.tell(number, result)
        self.results[number] = ToldTrial(self.chosen[number][0], result)
        self._tell(number, self.results[number])
        kept = best_of(self.results, self.upwards, self.job.search.keep)
        for each in self.results:
            if each not in kept:
                run = self.folder / name_of(each)
                with suppress(OSError):
                    (run / "model.safetensors").unlink(missing_ok=True)
                    shutil.rmtree(run / "checkpoints", ignore_errors=True)

    def _place(self) -> None:
        """Start the runs that there is room for, and resize those that run."""
        waiting = [n for n in range(len(self.chosen)) if n not in self.results]
        self._park(self.workers.keys() - self._alloted(waiting).keys())
        for number, workers in self._alloted(waiting).items():
            if number in self.workers:
                if number not in self._parked and workers != self.workers[number]:
                    self._scale(number, workers)
            elif self._clients.is_alive(number):  # an earlier search has started it
                self.workers[number] = self._found_workers(number)
            elif self._least_wait.get(number, 0.0) <= time.monotonic():
                if sum(self.workers.values()) + workers > max(self.capacity, workers):
                    continue
                self._write_job(number)
                self._clients.start(number, workers)
                self.workers[number] = workers
                self._scaled[number] = time.monotonic()

    def _park(self, numbers: Iterable[int]) -> None:
        """Ask runs to stop at a commit, once each, to be continued when there is room."""
        for number in numbers:
            if number not in self._parked:
                self._parked.add(number)
                self._clients.interrupt(number)

    def _alloted(self, waiting: list[int]) -> dict[int, int]:
        job = self.job
        if job.train.determinism != "bits":  # the number of workers might show in the result
            places = max(1, self.capacity // job.workers)
            return dict.fromkeys(waiting[:places], job.workers)
        return allot(waiting, self.capacity, job.mesh.ranks, job.most_workers)

    def _found_workers(self, number: int) -> int:
        with suppress(RunError):
            return RunFolder(self.folder / name_of(number)).members.team or self.job.mesh.ranks
        return self.job.mesh.ranks

    def _scale(self, number: int, workers: int) -> None:
        now = time.monotonic()
        if now - self._scaled.get(number, now) < SCALE_S:
            self._scaled.setdefault(number, now)
            return
        self._scaled[number] = now
        with suppress(InstepError):  # it is starting, or ending, or cannot be resized
            scale(self.folder / name_of(number), workers)
            self.workers[number] = workers

    def _write_job(self, number: int) -> None:
        values, bounds = self.chosen[number]
        text = spec_file.dump(trial_job(self.job, number, values, bounds))
        path = job_file(self.folder, number)
        with suppress(OSError):
            if read_plain(path) == text.encode():
                return
        replace_plain(path, text)
