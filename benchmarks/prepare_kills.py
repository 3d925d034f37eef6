"""Kill processes of `instep prepare` at random moments, again and again: is the result the same?

    python benchmarks/prepare_kills.py --kills 200 --to kills [--hosts | --readers]

One file of JSON lines is prepared once undisturbed. Then, until there were so many kills, commands
are started, and some process of each (the command itself, a worker, the second process that tries
records again; with --hosts a host or a worker
of one) is killed or stopped at a random moment; a command that was killed is given again. Each
folder that is done in the end is compared with the first: SHA-256, count, bad records, and what is
left behind. With --readers the shards are trained on, and the processes that read them, and
workers, are killed or stopped; the SHA-256 of the parameters is compared. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from instep.lab.chaos.run_processes import Known, Processes, send

FUNCTION = """
import random

def record(raw):
    if raw["id"] % 10 == 3:
        return None
    if raw["id"] % 5000 == 7:
        raise ValueError("seven")
    return {"x": [float(v) for v in raw["v"]], "y": raw["y"], "noise": random.random()}
"""


RECIPE = """
import instep, torch
from instep.data.sources import shards

def features(sample):
    x = sample["x"]
    seen = torch.stack([x.mean().log1p(), x.std(correction=0), sample["noise"]])
    return seen.float(), sample["y"]

def recipe():
    return instep.Recipe(
        model=torch.nn.Linear(3, 5),
        train=shards("FOLDER", transform=features),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
"""

JOB = """
recipe = "recipe.py:recipe"
workers = 2
[train]
determinism = "bits"
global_batch = 64
steps = 1500
[data]
loaders = 2
"""


ROLES = ("loader", "loader", "worker")
"""Of processes that are disturbed, readers more often."""


def train(folder: Path, name: str, draw: random.Random, did: Counter[str]) -> dict[str, Any]:
    """Train on the shards; processes that read them, and workers, are disturbed if `did` counts."""
    command = [sys.executable, "-m", "instep", "run", "job.toml", "--json", "--set", f"name={name}"]
    with open(folder / "err.log", "ab") as log:
        run = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log)
    processes = Processes(folder / "runs" / name)
    for _ in range(draw.randint(3, 6) if name != "undisturbed" else 0):
        known = list[Known]()
        while run.poll() is None and not known:
            time.sleep(draw.uniform(0.5, 3.0))
            processes.update()
            if processes.of("loader"):
                known = [each for role in ROLES for each in processes.of(role)]
        number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
        if known and run.poll() is None and send(target := draw.choice(known), number):
            did[f"{target.role} {number.name}"] += 1
    out, _ = run.communicate()
    if run.returncode:
        raise SystemExit(f"a run ended with {run.returncode}: see err.log")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def disturb_readers(folder: Path, kills: int, draw: random.Random) -> int:
    """Compare runs whose readers are disturbed with one that is not."""
    (folder / "recipe.py").write_text(RECIPE.replace("FOLDER", str(folder / "first")))
    (folder / "job.toml").write_text(JOB)
    did, wrong, number = Counter[str](), list[str](), 0
    wanted = train(folder, "undisturbed", draw, did)
    while sum(did.values()) < kills:
        number += 1
        found = train(folder, f"run-{number}", draw, did)
        for name in ("parameters_sha256", "missing_samples", "repeated_samples", "skipped_samples"):
            if found[name] != wanted[name]:
                wrong.append(f"run-{number}: {name} is {found[name]}, not {wanted[name]}")
        print(f"{sum(did.values())} disturbances, {number} runs, {len(wrong)} wrong", flush=True)
    result = {"disturbances": dict(did), "runs": number, "wrong": wrong}
    print(json.dumps({**result, "parameters_sha256": wanted["parameters_sha256"]}))
    return bool(wrong)


def make_raw(folder: Path, records: int) -> None:
    """Write the raw file and the function."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "clean.py").write_text(FUNCTION)
    draw = random.Random(1)
    with open(folder / "raw.jsonl", "w") as file:
        for number in range(records):
            if number % 50_000 == 777:
                file.write('{"oops\n')
                continue
            row = {"id": number, "y": number % 5, "v": [number / 2] * draw.randint(1, 8)}
            file.write(json.dumps(row) + "\n")


HOSTS = ["--on", "hosts", "--set", 'launch.hosts=["env HOST=1", "env HOST=2"]']
HOSTS += ["--set", "launch.address=127.0.0.1"]


def start(folder: Path, to: Path, workers: int, *more: str) -> subprocess.Popen[bytes]:
    """Start one command."""
    words = ["prepare", "raw.jsonl", "--to", str(to), "--map", "clean.py:record", "--json"]
    command = [sys.executable, "-m", "instep", *words, "--workers", str(workers), *more]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=open(folder / "err.log", "ab"),
    )


def ended(command: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """The last line of a command that was not killed."""
    out, _ = command.communicate()
    if command.returncode in (-signal.SIGKILL, 130):
        return None
    if command.returncode:
        raise SystemExit(f"a command ended with {command.returncode}: see err.log")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def disturb(command: subprocess.Popen[bytes], draw: random.Random, did: Counter[str]) -> None:
    """Kill, stop or interrupt one process of a command, if it still runs."""
    try:
        master = psutil.Process(command.pid)
        below = master.children(recursive=True)
        children = [child for child in below if child.status() != "zombie"]
        hosts = {
            child.pid for child in children if "instep.prepare.workers.host" in child.cmdline()
        }
    except psutil.NoSuchProcess:
        return
    target = draw.choice([master, *children, *children])
    role = "host" if target.pid in hosts else "worker"
    role = "master" if target.pid == command.pid else role
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGINT])
    if number == signal.SIGSTOP and role == "master":
        number = signal.SIGKILL
    if number == signal.SIGINT and role != "master":
        number = signal.SIGTERM
    try:
        os.kill(target.pid, number)
        did[f"{role} {signal.Signals(number).name}"] += 1
    except ProcessLookupError:
        pass


def main() -> int:
    """Disturb, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--hosts", action="store_true", help="workers on two hosts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--readers", action="store_true", help="disturb those that read shards")
    given = parser.parse_args()
    folder, draw, did = given.to.resolve(), random.Random(given.seed), Counter[str]()
    make_raw(folder, given.records)
    began = time.monotonic()
    wanted = ended(start(folder, folder / "first", 2))
    assert wanted is not None, "the first command was killed"
    if given.readers:
        return disturb_readers(folder, given.kills, draw)
    took_s, wrong, folders, most_redone = time.monotonic() - began, list[str](), 0, 0
    while sum(did.values()) < given.kills:
        to, found, before = folder / f"out-{folders}", None, 0
        while found is None:
            more = HOSTS if given.hosts else []
            command = start(folder, to, draw.choice([1, 2, 3, 7]), *more)
            for _ in range(draw.randint(0, 2)):
                time.sleep(draw.uniform(0.2, took_s * 0.6))
                disturb(command, draw, did)
            found = ended(command)
            results = list((to / ".preparing").glob("*.done")) if found is None else []
            done = sum(not path.with_suffix(".again").exists() for path in results)
            if found is None and done < before:
                wrong.append(f"{to.name}: {before - done} results are gone")
            before = done
        most_redone = max(most_redone, before - found["done_before"])
        for name in ("sha256", "samples", "bad", "shards", "bytes"):
            if found[name] != wanted[name]:
                wrong.append(f"{to.name}: {name} is {found[name]}, not {wanted[name]}")
        left = [path.name for path in to.iterdir() if path.name.startswith(".")]
        if left:
            wrong.append(f"{to.name} has {left}")
        shutil.rmtree(to)
        folders += 1
        print(
            f"{sum(did.values())} disturbances, {folders} folders, {len(wrong)} wrong", flush=True
        )
    result = {"disturbances": dict(did), "folders": folders, "wrong": wrong}
    print(json.dumps({**result, "most_results_lost": most_redone, "sha256": wanted["sha256"]}))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
