"""Micro-batches that vote for the sign of the gradient, against a plain loop over the voters."""

import random
from pathlib import Path

import pytest
import torch
import votes
from safetensors.torch import load_file
from started import RECIPES, Start, Started, kill_members
from torch import nn

import instep
from instep.client.running import scale
from instep.data.order import Order, key, micro_batch, position
from instep.errors import SpecError
from instep.state.files.manifest import published
from instep.state.load import load
from marks import slow

pytestmark = pytest.mark.process

BATCH, VOTERS, SEED = 20, 5, 5


def plain_loop(steps, momentum=0.9, *, sparse=False):
    """One process, one voter after the other. Of ours the order and the keys of random draws."""
    torch.manual_seed(SEED)
    model, order, data = votes.Sorts(sparse), Order(votes.SAMPLES, SEED), votes.pairs().tensors
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = (votes.plain_sgd if sparse else votes.sgd)(trained)
    scheduler = votes.half_way_down(optimizer)
    memory = [[torch.zeros_like(p) for p in trained] for _ in range(VOTERS)]
    for step in range(1, steps + 1):
        epoch, first, stop = position(step, votes.SAMPLES, BATCH)
        parts = -(-(stop - first) * VOTERS // BATCH)
        ballots = [[] for _ in trained]
        for voter in range(parts):
            low, high = micro_batch(first, stop, voter, parts)
            rows, target = (t[torch.from_numpy(order.indices(epoch, low, high))] for t in data)
            torch.manual_seed(key(SEED, 1, step, voter))
            model.zero_grad()
            nn.functional.mse_loss(model(rows), target).backward()
            share = (high - low) / (stop - first)
            for slot, parameter in enumerate(trained):
                if parameter.grad is not None:
                    gradient = parameter.grad.to_dense() * share
                    memory[voter][slot] = momentum * memory[voter][slot] + gradient
                    ballots[slot].append(memory[voter][slot].sign())
        for parameter, ballot in zip(trained, ballots, strict=True):
            parameter.grad = sum(ballot).sign() if ballot else None
        optimizer.step()
        scheduler.step()
    return model.state_dict()


def begin(start: Start, folder: Path, name: str, *settings: str, workers: int = 3) -> Started:
    job = folder / f"{name}.toml"
    job.write_text(
        f'name = "{name}"\nrecipe = "{RECIPES / "votes.py"}:recipe"\nworkers = {workers}\n'
        f"seed = {SEED}\n[train]\nsteps = 17\nglobal_batch = {BATCH}\n"
        f"micro_batches = {VOTERS}\nthreads = 1\n"
        '[sync]\nname = "sign_vote"\n[checkpoint]\nevery = 6\nkeep_last = 9\n'
    )
    sets = [part for setting in settings for part in ("--set", setting)]
    return start("-m", "instep", "run", job, *sets)


def check_same(program: Started, wanted) -> None:
    assert program.end() == 0, program.stderr
    program.check_nothing_is_left()
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    assert program.summary["unrecorded_steps"] == 0
    found = load_file(program.run / "model.safetensors")
    assert found.keys() == wanted.keys() - {"again.weight"}  # that is `first.weight`
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0.0, atol=1e-6)


@pytest.mark.tail
@pytest.mark.parametrize("workers", [slow(1), 3])
def test_a_run_equals_a_plain_loop_over_the_voters(start: Start, tmp_path: Path, workers: int):
    """Epochs end with nine samples for three voters."""
    program = begin(start, tmp_path, "plain", workers=workers)
    check_same(program, plain_loop(17))
    assert not torch.equal(plain_loop(17)["last.1.weight"], plain_loop(17, 0.0)["last.1.weight"])
    (verdict,) = program.events("same_as_one_machine")
    assert verdict["verdict"].startswith("no: sync.name = 'sign_vote' takes the majority of the")
    assert "5 micro-batches" in verdict["verdict"]


@pytest.mark.slow
def test_sparse_gradients_and_no_momentum(start: Start, tmp_path: Path):
    sets = "arguments.sparse=true", "sync.options.momentum=0.0"
    check_same(begin(start, tmp_path, "sparse", *sets), plain_loop(17, 0.0, sparse=True))


@pytest.mark.slow
def test_kills_do_not_show_in_the_result(start: Start, tmp_path: Path):
    program = begin(start, tmp_path, "killed", "arguments.pause_s=0.005", "train.steps=60")
    program.until(program.is_training, "training")
    kill_members(program, 3, random.Random(7))
    check_same(program, plain_loop(60))
    assert not program.events("warning")


def members(program: Started) -> int:
    return len(program.events("generation_started")[-1]["members"])


@pytest.mark.slow
def test_4_workers_and_3_and_4_again_come_to_the_result_of_a_plain_loop(
    start: Start, tmp_path: Path
):
    settings = "arguments.pause_s=0.02", "train.steps=150"
    program = begin(start, tmp_path, "scaled", *settings, workers=4)
    program.until(program.is_training, "training")
    for workers in (3, 4):
        scale(program.run, workers)
        program.until(lambda: members(program) == workers, "scaled")  # noqa: B023
    check_same(program, plain_loop(150))


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_with_other_workers(start: Start, tmp_path: Path):
    """What voters remember is in the checkpoint, one momentum for each."""
    program = begin(start, tmp_path, "stopped", "train.stop_after_steps=6", workers=4)
    assert program.end() == 0, program.stderr
    own = load(dict(published(program.run / "checkpoints"))[6]).tensors["own"]
    assert {name.split("/")[0] for name in own} == {f"momentum-{n}" for n in range(VOTERS)}
    for workers, stop in ((3, 12), (4, 0)):
        instep.resume(program.run, train={"stop_after_steps": stop}, workers=workers, quiet=True)
    check_same(program, plain_loop(17))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor", "stages"])
def test_a_voter_may_be_computed_by_a_replica_of_several_processes(
    start: Start, tmp_path: Path, mesh: str
):
    """Also where one of them is killed, and where the run goes on with fewer replicas."""
    keys = f'recipe="{RECIPES / "splits.py"}:recipe"', "arguments.drop=0.0"
    keys = *keys, 'arguments.dtype="float32"', 'arguments.optimizer="adamw"'
    alone = begin(start, tmp_path, "alone", *keys, workers=1)
    assert alone.end() == 0, alone.stderr
    slow = *keys, f"mesh.{mesh}=2", "arguments.pause_s=0.03", "train.stop_after_steps=12"
    program = begin(start, tmp_path, "mesh", *slow, workers=4)
    program.until(program.is_training, "training")
    kill_members(program, 1, random.Random(1))
    assert program.end() == 0, program.stderr
    assert not program.events("warning")
    with pytest.raises(SpecError, match="keeps a part of what participants or voters"):
        instep.resume(program.run, mesh={mesh: 1}, quiet=True)
    instep.resume(program.run, train={"stop_after_steps": 0}, workers=2, quiet=True)
    wanted, found = (load_file(each.run / "model.safetensors") for each in (alone, program))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=1e-5)
