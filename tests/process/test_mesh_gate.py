"""The equality gate on meshes of our own: what it refuses, and what a run says without it."""

import pytest
from started import Start

from marks import slow

pytestmark = pytest.mark.process

QUICK = (
    "train.steps=2",
    "train.global_batch=32",
    "train.micro_batches=8",
    "train.threads=1",
    "workers=2",
)
WORDS = "words.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "broken", "keys", "named"),
    [
        ("words", "shared gradients", ("mesh.stages=2", "mesh.pipeline_batches=2"), WORDS),
        ("words", "products", ("mesh.tensor=2",), WORDS),
        ("words", "gradients", ("mesh.tensor=2",), WORDS),
        ("recipe", "keys", ("mesh.shard=2",), "scale"),
        (
            "recipe",
            "norm",
            ("mesh.shard=2", 'train.batch_norm="global"', "arguments.norm=true"),
            "scale",
        ),
    ],
)
def test_a_mesh_in_which_something_is_left_out_is_refused_and_the_first_tensor_is_named(
    run: Start, recipe, broken, keys, named
):
    program = run(f"gated.py:{recipe}", *QUICK, *keys, f'arguments.broken="{broken}"')
    assert program.end() == 3, program.stderr
    assert f"[mesh] {keys[0][5:].replace('=', ' = ')}" in program.stderr
    assert f"its gradient of {named!r} is off by" in program.stderr


@pytest.mark.parametrize(
    "mesh",
    [
        slow(("mesh.shard=2",)),
        slow(("mesh.shard=2", "mesh.zero=2")),
        slow(("mesh.tensor=2",)),
        slow(("mesh.stages=2", "mesh.pipeline_batches=2", "arguments.drop=0.0")),
    ],
)
def test_a_model_of_16_bits_is_compared_in_32(run: Start, mesh):
    keys = (*mesh, 'arguments.dtype="bfloat16"', "check.strict=true")
    program = run("splits.py:recipe", *QUICK, *keys)
    assert program.end() == 0, program.stderr
    (checked,) = program.events("mesh_checked")
    assert checked["tensors"] == 16
    assert program.summary["same_as_one_machine"] == "yes"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["shard", "tensor"])
def test_what_is_left_out_is_found_in_16_bits_and_in_two_blocks(run: Start, mesh):
    keys = ["mesh.shard=2", 'arguments.dtype="bfloat16"', 'arguments.broken="shards"']
    if mesh == "tensor":
        keys = ["mesh.tensor=2", "arguments.largest=100", 'arguments.broken="products"']
    program = run("gated.py:recipe", *QUICK, *keys)
    assert program.end() == 3, program.stderr
    assert "its gradient of 'scale' is off by" in program.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "keys", "tensors"), [("recipe", (), 12), ("lines", ("mesh.sequence=true",), 13)]
)
def test_a_large_model_is_compared_in_two_blocks_where_tensor_cuts_it(
    run: Start, recipe, keys, tensors
):
    program = run(f"gated.py:{recipe}", *QUICK, "mesh.tensor=2", "arguments.largest=100", *keys)
    assert program.end() == 0, program.stderr
    (checked,) = program.events("mesh_checked")
    assert (checked["tensors"], checked["blocks"]) == (tensors, ["blocks.0", "blocks.1"])
    assert "compared were only the blocks blocks.0, blocks.1" in program.stdout
    assert "was not compared" not in program.summary["same_as_one_machine"]


@pytest.mark.slow
def test_an_optimizer_that_could_not_be_compared_is_never_called_the_same(run: Start):
    keys = ("mesh.tensor=2", "arguments.largest=100", "arguments.hooked=true")
    program = run("gated.py:recipe", *QUICK, *keys)
    assert program.end() == 0, program.stderr
    verdict = program.summary["same_as_one_machine"]
    assert verdict.startswith("not shown: [mesh] was not compared: its optimizer (SGD with hooks)")


STAGES = ("mesh.stages=2", "mesh.pipeline_batches=2", "arguments.largest=100")
SHORT = ("mesh.shard=2", 'arguments.dtype="bfloat16"')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "why", "strict"),
    [
        (STAGES, "too many to compute it on one process, and stages need all of its", "true"),
        (STAGES, "too many to compute it on one process, and stages need all of its", "false"),
        ((*SHORT, "arguments.mixed=true"), "it trains parameters of several types", "false"),
        (
            (*SHORT, "arguments.norm=true", 'train.batch_norm="global"'),
            "train.batch_norm = 'global' with parameters of torch.bfloat16",
            "false",
        ),
    ],
)
def test_a_mesh_that_could_not_be_compared_is_never_called_the_same(run: Start, keys, why, strict):
    keys = (*keys, "arguments.drop=0.0", f"check.strict={strict}")
    program = run("gated.py:recipe", *QUICK, *keys)
    says = "not shown: [mesh] was not compared: "
    if strict == "true":
        assert program.end() == 2, program.stderr
        assert f"Same as one machine: {says}" in program.stderr
        return
    assert program.end() == 0, program.stderr
    assert program.summary["same_as_one_machine"].startswith(says)
    assert f"as one machine: {says}" in program.stdout
    (checked,) = program.events("mesh_checked")
    assert why in checked["why"]
    if "too many" in why:
        assert "try the same [mesh] with a smaller model of the same kind" in program.stdout


@pytest.mark.slow
@pytest.mark.parametrize("moved", ["true", "false"])
def test_a_head_that_starts_at_zero_hides_a_wrong_sum_unless_parameters_are_moved(
    run: Start, moved
):
    keys = ("mesh.tensor=2", 'arguments.broken="gradients"', "arguments.zero=true")
    program = run("gated.py:recipe", *QUICK, *keys, f"arguments.moved={moved}")
    assert program.end() == (3 if moved == "true" else 0), program.stderr
    assert ("its gradient of 'enter.weight' is off by" in program.stderr) == (moved == "true")


@pytest.mark.slow
def test_a_mesh_that_computes_otherwise_in_evaluation_is_refused(run: Start):
    keys = ("mesh.shard=2", 'arguments.evaluates="otherwise"')
    program = run("gated.py:recipe", *QUICK, *keys)
    assert program.end() == 3, program.stderr
    assert "[mesh] would validate another model than one process does" in program.stderr
