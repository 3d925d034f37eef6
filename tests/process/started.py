"""A program under watch: every process that comes of it, what they listen on, what they leave.

The processes are found by a mark in their environment, which each inherits from
the one that started it and none can lose.
"""

import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, TypeAlias

import listening
import numpy as np
import psutil
from safetensors.numpy import load_file

from instep.events import LEDGER, STEPS, read_events, read_records
from warm import MARK, READ_ONCE, Forked

RECIPES = Path(__file__).parent / "recipes"
TIMEOUT_S = 600.0
"""For anything that should happen, however busy the machine: against hangs alone."""

EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
"""After `-c`: become the program of the words that follow."""

_SHARED = Path("/dev/shm")


class Started:
    """One program, from its start until nothing is left of it.

    Args:
        folder: empty, for this program alone; it works in `folder / "work"`.
        command: arguments of this Python.
        environment: laid over ours.
        warm: whether `-m instep` may be a fork of a process that has imported what it needs.
    """

    def __init__(
        self,
        folder: Path,
        command: Iterable[object],
        environment: dict[str, str] | None = None,
        *,
        warm: bool = False,
    ) -> None:
        self.work, self._temporary, self._home = (folder / n for n in ("work", "temporary", "home"))
        for each in (self.work, self._temporary, self._home):
            each.mkdir(parents=True, exist_ok=True)
        self._mark = secrets.token_hex(8)
        self._outputs = folder / "stdout", folder / "stderr"
        self._shared = set(os.listdir(_SHARED)) if _SHARED.is_dir() else set()
        self.process: Forked | subprocess.Popen[bytes]
        self.listened: set[str] = set()
        """Every local address that a process of the program was seen to listen on."""
        own = {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._temporary),
            "HOME": str(self._home),
            MARK: self._mark,
        }
        words, everything = [*map(str, command)], {**os.environ, **own, **(environment or {})}
        with self._outputs[0].open("ab") as out, self._outputs[1].open("ab") as err:
            start = _forked if warm and _may_be_forked(words, environment or {}) else _fresh
            self.process = start(words, self.work, everything, out, err)

    # ---- what it said and wrote

    @property
    def stdout(self) -> str:
        return self._outputs[0].read_text()

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text()

    @property
    def error(self) -> str:
        """What stands on standard error from our own error on."""
        return self.stderr[self.stderr.index("instep: ") :]

    @property
    def run(self) -> Path:
        """The one run folder that it made."""
        folders = (self.work / "runs").iterdir()
        (run,) = (each for each in folders if each.suffix != ".slurm")
        return run

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return summary

    @property
    def ledger(self) -> np.ndarray[Any, Any]:
        return read_records(self.run / "ledger.bin", LEDGER)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run / "events.jsonl") if e["event"] == name]

    # ---- watching it

    def processes(self) -> list[psutil.Process]:
        """Those that are alive now, the program itself among them."""
        return marked(MARK, self._mark)

    def is_training(self) -> bool:
        """Whether both workers have told of a step."""
        made = (self.work / "runs").is_dir() and any((self.work / "runs").iterdir())
        if not made:
            return False
        timed = read_records(self.run / "steps.bin", STEPS)
        return len(np.unique(timed["worker"])) > 1

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Watch it until a condition holds, and note what it listens on meanwhile."""
        deadline, looks = time.monotonic() + TIMEOUT_S, itertools.count()
        while not condition():
            assert self.process.poll() is None, f"it ended before {what}:\n{self.stderr}"
            assert time.monotonic() < deadline, f"not {what} in {TIMEOUT_S} s:\n{self.stderr}"
            if next(looks) % 4 == 0:
                self._look()
            self._wait(0.05)

    def end(self, limit_s: float = TIMEOUT_S) -> int:
        """Watch it to its end; the exit code."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"no end in {limit_s} s:\n{self.stderr}"
            self._look()
            self._wait(0.2)
        return self.process.returncode

    def _look(self) -> None:
        self.listened |= listening.addresses(each.pid for each in self.processes())

    def _wait(self, seconds: float) -> None:
        """For its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def check_nothing_is_left(self) -> None:
        """No process, no shared memory, no file outside the run folder; and no open door before."""
        self.check_no_process_is_left()
        self.check_no_file_is_left()
        assert {path.name for path in self.work.iterdir()} == {"runs"}
        assert len(list((self.work / "runs").iterdir())) == 1
        assert self.listened <= {"127.0.0.1"}

    def check_no_process_is_left(self) -> None:
        """And so no port either: those are the processes'."""
        _, alive = psutil.wait_procs(self.processes(), timeout=TIMEOUT_S)
        assert [process.pid for process in alive] == []
        assert self.processes() == []

    def check_no_file_is_left(self) -> None:
        """Neither temporary ones, nor in the home folder, nor as shared memory."""
        left = [path for path in self._temporary.iterdir() if not _is_torchs_own(path)]
        assert left == []
        assert list(self._home.iterdir()) == []
        shared = set(os.listdir(_SHARED)) - self._shared if _SHARED.is_dir() else set()
        assert [name for name in shared if not _in_use(_SHARED / name)] == []

    def kill(self) -> None:
        """End whatever is left of it, by number."""
        while alive := self.processes():  # again: one that is being started has no mark yet
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(alive, timeout=TIMEOUT_S)
        self.process.wait()


Start: TypeAlias = Callable[..., Started]
"""Starts a program, with these arguments."""


def _may_be_forked(words: list[str], environment: dict[str, str]) -> bool:
    return words[:2] == ["-m", "instep"] and not any(map(READ_ONCE.match, environment))


def _forked(
    words: list[str], folder: Path, environment: dict[str, str], out: IO[bytes], err: IO[bytes]
) -> Forked:
    with open(os.devnull, "rb") as nothing:
        files = {0: nothing.fileno(), 1: out.fileno(), 2: err.fileno()}
        return Forked("instep", files, words=words[2:], folder=folder, environment=environment)


def _fresh(
    words: list[str], folder: Path, environment: dict[str, str], out: IO[bytes], err: IO[bytes]
) -> subprocess.Popen[bytes]:
    # a shell that starts the tests in the background has them ignore Ctrl-C, which is inherited
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, ours)
    return process


def _is_torchs_own(path: Path) -> bool:
    """The empty folder that torch makes when FSDP2 or its compiler is imported."""
    return path.name.startswith("torchinductor_") and not any(path.iterdir())


def kill(pid: int) -> bool:
    """End a process by SIGKILL; False if it is not there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False  # it is being replaced already
    return True


def kill_with_its_memory(pid: int) -> None:
    """End a process by SIGKILL; what it left in memory of its host is gone too."""
    os.kill(pid, signal.SIGSTOP)
    for file in Path(f"/proc/{pid}/fd").iterdir():
        if str(file.readlink()).startswith("/memfd:instep"):
            os.truncate(file, 0)
    os.kill(pid, signal.SIGKILL)


def newest_pids(program: Started) -> dict[int, int]:
    """The process of each worker, as the log knows it."""
    return {int(e["worker"]): int(e["pid"]) for e in program.events("worker_joined")}


def pid_of(program: Started, event: str) -> int:
    """The newest process that an event tells of."""
    return int(program.events(event)[-1]["pid"])


def kill_members(
    program: Started,
    kills: int,
    draw: random.Random,
    *,
    pauses_s: tuple[float, float] = (0.2, 0.8),
    most_idle: int = 8,
) -> Counter[int]:
    """Kill members at random moments until it has happened `kills` times, or the run is over.

    Args:
        program: trains already.
        kills: how many.
        draw: the moments, and who is hit.
        pauses_s: the shortest and the longest time before one, seconds.
        most_idle: how many in which no further step is committed; ten would end the run.

    Returns:
        How often each member was killed; the last may have been done already.
    """
    killed, idle, farthest = Counter[int](), 0, 0
    hit_already = set[int]()  # on a slow machine one is hit again before its end is noticed
    while killed.total() < kills and program.process.poll() is None:
        time.sleep(draw.uniform(*pauses_s))  # the moment is what is drawn
        committed = int(program.ledger["step"].max(initial=0))
        idle = 0 if committed > farthest else idle
        farthest = max(farthest, committed)
        if idle < most_idle:
            number, pid = draw.choice(list(newest_pids(program).items()))
            hit = pid not in hit_already and kill(pid)
            hit_already.add(pid)
            killed[number] += hit
            idle += hit
    return killed


def distance(one: Path, other: Path) -> float:
    """How far the models of two runs are apart, as a share of the first one's norm."""
    first, second = (load_file(run / "model.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    apart = sum(np.square(second[name] - tensor).sum() for name, tensor in first.items())
    return float(np.sqrt(apart / sum(np.square(tensor).sum() for tensor in first.values())))


def wait_until_it_is_itself(pid: int) -> None:
    """Until a process that was started has its command line: `Popen` returns a little before."""
    while not psutil.Process(pid).cmdline():
        time.sleep(0.001)


def marked(name: str, value: str) -> list[psutil.Process]:
    """Every living process with this in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value:
                found.append(process)
    return found


def _in_use(file: Path) -> bool:
    """Whether a living process has a file of shared memory mapped: then it is somebody else's."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(each.path == str(file) for each in process.memory_maps()):
                return True
    return not file.exists()
