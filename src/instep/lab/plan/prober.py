"""The program that probes: imports torch and the recipe once, and forks a crew for each way.

What it is to do comes as one line of JSON on standard input, and each result leaves as one on
standard output. It has threads of no kind, as a fork breaks them. Whoever has started it ends it.
Way in: `main`; `probe.py` is the other side.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from instep.data.reading.process import own_file_offsets
from instep.engine.trial_result import Trial
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.lab.plan.rank import Rank
from instep.recipe.quick_start import spare_dynamo
from instep.recipe.source_file import load_function
from instep.sync import servers_of
from instep.system import causes
from instep.system.processes import die_with_parent


def main() -> None:
    """Probe what standard input asks for."""
    die_with_parent(signal.SIGKILL)
    asked = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the recipe prints is no result
    sys.dont_write_bytecode = True
    spare_dynamo()
    jobs = [spec_file.build(tomllib.loads(each["job"]), source="plan") for each in asked["crews"]]
    function, why = None, {}
    try:
        function = load_function(jobs[0].recipe, places=jobs[0].python_path)
    except BaseException as error:
        why = _told(error)
    gc.freeze()
    trial = Trial.read(asked["trial"].encode())
    began = time.time()
    for number, (job, each) in enumerate(zip(jobs, asked["crews"], strict=True)):
        if number and time.time() + (time.time() - began) / number > asked["until"]:
            break  # another one would take as long as those before
        found = why or _Crew(job, each, asked, Path(asked["folder"])).run(function, trial)
        if trial is None and found.get("ranks"):
            trial = Trial.read(found["ranks"][0]["trial"].encode())
        print(json.dumps({"crew": number, **found}), file=out, flush=True)
        if why:
            break


class _Child(NamedTuple):
    pid: int
    result: Path


class _Crew:
    """Processes that take steps together.

    Args:
        job: of the way.
        each: of the request: `hosts` and `limit_s`.
        asked: the request.
        folder: for all crews.
    """

    def __init__(
        self, job: JobSpec, each: Mapping[str, Any], asked: Mapping[str, Any], folder: Path
    ) -> None:
        self._job, self._each, self._asked = job, each, asked
        self._folder = Path(tempfile.mkdtemp(prefix="crew-", dir=folder))
        self._children = list[_Child]()

    def run(self, function: Any, trial: Trial | None) -> dict[str, Any]:
        """Fork, and wait for all; a failure of one ends the others."""
        begin, busy, own = time.time(), _busy_s(), _own_s()
        size = self._job.workers + servers_of(self._job.sync)
        for rank in range(size):
            result = self._folder / f"result-{rank}"
            pid = os.fork()
            if pid == 0:
                self._child(rank, result, function, trial)
            self._children.append(_Child(pid, result))
        failed = self._wait(begin + self._asked["crew_s"])
        wall = time.time() - begin
        others = max(0.0, (_busy_s() - busy) - (_own_s() - own)) / max(wall, 1e-3)
        ranks = [
            json.loads(each.result.read_text()) for each in self._children if each.result.exists()
        ]
        causes_found = [each["failed"] for each in ranks if "failed" in each]
        told = {"others_busy": others, "seconds": wall}
        if causes_found or failed or len(ranks) < size:
            return {**told, "failed": (causes_found or [failed or "a process ended"])[0]}
        return {**told, "ranks": ranks}

    def _child(self, rank: int, result: Path, function: Any, trial: Trial | None) -> None:
        code = 1
        try:
            own_file_offsets()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            die_with_parent(signal.SIGKILL)
            how = {"hosts": self._each["hosts"], "limit_s": self._each["limit_s"]}
            whole = spec_file.build(tomllib.loads(self._asked["job"]), source="plan")
            how["whole"] = whole
            found = Rank(self._job, rank, self._folder, function, trial=trial, **how).run()
            code = 0
        except BaseException as error:
            traceback.print_exc()
            found = _told(error)
        with suppress(OSError):
            part = result.with_suffix(".part")
            part.write_text(json.dumps(found))
            part.rename(result)
        os._exit(code)

    def _wait(self, until: float) -> str:
        """Wait for all; why the crew failed, or empty."""
        left, failed = {each.pid for each in self._children}, ""
        while left:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if time.time() > until and not failed:
                    failed = "it took longer than a probe may take"
                    self._kill(left)
                time.sleep(0.005)
                continue
            left.discard(pid)
            if status and left and not failed:
                failed = "a process of it failed"
                time.sleep(0.2)  # the others may say more
                self._kill(left)
        return failed

    @staticmethod
    def _kill(pids: Sequence[int] | set[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _told(error: BaseException) -> dict[str, Any]:
    return {"failed": causes.failed(error, 0, "").cause}


def _busy_s() -> float:
    """Processor seconds of this machine that were not idle."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - _guests(times))


def _guests(times: Any) -> float:
    return float(getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0))


def _own_s() -> float:
    """Processor seconds of this process and of children that have ended."""
    return float(sum(os.times()[:4]))


if __name__ == "__main__":
    main()
