"""What does encryption between hosts cost, and do strangers slow a run that is encrypted?

    python benchmarks/encryption.py links [--rates 1gbit 100mbit] [--turns 3] [--json FILE]
    python benchmarks/encryption.py strangers [--idle 2000] [--turns 8] [--json FILE]

`links`: two emulated hosts (see `instep netlab`)
with a worker each, whose steps are mostly exchange of a
large gradient. Whole runs take turns, encrypted and with `network = "private"`. Told are the median
time of a step, as a ratio, and the processor time of a forwarder, as a share of one core.

`strangers`: a run of two hosts that are both this machine, reached at its own address. Told is the
median time of a step alone; while 2,000 connections are open that say nothing; and while random
frames arrive, a hundred connections a second.

Needs Linux; `links` needs iproute2 and root.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rivals.contender import end_tree, tail

from instep.client.join import meeting
from instep.client.running import FILE
from instep.events import STEPS
from instep.lab.netlab import OUTSIDE, Network
from instep.system.addresses import address_towards
from instep.system.processes import FORWARDER

RECIPES = Path(__file__).parent / "recipes"
WARM_UP = 5
LIMIT_S = 300.0


class Run:
    """A run of two workers on two hosts, as a program of its own."""

    def __init__(
        self, folder: Path, recipe: str, hosts: list[str], address: str, steps: int, extra: str
    ) -> None:
        self.folder = folder / "run"
        job = folder / "job.toml"
        job.write_text(
            f'name = "run"\nrecipe = "{RECIPES / recipe}"\nworkers = 2\nseed = 7\n{extra}\n'
            f"[train]\nsteps = {steps}\nglobal_batch = 16\nthreads = 1\n"
            f"[launch]\nhosts = {json.dumps(hosts)}\n"
            f'address = "{address}"\n[checkpoint]\nevery = "never"\n'
        )
        self._said = folder / "said"
        with self._said.open("w") as said:
            command = [sys.executable, "-m", "instep", "run", str(job), "--runs", str(folder)]
            self.process = subprocess.Popen(
                command, stdout=said, stderr=said, start_new_session=True
            )

    def until(self, step: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.step < step:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"no step {step}:\n{self._said.read_text()[-2000:]}")
            time.sleep(0.05)

    @property
    def step(self) -> int:
        """The newest step of which a worker has told."""
        if not (self.folder / "steps.bin").exists():
            return 0
        return int(max(tail(self.folder / "steps.bin", STEPS, 4)["step"], default=0))

    def begins(self, first: int, last: int) -> Any:
        """When worker 0 began each of these steps."""
        records = tail(self.folder / "steps.bin", STEPS, 1 << 20)
        records = records[(records["worker"] == 0)]
        wanted = (records["step"] >= first) & (records["step"] <= last)
        return np.sort(records["begin"][wanted])

    def step_s(self, first: int, last: int) -> float:
        """The median time from the begin of a step to that of the next."""
        return float(np.median(np.diff(self.begins(first, last))))

    def forwarders_s(self) -> float:
        """Processor seconds of all forwarders so far."""
        total = 0.0
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if (
                    process.name() == FORWARDER
                    or "instep.comm.encryption.forwarding" in process.cmdline()
                ):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def end(self) -> None:
        end_tree(self.process.pid)
        self.process.wait()


def one_link(rate: str, steps: int, network_key: str, megabytes: int) -> dict[str, float]:
    """A run over links of a rate."""
    extra = f'network = "{network_key}"\narguments = {{ megabytes = {megabytes} }}'
    with tempfile.TemporaryDirectory() as name, Network(2, rate=rate) as network:
        hosts = [f"ip netns exec {network.name}-{host}" for host in network.hosts]
        address = network.address(OUTSIDE)
        run = Run(Path(name), "wide.py:recipe", hosts, address, 100_000, extra)
        try:
            run.until(WARM_UP)
            first, began, cpu_s = run.step, time.monotonic(), run.forwarders_s()
            run.until(first + steps)
            wall_s, cpu_s = time.monotonic() - began, run.forwarders_s() - cpu_s
            last = run.step
            return {
                "step_s": run.step_s(first, last),
                "core_share_of_a_forwarder": cpu_s / 2 / wall_s,
            }
        finally:
            run.end()


def links(rates: list[str], turns: int, steps: int, megabytes: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rate in rates:
        each: dict[str, list[dict[str, float]]] = {"private": [], "loopback": []}
        for turn in range(turns):
            order = ["private", "loopback"] if turn % 2 else ["loopback", "private"]
            for key in order:
                each[key].append(one_link(rate, steps, key, megabytes))
        ratios = [
            secured["step_s"] / plain["step_s"]
            for secured, plain in zip(each["loopback"], each["private"], strict=True)
        ]
        shares = [turn["core_share_of_a_forwarder"] for turn in each["loopback"]]
        found[rate] = {
            "step_s_private": [turn["step_s"] for turn in each["private"]],
            "step_s_encrypted": [turn["step_s"] for turn in each["loopback"]],
            "encrypted_over_private": {
                "median": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            },
            "core_share_of_a_forwarder": shares,
        }
        print(
            f"{rate}: a step encrypted takes {statistics.median(ratios):.3f} of one in plain "
            f"({min(ratios):.3f} to {max(ratios):.3f}, {turns} turns); a forwarder takes "
            f"{statistics.median(shares):.1%} of a core",
            flush=True,
        )
    return found


def strangers(idle: int, seconds: float, turns: int) -> dict[str, Any]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 3 * idle + 1000), most))
    found: dict[str, Any] = {}
    own = address_towards("192.0.2.1")
    with tempfile.TemporaryDirectory() as name:
        hosts = ["env HOST=1", "env HOST=2"]
        extra = "arguments = { megabytes = 1 }"
        run = Run(Path(name), "wide.py:recipe", hosts, own, 10_000_000, extra)
        try:
            run.until(50)
            endpoint = meeting.read(meeting.MeetingFile(run.folder / FILE))
            assert endpoint is not None
            assert endpoint.credentials is not None

            def measure() -> float:
                first = run.step
                time.sleep(seconds)
                return run.step_s(first, run.step)

            over = threading.Event()

            def make_noise() -> None:
                while not over.wait(0.01):
                    with (
                        contextlib.suppress(OSError),
                        socket.create_connection(endpoint.address, 5) as one,
                    ):
                        one.sendall(b"\x16\x03\x01\x01\x00" + os.urandom(256))

            for turn in range(turns):
                alone = measure()
                with contextlib.ExitStack() as stack:
                    for _ in range(idle):
                        one = socket.create_connection(endpoint.address, 20)
                        stack.enter_context(one)
                    with_idle = measure()
                thread = threading.Thread(target=make_noise)
                over.clear()
                thread.start()
                with_noise = measure()
                over.set()
                thread.join()
                found[f"turn {turn}"] = {
                    "step_s_alone": alone,
                    f"step_s_with_{idle}_idle": with_idle,
                    "step_s_with_noise": with_noise,
                }
                print(
                    f"a step takes {1000 * alone:.2f} ms alone, {with_idle / alone:.3f} of that "
                    f"with {idle} idle connections, {with_noise / alone:.3f} while random frames "
                    "arrive",
                    flush=True,
                )
            if run.process.poll() is not None:
                raise RuntimeError("the run has ended.")
            every = [list(each.values()) for each in found.values()]
            for place, what in ((1, "idle connections"), (2, "random frames")):
                ratio = statistics.median(each[place] / each[0] for each in every)
                print(f"{what}: {ratio:.3f} in the median of {turns} turns")
        finally:
            run.end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["links", "strangers"])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=24, help="of the gradient")
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = os.getloadavg()[0]
    if args.what == "links":
        found = links(args.rates, args.turns, args.steps, args.megabytes)
    else:
        found = strangers(args.idle, args.seconds, args.turns)
    if args.json:
        about = {
            "date": datetime.date.today().isoformat(),
            "cores": os.cpu_count(),
            "machine": platform.platform(),
            "torch": torch.__version__,
            "load_before": began,
        }
        args.json.write_text(json.dumps({**about, args.what: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
