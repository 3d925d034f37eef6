"""What is drawn happens when it is due, to the processes that are there, and is written down."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from started import wait_until_it_is_itself

from instep.events import LEDGER, ledger_header
from instep.lab.chaos.breaker import Breaker, Plan
from instep.lab.chaos.injections import Injection
from instep.store.ledger import last_step

pytestmark = pytest.mark.process

PLAN = Plan(kills=1, hangs=0, seed=0)


class Made:
    """A folder that looks like that of a run, and processes that look like its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workers, self.said = folder, list[subprocess.Popen[bytes]](), list[str]()

    def worker(self) -> subprocess.Popen[bytes]:
        """One more has joined."""
        command = [sys.executable, "-c", "input()#instep"]
        self.workers.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        pid, number = self.workers[-1].pid, len(self.workers) - 1
        wait_until_it_is_itself(pid)
        event = {"time": time.time(), "event": "worker_joined", "worker": number, "pid": pid}
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
        return self.workers[-1]

    def commit(self, steps: int) -> None:
        """The ledger ends with this step."""
        records = np.zeros(steps, LEDGER)
        records["step"] = np.arange(1, steps + 1)
        (self.folder / "ledger.bin").write_bytes(ledger_header() + records.tobytes())

    def breaker(self, *injections: Injection, plan: Plan = PLAN, **options: Any) -> Breaker:
        return Breaker(self.folder, injections, plan, self.said.append, steps=100, **options)

    @property
    def written(self) -> dict[str, Any]:
        table: dict[str, Any] = json.loads((self.folder / "chaos.json").read_text())
        return table


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    made = Made(tmp_path)
    yield made
    for each in made.workers:
        with each:
            each.kill()


def until(*turns: Callable[[], Any]) -> Callable[[], bool]:
    """Goes on while these are called, one before each look; a false answer is asked for again."""
    left = list(turns)

    def goes_on() -> bool:
        if left and left[0]() is not False:
            left.pop(0)
        return bool(left)

    return goes_on


def is_stopped(process: psutil.Process) -> bool:
    """A moment after the signal: it has to come first."""
    return bool(process.status() == psutil.STATUS_STOPPED)


def kill(at: float, pick: float = 0.0, kind: Any = "kill") -> Injection:
    return Injection(kind, "worker", pick, at, 0.0)


def test_a_worker_is_killed_when_its_step_is_committed_and_not_before(made: Made) -> None:
    first, second = made.worker(), made.worker()
    breaker = made.breaker(kill(0.5, pick=0.9), kill(0.9))
    breaker.serve(
        until(
            lambda: made.commit(49),
            lambda: None,
            lambda: made.commit(50) if second.poll() is None else None,
            lambda: second.poll() is not None,
        )
    )
    assert second.wait() == -signal.SIGKILL
    assert first.poll() is None
    done, never = breaker.injected
    assert (done.number, done.pid, done.step) == (1, second.pid, 50)
    assert never.missed == "the run ended before"
    assert made.said == [f"1 of 2: killed worker 1 (pid {second.pid}) at step 50"]
    assert [each["missed"] for each in made.written["each"]] == ["", "the run ended before"]
    assert made.written["each"][1]["time"] is None


def test_steps_that_the_ledger_loses_are_noticed(made: Made) -> None:
    breaker = made.breaker(kill(1.0))
    breaker.serve(until(*(lambda step=step: made.commit(step) for step in (3, 7, 4, 5, 5))))
    assert [(fall.before, fall.after) for fall in breaker.falls] == [(7, 4)]
    assert made.written["falls"][0]["before"] == 7


def test_how_long_nothing_was_committed_is_known(made: Made) -> None:
    breaker = made.breaker()
    made.commit(3)
    began = []

    def commits() -> None:
        began.append(time.monotonic())
        made.commit(4)

    breaker.serve(until(lambda: breaker.still_s > 0.2, commits, lambda: None))
    assert breaker.still_s <= time.monotonic() - began[0]


def test_a_process_that_is_being_replaced_is_waited_for_and_one_that_never_comes_is_reported(
    made: Made,
) -> None:
    made.commit(50)
    breaker = made.breaker(kill(0.5), kill(0.6), timeout_s=5.0)
    breaker.serve(
        until(
            lambda: None,
            lambda: None,
            made.worker,
            lambda: made.workers[0].poll() is not None,
            lambda: made.commit(60),
            lambda: len(breaker.injected) > 1,
        )
    )
    assert [each.missed for each in breaker.injected] == [
        "",
        "there was no worker process for 5 s",
    ]


def test_a_hang_that_the_run_does_not_detect_is_ended_and_reported(made: Made) -> None:
    worker = made.worker()
    process = psutil.Process(worker.pid)
    made.commit(60)
    breaker = made.breaker(kill(0.5, kind="hang"), timeout_s=3.0)
    stopped = []
    breaker.serve(
        until(
            lambda: None,
            lambda: bool(breaker.injected) and is_stopped(process) and stopped.append(True),
            lambda: breaker.injected[0].released,
        )
    )
    assert stopped == [True]
    assert not is_stopped(process)
    assert made.said == [f"1 of 1: stopped worker 0 (pid {worker.pid}) at step 60"]


def test_no_process_stays_stopped_however_the_faults_end(made: Made) -> None:
    worker = made.worker()
    made.commit(60)
    breaker = made.breaker(kill(0.5, kind="hang"))

    def fail() -> bool:
        if breaker.injected:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        breaker.serve(fail)
    assert psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED
    assert not breaker.injected[0].released


def test_it_may_be_spread_over_time_instead_of_steps(made: Made) -> None:
    worker = made.worker()
    breaker = made.breaker(kill(0.5), plan=Plan(kills=1, hangs=0, seed=0, over_s=0.5))
    began = time.time()
    breaker.serve(until(lambda: made.commit(1), lambda: worker.poll() is not None))
    assert breaker.injected[0].time >= began + 0.25


def test_the_record_of_earlier_faults_is_kept(made: Made) -> None:
    made.breaker().write({})
    made.breaker().write({})
    assert sorted(path.name for path in made.folder.iterdir()) == ["chaos-2.json", "chaos.json"]


@pytest.mark.parametrize(("cut", "step"), [(0, 3), (1, 2), (3 * LEDGER.itemsize, 0), (140, 0)])
def test_the_last_whole_record_of_a_ledger_gives_the_step(made: Made, cut: int, step: int) -> None:
    made.commit(3)
    ledger = made.folder / "ledger.bin"
    data = ledger.read_bytes()
    ledger.write_bytes(data[: len(data) - cut])
    assert last_step(ledger) == step
    assert last_step(made.folder / "nowhere") == 0
