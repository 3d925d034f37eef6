"""How many updates a second do several servers make without lockstep, where links are the limit?

    python benchmarks/leased_servers.py [--rate 100mbit] [--copies 32768] [--servers 1 2 4]
        [--rounds 2] [--updates 48]

Four workers that compute next to nothing, and their servers, each on an emulated host of its own
(needs root), not encrypted. Parameters (256 bytes for each of `--copies`) and a gradient travel for
each update. Updates a second are those between the end of the first and of the last step. With one
server its link can carry at most one update in the time of the parameters; with more, the limit is
the workers' links, which carry both ways in turn.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from instep.lab import netlab
from instep.store.run_folder import RunFolder

WORKERS, PARTS = 4, 4
RECIPE = f"{Path(__file__).parent / 'recipes' / 'adds_up.py'}:recipe"


def updates_per_s(servers: int, args: argparse.Namespace) -> float:
    """Of one run."""
    with tempfile.TemporaryDirectory() as name, netlab.Network(WORKERS + 4, rate=args.rate) as net:
        hosts = json.dumps([f"ip netns exec {net.name}-{host}" for host in net.hosts])
        folder = Path(name)
        job = folder / "job.toml"
        job.write_text(
            f'name = "servers"\nrecipe = "{RECIPE}"\nworkers = {WORKERS}\nnetwork = "private"\n'
            f"[train]\nsteps = {args.updates // PARTS}\nglobal_batch = 16\n"
            f'micro_batches = {PARTS}\n[sync]\nname = "server_async"\nservers = {servers}\n'
            f'[checkpoint]\nevery = "never"\n[arguments]\ncopies = {args.copies}\nsample_s = 0.0\n'
            f'[launch]\nhosts = {hosts}\naddress = "{net.address(netlab.OUTSIDE)}"\n'
        )
        command = [sys.executable, "-m", "instep", "run", str(job)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        begins = RunFolder(folder / "runs" / "servers").steps_of(WORKERS)["begin"]
        return float(PARTS * (len(begins) - 2) / (begins[-1] - begins[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--copies", type=int, default=32768)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=48)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begin = os.getloadavg()[0]
    found: dict[int, list[float]] = {servers: [] for servers in args.servers}
    for _ in range(args.rounds):
        for servers in args.servers:
            found[servers].append(updates_per_s(servers, args))
            print(f"{servers} servers: {found[servers][-1]:.2f} updates/s", flush=True)
    once = args.copies * 256 * 8 / netlab.bits_per_s(args.rate)
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "load": [round(begin, 1), round(os.getloadavg()[0], 1)],
        "rate": args.rate,
        "parameter_bytes": args.copies * 256,
        "seconds_for_parameters": round(once, 3),
        "updates_per_s": {servers: [round(n, 2) for n in each] for servers, each in found.items()},
    }
    for servers, each in found.items():
        ratio = statistics.median(each) / statistics.median(found[args.servers[0]])
        print(f"{servers} servers: {statistics.median(each):.2f} updates/s, {ratio:.2f} times")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
