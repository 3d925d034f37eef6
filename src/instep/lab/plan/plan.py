"""Does what `instep plan` is for: list ways, have crews probe some, price all, and say which pays.

No file is left, and no process. Way in: `plan_job`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from instep.data.cores import cores
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.lab.namespaces import NetworkError
from instep.lab.netlab import bits_per_s, why_not
from instep.lab.plan.answers import CrewRequest, Probed, far_apart
from instep.lab.plan.break_even import asked_at, measured_at
from instep.lab.plan.candidates import Candidate, RefusedWay, candidates
from instep.lab.plan.crews import crews_for, twice
from instep.lab.plan.earlier import Learned, learned
from instep.lab.plan.machine_file import machines_table, read_machines
from instep.lab.plan.own_loop import probe_runs
from instep.lab.plan.probe import after, probe, visit_again, visits_of
from instep.plan.explain import explain, table_of
from instep.plan.machine import HostLink, Machines
from instep.plan.measured import CrewFigures
from instep.plan.pricing import Measurements
from instep.plan.search import Ranking, missing_bytes, search
from instep.plan.ways import TrainingWay
from instep.words import listed, plural

_LEAST_S = 8.0
"""Seconds in which ways that are close, or not sure, can take steps again, in turns."""

_GUESSES = 2
"""How often steps are taken at the rate from which on it pays, each time nearer to it."""

_ALONE = TrainingWay(1)

_ONCE = "data.once = true: the samples that this plan has read from the stream are not trained on"

SECONDS = 30.0
"""After which no further crew begins."""


class Question(NamedTuple):
    """Questions to a plan."""

    hosts: int = 0
    """How many; 0: those of the job, or this machine."""
    rate: str | None = None
    emulated: bool = False
    most: int = 0
    """Workers; 0: as many as make sense here."""
    seconds: float = SECONDS
    memory_bytes: int = 0
    """Memory of a host; 0: that of this machine."""
    machine: Path | None = None
    """A file of an earlier plan, whose machines these are."""
    runs: Path | None = None
    """Folder of run folders, from which is learned."""
    meshes: bool = False
    """Whether meshes are looked at that the job does not have."""
    only_workers: bool = False
    """Whether only numbers of workers are looked at, and nothing else of the job changes."""

    def machines(self, job: JobSpec) -> Machines:
        """The hosts that are asked about.

        Raises:
            SpecError: there are none such.
        """
        if self.machine is not None:
            return read_machines(self.machine)
        hosts = self.hosts or job.launch.count or 1
        if hosts < 1:
            raise SpecError(f"--hosts {hosts}: needs at least one host.")
        if self.rate is not None and hosts == 1:
            raise SpecError(f"--rate {self.rate}: needs --hosts, whose links have that rate.")
        link = None
        if self.rate is not None:
            try:
                link = HostLink(bits_per_s(self.rate))
            except NetworkError as error:
                raise SpecError(f"--rate: {error}") from None
        return Machines(hosts, cores(), link, self.emulated)

    def most_workers(self, machines: Machines, job: JobSpec) -> int:
        """The most workers to look at."""
        if self.most < 0:
            raise SpecError(f"--most {self.most}: needs a number of workers above 0.")
        if self.most:
            return self.most
        here = machines.hosts if machines.hosts > 1 else 2 * machines.cores
        return max(1, min(here, job.most_workers))


class JobPlan(NamedTuple):
    """A plan, for a terminal and for `--json`."""

    job: JobSpec
    question: Question
    machines: Machines
    probed: Probed
    ranking: Ranking
    refused: Sequence[RefusedWay]
    notes: Sequence[str]
    steps: int

    def as_table(self) -> dict[str, Any]:
        """Plain data."""
        job, ranking = self.probed.job, self.ranking
        return {
            "job": {
                "name": self.job.name,
                "parameters": job.parameters,
                "global_batch": job.global_batch,
                "tokens_per_batch": self.job.train.tokens_per_batch,
                "steps": self.steps,
                "merged": job.merged,
                "same_as_one_machine": self.probed.verdict.verdict,
            },
            "machine": {
                **machines_table(self.machines),
                **msgspec.to_builtins(self.probed.machine),
            },
            "ways": table_of(ranking, job),
            "best": ranking.best.way.name if ranking.best else None,
            "workers": ranking.best.way.workers if ranking.best else None,
            "pays": ranking.pays,
            "break_even_rate": ranking.break_even_rate,
            "break_even_measured": ranking.break_even_measured,
            "break_even_batch": ranking.break_even_batch,
            "explained": [list(line) for line in explain(ranking, self.machines)],
            "refused": [each._asdict() for each in self.refused],
            "notes": list(self.notes),
            "next": self.commands(),
            "crews": msgspec.to_builtins(self.probed.crews),
        }

    def commands(self) -> list[str]:
        """Commands to run next."""
        found, file = [], "JOB"
        best = self.ranking.best
        if best is not None:
            words = ["instep", "run", file, "--workers", str(best.way.workers)]
            for change in best.way.changes:
                words += ["--set", change]
            found.append(shlex.join(words))
        useful = [e for e in self.ranking.other if best and e.seconds < best.seconds]
        if useful and best is not None:
            first = min(useful, key=lambda each: each.seconds)
            words = ["instep", "compare", file, "--workers", str(first.way.workers)]
            words += ["--with", ",".join(first.way.changes)]
            if self.machines.hosts > 1 and self.question.emulated:
                words += ["--hosts", str(self.machines.hosts)]
                words += ["--rate", self.question.rate] if self.question.rate else []
            found.append(shlex.join(words))
        return found


def plan_job(job: JobSpec, question: Question, say: Callable[[str], None]) -> JobPlan:
    """Plan a job.

    Args:
        job: with a recipe's function.
        question: what is asked.
        say: told what is being done.

    Raises:
        InstepError: the job cannot be trained by one worker; or nothing fits into memory.
    """
    machines = question.machines(job)
    most = question.most_workers(machines, job)
    ways, refused = candidates(job, machines, most, meshes=question.meshes)
    if question.only_workers:
        ways = [each for each in ways if each.way.same and not each.way.changes]
    no_links = why_not() if machines.emulated and machines.link is not None else None
    own_loop = job.recipe.endswith(":__main__")
    if own_loop:
        ways = [e for e in ways if e.way.key == TrainingWay(e.way.workers).key]
    requests = crews_for(ways, job, machines, linked=no_links is None)
    if own_loop:
        probed = probe_runs(job, requests, cores(), question.seconds, say)
    else:
        others = [each.job for each in ways]
        probed = probe(job, twice(requests), cores(), question.seconds, say, others)
    if probed.failed:
        raise SpecError(f"one worker cannot be probed: {probed.failed}")
    planned = partial(_planned, job, question, machines, ways, refused, no_links=no_links)
    found = planned(probed)
    if own_loop:
        return found
    close, unsure = found.ranking.undecided[:2], far_apart(probed.visits)
    both = {each.way.key for each in close if len(close) > 1}
    again = [each for each in requests if each.way.key in both | unsure]
    again += [each for each in reversed(requests) if each.way.key in both]
    left = question.seconds - probed.machine.seconds
    if again and left >= _LEAST_S:
        probed = visit_again(job, probed, again, left, say)
        found = planned(probed)
    return found if no_links else _at_break_even(found, probed, requests, planned, say)


def _at_break_even(
    found: JobPlan,
    probed: Probed,
    requests: Sequence[CrewRequest],
    planned: Callable[..., JobPlan],
    say: Callable[[str], None],
) -> JobPlan:
    """The plan, with steps that are taken near the rate from which on several workers pay, where
    links are emulated and there is time."""
    near = list[CrewFigures]()
    for _ in range(_GUESSES):
        asked = asked_at(found.ranking, requests, found.machines, near)
        left = found.question.seconds - probed.machine.seconds
        if not asked or left < _LEAST_S:
            break
        begin = time.time()
        more = measured_at(visits_of(found.job, probed, asked, left, say))
        probed = after(probed, begin)
        if not more:
            break
        near, found = more, planned(probed, near=more)
    return found


def _planned(
    job: JobSpec,
    question: Question,
    machines: Machines,
    ways: Sequence[Candidate],
    refused: Sequence[RefusedWay],
    probed: Probed,
    no_links: str | None = None,
    near: Sequence[CrewFigures] = (),
) -> JobPlan:
    out = _gone(ways, probed)
    gone = {each.name for each in out}
    memory = question.memory_bytes or int(psutil.virtual_memory().total)
    known = Measurements(probed.job, probed.crews, probed.machine)
    before = learned(job, question.runs, known, machines.cores) if question.runs else Learned()
    known = known._replace(learned=before.ratio)
    left = [each.way for each in ways if each.way.name not in gone]
    ranking = search(left, known, machines, memory_bytes=memory, near=near)
    why = "no crew has taken steps of it: there was no time left. Give more --seconds"
    if alone := next((each.failed for each in probed.crews if each.key == _ALONE.key), ""):
        why = f"nothing says what it costs, as one process failed: {alone}"
    out += [RefusedWay(each.name, why) for each in ranking.unpriced]
    if not ranking.fits and ranking.same:
        least = min(ranking.same, key=lambda each: each.worker_bytes)
        missing = missing_bytes(least, machines, memory)
        raise SpecError(
            f"no way fits into the {memory:,} bytes of a host: {least.way.name} lacks "
            f"{missing:,}. Give more memory, a smaller model or batch, or [mesh] shard."
        )
    for each in ranking.same:
        if each not in ranking.fits:
            missing = missing_bytes(each, machines, memory)
            out.append(RefusedWay(each.way.name, f"it lacks {missing:,} bytes of memory on a host"))
    per_step = job.per_commit.global_batch // job.train.global_batch
    steps = probed.job.steps * max(1, per_step)
    probed = probed._replace(job=msgspec.structs.replace(probed.job, steps=steps))
    return JobPlan(
        job,
        question,
        machines,
        probed,
        ranking,
        [*refused, *out],
        [*_notes(probed, ranking, before, no_links), *([_ONCE] if job.data.once else [])],
        steps,
    )


def _gone(ways: Sequence[Candidate], probed: Probed) -> list[RefusedWay]:
    """The ways that the recipe does not go with, and those whose crews failed."""
    found = [RefusedWay(each.way.name, why)
             for each, why in zip(ways, probed.refused, strict=False) if why]  # fmt: skip
    names = {each.name for each in found}
    failed = {each.key: each.failed for each in probed.crews if each.failed}
    return found + [
        RefusedWay(each.way.name, f"its probe failed: {failed[each.way.key]}")
        for each in ways
        if each.way.key in failed and each.way.name not in names
    ]


def _notes(probed: Probed, ranking: Ranking, before: Learned, no_links: str | None) -> list[str]:
    found, machine = [], probed.machine
    if no_links is not None:
        found.append(f"links are simulated, as none can be emulated here: {no_links}")
    if before.runs:
        found.append(
            f"times are corrected by {before.ratio:.2f}, the median of "
            f"{plural(before.runs, 'earlier run')} of this recipe"
        )
    if machine.is_busy:
        found.append(
            f"this machine is busy: others kept {machine.others_busy:.1f} of {machine.cores} cores "
            "busy while it was probed. Intervals are wider for it; plan again when it is quiet."
        )
    if probed.verdict.verdict != "yes":
        found.append(f"same as one machine: {probed.verdict.verdict}")
    if not_measured := [e.way.name for e in ranking.same if not e.measured and e.way.workers > 1]:
        found.append(f"no crew took steps of {listed(not_measured, 4)}: scaled from others")
    return found
