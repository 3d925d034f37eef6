"""Is a pipeline's bubble that of theory, and are measured cuts good?

    python benchmarks/pipeline.py [bubble|cuts|torch] [--turns 5]

`bubble`: two stages whose blocks sleep, in two processes; the time of a micro-batch beside
(parts + stages - 1) times that of one part. `cuts`: models of unequal blocks; the pipeline at the
measured cut, at each other cut, and at equal numbers of blocks, in turns. `torch`: the same model
cut by hand in torch's PipelineStage and its schedules, in turns, with about 2, 10 and 50 ms of work
for a part on a rank; seconds, and CPU seconds of both processes, which a busy machine disturbs
less. Prints JSON. `ONLY=asleep` leaves out all models but those whose names end so.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional

from instep.parallel.pipeline import Pipeline, find_cuts

RANKS = 2


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.scale, self.seconds = nn.Parameter(torch.ones(8)), seconds

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sleep.apply(x * self.scale, self.seconds)  # type: ignore[no-untyped-call]
        return result


class Layers(nn.Module):
    def __init__(self, widths: list[int], width: int = 256) -> None:
        super().__init__()
        self.start = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, width))
            for inner in widths
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.start is None else self.start(x)
        for block in self.blocks:
            x = x + block(x)
        if self.head is not None:
            x = self.head(x)
        return x


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(-3, -2)
        query, key, value = parts
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(-3, -2).flatten(-2))
        result: Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
        return result


class GPT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.start, self.places = nn.Embedding(256, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(8))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.start is not None:
            x = self.start(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        if self.head is not None:
            x = self.head(x)
        return x


def asleep(widths: list[int]) -> nn.Module:
    return nn.Sequential(*(Sleeper(width / 100_000) for width in widths))


SLEEP_S = 0.03
"""Of a block and a part, forward; backward twice that."""

SAMPLES = 512
SHAPES = {
    "falling": [2048, 1536, 1024, 512, 256, 128, 64, 64],
    "heavy head": [256, 256, 256, 256, 256, 256, 256, 3072],
    "heavy middle": [128, 128, 2560, 128, 128, 128, 128, 128],
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"{name}, asleep": partial(asleep, widths) for name, widths in SHAPES.items()},
    **{name: partial(Layers, widths) for name, widths in SHAPES.items()},
}


def call_of(model: nn.Module) -> Callable[[Any, int], tuple[Tensor, int]]:
    return lambda batch, samples: (model(batch).square().mean(), samples)


def took(work: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def bubble(turns: int) -> list[dict[str, Any]]:
    found = []
    for parts in (2, 4, 8):
        batch = torch.randn(8, 8)
        line: dict[str, Any] = {"parts": parts}
        for schedule in ("gpipe", "1f1b", "interleaved"):
            model = nn.Sequential(*(Sleeper(SLEEP_S) for _ in range(4)))
            options: dict[str, Any] = {"schedule": schedule, "parts": parts}
            given = model, call_of(model), batch, 8
            found_cuts, _ = find_cuts(*given, ranks=RANKS, timed=False, **options)
            pipeline = Pipeline(*given, group=dist.group.WORLD, cuts=found_cuts, **options)
            pipeline.run(batch, 8, 1)
            measured = min(took(partial(pipeline.run, batch, 8, 1)) for _ in range(turns))
            chunks = 2 if schedule == "interleaved" else 1
            theory = (parts * chunks + RANKS - 1) * 3 * SLEEP_S * 2 / chunks
            line[schedule] = {"s": round(measured, 4), "of_theory": round(measured / theory, 3)}
        found.append(line)
    return found


def cuts(turns: int) -> list[dict[str, Any]]:
    found = []
    for name, make in MODELS.items():
        if not name.endswith(os.environ.get("ONLY", "")):
            continue
        batch = torch.randn(SAMPLES, 8)
        pipelines = {}
        for cut in ("measured", "equal", *range(1, 8)):
            torch.manual_seed(1)
            model = make()
            given = model, call_of(model), batch, SAMPLES
            names = [[f"blocks.{cut}.0" if isinstance(model, Layers) else str(cut)]]
            if not isinstance(cut, int):
                options: dict[str, Any] = {"ranks": RANKS, "schedule": "1f1b", "parts": 8}
                names = [find_cuts(*given, timed=cut == "measured", **options)[0]]
                dist.broadcast_object_list(names)
            pipelines[cut] = Pipeline(*given, group=dist.group.WORLD, parts=8, cuts=names[0])
        times: dict[Any, list[float]] = {cut: [] for cut in pipelines}
        for _ in range(turns):
            for cut, pipeline in pipelines.items():
                times[cut].append(took(partial(pipeline.run, batch, SAMPLES, 1)))
        low = {cut: statistics.quantiles(each, n=4)[0] for cut, each in times.items()}
        best = min(value for cut, value in low.items() if isinstance(cut, int))
        found.append(
            {
                "model": name,
                "measured_cut": pipelines["measured"].cuts,
                "equal_cut": pipelines["equal"].cuts,
                "ms": {str(cut): round(1e3 * value, 1) for cut, value in low.items()},
                "measured_of_best": round(low["measured"] / best, 3),
                "equal_of_measured": round(low["equal"] / low["measured"], 3),
            }
        )
    return found


PARTS = 8
BY_HAND: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str, int]] = {
    "layers, 2 ms": (lambda: Layers([1024] * 8), lambda: torch.randn(64, 8), "blocks.{}.0", 8),
    "gpt, 2 ms": (lambda: GPT(64), lambda: torch.randint(256, (8, 32)), "blocks.{}", 8),
    "layers, 10 ms": (lambda: Layers([1024] * 8), lambda: torch.randn(512, 8), "blocks.{}.0", 3),
    "gpt, 10 ms": (lambda: GPT(128), lambda: torch.randint(256, (32, 64)), "blocks.{}", 3),
    "layers, 50 ms": (
        lambda: Layers([2048] * 8, 512),
        lambda: torch.randn(720, 8),
        "blocks.{}.0",
        1,
    ),
    "gpt, 50 ms": (lambda: GPT(256), lambda: torch.randint(256, (32, 128)), "blocks.{}", 1),
}
"""A model, a batch, how a block is called, and turns for each turn of the longest."""


def by_torch(turns: int) -> list[dict[str, Any]]:
    found = []
    for name, (make, batch_of, block, more) in BY_HAND.items():
        if not name.endswith(os.environ.get("ONLY", "")):
            continue
        for schedule in ("1f1b", "gpipe", "interleaved"):
            batch = batch_of()
            pairs = beside(make, batch, block, schedule, more * turns + 2)[2:]
            stages = 4 if schedule == "interleaved" else 2
            found.append({"model": name, "schedule": schedule, **compared(pairs, PARTS * stages)})
            if dist.get_rank() == 0:
                print(found[-1], file=sys.stderr, flush=True)
    return found


Pair = tuple[float, float, float, float]
"""Seconds and CPU seconds of torch's, and of ours."""


def beside(
    make: Callable[[], nn.Module], batch: Tensor, block: str, schedule: str, turns: int
) -> list[Pair]:
    rank, stages = dist.get_rank(), 4 if schedule == "interleaved" else 2
    borders = [8 * stage // stages for stage in range(stages + 1)]
    torch.manual_seed(1)
    model = make()
    pipeline = Pipeline(
        model, call_of(model), batch, len(batch), group=dist.group.WORLD, schedule=schedule,
        parts=PARTS, cuts=[block.format(border) for border in borders[1:-1]],
    )  # fmt: skip
    own: list[Any] = [
        PipelineStage(
            by_hand(make, borders[stage], borders[stage + 1]), stage, stages, torch.device("cpu")
        )
        for stage in range(rank, stages, RANKS)
    ]
    options: Any = {"loss_fn": lambda out, _: out.square().mean(), "scale_grads": False}
    theirs: Any
    if schedule == "interleaved":
        theirs = ScheduleInterleaved1F1B(own, PARTS, **options)
    else:
        theirs = (ScheduleGPipe if schedule == "gpipe" else Schedule1F1B)(own[0], PARTS, **options)

    def step() -> None:
        if rank == 0:
            theirs.step(batch, return_outputs=False)
        else:
            theirs.step(target=batch, losses=[], return_outputs=False)

    pairs = []
    for turn in range(turns):
        works = [step, lambda: pipeline.run(batch, len(batch), 1)]
        one, other = (measured(work) for work in (works if turn % 2 else works[::-1]))
        pairs.append((*one, *other) if turn % 2 else (*other, *one))
    return pairs


def by_hand(make: Callable[[], nn.Module], first: int, stop: int) -> nn.Module:
    """A stage of one of the models."""
    torch.manual_seed(1)
    model: Any = make()
    model.blocks = model.blocks[first:stop]
    if first:
        model.start = model.places = None
    if stop < 8:
        model.head = None
    assert isinstance(model, nn.Module)
    return model


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all processes."""
    before = time.process_time()
    seconds = took(work)
    used = torch.tensor(time.process_time() - before, dtype=torch.float64)
    dist.all_reduce(used)
    return seconds, float(used)


def compared(pairs: list[Pair], passes: int) -> dict[str, Any]:
    ratios = [pair[0] / pair[2] for pair in pairs]
    used = [pair[1] / pair[3] for pair in pairs]
    extra = [(pair[3] - pair[1]) / passes for pair in pairs]
    return {
        "torch_ms": round(1e3 * statistics.median(pair[0] for pair in pairs), 1),
        "ours_ms": round(1e3 * statistics.median(pair[2] for pair in pairs), 1),
        "torch_over_ours": round(statistics.median(ratios), 3),
        "quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
        "cpu_torch_over_ours": round(statistics.median(used), 3),
        "cpu_quartiles": [round(q, 3) for q in statistics.quantiles(used, n=4)[::2]],
        "more_cpu_us_per_part_and_stage": round(1e6 * statistics.median(extra)),
    }


QUESTIONS = {"bubble": bubble, "cuts": cuts, "torch": by_torch}


def rank_of(rank: int, meeting: str, question: str, turns: int, answer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    found = QUESTIONS[question](turns)
    if rank == 0:
        answer.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question", choices=[*QUESTIONS, "all"], nargs="?", default="all")
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }
    for question in QUESTIONS if arguments.question == "all" else [arguments.question]:
        with tempfile.TemporaryDirectory() as folder:
            answer = context.Queue()
            ranks = [
                context.Process(
                    target=rank_of,
                    args=(rank, f"{folder}/meeting", question, arguments.turns, answer),
                )
                for rank in range(RANKS)
            ]
            for process in ranks:
                process.start()
            found[question] = answer.get(timeout=1000)
            for process in ranks:
                process.join()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
