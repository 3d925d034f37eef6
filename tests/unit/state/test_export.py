"""A model is copied out of a checkpoint as it was saved, or not at all."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import nn

from instep.errors import CheckpointError, SpecError
from instep.state.export.export import check_target, choose, copy_model
from instep.state.retention import Best, facts_of
from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot, model_tensors


def model_of(step):
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    model.register_parameter("same", model.weight)
    return model


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 1 to 4, the first three validated; the second did best."""
    writer = CheckpointWriter(tmp_path / "checkpoints", keep_last=9)
    for step, loss in [(1, 0.3), (2, 0.1), (3, 0.2), (4, None)]:
        facts = facts_of(None if loss is None else {"loss": loss, "accuracy": loss})
        tensors = {"model": model_tensors(model_of(step)), "optimizer": {"m": torch.ones(3)}}
        writer.save(Snapshot(step=step, tensors=tensors, facts=facts))
    writer.finish()
    writer.poll()
    return tmp_path / "checkpoints"


def test_a_step_or_the_best_is_chosen(folder):
    assert choose(folder, step=3).name == "step-00000003"
    assert choose(folder, best=Best(count=1)).name == "step-00000002"
    largest = Best(count=1, metric="accuracy", largest=True)
    assert choose(folder, best=largest).name == "step-00000001"


def test_what_is_not_there_is_answered_with_what_is(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"of step 7: .* has those of step 1, 2, 3, 4\."):
        choose(folder, step=7)
    with pytest.raises(
        CheckpointError, match=r"has the metric 'recall': .*Set checkpoint.keep_best"
    ):
        choose(folder, best=Best(count=1, metric="recall"))
    with pytest.raises(CheckpointError, match="none was kept"):
        choose(tmp_path / "nothing", step=1)


def test_the_model_is_copied_to_the_bit_and_other_programs_read_it(folder, tmp_path):
    target = tmp_path / "model.safetensors"
    assert copy_model(folder / "step-00000002", target) == target.stat().st_size
    twin = model_of(9)
    safetensors.torch.load_model(twin, target)
    assert torch.equal(twin.weight, model_of(2).weight)
    assert torch.equal(twin.same, model_of(2).weight)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "swap"])
def test_a_damaged_model_is_refused_and_nothing_is_written(folder, tmp_path, damage):
    file = folder / "step-00000002" / "model.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-4])
    elif damage == "swap":
        file.write_bytes((folder / "step-00000003" / "model.safetensors").read_bytes())
    else:
        file.unlink()
    target = tmp_path / "model.safetensors"
    target.write_text("from before")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (damaged|missing|truncated)"):
        copy_model(folder / "step-00000002", target)
    assert target.read_text() == "from before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoints/a.safetensors", "../run/a"])
def test_a_file_in_the_run_folder_is_no_target_however_it_is_named(tmp_path, name):
    run, link = tmp_path / "run", tmp_path / "link"
    (run / "checkpoints").mkdir(parents=True)
    link.symlink_to(run)
    for target in (run / name, link / name):
        with pytest.raises(SpecError, match=r"lies in the run folder .*Name a file elsewhere\."):
            check_target(target, run, "")
    check_target(tmp_path / "run.safetensors", run, "")


@pytest.mark.parametrize("start", ["start.safetensors", "."])
def test_what_a_model_started_from_is_no_target(tmp_path, start):
    given = tmp_path / "given"
    given.mkdir()
    target = tmp_path / "gone" / ".." / "given" / "start.safetensors"
    with pytest.raises(SpecError, match=r"from which the model of .* started"):
        check_target(target, tmp_path / "run", str(given / start))
    check_target(tmp_path / "other.safetensors", tmp_path / "run", str(given / start))
