"""An optimizer whose state is on another device takes the steps that it takes without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing import start_processes

from instep.comm.dtensors import is_split, local_part, split_like
from instep.errors import RecipeError
from instep.job.mesh import MeshSpec
from instep.parallel.host_state import HOST, keep_on_host, placed
from instep.parallel.replica_group import ReplicaGroup
from instep.parallel.shard.sharded import shard

OTHER = torch.device("cpu:0")
"""For torch another device than `cpu`: what is moved there is copied to memory of its own."""

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "lr as a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "groups": lambda p: torch.optim.RMSprop(
        [{"params": [each], "lr": 0.01 * (n + 1)} for n, each in enumerate(p)]
    ),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    last = model[2] if step % 2 else model[:2]  # type: ignore[index]
    return last(x).square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", [HOST, OTHER], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_state_have_the_same_bits_with_and_without(
    name: str, device: torch.device
) -> None:
    """With a scheduler, and parameters without gradients in every second step."""
    models, states = [net(), net()], []
    for model in models:
        parameters = list(model.parameters())
        optimizer = OPTIMIZERS[name](parameters)
        if model is models[0]:
            keep_on_host(optimizer, device)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(6):
            loss_of(model, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        held = [each for group in optimizer.param_groups for each in group["params"]]
        assert list(map(id, held)) == list(map(id, parameters))
        assert {id(each) for each in optimizer.state} <= {id(each) for each in parameters}
        states.append(optimizer.state_dict())
    torch.testing.assert_close(*(list(m.parameters()) for m in models), rtol=0, atol=0)
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_parameters_on_the_host_are_not_copied() -> None:
    parameter = nn.Parameter(torch.ones(3))
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            (held,) = self.param_groups[0]["params"]
            seen.append((held.data_ptr(), held.grad.data_ptr()))
            return super().step(closure)

    optimizer = Watched([parameter], lr=0.1)
    keep_on_host(optimizer)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert seen == [(parameter.data_ptr(), parameter.grad.data_ptr())]


def sharded_steps(folder_of: ReplicaGroup, device: torch.device | None) -> tuple[Any, Any]:
    model = net()
    sharded = shard(model, folder_of.device_mesh)
    slots = sharded.slots.of(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if device is not None:
        keep_on_host(optimizer, device)
    for step in range(4):
        sharded.run(loss_of, model, step).backward()
        sharded.finish_pass()
        for parameter, slot in zip(model.parameters(), slots, strict=True):
            parameter.grad, slot.grad = None, None
            local = torch.full_like(local_part(parameter), step + 1.0)
            parameter.grad = split_like(parameter, local)
        optimizer.step()
    for parameter, kept in optimizer.state.items():
        for value in kept.values():
            assert value.dim() == 0 or (is_split(value) and value.shape == parameter.shape)
    return [local_part(p) for p in model.parameters()], [
        {name: local_part(value) for name, value in kept.items()}
        for kept in optimizer.state.values()
    ]


def on_ranks(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), 2)
    group = ReplicaGroup(store, rank, MeshSpec(shard=2), timeout_s=600)
    without = sharded_steps(group, None)
    for device in (HOST, OTHER):
        torch.testing.assert_close(sharded_steps(group, device), without, rtol=0, atol=0)
    group.close()


@pytest.mark.process
def test_parts_of_parameters_and_of_their_state_are_those_without(tmp_path: Path) -> None:
    start_processes(on_ranks, (tmp_path,), nprocs=2, start_method="forkserver")


def test_restored_state_goes_where_the_optimizer_keeps_it() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    kept = {"momentum_buffer": torch.ones(2), "count": 3}
    assert placed(optimizer, kept) == kept
    keep_on_host(optimizer, OTHER)
    moved = placed(optimizer, kept)
    assert moved["count"] == 3
    torch.testing.assert_close(moved["momentum_buffer"], torch.ones(2))
    assert moved["momentum_buffer"].data_ptr() != kept["momentum_buffer"].data_ptr()


def test_an_optimizer_that_moves_parameters_behind_its_groups_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                parameter.sub_(0.1)

    optimizer = Own([parameter], lr=0.1)
    keep_on_host(optimizer, OTHER)
    with pytest.raises(RecipeError, match="the optimizer Own: it moves parameters that are not"):
        optimizer.step()


def test_optimizers_that_keep_something_on_the_gpu_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    capturable = torch.optim.AdamW([parameter])
    capturable.param_groups[0]["capturable"] = True
    with pytest.raises(RecipeError, match="capturable = True keeps its state on the GPU"):
        keep_on_host(capturable)
    elsewhere = torch.optim.SGD([parameter])
    elsewhere.param_groups[0]["lr"] = torch.ones((), device="meta")
    with pytest.raises(RecipeError, match="its 'lr' is a tensor on meta"):
        keep_on_host(elsewhere)


def test_an_optimizer_without_hooks_is_refused() -> None:
    class Bare(torch.optim.Optimizer):
        def _patch_step_function(self) -> None:
            pass

        def step(self, closure: Any = None) -> Any: ...

    with pytest.raises(RecipeError, match="runs without the hooks of"):
        keep_on_host(Bare([nn.Parameter(torch.ones(1))], {}))
