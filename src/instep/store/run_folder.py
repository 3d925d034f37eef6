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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instep.checksums import WrongChecksum
from instep.data.batches import Batches
from instep.data.participants import OwnRounds
from instep.errors import CheckpointError, RunError, SpecError, near_miss
from instep.events import LEDGER, STEPS, read_events, read_records, wrong_in
from instep.formats import FORMAT, other_format
from instep.job.file import build, read_table
from instep.state.files.manifest import FOLDER, published, read_manifest
from instep.store.audit import Audit, audit, audit_own, skipped_in
from instep.store.ledger import is_intact
from instep.store.step_log import CHECKSUMS_FILE, check_unchanged
from instep.words import command

Event = dict[str, Any]
Records = np.ndarray[Any, np.dtype[Any]]
Floats = NDArray[np.float64]

PARTS = ("load", "forward", "backward", "wait", "wire", "update", "save")
"""Parts of a step, in order of time; `NAME_s` in `STEPS`."""

_MOST_WORKERS, _MOST_S = 1 << 20, 1e11  # instep writes no larger values
_WINDOW = 4096  # ledger records at the end in which to look for the last whole step


class Traffic(NamedTuple):
    """Bytes one worker moved in the whole run, over all its processes."""

    sent_bytes: int
    received_bytes: int


class RunFolder:
    """Everything that one run recorded, read now.

    Args:
        path: the folder, such as `runs/digits`.

    Raises:
        RunError: there is no such folder, it is not the folder of a run, or that run is
            of another format.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = _existing(Path(path))
        job_file = self.path / "job.toml"
        try:
            self.job = _job(self.path)
            self.spec = build(self.job, source=str(job_file))
        except SpecError as error:
            raise RunError(f"{self.path} cannot be read as a run: {error}") from None
        self.events = _events(self.path / "events.jsonl")
        self.ledger = _records(self.path / "ledger.bin", LEDGER)
        steps = _steps(self.path)
        self._computed = steps  # discarded steps included
        # Only the clocks of worker and master tell in which session a step was recorded; if the
        # clocks of two hosts differ, a discarded step may stay.
        for event, resumed_step in _returns(self.events):
            kept = steps["step"] <= resumed_step
            steps = steps[kept | (steps["begin"] >= event["time"])]
        order = np.lexsort((steps["begin"], steps["worker"], steps["step"]))
        self.steps: Records = steps[order]
        self.events = _without_discarded(self.events)

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
    def generations(self) -> list[Event]:
        """`generation_started` events: each change of the members."""
        return self.named("generation_started")

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
    def checkpoints(self) -> list[Event]:
        """`checkpoint_saved` events."""
        return self.named("checkpoint_saved")

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint in the folder; 0 if there is none."""
        found = (FOLDER.fullmatch(path.name) for path in (self.path / "checkpoints").glob("step-*"))
        return max((int(each[1]) for each in found if each), default=0)

    @property
    def failures(self) -> list[Event]:
        """`worker_failed` events."""
        return self.named("worker_failed")

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
    def workers(self) -> list[int]:
        """Every worker and server in any record, in order of number."""
        recorded = {int(w) for w in np.unique(self.steps["worker"])}
        recorded |= {int(w) for w in np.unique(self.ledger["worker"])}
        seen = {"worker_joined", "worker_ready", "worker_failed", "traffic"}
        return sorted(recorded | {int(e["worker"]) for e in self.events if e["event"] in seen})

    @cached_property
    def servers(self) -> frozenset[int]:
        """Those of `workers` that are parameter servers: they hold parameters and get no work."""
        roles = {int(e["worker"]): e.get("role") for e in self.named("worker_joined")}
        return frozenset(number for number, role in roles.items() if role == "server")

    @cached_property
    def team(self) -> int:
        """How many workers computed at the end: those of the last generation."""
        members = self.last("generation_started").get("members")
        if isinstance(members, int):
            return members
        return len({*members} - self.servers) if members else self.spec.workers

    @property
    def servers_at_the_end(self) -> int:
        """How many parameter servers the last generation had."""
        members = self.last("generation_started").get("members")
        return len({*members} & self.servers) if isinstance(members, list) else 0

    @cached_property
    def epoch_samples(self) -> int:
        """Samples of the training set; 0 until a worker has said so."""
        return int(self.last("worker_ready").get("samples") or 0)

    @property
    def planned_steps(self) -> int | None:
        """Steps of the whole job; None before a worker has said so, and in the user's own loop."""
        planned: int | None = self.last("worker_ready").get("last_step")
        return planned

    @cached_property
    def own_rounds(self) -> OwnRounds | None:
        """What participants take of data of their own; None where they have none."""
        divided = self.last("data_divided")
        if not (divided and self.spec.own_data):
            return None
        return OwnRounds.of_job(self.spec, divided["sizes"])

    @property
    def batches(self) -> Batches:
        """What each step takes; nothing while the size of the training set is unknown."""
        return Batches.of_job(self.spec, self.epoch_samples)

    @cached_property
    def traffic(self) -> dict[int, Traffic]:
        """Bytes of each worker, over all processes that it was."""
        return {worker: counted[-1][1] for worker, counted in self._traffic.items()}

    @cached_property
    def _traffic(self) -> dict[int, list[tuple[float, Traffic]]]:
        """For each worker, Unix seconds and what it had moved by then, in order.

        A new process counts from 0: it has joined, or (where its master was lost before that was
        written) its counter has fallen.
        """
        totals: dict[int, list[tuple[float, Traffic]]] = {}
        seen: dict[int, Traffic] = {}
        pids: dict[int, object] = {}
        nothing = Traffic(0, 0)
        for event in self.events:
            if event["event"] not in ("traffic", "worker_joined"):
                continue
            worker = int(event["worker"])
            if event["event"] == "worker_joined":
                if pids.setdefault(worker, event["pid"]) != event["pid"]:
                    seen.pop(worker, None)
                    pids[worker] = event["pid"]
                continue
            now = Traffic(int(event["sent_bytes"]), int(event["received_bytes"]))
            counted = totals.setdefault(worker, [])
            before, total = seen.get(worker, nothing), counted[-1][1] if counted else nothing
            if now.sent_bytes < before.sent_bytes or now.received_bytes < before.received_bytes:
                before = nothing
            sent = total.sent_bytes + now.sent_bytes - before.sent_bytes
            received = total.received_bytes + now.received_bytes - before.received_bytes
            counted.append((float(event["time"]), Traffic(sent, received)))
            seen[worker] = now
        return totals

    def sent_by(self, times: Floats) -> Floats:
        """Bytes that all workers together had sent by these Unix times; told about once a second,
        between two in proportion."""
        total = np.zeros(len(times))
        begin = float(self.steps["begin"].min()) if len(self.steps) else 0.0
        for counted in self._traffic.values():
            known = [(begin, 0), *((time, moved.sent_bytes) for time, moved in counted)]
            moments, sent = zip(*known, strict=True)
            total += np.interp(times, np.maximum.accumulate(moments), sent)
        return np.round(total)

    @cached_property
    def last_step(self) -> int:
        """The last committed step: as the run said at its end, or the last complete one.

        During a run, or after a crash, some workers may have recorded a step that others
        have not; such steps at the end are not committed.
        """
        return max(int(self.ending.get("step") or 0), self._last_whole_step())

    def _last_whole_step(self) -> int:
        tail = self.ledger[-_WINDOW:]
        if not len(tail):
            return 0
        if not self.epoch_samples:
            return int(self.ledger["step"].max())
        steps, where = np.unique(tail["step"], return_inverse=True)
        taken = np.bincount(where, weights=tail["stop"] - tail["first"])
        possible = self.planned_steps or 2 * len(self.ledger)  # a damaged record may say anything
        own, batches = self.own_rounds, self.batches
        parts = own.of if own is not None else lambda step: [batches.of(step)]
        known = [parts(step) if 0 < step <= possible else [] for step in steps.tolist()]
        due = np.array([sum(part.stop - part.first for part in each) for each in known])
        whole = steps[(taken >= due) & (steps <= possible)]
        return int(whole.max(initial=0))

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
        if self.own_rounds is not None:
            return audit_own(self.committed, self.own_rounds, self.last_step)
        return audit(self.committed, self.batches, last_step=self.last_step)

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
    def sessions(self) -> list[tuple[float, float]]:
        """Begin and end of each time the run was started, Unix seconds."""
        begins = [float(e["time"]) for e in self.named("run_started")]
        times = np.array([float(e["time"]) for e in self.events])
        times = np.sort(np.concatenate([times, step_ends(self.steps)]))
        if not begins:
            return [(float(times[0]), float(times[-1]))] if len(times) else []
        after = [*begins[1:], np.inf]
        last = times[np.maximum(np.searchsorted(times, after) - 1, 0)]
        return [(b, max(b, float(end))) for b, end in zip(begins, last, strict=True)]

    def elapsed(self, times: Floats | float) -> Floats:
        """Unix times as seconds of this run; time between two sessions does not count."""
        moments = np.asarray(times, dtype=np.float64)
        spent = np.zeros_like(moments)
        for begin, end in self.sessions:
            spent = spent + np.clip(moments, begin, end) - begin
        return spent

    @property
    def seconds(self) -> float:
        """How long the run took, start-up and end included, all sessions together."""
        return sum(end - begin for begin, end in self.sessions)

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
    def timed_samples(self) -> int:
        """Samples of the committed steps that lie within `training_seconds`."""
        ledger = self.committed
        timed = np.zeros(len(ledger), np.bool_)
        for steps in self._computed_by_session():
            first, last = steps["step"].min(), steps["step"].max()
            timed |= (ledger["step"] >= first) & (ledger["step"] <= last)
        return self.audit.used - int((ledger["stop"] - ledger["first"])[~timed].sum())

    def training_seconds(self, worker: int | None = None) -> float:
        """From the begin of the first step to the end of the last, for each session, summed.

        Steps that were discarded and computed again count: their time was spent.
        """
        total = 0.0
        for mine in self._computed_by_session(worker):
            total += float(step_ends(mine).max() - mine["begin"].min())
        return total

    def _computed_by_session(self, worker: int | None = None) -> list[Records]:
        steps = self._computed
        if worker is not None:
            steps = steps[steps["worker"] == worker]
        session = np.searchsorted([begin for begin, _ in self.sessions[1:]], steps["begin"])
        return [steps[session == number] for number in np.unique(session)]


def step_ends(steps: Records) -> Floats:
    """When each step was over, Unix seconds, [records]: its begin and all its parts."""
    ends: Floats = steps["begin"] + sum(steps[f"{part}_s"].astype(np.float64) for part in PARTS)
    return ends


def _check_steps(steps: Records, path: Path) -> None:
    """Refuse records that no worker can have written; how long things took is not judged.

    Raises:
        RunError: names the first of them.
    """
    good = (steps["step"] > 0) & (steps["worker"] >= 0) & (steps["worker"] < _MOST_WORKERS)
    good &= (steps["samples"] >= 0) & (steps["begin"] > 0) & (steps["begin"] < _MOST_S)
    if not good.all():
        number = int(np.argmin(good)) + 1
        raise RunError(
            f"{path} is damaged: record {number} of {len(steps)} is impossible. It holds the times "
            "and losses of steps: remove it to read the rest of the run."
        )


def check_format(run: Path) -> None:
    """Refuse the folder of a run that another version of instep reads.

    Raises:
        RunError: the text says which.
        SpecError: its `job.toml` cannot be read.
    """
    _job(run)


_OF_A_RUN = ("run.id", "events.jsonl", "ledger.bin", "journal.sqlite")


def _job(run: Path) -> dict[str, Any]:
    """The raw tables of a run's job; runs of format 1 have no format key."""
    table = read_table(run / "job.toml")
    found = table.get("format", 1 if "recipe" in table else FORMAT)  # else it is not a job
    if "format" not in table and not any((run / name).exists() for name in _OF_A_RUN):
        raise RunError(
            f"{str(run)!r} is not the folder of a run: it has a job.toml, but no file that "
            "a run writes. Give the run's own folder, runs/NAME."
        )
    if found != FORMAT and type(found) is int:
        raise RunError(other_format(f"the run in {run}", found, _written_by(run)))
    return table


def _written_by(run: Path) -> object:
    """The version of instep that began the newest session of a run, if its events say so."""
    try:
        begun = [e for e in _events(run / "events.jsonl") if e["event"] == "run_started"]
        return begun[-1]["versions"]["instep"]
    except (RunError, LookupError, TypeError):
        return None


def _events(path: Path) -> list[Event]:
    events: list[Event] = []
    try:
        for event in read_events(path):
            events.append(event)
            if wrong := wrong_in(event):
                raise RunError(f"{path} is damaged: in line {len(events)} {wrong}.")
    except (ValueError, RecursionError) as error:
        what = error if isinstance(error, WrongChecksum) else f"it is not JSON: {error}"
        raise RunError(f"{path} is damaged: line {len(events) + 1}: {what}.") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    return events


def _steps(run: Path) -> Records:
    steps = _records(run / "steps.bin", STEPS)
    try:
        check_unchanged(run, steps)
    except OSError as error:
        raise RunError(f"{run / CHECKSUMS_FILE} cannot be read: {error.strerror}.") from None
    _check_steps(steps, run / "steps.bin")
    steps = steps.copy()
    for part in PARTS:  # a clock may be wrong; what a run computed can be read all the same
        times = np.nan_to_num(steps[f"{part}_s"], nan=0.0)
        steps[f"{part}_s"] = np.clip(times, 0.0, _MOST_S)
    return steps


def _records(path: Path, dtype: np.dtype[Any]) -> Records:
    try:
        return read_records(path, dtype)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None


_OF_A_STEP = frozenset(
    [
        *("epoch_finished", "sample_skipped", "validated", "participants_validated", "logged"),
        *("checkpoint_saved", "checkpoint_copied", "model_saved", "lag_measured"),
    ]
)


def _without_discarded(events: list[Event]) -> list[Event]:
    """The events without those of steps that were discarded later, when the run went back."""
    kept: list[Event] = []
    reached = math.inf  # the lowest step that was gone back to after this event
    back = {id(event): step for event, step in _returns(events)}
    for event in reversed(events):
        if event["event"] not in _OF_A_STEP or (event.get("step") or 0) <= reached:
            kept.append(event)
        reached = min(reached, back.get(id(event), math.inf))
    return kept[::-1]


def _returns(events: list[Event]) -> list[tuple[Event, int]]:
    """Events at which the run went back, oldest first, and the step each went back to.

    After corruption the workers may go back by themselves: then a generation follows in the
    same session. Else the run ended, or another event says that it went back.
    """
    back: list[tuple[Event, int]] = []
    formed = False  # a generation started later, in the same session
    for event in reversed(events):
        clean = event.get("clean_step")
        if event.get("resumed_step") is not None:
            back.append((event, event["resumed_step"]))
            formed = False
        elif event["event"] == "generation_started":
            formed = True
        elif event["event"] == "corruption_found" and formed and clean is not None and clean >= 0:
            back.append((event, clean))
    return back[::-1]


def _existing(path: Path) -> Path:
    if (path / "job.toml").is_file():
        return path
    siblings = [p.parent.name for p in path.absolute().parent.glob("*/job.toml")]
    if path.is_file():
        what = "a job file" if path.suffix == ".toml" else "a file"
        if (path.parent / "events.jsonl").is_file():
            give = f"Give {str(path.parent)!r}."
        else:
            runs = sorted(path.parent.glob("runs/*/job.toml"))
            give = "Known: " + (", ".join(str(p.parent) for p in runs) or "none") + "."
        raise RunError(f"{str(path)!r} is {what}, not the folder of a run. {give}")
    if path.is_dir():
        raise RunError(
            f"{str(path)!r} is not the folder of a run: it holds no job.toml. "
            f"{near_miss(path.absolute().name, siblings)}"
        )
    raise RunError(f"there is no run at {str(path)!r}. {near_miss(path.name, siblings)}")
