"""What do whole-number sums add to the work of a step?

    python benchmarks/lattice.py [--model gpt] [--rounds 20] [--json FILE]

One process, one thread, no network: steps whose gradients are summed on a
lattice ("bits") and plainly ("order") in turn, by the CPU time of the thread,
so that other work on the machine hardly counts. Each step is compared with the
steps before and after it. A worker's half of the batches of bits.py, as one
pass and as four in both: what merging saves is not in these figures.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from turns import HERE, in_words, over, summed_up, write

from instep.comm.alone import AloneComm
from instep.engine.gradients import Gradients
from instep.sync.all_reduce import AllReduce
from instep.sync.generation import Generation

sys.path.insert(0, str(HERE / "recipes"))
BATCHES = {"mlp": 64, "gpt": 8, "conv": 32, "lstm": 32, "embedding": 128}


def stepper(name: str, passes: int, parts: int) -> Callable[[], None]:
    """One step of a model of its own; summed plainly where `parts` is 0."""
    recipe = importlib.import_module(name).recipe(samples=BATCHES[name])
    tensors = [tensor.split(BATCHES[name] // passes) for tensor in recipe.train.tensors]
    batches = list(zip(*tensors, strict=True))
    parameters = list(recipe.model.parameters())
    optimizer, sums, notes = recipe.optimizer(parameters), AllReduce(), torch.zeros(0)
    sums.start(parameters, AloneComm(), Generation(notes=0, parts=parts))
    Gradients(parameters, sums.gradient)

    def step() -> None:
        agreed = None
        while agreed is None:  # the first step computes its passes twice
            for number, (inputs, target) in enumerate(batches):
                loss = recipe.loss(recipe.model(inputs), target)
                sums.begin_pass(1 / passes, last=number == passes - 1)
                loss.backward()
            agreed = sums.exchange(notes)
        sums.hand_out()
        sums.apply(optimizer.step)

    return step


def cpu_s(step: Callable[[], None]) -> float:
    before = time.thread_time()
    step()
    return time.thread_time() - before


def compare(name: str, passes: int, rounds: int) -> dict[str, object]:
    """One model with one or several passes in a step, measured and printed."""
    plain, exact = stepper(name, passes, 0), stepper(name, passes, 2 * passes)
    pairs = [(cpu_s(plain), cpu_s(exact)) for _ in range(rounds + 2)][2:]
    order, bits = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    ratios = over(bits, order)
    print(f"{name}, passes {passes}  lattice over plain {in_words(ratios)}", flush=True)
    return {"case": name, "passes": passes, "lattice over plain": summed_up(ratios),
            "plain_s": order, "lattice_s": bits}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*BATCHES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = list(BATCHES) if args.model == "all" else [args.model]
    results = [compare(name, passes, args.rounds) for name in names for passes in (1, 4)]
    if args.json:
        write(args.json, results)


if __name__ == "__main__":
    main()
