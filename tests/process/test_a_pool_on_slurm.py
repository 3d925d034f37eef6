"""Hosts of a pool as pilot jobs of Slurm: asked for, told before their limit, gone, given back."""

from collections.abc import Callable

import pytest
from test_hosts_of_a_pool import HostedPool, make, until

from slurm import Slurm

pytestmark = [pytest.mark.process, pytest.mark.slow]
__all__ = ["make"]

GONE = """sh -c '{} "$@"; touch "$INSTEP_GONE"' sh"""


def line(slurm: Slurm, *options: str) -> str:
    srun = " ".join(("srun", "--ntasks=1", "--cpus-per-task=2", *options))
    start = GONE.format(f"SLURM_CONF={slurm.configuration} {srun}")
    return f'start = """{start}"""\nidle = "2s"\n'


def queue(slurm: Slurm) -> list[str]:
    return slurm.ask("squeue", "-h", "-o", "%A").split()


def test_pilot_jobs_come_for_jobs_that_wait_and_go_with_the_same_bits(
    make: Callable[..., HostedPool], slurm: Slurm
) -> None:
    lines = {name: line(slurm, f"--job-name={name}") for name in ("one", "two")}
    pool = make(dict.fromkeys(lines, 2), lines=lines)
    assert not queue(slurm)
    jobs = {pool.submit(steps, 0.008, "--at-least", 1): steps for steps in (301, 302)}
    until(lambda: all(pool.steps(name) > 3 for name in jobs))
    first = queue(slurm)[0]
    slurm.ask("scancel", "--signal=USR1", first)  # as --signal does before the limit
    until(lambda: "leaving" in pool.status() or all(pool.job(n).outcome for n in jobs))
    others = [each for each in queue(slurm) if each != first]
    slurm.ask("scancel", *others)  # as at the limit
    until(lambda: all(pool.job(name).outcome for name in jobs))
    for name, steps in jobs.items():
        pool.check_bits(name, steps)
    until(lambda: not queue(slurm))
    assert "started once jobs wait for it" in pool.status()


def test_a_pilot_that_waits_in_the_queue_is_cancelled_when_no_job_needs_it(
    make: Callable[..., HostedPool], slurm: Slurm
) -> None:
    pool = make({"one": 2}, lines={"one": line(slurm, "--begin=now+1hour")})
    name = pool.submit(100, 0.008)
    until(lambda: bool(queue(slurm)))
    pool.call("cancel", name, *pool.where)
    until(lambda: not queue(slurm))
