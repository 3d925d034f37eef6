"""Has crews take steps in processes that are thrown away, and sums up what they found.

The program is `prober.py`; here it is started, listened to and ended. Nothing here imports torch.
Ways in: `probe`, `CrewRequest`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import IO, Any, NamedTuple, cast

import msgspec

from instep.engine.trial_result import Trial
from instep.errors import RunError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.plan.measured import BucketShare, CrewFigures, JobFigures, PassTime, ProbedMachine
from instep.plan.ways import TrainingWay
from instep.system.environment import settings
from instep.system.temporary import temporary_folder

CREW_S, OF_STEPS_S = 60.0, 1.0
"""The most seconds that a crew may take, and that its timed steps should take."""


SAVING_BYTES = 16 << 20
"""Memory of a run that a crew lacks: code that saves, and threads; copied state comes on top."""


class CrewRequest(NamedTuple):
    """A crew that is to take steps of a way."""

    way: TrainingWay
    job: JobSpec
    hosts: int = 1
    """How many hosts there would be, for the threads of a worker."""


class Probed(NamedTuple):
    """Everything that probes found."""

    job: JobFigures
    crews: list[CrewFigures]
    machine: ProbedMachine
    verdict: Trial
    failed: str = ""
    """Why there is nothing: the recipe cannot be built, or one process cannot take a step."""


def probe(
    job: JobSpec,
    requests: Sequence[CrewRequest],
    cores: int,
    seconds: float,
    say: Callable[[str], None],
) -> Probed:
    """Let crews take steps, one after the other; the first is of one worker.

    Args:
        job: as it is, for its length.
        requests: in the order of what matters most.
        cores: of this machine.
        seconds: after which no further crew begins.
        say: told what is being done.

    Returns:
        What was found; a crew that failed has its reason.
    """
    begin = time.time()
    found = _answers(job, requests, seconds, say)
    return _summed(requests, found, ProbedMachine(cores, time.time() - begin))


def visit_again(
    job: JobSpec,
    probed: Probed,
    requests: Sequence[CrewRequest],
    seconds: float,
    say: Callable[[str], None],
) -> Probed:
    """Let crews take steps once more, in turns; what they find counts with what was found before.

    Args:
        job, seconds, say: as for `probe`.
        probed: what was found.
        requests: of two ways that are too close to tell apart.
    """
    turns = [*requests, *reversed(requests)]
    begin = time.time()
    found = _answers(job, turns, seconds, say, probed.verdict)
    again = [_crew(request, found[n]) for n, request in enumerate(turns) if n in found]
    crews = [
        _merged([each, *(new for new in again if new.key == each.key)]) for each in probed.crews
    ]
    took = probed.machine.seconds + time.time() - begin
    machine = msgspec.structs.replace(probed.machine, seconds=took)
    return probed._replace(crews=crews, machine=machine)


def _answers(
    job: JobSpec,
    requests: Sequence[CrewRequest],
    seconds: float,
    say: Callable[[str], None],
    verdict: Trial | None = None,
) -> dict[int, dict[str, Any]]:
    """Answers by the number of the request, as far as there was time."""
    found: dict[int, dict[str, Any]] = {}
    with temporary_folder("instep-plan-") as folder:
        asked = {
            "folder": str(folder),
            "job": spec_file.dump(job),
            "trial": verdict.encoded().decode() if verdict is not None else "",
            "until": time.time() + seconds,
            "crew_s": max(CREW_S, seconds),
            "crews": [
                {"job": spec_file.dump(each.job), "hosts": each.hosts, "limit_s": OF_STEPS_S}
                for each in requests
            ],
        }
        say(f"probing {requests[0].way.name}")
        with _prober(asked, folder) as answers:
            for answer in answers:
                number = answer["crew"]
                found[number] = answer
                if number + 1 < len(requests):
                    say(f"probing {requests[number + 1].way.name}")
    return found


@contextmanager
def _prober(asked: dict[str, Any], folder: Path) -> Iterator[Iterator[dict[str, Any]]]:
    """Its answers, as they come; it and all that it has started end with the context."""
    command = [sys.executable, "-P", "-m", "instep.lab.plan.prober"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, **settings(), "PYTHONDONTWRITEBYTECODE": "1"}
    with open(folder / "said", "w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command, stderr=said, env=environment, start_new_session=True, **pipes
        )
        try:
            yield map(json.loads, _asked(process, json.dumps(asked)))
            if process.wait() != 0:
                said.seek(0)
                last = said.read().strip().splitlines()[-1:] or ["it said nothing"]
                raise RunError(f"the process that probes has ended: {last[0]}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _asked(process: subprocess.Popen[str], line: str) -> IO[str]:
    """Send a line, and return where the answers come from."""
    stdin, stdout = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    stdin.write(line + "\n")
    stdin.flush()
    return stdout


def _summed(
    requests: Sequence[CrewRequest], found: dict[int, dict[str, Any]], machine: ProbedMachine
) -> Probed:
    job = requests[0].job
    first = found.get(0, {"failed": "nothing was probed"})
    nothing = JobFigures(job.train.global_batch, job.train.micro_batches, 0, False, [], 0)
    if "ranks" not in first:
        return Probed(nothing, [], machine, Trial.not_shown(first["failed"]), first["failed"])
    alone = first["ranks"][0]
    verdict = msgspec.json.decode(alone["trial"], type=Trial)
    figures = JobFigures(
        job.train.global_batch,
        job.train.micro_batches,
        alone["steps_of_run"],
        alone["passes_of_a_step"] == 1,
        [PassTime(*each) for each in alone["passes"]],
        alone["trained_bytes"],
        alone["state_bytes"],
        alone["parameters"],
        alone["update_s"],
    )
    visits = dict[tuple[str, str, int, int], list[CrewFigures]]()
    for number, request in enumerate(requests):
        if number in found:
            crew = _crew(request, found[number])
            visits.setdefault(crew.key, []).append(crew)
    crews = [_merged(each) for each in visits.values()]
    with_trial = max(each.worker_bytes for each in crews if each.workers == 1)
    saving = SAVING_BYTES + figures.trained_bytes + figures.state_bytes
    busy = [each["others_busy"] for each in found.values()]
    kernels = alone["kernels"]
    machine = ProbedMachine(
        machine.cores,
        machine.seconds,
        statistics.median(busy),
        statistics.median(kernels) / min(kernels) - 1,
    )
    return Probed(
        figures, [_of_a_run(each, with_trial, saving) for each in crews], machine, verdict
    )


_AVERAGED = (
    *("passes_s", "slowest_s", "last_s", "wire_s", "update_s", "whole_s"),
    "small_s",
)

_LARGEST = "sent_bytes", "sent_by_server", "worker_bytes", "server_bytes"
"""A count that was taken while bytes were under way misses some."""


def _merged(visits: Sequence[CrewFigures]) -> CrewFigures:
    """One crew of several that took steps of the same way at different times.

    How far they differ counts as spread: a neighbour may have come or gone.
    """
    whole = [each for each in visits if not each.failed]
    if len(whole) < 2:
        return (whole or list(visits))[0]
    figures = {name: fmean(getattr(each, name) for each in whole) for name in _AVERAGED}
    figures |= {name: max(getattr(each, name) for each in whole) for name in _LARGEST}
    times = [each.whole_s for each in whole]
    apart = (max(times) - min(times)) / 2 / figures["whole_s"] if figures["whole_s"] else 0.0
    return msgspec.structs.replace(
        whole[0],
        **figures,
        spread=max(apart, fmean(each.spread for each in whole)),
        steps=sum(each.steps for each in whole),
    )


def twice(requests: Sequence[CrewRequest]) -> list[CrewRequest]:
    """The crews, and then once more those with the same result, the last ones first: how far two
    visits differ says more of a busy machine than the steps of one."""
    again = [each for each in reversed(requests) if each.way.codec == "none"]
    return [*requests, *again]


def _of_a_run(crew: CrewFigures, tried: int, saving: int) -> CrewFigures:
    """A crew with the memory of a run, where each process tries passes, as the first crew has, and
    one saves; servers too."""
    if crew.failed:
        return crew
    worker = max(crew.worker_bytes, tried) + saving
    server = max(crew.server_bytes, tried) + saving if crew.server_bytes else 0
    return msgspec.structs.replace(crew, worker_bytes=worker, server_bytes=server)


def _crew(request: CrewRequest, answer: dict[str, Any]) -> CrewFigures:
    """Means over the central half of a crew's steps."""
    way = request.way
    what: dict[str, Any] = {
        "workers": way.workers,
        "strategy": way.strategy,
        "codec": way.codec,
        "servers": way.servers,
    }
    if "ranks" not in answer:
        return CrewFigures(**what, failed=answer["failed"])
    ranks = sorted(answer["ranks"], key=lambda each: each["rank"])
    workers, servers = ranks[: way.workers], ranks[way.workers :]
    steps = _central(workers)
    computed = [[each["times"][n][0] for each in workers] for n in steps]
    backward = fmean(each["times"][n][1] for n in steps for each in workers)
    exchanged = [min(each["times"][n][2] for each in workers) for n in steps]
    whole = [max(each["times"][n][4] for each in workers) for n in steps]
    update = [fmean(each["times"][n][3] for n in steps) for each in workers]
    passes = max(1, workers[0]["passes_of_a_step"])
    slowest = fmean(max(each) for each in computed)
    return CrewFigures(
        **what,
        passes_s=min(slowest, fmean(sum(each) / len(each) for each in computed)),
        slowest_s=slowest,
        last_s=min(slowest, backward / passes),
        wire_s=fmean(exchanged),
        update_s=fmean(update),
        whole_s=fmean(whole),
        spread=_spread([each[4] for each in workers[0]["times"]]),
        sent_bytes=statistics.median(each["sent_bytes"] for each in workers),
        sent_by_server=statistics.median([each["sent_bytes"] for each in servers] or [0.0]),
        buckets=[BucketShare(*each) for each in ranks[0]["buckets"]],
        small_s=statistics.median(each["small_s"] for each in workers),
        worker_bytes=max(each["peak_bytes"] for each in workers),
        server_bytes=max((each["peak_bytes"] for each in servers), default=0),
        steps=len(workers[0]["times"]),
    )


def _central(workers: Sequence[dict[str, Any]]) -> list[int]:
    """Numbers of the steps that are not among the shortest or longest quarter."""
    whole = [
        max(parts[4] for parts in step) for step in zip(*(e["times"] for e in workers), strict=True)
    ]
    order = sorted(range(len(whole)), key=whole.__getitem__)
    cut = len(order) // 4
    return order[cut : len(order) - cut]


def _spread(values: Sequence[float]) -> float:
    if len(values) < 4:
        return 0.1
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle if middle else 0.0
