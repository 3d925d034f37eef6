"""A model that is cut, trained beside the same one that is whole."""

import copy

import torch
import torch.distributed as dist
from tensor_models import made
from torch import nn
from torch.distributed.tensor import DTensor

from instep.parallel.tensor import apply_plan, find_plan, squared_norm

STEPS = 3


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def dense(grad):
    return grad.to_dense() if grad.is_sparse else grad


def apart(given, wanted):
    """The largest distance, relative to the largest value."""
    return float((given - wanted).abs().max() / (1e-30 + wanted.abs().max()))


def one_step(model, optimizer, compute_loss, batch, step, precision=None):
    torch.manual_seed(1000 + step)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        loss = compute_loss(model, batch)
    loss.backward()
    drawn = torch.rand(())  # generators are where they would be
    return float(loss.detach()), float(drawn)


def evaluated(model, compute_loss, batch):
    model.eval()
    with torch.no_grad():
        loss = float(compute_loss(model, batch))
    model.train()
    return loss


def same_on_all(tensor):
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.contiguous())
    return all(torch.equal(tensor, other) for other in others)


def compare(name, mesh, dtype=torch.float64, precision=None, steps=STEPS, **options):
    """Train a model plain and cut; returns how far apart they are."""
    model, compute_loss, batches = made(name, dtype)
    plan = find_plan(model, compute_loss, batches[0], mesh.size(), **options)
    plain, cut = copy.deepcopy(model), model
    apply_plan(cut, plan, mesh)
    assert [n for n, _ in cut.named_parameters()] == [n for n, _ in plain.named_parameters()]
    both = [(each, torch.optim.SGD(each.parameters(), lr=0.05)) for each in (plain, cut)]
    found = {"loss": 0.0, "norm": 0.0, "eval": 0.0, "weights": 0.0, "grads": 0.0}
    found["cut"] = sum(isinstance(each, DTensor) for each in cut.parameters())
    for step in range(steps):
        batch = batches[step % len(batches)]
        (want, drawn), (got, drawn_too) = (
            one_step(*each, compute_loss, batch, step, precision) for each in both
        )
        assert drawn == drawn_too
        found["loss"] = max(found["loss"], abs(got / want - 1))
        norm = squared_norm(cut.parameters(), mesh)
        dist.all_reduce(norm)
        wanted = nn.utils.get_total_norm(
            [dense(p.grad) for p in plain.parameters() if p.grad is not None]
        )
        found["norm"] = max(found["norm"], abs(float(norm.sqrt() / wanted) - 1))
        if step == 0 and precision is None:
            largest = max(
                float(dense(p.grad).norm()) for p in plain.parameters() if p.grad is not None
            )
            for a, b in zip(cut.parameters(), plain.parameters(), strict=True):
                if b.grad is not None:
                    away = float((dense(whole(a.grad)) - dense(b.grad)).norm()) / largest
                    found["grads"] = max(found["grads"], away)
        for _, optimizer in both:
            optimizer.step()
    for a, b in zip(cut.parameters(), plain.parameters(), strict=True):
        assert isinstance(a, DTensor) or precision or same_on_all(a.detach())
        found["weights"] = max(found["weights"], apart(whole(a).detach(), b.detach()))
    left, right = (evaluated(each, compute_loss, batches[1]) for each in (cut, plain))
    found["eval"] = abs(left / right - 1)
    return found
