"""Models whose activations are split along the sequence over real processes, beside one process."""

import copy
import json
from typing import Any

import pytest
import tensor_models
import torch
import torch.distributed as dist
from tensor_by_hand import Sent
from tensor_compare import apart, compare, whole
from tensor_models import GPT, made, next_word, words
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import start_processes

from instep.parallel.recompute import checkpoint_blocks
from instep.parallel.tensor import apply_plan, find_plan

pytestmark = [pytest.mark.process, pytest.mark.slow]

ON_TWO = ["GPT", "tied", "dropout", "grouped", "llama", "encoder", "time first", "lengths"]
SENDING = ["GPT", "tied", "llama"]
LAYERS, WIDE, LONG = 4, 64, 128
ON_THREE = ["odd lengths"]


def sent(mesh, name, sequence):
    """Collectives and bytes of one pass."""
    model, compute_loss, batches = made(name, torch.float32)
    plan = find_plan(model, compute_loss, batches[0], mesh.size(), sequence=sequence)
    apply_plan(model, plan, mesh)
    with Sent(mesh.size()) as count:
        compute_loss(model, words(64)).backward()
    return [dict(count.calls), count.bytes]


def peak_bytes(mesh, sequence, checkpointing=False):
    """Activations at the peak of a pass, by torch's tracker."""
    batch = torch.randint(1, tensor_models.WORDS, (8, LONG))
    model = GPT(layers=LAYERS, width=WIDE)
    model.places = nn.Embedding(LONG, WIDE)
    plan = find_plan(model, next_word, batch[:2, :8], mesh.size(), sequence=sequence)
    apply_plan(model, plan, mesh)
    if checkpointing:
        checkpoint_blocks(model)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        next_word(model, batch).backward()
    peak: Any = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return next(size for kind, size in peak.items() if "ACT" in str(kind))


def run_again(mesh, sequence):
    """How far gradients are from one process's where blocks run again in the backward pass."""
    model, compute_loss, batches = made("dropout")
    plan = find_plan(model, compute_loss, batches[0], mesh.size(), sequence=sequence)
    plain = copy.deepcopy(model)
    apply_plan(model, plan, mesh)
    checkpoint_blocks(model)
    for each in (plain, model):
        torch.manual_seed(3)
        compute_loss(each, batches[0]).backward()
    grads = ([whole(p.grad).flatten() for p in each.parameters()] for each in (model, plain))
    return apart(*map(torch.cat, grads))


def one_process(rank, ranks, folder, names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))["tensor"]
    found: Any = {name: compare(name, mesh, sequence=True) for name in names}
    if ranks == 2:
        found["float32"] = compare("dropout", mesh, torch.float32, sequence=True)
        found["bfloat16"] = compare("llama", mesh, torch.float32, "bfloat16", sequence=True)
        for key, call in (
            ("sent", lambda split: [sent(mesh, name, split) for name in SENDING]),
            ("peak", lambda split: peak_bytes(mesh, split)),
            ("peak of blocks", lambda split: peak_bytes(mesh, split, checkpointing=True)),
            ("run again", lambda split: run_again(mesh, split)),
        ):
            found[key] = [call(split) for split in (False, True)]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def results(folder, ranks, names):
    arguments = (ranks, folder, names)
    start_processes(one_process, arguments, nprocs=ranks, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return results(tmp_path_factory.mktemp("two"), 2, ON_TWO)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory):
    return results(tmp_path_factory.mktemp("three"), 3, ON_THREE)


@pytest.mark.parametrize("name", ON_TWO)
def test_a_split_model_trains_as_one_process(on_two, name):
    for found in on_two:
        found = found[name]
        assert found.pop("cut") > 0
        assert max(found.values()) <= 1e-10, found


def test_lengths_and_heads_that_three_ranks_do_not_divide(on_three):
    for found in on_three:
        found = found["odd lengths"]
        assert found.pop("cut") > 0
        assert max(found.values()) <= 1e-10, found


def test_float32_and_bfloat16_stay_near(on_two):
    for found in on_two:
        assert found["float32"]["loss"] <= 1e-5
        assert found["bfloat16"]["loss"] <= 3e-4


def test_a_split_sequence_sends_no_more_bytes(on_two):
    for found in on_two:
        for name, (_, plain), (_, split) in zip(SENDING, *found["sent"], strict=True):
            assert split <= 1.1 * plain, (name, found["sent"])


def test_activations_between_layers_that_are_cut_are_divided(on_two):
    """What two norms in each block keep; and each block's input where the rest is made again."""
    one = 8 * LONG * WIDE * 4
    for found in on_two:
        plain, split = found["peak"]
        assert split <= plain - 2 * LAYERS * one / 2
        plain, split = found["peak of blocks"]
        assert split <= plain - LAYERS * one / 2


def test_blocks_that_run_again_draw_the_same(on_two):
    for found in on_two:
        assert max(found["run again"]) <= 1e-10
