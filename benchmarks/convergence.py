"""How many steps does a small language model need to the same loss with each codec?

    python benchmarks/convergence.py [--seeds 0 1 2 3 4] [--only NAME ...] [--json FILE]

A transformer of 0.1 million parameters reads the text of Python's own help, one letter after the
other, with AdamW. Four workers, as threads, exchange gradients by all_reduce with each codec and
its error feedback. The loss to be reached is that of plain numbers after 200 steps, as the mean of
40; a codec gets three times as many steps. `whole_top_k` is `top_k` with the largest of a whole
segment in place of those of each 4,096 values; with `gathered_top_k` every worker gets the payloads
of all workers. Names that end with `vectors` encode biases and norms too; those that end with
`servers` use `server_sync` with two servers.

The cases of `ROUNDS` are whole runs, beside `all_reduce` with the same seed, batch and rate: local
steps until a validation loss is that of `all_reduce` after 200 steps.

Prints how many times the steps of plain numbers each needs: the geometric mean over the seeds, and
Student's interval of 95 %. Speed means nothing here.
"""

import argparse
import pydoc_data.topics
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from turns import write

import instep
from instep.comm.codecs.top_k import TopK
from instep.comm.memory import run_ranks
from instep.engine.gradients import Gradients
from instep.engine.served.optimizer import ServedUpdate
from instep.engine.update import Update
from instep.records import Attempt
from instep.report.figures.outcomes import Outcome
from instep.report.figures.ratios import ratio_of
from instep.store.run_folder import RunFolder
from instep.sync.all_reduce import AllReduce
from instep.sync.base import make_strategy
from instep.sync.generation import Generation, Servers
from instep.system.host_memory import HostMemory

WORKERS, BATCH, LENGTH, WIDTH, STEPS, OVER = 4, 8, 48, 64, 200, 40
LOCAL_STEPS = 20
LIMIT = 3 * STEPS

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "int8": ("int8", {}),
    "int8, vectors": ("int8", {}),
    "int4": ("int4", {}),
    "int4, vectors": ("int4", {}),
    "none, servers": ("none", {}),
    "int8, servers": ("int8", {}),
    "int4, servers": ("int4", {}),
    "int4, block 256": ("int4", {"block": 256}),
    "int4, block 128": ("int4", {"block": 128}),
    "int4, block 64": ("int4", {"block": 64}),
    "int4, block 128, random": ("int4", {"block": 128, "rounding": "random"}),
    "sign, vectors": ("sign", {}),
    "top_k, vectors": ("top_k", {}),
    "whole_top_k, vectors": ("", {}),
    "gathered_top_k, vectors": ("", {}),
    "top_k, density 0.1, vectors": ("top_k", {"density": 0.1}),
    "powersgd, vectors": ("powersgd", {"start_after": 20}),
    "powersgd, rank 1, vectors": ("powersgd", {"rank": 1, "start_after": 20}),
}
SERVERS = 2
ROUNDS: dict[str, dict[str, Any]] = {
    "diloco": {},
    "diloco, int4": {"codec": "int4"},
    "diloco, int4, start_after 40": {"codec": "int4", "options": {"start_after": 40}},
    "diloco, int4, start_after 40, momentum 0.8": {
        "codec": "int4",
        "options": {"start_after": 40, "outer_momentum": 0.8},
    },
    "diloco, int4, momentum 0.8": {"codec": "int4", "options": {"outer_momentum": 0.8}},
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
    served = name.endswith("servers")
    own = {"whole_top_k, vectors": WholeTopK, "gathered_top_k, vectors": GatheredTopK}
    strategy = (
        AllReduce(codec=own[name](), encode_vectors=True)
        if name in own
        else make_strategy(
            "server_sync" if served else "all_reduce",
            {"encode_vectors": name.endswith("vectors")},
            codec,
            options,
        )
    )
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    update = (ServedUpdate if served else Update)(
        optimizer,
        None,
        parameters,
        seed=seed,
        max_grad_norm=None,
        scaler=torch.amp.GradScaler("cuda", enabled=False),
    )
    servers = None
    if isinstance(update, ServedUpdate):
        servers = Servers(range(WORKERS, comm.size), update)
    generation = Generation(notes=1, memory=HostMemory(), servers=servers)
    strategy.start(parameters, comm, generation)
    gradients = Gradients(parameters, strategy.gradient)
    losses: list[float] = []
    for step in range(1, LIMIT + 1):
        draw = torch.Generator().manual_seed((seed * LIMIT + step) * WORKERS + comm.rank)
        first = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=draw)
        rows = data[first.unsqueeze(1) + torch.arange(LENGTH + 1)]
        strategy.begin_step(Attempt(0, step, 1))
        strategy.begin_pass(1 / WORKERS, last=True)
        loss = torch.zeros(())
        if comm.rank < WORKERS:
            logits = model(rows[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
            loss.backward()
        notes = strategy.exchange(loss.detach().double().view(1) / WORKERS)
        assert notes is not None
        strategy.prepare(step, 1.0)
        strategy.hand_out()
        strategy.apply(lambda: update.apply(step))  # noqa: B023
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
    ranks = WORKERS + (SERVERS if name.endswith("servers") else 0)
    models = [Reader(letters) for _ in range(ranks)]
    for each in models[1:]:
        each.load_state_dict(models[0].state_dict())
    every: list[list[float]] = run_ranks(
        ranks, lambda comm: trained(comm, name, models[comm.rank], data, seed, target)
    )
    for one, other in zip(models[0].parameters(), models[WORKERS - 1].parameters(), strict=True):
        assert torch.equal(one, other), "replicas differ"
    return every[0]


def reached(losses: list[float], target: float) -> int | None:
    """The first step at which the mean is as low as the target."""
    steps = range(OVER, len(losses) + 1)
    return next((n for n in steps if statistics.fmean(losses[n - OVER : n]) <= target), None)


def recipe() -> instep.Recipe:
    """The same for whole runs, with windows of nine parts in ten of the text, and of the rest."""
    data = text()
    split = len(data) * 9 // 10

    def windows(first: int, last: int, count: int) -> TensorDataset:
        draw = torch.Generator().manual_seed(first + 1)
        begins = first + torch.randint(last - first - LENGTH - 1, (count,), generator=draw)
        rows = data[begins.unsqueeze(1) + torch.arange(LENGTH + 1)]
        return TensorDataset(rows[:, :-1], rows[:, 1:])

    return instep.Recipe(
        model=Reader(int(data.max()) + 1),
        loss=lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        train=windows(0, split, LIMIT * WORKERS * BATCH),
        validate=windows(split, len(data), 192),
    )


def validated(sync: dict[str, Any], seed: int, steps: int, every: int, target: float) -> Any:
    """Of one run, the step and the loss of each validation."""
    with tempfile.TemporaryDirectory() as folder:
        run = instep.train(
            f"{Path(__file__).resolve()}:recipe",
            workers=1,
            runs=folder,
            seed=seed,
            quiet=True,
            sync=sync,
            stop={"target": target},
            train={
                "steps": steps,
                "global_batch": WORKERS * BATCH,
                "micro_batches": WORKERS,
                "validate_every": every,
                "threads": 1,
            },
        )
        return [(e["step"], e["metrics"]["loss"]) for e in RunFolder(run.path).validations]


def of_rounds(seed: int, names: list[str]) -> dict[str, tuple[float | None, float]]:
    """Local steps of each case to the loss of `all_reduce` after `STEPS`, and that loss."""
    if not names:
        return {}
    target = validated({}, seed, STEPS, STEPS, 0.0)[-1][1]
    found = {}
    for name in names:
        sync = {"name": "diloco", "participants": WORKERS, **ROUNDS[name]}
        alone = sync.get("options", {}).get("start_after", 0)
        commits = alone + (LIMIT - alone) // LOCAL_STEPS
        curve = validated(sync, seed, commits, 1, target)
        points = tuple((n + max(0, n - alone) * (LOCAL_STEPS - 1.0), loss) for n, loss in curve)
        found[name] = Outcome(0, 0, 0, None, points).time_to(target), target
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=range(5))
    every = [name for name in (*CODECS, *ROUNDS) if name != "none"]
    parser.add_argument("--only", nargs="*", default=every, choices=every)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = text()
    steps: dict[str, list[float | None]] = {name: [] for name in arguments.only}
    plain: dict[str, list[float | None]] = {name: [] for name in arguments.only}
    for seed in arguments.seeds:
        whole = losses_of("none", seed, data)
        target = statistics.fmean(whole[-OVER:])
        of_plain = reached(whole, target)
        for name in arguments.only:
            if name in ROUNDS:
                continue
            losses = losses_of(name, seed, data, target)
            steps[name].append(reached(losses, target))
            plain[name].append(of_plain)
        for name, (count, _) in of_rounds(seed, [n for n in ROUNDS if n in steps]).items():
            steps[name].append(count)
            plain[name].append(STEPS)
        print(seed, {name: each[-1] for name, each in steps.items()}, flush=True)
    results: list[dict[str, Any]] = []
    for name, counts in steps.items():
        ratio = ratio_of(counts, plain[name])
        results.append({"name": name, "steps": counts, "plain": plain[name]})
        results[-1] |= {"ratio": ratio and [round(each, 4) for each in ratio]}
        print(f"{name:30} {ratio} times the steps, {counts}")
    if arguments.json:
        write(arguments.json, results)


if __name__ == "__main__":
    main()
