"""How fast is a step with parameter servers, beside an all-reduce, and how full are the links?

    python benchmarks/servers.py [--rate 100mbit] [--megabytes 32] [--servers 4] [--rounds 3]
        [--backward-s 0] [--only NAME ...] [--codec int8]

One process in each of a few emulated hosts (needs root): four workers and their servers. Gradients
are there at once, so a step is exchange and update (SGD with momentum) and nothing else; or they
come evenly within `--backward-s` (slept), the last parameters' first. All contenders are in the
same processes and take turns. `goodput` is what a server receives in a step, the gradients of its
part from all workers, over what its link carries meanwhile; it sends as much. The limit is 0.956.
Bytes are those that a host's interface has sent or received, without headers (66 bytes a packet),
over those of theory: a worker sends its gradient and receives the parameters. With `--codec` all
contenders are there with it as well; theory counts its payloads then, and so does `goodput`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from sharded import HEADERS
from torch import nn
from torch._C._distributed_c10d import FileStore
from turns import write

from instep.comm.codecs import CODECS
from instep.comm.torch_comm import TorchComm
from instep.engine.served.optimizer import ServedUpdate
from instep.engine.update import Update
from instep.lab.netlab import Network, bits_per_s
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation, Servers
from instep.system.host_memory import HostMemory

WORKERS = 4


class Case(NamedTuple):
    """A contender."""

    servers: int
    options: Mapping[str, Any] = MappingProxyType({})
    codec: str = "none"

    @property
    def smaller(self) -> float:
        """How many times fewer bytes there are with the codec."""
        codec, count = CODECS[self.codec](), 1 << 18
        return 4 * count / float(codec.size(count))


def cases(servers: int, codec: str = "none") -> dict[str, Case]:
    """By name; the same in every process."""
    plain = {
        "all-reduce": Case(0),
        f"{servers} servers": Case(servers),
        f"{servers} servers, no overlap": Case(servers, {"overlap": False}),
        f"{servers} servers, copies": Case(servers, {"copy": True}),
        "1 server": Case(1),
    }
    if codec == "none":
        return plain
    coded = {
        f"{name}, {codec}": case._replace(codec=codec)
        for name, case in plain.items()
        if "copy" not in case.options
    }
    return plain | coded


def chosen(args: argparse.Namespace) -> dict[str, Case]:
    every = cases(args.servers, args.codec)
    return {name: every[name] for name in every if not args.only or name in args.only}


def traffic() -> tuple[int, int]:
    """Bytes that this host has received and sent, without headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "eth0":
            values = [int(value) for value in rest.split()]
            return values[0] - HEADERS * values[1], values[8] - HEADERS * values[9]
    raise SystemExit("there is no eth0 here")


class Contender:
    """One rank of a strategy, on gradients of its own."""

    def __init__(
        self, case: Case, comm: TorchComm, megabytes: int, backward_s: float = 0.0
    ) -> None:
        self.comm, self.number, self.pause_s = comm, 0, backward_s / megabytes
        self.case = case
        shapes = [(1 << 9, 1 << 9)] * megabytes  # a megabyte each
        self.parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        drawn = torch.Generator().manual_seed(comm.rank)
        self.gradients = [torch.randn(shape, generator=drawn) for shape in shapes]
        optimizer = torch.optim.SGD(self.parameters, lr=1e-3, momentum=0.9)
        kind, name = (ServedUpdate, "server_sync") if case.servers else (Update, "all_reduce")
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        self.update = kind(
            optimizer, None, self.parameters, seed=0, max_grad_norm=None, scaler=scaler
        )
        self.strategy, servers = make_strategy(name, case.options, case.codec), None
        if isinstance(self.update, ServedUpdate):
            servers = Servers(range(WORKERS, comm.size), self.update)
        self.memory = HostMemory()
        at = Attempt(0, 0, 1)
        self.strategy.start(
            self.parameters, comm, Generation(notes=8, memory=self.memory, at=at, servers=servers)
        )

    def step(self) -> None:
        """As the engine takes it, with a vote."""
        self.number += 1
        self.strategy.begin_step(Attempt(0, self.number, 1))
        if self.comm.rank < WORKERS:
            self.strategy.begin_pass(1 / WORKERS, last=True)
            for slot in reversed(range(len(self.gradients))):
                time.sleep(self.pause_s)
                self.strategy.gradient(slot, self.gradients[slot])
        assert self.strategy.exchange(torch.zeros(8, dtype=torch.float64)) is not None
        self.strategy.prepare(self.number, 1.0)
        self.comm.all_reduce(torch.ones(1)).wait()
        self.strategy.hand_out()
        self.strategy.apply(lambda: self.update.apply(self.number))


def rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    everyone = group("all", args, WORKERS + args.servers)
    contenders, found = dict[str, Contender](), dict[str, dict[str, list[float]]]()
    for name, case in chosen(args).items():
        if args.rank < WORKERS + case.servers:
            comm = group(name, args, WORKERS + case.servers)
            contenders[name] = Contender(case, comm, args.mb, args.backward_s)
            found[name] = {"seconds": [], "received": [], "sent": []}
        for _ in range(2):  # the first step is always one without a guess
            if name in contenders:
                contenders[name].step()
        everyone.all_reduce(torch.ones(1)).wait()
    for _ in range(args.rounds):
        for name in chosen(args):
            everyone.all_reduce(torch.ones(1)).wait()
            before, since = traffic(), time.perf_counter()
            if name in contenders:
                contenders[name].step()
                found[name]["seconds"].append(time.perf_counter() - since)
            everyone.all_reduce(torch.ones(1)).wait()
            for what, now, then in zip(("received", "sent"), traffic(), before, strict=True):
                if name in contenders:
                    found[name][what].append(now - then)
    if args.rank == 0:
        ends = {name: each.parameters[0].detach() for name, each in contenders.items()}
        for name, end in ends.items():
            if contenders[name].case.codec == "none":
                torch.testing.assert_close(end, ends["all-reduce"])
    (args.folder / f"rank{args.rank}").write_text(json.dumps(found))
    everyone.all_reduce(torch.ones(1)).wait()


def group(name: str, args: argparse.Namespace, size: int) -> TorchComm:
    store = FileStore(str(args.folder / f"meeting of {name}"), size)
    return TorchComm(store, args.rank, size, address=args.address, timeout_s=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of each host's link, as tc writes it")
    parser.add_argument("--megabytes", dest="mb", type=int, default=32, help="of parameters")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backward-s", type=float, default=0.0, help="in which gradients come")
    parser.add_argument("--codec", default="none", help="have all with it, too")
    parser.add_argument("--only", nargs="+", default=[], help="beside all-reduce")
    parser.add_argument("--out", type=Path)
    for hidden in ("--rank", "--address", "--folder"):
        kind: Any = {"--rank": int, "--folder": Path}.get(hidden, str)
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args)
        return
    known = [*cases(args.servers, args.codec)]
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"no contender is called {unknown[0]!r}. Known: {', '.join(known)}.")
    args.only = [known[0], *args.only] if args.only else known
    hosts = WORKERS + args.servers
    with tempfile.TemporaryDirectory() as folder, Network(hosts, rate=args.rate) as network:
        settings = [f"--servers={args.servers}", f"--rounds={args.rounds}"]
        settings += [f"--megabytes={args.mb}", f"--backward-s={args.backward_s}"]
        settings += [f"--codec={args.codec}", "--only", *args.only]
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
        found = [json.loads(Path(folder, f"rank{n}").read_text()) for n in range(hosts)]
    show(found, args)
    if args.out:
        how = {"rate": args.rate, "megabytes": args.mb, "backward_s": args.backward_s}
        how |= {"codec": args.codec}
        write(args.out, [{**how, "rank": n, **each} for n, each in enumerate(found)])


def show(found: list[dict[str, Any]], args: argparse.Namespace) -> None:
    rivals = found[0]["all-reduce"]["seconds"]
    for name, case in chosen(args).items():
        seconds = found[0][name]["seconds"]
        speeds = [rival / own for rival, own in zip(rivals, seconds, strict=True)]
        line = f"{name:22} {statistics.median(seconds):6.2f} s a step, "
        line += f"{statistics.median(speeds):.3f} times all-reduce "
        line += f"({min(speeds):.3f} to {max(speeds):.3f})"
        if case.servers:
            size = (args.mb << 20) / case.smaller
            goodput = WORKERS * size / case.servers / statistics.median(seconds)
            line += f", goodput {goodput / (bits_per_s(args.rate) / 8):.3f} each way"
            theory = {**dict.fromkeys(range(WORKERS), 1.0)}
            theory |= dict.fromkeys(range(WORKERS, WORKERS + case.servers), WORKERS / case.servers)
            for what in ("received", "sent"):
                over = [
                    statistics.median(found[rank][name][what]) / (size * times)
                    for rank, times in theory.items()
                ]
                line += f", {what} {min(over):.3f} to {max(over):.3f} of theory"
        print(line)


if __name__ == "__main__":
    main()
