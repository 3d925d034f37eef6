"""Nodes of a real Ray cluster that are drained, fall silent, or are given back and taken again."""

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from on_ray import (
    KEYS,
    ON_RAY,
    RAY,
    STORE_BYTES,
    cluster,
    drain,
    end_of,
    hash_alone,
    of_hosts,
    raylet_of,
    raylet_pid,
    wait_until_spread,
    worker_on,
)
from started import RECIPES, Start, Started
from test_survival import scale

import instep
from instep.system.limits import FLOOR_S

pytestmark = [pytest.mark.process, pytest.mark.slow]

__all__ = ["cluster"]  # the fixture

TINY = f"{RECIPES / 'tiny.py'}:recipe"

TOLD_S = 10.0
"""How long a node must be silent for Ray to give it up, where the test says so."""

PATIENT = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": int(TOLD_S),
}


def check_given_back(program: Started, host: int) -> None:
    """One host was given back once, and that was no loss; another has its number now."""
    (given_back,) = program.events("host_given_back")
    assert given_back["host"] == host
    joined = [e["time"] for e in program.events("host_joined") if e["host"] == host]
    again = min(time for time in joined if time > given_back["time"])
    lost = [e["time"] for e in program.events("host_lost") if e["host"] == host]
    assert [time for time in lost if given_back["time"] < time < again] == []


def test_workers_leave_a_node_that_is_drained_before_it_goes_and_one_moves_to_the_next(
    run: Start, cluster: Any
) -> None:
    expected = hash_alone(run)
    program = run("slow_tiny.py:recipe", *KEYS, *ON_RAY)
    wait_until_spread(program)
    raylet = psutil.Process(raylet_of(program, 1))
    drain(cluster, raylet.pid)
    program.until(lambda: len(program.events("host_given_back")) > 0, "without the host")
    end_of({raylet})  # nothing uses the node any more
    cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    program.until(lambda: worker_on(program, 1) is not None, "a worker on each host again")
    assert raylet_of(program, 1) in {raylet_pid(node) for node in cluster.worker_nodes}
    assert program.end() == 0, program.stderr
    assert program.events("worker_lost") == program.events("went_back") == []
    check_given_back(program, 1)
    assert program.summary["parameters_sha256"] == expected
    program.check_no_process_is_left()


def test_a_run_that_shrinks_gives_a_node_back_and_takes_it_again_when_it_grows(
    run: Start, cluster: Any
) -> None:
    import ray

    expected = hash_alone(run)
    program = run("slow_tiny.py:recipe", *KEYS, *ON_RAY, "launch.cpus=2")
    wait_until_spread(program)
    ray.init(cluster.address, log_to_driver=False)
    try:
        assert ray.available_resources().get("CPU", 0) == 0
        assert scale(program, 1).returncode == 0
        program.until(lambda: ray.available_resources().get("CPU", 0) == 2, "with a free node")
        assert len({p for p in of_hosts() if p.name().startswith("ray::Host")}) == 1
        assert scale(program, 2).returncode == 0
        program.until(lambda: worker_on(program, 1) is not None, "a worker on each host again")
        assert ray.available_resources().get("CPU", 0) == 0
    finally:
        ray.shutdown()
    assert program.end() == 0, program.stderr
    assert program.events("worker_lost") == program.events("went_back") == []
    (given_back,) = program.events("host_given_back")
    check_given_back(program, given_back["host"])
    assert program.summary["parameters_sha256"] == expected
    program.check_no_process_is_left()


@pytest.mark.parametrize("cluster", [PATIENT], indirect=True)
def test_a_silent_node_is_found_by_leases_before_ray_knows_and_leaves_nothing_when_it_is_back(
    run: Start, cluster: Any
) -> None:
    expected = hash_alone(run, "train.steps=600")
    program = run("slow_tiny.py:recipe", *KEYS, *ON_RAY, "train.steps=600")
    wait_until_spread(program)
    raylet = psutil.Process(raylet_of(program, 1))
    silent = {raylet, *raylet.children(recursive=True)}
    for process in silent:
        process.suspend()
    since, before = time.time(), len(program.events("generation_started"))
    program.until(lambda: len(program.events("generation_started")) > before, "going on without it")
    found_s = program.events("generation_started")[before]["time"] - since
    assert FLOOR_S <= found_s < TOLD_S
    program.until(lambda: worker_on(program, 1) is not None, "on a host that Ray has replaced")
    (_, replaced) = (e["time"] for e in program.events("host_joined") if e["host"] == 1)
    assert replaced - since > TOLD_S - 1.0
    for process in silent:
        if process.is_running():
            process.resume()
    end_of(silent)
    assert program.end() == 0, program.stderr
    assert program.events("went_back") == []
    assert program.summary["parameters_sha256"] == expected
    program.check_no_process_is_left()


@pytest.mark.skipif(os.geteuid() != 0, reason="another view of the files needs root")
def test_ray_brings_a_recipe_to_a_node_that_does_not_see_it(
    start: Start, cluster: Any, tmp_path: Path
) -> None:
    (folder := tmp_path / "mine").mkdir()
    for name in ("slow_tiny.py", "tiny.py"):  # the one imports the other
        shutil.copy(RECIPES / name, folder)
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)
    words = f"mount -t tmpfs none {folder} && exec {RAY} start --address={cluster.address} --block"
    more = f"--num-cpus=2 --object-store-memory={STORE_BYTES} --disable-usage-stats"
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f"{words} {more}"], stdout=subprocess.DEVNULL
    )
    try:
        job = folder / "job.toml"
        job.write_text(
            'name = "tested"\nrecipe = "slow_tiny.py:recipe"\nworkers = 2\n'
            '[train]\nsteps = 30\ndeterminism = "bits"\n'
            "[launch]\non = 'ray'\nnodes = 1\n[launch.options]\nwait_s = 60\n"
        )
        blind = start("-m", "instep", "run", job)
        assert blind.end() == 2
        assert f"does not have the recipe's file {folder / 'slow_tiny.py'}" in blind.error
        assert "Or give its folder to launch.options.working_dir." in blind.error
        assert not (blind.work / "runs").exists()
        brought = f'launch.options.working_dir="{folder}"'
        program = start("-m", "instep", "run", job, "--set", brought)
        assert program.end() == 0, program.stderr
        train = {"steps": 30, "determinism": "bits"}
        alone = instep.train(TINY, workers=1, runs=tmp_path, quiet=True, train=train)
        sha256 = program.summary["parameters_sha256"]
        assert sha256 == alone.summary["parameters_sha256"]
        program.check_no_process_is_left()
    finally:
        for process in [*psutil.Process(node.pid).children(recursive=True), node]:
            process.kill()
        node.wait()
