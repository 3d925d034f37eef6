"""Is a pipeline's bubble that of theory, and are measured cuts good?

    python benchmarks/pipeline.py [bubble|cuts|torch] [--turns 5]

`bubble`: two stages whose blocks sleep, in two processes; the time of a micro-batch beside
(parts + stages - 1) times that of one part. `cuts`: models of unequal blocks; the pipeline at the
measured cut, at each other cut, and at equal numbers of blocks, in turns. `torch`: the same model
cut by hand in torch's PipelineStage and Schedule1F1B, in turns. Prints JSON. `ONLY=asleep` leaves
out the models that compute, for a busy machine.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from instep.parallel.pipeline import Pipeline

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
        return Sleep.apply(x * self.scale, self.seconds)


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
        x = self.start(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


SLEEP_S = 0.03
"""Of a block and a part, forward; backward twice that."""

SAMPLES = 512
SHAPES = {
    "falling": [2048, 1536, 1024, 512, 256, 128, 64, 64],
    "heavy head": [256, 256, 256, 256, 256, 256, 256, 3072],
    "heavy middle": [128, 128, 2560, 128, 128, 128, 128, 128],
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"{name}, asleep": lambda widths=widths: nn.Sequential(
            *(Sleeper(width / 100_000) for width in widths)
        )
        for name, widths in SHAPES.items()
    },
    **{name: lambda widths=widths: Layers(widths) for name, widths in SHAPES.items()},
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
            pipeline = Pipeline(
                model, call_of(model), batch, 8, group=dist.group.WORLD, schedule=schedule,
                parts=parts,
            )  # fmt: skip
            pipeline.run(batch, 8, 1)
            measured = min(
                took(lambda one=pipeline, b=batch: one.run(b, 8, 1)) for _ in range(turns)
            )
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
            options: dict[str, Any] = {"timed": cut == "measured"}
            if isinstance(cut, int):
                options["cuts"] = [f"blocks.{cut}.0" if isinstance(model, Layers) else str(cut)]
            pipelines[cut] = Pipeline(
                model, call_of(model), batch, SAMPLES, group=dist.group.WORLD, parts=8, **options
            )
        times: dict[Any, list[float]] = {cut: [] for cut in pipelines}
        for _ in range(turns):
            for cut, pipeline in pipelines.items():
                times[cut].append(took(lambda one=pipeline, b=batch: one.run(b, SAMPLES, 1)))
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


def by_torch(turns: int) -> list[dict[str, Any]]:
    found = []
    for width in (64, 256, 512):
        parts, widths = 8, [4 * width] * 8
        batch = torch.randn(SAMPLES, 8)
        torch.manual_seed(1)
        ours = Layers(widths, width)
        pipeline = Pipeline(
            ours, call_of(ours), batch, SAMPLES, group=dist.group.WORLD, parts=parts,
            cuts=["blocks.4.0"],
        )  # fmt: skip
        torch.manual_seed(1)
        theirs = Layers(widths, width)
        rank, half = dist.get_rank(), Half(theirs, dist.get_rank())
        stage = PipelineStage(half, rank, RANKS, torch.device("cpu"))
        schedule = Schedule1F1B(stage, parts, loss_fn=lambda out, _: out.square().mean())

        def step(schedule: Any = schedule, rank: int = rank, batch: Tensor = batch) -> None:
            schedule.step(batch) if rank == 0 else schedule.step(target=batch, losses=[])

        times: list[tuple[float, float]] = []
        for _ in range(turns + 2):
            times.append((took(step), took(lambda one=pipeline, b=batch: one.run(b, SAMPLES, 1))))
        ratios = [torch_s / ours_s for torch_s, ours_s in times[2:]]
        found.append(
            {
                "width": width,
                "torch_ms": round(1e3 * statistics.median(one for one, _ in times[2:]), 1),
                "ours_ms": round(1e3 * statistics.median(one for _, one in times[2:]), 1),
                "torch_over_ours": round(statistics.median(ratios), 3),
                "quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
            }
        )
    return found


class Half(nn.Module):
    """A stage cut by hand."""

    def __init__(self, whole: Layers, rank: int) -> None:
        super().__init__()
        self.blocks = whole.blocks[4:] if rank else whole.blocks[:4]
        self.start, self.head = (None, whole.head) if rank else (whole.start, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.start is None else self.start(x)
        for block in self.blocks:
            x = x + block(x)
        return x if self.head is None else self.head(x)


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
