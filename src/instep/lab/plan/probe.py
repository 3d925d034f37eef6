"""Has crews take steps in processes that are thrown away, and sums up what they found.

The program is `prober.py`; here it is started, listened to and ended. Nothing here imports torch.
Ways in: `probe`, `CrewRequest`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from instep.engine.trial_result import Trial
from instep.errors import RunError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.lab.emulated import emulated_hosts
from instep.lab.netlab import Network
from instep.lab.plan.answers import CrewRequest, Probed, merged, of_crew, summed
from instep.plan.measured import CrewFigures, ProbedMachine
from instep.system.environment import settings
from instep.system.processes import interrupt, on_signals
from instep.system.temporary import temporary_folder

CREW_S, OF_STEPS_S = 60.0, 1.0
"""The most seconds that a crew may take, and that its timed steps should take."""


def probe(
    job: JobSpec,
    requests: Sequence[CrewRequest],
    cores: int,
    seconds: float,
    say: Callable[[str], None],
    others: Sequence[JobSpec] = (),
) -> Probed:
    """Let crews take steps, one after the other; the first is of one worker.

    Args:
        job: as it is, for its length.
        requests: in the order of what matters most.
        cores: of this machine.
        seconds: after which no further crew begins.
        say: told what is being done.
        others: jobs of all ways; what the recipe does not go with is refused.

    Returns:
        What was found; a crew that failed has its reason.
    """
    begin = time.time()
    found = _answers(job, requests, seconds, say, others=others)
    return summed(requests, found, ProbedMachine(cores, time.time() - begin))


def visit_again(
    job: JobSpec,
    probed: Probed,
    requests: Sequence[CrewRequest],
    seconds: float,
    say: Callable[[str], None],
) -> Probed:
    """Let crews take steps again; what they find counts with what was found before.

    Args:
        job, seconds, say: as for `probe`.
        probed: what was found.
        requests: in their order; of ways that are too close to tell apart twice, and of those whose
            visits are far apart.
    """
    begin = time.time()
    again = visits_of(job, probed, requests, seconds, say)
    visits = [*probed.visits, *again]
    return after(probed, begin)._replace(crews=merged(visits), visits=visits)


def visits_of(
    job: JobSpec,
    probed: Probed,
    requests: Sequence[CrewRequest],
    seconds: float,
    say: Callable[[str], None],
) -> list[CrewFigures]:
    """Let crews take steps, of which the first has been probed before; one for each, as far as
    there is time.

    Args:
        job, requests, seconds, say: as for `probe`.
        probed: what was found.
    """
    found = _answers(job, requests, seconds, say, probed.verdict)
    return [of_crew(request, found[n]) for n, request in enumerate(requests) if n in found]


def after(probed: Probed, begin: float) -> Probed:
    """Count the seconds that have passed since a time of the clock."""
    took = probed.machine.seconds + time.time() - begin
    return probed._replace(machine=msgspec.structs.replace(probed.machine, seconds=took))


def _answers(
    job: JobSpec,
    requests: Sequence[CrewRequest],
    seconds: float,
    say: Callable[[str], None],
    verdict: Trial | None = None,
    others: Sequence[JobSpec] = (),
) -> dict[int, dict[str, Any]]:
    """Answers by the number of the request, as far as there was time."""
    found: dict[int, dict[str, Any]] = {}
    signals, place = on_signals(interrupt), temporary_folder("instep-plan-")
    with signals, place as folder, _networks(requests) as networks:
        asked = {
            "folder": str(folder),
            "job": spec_file.dump(job),
            "trial": verdict.encoded().decode() if verdict is not None else "",
            "until": time.time() + seconds,
            "crew_s": max(CREW_S, seconds),
            "others": [spec_file.dump(each) for each in others],
            "crews": [_asked_of(each, networks) for each in requests],
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
def _networks(requests: Sequence[CrewRequest]) -> Iterator[dict[str, Network]]:
    """Emulated hosts for the crews that ask for them, by the rate of their links."""
    with ExitStack() as stack:
        made = dict[str, Network]()
        for rate in dict.fromkeys(each.rate for each in requests):
            if rate is not None:
                hosts = max(each.hosts for each in requests if each.rate == rate)
                made[rate] = stack.enter_context(emulated_hosts(hosts, rate))
        yield made


def _asked_of(request: CrewRequest, networks: Mapping[str, Network]) -> dict[str, Any]:
    """Tell the program of a crew; a single worker needs no link."""
    way = request.way
    told = {"job": spec_file.dump(request.job), "hosts": request.hosts, "limit_s": OF_STEPS_S}
    if request.rate is None or way.is_plain:
        return told
    network = networks[request.rate]
    hosts = network.hosts[: min(request.hosts, way.workers)]
    spaces = [f"{network.name}-{host}" for host in hosts]
    return {**told, "spaces": spaces, "addresses": [network.address(host) for host in hosts]}


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
