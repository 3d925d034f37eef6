"""What do ZeRO 2 and 3 cost in bytes and time, beside plain FSDP2 and DDP?

    python benchmarks/sharded.py [--rate 1gbit] [--ranks 4] [--rounds 24] [--steps 1]

One process in each of a few emulated hosts (needs root), one thread each; all contenders in the
same processes, on the same model and data, in short turns, backwards in every other round. Our
speed is the median of the ratios of turns that lie beside each other, by the clock, and by the CPU
time of all ranks, which other work on the machine moves less. A transformer of 3.4 million
parameters (13.7 MB), forward, backward and an SGD step. FSDP2 is wrapped block by block as ours
is. Bytes are those that a host's interface has sent, without headers (66 bytes a packet), over the
bytes of the model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from turns import in_words, write

from instep.job.mesh import MeshSpec
from instep.lab.netlab import Network
from instep.parallel.blocks import repeated_blocks
from instep.parallel.replica_group import ReplicaGroup
from instep.parallel.shard.sharded import shard

WORDS, WIDTH, BLOCKS, LENGTH = 512, 256, 4, 64
HEADERS = 66
"""Of a packet: Ethernet, IPv4, TCP with timestamps."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def plain_ddp(model: nn.Module, group: ReplicaGroup, tokens: Tensor) -> Callable[[], None]:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        ddp(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_fsdp2(zero: int) -> Callable[..., Callable[[], None]]:
    def make(model: nn.Module, group: ReplicaGroup, tokens: Tensor) -> Callable[[], None]:
        for block in repeated_blocks(model).values():
            fully_shard(block, mesh=group.device_mesh, reshard_after_forward=zero == 3)
        fully_shard(model, mesh=group.device_mesh, reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def ours(zero: Any) -> Callable[..., Callable[[], None]]:
    def make(model: nn.Module, group: ReplicaGroup, tokens: Tensor) -> Callable[[], None]:
        sharded = shard(model, group.device_mesh, zero=zero)
        mine = sharded.slots.of(model.parameters())
        optimizer = torch.optim.SGD(mine, lr=0.1)

        def step() -> None:
            sharded.run(model, tokens).backward()
            sharded.finish_pass()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


CASES = {
    "DDP": plain_ddp,
    "FSDP2, ZeRO 3": plain_fsdp2(3),
    "ours, ZeRO 3": ours(3),
    "FSDP2, ZeRO 2": plain_fsdp2(2),
    "ours, ZeRO 2": ours(2),
}


def sent() -> int:
    """Bytes that this host's interface has sent, without headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            values = numbers.split()
            return int(values[8]) - HEADERS * int(values[9])
    raise SystemExit("there is no eth0 here")


def rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(args.folder / "meeting"), args.ranks)
    mesh = MeshSpec(shard=args.ranks)
    group = ReplicaGroup(store, args.rank, mesh, address=args.address, timeout_s=60)
    tokens = torch.randint(WORDS, (args.samples, LENGTH))
    steps = {}
    for name, make in CASES.items():
        torch.manual_seed(0)
        model = Net()
        size = sum(parameter.nbytes for parameter in model.parameters())
        steps[name] = make(model, group, tokens)
        for _ in range(2):
            steps[name]()
    found: dict[str, Any] = {name: {"sent": [], "seconds": [], "cpu": []} for name in CASES}
    for turn in range(args.rounds):
        for name in list(CASES)[:: 1 if turn % 2 else -1]:
            distributed.barrier()
            bytes_before, before, cpu_before = sent(), time.perf_counter(), time.process_time()
            for _ in range(args.steps):
                steps[name]()
            found[name]["cpu"].append((time.process_time() - cpu_before) / args.steps)
            distributed.barrier()
            found[name]["seconds"].append((time.perf_counter() - before) / args.steps)
            found[name]["sent"].append((sent() - bytes_before) / args.steps / size)
    (args.folder / f"rank{args.rank}").write_text(json.dumps(found))
    distributed.barrier()
    group.close()


def total(of_ranks: list[list[float]]) -> list[float]:
    """Of each turn, over all ranks."""
    return [sum(turn) for turn in zip(*of_ranks, strict=True)]


def beside(theirs: list[float], ours: list[float]) -> list[float]:
    """Their time over ours, turn by turn."""
    return [their / own for their, own in zip(theirs, ours, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", help="of each host's link, as tc writes it; left out: no limit")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=1, help="of a turn")
    parser.add_argument("--samples", type=int, default=8, help="of a rank's micro-batch")
    parser.add_argument("--out", type=Path)
    for hidden in ("--rank", "--address", "--folder"):
        kind: Any = {"--rank": int, "--folder": Path}.get(hidden, str)
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args)
        return
    with tempfile.TemporaryDirectory() as folder, Network(args.ranks, rate=args.rate) as network:
        settings = [f"--{n}={getattr(args, n)}" for n in ("ranks", "rounds", "steps", "samples")]
        programs = [
            network.run(
                host,
                [
                    *(sys.executable, __file__, *settings, f"--rank={number}"),
                    *(f"--folder={folder}", f"--address={network.address(host)}"),
                ],
            )
            for number, host in enumerate(network.hosts)
        ]
        for program in programs:
            if program.wait():
                raise subprocess.CalledProcessError(program.returncode, program.args)
        found = [json.loads(Path(folder, f"rank{n}").read_text()) for n in range(args.ranks)]
    sent_each = {
        name: max(statistics.median(each[name]["sent"]) for each in found) for name in CASES
    }
    for name in CASES:
        seconds = found[0][name]["seconds"]
        line = f"{name:15} {1000 * statistics.median(seconds):7.1f} ms a step, sent "
        line += f"{sent_each[name]:.3f} times the model, {sent_each[name] / sent_each['DDP']:.3f} "
        line += "times DDP"
        rival = name.replace("ours", "FSDP2")
        if rival != name:
            line += f", {in_words(beside(found[0][rival]['seconds'], seconds))} of FSDP2's speed"
            cpu = (total([each[case]["cpu"] for each in found]) for case in (rival, name))
            line += f", {in_words(beside(*cpu))} by CPU time"
        print(line)
    if args.out:
        write(args.out, [{"rate": args.rate, "rank": n, **each} for n, each in enumerate(found)])


if __name__ == "__main__":
    main()
