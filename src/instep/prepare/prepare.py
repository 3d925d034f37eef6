"""The master of a preparation: from raw files to a folder of shards. Way in: `prepare`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from instep.data.shards.manifest import Manifest
from instep.errors import DataError, RecipeError, SpecError
from instep.prepare.asked import Asked, hash_of_file
from instep.prepare.folder import Folder
from instep.prepare.job import Job
from instep.prepare.messages import HostSetup, Setup
from instep.prepare.plan import RawFile, files_of
from instep.prepare.workers.crew import Crew, Interrupted
from instep.prepare.workers.hosts import Hosting, Hosts
from instep.system.processes import on_signals
from instep.units import readable_bytes, readable_seconds
from instep.words import is_url, listed, plural, shown_url

Enter = Callable[[], AbstractContextManager[Hosting]]
"""Gives a launcher, and ends what it has started."""


class Prepared(NamedTuple):
    """The result of a command."""

    to: Path
    manifest: Manifest | None
    """None if a signal has ended the command before."""
    tasks: int
    done_before: int
    """Tasks that an earlier command had done."""
    kept_bytes: int
    """Of results that stay beside the shards, for the next command."""
    lost: int
    """Workers that were lost."""
    workers: int
    seconds: float
    bad: list[str]
    """The first bad records, in words."""
    together: list[str]
    """Columns whose equal values stand together; empty if the shards were there already."""

    def lines(self) -> list[str]:
        """For a terminal."""
        if self.manifest is None:
            return [
                f"kept       {self.to}: what is done",
                "next       the same command prepares the rest",
            ]
        made = self.manifest
        said = f"{plural(made.samples, 'sample')} in {plural(len(made.shards), 'shard')}"
        lines = [
            f"prepared   {said}, {readable_bytes(made.bytes)}, {readable_seconds(self.seconds)}",
            f"columns    {', '.join(f'{c.name} {c}' for c in made.columns)}",
        ]
        if made.bad:
            records = plural(made.bad, "record")
            lines.append(f"bad        {records} left out, in {self.to / made.bad_file}")
            lines += [f"           {line}" for line in self.bad]
        if self.done_before:
            lines.append(f"kept       {self.done_before} of {plural(self.tasks, 'task')}")
        if self.kept_bytes:
            size = readable_bytes(self.kept_bytes)
            lines.append(f"beside     {size} for the next command, which --no-keep does not leave")
        if self.together:
            names = listed(self.together, 3)
            lines.append(f"sorted     equal values of {names} stand together, which data.order =")
            lines.append("           'windowed' does not mix: prepare with --shuffle for that")
        lines.append(f"sha256     {made.sha256}")
        return [*lines, f"next       instep data {self.to}"]

    def as_table(self) -> dict[str, Any]:
        """For `--json`."""
        made = self.manifest
        return {
            "to": str(self.to),
            "samples": made.samples if made else None,
            "shards": len(made.shards) if made else None,
            "bad": made.bad if made else None,
            "bytes": made.bytes if made else None,
            "sha256": made.sha256 if made else None,
            "tasks": self.tasks,
            "done_before": self.done_before,
            "kept_bytes": self.kept_bytes,
            "workers": self.workers,
            "workers_lost": self.lost,
            "interrupted": made is None,
            "sorted_by": self.together,
            "seconds": self.seconds,
        }


def prepare(
    asked: Asked,
    say: Callable[[str], None],
    *,
    workers: int | None = None,
    enter: Enter | None = None,
) -> Prepared:
    """Make shards of raw files, or continue with what an earlier command has made of them.

    Args:
        asked: sources, function and folder.
        say: prints a line of progress.
        workers: processes; by default one for each processor of this process, or of each host.
        enter: gives the launcher of hosts on which the workers are; None: they are here.

    Raises:
        InstepError: nothing was started, or a task cannot be done; the text says why. What was
            done is kept, and not done again by the same call.
    """
    began = time.monotonic()
    here = len(os.sched_getaffinity(0))
    count = here if workers is None or (enter is not None and workers > 0) else workers
    _check(asked, count)
    files = files_of(asked)
    folder = Folder(Path(asked.to).absolute())
    signals: list[int] = []
    with folder.held(), on_signals(lambda number, _: signals.append(number)):
        folder.clean()
        setup = Setup(asked, str(folder.work))
        hosts = None
        if enter is not None:
            hosts = Hosts(enter, _for_hosts(setup, folder), _paths(files), workers or 0, say)
        crew = Crew(setup, count, say, signals, again=asked.map is not None, hosts=hosts)
        job = Job(asked, folder, files, crew, count, say)
        try:
            manifest = job.run()
            folder.remove_others(manifest, job.kept())
        except Interrupted:
            manifest = None
        except (DataError, RecipeError):
            with suppress(SpecError):  # a source is gone, which the error says itself
                job.check_unchanged()  # else something would be said of a mixture of versions
            raise
        finally:
            crew.close()
    return Prepared(
        to=Path(asked.to),
        manifest=manifest,
        tasks=job.tasks,
        done_before=job.done_before,
        kept_bytes=folder.bytes_beside(),
        lost=crew.lost,
        workers=(hosts.most if hosts is not None else 0) or count,
        seconds=time.monotonic() - began,
        bad=job.first_bad,
        together=[] if asked.shuffle else job.together,
    )


def _for_hosts(setup: Setup, folder: Folder) -> HostSetup:
    asked = setup.asked
    functions = [given.rpartition(":")[0] for given in (asked.map, asked.reduce) if given]
    tokens = [asked.tokens] if asked.tokens and asked.tokens != "bytes" else []
    files = {path: hash_of_file(path) for path in (*functions, *tokens)}
    return HostSetup(setup, 0, folder.mark(), files)


def _paths(files: Sequence[RawFile]) -> list[str]:
    """The files of the sources that can be read from elsewhere: all but images in folders."""
    return [str(file.path) for file in files]


def _check(asked: Asked, workers: int) -> None:
    if workers < 1:
        raise SpecError(f"--workers {workers}: needs at least 1.")
    if not 0 <= asked.seed < 1 << 63:
        raise SpecError(f"--seed {asked.seed}: wanted is a whole number from 0 to 2^63 - 1.")
    if is_url(asked.to):
        raise SpecError(
            f"--to {shown_url(asked.to)}: shards are made in a folder of this machine. Name one, "
            "and copy it when it is done: its manifest last."
        )
    _check_function("--map", asked.map)
    _check_function("--reduce", asked.reduce)
    if (asked.key is None) != (asked.reduce is None):
        raise SpecError("--key and --reduce need each other: a column, and FILE.py:FUNCTION.")
    if asked.key is not None and asked.shuffle:
        raise SpecError("--key with --shuffle: prepare the result again with --shuffle alone.")
    if asked.map is not None and asked.tokens is not None:
        raise SpecError("--map and --tokens together: have the function give the tokens.")
    if asked.length is not None and asked.length < 1:
        raise SpecError(
            f"--length {asked.length}: at least 1 is wanted, the most tokens of a sample."
        )
    if asked.length is not None and asked.tokens is None:
        raise SpecError(f"--length {asked.length} is of tokens: give --tokens, or leave it out.")
    if asked.tokens not in (None, "bytes") and not Path(str(asked.tokens)).is_file():
        raise SpecError(
            f"--tokens {asked.tokens!r}: there is no such file. Wanted: a file that tokenizers "
            "saved, as tokenizer.json, or the word bytes."
        )


def _check_function(option: str, reference: str | None) -> None:
    if reference is None:
        return
    file, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():
        raise SpecError(f"{option} {reference!r}: wanted is FILE.py:FUNCTION, as clean.py:record.")
    if not Path(file).is_file():
        raise SpecError(f"{option} {reference!r}: there is no file {file!r}.")
