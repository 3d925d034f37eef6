"""How long from `instep run` to the first committed step, and where does it go?

    python benchmarks/startup.py [--rounds 5] [--json FILE]

The rivals, in turn with it: `python -c "import torch"`, which is the floor,
and a plain one-process PyTorch program that takes one optimizer step on the
same model and data. Seconds from the start of the process, median of the rounds.
The byte code of instep is made before, as torch's is when it is installed.
"""

import argparse
import compileall
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import instep
from instep.events import STEPS, read_events, read_records

HERE = Path(__file__).parent
FLOOR = "import torch"
PLAIN = f"""
import sys
sys.path.insert(0, {str(HERE / "recipes")!r})
import torch
from mlp import recipe
r = recipe()
optimizer = r.optimizer(r.model.parameters())
inputs, target = r.train[:64]
r.loss(r.model(inputs), target).backward()
optimizer.step()
"""


def python(program: str) -> float:
    """Seconds that a Python program takes from start to end."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - begin


def ours() -> tuple[float, dict[str, float]]:
    """Seconds from the start of `instep run` to its first committed step, and its phases."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(f'recipe = "{HERE / "recipes/mlp.py"}:recipe"\nname = "bench"\n')
        subprocess.run(
            [sys.executable, "-m", "instep", "run", job, "--runs", folder, "--workers", "2",
             "--set", "train.steps=1"],
            check=True, capture_output=True,
        )  # fmt: skip
        run = Path(folder) / "bench"
        events = list(read_events(run / "events.jsonl"))
        first = read_records(run / "steps.bin", STEPS)[0]
    last = events[-1]
    started = last["time"] - last["seconds"]
    spent = sum(float(first[name]) for name in STEPS.names or () if name.endswith("_s"))
    phases = next(e["phases"] for e in events if e["event"] == "worker_ready")
    return float(first["begin"]) + spent - started, phases | {"first step": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    compileall.compile_dir(Path(instep.__file__).parent, quiet=1)
    rounds: list[dict[str, Any]] = []
    ours()  # a first one that fills the page cache
    for _ in range(args.rounds):
        seconds, phases = ours()
        rounds.append({"import torch": python(FLOOR), "plain": python(PLAIN), "instep": seconds})
        rounds[-1]["phases"] = phases
    medians = {
        k: statistics.median(r[k] for r in rounds) for k in ("import torch", "plain", "instep")
    }
    for name, seconds in medians.items():
        print(f"{name:14}{seconds:6.2f} s   {seconds / medians['import torch']:.2f} x import torch")
    for name in rounds[0]["phases"]:
        print(f"   {name:16}{statistics.median(r['phases'][name] for r in rounds):6.3f} s")
    if args.json:
        args.json.write_text(json.dumps({"medians": medians, "rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
