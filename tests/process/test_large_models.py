"""Replicas of which no process builds the whole model, against a plain loop in one process."""

import large
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from started import Start
from torch import nn
from torch.nn import functional

from instep.data.order import Order, key, micro_batch, position
from marks import slow

pytestmark = pytest.mark.process

BATCH, MICRO_BATCHES, STEPS = 32, 8, 8
QUICK = (
    f"train.steps={STEPS}",
    f"train.global_batch={BATCH}",
    f"train.micro_batches={MICRO_BATCHES}",
    "train.max_grad_norm=0.5",
    "train.threads=1",
    "workers=2",
    "mesh.shard=2",
    'mesh.build="parts"',
)


def plain_loop(seed=0, start=None, strict=True, **arguments):
    """Whole global batches in one process, dropout drawn micro-batch by micro-batch."""
    torch.manual_seed(seed)
    model = large.recipe(**arguments).model()
    if start is not None:
        model.load_state_dict(load_file(start), strict=False)
    optimizer, order = large.sgd(model.parameters()), Order(large.SAMPLES, seed)
    x, y = large.samples(1, large.SAMPLES).tensors
    for step in range(1, STEPS + 1):
        epoch, first, stop = position(step, large.SAMPLES, BATCH)
        parts = -(-(stop - first) * MICRO_BATCHES // BATCH)
        optimizer.zero_grad()
        for number in range(parts):
            low, high = micro_batch(first, stop, number, parts)
            rows = torch.from_numpy(order.indices(epoch, low, high))
            torch.manual_seed(key(seed, 1, step, number))
            loss = functional.cross_entropy(model(x[rows]), y[rows], reduction="sum")
            (loss / (stop - first)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


def check_equal(program, wanted, most=1e-10):
    found = load_file(program.run / "model.safetensors")
    assert found
    for name, tensor in found.items():
        assert float((wanted[name] - tensor).abs().max()) <= most, name


@pytest.fixture
def start_file(tmp_path):
    """A model like that of the recipe, of other values."""
    torch.manual_seed(7)
    save_model(large.recipe().model(), tmp_path / "start.safetensors")
    return tmp_path / "start.safetensors"


@pytest.mark.tail
def test_a_model_is_built_without_memory_and_each_process_reads_its_part(run: Start, start_file):
    program = run("large.py:recipe", *QUICK, f'start.model="{start_file}"')
    assert program.end() == 0, program.stderr
    check_equal(program, plain_loop(start=start_file))
    (checked,) = program.events("mesh_checked")
    assert checked["blocks"] == ["blocks.0", "blocks.1"]
    assert checked["tensors"] == 8 + 4
    (loaded,) = program.events("model_loaded")
    assert loaded["matched"] == 22
    (said,) = program.events("same_as_one_machine")
    assert said["verdict"].startswith("not shown: the model is too large for one process")


@pytest.mark.parametrize(
    ("arguments", "from_file"),
    [
        slow({}, False),
        slow({"drawn": True, "copied": True}, False),
        slow({"drawn": True}, True),
    ],
    ids=["fresh", "fresh, with copies", "drawn numbers beside a file"],
)
def test_values_that_no_file_has_are_those_of_a_plain_build(
    run: Start, start_file, arguments, from_file
):
    keys = [f"arguments.{name}=true" for name in arguments]
    keys += [f'start.model="{start_file}"'] if from_file else []
    program = run("large.py:recipe", *QUICK, *keys)
    assert program.end() == 0, program.stderr
    check_equal(program, plain_loop(start=start_file if from_file else None, **arguments))
    (checked,) = program.events("mesh_checked")
    assert checked["blocks"][-2:] == ["blocks.0", "blocks.1"]
    assert not list(program.run.glob("tmp*"))


@pytest.mark.slow
def test_a_head_that_the_file_does_not_fit_is_drawn_as_in_a_plain_build(run: Start, tmp_path):
    torch.manual_seed(7)
    start = tmp_path / "other.safetensors"
    save_model(large.recipe(classes=5).model(), start)
    fits = {name: each for name, each in load_file(start).items() if "head" not in name}
    save_file(fits, tmp_path / "fits.safetensors")
    program = run("large.py:recipe", *QUICK, f'start.model="{start}"', "start.partial=true")
    assert program.end() == 0, program.stderr
    check_equal(program, plain_loop(start=tmp_path / "fits.safetensors"))


@pytest.mark.slow
def test_a_checkpoint_is_continued_by_processes_that_build_nothing(run: Start, start: Start):
    first = run("large.py:recipe", *QUICK, "train.stop_after_steps=4")
    assert first.end() == 0, first.stderr
    program = start("-m", "instep", "resume", first.run)
    assert program.end() == 0, program.stderr
    check_equal(first, plain_loop())
    assert len(first.events("mesh_checked")) == 2


@pytest.mark.slow
def test_an_adapter_is_trained_beside_parts_of_a_frozen_model(run: Start, start_file):
    keys = (f'start.model="{start_file}"', 'lora.modules=["*.inner"]', "lora.rank=2")
    hashes = []
    for build in ("parts", "whole"):
        program = run("large.py:recipe", *QUICK, *keys, f'mesh.build="{build}"')
        assert program.end() == 0, program.stderr
        hashes.append(load_file(program.run / "model.safetensors"))
    for name, tensor in hashes[0].items():
        torch.testing.assert_close(tensor, hashes[1][name], rtol=0, atol=1e-12)


@pytest.mark.tail
def test_two_blocks_show_a_mesh_that_computes_other_gradients(run: Start, start_file):
    program = run("large.py:sabotaged", *QUICK, f'start.model="{start_file}"')
    assert program.end() == 3
    assert "[mesh] shard = 2 would train another model than one process does" in program.stderr
    assert "its gradient of 'enter.weight' is off by" in program.stderr


@pytest.mark.slow
def test_a_model_that_the_recipe_has_built_cannot_be_built_in_parts(run: Start):
    program = run("large.py:built", *QUICK)
    assert program.end() == 2
    assert "Give the function that builds it: model=lambda: Net()." in program.stderr
