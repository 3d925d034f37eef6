"""Nodes that are set down one after the other, and that other Slurm jobs bring back."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from started import Start, Started, kill, newest_pids
from test_join_run import hosts_of_members, join
from test_recovery import undisturbed
from test_slurm import begin, check_end
from test_survival import begin as begin_here

from instep.events import STEPS, read_records
from instep.report.figures.recovery import recoveries
from marks import long, slow
from slurm import Slurm, until

pytestmark = pytest.mark.process

__all__ = ["undisturbed"]  # the fixture


@pytest.fixture
def jobs() -> Iterator[ExitStack]:
    """Allocations, given back at the end."""
    with ExitStack() as stack:
        yield stack


def lose_nodes(
    start: Start, program: Started, slurm: Slurm, jobs: ExitStack, losses: int
) -> list[float]:
    """Set nodes down, of which another job brings each back; the moments."""
    moments, hosts = [], [0, 1, 2]
    for turn in range(losses):
        place = 1 + turn % 2
        node, generations = slurm.nodes[place], len(program.events("generation_started"))
        moments.append(slurm.down(node))
        program.until(
            lambda n=generations: has_all_workers_again(program, n), "three workers again"
        )
        slurm.up(node)
        until(lambda name=node: slurm.is_idle(name), f"{node} to be there again")
        environment = jobs.enter_context(slurm.allocation(1, f"--nodelist={node}"))
        joined = join(start, program, environment, "--workers", "0")
        hosts[place] = 3 + turn
        program.until(lambda: hosts_of_members(program) == sorted(hosts), "on three nodes again")
        assert joined.process.poll() is None
    return moments


def has_all_workers_again(program: Started, generations: int) -> bool:
    """Whether three workers train in a generation after so many."""
    formed = program.events("generation_started")
    return len(formed) > generations and len(formed[-1]["members"]) == 3


def times_to_go_on(program: Started, moments: list[float]) -> list[float]:
    """Seconds from each moment to the next step of three workers."""
    steps = read_records(program.run / "steps.bin", STEPS)
    formed = [event["time"] for event in program.events("generation_started")]
    return [float(each) for each in recoveries(steps, formed, moments, 3)]


def begin_on_three(
    start: Start, folder: Path, jobs: ExitStack, slurm: Slurm, pause_s: float
) -> Started:
    environment = jobs.enter_context(slurm.allocation(3))
    program = begin(start, folder, environment, launch=f"[arguments]\npause_s = {pause_s}\n")
    program.until(program.is_training, "training")
    return program


@pytest.mark.parametrize("losses", [slow(4), long(20)])
def test_nodes_that_are_set_down_leave_no_trace_in_the_result(
    start: Start,
    tmp_path: Path,
    slurm: Slurm,
    jobs: ExitStack,
    undisturbed: Path,
    losses: int,
) -> None:
    program = begin_on_three(start, tmp_path, jobs, slurm, 0.05 + 0.015 * losses)
    lose_nodes(start, program, slurm, jobs, losses)
    check_end(program, undisturbed, slurm, 600)


@pytest.mark.timed
def test_a_lost_node_costs_at_most_twice_what_a_lost_worker_costs_on_one_machine(
    start: Start, tmp_path: Path, slurm: Slurm, jobs: ExitStack
) -> None:
    losses, pause_s = 6, 0.1
    (here := tmp_path / "here").mkdir()
    local = begin_here(start, here, 3, f"arguments.pause_s={pause_s}")
    local.until(local.is_training, "training")
    moments = []
    for turn in range(losses):
        generations = len(local.events("generation_started"))
        moments.append(time.time())
        kill(newest_pids(local)[turn % 3])
        local.until(lambda n=generations: has_all_workers_again(local, n), "three workers again")
        time.sleep(2.0)
    costs_here = times_to_go_on(local, moments)
    local.kill()
    program = begin_on_three(start, tmp_path, jobs, slurm, pause_s)
    costs = times_to_go_on(program, lose_nodes(start, program, slurm, jobs, losses))
    program.kill()
    print(
        "seconds on one machine",
        np.round(sorted(costs_here), 2),
        "on Slurm",
        np.round(sorted(costs), 2),
    )
    assert np.median(costs) <= 2 * np.median(costs_here)
