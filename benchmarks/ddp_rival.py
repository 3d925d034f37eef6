"""The rival: plain PyTorch DDP on a recipe's model, data, loss and optimizer.

    python benchmarks/ddp_rival.py RECIPE.py:function --steps 100 --global-batch 64 --workers 2

Written as PyTorch's own tutorial writes it: DistributedSampler, DataLoader in
the process, DDP with its defaults, gloo. Prints one JSON object with the
samples per second of the steps after the warm-up.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from instep.run.recipe import call, load_function


def work(rank: int, args: argparse.Namespace, meeting: str, answer: str) -> None:
    torch.set_num_threads(args.threads)
    store = f"file://{meeting}"
    dist.init_process_group("gloo", store, rank=rank, world_size=args.workers)
    recipe = call(load_function(args.recipe), json.loads(args.arguments), 7)
    model = DistributedDataParallel(recipe.model)
    optimizer = recipe.optimizer(model.parameters())
    sampler = DistributedSampler(recipe.train, seed=7, drop_last=True)
    batch = args.global_batch // args.workers
    loader = DataLoader(recipe.train, batch_size=batch, sampler=sampler, drop_last=True)
    step, epoch, begin = 0, 0, 0.0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            if step == args.warm_up:
                dist.barrier()
                begin = time.perf_counter()
            optimizer.zero_grad()
            recipe.loss(model(inputs), target).backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break
        epoch += 1
    dist.barrier()
    seconds = time.perf_counter() - begin
    if rank == 0:
        rate = (args.steps - args.warm_up) * args.global_batch / seconds
        Path(answer).write_text(json.dumps({"samples_per_second": rate}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arguments", default="{}")
    args = parser.parse_args()
    file, _, function = args.recipe.rpartition(":")
    args.recipe = f"{Path(file).resolve()}:{function}"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        answer = str(Path(folder) / "answer.json")
        spawn(work, (args, str(Path(folder) / "meeting"), answer), nprocs=args.workers)
        print(Path(answer).read_text())


if __name__ == "__main__":
    main()
