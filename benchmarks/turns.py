"""Programs that take turns on one machine, so that their step times can be compared.

A machine's speed drifts by more than the differences that are looked for. So
all programs are alive at once and take turns: all but one are stopped (SIGSTOP)
while that one trains for a few seconds. Each turn is compared with another
program's turns before and after it, by the steps that lie wholly inside; a
figure is the median of these ratios. What is compared is not known here.
"""

import datetime
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch

from instep.events import STEPS, read_records

HERE = Path(__file__).parent
ENDLESS = "1000000"


class Case(NamedTuple):
    """What is trained, and how long a turn is."""

    recipe: str
    global_batch: int
    turn_s: float


class Program:
    """Started, and stopped until it is its turn."""

    def __init__(self, command: list[str]) -> None:
        silent = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=silent, stderr=silent)
        self.turns: list[tuple[float, float]] = []
        self.cpu_s: list[float] = []
        """Of each turn, all processes together."""

    def _everyone(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def hold(self) -> None:
        for process in self._everyone():
            process.suspend()

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._everyone())

    def turn(self, seconds: float) -> None:
        begin, before = time.time(), self._cpu_s()
        for process in self._everyone():
            process.resume()
        time.sleep(seconds)
        self.hold()
        self.turns.append((begin, time.time()))
        self.cpu_s.append(self._cpu_s() - before)

    def end(self) -> None:
        everyone = self._everyone()
        for process in everyone:
            process.kill()
        psutil.wait_procs(everyone)
        self._process.wait()


def instep(recipe: str, settings: Mapping[str, object], folder: Path, workers: int = 2) -> Program:
    """Workers of one thread each, training without end into `folder`/bench.

    Args:
        recipe: below this folder.
        settings: of the job, as `--set` takes them.
        folder: is made.
        workers: so many.
    """
    folder.mkdir()
    job = folder / "job.toml"
    job.write_text(f'recipe = "{HERE / recipe}"\nname = "bench"\nseed = 7\n')
    settings = {"train.steps": ENDLESS, "train.threads": 1, **settings}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = ["-m", "instep", "run", str(job), "--runs", str(folder)]
    command += ["--workers", str(workers)]
    return Program([sys.executable, *command, *sets])


def times_of(folder: Path) -> np.ndarray:
    """Unix seconds at which each step of one worker of an `instep` program began."""
    path = folder / "bench" / "steps.bin"
    if not path.exists():
        return np.empty(0)
    records = read_records(path, STEPS)
    return np.sort(records["begin"][records["worker"] == 0])


def wait_for_steps(steps: Callable[[], int], least: int = 4, limit_s: float = 120.0) -> None:
    """Until a program is past its first steps; `steps` counts those that have begun."""
    until = time.time() + limit_s
    while steps() < least:
        if time.time() > until:
            raise SystemExit(f"no {least} steps within {limit_s:.0f} s")
        time.sleep(0.2)


@contextmanager
def ended(programs: Mapping[str, Program]) -> Iterator[None]:
    """End all programs that are there at the end, whatever happens."""
    try:
        yield
    finally:
        for program in programs.values():
            program.end()


def take_turns(programs: Mapping[str, Program], turn_s: float, windows: int) -> None:
    """Give each program a turn, `windows` times over, and a last one in which records arrive."""
    for program in programs.values():
        program.hold()
    for _ in range(windows):
        for program in programs.values():
            program.turn(turn_s)
    for program in programs.values():
        program.turn(1.0)  # records are sent a few times a second


def steps_s(times: np.ndarray, turns: list[tuple[float, float]]) -> list[float]:
    """Seconds of a step inside each turn; NaN where fewer than two began in it."""
    inside = [times[(times > begin) & (times < end)] for begin, end in turns]
    return [
        float((of_turn[-1] - of_turn[0]) / (len(of_turn) - 1)) if len(of_turn) > 1 else math.nan
        for of_turn in inside
    ]


def cpu_steps_s(steps: list[float], program: Program) -> list[float]:
    """CPU seconds of a step in each turn: of both workers, and moved less by other work."""
    turns = zip(steps, program.turns, program.cpu_s, strict=False)
    return [step * cpu / (end - begin) for step, (begin, end), cpu in turns]


def over(times: list[float], base: list[float]) -> list[float]:
    """Each of `times` over the mean of `base` before and after it, where all three are known."""
    around = [(before + after) / 2 for before, after in pairwise(base)]
    ratios = [time / mean for time, mean in zip(times, around, strict=False)]
    return [ratio for ratio in ratios if math.isfinite(ratio)]


def summed_up(ratios: list[float]) -> dict[str, object]:
    """Median, quartiles, and all of them."""
    low, high = np.quantile(ratios, [0.25, 0.75])
    return {"median": statistics.median(ratios), "quartiles": [low, high], "all": ratios}


def in_words(ratios: list[float]) -> str:
    """The median, with its quartiles."""
    low, high = np.quantile(ratios, [0.25, 0.75])
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}, {len(ratios)} turns)"


def write(path: Path, results: list[dict[str, object]]) -> None:
    """A dated result, with the machine it was measured on."""
    where = {"date": str(datetime.date.today()), "torch": torch.__version__}
    where |= {"machine": platform.machine(), "python": platform.python_version()}
    path.write_text(json.dumps({**where, "results": results}, indent=2) + "\n")
