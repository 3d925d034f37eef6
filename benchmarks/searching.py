"""Is a search the same after kills, and as good as Optuna alone?

    python benchmarks/searching.py --kills 20 --to kills
    python benchmarks/searching.py --optuna

With --kills, a search of 12 trials is made undisturbed. Then it is made again, on another number of
workers, and until there were so many kills some process of it is killed at a random moment: the
search itself, the client, the master, a worker or the fork server of a trial; a search that was
killed is started again. All values, bounds, results and parameters of the trials are compared, and
two trials are trained again by `instep run`.

With --optuna, three functions take the place of training: 40 trials at width 4 for each of ten
seeds, beside `study.optimize` with the same sampler and as many trials. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.detached import pid_of
from instep.errors import InstepError
from instep.job.file import build
from instep.lab.chaos.run_processes import Processes, send
from instep.search.record import SearchRecord
from instep.search.results import Result, name_of
from instep.search.search import Search
from instep.store.run_folder import RunFolder

RECIPE = """
import instep, torch
from torch import nn
from torch.utils.data import TensorDataset

def accuracy(outputs, target):
    return (outputs.argmax(dim=1) == target).float().mean()

def recipe(lr=0.1, width=16):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(2400, 12, generator=generator)
    labels = (inputs.sin() @ torch.randn(12, 5, generator=generator)).argmax(dim=1)
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 5)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        train=TensorDataset(inputs[:2000], labels[:2000]),
        validate=TensorDataset(inputs[2000:], labels[2000:]),
        metrics={"accuracy": accuracy},
    )
"""

JOB = """
name = "net"
recipe = "recipe.py:recipe"
seed = 7
[train]
epochs = 12
global_batch = 32
[search]
trials = 12
width = 3
metric = "accuracy"
prune = "median"
rungs = [2, 6]
[search.space]
"arguments.lr" = { low = 1e-3, high = 1.0, log = true }
"arguments.width" = { whole = [4, 64], log = true }
"train.global_batch" = [32, 64]
"""

KILLED = ("search", "client", "master", "worker", "worker", "host")


def begin(folder: Path, name: str, workers: int) -> subprocess.Popen[bytes]:
    words = ["search", str(folder / "job.toml"), "--runs", str(folder), "--name", name]
    command = [sys.executable, "-m", "instep", *words, "--workers", str(workers)]
    with open(folder / f"{name}.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def kill_one(folder: Path, search: subprocess.Popen[bytes], draw: random.Random) -> str:
    """Kill some process; returns its role, or an empty text if there was none."""
    role = draw.choice(KILLED)
    if role == "search":
        search.kill()
        search.wait()
        return role
    open_ones = [run.parent for run in folder.glob("trial-*/events.jsonl")]
    draw.shuffle(open_ones)
    for run in open_ones:
        if role == "client":
            pid = pid_of(folder / "jobs" / f"{run.name}.lock")
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                return role
            continue
        processes = Processes(run)
        processes.update()
        alive = processes.of(role)
        if alive and send(draw.choice(alive), signal.SIGKILL):
            return role
    return ""


def facts(folder: Path) -> list[Any]:
    """All that has to be the same."""
    with SearchRecord(folder, write=False) as record:
        chosen, results = record.chosen(), record.results()
    found = []
    for number, (values, bounds) in enumerate(chosen):
        result = results[number].result._replace(seconds=0.0)
        found.append([dict(values), bounds, result._asdict()])
    return found


def disturbed(folder: Path, name: str, kills: int, seed: int) -> dict[str, Any]:
    draw, did = random.Random(seed), Counter[str]()
    search, began = begin(folder, name, 2), time.monotonic()
    while True:
        try:
            code = search.wait(draw.uniform(1.0, 8.0))
        except subprocess.TimeoutExpired:
            code = None
        if code == 0:
            break
        if code is not None:
            raise SystemExit(f"the search ended with {code}: see {folder / name}.log")
        if did.total() < kills and (role := kill_one(folder / name, search, draw)):
            did[role] += 1
            if role == "search":
                time.sleep(draw.uniform(0.0, 2.0))
                search = begin(folder, name, draw.choice([1, 2, 3]))
    return {"kills": dict(did), "seconds": round(time.monotonic() - began, 1)}


def trained_again(folder: Path, name: str, number: int, workers: int) -> str:
    job = folder / name / "jobs" / f"{name_of(number)}.toml"
    words = ["run", str(job), "--runs", str(folder / "plain"), "--workers", str(workers), "--json"]
    command = [sys.executable, "-m", "instep", *words]
    done = subprocess.run(command, capture_output=True, check=True)
    return str(json.loads(done.stdout.splitlines()[-1])["parameters_sha256"])


def after_kills(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "job.toml").write_text(JOB)
    began = time.monotonic()
    if begin(folder, "calm", 1).wait():
        raise SystemExit(f"the undisturbed search failed: see {folder / 'calm'}.log")
    calm_s = round(time.monotonic() - began, 1)
    stormy = disturbed(folder, "stormy", kills, seed)
    calm, found = facts(folder / "calm"), facts(folder / "stormy")
    runs = [RunFolder(each.parent) for each in folder.glob("stormy/trial-*/job.toml")]
    again = {
        name_of(number): trained_again(folder, "stormy", number, workers)
        == calm[number][2]["parameters_sha256"]
        for number, workers in ((0, 2), (7, 1))
    }
    return {
        **stormy,
        "undisturbed_s": calm_s,
        "trials": len(calm),
        "pruned": sum(each[2]["state"] == "pruned" for each in calm),
        "same": sum(one == other for one, other in zip(calm, found, strict=True)),
        "repeated_samples": sum(run.audit.repeated + run.audit.stray for run in runs),
        "missing_samples": sum(run.audit.missing for run in runs),
        "sessions": sum(len(run.times.sessions) for run in runs),
        "plain_runs_with_the_same_parameters": again,
    }


def branin(values: dict[str, Any]) -> float:
    x, y = values["arguments.x"] * 15 - 5, values["arguments.y"] * 15
    inner = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return float(inner**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10)


def valley(values: dict[str, Any]) -> float:
    x, y = values["arguments.x"] * 4 - 2, values["arguments.y"] * 4 - 1
    return float((1 - x) ** 2 + 100 * (y - x**2) ** 2)


def learning(values: dict[str, Any]) -> float:
    """As a loss is of a rate, a width and a batch: best at 3e-3, at large widths, at 64."""
    rate, width = math.log10(values["arguments.lr"]) + 2.5, math.log2(values["arguments.width"])
    return float(rate**2 + 0.1 * (8 - width) ** 2 + (values["train.global_batch"] != 64) * 0.3)


SQUARE = {key: {"low": 0.0, "high": 1.0} for key in ("arguments.x", "arguments.y")}
LEARNING = {
    "arguments.lr": {"low": 1e-5, "high": 1.0, "log": True},
    "arguments.width": {"whole": [4, 256], "log": True},
    "train.global_batch": [32, 64, 128],
}
FUNCTIONS: dict[str, tuple[Callable[[dict[str, Any]], float], dict[str, Any]]] = {
    "branin": (branin, SQUARE),
    "valley": (valley, SQUARE),
    "learning": (learning, LEARNING),
}


def best_of_ours(name: str, seed: int, width: int, trials: int = 40) -> float:
    function, space = FUNCTIONS[name]
    search_table = {"trials": trials, "width": width, "space": space}
    job = build({"recipe": "a.py:b", "seed": seed, "search": search_table}, source=name)
    with tempfile.TemporaryDirectory() as folder:
        with SearchRecord(Path(folder), write=True) as record:
            search = Search(Path(folder), job, record, 1, lambda *_: None)
            while len(search.results) < trials:
                search.choose()
                for number in range(len(search.chosen)):
                    if number not in search.results:
                        value = function(dict(search.chosen[number][0]))
                        search.over(number, Result("completed", value))
                        break
        return min(each.result.value or 0.0 for each in search.results.values())


def best_of_optuna(name: str, seed: int, trials: int = 40) -> float:
    import optuna

    from instep.search.sampling import distribution

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    function, space = FUNCTIONS[name]
    job = build({"recipe": "a.py:b", "search": {"space": space}}, source=name)
    kinds = {key: distribution(optuna, each) for key, each in job.search.ranges.items()}

    def objective(trial: Any) -> float:
        values = {key: trial._suggest(key, kind) for key, kind in kinds.items()}
        return function(values)

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, n_trials=trials)
    return float(study.best_value)


def beside_optuna(seeds: int) -> dict[str, Any]:
    from scipy.stats import wilcoxon

    found: dict[str, Any] = {"results": []}
    ours_all, theirs_all = [], []
    for name in FUNCTIONS:
        theirs = [best_of_optuna(name, seed) for seed in range(seeds)]
        for width in (1, 4):
            ours = [best_of_ours(name, seed, width) for seed in range(seeds)]
            worse = wilcoxon(ours, theirs, alternative="greater").pvalue
            found["results"].append(
                {
                    "function": name,
                    "width": width,
                    "ours": ours,
                    "optuna": theirs,
                    "p_that_ours_is_no_worse": round(float(worse), 4),
                }
            )
            print(name, width, sorted(ours)[seeds // 2], sorted(theirs)[seeds // 2], worse)
            if width == 4:
                ours_all += [math.log(each + 1e-3) for each in ours]
                theirs_all += [math.log(each + 1e-3) for each in theirs]
    whole = wilcoxon(ours_all, theirs_all, alternative="greater").pvalue
    return {**found, "p_over_all_at_width_4": round(float(whole), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--to", type=Path, help="a folder that is not there yet")
    parser.add_argument("--optuna", action="store_true")
    args = parser.parse_args()
    if args.optuna:
        print(json.dumps(beside_optuna(args.seeds)))
        return
    folder = args.to.resolve() if args.to else Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    try:
        print(json.dumps(after_kills(folder, args.kills, args.seed)))
    except InstepError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
