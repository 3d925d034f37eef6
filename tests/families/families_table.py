"""The table of families and meshes, printed, and in the documents."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from cells import REFUSED, RIGHT, Cell, Column
from twenty_five import VARIANTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "families-table.md"

HEAD = """# Which mesh trains which model

Find the family of your model here, and see which `[mesh]` trains it with the result of one process.
Each of 25 families was trained for ten steps in float64 with SGD and momentum, under instep and by
a plain PyTorch loop in one process with the same samples. So was a variant, which the counts leave
out: {variants}. *right*: weights and buffers are within
1e-10 of the plain loop's, the 2-norm of the distance over that of the way from the start; losses
within 1e-5; and the run says so before its first step. A number: refused before the first step,
with the sentence of that number below the table.

The models have a width of 6 to 64, dropout at the default of their library, and are built from
configurations (torch {torch}, transformers {transformers}). A step has 12 samples in 6
micro-batches, the last of an epoch 4 in 2. The ResNets have `train.batch_norm = "global"`.
With `stages`, the plain loop draws dropout for each block and part, as the run says that it does.
[The equality gate](equality-gate.md) says how a job is checked before it trains. This page is
written by `make families-table`.

"""

Table = Mapping[Column, Mapping[str, Cell]]


def counts(table: Table) -> str:
    """How many families each column has right, a line for each."""
    lines = []
    for column, cells in table.items():
        of = [cell.kind for name, cell in cells.items() if name not in VARIANTS]
        others = {kind: of.count(kind) for kind in dict.fromkeys(of) if kind != RIGHT}
        said = "".join(f", {count} {kind}" for kind, count in others.items())
        lines.append(f"{column.name}: {of.count(RIGHT)} of {len(of)} right{said}")
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """The page's table, with its sentences below."""
    sentences: dict[str, int] = {}
    lines = [
        f"| family | {' | '.join(column.name for column in table)} |",
        f"|---|{'---|' * len(table)}",
    ]
    for name in next(iter(table.values())):
        row = [_short(cells[name], sentences) for cells in table.values()]
        lines.append(f"| {name} | {' | '.join(row)} |")
    below = [f"{number}. {text}" for text, number in sentences.items()]
    return "\n".join([*lines, "", counts(table).replace("\n", "\\\n"), "", *below])


def _short(cell: Cell, sentences: dict[str, int]) -> str:
    if cell.kind == RIGHT:
        return RIGHT
    text = " ".join(cell.text.split()).replace("<", "&lt;")
    number = sentences.setdefault(text, len(sentences) + 1)
    return f"({number})" if cell.kind == REFUSED else f"**{cell.kind}** ({number})"


def write(table: Table) -> None:
    """Write the page."""
    head = HEAD.format(
        torch=torch.__version__.partition("+")[0],
        transformers=version("transformers"),
        variants=", ".join(VARIANTS),
    )
    PAGE.write_text(head + markdown(table) + "\n", encoding="utf-8")
