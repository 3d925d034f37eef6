"""A crew: processes that are forked to take steps of a way together, and thrown away.

Where hosts are emulated, each process is on one of them, with its link. Way in: `ProbingCrew`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
import time
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from instep.comm.codecs import CODECS
from instep.data.reading.process import own_file_offsets
from instep.engine.trial_result import Trial
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.lab.namespaces import enter
from instep.lab.plan.neighbours import Neighbours
from instep.lab.plan.rank import Rank
from instep.system import causes
from instep.system.malloc import return_freed_memory
from instep.system.processes import die_with_parent


class _Child(NamedTuple):
    pid: int
    result: Path


class ProbingCrew:
    """Processes that take steps together.

    Args:
        job: of the way.
        each: of the request: `hosts`, `limit_s`, and where it has links `spaces` and `addresses`.
        asked: the request.
        folder: for all crews.
    """

    def __init__(
        self, job: JobSpec, each: Mapping[str, Any], asked: Mapping[str, Any], folder: Path
    ) -> None:
        self._job, self._each, self._asked = job, each, asked
        self._folder = Path(tempfile.mkdtemp(prefix="crew-", dir=folder))
        self._children = list[_Child]()

    def run_apart(self, function: Any, trial: Trial | None) -> dict[str, Any]:
        """Run it from a process of its own, as the fork server of a run is one: what this crew
        alone needs is imported there, and no process of another crew has it."""
        result = self._folder / "crew"
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(signal.SIGKILL)
                _import_for(self._job)
                found = self._run(function, trial)
            except BaseException as error:
                traceback.print_exc()
                found = told(error)
            with suppress(OSError):
                result.write_text(json.dumps(found))
            os._exit(0)
        os.waitpid(pid, 0)
        if not result.exists():
            return {"failed": "its process ended"}
        found = json.loads(result.read_text())
        return {"others_busy": 0.0, "seconds": 0.0, **found}

    def _run(self, function: Any, trial: Trial | None) -> dict[str, Any]:
        """Fork, and wait for all; a failure of one ends the others."""
        begin, neighbours = time.time(), Neighbours()
        size = self._job.workers + self._job.sync.server_count
        for rank in range(size):
            result = self._folder / f"result-{rank}"
            pid = os.fork()
            if pid == 0:
                self._child(rank, result, function, trial)
            self._children.append(_Child(pid, result))
        failed = self._wait(begin + self._asked["crew_s"])
        others, wall = neighbours.cores(), neighbours.seconds
        ranks = [
            json.loads(each.result.read_text()) for each in self._children if each.result.exists()
        ]
        causes_found = [each["failed"] for each in ranks if "failed" in each]
        beside = {"others_busy": others, "seconds": wall}
        if causes_found or failed or len(ranks) < size:
            return {**beside, "failed": (causes_found or [failed or "a process ended"])[0]}
        return {**beside, "ranks": ranks}

    def _child(self, rank: int, result: Path, function: Any, trial: Trial | None) -> None:
        code = 1
        try:
            own_file_offsets()
            _be_the_first_to_go()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            die_with_parent(signal.SIGKILL)
            how = {"hosts": self._each["hosts"], "limit_s": self._each["limit_s"]}
            if spaces := self._each.get("spaces"):
                enter(spaces[rank % len(spaces)])
                how["address"] = self._each["addresses"][rank % len(spaces)]
            whole = spec_file.build(tomllib.loads(self._asked["job"]), source="plan")
            how["whole"] = whole
            if trial is None and rank == 0:
                how["others"] = [
                    spec_file.build(tomllib.loads(text), source="plan")
                    for text in self._asked["others"]
                ]
            found = Rank(self._job, rank, self._folder, function, trial=trial, **how).run()
            code = 0
        except BaseException as error:
            traceback.print_exc()
            found = told(error)
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


def _import_for(job: JobSpec) -> None:
    """Import what a fork server does for a job before it forks workers."""
    if job.sync.codec in CODECS:
        CODECS[job.sync.codec]  # with its compiled loops
    if job.mesh.ranks > 1:
        return_freed_memory()
        import torch._dynamo.eval_frame  # noqa: F401  # DTensors need it

        import instep.parallel.split  # noqa: F401
    gc.freeze()


def _be_the_first_to_go() -> None:
    """Where memory ends, the system ends a probe and nothing else."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def told(error: BaseException) -> dict[str, Any]:
    """An answer that says why there is none."""
    return {"failed": causes.failed(error, 0, "").cause}
