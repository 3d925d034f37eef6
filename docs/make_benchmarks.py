"""Write `benchmarks/README.md`, and the figures of `README.md`, from the results of benchmarks.

    python docs/make_benchmarks.py            write both
    python docs/make_benchmarks.py --check    exit 1 if a page is not what would be written

`benchmarks/questions` says what is asked. The newest of `benchmarks/results` that has the answer
gives the figure, or `benchmarks/noted.toml` if no result was kept. So no page can differ from what
was measured, and one figure stands everywhere for one thing.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

from questions import PARTS  # noqa: E402
from questions.base import Answer, Question  # noqa: E402

PAGE, README = BENCHMARKS / "README.md", ROOT / "README.md"
PAIRS = ROOT / "docs" / "concepts" / "parity-table.md"
PICTURE = ROOT / "docs" / "pictures" / "killed.svg"
BEGIN, END = "<!-- figures: docs/make_benchmarks.py -->\n", "<!-- end of figures -->"

_OPENING = """# Benchmarks

Find what you want to know in a table; each row has the newest figure, how certain it is, what it
is beside, what was wanted, and whether that is reached. {wanted} rows had an aim, and {reached}
of them reach it.

The question leads to its page in `measured/`: how it is measured, and what was measured before. The
date leads to the result. A figure without a unit is a ratio to what stands under *beside*, measured
in the same run; for speed and rates more is better, for times, bytes and steps less. What is wanted
is compared with the figure, not with the end of its spread. All are from a machine with two cores,
torch 2.13 on the CPU, if nothing else is said.

Run one yourself; `--help` says how:

```sh
python benchmarks/recovery.py --help
```
"""

_END = """
## How this page is written

`docs/make_benchmarks.py` writes it from `results/`, and `make check` compares. Figures that were
written down and whose result was not kept are in [`noted.toml`](noted.toml), with the commit that
wrote them. A new result of a question takes the place of the older one here by its date;
[`questions/`](questions/__init__.py) says where in it the figure is. `turns.py` is what benchmarks
share whose programs take turns on one machine; several run on
[emulated hosts](../docs/guides/emulated-hosts.md).

Next: [contributing](../CONTRIBUTING.md).
"""


class Source(NamedTuple):
    """A result, or a figure that was written down."""

    stem: str
    """Its date and its name, as those of a file."""
    file: Path | None
    content: Any

    @property
    def date(self) -> str:
        return self.stem[:10]

    @property
    def name(self) -> str:
        return self.stem[11:]


class Row(NamedTuple):
    """A question with its newest answer."""

    question: Question
    answer: Answer
    source: Source

    @property
    def reached(self) -> str:
        return self.question.reached(self.answer)


@cache
def sources() -> list[Source]:
    """All that was measured, the newest first; of one day, what was written down came later."""
    found = [
        Source(file.stem, file, json.loads(file.read_text("utf-8")))
        for file in (BENCHMARKS / "results").glob("????-??-??-*.json")
    ]
    for each in tomllib.loads((BENCHMARKS / "noted.toml").read_text("utf-8"))["noted"]:
        found.append(Source(f"{each['date']:%Y-%m-%d}-{each['name']}", None, each))
    return sorted(found, key=lambda source: (source.stem, source.file is None), reverse=True)


def row(question: Question) -> Row:
    """Its newest answer.

    Raises:
        LookupError: no result has it.
    """
    for source in sources():
        if re.fullmatch(question.results, source.name):
            try:
                return Row(question, question.answer(source.content), source)
            except (LookupError, TypeError):
                continue
    raise LookupError(f"no result answers {question.asks!r}")


@cache
def rows() -> dict[str, list[Row]]:
    """Of each part of the page."""
    return {title: [row(question) for question in part] for title, part in PARTS.items()}


def page() -> str:
    """The whole page of benchmarks."""
    aims = [each.reached for part in rows().values() for each in part if each.reached]
    parts = [_OPENING.format(wanted=len(aims), reached=aims.count("yes"))]
    for title, part in rows().items():
        parts += [f"## {title}\n", *_table(part), ""]
    return "\n".join(parts).rstrip() + "\n" + _END


def _table(part: list[Row]) -> Iterator[str]:
    yield "| question | figure | spread | beside | wanted | reached | measured |"
    yield "|---|---|---|---|---|---|---|"
    for each in part:
        question, answer = each.question, each.answer
        file = each.source.file
        target = f"results/{file.name}" if file else f"measured/{question.page}.md"
        cells = (
            f"[{question.asks}](measured/{question.page}.md)",
            *(answer.figure, answer.spread, question.beside, question.wanted, each.reached),
            f"[{each.source.date}]({target})",
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def figures() -> str:
    """The table of `README.md`, and the sentence below its picture."""
    killed, under_torchrun, bits, redone = (_of(asks) for asks in _IN_THE_README)
    gpt, mlp = (_of(asks).answer for asks in _SPEEDS)
    same, every = pairs()
    torchrun = f"torchrun {under_torchrun.answer.figure} ({under_torchrun.answer.spread})"
    stops = sorted(map(int, re.findall(r">(\d+) ms<", PICTURE.read_text("utf-8"))))
    lines = (
        "| | instep | beside it, on the same machine |",
        "|---|---|---|",
        f"| a worker is killed: all train again after | {killed.answer.figure} "
        f"({killed.answer.spread}) | {torchrun} |",
        f"| the parameters after that | {bits.answer.figure} as undisturbed | not compared |",
        f"| steps computed again | {redone.answer.figure} | {redone.answer.spread} |",
        "| speed on two processes, in terms of plain DDP | "
        f"a small GPT {gpt.figure}; an MLP {mlp.figure} | 1 |",
        f"| the result of a plain PyTorch loop | on {same} of {every} [pairs of model and "
        "loss](docs/concepts/parity-table.md) | for the others the run says what differs, before "
        "the first step |",
        "",
        "[The benchmarks](benchmarks/README.md) have the spread, the date and the result of each. "
        f"The picture shows one run, whose stops took {stops[0]} to {stops[-1]} ms.",
    )
    return "\n".join(lines) + "\n"


_IN_THE_README = (
    "one of three workers is killed: all train again after",
    "the same under torchrun",
    "the parameters after these kills",
    "steps that were computed again",
)
_SPEEDS = (
    "speed on two processes, a GPT of 10 million parameters",
    "the same, an MLP whose step takes 2.5 ms",
)


def _of(asks: str) -> Row:
    return next(each for part in rows().values() for each in part if each.question.asks == asks)


def pairs() -> tuple[int, int]:
    """How many pairs of model and loss have the result of a plain loop, and how many there are."""
    verdicts = re.findall(r"^\| [^|]+ \| (\w[^|:]*)", PAIRS.read_text("utf-8"), re.M)[1:]
    return sum(verdict.strip() == "yes" for verdict in verdicts), len(verdicts)


def readme() -> str:
    """`README.md` with its figures."""
    before, found, rest = README.read_text("utf-8").partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise SystemExit(f"{README} has no lines {BEGIN.strip()} and {END}.")
    return f"{before}{BEGIN}{figures()}{END}{after}"


def main(arguments: list[str]) -> int:
    """Write both pages, or with `--check` compare them; returns the exit code."""
    wanted = {PAGE: page(), README: readme()}
    if arguments == ["--check"]:
        differ = [file for file, text in wanted.items() if file.read_text("utf-8") != text]
        for file in differ:
            print(f"{file} is not what the results say: run python docs/make_benchmarks.py.")
        return int(bool(differ))
    if arguments:
        print(__doc__)
        return 2
    for file, text in wanted.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
