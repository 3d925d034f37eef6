"""With a codec and without lockstep: what arrives is what was meant to, whichever server is killed.

Gradients of `adds_up.py` are the samples, whatever the parameters are. So what each worker has left
out follows from the ledger, and the last parameters do, to the bit. What happens at each moment is
tested on threads, in `unit/server`.
"""

import copy
import random
from pathlib import Path
from typing import Any

import adds_up
import pytest
import tiny
import torch
from safetensors.torch import load_file
from started import RECIPES, Start, kill_members
from test_leased_runs import (
    BATCH,
    PARTS,
    SAMPLES,
    STEPS,
    begin,
    check_exact,
    kill_servers,
    micro_batches,
)
from torch import nn

import instep
from instep.comm.codecs.int8 import Int8
from instep.data.order import Order
from instep.recipe.build import call
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process

INT8 = 'name = "{}"\nservers = {}\ncodec = "int8"\noptions = {{ encode_vectors = true }}'


def sent(values: torch.Tensor, left: torch.Tensor | None = None) -> torch.Tensor:
    """What values are decoded to; what is left out goes into `left`."""
    codec, decoded = Int8(), torch.zeros(values.numel())
    payload = torch.zeros(codec.size(values.numel()), dtype=torch.uint8)
    codec.encode(values.reshape(-1), payload, key=0, left=left)
    codec.add_into(decoded, payload)
    return decoded.view(values.shape)


def wanted_sum(run: RunFolder) -> torch.Tensor:
    """What the servers add up, in the order of the ledger, of what each worker sends."""
    order, rows = Order(adds_up.EVEN, 5), adds_up.many_whole_numbers()
    weight, carried = torch.zeros(adds_up.WIDE), dict[int, torch.Tensor]()
    for row in run.ledger:
        indices = order.indices(int(row["epoch"]), int(row["first"]), int(row["stop"]))
        left = carried.setdefault(int(row["worker"]), torch.zeros(adds_up.WIDE))
        weight -= sent(rows[indices].mean(0) + left, left)
    return weight


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_asks_whether_its_last_push_counts_where_the_server_was_killed_after_it(
    tmp_path: Path, servers: int
) -> None:
    """At a step with a checkpoint, before the last push of it is answered."""
    done = instep.train(
        f"{RECIPES / 'adds_up.py'}:in_many_that_die",
        name="coded", runs=tmp_path, seed=5, quiet=True, workers=1,
        sync={
            "name": "server_async", "servers": servers, "codec": "int8",
            "options": {"encode_vectors": True},
        },
        train={"steps": 4, "global_batch": BATCH, "micro_batches": PARTS},
        checkpoint={"every": 3},
    )  # fmt: skip
    run = RunFolder(done.path)
    check_exact(run, 4)
    assert [event["worker"] for event in run.named("worker_lost")] == [1]
    assert torch.equal(load_file(run.path / "model.safetensors")["weight"], wanted_sum(run))


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
def test_a_run_sends_the_bytes_of_its_payloads_and_adds_up_what_they_stand_for(
    tmp_path: Path, servers: int
) -> None:
    done = instep.train(
        f"{RECIPES / 'adds_up.py'}:in_many_whole_numbers",
        name="coded", runs=tmp_path, seed=5, quiet=True, workers=1,
        sync={
            "name": "bounded_stale", "servers": servers, "codec": "int8",
            "options": {"staleness": 0, "encode_vectors": True},
        },
        train={"steps": 12, "global_batch": BATCH, "micro_batches": PARTS},
    )  # fmt: skip
    run = RunFolder(done.path)
    check_exact(run, 12)
    assert torch.equal(load_file(run.path / "model.safetensors")["weight"], wanted_sum(run))
    once, whole = Int8().size(adds_up.WIDE), 4 * adds_up.WIDE
    gathered = whole * (servers - 1) / servers  # by the first server, at the end
    wanted = once * (2 * len(run.ledger) - 1) + whole + gathered  # the first pull is whole
    assert wanted < done.summary["wire_bytes"] < 1.02 * wanted
    verdict = run.last("same_as_one_machine")["verdict"]
    assert "sync.codec = 'int8' rounds what is sent, and what a worker carries over" in verdict


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("servers", [1, 2])
def test_whichever_server_is_killed_nothing_of_a_gradient_is_lost_or_comes_twice(
    start: Start, tmp_path: Path, servers: int, workers: int
) -> None:
    sync = INT8.format("server_async", servers)
    given = (workers, sync, 0.006 * workers, STEPS, "adds_up.py:in_many_whole_numbers")
    program = begin(start, tmp_path, *given)
    program.until(program.is_training, "training")
    numbers = [workers + place for place in range(servers)]
    kill_servers(program, numbers, 8, random.Random(f"{servers} {workers}"))
    assert program.end() == 0, program.stderr
    run = RunFolder(program.run)
    check_exact(run)
    assert torch.equal(load_file(run.path / "model.safetensors")["weight"], wanted_sum(run))
    program.check_nothing_is_left()


@pytest.mark.slow
def test_whoever_is_killed_each_micro_batch_is_committed_once(start: Start, tmp_path: Path) -> None:
    """A worker takes what it carries over with it: that is late for ever, and no unit is."""
    program = begin(start, tmp_path, 3, INT8.format("bounded_stale", 2), 0.036)
    program.until(program.is_training, "training")
    kill_members(program, 20, random.Random(20))
    assert program.end() == 0, program.stderr
    run = RunFolder(program.run)
    check_exact(run)
    assert program.summary["metrics"]["accuracy"] > 0.8
    program.check_nothing_is_left()


def plain_loop(steps: int) -> dict[str, torch.Tensor]:
    """A loop of plain PyTorch that rounds matrices where the run does."""
    recipe = call(tiny.recipe, {}, 5)
    model, order = copy.deepcopy(recipe.model), Order(SAMPLES, 5)
    assert isinstance(model, nn.Module)
    seen = copy.deepcopy(model)
    inputs, labels = recipe.train.tensors
    optimizer = recipe.optimizer(model.parameters())
    pairs = [*zip(seen.parameters(), model.parameters(), strict=True)]
    carried = {one: torch.zeros(one.numel()) for one, _ in pairs}
    for chosen in micro_batches(order, steps):
        seen.zero_grad()
        nn.functional.cross_entropy(seen(inputs[chosen]), labels[chosen]).backward()
        for one, other in pairs:
            assert one.grad is not None
            other.grad = one.grad.clone()
            if one.dim() > 1:
                left = carried[one]
                other.grad = sent(one.grad.reshape(-1) + left, left).view(one.shape)
        optimizer.step()
        with torch.no_grad():
            for one, other in pairs:
                if one.dim() > 1:
                    one += sent(other - one)
                else:
                    one.copy_(other)
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_is_a_plain_loop_that_rounds_likewise(tmp_path: Path, servers: int) -> None:
    given: dict[str, Any] = {"name": "coded", "runs": tmp_path, "seed": 5, "quiet": True}
    sync = {
        "name": "bounded_stale", "servers": servers, "codec": "int8", "options": {"staleness": 0}
    }  # fmt: skip
    train = {"steps": 40, "global_batch": BATCH, "micro_batches": PARTS}
    recipe = f"{RECIPES / 'tiny.py'}:recipe"
    done = instep.train(recipe, workers=1, train=train, sync=sync, **given)
    found = load_file(done.path / "model.safetensors")
    for name, tensor in plain_loop(40).items():
        assert torch.equal(found[name], tensor)


@pytest.mark.slow
def test_a_run_is_resumed_on_other_numbers_of_workers_and_servers(tmp_path: Path) -> None:
    given: dict[str, Any] = {"name": "coded", "runs": tmp_path, "seed": 5, "quiet": True}
    sync = {"name": "bounded_stale", "servers": 2, "codec": "int8"}
    train = {"steps": 30, "global_batch": BATCH, "micro_batches": PARTS, "stop_after_steps": 11}
    recipe = f"{RECIPES / 'tiny.py'}:recipe"
    halted = instep.train(recipe, workers=2, train=train, sync=sync, **given)
    again = instep.resume(
        halted.path, quiet=True, workers=3, train={"stop_after_steps": None}, sync={"servers": 1}
    )
    check_exact(RunFolder(again.path), 30)
