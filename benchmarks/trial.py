"""What does the trial before the first step cost, beside that of another build?

    python benchmarks/trial.py OTHER [--rounds 5] [--json FILE]

OTHER is a checkout of another commit (`git worktree add`). Both run in turns, each in a process of
its own with one thread: the trial of a recipe's passes. CPU seconds of the trial, and
of ten plain steps of the same model; the ratios are medians over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROGRAM = """
import sys, time, json, torch
from torch import nn
from instep.data.loader import Loader
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.spec import JobSpec, TrainSpec
from instep.worker.trial.reads import try_recipe

torch.set_num_threads(1)
torch.manual_seed(0)
what = sys.argv[1]
if what == "mlp":
    model, shape, batch = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), (64,), 32
elif what == "wide mlp":
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
    shape, batch = (512,), 64
else:
    layers = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(5):
        layers += [nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model, shape, batch = nn.Sequential(*layers, *pooled), (3, 16, 16), 64
data = torch.utils.data.TensorDataset(torch.randn(500, *shape), torch.randint(0, 10, (500,)))
loss = nn.CrossEntropyLoss()
recipe = Recipe(model=model, train=data, optimizer=lambda p: None, loss=loss)
loader = Loader(data, seed=7, shuffle=True, processes=0)
forward = Forward(recipe, model, torch.device("cpu"), "float32")
job = JobSpec(recipe="a.py:recipe", train=TrainSpec(global_batch=batch))
inputs, target = data[:batch]
loss(model(inputs), target).backward()
since = time.process_time()
for _ in range(10):
    model.zero_grad()
    loss(model(inputs), target).backward()
steps = time.process_time() - since
model.zero_grad()
since = time.process_time()
trial = try_recipe(forward, loader, job, len(data))
print(json.dumps([time.process_time() - since, steps, trial.verdict]))
"""
MODELS = ["mlp", "wide mlp", "convolutions"]


def cost(checkout: Path, model: str) -> tuple[float, float]:
    """CPU seconds of a trial, and of ten steps."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model],
        env=os.environ | {"PYTHONPATH": str(checkout / "src")},
        check=True,
        capture_output=True,
        text=True,
    )
    trial, steps, verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict == "yes", verdict
    return trial, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = {}
    for model in MODELS:
        pairs = [(cost(HERE.parent, model), cost(given.other, model)) for _ in range(given.rounds)]
        ratio = statistics.median(ours[0] / theirs[0] for ours, theirs in pairs)
        steps = statistics.median(10 * ours[0] / ours[1] for ours, _ in pairs)
        seconds = [statistics.median(pair[at][0] for pair in pairs) for at in (0, 1)]
        results[model] = {"ratio": ratio, "steps": steps, "cpu_s": seconds}
        print(f"{model}: {ratio:.2f} of the other build's, {steps:.1f} steps", flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
