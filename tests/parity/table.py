"""The table of pairs in the documents, written by the test that measured it.

Each row is kept in a file of its own, as several processes may test; `write` makes the
page of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from judge import Outcome, complaints
from pair import Pair
from pairs import PAIRS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "parity-table.md"

HEAD = """# Which models give the result of one machine

Find your kind of model and loss here, and see whether a run gives what a plain PyTorch loop in one
process gives, and how closely. Each pair was trained for 20 steps by instep, and by a plain loop
with the same samples and the whole global batch in one forward pass. The distance is the 2-norm of
*instep - plain* over all trained parameters, divided by that of *plain - start*.
[The verdict](verdict.md) has a page of its own.

- **float64**: on 1, 2 and 3 workers. At most 1e-9 if the verdict is yes.
- **buffers**: the same for buffers and frozen parameters, the largest of the three.
- **float32**: the largest on 1, 2 and 3 workers, and what is allowed: three times the distance
  between plain loops whose samples within a batch are permuted, or three times float32's epsilon
  if that is more. If random numbers are drawn: between loops that add the gradients of the same
  micro-batches in another order.
- **alone**: float64 on one worker with one micro-batch. Every model is the same there, except with
  a dataset that is not repeatable.

A step has 12 samples in 6 micro-batches, the last of an epoch 4 in 2. This page is written by
`make parity-table`; torch {torch}.
"""


@dataclass(frozen=True)
class Row:
    """What is said of one pair."""

    name: str
    expected: str
    verdict: str
    """Of the run on three workers; or the refusal."""
    exact: list[str]
    """Distances in float64 on 1, 2 and 3 workers."""
    buffers: str
    """The largest distance of buffers in float64."""
    single: str
    """The largest in float32."""
    bound: str
    alone: str
    wrong: list[str]

    @classmethod
    def of(cls, pair: Pair, outcomes: list[Outcome]) -> Row:
        """The row of what came of a pair's runs."""
        wrong = [text for outcome in outcomes for text in complaints(pair, outcome)]
        many = [o for o in outcomes if o.micro_batches > 1]
        exact = [o for o in many if o.dtype == "float64"]
        alone = next(o for o in outcomes if o.micro_batches == 1)
        single = [o for o in many if o.dtype == "float32"]
        far = [o.distance.trained for o in single if o.distance]
        buffers = [o.distance.other for o in exact if o.distance]
        last = exact[-1]
        return cls(
            pair.name,
            str(pair.expected),
            last.verdict or f"refused: {last.error}",
            [_figure(o.distance and o.distance.trained) for o in exact],
            _figure(max(buffers, default=None)),
            f"{max(far):.1e}" if far else "",
            f"{single[-1].bound.trained:.1e}" if far else "",
            _figure(alone.distance and alone.distance.trained),
            wrong,
        )


def _figure(far: float | None) -> str:
    if far is None:
        return ""
    return "0" if far == 0 else f"{far:.1e}"


def keep(row: Row, folder: str) -> None:
    """Leave a row for `write`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", row.name)
    (Path(folder) / f"{name}.json").write_text(json.dumps(asdict(row)))


def write(folder: str, page: Path = PAGE) -> list[str]:
    """Make the page of the rows in a folder; the complaints among them."""
    rows = [Row(**json.loads(file.read_text())) for file in Path(folder).glob("*.json")]
    rows.sort(key=lambda row: list(PAIRS).index(row.name))
    lines = [
        HEAD.format(torch=torch.__version__.partition("+")[0]),
        "| pair | verdict | float64: 1 | 2 | 3 workers | buffers | float32 | allowed | alone |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.name, _short(row.verdict), *row.exact, row.buffers, row.single]
        cells += [row.bound if row.expected == "same" else "", row.alone]
        lines.append(f"| {' | '.join(cells)} |")
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [f"{row.name}: {text}" for row in rows for text in row.wrong]


def _short(verdict: str) -> str:
    """The first clause, fit for a cell."""
    text = " ".join(verdict.split()).replace("|", "\\|").replace("<", "&lt;")
    first = re.split(r"(?<=[^\d])[.;] |: it |, where ", text)[0]
    return first if len(first) < 160 else first[:157] + "..."
