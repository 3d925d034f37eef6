"""How long does a run stand still when a worker is killed? torchrun and torchft beside us.

    python benchmarks/recovery.py [--kills 50] [--rounds 2] [--only NAME ...] [--json FILE]

Three workers on this machine, the same model, batch and optimizer, gloo, CPU. In each
round the systems have a turn, one after the other. In a turn a worker, drawn by
chance, gets SIGKILL at a moment drawn by chance, 0.5 to 1.5 s after the last step
that shows the full number of workers; then the next one, when it is full again.
A recovery is the time from the kill to the end of the next step that all workers
committed, the new one among them. torchrun restarts all from a checkpoint. torchft's
survivors go on, fewer, until the new one is there; so it has a figure for either.
Slow rivals get fewer kills (`--torchft-kills`, `--torchrun-kills`, each in a round).

Our run is "to the bit": at the end of each turn its parameters are compared with those
of an undisturbed run. torchft is installed into a virtual environment of its own, made in
a temporary folder or kept in `--environment`; without it the rest goes on.
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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from rivals.contender import Contender, Recovery, Step, end_tree, recovery, tail
from rivals.under_torchft import VERSION, UnderTorchft, make_environment
from rivals.under_torchrun import CHECKPOINT_EVERY, UnderTorchrun

import instep
from instep.events import STEPS, read_events
from instep.store.run_files import step_ends
from instep.store.run_folder import RunFolder

HERE = Path(__file__).parent
RECIPE = f"{HERE / 'recipes' / 'mlp.py'}:recipe"
TRAIN = {"determinism": "bits", "threads": 1}
LIMIT_S = 120.0
"""For a system to have its full number again; one that takes longer is given up."""

NEWEST = 5000
"""Records that are read while a recovery is awaited: many seconds of steps."""


class UnderInstep:
    """`instep run`, training without end in `folder`; to the bit, unless `settings` say else."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        global_batch: int,
        recipe: str = RECIPE,
        settings: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.workers, self.run = workers, folder / "disturbed"
        job = folder / "job.toml"
        job.write_text(f'name = "disturbed"\nrecipe = "{recipe}"\nworkers = {workers}\nseed = 7\n')
        train = {**TRAIN, "global_batch": global_batch, "steps": 1_000_000}
        keys = {**{f"train.{name}": value for name, value in train.items()}, **settings}
        sets = [word for k, v in keys.items() for word in ("--set", f"{k}={v}")]
        command = [sys.executable, "-m", "instep", "run", str(job), "--runs", str(folder), *sets]
        with (folder / "said").open("w") as said:
            self._process = subprocess.Popen(command, stdout=said, stderr=said)

    def alive(self) -> bool:
        return self._process.poll() is None

    def pids(self) -> list[int]:
        return newest_pids(self.run)

    def steps(self, newest: int | None = None) -> list[Step]:
        """A step belongs to the generation that had begun last when it ended."""
        started = [
            (e["time"], e["generation"], len(e["members"]))
            for e in read_events(self.run / "events.jsonl")
            if e["event"] == "generation_started"
        ]
        records = tail(self.run / "steps.bin", STEPS, newest)
        ends = step_ends(records)
        places = np.searchsorted([moment for moment, _, _ in started], ends) - 1
        found: dict[tuple[int, int], list[float]] = {}
        for number, end, place in zip(records["step"], ends, places, strict=True):
            if place >= 0:
                found.setdefault((int(number), int(place)), []).append(float(end))
        whole = [
            Step(number, max(of_step), started[place][2], started[place][1])
            for (number, place), of_step in found.items()
            if len(of_step) >= started[place][2]
        ]
        return sorted(whole, key=lambda step: step.end)

    def stop(self) -> None:
        """Cleanly, with the model saved."""
        time.sleep(1)  # so that it stops in a step and not in a recovery
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def end(self) -> None:
        end_tree(self._process.pid)
        self._process.wait()


def newest_pids(run: Path) -> list[int]:
    joined = [e for e in read_events(run / "events.jsonl") if e["event"] == "worker_joined"]
    return list({e["worker"]: e["pid"] for e in joined}.values())


def full_again(contender: Contender, moment: float, limit_s: float = LIMIT_S) -> bool:
    """Wait for a step of the full number, in a group that began after the moment."""
    deadline = time.monotonic() + limit_s
    while recovery(contender.steps(NEWEST), moment, contender.workers) is None:
        if time.monotonic() > deadline or not contender.alive():
            return False
        time.sleep(0.2)
    return True


def disturb(
    contender: Contender, kills: int, draw: random.Random, name: str, limit_s: float = LIMIT_S
) -> list[float]:
    """Kill so many workers, each when the number is full; the moments of those survived."""
    survived: list[float] = []
    going = full_again(contender, 0.0, limit_s)
    while going and len(survived) < kills:
        time.sleep(draw.uniform(0.5, 1.5))
        victim, moment = draw.choice(contender.pids()), time.time()
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:  # its system has ended it, or is about to replace it
            continue
        going = full_again(contender, moment, limit_s)
        if going:
            survived.append(moment)
            print(f"\r{name}: {len(survived)} of {kills} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return survived


def turn(
    make: Callable[[Path], Contender], name: str, kills: int, draw: random.Random
) -> tuple[list[Recovery], dict[str, object]]:
    """One system's turn: what each kill cost, and what else is known about it."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        known: dict[str, object] = {}
        contender = make(folder)
        try:
            moments = disturb(contender, kills, draw, name)
            if len(moments) < kills:
                known["given_up"] = f"no full number in {LIMIT_S:.0f} s, or it ended"
                print((folder / "said").read_text()[-3000:], file=sys.stderr)
            elif isinstance(contender, UnderInstep):
                contender.stop()
                known = sameness(contender.run, folder)
            steps = contender.steps()
        finally:
            contender.end()
    lengths = np.diff([step.end for step in steps])
    known["usual_step_s"] = round(float(np.median(lengths)), 4)
    known["load"] = round(os.getloadavg()[1], 1)
    found = (recovery(steps, moment, contender.workers) for moment in moments)
    return [each for each in found if each is not None], known


def sameness(
    path: Path,
    folder: Path,
    recipe: str = RECIPE,
    train: Mapping[str, object] = MappingProxyType({}),
    **job: Any,
) -> dict[str, object]:
    """Whether the disturbed run has the bits of an undisturbed one on one worker.

    `recipe`, `train` and `job`: what the disturbed run had, besides `TRAIN`.
    """
    run = RunFolder(path)
    steps = run.last("model_saved")["step"]
    given = {**TRAIN, "global_batch": run.spec.train.global_batch, **train, "steps": 1_000_000}
    given["stop_after_steps"] = steps
    job = {"name": "whole", "runs": folder, "seed": 7, "train": given, "workers": 1, **job}
    whole = instep.train(recipe, quiet=True, **job)
    hashes = whole.summary["parameters_sha256"], run.last("model_saved")["parameters_sha256"]
    return {
        "steps": steps,
        "same_bits_as_undisturbed": hashes[0] == hashes[1],
        "repeated_samples": run.audit.repeated,
        "missing_samples": run.audit.missing,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    shares = (("median", 50), ("p90", 90), ("p99", 99), ("worst", 100))
    return {name: round(float(np.percentile(values, share)), 3) for name, share in shares}


def summed_up(found: list[Recovery], ours: list[Recovery] | None) -> dict[str, object]:
    """Of one system: its percentiles, those over ours, and every value."""
    full = [each.full_s for each in found]
    summary: dict[str, object] = {"kills": len(found), "full_s": percentiles(full)}
    summary["first_s"] = percentiles([each.first_s for each in found])
    if ours:
        base = percentiles([each.full_s for each in ours])
        summary["full_over_ours"] = {k: round(percentiles(full)[k] / base[k], 1) for k in base}
    summary["steps_redone_median"] = float(np.median([each.redone for each in found]))
    summary["steps_reduced_median"] = float(np.median([each.reduced for each in found]))
    for name, values in zip(Recovery._fields, zip(*found, strict=True), strict=True):
        summary[f"all_{name}"] = [round(value, 3) for value in values]
    return summary


def table(systems: dict[str, dict[str, Any]]) -> str:
    head = "| kill to the next step of all, s | kills | median | p99 | worst | over ours (median) |"
    lines = [head + " first step of any, median | steps redone | at reduced strength |"]
    lines.append("|---" * 9 + "|")
    for name, of in systems.items():
        full, ratio = of["full_s"], of.get("full_over_ours", {"median": "-"})
        parts = [name, of["kills"], full["median"], full["p99"], full["worst"], ratio["median"]]
        parts += [of["first_s"]["median"], of["steps_redone_median"], of["steps_reduced_median"]]
        lines.append("| " + " | ".join(str(part) for part in parts) + " |")
    return "\n".join(lines)


def torchft_or_none(folder: Path) -> Path | None:
    """The Python that has torchft; None, said aloud, where it cannot be had."""
    print(f"torchft {VERSION}: making {folder}", file=sys.stderr)
    try:
        return make_environment(folder)
    except subprocess.CalledProcessError as error:
        why = (error.stderr or "").strip().splitlines() or ["no reason given"]
        print(f"torchft {VERSION} cannot be had, going on without: {why[-1]}", file=sys.stderr)
        return None


def measure(args: argparse.Namespace, temporary: Path) -> dict[str, Any]:
    size = {"workers": args.workers, "global_batch": args.global_batch}
    systems: dict[str, tuple[Callable[[Path], Contender], int]] = {
        "instep": (partial(UnderInstep, **size), args.kills),
        "torchrun": (partial(UnderTorchrun, **size), args.torchrun_kills),
    }
    systems = {name: each for name, each in systems.items() if name in args.only}
    if "torchft" in args.only:
        python = torchft_or_none(args.environment or temporary / "torchft")
        if python:
            systems["torchft"] = partial(UnderTorchft, python=python, **size), args.torchft_kills
    draw = random.Random(args.seed)
    found: dict[str, list[Recovery]] = {name: [] for name in systems}
    known: dict[str, list[dict[str, object]]] = {name: [] for name in systems}
    for _ in range(args.rounds):
        for name, (make, kills) in systems.items():
            of_turn, facts = turn(make, name, kills, draw)
            found[name] += of_turn
            known[name].append(facts)
    ours = found.get("instep")
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "torchft": VERSION,
        **size,
        "rounds": args.rounds,
        "torchrun_checkpoint_every_steps": CHECKPOINT_EVERY,
        "systems": {
            name: {**summed_up(each, ours if name != "instep" else None), "turns": known[name]}
            for name, each in found.items()
            if each
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="of ours, in each round")
    parser.add_argument("--torchft-kills", type=int, default=10)
    parser.add_argument("--torchrun-kills", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=126, help="a multiple of the workers")
    parser.add_argument("--seed", type=int, default=7)
    names = ["instep", "torchrun", "torchft"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--environment", type=Path, help="where torchft is, or is to be installed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.global_batch % args.workers:
        parser.error(f"--global-batch {args.global_batch} is no multiple of {args.workers} workers")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is ended on the way out
    with tempfile.TemporaryDirectory() as text:
        result = measure(args, Path(text))
    print(table(result["systems"]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
