"""Who commits while the network between hosts is broken, and how long does a run stand still?

    python benchmarks/partitions.py [--partitions 50] [--hosts 5] [--seed 1] [--json FILE]

One run, a worker on each emulated host (`instep netlab`), to the bit. Again and again some of the
hosts, drawn by chance, are cut off from the others and from the master (packets vanish,
nobody is told), and after 2 to 5 s the network is healed. Every process writes down each move
of its parameters beside the run's own recorder. Told are:

- moves on the side without the master: after the cut, and once the lease has run out;
- from the cut to the next step that the full number of workers committed;
- from the healing until the run knows all hosts again, and has a worker on each;
- repeated and missing samples, and whether the parameters are those of an undisturbed run.

Needs Linux, iproute2 and root. The master is on this machine, beside the hosts that are left.
"""

import argparse
import datetime
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipes.tells_moves import read, space_of
from rivals.contender import end_tree, tail

from instep.comm.protocol.heartbeat_lease import LEASE_S
from instep.events import STEPS, read_events
from instep.lab.namespaces import NetworkError
from instep.lab.netlab import OUTSIDE, Network
from instep.store.run_files import step_ends
from instep.store.run_folder import RunFolder

RECIPE = f"{Path(__file__).parent / 'recipes' / 'tells_moves.py'}:recipe"
TRAIN = {"determinism": "bits", "threads": 1, "global_batch": 16, "micro_batches": 8}
LIMIT_S = 120.0
"""For a run to have its full number again."""

NEWEST = 4000
"""Records that are read while a step is awaited."""


class Broken:
    """A run on emulated hosts, to be broken."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.run, self.moves = network, folder / "disturbed", folder / "moves"
        self.moves.mkdir()
        job = folder / "job.toml"
        hosts = [f"ip netns exec {network.name}-{host}" for host in network.hosts]
        train = "\n".join(f"{key} = {json.dumps(value)}" for key, value in TRAIN.items())
        job.write_text(
            f'name = "disturbed"\nrecipe = "{RECIPE}"\nworkers = {len(hosts)}\nseed = 7\n'
            f'network = "private"\n[train]\n{train}\nsteps = 1000000\n'
            f"[launch]\nhosts = {json.dumps(hosts)}\n"
            f'address = "{network.address(OUTSIDE)}"\n'
            f'[checkpoint]\nevery = 100\n[arguments]\nfolder = "{self.moves}"\n'
        )
        with (folder / "said").open("w") as said:
            command = [sys.executable, "-m", "instep", "run", str(job), "--runs", str(folder)]
            self._process = subprocess.Popen(
                command, stdout=said, stderr=said, start_new_session=True
            )
        self._said = folder / "said"

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run / "events.jsonl") if e["event"] == name]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"not {what}:\n{self._said.read_text()[-2000:]}")
            time.sleep(0.05)

    def full_step_after(self, moment: float) -> float | None:
        """When the full number of workers had committed a step that it began after a moment."""
        records = tail(self.run / "steps.bin", STEPS, NEWEST)
        records = records[records["begin"] > moment]
        ends = step_ends(records)
        for step in np.unique(records["step"]):
            of_step = records["step"] == step
            if len(set(records["worker"][of_step].tolist())) == len(self.network.hosts):
                return float(ends[of_step].max())
        return None

    @property
    def hosts_there(self) -> int:
        """How many hosts the master knows to live."""
        there: dict[int, bool] = {}
        for event in read_events(self.run / "events.jsonl"):
            if event["event"] in ("host_joined", "host_lost"):
                there[event["host"]] = event["event"] == "host_joined"
        return sum(there.values())

    @property
    def spread(self) -> bool:
        """Whether each host has one of the workers."""
        places = {e["worker"]: e["host"] for e in self.events("worker_joined")}
        members = self.events("generation_started")[-1]["members"]
        return len({places[worker] for worker in members}) == len(self.network.hosts)

    def stop(self) -> None:
        """Cleanly, with the model saved."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def end(self) -> None:
        end_tree(self._process.pid)
        self._process.wait()


def spaces(network: Network, hosts: list[str]) -> set[int]:
    """The namespaces of hosts, by number."""
    found = set()
    for host in hosts:
        program = network.run(host, ["sleep", "60"])
        while (space := space_of(program.pid)) == space_of("self"):
            time.sleep(0.005)  # it has not entered yet
        program.kill()
        program.wait()
        found.add(space)
    return found


def cut_and_heal(broken: Broken, away: list[str], hold_s: float) -> dict[str, Any]:
    """One partition, from the cut until the run is as it was."""
    network, began = broken.network, time.time()
    cut = time.monotonic()
    network.partition(away)
    time.sleep(max(0.0, cut + hold_s - time.monotonic()))
    healed, healed_at = time.monotonic(), time.time()
    network.heal()
    broken.until(lambda: broken.full_step_after(began) is not None, "a step of the full number")
    broken.until(lambda: broken.hosts_there == len(network.hosts), "all hosts known again")
    broken.until(lambda: broken.spread, "a worker on each host again")
    spread_s = time.monotonic() - healed
    lost = [e["host"] for e in broken.events("host_lost") if e["time"] > began]
    back = [e["time"] for e in broken.events("host_joined") if e["time"] > healed_at]
    return {
        "cut_off": away,
        "cut": cut,
        "healed": healed,
        "noticed": bool(lost),
        "still_s": (broken.full_step_after(began) or 0.0) - began,
        "back_s": max(back, default=healed_at) - healed_at,
        "spread_s": spread_s,
    }


def check_sides(broken: Broken, partitions: list[dict[str, Any]]) -> None:
    """How often parameters moved on either side of each partition."""
    where = {host: spaces(broken.network, [host]) for host in broken.network.hosts}
    moves = read(broken.moves)
    for each in partitions:
        away = set().union(*(where[host] for host in each["cut_off"]))
        begin, end = each.pop("cut"), each.pop("healed")
        counts = {True: [0, 0], False: [0, 0]}
        for space, moments in moves.items():
            for place, since in enumerate((begin, begin + LEASE_S)):
                count = int(((moments > since) & (moments < end)).sum())
                counts[space in away][place] += count
        each["moves_without_master"], each["moves_after_lease_without_master"] = counts[True]
        each["moves_with_master"], each["moves_after_lease_with_master"] = counts[False]


def undisturbed(folder: Path, steps: int) -> str:
    """The parameters of the same job on one process of this machine, as a sum."""
    job = folder / "job.toml"
    command = [sys.executable, "-m", "instep", "run", str(job), "--runs", str(folder)]
    sets = {
        "name": "undisturbed",
        "workers": 1,
        "train.stop_after_steps": steps,
        "launch.hosts": "[]",
        "launch.address": "",
        "arguments.folder": "",
    }
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    subprocess.run([*command, *words], check=True, capture_output=True)
    return str(RunFolder(folder / "undisturbed").last("model_saved")["parameters_sha256"])


def measure(partitions: int, hosts: int, seed: int) -> dict[str, Any]:
    """Break one run so many times."""
    draw, done = random.Random(seed), []
    with tempfile.TemporaryDirectory() as text, Network(hosts) as network:
        folder = Path(text)
        broken = Broken(network, folder)
        try:
            broken.until((broken.run / "steps.bin").exists, "begun")
            broken.until(lambda: broken.full_step_after(0.0) is not None, "training")
            for number in range(partitions):
                time.sleep(draw.uniform(0.5, 2.5))  # the moment is what is drawn
                away = draw.sample(network.hosts, draw.randint(1, hosts - 1))
                done.append(cut_and_heal(broken, away, draw.uniform(2.0, 5.0)))
                print(f"\r{number + 1} of {partitions} ", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            time.sleep(1)
            broken.stop()
        finally:
            broken.end()
        check_sides(broken, done)
        run = RunFolder(broken.run)
        summary = json.loads((broken.run / "summary.json").read_text())
        sums = [run.last("model_saved").get("parameters_sha256")]
        sums.append(undisturbed(folder, summary["steps"]))
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "hosts": hosts,
        "seed": seed,
        "partitions": len(done),
        "steps": summary["steps"],
        "generations": summary["generations"],
        "went_back": len(run.named("went_back")),
        "repeated_samples": summary["repeated_samples"],
        "missing_samples": summary["missing_samples"],
        "same_bits_as_undisturbed": sums[0] == sums[1],
        "partitions_in_which_both_sides_moved": sum(
            bool(each["moves_after_lease_without_master"]) for each in done
        ),
        "most_moves_of_a_cut_off_worker_after_the_cut": max(
            (-(-each["moves_without_master"] // len(each["cut_off"])) for each in done), default=0
        ),
        "still_s": spread([each["still_s"] for each in done]),
        "back_s": spread([each["back_s"] for each in done]),
        "spread_s": spread([each["spread_s"] for each in done]),
        "each": done,
    }


def spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    median, worst = float(np.median(values)), max(values)
    return {"median": round(median, 2), "worst": round(worst, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=50)
    parser.add_argument("--hosts", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.hosts < 2:
        parser.error("--hosts: a network that can be broken has 2 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is ended on the way out
    try:
        result = measure(args.partitions, args.hosts, args.seed)
    except NetworkError as error:
        print(f"partitions: {error}", file=sys.stderr)
        return 1
    print(json.dumps({k: v for k, v in result.items() if k != "each"}, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
