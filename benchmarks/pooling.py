"""What does a pool cost a job that shrinks, and what does killing its scheduler cost?

    python benchmarks/pooling.py --rounds 5 --to rounds

In each round a job fills a pool of two cores. Then one of higher priority is submitted, the first
shrinks, and grows again after it. Meanwhile the scheduler is killed again and again, at random
moments, and started again. The parameters of both are compared with those of undisturbed runs,
their ledgers are audited, and their sessions are counted: one that was started twice, or parked,
has more than one. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from instep.detached import pid_of
from instep.events import read_events
from instep.pool.pool_file import PoolFolder
from instep.store.run_folder import RunFolder

RECIPE = """
import time
import instep, torch
from torch import nn

class Slow(torch.utils.data.Dataset):
    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        time.sleep(0.002)
        return self.inputs[index], self.labels[index]

def recipe():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(800, 12, generator=generator)
    labels = (inputs.sin() @ torch.randn(12, 5, generator=generator)).argmax(dim=1)
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train=Slow(inputs, labels),
    )
"""

JOB = """
name = "{name}"
recipe = "recipe.py:recipe"
seed = 7
[train]
steps = {steps}
global_batch = 32
determinism = "bits"
threads = 1
[data]
loaders = 0
"""


def instep(*words: object) -> str:
    command = [sys.executable, "-m", "instep", *map(str, words)]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def wait_for(what: str, holds: Any, limit_s: float = 600.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            raise SystemExit(f"waited in vain: {what}")
        time.sleep(0.05)


def first_step(run: Path) -> float | None:
    """When the first step of a run was over, Unix seconds."""
    try:
        steps = RunFolder(run).steps
    except Exception:
        return None
    return float(steps["begin"].min()) if len(steps) else None


def one_round(folder: Path, kills: int, draw: random.Random) -> dict[str, Any]:
    pool, runs = PoolFolder(folder / "pool"), folder / "runs"
    instep("pool", "--pool", pool.folder, "start", folder / "pool.toml")
    instep("submit", folder / "long.toml", "--pool", pool.folder)
    wait_for("the first job trains", lambda: first_step(runs / "long"))
    submitted = time.time()
    instep("submit", folder / "urgent.toml", "--pool", pool.folder, "--priority", 5)
    attached, killed = [], 0

    def over() -> bool:
        jobs = pool.state().jobs.values()
        return len(jobs) == 2 and all(job.outcome for job in jobs)

    while not over():
        time.sleep(draw.uniform(0.3, 2.0))
        if killed < kills and (pid := pid_of(pool.lock)) is not None:
            os.kill(pid, signal.SIGKILL)
            killed += 1
            began = time.monotonic()
            instep("pool", "--pool", pool.folder, "start")
            attached.append(time.monotonic() - began)
    instep("pool", "--pool", pool.folder, "stop")
    urgent = first_step(runs / "urgent") or 0.0
    ended: dict[str, Any] = {"kills": killed, "to_first_step_s": urgent - submitted}
    ended["started_again_s"] = round(statistics.median(attached), 2) if attached else None
    for name in ("long", "urgent"):
        run = RunFolder(runs / name)
        ended[name] = {
            "outcome": run.outcome,
            "sha256": run.last("model_saved").get("parameters_sha256"),
            "sessions": len(run.times.sessions),
            "sizes": [
                e["workers"]
                for e in read_events(run.path / "events.jsonl")
                if e["event"] == "scaled"
            ],
            "repeated": run.audit.repeated + run.audit.stray,
            "missing": run.audit.missing,
        }
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=8, help="of the scheduler, in each round")
    parser.add_argument("--to", type=Path, help="a folder that is not there yet")
    args = parser.parse_args()
    folder = args.to.resolve() if args.to else Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    truth = {}
    for name, steps in (("long", 500), ("urgent", 60)):
        (folder / "recipe.py").write_text(RECIPE)
        (folder / f"{name}.toml").write_text(JOB.format(name=name, steps=steps))
        done = instep(
            "run", folder / f"{name}.toml", "--runs", folder / "alone", "--workers", 1, "--json"
        )
        truth[name] = json.loads(done.splitlines()[-1])["parameters_sha256"]
    rounds = []
    for number in range(args.rounds):
        inside = folder / f"round-{number}"
        inside.mkdir()
        (inside / "pool.toml").write_text("cores = 2\n")
        for name in ("long.toml", "urgent.toml", "recipe.py"):
            (inside / name).write_text((folder / name).read_text())
        rounds.append(one_round(inside, args.kills, random.Random(number)))
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    both = [each[name] for each in rounds for name in truth]
    same = [each[name]["sha256"] == truth[name] for each in rounds for name in truth]
    print(
        json.dumps(
            {
                "rounds": rounds,
                "kills": sum(each["kills"] for each in rounds),
                "same_parameters": f"{sum(same)} of {len(same)}",
                "sessions": sum(each["sessions"] for each in both),
                "repeated_samples": sum(each["repeated"] for each in both),
                "missing_samples": sum(each["missing"] for each in both),
            }
        )
    )


if __name__ == "__main__":
    main()
