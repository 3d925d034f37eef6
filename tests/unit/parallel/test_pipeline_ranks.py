"""Pipelines over real processes train as one process does."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from pipeline_models import batch_of, gpt, hugging_face, loss_of, mlp
from torch import nn

from helpers import run_processes
from instep.errors import PeerError
from instep.parallel.pipeline import Pipeline, find_cuts
from instep.recipe.quick_start import spare_dynamo

pytestmark = pytest.mark.process

STEPS = 50


def build(name, *, dropout=False):
    torch.manual_seed(3)
    if name == "mlp":
        model, samples = mlp()
    elif name.startswith("gpt") and name != "gpt2":
        model, samples = gpt(tied="tied" in name)
    else:
        model, samples = hugging_face(name)
    model = model.double().train()
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for module in model.modules():
            for key in ("dropout", "dropout_prob", "attention_dropout"):
                if isinstance(getattr(module, key, None), float):
                    setattr(module, key, 0.0)
    return model, samples


def batches(model, samples, steps):
    """Lengths change from step to step, and sizes do not divide."""
    for step in range(steps):
        yield batch_of(model, samples - step % 2, step, 8 + step % 3), samples - step % 2


def plain(name, steps):
    """A plain loop in one process: whole batches, no parts."""
    model, samples = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch, size in batches(model, samples, steps):
        optimizer.zero_grad()
        loss, weight = loss_of(model)(batch, size)
        (loss * weight).backward()  # Hugging Face's norms round gradients to float32
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def pipeline_of(model, batch, samples, group, *, timed=True, cuts=(), **options):
    """Cut where rank 0 finds."""
    given = model, loss_of(model), batch, samples
    found = [cuts]
    if group is None or dist.get_rank() == 0:
        ranks = 1 if group is None else dist.get_world_size()
        wanted = {"schedule": "1f1b", **options}
        found = [find_cuts(*given, ranks=ranks, cuts=cuts, timed=timed, **wanted)[0]]
    if group is not None:
        dist.broadcast_object_list(found)
    return Pipeline(*given, group=group, cuts=found[0], **options)


def piped(group, name, steps, *, dropout=False, **options):
    """The same over the stages: losses on the last, and what this rank holds."""
    model, samples = build(name, dropout=dropout)
    pipeline = pipeline_of(model, batch_of(model, samples), samples, group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, (batch, size) in enumerate(batches(model, samples, steps)):
        optimizer.zero_grad()
        total, weight = pipeline.run(batch, size, step)
        pipeline.sum_shared()
        if group is not None:
            both = torch.tensor([total, weight], dtype=torch.float64)
            dist.all_reduce(both)
            total, weight = both.tolist()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
        optimizer.step()
        losses.append(total / weight)
    held = {name: p.detach() for name, p in model.named_parameters()}
    assert set(held) == pipeline.held
    return losses, held, pipeline.owned, pipeline.cuts


def ranks(comm, meeting, jobs):
    spare_dynamo()
    dist.init_process_group("gloo", f"file://{meeting}", rank=comm.rank, world_size=comm.size)
    return [piped(dist.group.WORLD, *job, **options) for job, options in jobs]


def run_ranks(size, tmp_path, jobs):
    """Of each job what each rank returned."""
    found = run_processes(size, ranks, tmp_path, str(tmp_path / "world"), jobs)
    return list(zip(*found, strict=True))


def compare(parts, losses, whole, within=1e-10):
    """Every parameter is held, owned once, and equal."""
    owned = [name for _, _, names, _ in parts for name in names]
    assert sorted(owned) == sorted(whole)
    for mine, held, _, _ in parts:
        assert mine == pytest.approx(losses, rel=0, abs=within)
        assert len(held) < len(whole)
        for name, tensor in held.items():
            assert (tensor - whole[name]).abs().max() < within, name


@pytest.mark.slow
def test_two_stages_train_as_one_process(tmp_path):
    steps = 6
    jobs = [
        (("mlp", steps), {"parts": 4}),
        (("gpt", steps), {"parts": 3, "schedule": "gpipe", "timed": False}),
        (("gpt tied", steps), {"parts": 4, "schedule": "interleaved", "timed": False}),
        (("gpt tied", steps), {"parts": 1, "cuts": ["blocks.1"]}),
        (("gpt tied", steps), {"parts": 3, "timed": False, "dropout": True}),
    ]
    *whole, dropping = run_ranks(2, tmp_path, jobs)
    for (job, _), parts in zip(jobs, whole, strict=False):
        compare(parts, *plain(*job))
    losses, parameters, _, _ = piped(None, "gpt tied", steps, parts=3, dropout=True)
    compare(dropping, losses, parameters)
    assert abs(losses[0] - plain("gpt tied", 1)[0][0]) > 1e-4, "nothing was dropped"


def lose_one(comm, meeting):
    dist.init_process_group("gloo", f"file://{meeting}", rank=comm.rank, world_size=comm.size)
    model, samples = build("gpt")
    loss, batch = loss_of(model), batch_of(model, samples)
    pipeline = pipeline_of(model, batch, samples, dist.group.WORLD, parts=3, timed=False)

    def dies(part, size):
        if comm.rank == 1:
            os._exit(1)
        return loss(part, size)

    pipeline.run(batch, samples, 1)
    with pytest.raises(PeerError, match="another stage of the pipeline went away"):
        pipeline.run(batch, samples, 2, dies)
    return "survived"


@pytest.mark.slow
def test_a_stage_that_is_killed_is_noticed(tmp_path):
    found = run_processes(2, lose_one, tmp_path, str(tmp_path / "world"))
    assert found == ["survived", None]


class Trimmed(nn.Module):
    """Leaves out what is padding (0) in all samples of a batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, tokens):
        tokens = tokens[:, : int((tokens > 0).sum(1).max())]
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.head(x) * (tokens > 0)[..., None]).sum(1)


def trimming(comm, meeting, schedule):
    """Parts of other lengths, and one that counts for nothing; beside the whole batch."""
    dist.init_process_group("gloo", f"file://{meeting}", rank=comm.rank, world_size=comm.size)
    torch.manual_seed(4)
    model = Trimmed().double()
    tokens = torch.randint(1, 9, (10, 8))
    for part, length in enumerate((3, 7, 5, 3, 8)):
        tokens[2 * part : 2 * part + 2, length:] = 0
    target = torch.arange(10) % 3
    target[4:6] = -1

    def call(batch, _):
        counting = batch["target"] >= 0
        if not counting.any():
            return None
        outputs = model(batch["tokens"])[counting]
        loss = nn.functional.cross_entropy(outputs, batch["target"][counting])
        return loss, float(counting.sum())

    batch = {"tokens": tokens, "target": target}
    loss, weight = call(batch, 10)
    (loss * weight).backward()
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    cuts = [f"blocks.{n}" for n in ((2,) if schedule == "1f1b" else (1, 2, 3))]
    options = {"group": dist.group.WORLD, "parts": 5, "schedule": schedule, "cuts": cuts}
    pipeline = Pipeline(model, call, batch, 10, **options)
    for number in (1, 2):
        pipeline.run(batch, 10, number)
        pipeline.sum_shared()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, number * whole[name], rtol=0, atol=1e-12)
    return len(pipeline.held)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_parts_whose_activations_have_other_shapes_than_those_before_count_too(tmp_path, schedule):
    assert run_processes(2, trimming, tmp_path, str(tmp_path / "world"), schedule) == [5, 6]


class Held(nn.Linear):
    """A block that waits for a file to exist."""

    file = None

    def forward(self, x):
        deadline = time.monotonic() + 600
        while self.file is not None and not self.file.exists():
            assert time.monotonic() < deadline, "the next part was not sent meanwhile"
            time.sleep(0.001)
        return super().forward(x)


def receive_early(comm, meeting, file):
    """Of two parts, the first rank has sent both while the second rank computes the first."""
    dist.init_process_group("gloo", f"file://{meeting}", rank=comm.rank, world_size=comm.size)
    model, batch = nn.Sequential(nn.Linear(4, 4), Held(4, 4)), torch.randn(4, 4)
    given = model, lambda part, size: (model(part).square().mean(), size), batch, 4
    pipeline = Pipeline(*given, group=dist.group.WORLD, parts=2, cuts=["1"])
    model[1].file = file if comm.rank else None
    found = pipeline.results(batch, 4, 1, given[1])
    if comm.rank == 0:
        file.touch()
    return len(found)


def test_a_part_is_received_while_the_part_before_is_computed(tmp_path):
    args = str(tmp_path / "world"), tmp_path / "sent"
    assert run_processes(2, receive_early, tmp_path, *args) == [0, 2]


FAMILIES = [
    "mlp",
    "gpt",
    "gpt tied",
    "gpt2",
    "llama",
    "qwen3",
    "mixtral",
    "bert",
    "vit",
    "t5",
    "mamba",
]


WITHIN = {"mamba": 1e-5}
"""Mamba scans in float32, whatever its parameters are."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_families_train_as_one_process(tmp_path, size, name):
    options = {"parts": 3, "timed": size == 2}
    (parts,) = run_ranks(size, tmp_path, [((name, STEPS), options)])
    compare(parts, *plain(name, STEPS), within=WITHIN.get(name, 1e-10))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_stages_in_this_process_train_as_one(name):
    found = piped(None, name, STEPS, parts=3, schedule="interleaved", timed=False)
    losses, whole = plain(name, STEPS)
    within = WITHIN.get(name, 1e-10)
    assert found[0] == pytest.approx(losses, rel=0, abs=within)
    assert found[1].keys() == whole.keys()
    for key, tensor in found[1].items():
        assert (tensor - whole[key]).abs().max() < within, key
