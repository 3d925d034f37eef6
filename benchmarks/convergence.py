"""How many steps does a small language model need to the same loss with each codec?

    python benchmarks/convergence.py [--seeds 3] [--only NAME ...]

A transformer of 0.1 million parameters reads the text of Python's own help, one letter after the
other, with AdamW. Four workers, as threads, exchange gradients by all_reduce with each codec and
its error feedback. The loss to be reached is that of plain numbers after 200 steps, as the mean of
40; a codec gets three times as many steps. Prints JSON: the steps of each seed, and how many times
those of plain numbers. `whole_top_k` is `top_k` with the largest of a whole segment in place of
those of each 4,096 values; with `gathered_top_k` every worker gets the payloads of all workers.
Speed means nothing here.
"""

import argparse
import json
import pydoc_data.topics
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from instep.comm.codecs.top_k import TopK
from instep.comm.memory import run_ranks
from instep.records import Attempt
from instep.sync.all_reduce import AllReduce
from instep.sync.base import make_strategy
from instep.worker.step.gradients import Gradients

WORKERS, BATCH, LENGTH, WIDTH, STEPS, OVER = 4, 8, 48, 64, 200, 40
LIMIT = 3 * STEPS

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "int8": ("int8", {}),
    "int4": ("int4", {}),
    "sign": ("sign", {}),
    "top_k": ("top_k", {}),
    "whole_top_k": ("", {}),
    "gathered_top_k": ("", {}),
    "top_k, density 0.1": ("top_k", {"density": 0.1}),
    "powersgd": ("powersgd", {"start_after": 20}),
    "powersgd, rank 1": ("powersgd", {"rank": 1, "start_after": 20}),
}


class WholeTopK(TopK):
    """The largest of all values, in float32, after their numbers."""

    segmentable = False
    reducer = "two_phase"

    def size(self, count: int) -> int:
        return 8 * self.chosen(count)

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, *, key: int, left: Tensor | None = None) -> int:
        size = self.size(len(values))
        places = values.abs().topk(size // 8).indices
        out[: size // 2].view(torch.int32).copy_(places)
        out[size // 2 : size].view(torch.float32).copy_(values[places])
        if left is not None:
            left.copy_(values)
            left[places] = 0.0
        return size

    @torch.no_grad()
    def add_into(self, total: Tensor, payload: Tensor, weight: float = 1.0) -> None:
        size = self.size(len(total))
        places = payload[: size // 2].view(torch.int32).long()
        total.index_add_(0, places, payload[size // 2 : size].view(torch.float32), alpha=weight)


class GatheredTopK(TopK):
    """Of which every rank gets the payloads of all, in place of the largest of their sum."""

    reducer = "gather"


class Reader(nn.Module):
    """Predicts the next letter from those before it."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, seen: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.letters(seen) + self.places, mask=self.mask))
        return result


def text() -> Tensor:
    every = "".join(pydoc_data.topics.topics.values())
    letters = sorted(set(every))
    return torch.tensor([letters.index(letter) for letter in every])


def trained(comm: Any, name: str, model: Reader, data: Tensor, seed: int, target: float) -> Any:
    """The mean loss of all workers in each step, until it reaches the target."""
    codec, options = CODECS[name]
    own = {"whole_top_k": WholeTopK, "gathered_top_k": GatheredTopK}
    strategy = (
        AllReduce(codec=own[name](), encode_vectors=True)
        if name in own
        else make_strategy("all_reduce", {"encode_vectors": True}, codec, options)
    )
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    strategy.start(parameters, comm, notes=1)
    gradients = Gradients(parameters, strategy.gradient)
    losses: list[float] = []
    for step in range(1, LIMIT + 1):
        draw = torch.Generator().manual_seed((seed * LIMIT + step) * WORKERS + comm.rank)
        first = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=draw)
        rows = data[first.unsqueeze(1) + torch.arange(LENGTH + 1)]
        strategy.begin_step(Attempt(0, step, 1))
        strategy.begin_pass(1 / WORKERS, last=True)
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        notes = strategy.exchange(loss.detach().double().view(1) / WORKERS)
        assert notes is not None
        strategy.hand_out()
        strategy.apply(optimizer.step)
        losses.append(float(notes))
        if statistics.fmean(losses[-OVER:]) <= target and len(losses) >= OVER:
            break
        if not target and len(losses) == STEPS:
            break
    gradients.close()
    return losses


def losses_of(name: str, seed: int, data: Tensor, target: float = 0.0) -> list[float]:
    torch.manual_seed(seed)
    letters = int(data.max()) + 1
    models = [Reader(letters) for _ in range(WORKERS)]
    for each in models[1:]:
        each.load_state_dict(models[0].state_dict())
    every: list[list[float]] = run_ranks(
        WORKERS, lambda comm: trained(comm, name, models[comm.rank], data, seed, target)
    )
    for one, other in zip(models[0].parameters(), models[-1].parameters(), strict=True):
        assert torch.equal(one, other), "replicas differ"
    return every[0]


def reached(losses: list[float], target: float) -> int | None:
    """The first step at which the mean is as low as the target."""
    steps = range(OVER, len(losses) + 1)
    return next((n for n in steps if statistics.fmean(losses[n - OVER : n]) <= target), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[name for name in CODECS if name != "none"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = text()
    found: dict[str, list[dict[str, object]]] = {name: [] for name in arguments.only}
    targets = []
    for seed in range(arguments.seeds):
        plain = losses_of("none", seed, data)
        target = statistics.fmean(plain[-OVER:])
        of_plain = reached(plain, target)
        targets.append(round(target, 4))
        for name in arguments.only:
            losses = losses_of(name, seed, data, target)
            steps, mean = reached(losses, target), statistics.fmean(losses[-OVER:])
            times = steps and of_plain and round(steps / of_plain, 2)
            found[name].append({"steps": steps, "times": times, "loss": round(mean, 4)})
            print(json.dumps({"seed": seed, "codec": name, **found[name][-1]}), flush=True)
    print(json.dumps({"targets": targets, "codecs": found}, indent=1))


if __name__ == "__main__":
    main()
