"""What breaks models that are split over processes, on each kind of mesh.

Each is the plain loop's to 1e-10 in float64 after fifty steps, or refused before the first step;
never otherwise. One pair runs in `make test`, one in `make test-tail`, and all others in
`make test-slow`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from cells import LIMIT_S, NEAR, REFUSED, RIGHT, cell, on_mesh
from judge import Distance
from loops import Loops
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import default_collate

from breakers import PAIRS, texts, words_in
from instep.events import read_events

pytestmark = pytest.mark.process

MESHES = {
    each.name.replace(" = ", " ").replace(",", ""): each
    for each in (
        on_mesh(2, shard=2),
        on_mesh(2, shard=2, zero=2),
        on_mesh(2, tensor=2),
        on_mesh(2, stages=2, pipeline_batches=2),
        on_mesh(2, stages=2, pipeline_batches=3, schedule="gpipe"),
        on_mesh(2, stages=2, pipeline_batches=2, schedule="interleaved"),
        on_mesh(4, shard=2, tensor=2),
        on_mesh(4, stages=2, tensor=2, pipeline_batches=2),
        on_mesh(4, stages=2, shard=2, zero=2, pipeline_batches=2),
    )
}
"""Of one replica each."""

PLAIN_MESHES = [name for name in MESHES if "zero" not in name and "schedule" not in name]

REFUSALS = {
    "a block that is called twice": {"stages": "'blocks.0' is called 2 times in one pass"},
    "a model that is called twice": {"stages": "'blocks.0' is called 3 times in one pass"},
    "a gradient penalty": {
        "stages": "mesh.stages",
        "shard": "the model that is split cannot",
    },
    "a parameter in a list": {
        "stages": "mesh.stages|would train another model",
        "shard": "would train another model",
    },
    "a buffer that is a parameter": {"": "'blocks.0.inner.weight' and 'first' lie in the same"},
    "two parameters in one memory": {"": "'blocks.1.inner.weight' lie in the same memory"},
    "hooks on parameters": {"": "a hook on the gradient of a parameter, as on 'enter.bias'"},
    "whole numbers across cuts": {
        "shard without stages": "changes what it is called with in place"
    },
    "batch norm": {"stages": "looks at its whole batch"},
    "running means of its own": {"stages": "writes its buffer 'mean'"},
    "spectral norm": {"stages": "writes its buffer '_u'"},
    "calls that are counted": {
        "stages": "the loss is another",
        "shard": "would train another model",
    },
    "blocks that are seldom called": {"stages": "was not called in a forward pass"},
    "another way in evaluation": {"stages": "'blocks.2' was not called in a forward pass"},
    "a teacher": {"stages": "has nothing to train|the loss, after 'student.blocks.3', needs them"},
    "skips between blocks": {"stages": "only what that block is called with crosses the cut"},
    "an optimizer's own norm of all": {
        "stages": "Lamb would train another model",
        "shard with tensor": "Lamb cannot take a step",
    },
    "averages in a frozen net": {
        "tensor": "SGD cannot take a step",
        "stages": "steps of SGD write 'slow|SGD cannot take a step",
    },
    "averages in buffers": {
        **dict.fromkeys(("shard", "tensor"), "SGD cannot take a step"),
        "stages": "steps of SGD write '|SGD cannot take a step",
    },
    "means of rows": dict.fromkeys(("shard", "tensor"), "Factored keeps 'rows' for"),
    "Adafactor": {"shard": "Adafactor cannot take", "tensor": "Adafactor cannot take"},
    "Muon": {"shard": "Muon would train another", "tensor": "Muon would train another"},
    "AdamW, all at once": {"tensor without shard": "Leave foreach = True out"},
}
"""By breaker, and by an axis of the mesh or for all: what the refusal says."""

BY_CUT = {"a parameter in a list"}
"""Refused with stages or trained right: as the measured cut lies."""

NEARS = {"several types": Distance(1e-5, 1e-5)}
"""Where a part of the model computes in float32."""

QUICK = [
    ("whole numbers across cuts", "stages 2 pipeline_batches 2"),
    ("an optimizer's own norm of all", "stages 2 pipeline_batches 2"),
]


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    forking = Loops(tmp_path_factory.mktemp("loops"), "breakers")
    yield forking
    forking.close()


def on(name, mesh):
    """The mesh, with what the job of a breaker needs."""
    if name != "samples that cannot be read":
        return mesh
    return replace(mesh, job={**mesh.job, "data": {"unreadable": "skip"}})


def wanted(name, mesh):
    """What a refusal has to say; empty if the pair is to train."""
    axes = dict(mesh.job["mesh"])
    if "shard" not in axes:  # else all parameters are DTensors
        axes["tensor without shard"] = axes.get("tensor", 1)
    if "stages" not in axes:  # else no block gathers its parameters
        axes["shard without stages"] = axes.get("shard", 1)
    for axis in {"shard", "stages"} & set(axes):
        axes[f"{axis} with tensor"] = axes.get("tensor", 1)
    texts = [t for axis, t in REFUSALS.get(name, {}).items() if not axis or axes.get(axis, 1) > 1]
    return "|".join(texts)


def check(name, mesh, loops):
    found = cell(PAIRS[name], on(name, mesh), loops, near=NEARS.get(name, NEAR))
    if name in BY_CUT and found.kind == RIGHT and "stages" in mesh.job["mesh"]:
        return
    if expected := wanted(name, mesh):
        assert found.kind == REFUSED, found.text
        assert re.search(expected, found.text)
    else:
        assert found.kind == RIGHT, found.text


def marks_of(name, mesh):
    if (name, mesh) == QUICK[0]:
        return []
    return [pytest.mark.tail] if (name, mesh) in QUICK else [pytest.mark.slow]


def pairs(meshes):
    return [
        pytest.param(name, mesh, marks=marks_of(name, mesh)) for mesh in meshes for name in PAIRS
    ]


@pytest.mark.tail
@pytest.mark.parametrize(("name", "mesh"), pairs(MESHES))
def test_a_mesh_trains_what_a_plain_loop_does_or_refuses(name, mesh, loops):
    check(name, MESHES[mesh], loops)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", PLAIN_MESHES[:3])
@pytest.mark.parametrize(
    "name", ["parameters of all sorts", "sparse embedding", "samples that cannot be read", "noise"]
)
def test_two_replicas_train_what_a_plain_loop_does(name, mesh, loops):
    check(name, replace(MESHES[mesh], workers=2 * MESHES[mesh].workers), loops)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["parameters of all sorts", "noise"])
def test_blocks_that_are_computed_again_change_nothing(name, mesh, loops):
    column = MESHES[mesh]
    job = {"mesh": {**column.job["mesh"], "checkpointing": "blocks"}}
    check(name, replace(column, job=job), loops)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("name", "most"), [("parameters of all sorts", 0.0), ("autocast", 3e-4 - 1e-5)]
)
def test_the_losses_in_fewer_bits_are_those_of_a_plain_loop(name, most, mesh, loops):
    """To 1e-5 in float32, and 3e-4 with autocast to bfloat16."""
    near = Distance(math.inf, math.inf, most)
    found = cell(PAIRS[name], MESHES[mesh], loops, "float32", near)
    assert found.kind == RIGHT, found.text


@pytest.mark.slow
@pytest.mark.parametrize("mesh", PLAIN_MESHES)
def test_a_mesh_validates_as_one_process_does(mesh, loops):
    pair, column = PAIRS["validated"], MESHES[mesh]
    job = {**column.job, "train": {"validate_every": 20}}
    outcome = loops.run(pair, None, column.workers, "float64", job=job, limit_s=LIMIT_S)
    assert not outcome.error, outcome.error
    events = [e for e in read_events(outcome.run / "events.jsonl") if e["event"] == "validated"]
    assert [event["step"] for event in events] == [20, 40, 50]
    model = pair.make(torch.float64).model.eval()
    model.load_state_dict(
        {**outcome.trained.end.trained, **outcome.trained.end.other}, strict=False
    )
    batch = default_collate(texts()[:21])
    with torch.no_grad():
        outputs, target = model(batch[0]), batch[1]
    loss = F.cross_entropy(outputs, target, reduction="sum") / words_in(batch)
    accuracy = (outputs.argmax(1) == target).double().mean()
    found = events[-1]["metrics"]
    assert found["loss"] == pytest.approx(float(loss), abs=1e-10)
    assert found["accuracy"] == pytest.approx(float(accuracy), abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "job",
    [
        {
            "lora": {
                "modules": ["*.inner", "*.outer"],
                "rank": 2,
                "alpha": 2,
                "also_train": ["head.*"],
            }
        },
        {
            "start": {
                "freeze": ["blocks.1.*"],
                "learning_rates": {"blocks.0.*": 0.2, "head.*": 0.01},
            }
        },
    ],
    ids=["lora", "rates"],
)
def test_a_model_is_tuned_as_on_one_process(job, mesh, loops):
    """Which `test_adapters.py` and `test_fine_tuning.py` hold against plain loops."""
    models = []
    for column in (MESHES[mesh], replace(MESHES[mesh], workers=1, job={})):
        outcome = loops.run(
            PAIRS["nothing"],
            None,
            column.workers,
            "float64",
            job={**column.job, **job},
            limit_s=LIMIT_S,
        )
        assert not outcome.error, outcome.error
        models.append(load_file(outcome.run / "model.safetensors"))
    on_the_mesh, alone = models
    assert on_the_mesh.keys() == alone.keys()
    for name, tensor in alone.items():
        assert float((on_the_mesh[name] - tensor).abs().max()) <= 1e-10, name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_bits_are_the_same_on_one_and_two_replicas(mesh, loops):
    column, hashes = MESHES[mesh], set()
    for replicas in (1, 2):
        job = {**column.job, "train": {"determinism": "bits"}}
        pair = PAIRS["parameters of all sorts"]
        outcome = loops.run(
            pair, None, replicas * column.workers, "float64", job=job, limit_s=LIMIT_S
        )
        assert not outcome.error, outcome.error
        summary = json.loads((outcome.run / "summary.json").read_text())
        hashes.add(summary["parameters_sha256"])
    assert len(hashes) == 1
