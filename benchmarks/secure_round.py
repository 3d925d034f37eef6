"""What does a masked round cost beside an open one, over emulated links?

    python benchmarks/secure_round.py [--rate 1gbit] [--parameters 10000000] [--turns 9]

One process on each of 8 emulated hosts (needs root), one thread and one participant each. In every
turn a round with masks takes its turn with an open one, the first of them by turns, between two
barriers: clipping, figures, masks, the sums, and the mean as it is handed out. Local steps are left
out; they cost both the same. Bytes are those that the hosts' interfaces have sent.

Eight hosts share the cores of this machine, each has cores / 8 of one. With a rate of as much of
1 Gbit/s all times are drawn out alike, and the ratio is that of hosts with a core each and
1 Gbit/s: `--rate 250mbit` on two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from exchange import barrier, sent
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from turns import write

from instep.comm.torch_comm import TorchComm
from instep.lab.netlab import Network
from instep.privacy.secure.clipped import ClippedMean, Gift
from instep.records import Attempt
from instep.sync.generation import Generation

PARTICIPANTS, CLIP, SIDE = 8, 1.0, 500
KINDS = {"open": 0, "masked": 5}
"""`least` of each."""


class Rounds:
    """Rounds of one kind, on one host."""

    def __init__(self, least: int, comm: TorchComm, moved: list[Tensor]) -> None:
        self._mean = ClippedMean(CLIP, PARTICIPANTS, least=least, job=bytes(32))
        own = [nn.Parameter(torch.zeros_like(each)) for each in moved]
        self._mean.start(own, comm, Generation(notes=64, parts=PARTICIPANTS, at=Attempt(0, 0, 1)))
        self._own, self._moved, self._number, self._rank = own, moved, 0, comm.rank

    def run(self) -> list[Tensor]:
        """One round; the mean."""
        self._number += 1
        mean = self._mean
        mean.begin_step(Attempt(0, self._number, 1))
        mean.begin_pass(1 / PARTICIPANTS, last=False, unit=self._rank)
        for slot, each in enumerate(self._moved):
            mean.gradient(slot, each)
        mean.figures({self._rank: Gift(10.0, 1.0, 10.0, self._moved)})
        mean.exchange(torch.zeros(64, dtype=torch.float64))
        mean.hand_out()
        found = [each.grad for each in self._own if each.grad is not None]
        mean.apply(lambda: None)
        return found


def rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(args.folder / "meeting"), PARTICIPANTS)
    comm = TorchComm(store, args.rank, PARTICIPANTS, address=args.address, timeout_s=120)
    torch.manual_seed(args.rank)
    moved = [1e-4 * torch.randn(SIDE, SIDE) for _ in range(args.parameters // SIDE**2)]
    each = {name: Rounds(least, comm, moved) for name, least in KINDS.items()}
    found: dict[str, Any] = {name: {"s": [], "cpu_s": [], "sent": []} for name in KINDS}
    for turn in range(args.turns + 1):
        means = {}
        for name in sorted(KINDS, reverse=bool(turn % 2)):
            barrier(comm)
            bytes_before, cpu, since = sent(), time.process_time(), time.perf_counter()
            means[name] = each[name].run()
            busy = time.process_time() - cpu
            barrier(comm)
            took = time.perf_counter() - since
            if turn:
                for key, value in zip(
                    found[name], (took, busy, sent() - bytes_before), strict=True
                ):
                    found[name][key].append(value)
        assert all(map(torch.equal, *means.values())), "the bits of an open round"
    (args.folder / f"rank{args.rank}").write_text(json.dumps(found))
    barrier(comm)
    comm.close()


def measured(args: argparse.Namespace, rate: str) -> dict[str, Any]:
    """All turns at one rate of the links."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, Network(PARTICIPANTS, rate=rate) as network:
        settings = [f"--parameters={args.parameters}", f"--turns={args.turns}"]
        programs = [
            network.run(
                host,
                [
                    *(sys.executable, __file__, *settings),
                    *(f"--rank={number}", f"--folder={folder}"),
                    f"--address={network.address(host)}",
                ],
            )
            for number, host in enumerate(network.hosts)
        ]
        for program in programs:
            if program.wait():
                raise subprocess.CalledProcessError(program.returncode, program.args)
        hosts = [json.loads(Path(folder, f"rank{n}").read_text()) for n in range(PARTICIPANTS)]
    middle = {
        name: {
            "s": round(statistics.median(hosts[0][name]["s"]), 3),
            "cpu_s": round(sum(statistics.median(h[name]["cpu_s"]) for h in hosts), 3),
            "sent": round(statistics.median(b for h in hosts for b in h[name]["sent"])),
        }
        for name in KINDS
    }
    pairs = zip(hosts[0]["masked"]["s"], hosts[0]["open"]["s"], strict=True)
    ratios = [masked / opened for masked, opened in pairs]
    return {
        "rate": rate,
        "load": load,
        **middle,
        "over_open": [round(each, 3) for each in statistics.quantiles(ratios)],
        "bytes_over_open": round(middle["masked"]["sent"] / middle["open"]["sent"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", nargs="+", default=["1gbit"], help="of each host's link")
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path)
    for hidden, kind in (("--rank", int), ("--address", str), ("--folder", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args)
        return
    about = {"participants": PARTICIPANTS, "parameters": args.parameters, "cores": os.cpu_count()}
    found = [about | measured(args, rate) for rate in args.rate]
    print(json.dumps(found, indent=1))
    if args.out:
        write(args.out, found)


if __name__ == "__main__":
    main()
