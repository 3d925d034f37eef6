"""What do masks and private steps cost, on one core?

    python benchmarks/privacy.py [--turns 7] [--parameters 10000000]

Masks: GB a second that are added to numbers, beside a copy of memory; and for a round of 8
participants on 8 workers, what one worker masks, and the bytes that it hands to its
group beside those of an open round. Private steps: a step of DP-SGD (clipped gradients of single
samples, noise, optimizer) beside a plain step, and beside Opacus's hooks, if it is installed. Each
takes its turn with the others. Seconds of processor time, so that a busy machine disturbs less.
Prints JSON: medians and quartiles.
"""

import argparse
import importlib
import json
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.comm.memory import run_ranks
from instep.privacy.gradients.per_sample import PerSample
from instep.privacy.grid import Grid
from instep.privacy.secure.clipped import ClippedMean, Gift
from instep.privacy.secure.masks import Mask, apply_masks
from instep.privacy.sums import PrivateSums
from instep.records import Attempt
from instep.sync.generation import Generation

PARTICIPANTS, SAMPLES, CLIP, NOISE = 8, 64, 1.0, 1.0
FEW = 1_000_000
"""Parameters of the round whose bytes are counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(
        json.dumps(
            {
                "load": os.getloadavg()[0],
                "masks": masks(arguments.parameters, arguments.turns),
                "round": {"parameters": FEW, "bytes_over_open": bytes_over_open()},
                "steps": {name: steps(make, arguments.turns) for name, make in MODELS.items()},
            },
            indent=1,
        )
    )


def masks(count: int, turns: int) -> dict[str, Any]:
    """A mask added to so many numbers, beside a copy; and all of a worker's in a round of 8."""
    numbers, copy = np.zeros(count, np.int32), np.zeros(count, np.int32)
    mask = Mask(bytes(range(32)), True)

    def of_a_round() -> None:  # one for each other: they cancel in the sum
        apply_masks([mask] * (PARTICIPANTS - 1), numbers)

    found = in_turns(
        {
            "copy": lambda: np.copyto(copy, numbers),
            "mask": lambda: apply_masks([mask], numbers),
            "round": of_a_round,
        },
        turns,
    )
    middle = {name: statistics.median(each) for name, each in found.items()}
    return {
        "parameters": count,
        "gb_s": round(4e-9 * count / middle["mask"], 2),
        "copy_gb_s": round(4e-9 * count / middle["copy"], 2),
        "round_of_8_s": round(middle["round"], 3),
    }


class Counting:
    """A rank's end of a group, that counts the bytes which it is handed."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.bytes = comm, 0

    def all_reduce(self, tensor: Tensor) -> Any:
        self.bytes += tensor.nbytes
        return self._comm.all_reduce(tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def bytes_over_open() -> float:
    """What a worker hands to its group in a masked round, over what it does in an open one."""
    handed = [run_ranks(PARTICIPANTS, lambda comm, n=n: a_round(comm, n))[0] for n in (5, 0)]
    return round(handed[0] / handed[1], 5)


def a_round(comm: Any, least: int) -> int:
    counting, own = Counting(comm), [nn.Parameter(torch.zeros(FEW))]
    mean = ClippedMean(CLIP, PARTICIPANTS, least=least, job=bytes(32))
    end: Any = counting
    mean.start(own, end, Generation(notes=64, parts=PARTICIPANTS, at=Attempt(0, 0, 1)))
    mean.begin_step(Attempt(0, 1, 1))
    moved = torch.full((FEW,), 1e-4)
    mean.begin_pass(1 / PARTICIPANTS, last=False, unit=comm.rank)
    mean.gradient(0, moved)
    mean.figures({comm.rank: Gift(10.0, 1.0, 10.0, [moved])})
    mean.exchange(torch.zeros(64, dtype=torch.float64))
    return counting.bytes


# ---- private steps


class Attends(nn.Module):
    """A small transformer that says one of ten classes of a sequence of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.norm, self.first, self.second = (
            nn.LayerNorm(64),
            nn.Linear(64, 128),
            nn.Linear(128, 64),
        )
        self.out = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        weights = (self.query(x) @ self.key(x).transpose(-1, -2) / 8).softmax(-1)
        x = self.norm(x + weights @ self.value(x))
        x = x + self.second(self.first(x).relu())
        found: Tensor = self.out(x.mean(1))
        return found


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(
        SAMPLES, 784
    )


def cnn() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(1152, 10)), torch.randn(SAMPLES, 1, 28, 28)


def transformer() -> tuple[nn.Module, Tensor]:
    return Attends(), torch.randint(0, 100, (SAMPLES, 32))


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found: Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return found


def steps(make: Callable[[], tuple[nn.Module, Tensor]], turns: int) -> dict[str, Any]:
    """A private step over a plain one, and over one of Opacus."""
    torch.manual_seed(0)
    _, inputs = make()
    batch = inputs, torch.randint(0, 10, (SAMPLES,))
    works = {"plain": plain(make()[0], batch), "private": private(make()[0], batch)}
    try:
        works["opacus"] = by_opacus(make()[0], batch)
    except ImportError:
        pass
    found = in_turns(works, turns, times=3)
    answer: dict[str, Any] = {
        "ms": {n: round(1e3 * statistics.median(f), 2) for n, f in found.items()}
    }
    for name in found.keys() - {"private"}:
        ratios = [one / other for one, other in zip(found["private"], found[name], strict=True)]
        answer[f"over {name}"] = [round(each, 2) for each in statistics.quantiles(ratios)]
    return answer


def plain(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    return step


def private(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    grid = Grid(CLIP, sum(each.numel() for each in parameters), 2 * SAMPLES)
    sums = PrivateSums(parameters, grid, NOISE, float(SAMPLES), bytes(range(32)))
    per_sample, number = PerSample(model, parameters, loss_of, grid), [0]

    def step() -> None:
        whole = per_sample.sums(batch, SAMPLES)
        number[0] += 1
        sums.seal(number[0], whole)
        for slot, parameter in enumerate(parameters):
            parameter.grad = sums.gradient(slot, whole[slot])
        sums.end_step()
        optimizer.step()

    return step


def by_opacus(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    hooked = importlib.import_module("opacus").GradSampleModule(model)
    optimizer = importlib.import_module("opacus.optimizers").DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        expected_batch_size=SAMPLES,
    )

    def step() -> None:
        optimizer.zero_grad()
        loss_of(hooked, batch).backward()
        optimizer.step()

    return step


def in_turns(
    works: Mapping[str, Callable[[], object]], turns: int, times: int = 1
) -> dict[str, list[float]]:
    """Seconds of processor time, by name, one turn after the other; the first does not count."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns + 1):
        for name, work in works.items():
            since = time.process_time()
            for _ in range(times):
                work()
            found[name].append((time.process_time() - since) / times)
    assert threading.active_count() == 1, "nothing beside it"
    return {name: each[1:] for name, each in found.items()}


if __name__ == "__main__":
    main()
