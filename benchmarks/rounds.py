"""How many samples and bytes does DiLoCo with int4 need to the same validation loss?

    python benchmarks/rounds.py [--seeds 3] [--epochs 40] [--json FILE]

The digits example on four workers of this machine, beside `all_reduce` with the same seed, global
batch and optimizer. The loss to reach is 1.05 times the lowest of `all_reduce`. Figures are ratios
to `all_reduce` of the same seed: of the samples until a validation reaches it, and of the bytes
that all workers together have sent by then. Nothing depends on the machine's speed.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from instep.store.run_folder import RunFolder

JOB = Path(__file__).parent.parent / "examples" / "01_digits" / "job.toml"
LOCAL_STEPS = 12
ROUNDS = ["sync.participants=4", f"sync.options.local_steps={LOCAL_STEPS}"]
KINDS = {
    "all_reduce": [],
    "averaging": ["sync.name=averaging", *ROUNDS],
    "diloco, int4, kept": ["sync.name=diloco", "sync.codec=int4", *ROUNDS],
    "diloco, int4, reset": [
        "sync.name=diloco",
        "sync.codec=int4",
        *ROUNDS,
        "sync.options.local_optimizers=reset",
    ],
}


def trained(kind: str, seed: int, epochs: int, folder: Path) -> list[tuple[float, float, float]]:
    """Samples, bytes and loss at each validation."""
    settings = [f"seed={seed}", f"train.epochs={epochs}", *KINDS[kind], "train.threads=1"]
    words = [word for each in settings for word in ("--set", each)]
    command = [sys.executable, "-m", "instep", "run", str(JOB), "--workers", "4", *words]
    subprocess.run(
        [*command, "--runs", str(folder), "--json"], check=True, capture_output=True, timeout=170
    )
    run = RunFolder(next(folder.iterdir()))
    summary = json.loads((run.path / "summary.json").read_text())
    samples, sent = summary["samples"] / summary["steps"], summary["wire_bytes"] / summary["steps"]
    return [
        (each["step"] * samples, each["step"] * sent, each["metrics"]["loss"])
        for each in run.validations
    ]


def first_below(found: list[tuple[float, float, float]], target: float) -> tuple[float, float]:
    """Samples and bytes at the first validation at the target; infinite if there is none."""
    there = (each[:2] for each in found if each[2] <= target)
    return next(there, (float("inf"), float("inf")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    ratios: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for seed in range(given.seeds):
        found = {}
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                found[kind] = trained(kind, seed, given.epochs, Path(folder))
        target = 1.05 * min(loss for _, _, loss in found["all_reduce"])
        base = first_below(found["all_reduce"], target)
        for kind in KINDS:
            samples, sent = first_below(found[kind], target)
            ratios[kind].append((samples / base[0], sent / base[1]))
            lowest = min(loss for _, _, loss in found[kind])
            print(f"seed {seed}: {kind}: {ratios[kind][-1]}, lowest {lowest:.4f}", flush=True)
    middle = {
        kind: [statistics.median(each[n] for each in all_) for n in (0, 1)]
        for kind, all_ in ratios.items()
    }
    for kind, (samples, sent) in middle.items():
        print(f"{kind}: {samples:.2f} of the samples, {sent:.4f} of the bytes (medians)")
    if given.json:
        facts = {"machine": platform.platform(), "torch": torch.__version__, "epochs": given.epochs}
        given.json.write_text(json.dumps({**facts, "ratios": ratios, "medians": middle}, indent=1))


if __name__ == "__main__":
    main()
