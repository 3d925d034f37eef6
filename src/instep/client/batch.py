"""A run as a Slurm job: writes the batch script, submits it, and follows it to its end.

The script calls `instep run` again; in the job's allocation `launch/slurm.py` starts the hosts.
What it needs is in a folder beside the run's. Ways in: `submit`, `follow`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from instep.client.job_checks import check_job
from instep.errors import INTERRUPTED, RunError, SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.launch.base import check_no_hosts
from instep.launch.slurm_cluster import ask, nodes_of
from instep.launch.slurm_options import NEXT, SIGNAL, sbatch_options, signal_of
from instep.store.folder import numbered

LOOK_S = 2.0
"""Seconds between two looks at a job."""


JOB = "submitted.toml"
"""The job file for the batch script, in its folder."""


FORGOTTEN = "FORGOTTEN"
"""The state of a job that Slurm no longer knows."""

NEVER = "node configuration is not available"
"""What sbatch says of a job for which there are no nodes, whether they are in use or not."""

OVER = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"),
    *("BOOT_FAIL", "PREEMPTED", FORGOTTEN),
)
"""States from which a job does not come back by itself."""


@dataclass
class Submitted:
    """A job of Slurm that runs instep."""

    number: str
    """Its id; it keeps it when it is requeued. Another job may continue the run."""
    run: Path
    """The run's folder, once it has started."""
    folder: Path
    """Script, job file and output."""
    _shown: dict[str, int] = field(default_factory=dict)

    def is_continued(self) -> bool:
        """Whether another job was submitted to continue the run; then that one is meant."""
        before = self.number
        with suppress(OSError):
            self.number = (self.folder / "next").read_text().split(";")[0].strip() or before
        return self.number != before

    def show(self, name: str, to: IO[str]) -> None:
        """Copy what is new in a file of its output."""
        path = self.folder / name
        if path.exists() and (data := path.read_bytes()[self._shown.get(name, 0) :]):
            self._shown[name] = self._shown.get(name, 0) + len(data)
            to.write(data.decode(errors="replace"))
            to.flush()


def submit(
    job: JobSpec, runs: Path, *, named: bool, json_output: bool, say: Callable[[str], None]
) -> Submitted:
    """Write the batch script, show it, and hand it to Slurm.

    Raises:
        SpecError: the job is wrong, or Slurm does not take it.
        RunError: there is a run by this name, or its folder cannot be made.
    """
    check_job(job)
    check_no_hosts(job.launch, "Slurm")
    options = sbatch_options(job.launch.options)
    check_size(job)
    try:
        folder = _make_folder(runs.resolve(), job.name, named=named)
        (folder / JOB).write_text(spec_file.dump(job), encoding="utf-8")
        text = script(job, folder, options, json_output=json_output)
        (folder / "batch.sh").write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"{runs} cannot be written: {error.strerror}. Choose another --runs."
        ) from None
    say(text)
    try:
        check_nodes_fit(folder / "batch.sh")
        number = ask("sbatch", "--parsable", str(folder / "batch.sh")).strip().split(";")[0]
    except SpecError as error:
        for each in folder.iterdir():
            each.unlink()
        folder.rmdir()
        raise SpecError(f"{error}. The script is above.") from None
    say(f"slurm   job {number}, {folder / 'batch.sh'}")
    return Submitted(number, folder.with_suffix(""), folder)


def _make_folder(runs: Path, wanted: str, *, named: bool) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    for name in numbered(wanted):
        folder = runs / f"{name}.slurm"
        if not (runs / name).exists() and not folder.exists():
            folder.mkdir()
            return folder
        if named:
            break
    raise RunError(
        f"there is already a run at {runs / wanted}. Choose another --name, or remove it."
    )


def check_size(job: JobSpec) -> None:
    """Refuse more nodes than there are; Slurm would have the job wait for them forever.

    Raises:
        SpecError: names both numbers.
    """
    listed = ask("sinfo", "--noheader", "--noconvert", "-o", "%P %D")  # 1024, not 1K
    there = dict(line.split() for line in listed.splitlines())
    wanted = str(job.launch.options.get("partition", ""))
    sizes = {name.rstrip("*"): int(nodes) for name, nodes in there.items()}
    default = [name.rstrip("*") for name in there if name.endswith("*")]
    chosen = wanted.split(",") if wanted else default
    most = max((sizes[name] for name in chosen if name in sizes), default=job.launch.nodes)
    if job.launch.nodes > most:
        parts = ", ".join(f"{name} {nodes}" for name, nodes in sizes.items())
        raise SpecError(
            f"launch.nodes = {job.launch.nodes}, and the nodes of Slurm's partitions are: {parts}. "
            "Ask for fewer, or for another with launch.options.partition."
        )


def check_nodes_fit(batch: Path) -> None:
    """Refuse a script that asks for more cores or memory than the nodes have, in use or not; Slurm
    would have the job wait for them forever.

    Raises:
        SpecError: names what the nodes have.
    """
    try:
        ask("sbatch", "--test-only", str(batch))
    except SpecError as error:
        if NEVER not in str(error):
            return  # submitting it says the same, or it is no reason not to
        listed = ask("sinfo", "--noheader", "--noconvert", "-o", "%P has %D of %c cores, %m MB")
        nodes = "; ".join(line.strip() for line in listed.replace("*", "").splitlines())
        raise SpecError(
            f"no nodes of this Slurm cluster have what the job asks for: partition {nodes}. Ask "
            "for less with launch.cpus, launch.nodes, workers and launch.options"
        ) from None


def script(job: JobSpec, folder: Path, options: list[str], *, json_output: bool) -> str:
    """The batch script of a job.

    Slurm signals its shell before the time limit; the run saves, and the job is queued again, or
    another is submitted. A job that finds the run's folder resumes it.
    """
    launch, run = job.launch, folder.with_suffix("")
    lines = [f"--job-name={job.name}", f"--ntasks={max(job.workers, launch.nodes)}"]
    if launch.nodes:
        lines.append(f"--nodes={launch.nodes}")
    if launch.cpus:
        on_each = -(-job.workers // (launch.nodes or job.workers))
        lines.append(f"--cpus-per-task={-(-launch.cpus // on_each)}")
    if launch.gpus:
        lines.append(f"--gpus-per-node={launch.gpus}")
    lines += ["--no-kill", "--requeue", "--open-mode=append"]
    lines += [f"--output={folder / 'output.log'}", f"--error={folder / 'progress.log'}"]
    lines += [f"--chdir={os.getcwd()}"]
    name, seconds = signal_of(launch.options.get("signal", SIGNAL))
    lines += [f"--signal=B:{name}@{seconds}", *options]
    json = " --json" if json_output else ""
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {_in_quotes(line)}" for line in lines),
        run=shlex.quote(str(run)),
        job=JOB,
        python=shlex.quote(sys.executable),
        json=json,
        interrupted=INTERRUPTED,
        signal=name,
        requeue=str(launch.options.get("next", NEXT[0]) == "requeue").lower(),
    )


def _in_quotes(line: str) -> str:
    """An option for sbatch, which knows double quotes only."""
    return f'"{line}"' if re.search(r"\s", line) else line


_SCRIPT = """\
#!/bin/sh
{options}

run={run}
if [ -d "$run" ]; then
    set -- resume "$run"{json}
else
    set -- run "$run".slurm/{job} --runs "$(dirname "$run")" --name "$(basename "$run")"{json}
fi
saved=$(ls "$run/checkpoints" 2>/dev/null)
trap 'kill -TERM "$child"' {signal}  # soon the time is over: save, and stop
trap : TERM  # of scancel, which the run gets too
{python} -P -m instep "$@" &
child=$!
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    code=$?
done
if [ "$code" != {interrupted} ] || [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" != RUNNING ]; then
    exit "$code"
fi
if [ "$(ls "$run/checkpoints" 2>/dev/null)" = "$saved" ]; then
    echo "slurm   the time was too short for a step; the run is not continued" >&2
    exit "$code"
fi
echo "slurm   the run is saved" >&2
{requeue} && scontrol requeue "$SLURM_JOB_ID" && exit
after="--dependency=afterany:$SLURM_JOB_ID"
next=$(sbatch --parsable "$after" "$run".slurm/batch.sh) || exit "$code"
echo "$next" >"$run".slurm/next
echo "slurm   job ${{next%%;*}} continues it" >&2
"""


def follow(job: Submitted, say: Callable[[str], None]) -> int:
    """Show a job's states and output until it is over, or Ctrl-C; the exit code of its run.

    Ctrl-C leaves the job alone.

    Raises:
        RunError: it was ended by Slurm or by somebody, not by itself.
    """
    state = ""
    try:
        while state not in OVER:
            before, state = state, _state(job.number, state)
            job.show("progress.log", sys.stderr)
            if state != before:
                say(f"slurm   job {job.number} {state}")
                _rescue(job.number, state, say)
            if state in OVER and job.is_continued():
                state = ""
            time.sleep(0 if state in OVER else LOOK_S)
    except KeyboardInterrupt:
        say(f"\nslurm   job {job.number} goes on; its output is in {job.folder}")
        say(f"next    scancel {job.number}")
        return INTERRUPTED
    job.show("output.log", sys.stdout)
    if state in ("COMPLETED", "FAILED"):
        found = re.search(r"ExitCode=(\d+):", ask("scontrol", "show", "job", job.number))
        if found and (state == "COMPLETED" or found[1] != "0"):
            return int(found[1])
    again = f" To continue from its newest checkpoint: scontrol requeue {job.number}"
    raise RunError(
        f"Slurm's job {job.number} ended as {state}. Its output is in {job.folder}."
        + (again if (job.run / "checkpoints").is_dir() and state != FORGOTTEN else "")
    )


def _rescue(number: str, state: str, say: Callable[[str], None]) -> None:
    """Queue a job again that lost the node with its script: with --no-kill, Slurm keeps it."""
    with suppress(SpecError):
        first = ask("squeue", "--noheader", f"--jobs={number}", "-o", "%B").strip()
        if state.startswith("RUNNING") and first not in nodes_of(number):
            ask("scontrol", "requeue", number)
            say(f"slurm   job {number} has lost its first node, {first}; it is queued again")


def _state(number: str, before: str) -> str:
    """As `PENDING (Resources)` or `RUNNING on n[1-3]`; as before, if Slurm does not answer."""
    command = ("squeue", "--noheader", "--states=all", f"--jobs={number}", "-o", "%T|%R")
    try:
        state, _, more = ask(*command).strip().partition("|")
    except SpecError as error:
        return FORGOTTEN if "Invalid job id" in str(error) else before
    if state == "RUNNING":
        return f"{state} on {more}"
    return f"{state} {more}" if state == "PENDING" else state
