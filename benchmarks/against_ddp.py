"""Is instep as fast as plain PyTorch DDP, with the same model, data and threads?

    python benchmarks/against_ddp.py [--model mlp|gpt|all] [--rounds 5] [--json FILE]

Two workers on this machine, one thread each. The two programs take turns, so
that a machine whose speed drifts is unfair to neither; the figure is the
median over the rounds of the ratio of their samples per second, start-up and
the first steps left out.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from instep.events import STEPS, read_records

HERE = Path(__file__).parent
CASES = {
    # recipe, steps, warm-up, global batch
    "mlp": ("recipes/mlp.py:recipe", 1500, 200, 128),
    "gpt": ("recipes/gpt.py:recipe", 24, 4, 16),
}


def ddp(recipe: str, steps: int, warm_up: int, batch: int) -> float:
    """Samples per second of the rival."""
    out = subprocess.run(
        [sys.executable, HERE / "ddp_rival.py", HERE / recipe, "--steps", str(steps),
         "--warm-up", str(warm_up), "--global-batch", str(batch)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return float(json.loads(out.stdout.splitlines()[-1])["samples_per_second"])


def ours(recipe: str, steps: int, warm_up: int, batch: int) -> float:
    """Samples per second of instep, with its records, events and files."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(f'recipe = "{HERE / recipe}"\nname = "bench"\nseed = 7\n')
        subprocess.run(
            [sys.executable, "-m", "instep", "run", job, "--runs", folder, "--workers", "2",
             "--set", f"train.steps={steps}", "--set", f"train.global_batch={batch}",
             "--set", "train.threads=1", "--set", "data.loaders=0"],
            check=True, capture_output=True,
        )  # fmt: skip
        records = read_records(Path(folder) / "bench" / "steps.bin", STEPS)
    begins = np.sort(records["begin"][records["worker"] == 0])
    return float((steps - warm_up - 1) * batch / (begins[-1] - begins[warm_up]))


def compare(name: str, rounds: int) -> dict[str, object]:
    """One case, in turns."""
    case = CASES[name]
    pairs = []
    for number in range(rounds):
        order = (ours, ddp) if number % 2 else (ddp, ours)
        rates = {program.__name__: program(*case) for program in order}
        pairs.append((rates["ours"], rates["ddp"]))
        print(
            f"{name}  instep {rates['ours']:.1f}  ddp {rates['ddp']:.1f} samples/s  "
            f"ratio {rates['ours'] / rates['ddp']:.3f}",
            flush=True,
        )
    ratios = [a / b for a, b in pairs]
    median = statistics.median(ratios)
    print(f"{name}  median ratio {median:.3f}  (min {min(ratios):.3f}, max {max(ratios):.3f})")
    return {"case": name, "median": median, "ratios": ratios, "samples_per_second": pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*CASES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = list(CASES) if args.model == "all" else [args.model]
    results = [compare(name, args.rounds) for name in names]
    if args.json:
        where = {"date": str(datetime.date.today()), "torch": torch.__version__}
        where |= {"machine": platform.machine(), "python": platform.python_version()}
        args.json.write_text(json.dumps({**where, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
