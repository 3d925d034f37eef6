"""The files of a run's folder, read and checked: job, events, ledger, records of steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instep.checksums import WrongChecksum
from instep.errors import RunError, near_miss
from instep.events import STEPS, read_events, read_records
from instep.formats import FORMAT, other_format
from instep.job.file import read_table
from instep.store.step_log import CHECKSUMS_FILE, check_unchanged
from instep.vocabulary import wrong_in

Event = dict[str, Any]
Records = np.ndarray[Any, np.dtype[Any]]
Floats = NDArray[np.float64]

PARTS = ("load", "forward", "backward", "wait", "wire", "update", "save")
"""Parts of a step, in order of time; `NAME_s` in `STEPS`."""

_FIRST_TIME: tuple[Any, ...] = STEPS.fields["load_s"]  # type: ignore[index]
_TIMES = np.dtype(
    {
        "names": ["times"],
        "formats": [("<f4", (len(PARTS),))],
        "offsets": [_FIRST_TIME[1]],
        "itemsize": STEPS.itemsize,
    }
)
"""The parts of a step, which lie beside each other in `STEPS`."""

_MOST_WORKERS, _MOST_S = 1 << 20, 1e11  # instep writes no larger values
_OF_A_RUN = ("run.id", "events.jsonl", "ledger.bin", "journal.sqlite")


def step_ends(steps: Records) -> Floats:
    """When each step was over, Unix seconds, [records]: its begin and all its parts."""
    ends: Floats = steps["begin"] + sum(steps[f"{part}_s"].astype(np.float64) for part in PARTS)
    return ends


def existing(path: Path) -> Path:
    """Return the folder of a run, if it is one.

    Raises:
        RunError: it is not; the text says what it is, and names those that are near.
    """
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


def check_format(run: Path) -> None:
    """Refuse the folder of a run that another version of instep reads.

    Raises:
        RunError: the text says which.
        SpecError: its `job.toml` cannot be read.
    """
    job_of(run)


def job_of(run: Path) -> dict[str, Any]:
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
        begun = [e for e in events_of(run / "events.jsonl") if e["event"] == "run_started"]
        return begun[-1]["versions"]["instep"]
    except (RunError, LookupError, TypeError):
        return None


def events_of(path: Path) -> list[Event]:
    """Read the events of a file, oldest first.

    Raises:
        RunError: a line is damaged, or the file cannot be read.
    """
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


def steps_of(run: Path) -> Records:
    """Read a run's records of steps, [records] of `STEPS`, with times that are possible.

    Raises:
        RunError: a record is damaged, or the file cannot be read.
    """
    steps = records_of(run / "steps.bin", STEPS)
    try:
        check_unchanged(run, steps)
    except OSError as error:
        raise RunError(f"{run / CHECKSUMS_FILE} cannot be read: {error.strerror}.") from None
    return possible_steps(steps, run / "steps.bin")


def possible_steps(steps: Records, path: Path) -> Records:
    """A copy of step records, [records], with times that are possible.

    Raises:
        RunError: no worker can have written one of them.
    """
    check_steps(steps, path)
    return with_possible_times(steps)


def with_possible_times(steps: Records) -> Records:
    """A copy of step records, [records], whose parts took times that are possible."""
    steps = steps.copy()
    times = steps.view(_TIMES)["times"]
    np.fmax(times, 0.0, out=times)  # a clock may be wrong; what a run computed can be read
    np.minimum(times, _MOST_S, out=times)
    return steps


def check_steps(steps: Records, path: Path) -> None:
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


def records_of(path: Path, dtype: np.dtype[Any]) -> Records:
    """Read the records of a file, [records].

    Raises:
        RunError: it cannot be read.
    """
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


def without_discarded(events: list[Event]) -> list[Event]:
    """The events without those of steps that were discarded later, when the run went back."""
    kept: list[Event] = []
    reached = math.inf  # the lowest step that was gone back to after this event
    back = {id(event): step for event, step in returns_in(events)}
    for event in reversed(events):
        if event["event"] not in _OF_A_STEP or (event.get("step") or 0) <= reached:
            kept.append(event)
        reached = min(reached, back.get(id(event), math.inf))
    return kept[::-1]


def returns_in(events: list[Event]) -> list[tuple[Event, int]]:
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
