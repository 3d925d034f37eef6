"""What does the engine itself add to a step?

    python benchmarks/engine.py [--rounds 8] [--steps 100] [--starts 4] [--beside PROGRAM]

The model is one number, and its update does nothing; what is left is the engine: notes,
sums, buffers, the vote, the commit, the ledger. Alone and as two processes over gloo, each
with every commit voted for and without. Blocks of steps take turns, so that whatever else
the machine does falls on all alike; and each case is started several times, since two starts
of the same program differ by more than what is looked for. PROGRAM, say one that measures
an older version, takes turns with them: it is started as this file starts itself
(`--serve CASE RANK FOLDER`), and answers as `serve` does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore
from turns import write

if TYPE_CHECKING:
    from instep.engine.assignment import Lockstep
    from instep.engine.engine import Engine
    from instep.engine.update import Update

CASES = {"alone": (1, False), "alone, vote": (1, True), "two": (2, False), "two, vote": (2, True)}
SAMPLES = 1 << 40


def engine_around(
    model: "torch.nn.Module",
    update: "Update",
    folder: Path,
    *,
    rank: int = 0,
    size: int = 1,
    votes: bool = False,
    **job: object,
) -> "tuple[Engine, Any, Lockstep]":
    """An engine that has started, what stands in for its member of a run, and who computes what.

    Args:
        model: whose parameters are all agreed on.
        update: moves them.
        folder: of the run, and where ranks meet.
        rank: of this process.
        size: how many processes there are.
        votes: whether every commit is voted for.
        job: entries of the job file.
    """
    from instep.comm.alone import AloneComm
    from instep.comm.protocol.messages import Form
    from instep.comm.torch_comm import TorchComm
    from instep.data.batches import Batches
    from instep.engine.assignment import Lockstep
    from instep.engine.engine import Engine
    from instep.engine.turns import TurnState
    from instep.job import file as spec_file
    from instep.sync.base import make_strategy

    member: Any = SimpleNamespace(
        job=spec_file.build(
            {"recipe": "a.py:recipe", "workers": size, **job}, source="a benchmark"
        ),
        run=folder,
        number=rank,
        started=time.time(),
        form=Form(generation=1, rank=rank, members=list(range(size)), checkpoint=""),
        regroups=False,
        lease=SimpleNamespace(fenced=False, check=lambda: None, fence=lambda: None),
        records=SimpleNamespace(flush=lambda: None, add=lambda *_: None),
        emit=lambda *_, **__: None,
        waits_for_writer=lambda: False,
    )
    parameters = list(model.parameters())
    turn = TurnState("", parameters, update, make_strategy("all_reduce", {}))
    engine = Engine(member, model, parameters, [turn], votes=votes)
    store = folder / f"meeting-{size}-{votes}"
    comm = TorchComm(FileStore(str(store), size), rank, size) if size > 1 else AloneComm()
    engine.begin(comm, comm)
    batches = Batches.of_job(member.job, SAMPLES)
    assignment = Lockstep(member.form, member.job.train, batches, by_speed=False)
    engine.start(comm, comm, assignment)
    return engine, member, assignment


def stepper(case: str, rank: int, folder: Path) -> Callable[[], None]:
    """One step of one worker's engine, around next to nothing."""
    from instep.engine.step.agreement import Weighed
    from instep.engine.update import Update

    size, votes = CASES[case]
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    update = Update(optimizer, None, [], seed=0, max_grad_norm=None, scaler=scaler)
    engine, _, assignment = engine_around(model, update, folder, rank=rank, size=size, votes=votes)
    planned = assignment.plan(1, SAMPLES, merge=True)

    def step() -> None:
        where, share = next(planned)
        engine.begin_step(engine.state.progress.step + 1, where)
        passes, whole = {}, where.stop - where.first
        for number, part in enumerate(share.passes):
            engine.passes.begin(part, part.size / whole, last=number == len(share.passes) - 1)
            engine.passes.gradient(0, torch.ones_like(model.weight))
            engine.passes.end(part, part.size / whole)
            passes[part.number] = Weighed(1.0 * part.size, float(part.size))
        engine.agree(passes, stop=False, samples=share.stop - share.first)
        engine.commit(lambda step: None)

    return step


def serve(step: Callable[[], None]) -> None:
    """Run a block of steps for each number on stdin; answer with microseconds a step."""
    print("ready", flush=True)
    for line in sys.stdin:
        steps = int(line)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps([wall / steps * 1e6, cpu / steps * 1e6]), flush=True)


class Group:
    """The processes of one case, which compute when they are told to."""

    def __init__(self, program: Path, case: str, folder: Path) -> None:
        folder.mkdir()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if program != Path(__file__):
            environment.pop("PYTHONPATH", None)
        self.blocks: list[list[float]] = []
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(program), "--serve", case, str(rank), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(CASES[case][0])
        ]
        for rank in self._ranks:
            assert self._line(rank) == "ready\n", "it did not start"

    def _line(self, rank: "subprocess.Popen[str]") -> str:
        assert rank.stdout is not None
        return rank.stdout.readline()

    def block(self, steps: int) -> list[float]:
        """Wall and CPU microseconds of a step, of rank 0."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        first, *_ = [json.loads(self._line(rank)) for rank in self._ranks]
        return [float(figure) for figure in first]

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def one_start(beside: Path | None, steps: int, rounds: int) -> dict[str, list[list[float]]]:
    """Start all programs, and let them take turns; the blocks of each case."""
    groups: dict[str, Group] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, (case, (_, votes)) in enumerate(CASES.items()):
                own = Path(folder) / str(number)
                groups[case] = Group(Path(__file__), case, own)
                if beside and not votes:
                    groups[f"{case}, beside"] = Group(beside, case, Path(f"{own}-beside"))
            for group in groups.values():
                group.block(steps)
            for _ in range(rounds):
                for group in groups.values():
                    group.blocks.append(group.block(steps))
        finally:
            for group in groups.values():
                group.end()
    return {case: group.blocks for case, group in groups.items()}


def quartiles(values: list[float]) -> str:
    low, high = np.quantile(values, [0.25, 0.75])
    return f"{statistics.median(values):7.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve:
        case, rank, folder = args.serve
        serve(stepper(case, int(rank), Path(folder)))
        return
    blocks: dict[str, list[list[float]]] = {}
    for _ in range(args.starts):
        for case, more in one_start(args.beside, args.steps, args.rounds).items():
            blocks.setdefault(case, []).extend(more)
    print("microseconds a step, median of blocks (quartiles)")
    results: list[dict[str, object]] = []
    for case, of_case in blocks.items():
        wall, cpu = ([block[n] for block in of_case] for n in (0, 1))
        print(f"{case:16} wall {quartiles(wall)}   cpu of rank 0 {quartiles(cpu)}")
        results.append({"case": case, "steps": args.steps, "wall_us": wall, "cpu_us": cpu})
    if args.json:
        write(args.json, results)


if __name__ == "__main__":
    main()
