"""Replicas of several processes that lose one: others go on, and the result does not show it."""

import json
import random

import pytest
from started import Start, Started, kill, kill_members, newest_pids, pid_of
from test_leases import spares
from test_mesh import QUICK

pytestmark = [pytest.mark.process, pytest.mark.slow]

KEYS = (*QUICK, 'train.determinism="bits"', "checkpoint.every=10", "data.loaders=0")
MESHES = {
    "tensor": ("workers=2", "mesh.tensor=2"),
    "zero 2": ("workers=2", "mesh.shard=2", "mesh.zero=2"),
    "zero 2, two replicas": ("workers=4", "mesh.shard=2", "mesh.zero=2"),
    "checkpointing": ("workers=2", "mesh.shard=2", 'mesh.checkpointing="blocks"'),
    "sequence": ("workers=2", "mesh.tensor=2", "mesh.sequence=true"),
    "hybrid": ("workers=4", "mesh.shard=2", "mesh.tensor=2"),
}


def undisturbed(run: Start, *settings: str, recipe: str = "splits.py:recipe") -> str:
    """The SHA-256 of the parameters of a run in which nothing happens."""
    program = run(recipe, *KEYS, *settings)
    assert program.end() == 0, program.stderr
    return str(program.summary["parameters_sha256"])


def check_ends_as(program: Started, sha256: str) -> None:
    assert program.end() == 0, program.stderr
    assert program.summary["parameters_sha256"] == sha256
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0


@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_that_loses_ranks_ends_with_the_bits_of_one_that_loses_none(run: Start, mesh):
    keys = (*MESHES[mesh], "train.steps=80")
    recipe = "splits.py:sequences" if mesh == "sequence" else "splits.py:recipe"
    sha256 = undisturbed(run, *keys, recipe=recipe)
    program = run(recipe, *KEYS, *keys, "arguments.pause_s=0.02")
    program.until(program.is_training, "training")
    assert kill_members(program, 3, random.Random(mesh), pauses_s=(0.5, 1.5)).total() == 3
    check_ends_as(program, sha256)
    again = program.events("taken_from_host") + program.events("went_back")
    alone = len(program.events("generation_started")[-1]["members"]) == ranks_of(program)
    assert again or not alone
    if mesh == "sequence":
        (layout,) = program.run.glob("mesh-*.json")
        assert json.loads(layout.read_text())["plan"]["sequence"]
    program.check_nothing_is_left()


def ranks_of(program: Started) -> int:
    """Of a replica: those that a loss restarted, and the one that was lost."""
    return 1 + max(len(each["restarted"]) for each in program.events("worker_lost"))


@pytest.mark.parametrize("axis", ["shard", "tensor", "stages"])
def test_other_replicas_commit_steps_while_one_waits_for_a_rank(run: Start, axis):
    keys = (f"mesh.{axis}=2", "train.steps=120")
    sha256 = undisturbed(run, *keys, "workers=2")
    program = run("held_back.py:recipe", *KEYS, *keys, "workers=4")
    program.until(program.is_training, "training")
    (program.work / "hold").touch()
    assert kill(newest_pids(program)[3])
    program.until(lambda: bool(program.events("replica_waits")), "said who waits")
    (waits,) = program.events("replica_waits")
    assert waits["replica"] == 1
    assert sorted(waits["workers"] + waits["missing"]) == [2, 3]
    begun = program.events("generation_started")[-1]
    assert begun["members"] == [0, 1]

    def committed() -> set[int]:
        ledger = program.ledger
        own = ledger[ledger["generation"] == begun["generation"]]
        return set(own["step"].tolist())

    program.until(lambda: len(committed()) >= 10, "ten steps of the other replica")
    (program.work / "held").unlink()
    check_ends_as(program, sha256)
    assert program.events("generation_started")[-1]["members"] == [0, 1, 2, 3]
    assert not program.events("went_back")
    assert f"waits for worker {waits['missing'][0]} (it has worker" in program.stderr


def test_a_replica_that_lacks_a_rank_and_has_no_other_beside_it_says_that_it_waits(run: Start):
    keys = ("workers=2", "mesh.shard=2", "train.steps=60")
    sha256 = undisturbed(run, *keys)
    program = run("held_back.py:recipe", *KEYS, *keys)
    program.until(program.is_training, "training")
    (program.work / "hold").touch()
    assert kill(newest_pids(program)[1])
    program.until(lambda: bool(program.events("replica_waits")), "said who waits")
    assert len(program.events("generation_started")) == 1
    (program.work / "held").unlink()
    check_ends_as(program, sha256)
    (waits,) = program.events("replica_waits")
    assert f"replica 0 waits for worker {waits['missing'][0]} (it has worker" in program.stderr
    assert len(program.events("taken_from_host")) == 1


def test_a_replica_goes_back_to_a_checkpoint_where_its_host_has_no_copies_either(run: Start):
    keys = ("workers=2", "mesh.shard=2", "train.steps=60")
    sha256 = undisturbed(run, *keys)
    program = run("splits.py:recipe", *KEYS, *keys, "arguments.pause_s=0.02")
    program.until(program.is_training, "training")
    program.until(lambda: len(program.events("checkpoint_saved")) > 1, "saved twice")
    host = pid_of(program, "host_joined")
    for pid in (*(spare.pid for spare in spares(program)), host, *newest_pids(program).values()):
        kill(pid)
    check_ends_as(program, sha256)
    (back,) = program.events("went_back")
    assert back["resumed_step"] >= 20
    assert back["resumed_step"] % 10 == 0
    assert not program.events("taken_from_host")
