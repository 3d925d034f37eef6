"""Samples that cannot be read are left out of a run: means are over the others, and all is told."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import unreadable
from safetensors.torch import load_file
from started import RECIPES, Start

import instep
from instep.cli import main
from instep.data.order import Order, position
from instep.recipe.build import call
from instep.report.figures.proof import prove
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process

BAD = [0, 3, 40, 41, 42, 77]
BAD_VALIDATION = [5, 36]
STEPS = 14  # two epochs
TRAIN = {"epochs": 2, "global_batch": 16}


def trained(
    runs: Path,
    workers: int,
    train: dict[str, object],
    *,
    loaders: int | str = "auto",
    **arguments: object,
) -> instep.Run:
    return instep.train(
        f"{RECIPES / 'unreadable.py'}:recipe",
        name=f"on-{workers}",
        runs=runs,
        workers=workers,
        seed=5,
        quiet=True,
        arguments={"bad": BAD, "bad_validation": BAD_VALIDATION, **arguments},
        train={**TRAIN, **train},
        data={"unreadable": "skip", "loaders": loaders},
    )


def in_plain_torch(seed: int, bad: list[int]) -> tuple[dict[str, torch.Tensor], float]:
    """The model after all steps, each of one pass over what can be read, and the last epoch's loss.

    The loss is the mean over its samples.
    """
    made = call(unreadable.recipe, {"bad": [], "bad_validation": []}, seed)
    optimizer = made.optimizer(made.model.parameters())
    order, losses = Order(101, seed), []
    for step in range(1, STEPS + 1):
        indices = order.indices(*position(step, 101, 16))
        rows = [int(index) for index in indices if index not in bad]
        inputs, target = made.train.dataset[rows]
        optimizer.zero_grad()
        loss = made.loss(made.model(inputs), target)
        loss.backward()
        optimizer.step()
        losses += [loss.item()] * len(rows)
    read = losses[-(101 - len(bad)) :]
    return dict(made.model.state_dict()), sum(read) / len(read)


@pytest.mark.parametrize(
    "train",
    [
        pytest.param({}, id="merged"),
        pytest.param({"determinism": "bits"}, id="apart, to the bit", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_the_samples_that_could_be_read(
    tmp_path: Path, train: dict[str, object]
) -> None:
    done = trained(tmp_path, 2, train)
    wanted, loss = in_plain_torch(5, BAD)
    model = load_file(done.path / "model.safetensors")
    for name, tensor in wanted.items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-5, atol=1e-6)
    assert done.summary["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, 1, 2])
def test_a_step_is_also_without_the_samples_that_end_their_reader(
    tmp_path: Path, loaders: int
) -> None:
    deadly = {"deadly": [8, 9], "deadly_validation": [7]}
    done = trained(tmp_path, 2, {}, loaders=loaders, **deadly)
    wanted, loss = in_plain_torch(5, [*BAD, 8, 9])
    model = load_file(done.path / "model.safetensors")
    for name, tensor in wanted.items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-5, atol=1e-6)
    assert done.summary["loss"] == pytest.approx(loss, rel=1e-5)
    folder = RunFolder(done.path)
    told = sorted((e["epoch"], e["index"]) for e in folder.skipped)
    assert told == sorted((epoch, index) for epoch in (0, 1) for index in [*BAD, 8, 9])
    assert all("SIGSEGV" in e["cause"] for e in folder.skipped if e["index"] in (8, 9))
    assert done.summary["skipped_samples"] == 2 * (len(BAD) + 2)
    assert done.summary["missing_samples"] == done.summary["repeated_samples"] == 0
    assert {(e["samples"], e["skipped"]) for e in folder.validations} == {(34, 3)}
    assert bool(folder.named("worker_lost")) == (loaders == 0)
    assert prove(folder).exact


@pytest.mark.slow
def test_skipping_gives_the_same_bits_on_any_number_of_workers_also_to_batch_statistics(
    tmp_path: Path,
) -> None:
    train = {"determinism": "bits", "micro_batches": 3}
    runs = [trained(tmp_path, n, train, norm=True) for n in (1, 3)]
    one, other = (done.summary for done in runs)
    assert one["parameters_sha256"] == other["parameters_sha256"]
    assert one["metrics"] == other["metrics"]
    assert one["loss"] == other["loss"]
    for done in runs:
        folder = RunFolder(done.path)
        assert done.summary["skipped_samples"] == 2 * len(BAD)
        assert done.summary["missing_samples"] == done.summary["repeated_samples"] == 0
        told = sorted((e["epoch"], e["index"]) for e in folder.skipped)
        assert told == sorted((epoch, index) for epoch in (0, 1) for index in BAD)
        assert len(folder.named("sample_skipped")) == 2 * (len(BAD) + len(BAD_VALIDATION))
        assert {(e["samples"], e["skipped"]) for e in folder.validations} == {(35, 2)}
        assert [e["samples"] for e in folder.named("epoch_finished")] == [101 - len(BAD)] * 2
        proof = prove(folder)
        assert proof.exact
        assert len(proof.run.skipped) == 2 * len(BAD)
        assert "12 positions" in "\n".join(proof.lines())


@pytest.mark.slow  # tests/unit/store/test_skipped.py has what it rests on
def test_a_worker_that_is_killed_leaves_each_skipped_sample_counted_once(
    start: Start, tmp_path: Path
) -> None:
    undisturbed = trained(tmp_path, 1, {"determinism": "bits", "epochs": 5})
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "killed"\nrecipe = "{RECIPES}/unreadable.py:recipe"\nworkers = 2\nseed = 5\n'
        '[train]\nepochs = 5\nglobal_batch = 16\ndeterminism = "bits"\n'
        '[data]\nunreadable = "skip"\nloaders = 0\n'
        f"[arguments]\nbad = {BAD}\nbad_validation = {BAD_VALIDATION}\nsample_s = 0.01\n"
    )
    program = start("-m", "instep", "run", job)
    program.until(program.is_training, "training")
    for kills in (1, 2):
        pids = {int(e["worker"]): int(e["pid"]) for e in program.events("worker_joined")}
        os.kill(pids[kills % 2], signal.SIGKILL)
        program.until(lambda n=kills: len(program.events("generation_started")) > n, "formed anew")
    assert program.end() == 0, program.stderr
    for key in ("parameters_sha256", "skipped_samples", "metrics", "missing_samples"):
        assert program.summary[key] == undisturbed.summary[key]
    assert program.summary["skipped_samples"] == 5 * len(BAD)
    program.check_nothing_is_left()


@pytest.mark.tail
def test_a_step_of_which_nothing_can_be_read_ends_the_run_with_one_sentence(run: Start) -> None:
    settings = ["seed=5", "train.global_batch=16", 'data.unreadable="skip"']
    bad = Order(101, 5).indices(0, 16, 32).tolist()  # of the second step
    program = run(
        "unreadable.py:recipe", *settings, f"arguments.bad={bad}", "arguments.bad_validation=[]"
    )
    assert program.end() == 4
    first = program.error.splitlines()[0]
    assert "failed at step 2, in exchange: none of the 16 samples of the step can be read" in first
    assert len(program.events("sample_skipped")) == 16
    assert program.summary["skipped_samples"] == 0  # no such step was committed
    program.check_nothing_is_left()


@pytest.mark.slow
def test_an_own_loop_skips_them_too(start: Start) -> None:
    program = start(RECIPES / "own_loop_skips.py")
    assert program.end() == 0, program.stderr
    assert program.summary["skipped_samples"] == 14
    assert program.summary["missing_samples"] == 0


@pytest.mark.slow
def test_what_ended_a_run_can_be_skipped_when_it_is_resumed(run: Start, start: Start) -> None:
    # of the first validation: a training sample may be met before a step is there to keep
    program = run(
        "unreadable.py:recipe",
        *("seed=5", "train.global_batch=16", "train.epochs=2", "checkpoint.every=1"),
        *("arguments.bad=[]", "arguments.bad_validation=[36]"),
    )
    assert program.end() == 4
    assert "set data.unreadable = 'skip'" in program.error
    more = start("-m", "instep", "resume", program.run, "--set", 'data.unreadable="skip"', "--json")
    assert more.end() == 0, more.stderr
    summary = json.loads(more.stdout.splitlines()[-1])
    validations = RunFolder(program.run).validations
    assert [(e["epoch"], e["samples"], e["skipped"]) for e in validations] == [
        (0, 36, 1),
        (1, 36, 1),
    ]
    assert summary["missing_samples"] == summary["repeated_samples"] == 0


@pytest.mark.slow
def test_a_replay_says_which_samples_can_be_read_by_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "bad.json"
    table.write_text(json.dumps(BAD))
    run = instep.train(
        f"{RECIPES / 'unreadable.py'}:recipe_of_file",
        name="mended",
        runs=tmp_path,
        workers=1,
        seed=5,
        quiet=True,
        arguments={"bad": str(table)},
        train={"steps": 7, "global_batch": 16, "determinism": "bits"},
        data={"unreadable": "skip"},
    ).path
    left_out = sorted((e["step"], e["index"]) for e in RunFolder(run).skipped)
    assert sorted(index for _, index in left_out) == BAD
    last = left_out[-1][1]
    table.write_text(json.dumps([last]))
    assert main(["replay", str(run), "--step", "7"]) == 6
    said = capsys.readouterr()
    named = ", ".join(f"{index} (step {step})" for step, index in left_out if index != last)
    sentence = f"training samples {named} could not be read then, and can be read now."
    assert f"warning {sentence}" in said.out
    assert f"Note: {sentence}" in said.err
