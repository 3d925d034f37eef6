"""`instep compare`: run a job and alternatives to it in turns, and judge which pays.

In a turn each of them runs once, all with the seed of the turn; every other turn goes backwards, so
that what drifts on the machine favours none. What is done is written down after each run, and the
same command continues there. `alternatives.py` makes the jobs, `report/figures/outcomes.py` judges.
Nothing here imports torch. Way in: `compare`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instep.client.results import recipe_sha256
from instep.client.submit import run_job
from instep.errors import INTERRUPTED, InstepError, RunError, SpecError, WorkerError
from instep.formats import INSTEP
from instep.job import file as spec_file
from instep.lab.alternatives import Alternative
from instep.lab.emulated import check_can_emulate, check_has_no_hosts, emulated_hosts, on_hosts
from instep.lab.netlab import MOST_HOSTS, Network, bits_per_s
from instep.lab.temporary_runs import Progress, unlogged
from instep.plain_file import replace_plain
from instep.report.figures.outcomes import HEAD, Judged, Outcome, conclusion, judge, outcome_of
from instep.report.page.markup import Html, section, table, tag
from instep.report.page.page import write_comparison
from instep.store.folder import held, numbered, remove_run_folder
from instep.store.own_files import lock, open_own, unlock
from instep.store.run_folder import RunFolder
from instep.units import readable_count
from instep.words import plural

Say = Callable[[str], None]

LEAST_TURNS, MOST_TURNS = 3, 8
"""Where the number of turns follows from how much they differ."""

RECORD, PAGE = "compare.json", "compare.html"


class Hosts(NamedTuple):
    """Emulated hosts to run on; of this machine alone if their number is 0."""

    number: int = 0
    rate: str | None = None

    def check(self, alternatives: Sequence[Alternative]) -> None:
        """Refuse what cannot be emulated, before anything starts."""
        if not self.number:
            if self.rate is not None:
                raise SpecError(f"--rate {self.rate}: needs --hosts, whose links have that rate.")
            return
        base = alternatives[0].job
        if not 2 <= self.number <= MOST_HOSTS:
            raise SpecError(f"--hosts {self.number}: a network has 2 to {MOST_HOSTS} hosts.")
        if base.workers < self.number:
            raise SpecError(
                f"--hosts {self.number}: the job has {plural(base.workers, 'worker')}, and each "
                f"host needs one. Add --workers {self.number}."
            )
        if self.rate is not None:
            bits_per_s(self.rate)
        for each in alternatives:
            check_has_no_hosts(each.job, "--hosts")
        check_can_emulate("--hosts")


class Compared(NamedTuple):
    """The result."""

    folder: Path
    judged: list[Judged]
    turns: int
    why: str
    """Why there were so many turns."""
    left_out: Sequence[str] = ()
    """Values of the job file that alternatives do not have."""

    @property
    def exit_code(self) -> int:
        """That of a failed worker if an alternative failed."""
        return WorkerError.exit_code if any(each.failed for each in self.judged) else 0

    @property
    def page(self) -> Path:
        """What was written for people."""
        return self.folder / PAGE

    @property
    def notes(self) -> list[str]:
        """In which way the alternatives were not treated alike."""
        base = self.judged[0].samples
        return [*self.left_out] + [
            f"{each.name} used {readable_count(each.samples)} samples, and {self.judged[0].name} "
            f"{readable_count(base)}: an epoch's last step has the rest. Use train.epochs."
            for each in self.judged[1:]
            if not each.failed and each.samples != base
        ]

    def lines(self) -> list[str]:
        """What is printed."""
        rows = [list(HEAD), *(each.cells() for each in self.judged)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        shown = [_set(row, widths) for row in rows]
        return [
            *shown,
            "",
            *(f"found   {each.verdict}" for each in self.judged[1:]),
            *(f"note    {note}" for note in self.notes),
            f"best    {conclusion(self.judged)}",
            f"turns   {self.turns}: {self.why}",
            f"page    {self.page}",
        ]

    def as_table(self) -> dict[str, Any]:
        """The same for `--json`."""
        return {
            "folder": str(self.folder),
            "page": str(self.page),
            "turns": self.turns,
            "why": self.why,
            "notes": self.notes,
            "conclusion": conclusion(self.judged),
            "alternatives": [each.as_table() for each in self.judged],
        }


def _set(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return "  ".join(cells).rstrip()


def compare(
    alternatives: Sequence[Alternative],
    runs: Path,
    say: Say,
    *,
    repeats: int | None = None,
    hosts: Hosts = Hosts(),  # noqa: B008 it is a frozen value
) -> Compared:
    """Run all alternatives in turns, and judge them. What an earlier command has done counts.

    Args:
        alternatives: the first is the unchanged job.
        runs: folder in which a folder for all runs of the comparison is made, or found again.
        say: prints a line of progress.
        repeats: turns; None: until they say how the alternatives differ, 3 to 8.
        hosts: emulated hosts for all runs.

    Raises:
        SpecError: such hosts cannot be had, or not so many turns.
        InstepError: the unchanged job failed.
        KeyboardInterrupt: Ctrl-C or SIGTERM came; what was done is kept.
    """
    if repeats is not None and repeats < 1:
        raise SpecError(f"--repeats {repeats}: needs a number of turns above 0.")
    hosts.check(alternatives)
    with ExitStack() as stack:
        series = stack.enter_context(_series(alternatives, runs, hosts))
        for each in alternatives:
            for text in each.left_out:
                say(f"{each.name}: {text}")
        if series.done:
            say(f"continuing in {series.folder}: {plural(len(series.done), 'run')} done")
        network = None
        if hosts.number and not series.is_over(repeats):
            network = stack.enter_context(emulated_hosts(hosts.number, hosts.rate))
        try:
            while not series.is_over(repeats):
                series.take_a_turn(network, repeats, say)
        except KeyboardInterrupt:
            say(f"interrupted; the same command continues in {series.folder}")
            raise
        result = series.result(repeats)
    _write_page(result, series)
    return result


@contextmanager
def _series(alternatives: Sequence[Alternative], runs: Path, hosts: Hosts) -> Iterator[_Series]:
    """The comparison in its folder: a new one, or the one that the same command began."""
    asked = _asked(alternatives, hosts)
    name = f"{alternatives[0].job.name}-compare"
    for candidate in numbered(name):
        folder = runs / candidate
        record = folder / RECORD
        if not folder.exists():
            folder.mkdir(parents=True)
            replace_plain(record, json.dumps({"asked": asked, "done": []}))
        if record.is_file() and _read(record)["asked"] == asked:
            break
    with open_own(folder / "compare.id") as file:
        if not lock(file):
            raise RunError(f"another command is comparing in {folder}. Wait for its end.")
        try:
            yield _Series(alternatives, folder.resolve(), asked)
        finally:
            unlock(file)


def _read(record: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        return {"asked": found["asked"], "done": list(found["done"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {"asked": None, "done": []}


def _asked(alternatives: Sequence[Alternative], hosts: Hosts) -> str:
    """What tells one comparison from another: jobs, recipe, version and hosts."""
    told = [INSTEP, recipe_sha256(alternatives[0].job), list(hosts)]
    told += [[each.name, spec_file.dump(each.job)] for each in alternatives]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


class _Series:
    """The runs of a comparison.

    Args:
        alternatives: what is compared.
        folder: of their runs.
        asked: what tells this comparison from others.
    """

    def __init__(self, alternatives: Sequence[Alternative], folder: Path, asked: str) -> None:
        self.alternatives, self.folder, self._asked = alternatives, folder, asked
        done = _read(folder / RECORD)["done"]
        self.done: list[dict[str, Any]] = [run for run in done if not run["failed"]]
        """Of each run, its `folder` in this one, and why it `failed`, or empty. What failed in an
        earlier command is tried again."""
        self._outcomes: dict[str, Outcome] = {}

    def take_a_turn(self, network: Network | None, repeats: int | None, say: Say) -> None:
        """Run what the next turn still lacks."""
        turn = self._whole_turns() + 1
        of = f" of {repeats}" if repeats else ""
        for each in self.alternatives[:: 1 if turn % 2 else -1]:
            if self._failed(each) or self._has(each, turn):
                continue
            say(f"turn {turn}{of}: {each.name}")
            self._run(each, turn, network, say)

    def _run(self, each: Alternative, turn: int, network: Network | None, say: Say) -> None:
        name = f"{each.folder}-{turn}"
        job = msgspec.structs.replace(each.job, name=name, seed=each.job.seed + turn - 1)
        if network is not None:
            job = on_hosts(job, network)
        if (self.folder / name).exists():  # it was interrupted, and a part has no time
            with held(self.folder / name):
                pass
            remove_run_folder(self.folder / name)
        progress, failed = Progress(say, job.train.steps or 0), ""
        try:
            done = run_job(unlogged(job), self.folder, named=True, quiet=True, watch=progress)
            if done.exit_code == INTERRUPTED:
                raise KeyboardInterrupt
            if done.summary["diverged"]:
                raise WorkerError(f"its loss was not finite in turn {turn}.")
        except InstepError as error:
            if each is self.alternatives[0]:
                raise
            failed = str(error)
            say(f"turn {turn}: {each.name} failed: {failed}")
        self.done.append({"folder": name, "failed": failed.partition("\n")[0]})
        replace_plain(self.folder / RECORD, json.dumps({"asked": self._asked, "done": self.done}))

    def is_over(self, repeats: int | None) -> bool:
        """Whether there are turns enough."""
        turns = self._whole_turns()
        if turns and all(self._failed(each) for each in self.alternatives[1:]):
            return True
        if repeats is not None or turns < LEAST_TURNS:
            return turns >= (repeats or LEAST_TURNS)
        return turns >= MOST_TURNS or self._settled()

    def _settled(self) -> bool:
        found = [each.decisive for each in self.judged()[1:] if not each.failed]
        return all(ratio is None or ratio.settled for ratio in found)

    def result(self, repeats: int | None) -> Compared:
        """What the runs say."""
        turns = self._whole_turns()
        if repeats is not None:
            why = "as asked for"
        elif self._settled():
            why = "each ratio is known to 5 %, or to a quarter of what is between it and 1"
        else:
            why = "the most; the turns differ too much to tell more"
        left = [f"{each.name}: {text}" for each in self.alternatives for text in each.left_out]
        return Compared(self.folder, self.judged(), turns, why, left)

    def judged(self) -> list[Judged]:
        """The alternatives by the turns that are whole."""
        turns = [
            [self._outcome(each, turn + 1) for each in self.alternatives]
            for turn in range(self._whole_turns())
        ]
        names = [each.name for each in self.alternatives]
        return judge(names, turns, [self._failed(each) for each in self.alternatives])

    def shown(self) -> dict[str, RunFolder]:
        """The runs of the first turn, by what they are called."""
        first = [each for each in self.alternatives if not self._failed(each)]
        return {each.name: RunFolder(self.folder / f"{each.folder}-1") for each in first}

    def _outcome(self, each: Alternative, turn: int) -> Outcome | None:
        name = f"{each.folder}-{turn}"
        if self._failed(each):
            return None
        if name not in self._outcomes:
            self._outcomes[name] = outcome_of(RunFolder(self.folder / name))
        return self._outcomes[name]

    def _whole_turns(self) -> int:
        turn = 0
        while all(self._failed(each) or self._has(each, turn + 1) for each in self.alternatives):
            turn += 1
        return turn

    def _has(self, each: Alternative, turn: int) -> bool:
        return any(run["folder"] == f"{each.folder}-{turn}" for run in self.done)

    def _failed(self, each: Alternative) -> str:
        """Why it failed in a turn; empty if it never did."""
        folders = {f"{each.folder}-{turn}" for turn in range(1, len(self.done) + 1)}
        failures = (run["failed"] for run in self.done if run["folder"] in folders)
        return next(filter(None, failures), "")


def _write_page(result: Compared, series: _Series) -> None:
    shown = series.shown()
    rows = [each.cells() for each in result.judged]
    found = [tag("p", text) for text in [*(e.verdict for e in result.judged[1:]), *result.notes]]
    best = tag("p", tag("b", conclusion(result.judged)), class_="verdict")
    note = (
        f"Medians of {plural(result.turns, 'turn')}, {result.why}. In brackets, where the ratio to "
        "the unchanged job is, with a certainty of 95 % for all together. The loss is that of "
        "the last validation. The time begins with the first step."
    )
    first: list[Html] = [section("Which pays", best, *found, table(HEAD, rows), note=note)]
    title = f"{series.alternatives[0].job.name}: compared"
    first.append(tag("p", "The rest is about the first turn.", class_="alone"))
    write_comparison(result.page, title, [*shown.values()], [*shown], first)
