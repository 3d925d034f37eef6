"""Replicas of several processes on several hosts: where they start, and start again."""

import json

import pytest
from started import Start, Started, kill, newest_pids
from test_mesh import QUICK
from test_partitions import needs_hosts, network

from instep.lab import netlab

pytestmark = [pytest.mark.process, pytest.mark.slow]

__all__ = ["network"]  # the fixture
KEYS = (*QUICK, "train.steps=60", 'train.determinism="bits"', 'network="private"')


HERE = ["env HOST=1", "env HOST=2"]
"""Fork servers of this machine: the memory that one keeps, the other has not."""


def on(run: Start, hosts: list[str], address: str, *settings: str) -> Started:
    keys = (f"launch.hosts={json.dumps(hosts)}", f'launch.address="{address}"', *settings)
    return run("splits.py:recipe", *KEYS, "arguments.pause_s=0.02", *keys)


def places(program: Started) -> dict[int, int]:
    """Where the newest process of each worker is."""
    return {e["worker"]: e["host"] for e in program.events("worker_joined")}


def test_a_replica_is_on_one_host_and_starts_again_whole_on_one(run: Start):
    program = on(run, HERE, "127.0.0.1", "workers=4", "mesh.tensor=2")
    program.until(program.is_training, "training")
    assert places(program) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert kill(newest_pids(program)[3])
    assert program.end() == 0, program.stderr
    assert places(program) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert len(program.events("worker_joined")) == 6
    assert not program.events("went_back")


def test_the_only_replica_starts_again_where_the_copies_of_its_last_commit_are(run: Start):
    program = on(run, HERE, "127.0.0.1", "workers=2", "mesh.shard=2")
    program.until(program.is_training, "training")
    assert places(program) == {0: 0, 1: 1}
    assert kill(newest_pids(program)[1])
    assert program.end() == 0, program.stderr
    assert places(program) == {0: 0, 1: 1}
    assert len(program.events("worker_joined")) == 4
    (taken,) = program.events("taken_from_host")
    assert taken["step"] > 0
    assert not program.events("went_back")


@needs_hosts
def test_a_replica_whose_host_is_cut_off_starts_again_whole_on_another(
    run: Start, network: netlab.Network
):
    mesh = ("workers=4", "mesh.tensor=2", "train.steps=200")
    calm = run("splits.py:recipe", *KEYS, *mesh[1:], "workers=2")
    assert calm.end() == 0, calm.stderr
    hosts = [f"ip netns exec {network.name}-{host}" for host in network.hosts]
    program = on(run, hosts, network.address(netlab.OUTSIDE), *mesh)
    program.until(program.is_training, "training")
    assert places(program) == {0: 0, 1: 0, 2: 1, 3: 1}
    network.cut("h2")
    program.until(lambda: places(program) == {0: 0, 1: 0, 2: 2, 3: 2}, "whole on the third host")
    network.heal()
    assert program.end() == 0, program.stderr
    assert not program.events("went_back")
    assert program.summary["parameters_sha256"] == calm.summary["parameters_sha256"]
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
