"""What a run wrote into its folder, as plain data.

`RunFolder` reads the job, the events, the ledger and the step records once, and answers
the questions that every report asks. It draws nothing and never writes. The folder of a run
that is still running, or that a crash cut short, is read as far as it got. If a session
began at an earlier checkpoint, or the workers went back because of corruption, the steps
after that were discarded, and are left out here.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import numpy as np

from instep.data.batches import Batches
from instep.data.participants import OwnRounds
from instep.data.step_sizes import RecordedSizes
from instep.errors import CheckpointError, RunError, SpecError
from instep.events import LEDGER
from instep.job.file import build
from instep.job.spec import JobSpec
from instep.state.files.manifest import FOLDER, published, read_manifest
from instep.store.audit import Audit, audit, audit_own, skipped_in
from instep.store.ledger import is_intact
from instep.store.run_files import (
    Event,
    Records,
    events_of,
    existing,
    job_of,
    records_of,
    returns_in,
    steps_of,
    without_discarded,
)
from instep.store.run_members import RunMembers
from instep.store.run_times import RunTimes
from instep.store.run_traffic import RunTraffic
from instep.words import command

WINDOW = 4096
"""Ledger records at the end in which to look for the last whole step."""


class RunPlan:
    """The steps that a run is to take.

    Args:
        spec: of the job.
        ready: its newest `worker_ready` event; empty until a worker has sent one.
        divided: its newest `data_divided` event; empty if there is none.
        ledger: what steps took, where they are not of one size.
    """

    def __init__(self, spec: JobSpec, ready: Event, divided: Event, ledger: Records) -> None:
        self._spec, self._ready, self._divided, self._ledger = spec, ready, divided, ledger
        self.steps: int | None = ready.get("last_step")
        """In all; None before a worker has said so, and in the user's own loop."""

    @cached_property
    def epoch_samples(self) -> int:
        """Positions of an epoch: samples of the training set, unless the job plans how often each
        is taken; about so many where epochs differ; 0 until a worker has said so."""
        return int(self._ready.get("samples") or 0)

    @cached_property
    def own_rounds(self) -> OwnRounds | None:
        """The data of their own that participants take; None where they have none."""
        if not (self._divided and self._spec.own_data) or self._spec.privacy.on:
            return None  # a private run says nothing of who takes what
        return OwnRounds.of_job(self._spec, self._divided["sizes"])

    @property
    def batches(self) -> Batches:
        """The batch of each step; empty while the size of the training set is unknown."""
        return self.batches_of(self._spec)

    def batches_of(self, job: JobSpec) -> Batches:
        """Batches for the job with which the run is to continue."""
        return Batches.of_job(job, self.epoch_samples, self._recorded)

    @cached_property
    def _recorded(self) -> RecordedSizes | None:
        """Cuts of epochs where steps are not of one size."""
        steps = self._ready.get("epoch_steps")
        if not steps:
            return None
        total = None if self._ready.get("epochs_vary") else self.epoch_samples
        return RecordedSizes(int(steps), total, self._ledger)


def last_whole_step(tail: Records, plan: RunPlan, records: int) -> int:
    """The last step whose records are all in a ledger; 0 if there is none.

    Args:
        tail: its last `WINDOW` records, or all of them.
        plan: of the run. While it does not know how many samples there are, the last step counts.
        records: how many the ledger has.
    """
    if not len(tail):
        return 0
    if not plan.epoch_samples:
        return int(tail["step"].max())
    steps, where = np.unique(tail["step"], return_inverse=True)
    taken = np.bincount(where, weights=tail["stop"] - tail["first"])
    possible = plan.steps or 2 * records  # a damaged record may say anything
    own, batches = plan.own_rounds, plan.batches
    parts = own.of if own is not None else lambda step: [batches.of(step)]
    known = [parts(step) if 0 < step <= possible else [] for step in steps.tolist()]
    due = np.array([sum(part.stop - part.first for part in each) for each in known])
    whole = steps[(taken >= due) & (steps <= possible)]
    return int(whole.max(initial=0))


class RunFolder:
    """Everything that one run recorded, read now.

    Args:
        path: the folder, such as `runs/digits`.

    Raises:
        RunError: there is no such folder, it is not the folder of a run, or that run is
            of another format.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = existing(Path(path))
        job_file = self.path / "job.toml"
        try:
            self.job = job_of(self.path)
            self.spec = build(self.job, source=str(job_file))
        except SpecError as error:
            raise RunError(f"{self.path} cannot be read as a run: {error}") from None
        self.events = events_of(self.path / "events.jsonl")
        self.ledger = records_of(self.path / "ledger.bin", LEDGER)
        steps = steps_of(self.path)
        self._computed = steps  # discarded steps included
        # Only the clocks of worker and master tell in which session a step was recorded; if the
        # clocks of two hosts differ, a discarded step may stay.
        for event, resumed_step in returns_in(self.events):
            kept = steps["step"] <= resumed_step
            steps = steps[kept | (steps["begin"] >= event["time"])]
        order = np.lexsort((steps["begin"], steps["worker"], steps["step"]))
        self.steps: Records = steps[order]
        self.events = without_discarded(self.events)
        self.members = RunMembers(self.events, self.steps, self.ledger, self.spec.workers)
        divided = self.last("data_divided")
        self.plan = RunPlan(self.spec, self.last("worker_ready"), divided, self.ledger)

    def named(self, event: str) -> list[Event]:
        """Every event of one name, oldest first."""
        return [each for each in self.events if each["event"] == event]

    def last(self, event: str) -> Event:
        """The newest event of one name; an empty dict if there is none."""
        newest: Event = {}
        for each in self.named(event):
            newest = each
        return newest

    @property
    def same_as_one_machine(self) -> str | None:
        """The verdict of the run: the worst that a step has shown counts, also after the run was
        resumed."""
        said = self.named("same_as_one_machine")
        late = [str(event["verdict"]) for event in said if event.get("step")]
        if late:
            return min(late, key=lambda each: (each == "yes", each.startswith("not shown")))
        return said[-1].get("verdict") if said else None

    @property
    def validations(self) -> list[Event]:
        """`validated` events."""
        return self.named("validated")

    @cached_property
    def logged(self) -> dict[str, dict[int, tuple[float, float]]]:
        """Values that were logged, by name and step: the value, NaN if it was not finite, and Unix
        seconds. If a step has two, the later one counts."""
        found: dict[str, dict[int, tuple[float, float]]] = {}
        for event in self.named("logged"):
            for name, value in event["values"].items():
                number = float(value) if isinstance(value, int | float) else math.nan
                found.setdefault(name, {})[event["step"]] = number, float(event["time"])
        return found

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint in the folder; 0 if there is none."""
        found = (FOLDER.fullmatch(path.name) for path in (self.path / "checkpoints").glob("step-*"))
        return max((int(each[1]) for each in found if each), default=0)

    @cached_property
    def ending(self) -> Event:
        """The `run_finished` event of the latest session; empty while there is none."""
        ending: Event = {}
        for event in self.events:
            if event["event"] in ("run_started", "run_finished"):
                ending = event
        return ending if ending.get("event") == "run_finished" else {}

    @property
    def stop_requests(self) -> list[Event]:
        """`stop_requested` events of the latest session."""
        asked: list[Event] = []
        for event in self.events:
            if event["event"] == "run_started":
                asked = []
            elif event["event"] == "stop_requested":
                asked.append(event)
        return asked

    @property
    def joined(self) -> bool:
        """Whether its processes called `instep.join`, so that instep did not start them."""
        return bool(self.last("run_started").get("started_by") == "join")

    @property
    def to_resume(self) -> str:
        """How to resume it: a command, or what to start again."""
        if self.joined:
            name = self.path.resolve().name
            return f"start its script again with instep.join(..., name={name!r}, resume=True)"
        return command("resume", self.path)

    @property
    def outcome(self) -> str:
        """`completed`, `stopped`, `failed`, `interrupted`; `unfinished` without a recorded end."""
        return str(self.ending.get("outcome") or "unfinished")

    @cached_property
    def last_step(self) -> int:
        """The last committed step: as the run said at its end, or the last complete one.

        During a run, or after a crash, some workers may have recorded a step that others
        have not; such steps at the end are not committed.
        """
        return max(int(self.ending.get("step") or 0), self._last_whole_step())

    def _last_whole_step(self) -> int:
        return last_whole_step(self.ledger[-WINDOW:], self.plan, len(self.ledger))

    @cached_property
    def committed(self) -> Records:
        """The ledger up to `last_step`, [records] of `LEDGER`."""
        kept: Records = self.ledger[self.ledger["step"] <= self.last_step]
        return kept

    @cached_property
    def skipped(self) -> list[Event]:
        """`sample_skipped` events of committed steps; validations are not among them."""
        return skipped_in(self.named("sample_skipped"), self.committed)

    def left_out(self, dataset: str) -> set[tuple[int, int]]:
        """Step and index of each sample of `training` or `validation` that was not read."""
        events = self.skipped if dataset == "training" else self.named("sample_skipped")
        return {(int(e["step"]), int(e["index"])) for e in events if e["dataset"] == dataset}

    @cached_property
    def audit(self) -> Audit:
        """How often each sample is in the committed ledger, epoch by epoch."""
        own = self.plan.own_rounds
        if own is not None:
            return audit_own(self.committed, own, self.last_step)
        return audit(self.committed, self.plan.batches, last_step=self.last_step)

    @cached_property
    def altered_before(self) -> int:
        """The step of the newest checkpoint, if the ledger is not what it was when that was saved;
        0 if it is, or no checkpoint tells."""
        for step, checkpoint in published(self.path / "checkpoints"):
            try:
                facts = read_manifest(checkpoint).facts
            except CheckpointError:  # the one before may be intact
                continue
            size_bytes, crc32 = facts.get("ledger_bytes"), facts.get("ledger_crc32")
            if not isinstance(size_bytes, int) or not isinstance(crc32, int):
                return 0
            ledger = self.path / "ledger.bin"
            return 0 if ledger.is_file() and is_intact(ledger, size_bytes, crc32) else step
        return 0

    def steps_of(self, worker: int) -> Records:
        """One worker's step records, [steps] of `STEPS`, in order of step."""
        return self._steps_by_worker.get(worker, self.steps[:0])

    @cached_property
    def _steps_by_worker(self) -> dict[int, Records]:
        ordered = self.steps[np.argsort(self.steps["worker"], kind="stable")]
        workers, begins = np.unique(ordered["worker"], return_index=True)
        parts = np.split(ordered, begins[1:]) if len(workers) else []
        return {int(worker): part for worker, part in zip(workers, parts, strict=True)}

    @cached_property
    def unrecorded(self) -> Records:
        """Committed steps without a step record, [steps] in order.

        The newest steps of a run that has not ended are left out: they may not be written yet.
        """
        steps: Records = np.setdiff1d(self.committed["step"], self.steps["step"])
        if self.outcome == "unfinished" and len(self.steps):
            steps = steps[steps < self.steps["step"].max()]
        return steps

    @cached_property
    def traffic(self) -> RunTraffic:
        """Bytes that the workers moved."""
        begin = float(self.steps["begin"].min()) if len(self.steps) else 0.0
        return RunTraffic(self.events, begin)

    @cached_property
    def times(self) -> RunTimes:
        """Sessions, and how long they took."""
        return RunTimes(self.events, self.steps, self._computed)

    @cached_property
    def timed_samples(self) -> int:
        """Samples of the committed steps that lie within `RunTimes.training_seconds`."""
        ledger = self.committed
        timed = self.times.within(ledger)
        return self.audit.used - int((ledger["stop"] - ledger["first"])[~timed].sum())
