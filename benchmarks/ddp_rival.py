"""The rival: plain PyTorch DDP on a recipe's model, data, loss and optimizer.

    python benchmarks/ddp_rival.py RECIPE.py:function --steps 100 --global-batch 64 --times FILE

Written as PyTorch's own tutorial writes it: DistributedSampler, DataLoader in
the process, DDP with its defaults, gloo. Writes the Unix time at which each
step of process 0 began to `--times`, one float64 after the other.
"""

import argparse
import json
import os
import struct
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from instep.recipe.build import call, load_function


def work(rank: int, args: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(args.threads)
    store = f"file://{meeting}"
    dist.init_process_group("gloo", store, rank=rank, world_size=args.workers)
    recipe = call(load_function(args.recipe), json.loads(args.arguments), 7)
    model = DistributedDataParallel(recipe.model)
    optimizer = recipe.optimizer(model.parameters())
    sampler = DistributedSampler(recipe.train, seed=7, drop_last=True)
    batch = args.global_batch // args.workers
    loader = DataLoader(recipe.train, batch_size=batch, sampler=sampler, drop_last=True)
    step, epoch = 0, 0
    times = args.times.open("wb", buffering=0) if rank == 0 else None
    while step < args.steps:
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            if times is not None:
                times.write(struct.pack("<d", time.time()))
            optimizer.zero_grad()
            recipe.loss(model(inputs), target).backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break
        epoch += 1
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
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
