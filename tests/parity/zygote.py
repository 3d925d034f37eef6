"""Starts the loops of a pair, each in a process of its own, quickly.

A program that has imported torch and whatever models need, and forks: so a run of three
workers is there in a moment, and each loop begins in a process where nothing was trained.
The workers call `instep.join`, with the environment that torchrun gives them.

Standard input has one request a line, standard output one answer a line (JSON). What a
process found lies in its folder: `trained-RANK.pt`, or `failed-RANK.json`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain
import torch
from pair import GLOBAL_BATCH, SEED, Pair
from safetensors.torch import load_file

import instep
import instep.client.join.joining
import instep.client.join.session
import instep.worker.training.training
import warm
from instep.errors import InstepError
from instep.events import STEPS as STEP_RECORDS
from instep.events import read_events, read_records

LIMIT_S = 900.0
"""For one request that does not say; a run takes about a second on a quiet machine."""

MADE = importlib.import_module(sys.argv[1])
"""Its `PAIRS` are those that can be asked for."""

GRACE_S = 10.0
"""For the others, once one has failed."""


def run_plain(pair: Pair, request: dict[str, Any], folder: Path) -> None:
    """Every plain loop that was asked for."""
    for number, (dtype, way, micro_batches) in enumerate(request["loops"]):
        blocks, pieces = request.get("blocks", ()), request.get("pieces", 1)
        how = way, micro_batches, blocks, pieces, request["device"]
        trained = plain.train(pair, getattr(torch, dtype), *how)
        torch.save(trained, folder / f"plain-{number}.pt")


def run_worker(pair: Pair, request: dict[str, Any], folder: Path, rank: int) -> None:
    """One worker of a run under `instep.join`."""
    size, job = request["workers"], dict(request.get("job") or {})
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # part of the start's name only: instep opens no such port
        TORCHELASTIC_RUN_ID=folder.name,
        OMP_NUM_THREADS="1",
    )
    if (weight := request.get("wrong_weight")) and rank == size - 1:
        _spoil(weight)
    parts = pair.make(getattr(torch, request["dtype"]))
    start = plain.state_of(parts.model)
    train = {
        "steps": pair.steps,
        "global_batch": GLOBAL_BATCH,
        "micro_batches": request["micro_batches"],
        "device": request["device"],
        **pair.train,
        **job.pop("train", {}),
    }
    session = instep.join(
        instep.Recipe(**parts.recipe()),
        name="run",
        runs=folder / "runs",
        seed=SEED,
        quiet=True,
        train=train,
        data={"loaders": 0, **job.pop("data", {})},
        **job,
    )
    losses = [step.loss for step in session.steps()]
    if "mesh" not in job:
        end = plain.state_of(parts.model)
    elif rank == 0:
        end = _saved(session.run, start)
    else:
        return
    torch.save(plain.Trained(start, end, losses), folder / f"trained-{rank}.pt")
    if rank == 0:
        said = {"summary": session.summary, "said_before": _said_before(session.run)}
        (folder / "said.json").write_text(json.dumps(said, default=str))


def _saved(run: Path, start: plain.State) -> plain.State:
    """The model that a mesh left: of its ranks, none has all of it."""
    saved = load_file(run / "model.safetensors")
    assert start.trained.keys() <= saved.keys(), "parameters are missing in the file"
    other = {name: saved.get(name, tensor) for name, tensor in start.other.items()}
    return plain.State({name: saved[name] for name in start.trained}, other)


def _said_before(run: Path) -> bool:
    """Whether the verdict was there before the first step began."""
    said = [e for e in read_events(run / "events.jsonl") if e["event"] == "same_as_one_machine"]
    begins = read_records(run / "steps.bin", STEP_RECORDS)["begin"]
    return bool(said) and said[0]["time"] <= begins.min(initial=float("inf"))


def _spoil(weight: float) -> None:
    """Make this worker's gradients count a little more than they do."""
    backward = torch.Tensor.backward

    def spoilt(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(self * weight, *args, **kwargs)

    torch.Tensor.backward = spoilt  # type: ignore[assignment, method-assign]


def _fork(body: Callable[[], None], folder: Path, name: str, limit_s: float) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"log-{name}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0), os.dup2(log, 1), os.dup2(log, 2)
        faulthandler.dump_traceback_later(limit_s - 5)  # where it stands, if it does not end
        body()
        code = 0
    except BaseException as error:
        ours = isinstance(error, InstepError)
        text = str(error) if ours else traceback.format_exc()
        failed = {"kind": type(error).__name__, "ours": ours, "text": text}
        (folder / f"failed-{name}.json").write_text(json.dumps(failed))
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], limit_s: float) -> bool:
    """Wait for all; whether they ended in time.

    As under torchrun, the others are ended where one has failed: a moment later, so that
    they can tell what they know of it.
    """
    deadline, left, failed = time.monotonic() + limit_s, set(pids), False
    while left and time.monotonic() < deadline:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.remove(pid)
            if ended and status and not failed:
                failed, deadline = True, time.monotonic() + GRACE_S
        time.sleep(0.005)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed or not left


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked, in processes of its own."""
    pair, folder = MADE.PAIRS[request["pair"]], Path(request["folder"])
    folder.mkdir(parents=True)
    for name in pair.needs:
        importlib.import_module(name)
    limit_s = request.get("limit_s") or LIMIT_S
    if request["do"] == "plain":
        pids = [_fork(lambda: run_plain(pair, request, folder), folder, "plain", limit_s)]
    else:
        pids = [
            _fork(lambda r=rank: run_worker(pair, request, folder, r), folder, str(rank), limit_s)
            for rank in range(request["workers"])
        ]
    return {"ended": _wait(pids, limit_s)}


if __name__ == "__main__":
    warm.begin()
    torch.set_num_threads(1)
    # on a GPU numbers would be cut to 10 bits in some passes, by their number of samples
    torch.backends.cudnn.allow_tf32 = False
    with warm.warm_roles():
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), flush=True)
