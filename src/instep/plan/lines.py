"""Lines of `instep plan` for a terminal. Way in: `plan_lines`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from instep.plan.explain import factor_words, memory_words, readable_rate
from instep.units import readable_bytes, readable_count, readable_seconds
from instep.words import plural, printable

Table = Mapping[str, Any]
"""A plan, as `--json` prints it."""

_HEAD = ("step", "of it passes", "waits", "wire", "update", "memory", "sent/step", "whole run")


def plan_lines(table: Table) -> list[str]:
    """The lines of a plan.

    Args:
        table: of the plan.
    """
    return [printable(line) for line in _lines(table)]


def _lines(table: Table) -> Iterator[str]:
    yield _line("job", _of_job(table["job"]))
    yield _line("machine", _of_machine(table["machine"]))
    for text in table["notes"]:
        yield _line("note", text)
    yield ""
    same = [each for each in table["ways"] if each["same_result"]]
    other = [each for each in table["ways"] if not each["same_result"]]
    yield from _ranked(same, table["best"])
    if other:
        yield ""
        yield from _unranked(other)
    yield ""
    for label, text in table["explained"]:
        yield _line(label, text)
    for each in table["refused"]:
        yield _line("refused", f"{each['name']}: {each['why']}")
    for number, command in enumerate(table["next"]):
        yield _line("" if number else "next", command)


def _line(label: str, text: str) -> str:
    return f"{label:11}{text}"


def _of_job(job: Table) -> str:
    batch = f"batch {readable_count(job['global_batch'])}"
    if job.get("tokens_per_batch"):
        batch += f" on average, of {readable_count(job['tokens_per_batch'])} tokens"
    if not job["steps"]:
        return f"{job['name']}: {batch}, as many parameters and steps as its loop has"
    size = f"{readable_count(job['parameters'])} parameters, " if job["parameters"] else ""
    return f"{job['name']}: {size}{batch}, {plural(job['steps'], 'step')}"


def _of_machine(machine: Table) -> str:
    here = f"{plural(machine['cores'], 'core')} here, probed for {machine['seconds']:.0f} s"
    if machine["hosts"] == 1:
        return here
    rate = f" at {readable_rate(machine['bits_per_s'])}" if machine["bits_per_s"] else ""
    how = "emulated hosts on its cores" if machine["emulated"] else "hosts like it"
    return f"{here}; {machine['hosts']} {how}{rate}"


def _ranked(rows: Sequence[Table], best: str | None) -> Iterator[str]:
    cells: list[tuple[str, ...]] = [("same result as one machine", *_HEAD)]
    for row in rows:
        mark = "  best" if row["way"] == best else "" if row["fits"] else "  does not fit"
        cells.append((f"  {row['way']}", *_cells(row), mark.strip()))
    yield from _set(cells)


def _unranked(rows: Sequence[Table]) -> Iterator[str]:
    cells: list[tuple[str, ...]] = [("another result (measure before use)", *_HEAD)]
    for row in rows:
        words = factor_words(row) if "break_even_factor" in row else ""
        cells.append((f"  {row['way']}", *_cells(row), words))
    yield from _set(cells)


def _cells(row: Table) -> tuple[str, ...]:
    parts, share = row["parts_s"], row["step_s"] / row["commit_s"] if row["commit_s"] else 1.0
    shown = [parts["passes"], parts["waits"], parts["wire"], parts["update"] + parts["rest"]]
    low, high = readable_seconds(row["low_s"]), readable_seconds(row["high_s"])
    sent = row["sent_bytes"] * share
    return (
        f"{readable_seconds(row['step_s'])} ({low} to {high})",
        *(readable_seconds(share * part) if part >= 5e-5 else "0" for part in shown),
        memory_words(row),
        readable_bytes(sent),
        readable_seconds(row["run_s"]) if row["run_s"] else "?",
    )


def _set(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns, as wide as they have to be; the first and what follows the last stand left."""
    columns = len(rows[0])
    widths = [max(len(row[n]) for row in rows) for n in range(columns)]
    for row in rows:
        first, *rest = (cell for cell in row[:columns])
        text = first.ljust(widths[0])
        for cell, width in zip(rest, widths[1:], strict=True):
            text += "  " + cell.rjust(width)
        yield "  ".join([text, *row[columns:]]).rstrip()
