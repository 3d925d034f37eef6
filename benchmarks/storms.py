"""Storms: short runs of every strategy and mesh, in which processes are killed or stopped.

Each kind is run once undisturbed, and then once with each seed; `instep chaos` judges: every sample
once, and the bits of the undisturbed run (without lockstep, where the result depends on timing, the
samples). Kinds take turns, so that what is stopped early has seen all of them.

python benchmarks/storms.py --storms 200 --runs runs/storms
python benchmarks/storms.py --only diloco --storms 5
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

RECIPE = Path(__file__).resolve().parent / "recipes" / "storm.py"

TIMED = ("train.determinism=order",)
"""Where bits are not promised; losses are compared instead, where they do not depend on timing."""

KINDS = {
    "all_reduce": ("workers=3",),
    "all_reduce int8": (*TIMED, "workers=3", "sync.codec=int8"),
    "all_reduce delayed": ("workers=2", "sync.options.delayed=true"),
    "server_sync": ("workers=2", "sync.name=server_sync", "sync.servers=2"),
    "bounded_stale": (*TIMED, "workers=2", "sync.name=bounded_stale", "sync.servers=1"),
    "bounded_stale 2": (*TIMED, "workers=2", "sync.name=bounded_stale", "sync.servers=2"),
    "server_async": (*TIMED, "workers=3", "sync.name=server_async", "sync.servers=1"),
    "averaging": ("workers=2", "train.epochs=12", "sync.name=averaging", "sync.participants=4"),
    "fedopt": ("workers=2", "train.epochs=12", "sync.name=fedopt", "sync.participants=4"),
    "diloco": ("workers=2", "train.epochs=30", "sync.name=diloco", "sync.participants=4"),
    "sign_vote": ("workers=2", "sync.name=sign_vote"),
    "shard": ("workers=2", "mesh.shard=2"),
    "tensor": ("workers=2", "mesh.tensor=2"),
    "stages": ("workers=2", "mesh.stages=2"),
    "replicas of shards": ("workers=4", "mesh.shard=2"),
}
"""What is set beside `COMMON`, by name."""

COMMON = (
    "train.determinism=bits",
    "train.epochs=3",
    "train.global_batch=16",
    "train.micro_batches=4",
    "train.threads=1",
    "checkpoint.every=20",
    "seed=5",
)

AGAIN = 10_000
"""What is added to a seed that broke nothing; three times at most."""

LIMIT_S = 900
"""A storm that takes longer hangs."""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run instep."""
    words = (sys.executable, "-m", "instep", *words)
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as late:
        said = late.stderr.decode() if isinstance(late.stderr, bytes) else ""
        return subprocess.CompletedProcess(words, 124, "", f"{said}\nnot over in {LIMIT_S} s")


def undisturbed(kind: str, runs: Path) -> Path | None:
    """Run a kind once; None where it is refused or fails, which is printed."""
    job = runs / "job.toml"
    job.write_text(f'recipe = "{RECIPE}:recipe"\n[train]\n[sync]\n[mesh]\n[checkpoint]\n')
    name = kind.replace(" ", "-")
    settings = [word for each in (*COMMON, *KINDS[kind]) for word in ("--set", each)]
    done = command("run", str(job), "--runs", str(runs), "--name", name, *settings)
    if done.returncode:
        print(f"{kind}: not run: {done.stderr.strip()[-400:]}", flush=True)
        return None
    return runs / name


def storm(run: Path, seed: int) -> str:
    """Break a run once; what does not hold, or nothing.

    A run that was over before it could be broken shows nothing: it is broken with another seed.
    """
    asked = ("--kills", "4", "--hangs", "1", "--seed", str(seed), "--json")
    done = command("chaos", str(run), "--runs", str(run.parent), *asked)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return f"code {done.returncode}: {done.stderr.strip()[-400:]}"
    broken = Path(answer.get("run", run.parent / f"{run.name}-disturbed"))
    if answer.get("holds") and not done.returncode:
        shutil.rmtree(broken, ignore_errors=True)
        return ""
    with suppress(OSError):  # else the next one might take its name
        broken.rename(run.parent / f"failed-{run.name}-{seed}")
        (run.parent / f"failed-{run.name}-{seed}.txt").write_text(done.stderr + done.stdout)
    faults = answer.get("faults", [str(answer)])
    if faults and all("the run ended before" in fault for fault in faults) and seed < 3 * AGAIN:
        return storm(run, seed + AGAIN)
    return f"code {done.returncode}: {faults}"[:600]


def main() -> int:
    """Parse, break, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--storms", type=int, default=200, help="how many, over all kinds")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--only", choices=KINDS, help="this kind alone")
    parser.add_argument("--runs", type=Path, help="keep what fails in this folder")
    asked = parser.parse_args()
    runs = (asked.runs or Path(tempfile.mkdtemp(prefix="storms-"))).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    began, wrong, whole = time.monotonic(), Counter[str](), dict[str, Path | None]()
    kinds = [asked.only] if asked.only else list(KINDS)
    done = Counter[str]()
    for number in range(asked.storms):
        kind, seed = kinds[number % len(kinds)], asked.first + number
        if kind not in whole:
            whole[kind] = undisturbed(kind, runs)
        run = whole[kind]
        fault = storm(run, seed) if run is not None else "no undisturbed run"
        done[kind] += 1
        wrong[kind] += bool(fault)
        seconds = time.monotonic() - began
        print(f"{number + 1}  {kind}  seed {seed}  {fault or 'holds'}  {seconds:.0f} s", flush=True)
    print(f"{asked.storms} storms, {sum(wrong.values())} failed")
    for kind in kinds:
        print(f"{done[kind]:5} {wrong[kind]:5} failed  {kind}")
    if asked.runs is None and not wrong.total():
        shutil.rmtree(runs, ignore_errors=True)
    return 1 if wrong.total() else 0


if __name__ == "__main__":
    sys.exit(main())
