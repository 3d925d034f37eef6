"""One process of a crew: builds a job's training, joins its group, and takes a few steps.

Everything ends with the process. Way in: `Rank`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from instep.comm.base import Comm
from instep.comm.metered import tcp_traffic
from instep.comm.protocol.messages import Form
from instep.comm.torch_comm import LOOPBACK
from instep.data.batches import Batches
from instep.data.cores import cores
from instep.data.shards.urls.remote import use_cache
from instep.engine.trial_result import Trial
from instep.errors import InstepError, SpecError
from instep.job.spec import JobSpec
from instep.lab.check import measures
from instep.lab.plan.rehearsed_steps import ProbeMember, RehearsedSteps
from instep.recipe.build import call
from instep.system.kernels import set_kernels, share
from instep.worker.training.devices import choose_device
from instep.worker.training.refusals import refusals
from instep.worker.training.training import Training

WARM, LEAST, MOST = 2, 5, 40
"""Steps that do not count, and the least and the most that do."""

WARM_MORE, WARM_S = 3, 1.0
"""Further steps that do not count, and the seconds that they may take: memory is first used in the
first steps of a process, and its connections find out what their links carry."""

KERNELS = 8
"""How often a reference kernel runs before the steps and after them."""

_SMALL = 16
"""Numbers that a sum has whose time is that of a message."""


class Rank:
    """One process of a crew.

    Args:
        job: with the workers and the strategy of the way.
        rank: its number in the group; servers come last.
        folder: where the group meets; thrown away at the end.
        function: makes the recipe.
        hosts: how many hosts there would be.
        limit_s: seconds that timed steps may take.
        trial: on merging; None: this process finds out.
        whole: the job as it is, for its length.
        address: at which it listens.
        others: jobs of other ways; which of them the recipe does not go with is found out.
    """

    def __init__(
        self,
        job: JobSpec,
        rank: int,
        folder: Path,
        function: Any,
        *,
        hosts: int,
        limit_s: float,
        trial: Trial | None,
        whole: JobSpec,
        address: str = LOOPBACK,
        others: Sequence[JobSpec] = (),
    ) -> None:
        self._begun_bytes = psutil.Process().memory_info().rss
        self._whole, self._others = whole, others
        self._job, self._rank, self._limit_s, self._trial = job, rank, limit_s, trial
        self._size = job.workers + job.sync.server_count
        if choose_device(job, rank, job.workers).type != "cpu":
            raise SpecError(
                "plan measures on the CPU, and this job would train on a GPU. Compare real runs, "
                "or give --set train.device=cpu."
            )
        set_kernels(job.train, share(cores(), job.workers, hosts))
        use_cache(job.data.cache, job.data.cache_gb)
        members = list(range(self._size))
        form = Form(
            generation=0,
            rank=rank,
            members=members,
            checkpoint="",
            servers=tuple(members[job.workers :]),
            role="worker" if rank < job.workers else "server",
        )
        recipe = call(function, job.arguments, job.seed)
        member = ProbeMember(job, form, folder, address)
        member.others_have_state = rank > 0 or trial is not None
        member.known = trial.encoded() if trial is not None else b""
        self._training = Training(member, recipe, torch.device("cpu"))
        self._steps = RehearsedSteps(self._training)

    def run(self) -> dict[str, Any]:
        """Measure, and return what was found as plain data."""
        found: dict[str, Any] = {"rank": self._rank, "begun_bytes": self._begun_bytes}
        steps, trial = self._steps, self._trial
        if trial is None:
            trial = self._training.engine.state.trial or steps.try_merging()
            found["trial"] = trial.encoded().decode()
            if self._size == 1:
                found["passes"] = steps.passes()
                update = steps.update()
                found["update_s"], found["state_bytes"] = update.seconds, update.state_bytes
        if self._rank == 0:
            found |= self._sizes()
            if self._job.mesh.ranks == 1:
                found["buckets"] = steps.buckets()
        found |= self._timed(steps.begin(trial))
        found["peak_bytes"] = measures.resident_bytes()
        found["resident_bytes"] = psutil.Process().memory_info().rss
        if self._size == 1:
            steps.try_trained()
            found["tried_bytes"] = measures.resident_bytes()
        return found

    def _sizes(self) -> dict[str, Any]:
        training, whole = self._training, self._whole
        batches, model = training.batches, training.engine.model
        uneven = batches.sizes is not None
        length = (batches if uneven else Batches.of_job(whole, training.samples)).length(whole)
        cpu = torch.device("cpu")
        found = {
            "steps_of_run": length,
            "samples": training.samples,
            "batch": batches.size if uneven else whole.train.global_batch,
            "refused": [_first(refusals(job, training.recipe, cpu)) for job in self._others],
        }
        if self._job.mesh.ranks > 1:  # this process has parts of them
            return found
        trained = [each for each in model.parameters() if each.requires_grad]
        return {
            **found,
            "parameters": sum(each.numel() for each in model.parameters()),
            "trained_bytes": sum(each.nbytes for each in trained),
        }

    def _timed(self, comm: Comm) -> dict[str, Any]:
        """Steps of all ranks, one right after the other as in a run; before and after them, a
        reference kernel and sums of a few numbers."""
        kernels = [reference_s() for _ in range(KERNELS)]
        small = [self._small_sum(comm) for _ in range(KERNELS)]
        *_, last = self._steps.steps(WARM)
        more = self._agreed_count(comm, WARM_S, last.whole, 0, WARM_MORE)
        *_, last = [last, *self._steps.steps(more)]
        count = self._agreed_count(comm, self._limit_s, last.whole, LEAST, MOST)
        before = tcp_traffic()
        times = self._steps.steps(count)
        sent = tcp_traffic().sent_bytes - before.sent_bytes
        self._steps.end()
        self._small_sum(comm)  # nobody ends while others are in their last exchange
        kernels += [reference_s() for _ in range(KERNELS)]
        return {
            "times": times,
            "kernels": kernels,
            "small_s": statistics.median(small),
            "sent_bytes": sent / count,
            "passes_of_a_step": self._steps.passes_of_a_step,
        }

    @staticmethod
    def _agreed_count(comm: Comm, limit_s: float, step_s: float, least: int, most: int) -> int:
        """Count the steps that there is time for; the same on every rank."""
        fitting = int(limit_s / max(step_s, 1e-6))
        told = torch.tensor([min(most, max(least, fitting))])
        if comm.size > 1:
            comm.broadcast(told)
        return int(told.item())

    def _small_sum(self, comm: Comm) -> float:
        """Seconds of a sum of a few numbers, after one that brings all together."""
        if comm.size == 1:
            return 0.0
        numbers = torch.zeros(_SMALL)
        comm.all_reduce(numbers).wait()
        begin = time.perf_counter()
        comm.all_reduce(numbers).wait()
        return time.perf_counter() - begin


def _first(errors: Iterator[InstepError]) -> str:
    """Find what is wrong first; empty where nothing is."""
    return next((str(error).partition("\n")[0] for error in errors), "")


_LEFT, _RIGHT = torch.ones(192, 192), torch.ones(192, 192)


def reference_s() -> float:
    """Seconds of a computation that is always the same: a neighbour makes it longer."""
    begin = time.perf_counter()
    for _ in range(4):
        _LEFT @ _RIGHT
    return time.perf_counter() - begin
