"""Several updates in one step, against a plain loop over the same micro-batches."""

import json
import re
import subprocess
import sys
from pathlib import Path

import gan
import pytest
import torch
from safetensors.torch import load_file
from started import RECIPES
from torch import nn

import instep
from instep.data.order import Order, key, micro_batch, position
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

SAMPLES, BATCH, PARTS, STEPS, SEED, CLIP = 66, 12, 4, 24, 5, 0.15
TRAIN = {
    "steps": STEPS,
    "global_batch": BATCH,
    "micro_batches": PARTS,
    "max_grad_norm": CLIP,
    "threads": 1,
}
GAN = f"{RECIPES / 'gan.py'}:recipe"


def trained(tmp_path, workers, name="", *, determinism="bits", arguments=None, **more):
    train = {**TRAIN, "determinism": determinism, **more.pop("train", {})}
    name = name or f"with-{workers}"
    given = {"workers": workers, "seed": SEED, "train": train, "arguments": arguments or {}, **more}
    return instep.train(GAN, name=name, runs=tmp_path, quiet=True, **given)


def parameters_of(run):
    return load_file(run.path / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def plain():
    """What a loop of plain PyTorch comes to; of ours are the order and the keys of the draws."""
    torch.manual_seed(SEED)
    model = gan.recipe().model
    data, order = gan.samples(), Order(SAMPLES, SEED)
    parts = model.discriminator, model.generator
    optimizers = [gan.adam(part.parameters()) for part in parts]
    scheduler, last = gan.decaying(optimizers[1]), 0.0
    norm, clipped = model.generator[1], [0, 0]
    for step in range(1, STEPS + 1):
        epoch, first, stop = position(step, SAMPLES, BATCH)
        indices = order.indices(epoch, first, stop)
        number_of_parts = -(-(stop - first) * PARTS // BATCH)
        cuts = [micro_batch(0, stop - first, n, number_of_parts) for n in range(number_of_parts)]
        for turn, loss in enumerate((gan.discriminator_loss, gan.generator_loss)):
            optimizers[turn].zero_grad()
            before = [b.clone() for b in norm.buffers()]
            moved = [torch.zeros_like(b, dtype=torch.float64) for b in norm.buffers()]
            last = 0.0
            for number, (low, high) in enumerate(cuts):
                torch.manual_seed(key(SEED, 1, step, number, *([turn] if turn else [])))
                share = (high - low) / (stop - first)
                found = loss(model, (data[indices[low:high]],)) * share
                found.backward()
                last += float(found.detach())
                for buffer, start, total in zip(norm.buffers(), before, moved, strict=True):
                    total += share * buffer
                    buffer.copy_(start)
            for buffer, total in zip(norm.buffers(), moved, strict=True):
                buffer.copy_(total if buffer.is_floating_point() else total.round())
            found = nn.utils.clip_grad_norm_(parts[turn].parameters(), CLIP)
            clipped[turn] += bool(found > CLIP)
            optimizers[turn].step()
        scheduler.step()
    assert all(times > 0 for times in clipped), "each turn by its own norm"
    return model.state_dict(), last


@pytest.mark.tail
@pytest.mark.parametrize("workers", [slow(1), slow(2), 3])
def test_any_number_of_workers_gives_what_a_plain_loop_gives(tmp_path, plain, workers):
    run = trained(tmp_path, workers, determinism="order")
    wanted, last = plain
    for name, value in parameters_of(run).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-11, atol=1e-12, msg=name)
    folder = RunFolder(run.path)
    assert folder.steps["loss"][-1] == pytest.approx(last)
    assert run.summary["same_as_one_machine"].startswith(
        "no: in the turn 'discriminator'"
    )  # BatchNorm
    assert run.summary["repeated_samples"] == run.summary["missing_samples"] == 0


@pytest.mark.parametrize("workers", [slow(2), slow(3)])
def test_with_bits_every_number_of_workers_gives_the_same(tmp_path, alone, workers):
    found = trained(tmp_path, workers)
    assert found.summary["parameters_sha256"] == alone.summary["parameters_sha256"]


@pytest.mark.slow
def test_workers_killed_within_and_between_the_turns_leave_no_trace(tmp_path, alone):
    """One in each turn's passes, and one in each turn's update, when others may have committed."""
    marks = tmp_path / "marks"
    marks.mkdir()
    run = trained(tmp_path, 3, arguments={"marks": str(marks)}, checkpoint={"every": 4})
    folder = RunFolder(run.path)
    assert len(list(marks.iterdir())) == len(gan.MOMENTS)
    assert len(list(folder.named("worker_lost"))) == len(gan.MOMENTS)
    assert not list(folder.named("went_back"))
    assert run.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    assert run.summary["repeated_samples"] == run.summary["missing_samples"] == 0
    assert folder.audit.sha256 == RunFolder(alone.path).audit.sha256


@pytest.mark.slow
def test_a_run_resumes_from_a_checkpoint_with_the_state_of_both_optimizers(tmp_path, alone):
    run = trained(tmp_path, 2, train={"stop_after_steps": 9}, arguments={"validates": True})
    assert run.summary["steps"] == 9
    kept = next((run.path / "checkpoints").glob("step-*9"))
    files = {path.stem for path in kept.glob("*.safetensors")}
    assert files >= {"optimizer-discriminator", "optimizer-generator", "strategy-generator"}
    run = instep.resume(run.path, workers=3, quiet=True)
    assert run.summary["steps"] == STEPS
    assert run.summary["metrics"]["loss"] == pytest.approx(0.69, abs=0.3)  # the other's is 1.4
    assert run.summary["parameters_sha256"] == alone.summary["parameters_sha256"]


@pytest.mark.tail
def test_a_loss_of_an_earlier_turn_that_is_no_number_ends_the_run(tmp_path):
    run = trained(tmp_path, 1, determinism="order", arguments={"spoils": True})
    assert (run.exit_code, run.summary["rule_text"]) == (8, "the loss was nan from step 4 on")


@pytest.mark.slow
def test_the_example_of_the_guide_trains_and_reports_the_loss_of_each_turn(tmp_path):
    guide = (Path(__file__).parents[2] / "docs/guides/several-updates.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", guide, re.M | re.S)
    codes = [text for language, text in blocks if language == "python"]
    (tmp_path / "gan.py").write_text(codes[0])
    (tmp_path / "job.toml").write_text(
        next(text for language, text in blocks if language == "toml")
    )
    command = [sys.executable, "-m", "instep", "run", "job.toml", "--json"]
    found = finished([*command, "--set", "train.stop_after_steps=6"], tmp_path)
    summary = json.loads(found.splitlines()[-1])
    assert (summary["steps"], summary["same_as_one_machine"]) == (6, "yes")
    head = "import instep\nfrom gan import recipe\n"
    script = codes[-1].replace("join(recipe)", "join(recipe, train={'steps': 2})")
    assert script != codes[-1]
    (tmp_path / "script.py").write_text(head + script)
    lines = finished([sys.executable, "script.py"], tmp_path).splitlines()
    assert [line.split()[0] for line in lines if line[:1] in "12"][:2] == ["1", "2"]
    assert all(len(line.split()) == 3 for line in lines[:2])


def finished(command, folder):
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout
