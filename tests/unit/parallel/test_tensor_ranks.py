"""Models cut over real processes, against one plain process."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from tensor_by_hand import Sent, cut_gpt
from tensor_compare import STEPS, compare, one_step, whole
from tensor_models import MODELS, made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes

from instep.errors import RecipeError
from instep.parallel.tensor import apply_plan, find_plan


def sent(mesh):
    """What one pass of the GPT sends, cut by a plan that was found and by hand."""
    model, compute_loss, batches = made("GPT", torch.float32)
    plan = find_plan(model, compute_loss, batches[0], mesh.size())
    by_hand = copy.deepcopy(model)
    apply_plan(model, plan, mesh)
    cut_gpt(by_hand, mesh)
    counts = []
    for each in (model, by_hand):
        with Sent(mesh.size()) as count:
            loss = compute_loss(each, batches[0])
            loss.backward()
        counts.append([float(loss.detach()), sum(count.calls.values()), count.bytes])
    return counts


def sharded_too(rank, folder):
    """On 2 x 2 ranks, cut and then sharded by FSDP2, beside one process."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for name in ("dropout", "grouped", "tied"):
        model, compute_loss, batches = made(name)
        plain = copy.deepcopy(model)
        plan = find_plan(model, compute_loss, batches[0], 2)
        apply_plan(model, plan, mesh["tensor"])
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        for step, batch in enumerate(batches):
            for each in (model, plain):
                one_step(each, torch.optim.SGD(each.parameters()), compute_loss, batch, step)
                torch.optim.SGD(each.parameters(), lr=0.05).step()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(a), b.detach(), rtol=0, atol=1e-12)
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_cut_model_may_be_sharded_too(tmp_path):
    start_processes(sharded_too, (tmp_path,), nprocs=4, start_method="forkserver")


def more_draws(mesh):
    """A model that draws more often than it did when its plan was found."""
    model, compute_loss, batches = made("dropout")
    plan = find_plan(model, compute_loss, batches[0], mesh.size())
    apply_plan(model, plan, mesh)
    block = model.blocks[1]
    block.attention = nn.Sequential(block.attention, nn.Dropout(0.1), nn.Dropout(0.1))
    try:
        compute_loss(model, batches[0])
    except RecipeError as error:
        return str(error)


def on_meta(mesh):
    """Parameters of a model that has no memory yet."""
    model, compute_loss, batches = made("GPT")
    plan = find_plan(model, compute_loss, batches[0], mesh.size())
    model = model.to("meta")
    apply_plan(model, plan, mesh)
    weight = model.blocks[0].up.weight
    return [str(weight.device), list(weight.shape), list(weight.to_local().shape)]


def one_process(rank, ranks, folder, names, steps):
    dist.init_process_group("gloo", f"file://{folder}/meeting{ranks}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))["tensor"]
    found = {name: compare(name, mesh, steps=steps) for name in names}
    if "GPT" in names and steps == STEPS:
        found["float32"] = compare("dropout", mesh, torch.float32)
        found["bfloat16"] = compare("grouped", mesh, torch.float32, "bfloat16")
        found["sent"], found["meta"] = sent(mesh), on_meta(mesh)
        found["more draws"] = more_draws(mesh)
    (folder / f"{ranks}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def results(folder, ranks, names, steps=STEPS):
    arguments = (ranks, folder, names, steps)
    start_processes(one_process, arguments, nprocs=ranks, start_method="forkserver")
    return [json.loads((folder / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """What the models of `MODELS` gave on two ranks, each rank's."""
    return results(tmp_path_factory.mktemp("ranks"), 2, list(MODELS))


pytestmark = pytest.mark.process


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_cut_model_trains_as_one_process(on_two, name):
    for found in on_two:
        found = found[name]
        assert found.pop("cut") > 0
        assert max(found.values()) <= 1e-10, found


@pytest.mark.slow
def test_float32_and_bfloat16_stay_near(on_two):
    for found in on_two:
        assert found["float32"]["loss"] <= 1e-5
        assert found["float32"]["eval"] <= 1e-5
        assert found["bfloat16"]["loss"] <= 3e-4


@pytest.mark.slow
def test_a_found_plan_sends_no_more_than_a_plan_by_hand(on_two):
    for found in on_two:
        (loss, calls, size), (loss_by_hand, calls_by_hand, size_by_hand) = found["sent"]
        assert loss == pytest.approx(loss_by_hand, rel=1e-6)
        assert calls_by_hand == 2 + 4 * 2 + 1  # two gathers, four sums a block, the head's
        assert calls <= 1.1 * calls_by_hand
        assert size <= 1.1 * size_by_hand


@pytest.mark.slow
def test_draws_that_the_plan_does_not_know_are_an_error(on_two):
    assert "blocks.1 draws random numbers more often than the 3 times" in on_two[0]["more draws"]


@pytest.mark.slow
def test_a_model_without_memory_is_cut(on_two):
    assert on_two[0]["meta"] == ["meta", [64, 16], [32, 16]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"), [(2, ["dropout", "tied", "experts"]), (3, ["odd heads", "tied"])]
)
def test_fifty_steps_and_three_ranks_between_which_heads_cannot_be_divided(tmp_path, ranks, names):
    for found in results(tmp_path, ranks, names, 50):
        for name in names:
            assert found[name].pop("cut") > 0
            assert max(found[name].values()) <= 1e-10, (name, found[name])
