"""Has loops run in processes of their own, and brings back what came of them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from judge import NEAR, Distance, Outcome, bound, distance, same_state
from pair import MICRO_BATCHES, Pair
from plain import AS_IT_IS, PERMUTED, PERMUTED_AGAIN, Trained

HERE = Path(__file__).parent


@dataclass(frozen=True)
class References:
    """Where plain loops ended."""

    alone: Trained
    """In float64, for one micro-batch."""
    exact: Trained
    """In float64."""
    single: Trained
    """In float32."""
    bound: Distance
    """How far a run may be from it: three times what plain loops are apart."""

    def of(self, dtype: str, micro_batches: int) -> tuple[Trained, Distance]:
        """The plain loop for a run, and how far the run may be from it."""
        if dtype == "float32":
            return self.single, self.bound
        return self.alone if micro_batches == 1 else self.exact, Distance(NEAR, NEAR)


class Loops:
    """A program that forks a process for each loop, until it is closed.

    Args:
        folder: for what they leave.
        pairs: a module that has the `PAIRS`; beside the caller, or here.
        device: where all of them compute.
    """

    def __init__(self, folder: Path, pairs: str = "pairs", device: str = "cpu") -> None:
        self._folder, self._count, self._device = folder, 0, device
        self._references: dict[str, References] = {}
        self._by_block: dict[str, Trained] = {}
        self._errors = folder / "errors.txt"
        with self._errors.open("w") as errors:
            self._program = subprocess.Popen(
                [sys.executable, HERE / "zygote.py", pairs],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(folder),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )

    def close(self) -> None:
        """End it."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.close()
        self._program.wait()
        self._program.stdout.close()

    def _ask(self, pair: Pair, **request: Any) -> tuple[Path, bool]:
        """Have it done; the folder with what came of it, and whether it ended by itself."""
        self._count += 1
        folder = self._folder / f"{self._count}"
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        print(
            json.dumps(
                {"pair": pair.name, "folder": str(folder), "device": self._device, **request}
            ),
            file=self._program.stdin,
            flush=True,
        )
        answer = self._program.stdout.readline()
        if not answer:
            raise AssertionError(f"the forking program died:\n{self._errors.read_text()}")
        return folder, json.loads(answer)["ended"]

    def plain(self, pair: Pair) -> References:
        """The plain loops that runs of a pair are held against."""
        if pair.name not in self._references:
            self._references[pair.name] = self._plain(pair)
        return self._references[pair.name]

    def exact(self, pair: Pair) -> References:
        """The same for runs in float64 alone, of more than one micro-batch."""
        if pair.name not in self._references:
            (made,) = self._loops(pair, [("float64", AS_IT_IS, MICRO_BATCHES)])
            self._references[pair.name] = References(made, made, made, Distance(NEAR, NEAR))
        return self._references[pair.name]

    def _plain(self, pair: Pair) -> References:
        ways = [AS_IT_IS, PERMUTED, PERMUTED_AGAIN]
        wanted = [("float64", AS_IT_IS, 1), ("float64", AS_IT_IS, MICRO_BATCHES)]
        wanted += [("float32", way, MICRO_BATCHES) for way in ways]
        if not pair.draws:
            del wanted[1]  # one pass a step, whatever the job's micro-batches are
        made = self._loops(pair, wanted)
        return References(made[0], made[-4], made[-3], bound(made[-3:]))

    def by_block(
        self, pair: Pair, blocks: list[str], pieces: int, dtype: str = "float64"
    ) -> Trained:
        """The plain loop of a pair, whose draws are keyed as in stages if blocks are named."""
        key = f"{pair.name} {blocks} {pieces} {dtype}"
        if key not in self._by_block:
            wanted = [(dtype, AS_IT_IS, MICRO_BATCHES)]
            (self._by_block[key],) = self._loops(pair, wanted, blocks=blocks, pieces=pieces)
        return self._by_block[key]

    def _loops(self, pair: Pair, wanted: list[tuple[str, int, int]], **more: Any) -> list[Trained]:
        folder, ended = self._ask(pair, do="plain", loops=wanted, **more)
        if (failed := folder / "failed-plain.json").exists():
            raise AssertionError(f"the plain loop failed: {json.loads(failed.read_text())['text']}")
        assert ended, "the plain loop does not end"
        made = [
            torch.load(folder / f"plain-{number}.pt", weights_only=False)
            for number in range(len(wanted))
        ]
        for loop in made:
            assert all(map(math.isfinite, loop.losses)), "the plain loop itself computes no number"
        return made

    def run(
        self,
        pair: Pair,
        references: References | None,
        workers: int,
        dtype: str,
        *,
        micro_batches: int = MICRO_BATCHES,
        wrong_weight: float | None = None,
        job: Mapping[str, Any] | None = None,
        limit_s: float | None = None,
    ) -> Outcome:
        """Train a pair under instep, and hold it against the plain loop.

        `job` has tables of the job; with `mesh`, the model is taken from the run's folder.
        """
        folder, ended = self._ask(
            pair,
            do="run",
            workers=workers,
            dtype=dtype,
            micro_batches=micro_batches,
            wrong_weight=wrong_weight,
            job=job,
            limit_s=limit_s,
        )
        outcome = Outcome(workers, micro_batches, dtype, ended=ended, run=folder / "runs" / "run")
        failures = [json.loads(f.read_text()) for f in sorted(folder.glob("failed-*.json"))]
        if failures:
            # another process may only have heard the echo of what ended the run
            causes = [f for f in failures if f["kind"] not in ("PeerError", "RunError")]
            first = (causes or failures)[0]
            outcome.error, outcome.error_kind = first["text"], first["kind"]
            outcome.ours = first["ours"]
            outcome.steps = _steps_in(folder)
            return outcome
        if not ended:
            return outcome
        states = [
            torch.load(folder / f"trained-{rank}.pt", weights_only=False)
            for rank in range(1 if "mesh" in (job or {}) else workers)
        ]
        said = json.loads((folder / "said.json").read_text())
        outcome.verdict = str(said["summary"].get("same_as_one_machine") or "")
        outcome.said_before = said["said_before"]
        outcome.steps = said["summary"]["steps"]
        outcome.agree = all(same_state(s.end, states[0].end) for s in states)
        if references is not None:
            plain, outcome.bound = references.of(dtype, micro_batches)
            outcome.distance = distance(states[0], plain)
        outcome.trained = states[0]
        return outcome


def _steps_in(folder: Path) -> int:
    from instep.events import LEDGER, read_records

    ledger = folder / "runs" / "run" / "ledger.bin"
    return int(read_records(ledger, LEDGER)["step"].max(initial=0)) if ledger.exists() else 0
