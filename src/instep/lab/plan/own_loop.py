"""Figures of a loop of one's own, by short runs of it: it exists only while it runs.

Each run is a real one, in a folder that is thrown away, and ends after a few steps. The numbers of
workers take turns, as far as there is time. Ways in: `probe_runs`, `PeakMemory`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from instep.engine.trial_result import Trial
from instep.errors import InstepError
from instep.events import STEPS, read_events, read_records
from instep.job.spec import JobSpec
from instep.lab.emulated import emulated_hosts, on_hosts
from instep.lab.netlab import bits_per_s
from instep.lab.plan.answers import CrewRequest, Probed, with_new
from instep.lab.plan.neighbours import Neighbours
from instep.lab.temporary_runs import folder_for_runs, run_quietly
from instep.plan.measured import CrewFigures, JobFigures, PassTime, ProbedMachine
from instep.report.figures.summary import summarise
from instep.store.run_folder import RunFolder

STEPS_OF_RUN, FIRST = 20, 4
"""Steps of a run, and those at its beginning that do not count."""


class PeakMemory:
    """The most resident memory of the processes of a run, by their role; called while it runs."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def __call__(self, run: Path) -> None:
        """Look at a run folder."""
        with suppress(OSError, ValueError):
            for event in read_events(run / "events.jsonl"):
                if event["event"] == "worker_joined":
                    self._look(event["pid"], event["role"])

    def _look(self, pid: int, role: str) -> None:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            told = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
            peak = 1024 * next(told, 0)  # one that has ended says nothing
            self.bytes[role] = max(peak, self.bytes.get(role, 0))


def probe_runs(
    job: JobSpec,
    requests: Sequence[CrewRequest],
    cores: int,
    seconds: float,
    say: Callable[[str], None],
) -> Probed:
    """Run the job with each number of workers, and once more in the other order.

    Args:
        job: with a loop of its own.
        requests: numbers of workers, the first of one.
        cores: of this machine.
        seconds: after which no further run begins.
        say: told what is being done.

    Returns:
        What was found; a number whose run failed has its reason.
    """
    began, found, busy = time.monotonic(), list[CrewFigures](), Neighbours()
    verdict, longest = "", 0.0
    for request in [*requests, *reversed(requests)]:
        left = seconds - (time.monotonic() - began)
        if found and longest > left:
            break
        say(f"running {request.way.name}")
        since = time.monotonic()
        crew, told = _run(request, job)
        longest = max(longest, time.monotonic() - since)
        verdict = verdict or told
        if any(each.key == crew.key for each in found):
            found = with_new(found, [crew])
        else:
            found.append(crew)
        if found[0].failed:
            break
    machine = ProbedMachine(cores, time.monotonic() - began, busy.cores())
    alone = found[0]
    verdict = verdict or "not shown: no run has said so"
    figures = JobFigures(
        job.train.global_batch,
        job.train.micro_batches,
        0,
        False,
        [PassTime(job.train.global_batch, alone.passes_s)],
        0,
    )
    return Probed(figures, found, machine, Trial(False, "", verdict), alone.failed)


def _run(request: CrewRequest, job: JobSpec) -> tuple[CrewFigures, str]:
    """Figures of a run, and whether it was the result of one machine."""
    way, peaks = request.way, PeakMemory()
    train = msgspec.structs.replace(job.train, stop_after_steps=STEPS_OF_RUN)
    job = msgspec.structs.replace(request.job, train=train)
    try:
        with folder_for_runs("instep-plan-") as runs:
            if request.rate is None or way.is_plain:
                run = run_quietly(job, runs, watch=peaks)
            else:
                with emulated_hosts(way.workers, request.rate) as network:
                    run = run_quietly(on_hosts(job, network), runs, watch=peaks)
            return _figures(request, run, peaks), run.same_as_one_machine or ""
    except InstepError as error:
        return CrewFigures(way.workers, failed=str(error).partition("\n")[0]), ""


def _figures(request: CrewRequest, run: RunFolder, peaks: PeakMemory) -> CrewFigures:
    """Means over the central half of a run's steps, by its records."""
    way = request.way
    records = read_records(run.path / "steps.bin", STEPS)
    mine = np.sort(records[records["worker"] == 0], order="step")
    took = np.diff(mine["begin"])[FIRST:]
    if len(took) < 4:
        text = f"its loop took {len(mine)} steps, and a plan needs {FIRST + 5}"
        return CrewFigures(way.workers, failed=text)
    order = np.argsort(took)
    middle = order[len(order) // 4 : len(order) - len(order) // 4]
    steps = mine["step"][FIRST:-1][middle]
    whole = float(took[middle].mean())
    each = records[np.isin(records["step"], steps)]
    computed = each["load_s"] + each["forward_s"] + each["backward_s"]
    slowest = float(np.mean([computed[each["step"] == step].max() for step in steps]))
    wire = float(np.mean([each["wire_s"][each["step"] == step].min() for step in steps]))
    bytes_of, told = peaks.bytes, summarise(run)
    rate = request.rate if not way.is_plain else None
    return CrewFigures(
        way.workers,
        passes_s=min(slowest, float(computed.mean())),
        slowest_s=slowest,
        last_s=float(each["backward_s"].mean()),
        wire_s=wire,
        update_s=float(each["update_s"].mean()),
        whole_s=whole,
        spread=float(np.subtract(*np.percentile(took, [75, 25])) / 2 / np.median(took)),
        visits=[whole],
        sent_bytes=told["wire_bytes"] / max(1, run.last_step) / way.workers,
        worker_bytes=bytes_of.get("worker", 0),
        steps=len(took),
        hosts=way.workers if rate else 1,
        bits_per_s=bits_per_s(rate) if rate else 0.0,
    )
