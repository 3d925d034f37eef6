"""One process of a crew: builds a job's training, joins its group, and takes a few steps.

Everything ends with the process. Way in: `Rank`.
"""

from __future__ import annotations

import statistics
import time
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
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.lab.check import measures
from instep.lab.plan.rehearsed_steps import ProbeMember, RehearsedSteps, StepTimes
from instep.recipe.build import call
from instep.sync import servers_of
from instep.system.kernels import set_kernels, share
from instep.worker.training.devices import choose_device
from instep.worker.training.training import Training

WARM, LEAST, MOST = 2, 5, 40
"""Steps that do not count, and the least and the most that do."""

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
    ) -> None:
        self._whole = whole
        self._job, self._rank, self._limit_s, self._trial = job, rank, limit_s, trial
        self._size = job.workers + servers_of(job.sync)
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
        found: dict[str, Any] = {"rank": self._rank}
        steps, trial = self._steps, self._trial
        if trial is None:
            trial = steps.try_merging()
            found["trial"] = trial.encoded().decode()
            if self._size == 1:
                found["passes"] = steps.passes()
                update = steps.update()
                found["update_s"], found["state_bytes"] = update.seconds, update.state_bytes
        if self._rank == 0 and self._job.mesh.ranks == 1:
            found["buckets"] = steps.buckets()
            found |= self._sizes()
        found |= self._timed(steps.begin(trial))
        found["peak_bytes"] = measures.resident_bytes()
        found["resident_bytes"] = psutil.Process().memory_info().rss
        if self._size == 1:
            steps.try_trained()
            found["tried_bytes"] = measures.resident_bytes()
        return found

    def _sizes(self) -> dict[str, Any]:
        model = self._training.engine.model
        trained = [each for each in model.parameters() if each.requires_grad]
        samples = self._training.samples
        steps = Batches.of_job(self._whole, samples).length(self._whole)
        return {
            "parameters": sum(each.numel() for each in model.parameters()),
            "trained_bytes": sum(each.nbytes for each in trained),
            "steps_of_run": steps,
            "samples": samples,
        }

    def _timed(self, comm: Comm) -> dict[str, Any]:
        """Steps of all ranks in turns with a reference kernel."""
        begin = time.perf_counter()
        for _ in range(WARM):
            self._steps.step()
        count = self._agreed_count(comm, (time.perf_counter() - begin) / WARM)
        before, kernels, small = tcp_traffic(), list[float](), list[float]()
        times = list[StepTimes]()
        for _ in range(count):
            kernels.append(reference_s())
            small.append(self._small_sum(comm))
            times.append(self._steps.step())
        sent = tcp_traffic().sent_bytes - before.sent_bytes
        return {
            "times": times,
            "kernels": kernels,
            "small_s": statistics.median(small),
            "sent_bytes": sent / count,
            "passes_of_a_step": self._steps.passes_of_a_step,
        }

    def _agreed_count(self, comm: Comm, seconds: float) -> int:
        """Count the steps that there is time for; the same on every rank."""
        told = torch.tensor([min(MOST, max(LEAST, self._limit_s / max(seconds, 1e-6)))])
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


_LEFT, _RIGHT = torch.ones(192, 192), torch.ones(192, 192)


def reference_s() -> float:
    """Seconds of a computation that is always the same: a neighbour makes it longer."""
    begin = time.perf_counter()
    for _ in range(4):
        _LEFT @ _RIGHT
    return time.perf_counter() - begin
