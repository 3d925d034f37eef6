"""Servers hold the optimizer, and whoever is killed, whenever: the run ends as an all-reduce does.

What is compared is the run of one worker without servers. With `determinism = "bits"` both end with
the same model, to the bit.
"""

import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from started import RECIPES, Start, Started, kill, kill_members, kill_with_its_memory, newest_pids
from test_recovery import (
    STEPS,
    check_as_if_nothing_had_been,
    has_saved_twice,
    undisturbed,
)
from test_survival import reach, step_of

import instep
from instep.events import STEPS as TIMES
from instep.events import read_records
from instep.state.files.manifest import published
from instep.state.load import load
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

__all__ = ["undisturbed"]  # the fixture

TRAIN: dict[str, dict[str, object]] = {
    "groups": {"max_grad_norm": 0.5},
    "mixed": {"precision": "bfloat16"},
}
FUNCTIONS = {"mixed": "convolution"}


ON_THREE_HOSTS = (
    'network = "private"',
    '[launch]\nhosts = ["env HOST=1", "env HOST=2", "env HOST=3"]\naddress = "127.0.0.1"',
)


def begin(
    start: Start,
    folder: Path,
    workers: int,
    servers: int,
    *,
    every: int = 25,
    pause_s: float = 1.3,
    copy: bool = False,
    hosts: tuple[str, str] = ("", ""),
    codec: str = "none",
) -> Started:
    determinism = "bits" if codec == "none" else "order"
    job = folder / "job.toml"
    job.write_text(
        f'name = "disturbed"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\nworkers = {workers}\n'
        f"seed = 5\n{hosts[0]}\n[train]\nsteps = {STEPS}\nglobal_batch = 16\n"
        f'determinism = "{determinism}"\ndeal = "even"\nvalidate_every = 40\n'
        f'[sync]\nname = "server_sync"\nservers = {servers}\ncodec = "{codec}"\n'
        f"[sync.options]\ncopy = {str(copy).lower()}\n[checkpoint]\nevery = {every}\n"
        f"[arguments]\npause_s = {pause_s * workers / 1000}\n{hosts[1]}\n"
    )
    return start("-m", "instep", "run", job)


def check_checkpoints(run: Path) -> None:
    """All that are there are complete: model, and every server's part of the optimizer's state."""
    found = list(published(run / "checkpoints"))
    assert found
    for _, checkpoint in found:
        snapshot = load(checkpoint)
        kept = {
            name: part
            for group, named in snapshot.tensors.items()
            if group.startswith("shard-")
            for name, part in named.items()
        }
        elements = sum(part.numel() for part in kept.values())
        assert elements == sum(tensor.numel() for tensor in snapshot.tensors["model"].values())


def check_who_started_again(program: Started, killed: dict[int, int]) -> None:
    """Nobody but those that were killed, and these as often."""
    starts = [int(event["worker"]) for event in program.events("worker_joined")]
    lost = [int(event["worker"]) for event in program.events("worker_lost")]
    for number in set(starts):
        assert starts.count(number) == 1 + lost.count(number)
        assert lost.count(number) <= killed.get(number, 0)


@pytest.mark.tail
@pytest.mark.parametrize(
    ("workers", "servers", "kills"), [(2, 1, 3), slow(2, 1, 50), slow(3, 2, 50), slow(1, 2, 20)]
)
def test_servers_and_workers_that_are_killed_at_random_moments_leave_no_trace(
    start: Start, tmp_path: Path, undisturbed: Path, workers: int, servers: int, kills: int
) -> None:
    draw = random.Random(f"{workers} {servers} {kills}")
    program = begin(start, tmp_path, workers, servers, every=5, pause_s=1.3 if kills < 10 else 12)
    program.until(program.is_training, "training")
    killed = kill_members(program, kills, draw)
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    check_who_started_again(program, killed)
    check_checkpoints(program.run)
    assert killed.total() == kills


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "codec"), [(1, "int8"), (2, "int4")])
def test_with_a_codec_kills_leave_no_trace_either(
    start: Start, tmp_path: Path, workers: int, codec: str
) -> None:
    """What is left out on a worker, and what a server has beyond the workers, outlive both."""
    sync = {"name": "server_sync", "servers": 2, "codec": codec}
    train = {"steps": STEPS, "global_batch": 16, "deal": "even", "validate_every": 40}
    how: dict[str, Any] = {"seed": 5, "quiet": True, "workers": workers, "train": train}
    recipe = f"{RECIPES / 'tiny.py'}:recipe"
    wanted = instep.train(recipe, name="calm", runs=tmp_path, sync=sync, **how).path
    program = begin(start, tmp_path, workers, 2, every=5, pause_s=6, codec=codec)
    program.until(program.is_training, "training")
    killed = kill_members(program, 12, random.Random(workers))
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, wanted)
    check_who_started_again(program, killed)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 2), (2, 1), (1, 3)])
def test_a_checkpoint_with_a_codec_is_taken_up_by_any_number_of_servers(
    tmp_path: Path, first: int, then: int
) -> None:
    """By as many, to the bit; by another number, whose segments are others, to what int8 rounds."""
    recipe = f"{RECIPES / 'tiny.py'}:recipe"
    sync = {"name": "server_sync", "servers": first, "codec": "int8"}
    how = settings(sync=sync, workers=1)
    train = {**how.pop("train"), "determinism": "order"}
    whole = instep.train(recipe, name="whole", runs=tmp_path, train=train, **how)
    train["stop_after_steps"] = 11
    halted = instep.train(recipe, name="halted", runs=tmp_path, train=train, **how)
    again = instep.resume(
        halted.path, quiet=True, train={"stop_after_steps": None}, sync={"servers": then}
    )
    found, wanted = (RunFolder(r.path).last("model_saved") for r in (again, whole))
    if first == then:
        assert found["parameters_sha256"] == wanted["parameters_sha256"]
    assert again.summary["loss"] == pytest.approx(whole.summary["loss"], rel=1e-3)
    assert len(RunFolder(again.path).members.generations[-1]["members"]) == 1 + then


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
def test_servers_that_are_killed_all_at_once_go_on_from_the_memory_of_their_host(
    start: Start, tmp_path: Path, undisturbed: Path, servers: int
) -> None:
    program = begin(start, tmp_path, 2, servers)
    program.until(lambda: has_saved_twice(program), "saved")
    before = newest_pids(program)
    assert sorted(before) == list(range(2 + servers))
    assert all(kill(before[2 + number]) for number in range(servers))
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    after = newest_pids(program)
    assert [after[number] == before[number] for number in sorted(before)] == [
        *[True] * 2,
        *[False] * servers,
    ]
    assert not program.events("went_back")


@pytest.mark.slow
def test_where_nobody_is_left_a_run_with_servers_goes_back_to_its_newest_checkpoint(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, 2, 2)
    program.until(lambda: has_saved_twice(program), "saved")
    assert all(kill(pid) for pid in newest_pids(program).values())
    assert program.end() == 0, program.stderr
    assert [event["resumed_step"] % 25 for event in program.events("went_back")] == [0]
    check_as_if_nothing_had_been(program, undisturbed)


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "seed": 5,
        "quiet": True,
        "workers": 2,
        "train": {"steps": 24, "global_batch": 16, "determinism": "bits", "max_grad_norm": 0.5},
        "checkpoint": {"every": 5},
        **changes,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (2, 3)])
def test_a_checkpoint_of_one_number_of_servers_is_taken_up_by_another(
    tmp_path: Path, first: int, then: int
) -> None:
    recipe = f"{RECIPES / 'tiny.py'}:recipe"
    wanted = instep.train(recipe, name="whole", runs=tmp_path, **settings()).path
    train = {**settings()["train"], "stop_after_steps": 11}
    sync = {"name": "server_sync", "servers": first}
    halted = instep.train(
        recipe, name="halted", runs=tmp_path, **settings(train=train, sync=sync)
    ).path
    check_checkpoints(halted)
    again = instep.resume(
        halted, quiet=True, train={"stop_after_steps": None}, sync={"servers": then}
    )
    found = [
        RunFolder(path).last("model_saved")["parameters_sha256"] for path in (again.path, wanted)
    ]
    assert found[0] == found[1]
    assert len(RunFolder(again.path).members.generations[-1]["members"]) == 2 + then


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "workers", "servers"),
    [
        ("convolution", 1, 3),
        ("transformer", 3, 2),
        ("recurrent", 2, 1),
        ("groups", 2, 2),
        ("layerwise", 3, 3),
        ("mixed", 2, 2),
    ],
)
def test_every_kind_of_model_and_optimizer_is_trained_as_without_servers(
    tmp_path: Path, kind: str, workers: int, servers: int
) -> None:
    """Statistics, dropout, schedulers, clipping, tied parameters, half precision."""
    train = {"epochs": 2, "global_batch": 16, "determinism": "bits", **TRAIN.get(kind, {})}
    sums = []
    for name, count in (("all_reduce", 1), ("server_sync", servers)):
        sync = {"name": name, "servers": count}
        run = instep.train(
            f"{RECIPES / 'kinds.py'}:{FUNCTIONS.get(kind, kind)}",
            name=name,
            runs=tmp_path,
            seed=3,
            quiet=True,
            workers=workers,
            train=train,
            sync=sync,
        )
        sums.append(RunFolder(run.path).last("model_saved")["parameters_sha256"])
    assert sums[0] == sums[1]


@pytest.mark.slow
def test_a_run_whose_server_has_lost_its_memory_ends_and_can_be_resumed(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    """The fork server and its spare keep that memory; nobody does once all three are gone."""
    program = begin(start, tmp_path, 2, 1)
    program.until(lambda: has_saved_twice(program), "saved")
    pids = newest_pids(program)
    workers = {pids[0], pids[1], program.process.pid}
    keep = workers | {int(program.events("master_started")[-1]["pid"])}
    for process in program.processes():
        if process.pid not in keep:
            kill(process.pid)
    assert program.end() == 5
    assert "server 0 of 1" in program.stderr
    assert "Resume the run" in program.stderr
    again = start("-m", "instep", "resume", program.run)
    assert again.end() == 0, again.stderr
    wanted, found = (RunFolder(p).last("model_saved") for p in (undisturbed, program.run))
    assert found["parameters_sha256"] == wanted["parameters_sha256"]


@pytest.mark.slow
def test_a_server_that_is_lost_with_its_memory_has_its_state_from_the_copy_of_another(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, 2, 2, copy=True)
    for server in (2, 3):
        program.until(lambda: has_saved_twice(program), "saved")
        before = newest_pids(program)
        kill_with_its_memory(before[server])
        program.until(lambda: newest_pids(program)[server] != before[server], "replaced")  # noqa: B023
        reached = int(program.ledger["step"].max())  # no further one until it has its state
        program.until(lambda: program.ledger["step"].max() > reached, "going on")  # noqa: B023
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    assert not program.events("went_back")


@pytest.mark.slow
def test_a_host_with_a_server_that_is_lost_ends_nothing_where_another_has_a_copy(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, 2, 2, copy=True, pause_s=5, hosts=ON_THREE_HOSTS)
    program.until(lambda: has_saved_twice(program), "saved")
    homes = {int(e["worker"]): int(e["host"]) for e in program.events("worker_joined")}
    assert homes[2] != homes[3]
    host = psutil.Process(
        next(int(e["pid"]) for e in program.events("host_joined") if e["host"] == homes[3])
    )
    for process in [host, *host.children(recursive=True)]:
        kill(process.pid)
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    assert not program.events("went_back")
    again = [int(e["host"]) for e in program.events("worker_joined") if e["worker"] == 3]
    assert len(again) > 1


@pytest.mark.timed
def test_training_goes_on_within_two_seconds_of_the_death_of_a_server(
    start: Start, tmp_path: Path
) -> None:
    program = begin(start, tmp_path, 2, 2, pause_s=5)
    for number, server in enumerate((2, 3, 2, 3)):
        reach(program, 10 + 25 * number)
        pid, killed = newest_pids(program)[server], time.time()
        assert kill(pid)
        program.until(lambda: len(program.events("generation_started")) > number + 1, "whole")  # noqa: B023
        formed = program.events("generation_started")[-1]["time"]
        assert 0 < formed - killed < 1.5
        step = step_of(program)
        program.until(lambda: step_of(program) > step + 5, "going on")  # noqa: B023
        times = read_records(program.run / "steps.bin", TIMES)
        first = times["begin"][(times["begin"] > killed) & (times["worker"] == 0)].min()
        assert first - killed < 2
    assert program.end() == 0, program.stderr
    check_who_started_again(program, {2: 2, 3: 2})


@pytest.mark.slow
def test_frozen_parameters_never_travel(tmp_path: Path) -> None:
    """2 MB that are frozen, in 20 steps of two workers: less than half of that is sent in all."""
    recipe = tmp_path / "frozen.py"
    recipe.write_text(
        "import torch, instep\n"
        "from torch import nn\n"
        "def recipe():\n"
        "    model = nn.Sequential(nn.Embedding(50_000, 10), nn.Linear(10, 3))\n"
        "    model[0].requires_grad_(False)\n"
        "    data = [(torch.tensor(n % 7), n % 3) for n in range(64)]\n"
        "    make = lambda parameters: torch.optim.Adam(parameters)\n"
        "    return instep.Recipe(model=model, loss=nn.CrossEntropyLoss(), optimizer=make, "
        "train=data)\n"
    )
    sync = {"name": "server_sync", "servers": 1}
    train = {"steps": 20, "global_batch": 16}
    run = instep.train(
        f"{recipe}:recipe", runs=tmp_path, quiet=True, workers=2, train=train, sync=sync
    )
    assert 0 < run.summary["wire_bytes"] < 1_000_000


@pytest.mark.slow
def test_workers_come_and_go_while_servers_stay(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, 2, 1)
    program.until(program.is_training, "training")
    server = newest_pids(program)[2]
    for workers in (3, 1):
        before = len(program.events("generation_started"))
        asked = start("-m", "instep", "scale", program.run, "--workers", str(workers))
        assert asked.end() == 0, asked.stderr
        program.until(lambda: len(program.events("generation_started")) > before, "scaled")  # noqa: B023
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    members = [event["members"] for event in program.events("generation_started")]
    assert members == [[0, 1, 2], [0, 1, 3, 2], [0, 2]]
    assert newest_pids(program)[2] == server
