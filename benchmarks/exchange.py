"""How fast is an encoded all-reduce between hosts, beside gloo's own of float32?

    python benchmarks/exchange.py [--rate 100mbit] [--mb 64] [--hosts 4] [--turns 3]
    python benchmarks/exchange.py --hosts 2 --each 2 --codecs

One process in each of a few emulated hosts (needs root), one thread each; in every turn each codec
after gloo's plain all-reduce of the same float32, all between two barriers. With `--each` several
processes in each host, whose numbers go round the hosts as in runs; then also the sum by way of the
hosts, and gloo's with numbers host by host. A codec's sum goes
through `TwoPhase` in buckets of 8 MB, encoding with error feedback and decoding included.
Bytes are those that a host's interface has sent, beside theory: 2 (W-1)/W payloads in packets of
1448 of 1514 bytes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore
from turns import write

from instep.comm.base import Comm
from instep.comm.codecs import CODECS
from instep.comm.over_hosts import over_hosts
from instep.comm.torch_comm import TorchComm
from instep.lab.netlab import Network
from instep.sync.reducers import Place
from instep.sync.reducers.two_phase import RankSegments, TwoPhase

BUCKET = 2_000_000
"""Values, of float32: 8 MB."""
PACKET, PAYLOAD = 1514, 1448
"""Bytes of a packet, and of what it carries: Ethernet, IPv4, TCP with timestamps."""
RIVAL = "gloo float32"
BY_HOST, OVER = "gloo float32, host by host", "over hosts float32"
SETTINGS = ("hosts", "mb", "turns", "each")


def sent() -> int:
    """Bytes that this host's interface has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise SystemExit("there is no eth0 here")


class Sum:
    """One all-reduce of the same values, again and again."""

    def __init__(self, name: str, comm: Comm, count: int) -> None:
        self.comm, self.flat = comm, torch.randn(count)
        plain = name in (RIVAL, BY_HOST, OVER)
        codec = CODECS["none" if plain else name]()
        self.theory = 2 * (comm.size - 1) / comm.size * codec.size(count)
        self.two = None
        if not plain:
            lengths = [len(part) for part in self.flat.split(BUCKET)]
            buckets = [[Place(str(n), (length,))] for n, length in enumerate(lengths)]
            self.two = TwoPhase(codec, comm, RankSegments(buckets, comm.size))

    def run(self) -> None:
        if self.two is None:
            works = [self.comm.all_reduce(part) for part in self.flat.split(BUCKET)]
            for work in works:
                work.wait()
            return
        for number, part in enumerate(self.flat.split(BUCKET)):
            self.two.begin(number, part, key=1)
        self.two.finish()
        self.two.apply()


def rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(args.folder / "meeting"), args.hosts * args.each)
    ranks = args.hosts * args.each
    comm = TorchComm(store, args.rank, ranks, address=args.address, timeout_s=60)
    comms: dict[str, Comm] = {}
    if args.each > 1:

        def among(of: Sequence[int], name: str) -> TorchComm:
            own = FileStore(str(args.folder / name), len(of))
            return TorchComm(own, of.index(args.rank), len(of), address=args.address)

        by_host = [rank for host in range(args.hosts) for rank in range(host, ranks, args.hosts)]
        comms = {BY_HOST: among(by_host, "by host"), OVER: over_hosts(comm, args.address, among)}
    names = [RIVAL, *comms, *args.codecs]
    found: dict[str, Any] = {name: {"seconds": [], "sent": [], "cpu": []} for name in names}
    count = int(args.mb * 1e6) // 4
    for turn in range(args.turns + 1):
        for name in names:
            each = Sum(name, comms.get(name, comm), count if turn else count // 20)
            barrier(comm)
            bytes_before, before, cpu_before = sent(), time.perf_counter(), time.process_time()
            each.run()
            cpu = time.process_time() - cpu_before
            barrier(comm)
            took, bytes_sent = time.perf_counter() - before, sent() - bytes_before
            if turn:
                found[name]["seconds"].append(took)
                found[name]["sent"].append(bytes_sent / each.theory)
                found[name]["cpu"].append(cpu)
    (args.folder / f"rank{args.rank}").write_text(json.dumps(found))
    barrier(comm)
    for made in (*comms.values(), comm):
        made.close()


def barrier(comm: Comm) -> None:
    comm.all_reduce(torch.zeros(1)).wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of each host's link, as tc writes it")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--each", type=int, default=1, help="processes in each host")
    parser.add_argument("--mb", type=float, default=64.0, help="of float32")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--codecs", nargs="*", default=["int8", "int4", "sign"])
    parser.add_argument("--out", type=Path)
    for hidden, kind in (("--rank", int), ("--address", str), ("--folder", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args)
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, Network(args.hosts, rate=args.rate) as network:
        settings = [f"--{name}={getattr(args, name)}" for name in SETTINGS]
        programs = [
            network.run(
                host,
                [
                    *(sys.executable, __file__, *settings, "--codecs", *args.codecs),
                    *(f"--rank={number}", f"--folder={folder}"),
                    f"--address={network.address(host)}",
                ],
            )
            for number, host in enumerate(network.hosts * args.each)
        ]
        for program in programs:
            if program.wait():
                raise subprocess.CalledProcessError(program.returncode, program.args)
        ranks = [
            json.loads(Path(folder, f"rank{n}").read_text()) for n in range(args.hosts * args.each)
        ]
    plain = ranks[0][RIVAL]["seconds"]
    found = []
    for name, own in ranks[0].items():
        faster = [one / other for one, other in zip(plain, own["seconds"], strict=True)]
        bytes_sent = statistics.median(b for each in ranks for b in each[name]["sent"])
        found.append(
            {
                "name": name,
                "seconds": [round(one, 4) for one in own["seconds"]],
                "faster": [round(one, 3) for one in faster],
                "median": round(statistics.median(faster), 3),
                "bytes_of_theory": round(bytes_sent * PAYLOAD / PACKET, 4),
                "cpu_s_of_all": round(sum(statistics.median(e[name]["cpu"]) for e in ranks), 3),
            }
        )
        print(json.dumps(found[-1]))
    if args.out:
        about = {"rate": args.rate, "hosts": args.hosts, "each": args.each, "mb": args.mb}
        about |= {"load": load}
        write(args.out, [about, *found])


if __name__ == "__main__":
    main()
