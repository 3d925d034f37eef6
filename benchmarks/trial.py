"""What does the trial before the first step cost, beside that of another build?

    python benchmarks/trial.py OTHER [--rounds 5] [--json FILE]

OTHER is a checkout of another commit (`git worktree add`). Both run in turns, each in a process of
its own with one thread: the trial of a recipe's passes, and of its optimizer where it is not of
torch. CPU seconds of the trial, and of ten plain steps of the same model with its optimizer; the
ratios are medians over the rounds.
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
import sys, time, json
from instep.data.batches import Batches
from instep.recipe.quick_start import spare_dynamo

spare_dynamo()
import torch
from torch import nn
from instep.data.loader import Loader
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
try:
    from instep.job.spec import JobSpec, TrainSpec
except ImportError:  # a build from before the job had a package of its own
    from instep.spec import JobSpec, TrainSpec
from instep.worker.trial.reads import try_recipe

class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        layers = []
        for _ in range(2):
            layers += [nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)

class Own(torch.optim.Adam):
    "Not of torch, as far as the trial knows."

torch.set_num_threads(1)
torch.manual_seed(0)
what, optimizer = sys.argv[1:]
make = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "own": Own}[optimizer]
batch, inputs = 32, torch.randn(500, 64)
pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
if what == "mlp":
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
elif what == "wide mlp":
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
    batch, inputs = 64, torch.randn(500, 512)
elif what == "residual convolutions":
    blocks = [Residual(32) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, *pooled)
    inputs = torch.randn(500, 3, 16, 16)
else:
    dropout = 0.1 if "dropout" in what else 0.0
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    pooled = [nn.AdaptiveAvgPool1d(64), nn.Flatten(), nn.Linear(32 * 64, 10)]
    model = nn.Sequential(nn.Embedding(256, 64), body, *pooled)
    inputs = torch.randint(0, 256, (500, 32))
data = torch.utils.data.TensorDataset(inputs, torch.randint(0, 10, (500,)))
loss = nn.CrossEntropyLoss()
recipe = Recipe(model=model, train=data, optimizer=lambda p: make(p, lr=1e-6), loss=loss)
loader = Loader(data, seed=7, shuffle=True, processes=0)
forward = Forward(recipe, model, torch.device("cpu"), "float32")
job = JobSpec(recipe="a.py:recipe", train=TrainSpec(global_batch=batch))
own, (x, target) = make(model.parameters(), lr=1e-6), data[:batch]

def step():
    own.zero_grad()
    loss(model(x), target).backward()
    own.step()

step()
since = time.process_time()
for _ in range(10):
    step()
steps = time.process_time() - since
own.zero_grad()
since = time.process_time()
trial = try_recipe(forward, loader, job, Batches.of_job(job, len(data)))
passes = time.process_time() - since
try:
    from instep.worker.trial.kept.kept import try_kept
    from instep.recipe.tuning import NOTHING
    from instep.recipe.build import build_optimizer
except ImportError:  # a build that does not try optimizers
    pass
else:
    built = build_optimizer(recipe, model, 100)
    since = time.process_time()
    trial = try_kept(forward, job, 100, trial, NOTHING, built)
    passes += time.process_time() - since
print(json.dumps([passes, steps, trial.verdict]))
"""
MODELS = [
    ("mlp", "Adam"),
    ("wide mlp", "SGD"),
    ("residual convolutions", "SGD"),
    ("transformer", "Adam"),
    ("transformer with dropout", "Adam"),
    ("transformer", "own"),
]


def cost(checkout: Path, *model: str) -> tuple[float, float]:
    """CPU seconds of a trial, and of ten steps."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *model],
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
        pairs = [
            (cost(HERE.parent, *model), cost(given.other, *model)) for _ in range(given.rounds)
        ]
        ratio = statistics.median(ours[0] / theirs[0] for ours, theirs in pairs)
        steps = statistics.median(10 * ours[0] / ours[1] for ours, _ in pairs)
        seconds = [statistics.median(pair[at][0] for pair in pairs) for at in (0, 1)]
        named = ", ".join(model)
        results[named] = {"ratio": ratio, "steps": steps, "cpu_s": seconds}
        print(
            f"{named}: {ratio:.2f} of the other build's, {steps:.1f} steps, {seconds[0]:.3f} s",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
