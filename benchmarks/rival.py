"""The rival: plain PyTorch on a recipe's model, data, loss and optimizer.

    python benchmarks/rival.py RECIPE.py:function --as ddp --global-batch 64 --times FILE

Written as PyTorch's own tutorials write it: DistributedSampler, DataLoader in the process, gloo;
and DDP with its defaults, FSDP2 block by block, or a GPT cut by hand into two stages. Writes the
Unix time at which each step of process 0 began to `--times`, one float64 after the other.
"""

import argparse
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from instep.recipe.build import call
from instep.recipe.source_file import load_function

Passes = Callable[[Tensor, Tensor], Any]
"""Runs a batch forward and backward."""

PARTS = 8
"""Of a batch in a pipeline."""


def ddp(recipe: Any) -> tuple[nn.Module, Passes]:
    return passes(recipe, DistributedDataParallel(recipe.model))


def fsdp2(recipe: Any, *, zero: int) -> tuple[nn.Module, Passes]:
    for each in (*recipe.model.blocks, recipe.model):
        fully_shard(each, reshard_after_forward=zero == 3)
    return passes(recipe, recipe.model)


def passes(recipe: Any, model: nn.Module) -> tuple[nn.Module, Passes]:
    return model, lambda inputs, target: recipe.loss(model(inputs), target).backward()


class Stage(nn.Module):
    """Half of a GPT."""

    def __init__(self, gpt: Any, rank: int) -> None:
        super().__init__()
        half = len(gpt.blocks) // 2
        self.blocks = gpt.blocks[half:] if rank else gpt.blocks[:half]
        self.token = None if rank else gpt.token
        self.place = None if rank else gpt.place
        self.norm = gpt.norm if rank else None
        self.head = gpt.head if rank else None

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None and self.place is not None:
            x = self.token(x) + self.place(torch.arange(x.shape[1]))
        x = self.blocks(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipeline(recipe: Any) -> tuple[nn.Module, Passes]:
    rank = dist.get_rank()
    model = Stage(recipe.model, rank)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PARTS, loss_fn=recipe.loss)
    if rank == 0:
        return model, lambda inputs, _: schedule.step(inputs, return_outputs=False)
    return model, lambda _, target: schedule.step(target=target, losses=[], return_outputs=False)


RIVALS: dict[str, Callable[[Any], tuple[nn.Module, Passes]]] = {
    "ddp": ddp,
    "zero3": lambda recipe: fsdp2(recipe, zero=3),
    "zero2": lambda recipe: fsdp2(recipe, zero=2),
    "1f1b": pipeline,
}


def work(rank: int, args: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(args.threads)
    store = f"file://{meeting}"
    dist.init_process_group("gloo", store, rank=rank, world_size=args.workers)
    recipe: Any = call(load_function(args.recipe), json.loads(args.arguments), 7)
    model, run = RIVALS[args.rival](recipe)
    optimizer = recipe.optimizer(model.parameters())
    replicas = 1 if args.rival == "1f1b" else args.workers
    number = rank % replicas
    sampler: Any = DistributedSampler(recipe.train, replicas, number, seed=7, drop_last=True)
    batch = args.global_batch // replicas
    loader = DataLoader(recipe.train, batch_size=batch, sampler=sampler, drop_last=True)
    step, epoch = 0, 0
    times = args.times.open("wb", buffering=0) if rank == 0 else None
    while step < args.steps:
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            if times is not None:
                times.write(struct.pack("<d", time.time()))
            optimizer.zero_grad()
            run(inputs, target)
            optimizer.step()
            step += 1
            if step == args.steps:
                break
        epoch += 1
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--as", dest="rival", choices=RIVALS, default="ddp")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arguments", default="{}")
    args = parser.parse_args()
    file, _, function = args.recipe.rpartition(":")
    args.recipe = f"{Path(file).resolve()}:{function}"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (args, str(Path(folder) / "meeting")), nprocs=args.workers)


if __name__ == "__main__":
    main()
