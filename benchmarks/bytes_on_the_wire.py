"""Is a run's own count of bytes that of the kernel, and both what theory says?

    python benchmarks/bytes_on_the_wire.py [--only NAME ...] [--megabytes 24] [--json FILE]

Four workers, each on an emulated host (needs root), without encryption and with offloads switched
off, so that the counters of the hosts' interfaces have every packet. Each case is two runs of one
job, of `FEW` and `MANY` steps; their difference is what a step sends, without start, end and the
last checkpoint. `own` is `wire_bytes` of the runs' summaries, `theory` comes from the size of the
model and of the codec's payload. The kernel's bytes are without headers: 66 of each packet
(Ethernet, IPv4, TCP with timestamps), which are 66 of 1514 where packets are full.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from turns import write

from instep.client.submit import run_job
from instep.comm.codecs import CODECS
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.lab.emulated import emulated_hosts, on_hosts
from instep.lab.netlab import Network

RECIPE = Path(__file__).resolve().parent / "recipes" / "wide.py"
WORKERS, FEW, MANY, WIDTH = 4, 3, 13, 1024
HEADERS, PACKET = 66, 1514
SERVER = ["sync.name=server_sync"]
ROUNDS = [f"sync.participants={WORKERS}", "sync.options.local_steps=2"]


class Case(NamedTuple):
    """What is counted."""

    settings: Sequence[str]
    codec: str = "none"
    """Of the matrices."""
    servers: int = 0


CODED = ["bfloat16", "float16", "int8", "int4", "sign", "top_k"]
CASES = {
    "all_reduce": Case([]),
    **{f"all_reduce, {name}": Case([f"sync.codec={name}"], name) for name in CODED},
    "all_reduce, powersgd": Case(
        ["sync.codec=powersgd", "sync.codec_options.start_after=0"], "powersgd"
    ),
    "server_sync, 1 server": Case(SERVER, servers=1),
    **{
        f"server_sync, 1 server, {name}": Case([*SERVER, f"sync.codec={name}"], name, 1)
        for name in CODED
    },
    "averaging": Case(["sync.name=averaging", *ROUNDS]),
    "averaging, int4": Case(["sync.name=averaging", "sync.codec=int4", *ROUNDS], "int4"),
    "diloco, int4": Case(["sync.name=diloco", "sync.codec=int4", *ROUNDS], "int4"),
}


def theory(case: Case, megabytes: int) -> float:
    """Bytes that all hosts send in a step."""
    rows = megabytes * 250_000 // WIDTH
    matrices, vectors = [(WIDTH, rows), (rows, 1)], rows + 1
    if case.codec == "powersgd":
        rank = 4
        coded = sum(4 * rank * (a + b) if min(a, b) > rank else 4 * a * b for a, b in matrices)
    else:
        coded = CODECS[case.codec]().size(sum(a * b for a, b in matrices))
    times = WORKERS if case.servers else WORKERS - 1  # to a server, or around the ring; and back
    return 2 * times * (coded + 4 * vectors)


def counted(job: JobSpec, network: Network, folder: Path) -> tuple[float, float, float]:
    """Of a run on all hosts: the kernel's payload bytes and its bytes of all, and the run's own."""
    before = [network.traffic(host) for host in network.hosts]
    summary = run_job(job, folder, named=True, quiet=True).summary
    after = [network.traffic(host) for host in network.hosts]
    pairs = list(zip(after, before, strict=True))
    whole = sum(now.sent_bytes - then.sent_bytes for now, then in pairs)
    packets = sum(now.sent_packets - then.sent_packets for now, then in pairs)
    return whole - HEADERS * packets, whole, summary["wire_bytes"]


def measured(name: str, megabytes: int, folder: Path) -> dict[str, Any]:
    case, found = CASES[name], []
    file = folder / "job.toml"
    file.write_text(
        f'name = "bytes"\nrecipe = "{RECIPE}:recipe"\nworkers = {WORKERS}\n'
        "[train]\nglobal_batch = 16\nmicro_batches = 4\nthreads = 1\n"
        f"[arguments]\nmegabytes = {megabytes}\n"
    )
    with emulated_hosts(WORKERS + case.servers) as network:
        for steps in (FEW, MANY):
            settings = [f"train.steps={steps}", f'name="run-{steps}"', *case.settings]
            job = on_hosts(spec_file.load(file, settings), network)
            if case.servers:
                job = with_servers(job, case.servers, network)
            found.append(counted(job, network, folder))
    kernel, whole, own = ((many - few) / (MANY - FEW) for few, many in zip(*found, strict=True))
    wanted = theory(case, megabytes)
    return {
        "name": name, "kernel_of_a_step": round(kernel), "theory_of_a_step": round(wanted),
        "own_over_kernel": round(own / kernel, 4),
        "kernel_over_theory": round(kernel / wanted, 4),
        "with_headers_over_model": round(whole / (own * PACKET / (PACKET - HEADERS)), 4),
        "own_over_kernel_whole_run": round(found[1][2] / found[1][0], 4),
    }  # fmt: skip


def with_servers(job: JobSpec, servers: int, network: Network) -> JobSpec:
    """The servers on hosts of their own."""
    enter = tuple(f"ip netns exec {network.name}-{host}" for host in network.hosts)
    launch = msgspec.structs.replace(job.launch, hosts=enter)
    sync = msgspec.structs.replace(job.sync, servers=servers)
    return msgspec.structs.replace(job, launch=launch, sync=sync)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--megabytes", type=int, default=24, help="of parameters")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measured(name, args.megabytes, Path(folder)))
        print(json.dumps(results[-1]), flush=True)
        if args.json:
            about = {"megabytes": args.megabytes, "load": os.getloadavg()[0]}
            write(args.json, [about, *results])


if __name__ == "__main__":
    main()
