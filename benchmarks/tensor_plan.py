"""Is a model that is cut by a found plan as fast as one cut by hand with torch's own styles?

    python benchmarks/tensor_plan.py [--width 256] [--turns 20] [--steps 10] [--sequence]
        [--json FILE]

Two processes with one thread each train the same GPT twice, in turns of some steps: cut by
`instep.parallel.tensor`, and by `parallelize_module` with the best plan known for it (query, key
and value read one DTensor, so their gradient is summed once). The loss is compared too. A figure is
the speed over that of the plan by hand: above 1 is faster. With --sequence the found plan splits
the sequence between blocks too; the plan by hand stays as it is.
"""

import argparse
import copy
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from turns import in_words, over, summed_up, write

from instep.parallel.tensor import apply_plan, find_plan

WORDS, LENGTH, SAMPLES, LAYERS, HEADS = 256, 64, 8, 4, 8


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = width // HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = (
            each(x).view(samples, length, -1, self.head).transpose(1, 2)
            for each in (self.wq, self.wk, self.wv)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: Tensor = self.wo(seen.transpose(1, 2).reshape(samples, length, -1))
        return made


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        made: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return made


class GPT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        made: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))
        return made


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def cut_by_hand(model: GPT, mesh: DeviceMesh) -> None:
    once = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention": once,
                **{f"attention.w{each}": ColwiseParallel() for each in "qkv"},
                "attention.wo": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )
    whole = {"token": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, {**whole, "head": ColwiseParallel(output_layouts=Replicate())})


def one_process(rank: int, folder: Path, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH + 1))
    found = GPT(args.width)
    by_hand = copy.deepcopy(found)
    before = time.perf_counter()
    plan = find_plan(found, loss_of, tokens[:2], 2, sequence=args.sequence)
    planned_s = time.perf_counter() - before
    apply_plan(found, plan, mesh)
    cut_by_hand(by_hand, mesh)
    both = [(each, torch.optim.SGD(each.parameters(), lr=0.01)) for each in (by_hand, found)]
    times: list[list[float]] = [[], []]
    losses = [0.0, 0.0]
    for turn in range(args.turns + 1):
        for which, (model, optimizer) in enumerate(both):
            dist.barrier()
            before = time.perf_counter()
            for _ in range(args.steps):
                optimizer.zero_grad()
                loss = loss_of(model, tokens)
                loss.backward()
                optimizer.step()
            losses[which] = float(loss.detach())
            if turn:  # the first warms up
                times[which].append((time.perf_counter() - before) / args.steps)
        assert abs(losses[1] / losses[0] - 1) < 1e-5, losses
    if rank == 0:
        faster = [1 / ratio for ratio in over(times[1], times[0])]
        print(f"plan found in {planned_s:.2f} s; loss {losses[1]:.4f}, by hand {losses[0]:.4f}")
        print(f"width {args.width}  speed over the plan by hand {in_words(faster)}", flush=True)
        result = {"width": args.width, "sequence": args.sequence,
                  "speed over the plan by hand": summed_up(faster),
                  "by_hand_s": times[0], "found_s": times[1], "planned_s": planned_s}  # fmt: skip
        if args.json:
            write(args.json, [result])
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequence", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="instep-tensor-") as folder:
        start_processes(one_process, (Path(folder), args), nprocs=2, start_method="spawn")


if __name__ == "__main__":
    main()
