"""Several servers without lockstep: whoever is killed, no update is lost or made twice.

What happens at each moment of an update is tested on threads, in `unit/server`.
"""

import random
from pathlib import Path
from typing import Any

import adds_up
import psutil
import pytest
import torch
from safetensors.torch import load_file
from started import RECIPES, Start, kill, kill_members, newest_pids
from test_leased_runs import (
    BATCH,
    PARTS,
    STEPS,
    begin,
    check_equal,
    check_exact,
    kill_servers,
    plain_loop,
    write_job,
)

import instep
from instep.data.order import Order
from instep.errors import WorkerError
from instep.events import read_events
from instep.state.files.manifest import published
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

ONE_BY_ONE = 'name = "bounded_stale"\nservers = {}\noptions = {{ staleness = 0 }}'


@pytest.mark.tail
@pytest.mark.parametrize(("servers", "kills", "steps"), [(2, 3, 50), slow(3, 25, STEPS)])
def test_one_worker_is_a_plain_loop_whichever_server_is_killed(
    start: Start, tmp_path: Path, servers: int, kills: int, steps: int
) -> None:
    pause_s = 0.003 if kills < 10 else 0.012
    program = begin(start, tmp_path, 1, ONE_BY_ONE.format(servers), pause_s, steps)
    program.until(program.is_training, "training")
    kill(newest_pids(program)[2])
    kill_members(program, kills - 1, random.Random(kills))
    assert program.end() == 0, program.stderr
    run = RunFolder(program.run)
    check_exact(run, steps)
    check_equal(run, plain_loop(steps))
    assert not program.events("went_back")
    program.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["server_async", "bounded_stale"])
def test_whichever_server_is_killed_no_update_is_lost_and_the_bound_holds(
    start: Start, tmp_path: Path, name: str
) -> None:
    """The parameters are a sum of whole numbers: no order of updates shows in it, and each does."""
    given = (3, f'name = "{name}"\nservers = 2', 0.02, STEPS, "adds_up.py:in_many_whole_numbers")
    program = begin(start, tmp_path, *given)
    program.until(program.is_training, "training")
    before = newest_pids(program)
    kill_servers(program, [3, 4], 10, random.Random(name))
    assert program.end() == 0, program.stderr
    run = RunFolder(program.run)
    check_exact(run)
    after = newest_pids(program)
    assert [n for n in before if before[n] != after[n]] == [3, 4]
    order, rows = Order(adds_up.EVEN, 5), adds_up.many_whole_numbers().double()
    wanted = torch.zeros(adds_up.WIDE, dtype=torch.float64)
    farthest = 0
    for row in run.ledger:
        indices = order.indices(int(row["epoch"]), int(row["first"]), int(row["stop"]))
        wanted -= rows[indices].mean(0)
        assert name == "server_async" or row["step"] >= farthest - 2
        farthest = max(farthest, int(row["step"]))
    assert torch.equal(load_file(run.path / "model.safetensors")["weight"].double(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20])
def test_whoever_is_killed_each_micro_batch_is_committed_once_to_all_servers(
    start: Start, tmp_path: Path, kills: int
) -> None:
    program = begin(start, tmp_path, 3, 'name = "bounded_stale"\nservers = 3', 0.036)
    program.until(program.is_training, "training")
    kill_members(program, kills, random.Random(kills))
    assert program.end() == 0, program.stderr
    run = RunFolder(program.run)
    check_exact(run)
    assert program.summary["metrics"]["accuracy"] > 0.8
    assert [event["step"] for event in run.validations] == [40, 80, 120, 160]
    program.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_a_host_that_is_lost_with_a_server_ends_the_run_which_resumes_with_every_unit_once(
    start: Start, tmp_path: Path, place: int
) -> None:
    """Of two hosts, each with a worker and a server."""
    job = write_job(tmp_path, 2, 'name = "server_async"\nservers = 2', 0.03, steps := 60)
    hosts = 'hosts = ["env HOST=1", "env HOST=2"]\naddress = "127.0.0.1"'
    job.write_text(f'network = "private"\n{job.read_text()}[launch]\n{hosts}\n')
    program = start("-m", "instep", "run", job)
    program.until(program.is_training, "training")
    program.until(lambda: program.events("checkpoint_saved"), "saved")
    homes = {int(e["worker"]): int(e["host"]) for e in program.events("worker_joined")}
    assert homes[2] != homes[3]
    pids = {int(e["host"]): int(e["pid"]) for e in program.events("host_joined")}
    host = psutil.Process(pids[homes[2 + place]])
    for process in [host, *host.children(recursive=True)]:
        kill(process.pid)
    assert program.end() == WorkerError.exit_code == 5
    sentence, *rest = program.error.splitlines()
    assert f"server {2 + place}, one of 2, was lost with the memory of its host" in sentence
    assert sentence.endswith("Resume the run: it continues from the newest checkpoint.")
    assert rest[-1] == f"  to resume: instep resume {program.run}"
    at = max(step for step, _ in published(program.run / "checkpoints"))
    again = start("-m", "instep", "resume", program.run)
    assert again.end() == 0, again.stderr
    assert program.events("run_started")[-1]["resumed_step"] == at
    check_exact(RunFolder(program.run), steps)
    program.check_no_process_is_left()
    again.check_no_process_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("then", [3, 1])
def test_a_run_resumes_with_another_number_of_servers(tmp_path: Path, then: int) -> None:
    given: dict[str, Any] = {"name": "leased", "runs": tmp_path, "seed": 5, "quiet": True}
    sync = {"name": "bounded_stale", "servers": 2, "options": {"staleness": 0}}
    train = {"steps": 20, "global_batch": BATCH, "micro_batches": PARTS, "stop_after_steps": 9}
    recipe = f"{RECIPES / 'tiny.py'}:recipe"
    halted = instep.train(recipe, workers=1, train=train, sync=sync, **given)
    names = [path.name for path in (halted.path / "checkpoints" / "step-00000009").iterdir()]
    assert {"shard-0.safetensors", "shard-1.safetensors"} <= {*names}
    again = instep.resume(
        halted.path, quiet=True, train={"stop_after_steps": None}, sync={"servers": then}
    )
    run = RunFolder(again.path)
    check_exact(run, 20)
    check_equal(run, plain_loop(20))
    model = load_file(run.path / "model.safetensors").values()
    size = sum(each.nbytes for each in model if each.is_floating_point())
    assert again.summary["wire_bytes"] > 2 * size * len(run.ledger), "down and up, for each update"


def test_servers_after_the_first_try_no_pass(tmp_path: Path) -> None:
    given: dict[str, Any] = {"name": "leased", "runs": tmp_path, "seed": 5, "quiet": True}
    train = {"steps": 3, "global_batch": BATCH, "micro_batches": PARTS}
    sync = {"name": "server_async", "servers": 2}
    done = instep.train(f"{RECIPES / 'tiny.py'}:recipe", workers=1, train=train, sync=sync, **given)
    tried = {event["worker"] for event in RunFolder(done.path).named("trial_progress")}
    assert 0 in tried
    assert 2 not in tried


@pytest.mark.slow
def test_callbacks_see_the_parameters_of_all_servers_at_their_step(tmp_path: Path) -> None:
    given: dict[str, Any] = {"name": "leased", "runs": tmp_path, "seed": 5, "quiet": True}
    sync = {"name": "bounded_stale", "servers": 2, "options": {"staleness": 0}}
    train = {"steps": 5, "global_batch": BATCH, "micro_batches": PARTS}
    recipe = f"{RECIPES / 'sums_up.py'}:recipe"
    done = instep.train(recipe, workers=1, train=train, sync=sync, **given)
    events = read_events(done.path / "events.jsonl")
    logged = [e for e in events if e["event"] == "logged" and "0.weight" in e["values"]]
    assert [event["step"] for event in logged] == [1, 2, 3, 4, 5]
    for event in logged:
        wanted = plain_loop(event["step"])
        assert event["values"] == pytest.approx(
            {k: float(v.double().sum()) for k, v in wanted.items()}
        )


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_worker_that_sleeps_through_the_end_of_the_run_hears_of_it(
    start: Start, tmp_path: Path, servers: int
) -> None:
    """In the last micro-batch, beyond its lease: meanwhile another worker ends the run."""
    job, woke = tmp_path / "job.toml", tmp_path / "woke"
    job.write_text(
        f'recipe = "{RECIPES / "sleeps.py"}:recipe"\nworkers = 2\nseed = 5\n'
        f"[train]\nsteps = 7\nglobal_batch = {BATCH}\nmicro_batches = {PARTS}\n"
        "[data]\norder = 'dataset'\n"
        f'[sync]\nname = "bounded_stale"\nservers = {servers}\n'
        f'[arguments]\nonce = "{woke}"\nevents = "{tmp_path / "slept" / "events.jsonl"}"\n'
    )
    program = start("-m", "instep", "run", job, "--runs", tmp_path, "--name", "slept")
    assert program.end() == 0, program.stderr
    run = RunFolder(tmp_path / "slept")
    check_exact(run, 7)
    assert woke.read_text() == "woke", "it was told of the end of the run only then"
    assert not run.named("worker_lost")
    program.check_no_process_is_left()
    program.check_no_file_is_left()


@pytest.mark.slow
def test_servers_for_which_there_is_nothing_go_along_and_are_told_of(tmp_path: Path) -> None:
    given: dict[str, Any] = {"name": "leased", "runs": tmp_path, "seed": 5, "quiet": True}
    sync = {"name": "bounded_stale", "servers": 4, "options": {"staleness": 0}}
    train = {"steps": 9, "global_batch": BATCH, "micro_batches": PARTS}
    done = instep.train(f"{RECIPES / 'tiny.py'}:recipe", workers=1, train=train, sync=sync, **given)
    run = RunFolder(done.path)
    check_equal(run, plain_loop(9))
    warnings = [
        e["text"] for e in read_events(run.path / "events.jsonl") if e["event"] == "warning"
    ]
    assert any("no parameters for 1 of them: choose fewer" in text for text in warnings)
