"""How many updates a second do several servers make without lockstep, where links are the limit?

    python benchmarks/leased_servers.py [--rate 100mbit] [--copies 32768] [--servers 1 2 4]
        [--codec none] [--rounds 2] [--updates 48]

Four workers that compute next to nothing, and their servers, each on an emulated host of its own
(needs root), not encrypted. Parameters (256 bytes for each of `--copies`) and a gradient travel for
each update. Updates a second are those between the end of the first and of the last step. With one
server its link can carry at most one update in the time of the parameters; with more, the limit is
the workers' links, which carry both ways in turn. With several codecs (`--codec none int8`) each is
run in turn, with each number of servers.
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


def run(servers: int, codec: str, args: argparse.Namespace) -> tuple[float, float]:
    """Updates a second, and bytes that were sent for each."""
    with tempfile.TemporaryDirectory() as name, netlab.Network(WORKERS + 4, rate=args.rate) as net:
        hosts = json.dumps([f"ip netns exec {net.name}-{host}" for host in net.hosts])
        folder = Path(name)
        job = folder / "job.toml"
        job.write_text(
            f'name = "servers"\nrecipe = "{RECIPE}"\nworkers = {WORKERS}\nnetwork = "private"\n'
            f"[train]\nsteps = {args.updates // PARTS}\nglobal_batch = 16\n"
            f'micro_batches = {PARTS}\n[sync]\nname = "server_async"\nservers = {servers}\n'
            f'codec = "{codec}"\n'
            f'[checkpoint]\nevery = "never"\n[arguments]\ncopies = {args.copies}\nsample_s = 0.0\n'
            f'[launch]\nhosts = {hosts}\naddress = "{net.address(netlab.OUTSIDE)}"\n'
        )
        command = [sys.executable, "-m", "instep", "run", str(job)]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(ended.stderr)
        done = RunFolder(folder / "runs" / "servers")
        begins = done.steps_of(WORKERS)["begin"]
        rate = float(PARTS * (len(begins) - 2) / (begins[-1] - begins[1]))
        summary = json.loads((done.path / "summary.json").read_text())
        return rate, summary["wire_bytes"] / len(done.ledger)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--copies", type=int, default=32768)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--codec", nargs="+", default=["none"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=48)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begin = os.getloadavg()[0]
    cases = [(codec, servers) for codec in args.codec for servers in args.servers]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for codec, servers in cases:
            found[codec, servers].append(run(servers, codec, args))
            rate, sent = found[codec, servers][-1]
            print(f"{codec}, {servers} servers: {rate:.2f} updates/s, {sent:,.0f} bytes each")
            sys.stdout.flush()
    once = args.copies * 256 * 8 / netlab.bits_per_s(args.rate)
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "load": [round(begin, 1), round(os.getloadavg()[0], 1)],
        "rate": args.rate,
        "parameter_bytes": args.copies * 256,
        "seconds_for_parameters": round(once, 3),
        "cases": [
            {
                "codec": codec,
                "servers": servers,
                "updates_per_s": [round(rate, 2) for rate, _ in each],
                "bytes_per_update": [round(sent) for _, sent in each],
            }
            for (codec, servers), each in found.items()
        ],
    }
    middle = {case: statistics.median(rate for rate, _ in each) for case, each in found.items()}
    for codec, servers in cases:
        ratio = middle[codec, servers] / middle[cases[0]]
        print(f"{codec}, {servers} servers: {middle[codec, servers]:.2f} updates/s, {ratio:.2f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
