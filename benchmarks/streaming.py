"""How evenly does DiLoCo with fragments use a line, and how long do participants wait for it?

    python benchmarks/streaming.py [--hosts 2] [--rate 100mbit] [--fragments 4] [--codec none]

One worker and one participant on each emulated host (needs root). A local step sleeps a tenth of a
second, so that two cores are enough. Runs: plain `diloco`, fragments without a delay, and
fragments with one as long as fits. For each: the most bytes that a host sent in the time of one
fragment's turn over the mean of that (peak), and what part of the time its worker waited for an
exchange (stall), from the second turn of all parameters on.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import instep
from instep.lab.emulated import emulated_hosts
from instep.lab.netlab import Network
from instep.store.run_folder import RunFolder

RECIPE = Path(__file__).parent / "recipes" / "sleeps.py"
LOCAL_STEPS = 20
TURNS = 6
"""Of all parameters; the first is not measured."""
LOOK_S = 0.1


class Meter:
    """Looks at what a host has sent, again and again."""

    def __init__(self, network: Network, host: str) -> None:
        self.seen: list[tuple[float, int]] = []
        self._network, self._host, self._over = network, host, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.seen.append((time.time(), self._network.traffic(self._host).sent_bytes))

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def at(self, when: float) -> float:
        """Bytes sent by then."""
        before = [each for each in self.seen if each[0] <= when]
        return float(before[-1][1]) if before else 0.0


def measured(args: argparse.Namespace, options: dict[str, Any], network: Network) -> dict[str, Any]:
    """Peak and stall of one run."""
    fragments = options.get("fragments", 1)
    sync = {
        "name": "diloco",
        "participants": args.hosts,
        "codec": args.codec,
        "options": {"local_steps": LOCAL_STEPS, **options},
    }
    hosts = [f"ip netns exec {network.name}-{host}" for host in network.hosts]
    meter = Meter(network, network.hosts[0])
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = instep.train(
                f"{RECIPE}:recipe",
                workers=args.hosts,
                network="private",
                launch={"hosts": hosts, "address": network.address("outside")},
                train={"steps": TURNS * fragments, "global_batch": args.hosts, "threads": 1},
                sync=sync,
                arguments={"step_s": args.step_s, "width": args.width},
                runs=folder,
                quiet=True,
            )
        finally:
            meter.end()
        steps = RunFolder(done.path).steps
    own = steps[(steps["worker"] == 0) & (steps["step"] > fragments)]
    begins = own["begin"][:-1].tolist()  # the last commit agrees on everything
    spent = begins[-1] - begins[0]
    turn = spent / (len(begins) - 1) * fragments / args.fragments
    end, at, windows = begins[-1], begins[0], []
    while at + turn <= end + 1e-6:
        windows.append(meter.at(at + turn) - meter.at(at))
        at += turn
    waited = float((own["wire_s"] + own["wait_s"])[:-1].sum())
    mean = sum(windows) / len(windows)
    return {
        "peak": round(max(windows) / mean, 3),
        "stall": round(float(own["wire_s"][:-1].sum()) / spent, 4),
        "waiting": round(waited / spent, 4),
        "kb_per_turn": round(mean / 1e3, 1),
        "seconds": round(spent, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    each = LOCAL_STEPS // args.fragments
    kinds: dict[str, dict[str, Any]] = {
        "diloco": {},
        "fragments": {"fragments": args.fragments},
        "fragments, delay": {"fragments": args.fragments, "delay": each - 1},
        "fragments, whole delay": {"fragments": args.fragments, "delay": each},
    }
    found: dict[str, Any] = {}
    for name, options in kinds.items():
        with emulated_hosts(args.hosts, args.rate) as network:
            found[name] = measured(args, options, network)
        print(json.dumps({name: found[name]}), flush=True)
    facts = {
        "date": datetime.date.today().isoformat(),
        "load": os.getloadavg()[0],
        "machine": platform.platform(),
        "torch": torch.__version__,
        **{key: getattr(args, key) for key in ("hosts", "rate", "fragments", "codec", "width")},
        "step_s": args.step_s,
    }
    print(json.dumps({**facts, "found": found}, indent=1))
    if args.out:
        args.out.write_text(json.dumps({**facts, "found": found}, indent=1))


if __name__ == "__main__":
    main()
