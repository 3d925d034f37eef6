"""Predicts a column of numbers of a table from its other columns.

    instep run job.toml

`table.csv` has the rents of made-up flats. For your own table, replace the file, and name the
column to predict in job.toml. A column of text is a choice between its values.
"""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

FILE = Path(__file__).with_name("table.csv")


def recipe(target: str = "rent", lr: float = 3e-3) -> instep.Recipe:
    rows = rows_of(FILE)
    if not rows or target not in rows[0]:
        there = ", ".join(rows[0]) if rows else "no row"
        raise ValueError(f"{FILE.name} has {there}; job.toml names {target!r}")
    train, held_out = rows[len(rows) // 5 :], rows[: len(rows) // 5]
    names = [name for name in rows[0] if name != target]
    encode = {name: encoder([row[name] for row in train]) for name in (*names, target)}

    def dataset(rows: Sequence[dict[str, str]]) -> TensorDataset:
        inputs = [torch.stack([encode[name](row[name]) for row in rows]) for name in names]
        return TensorDataset(
            torch.cat(inputs, dim=1), torch.stack([encode[target](row[target]) for row in rows])
        )

    width = len(dataset(rows[:1])[0][0])
    spread = torch.tensor([float(row[target]) for row in train]).std()

    def error(outputs: Tensor, target: Tensor) -> Tensor:
        """In the unit of the column: of the rents, euros."""
        return (outputs - target).abs().mean() * spread

    return instep.Recipe(
        model=nn.Sequential(
            nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        ),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=dataset(train),
        validate=dataset(held_out),
        metrics={"error": error},
    )


def rows_of(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as spreadsheets save it: with commas, semicolons or tabs."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252")  # of an older Excel
    separator = max(",;\t", key=text.partition("\n")[0].count)
    rows = [*csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)]
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ValueError(f"{file.name}: row {number} has other columns than the first line")
    if separator == ";":  # then 1,5 is a number
        rows = [{name: decimal(value) for name, value in row.items()} for row in rows]
    return rows


def decimal(value: str) -> str:
    with_point = value.replace(",", ".")
    return with_point if with_point.replace(".", "", 1).lstrip("-").isdecimal() else value


def encoder(column: Sequence[str]) -> Callable[[str], Tensor]:
    """From a value to numbers [width]; what it knows of the column, it learns from these values."""
    try:
        numbers = torch.tensor([float(value) for value in column])
    except ValueError:
        values = sorted(set(column))
        return lambda value: torch.tensor([float(value == known) for known in values])
    mean, spread = numbers.mean(), numbers.std()
    return lambda value: (torch.tensor([float(value)]) - mean) / spread
