"""How long does a run stand still when a worker is killed, and does its result show it?

    python benchmarks/recovery.py [--kills 100] [--workers 3] [--seed 7] [--json FILE]

A run to the bit on this machine; now and then a worker, drawn by chance, gets
SIGKILL at a moment drawn by chance. Recovery is the time from the signal to
the end of the next step that all workers committed, as `instep chaos` counts
it. At the end the parameters are compared with those of an undisturbed run.
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
from pathlib import Path

import torch

import instep
from instep.events import STEPS, read_events, read_records
from instep.report.recovery import quantiles, recoveries
from instep.report.run_folder import RunFolder

HERE = Path(__file__).parent
RECIPE = f"{HERE / 'recipes' / 'mlp.py'}:recipe"
TRAIN = {"global_batch": 128, "determinism": "bits", "threads": 1}


def newest_pids(run: Path) -> list[int]:
    joined = [e for e in read_events(run / "events.jsonl") if e["event"] == "worker_joined"]
    return list({e["worker"]: e["pid"] for e in joined}.values())


def steps_so_far(run: Path) -> int:
    return int(read_records(run / "steps.bin", STEPS)["step"].max(initial=0))


def disturb(folder: Path, kills: int, workers: int, seed: int) -> tuple[Path, list[float]]:
    """Run until so many kills have been survived, then stop; the run's folder, and the moments."""
    draw, run = random.Random(seed), folder / "disturbed"
    moments: list[float] = []
    job = folder / "job.toml"
    job.write_text(f'name = "disturbed"\nrecipe = "{RECIPE}"\nworkers = {workers}\nseed = 7\n')
    settings = ["train.steps=1000000", *(f"train.{k}={v}" for k, v in TRAIN.items())]
    sets = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "instep", "run", str(job), "--runs", str(folder), *sets]
    with (folder / "said").open("w") as said:
        program = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        while not run.is_dir() or not steps_so_far(run):
            assert program.poll() is None, (folder / "said").read_text()
            time.sleep(0.1)
        while len(moments) < kills:
            time.sleep(draw.uniform(0.5, 1.5))
            assert program.poll() is None, (folder / "said").read_text()
            try:
                os.kill(draw.choice(newest_pids(run)), signal.SIGKILL)
            except ProcessLookupError:
                continue
            moments.append(time.time())
            print(f"\r{len(moments)} of {kills} killed", end="", file=sys.stderr, flush=True)
        time.sleep(3)
        program.send_signal(signal.SIGTERM)
        program.wait(60)
    finally:
        program.kill()
        program.wait()
        print(file=sys.stderr)
    return run, moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        path, moments = disturb(folder, args.kills, args.workers, args.seed)
        run, raw = RunFolder(path), read_records(path / "steps.bin", STEPS)
        formed = [float(each["time"]) for each in run.generations]
        took = quantiles(recoveries(raw, formed, moments, args.workers))
        steps = run.last_step
        train = {**TRAIN, "steps": 1_000_000, "stop_after_steps": steps}
        job = {"name": "whole", "runs": folder, "seed": 7, "train": train, "workers": 1}
        whole = instep.train(RECIPE, quiet=True, **job)
        same = whole.summary["parameters_sha256"] == run.last("model_saved")["parameters_sha256"]
        result = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "workers": args.workers,
            "kills": len(run.named("worker_lost")),
            "steps": steps,
            "load": os.getloadavg()[1],
            "recovery_s": {name: round(seconds, 3) for name, seconds in took.items()},
            "same_bits_as_undisturbed": same,
            "repeated_samples": run.audit.repeated,
            "missing_samples": run.audit.missing,
        }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
