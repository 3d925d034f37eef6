"""What training was given is what a plain reader finds in the raw files, each sample of its side.

The truth is not ours: contents are those of the arrays that were written, and sides are held
against scikit-learn or the law of the split. Each value of each axis meets each of each other.
"""

import csv
import json
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from started import RECIPES

import instep
from instep.cli import main
from instep.data.samples.contents import content_of
from instep.events import CONTENTS, read_records
from instep.store.run_folder import RunFolder
from lazily import Lazy

truth_of = Lazy("sklearn.model_selection")

pytestmark = pytest.mark.process

SAMPLES, FOLDS, EPOCHS, BATCH = 97, 4, 12, 18
PARTICIPANTS = 9

AXES: dict[str, list[Any]] = {
    "split": ["", "random", "blocks", "stratified", "group", "stratified_group", "time", "hash"],
    "source": ["json lines", "csv", "parquet", "images", "tensors"],
    "workers": [1, 2, 3, 5, 7],
    "partition": ["", "random", "blocks", "owner", "labels"],
    "disturbed": ["", "killed", "resumed at another size"],
    "loaders": [0, 2],
    "order": ["global", "windowed"],
    "sides": ["share", "folds"],
}

Case = dict[str, Any]


def pairwise() -> list[Case]:
    """Cases in which each value of each axis meets each value of each other axis."""
    names = list(AXES)
    open_pairs = {
        (one, a, other, b)
        for one, other in combinations(names, 2)
        for a, b in product(AXES[one], AXES[other])
    }
    cases = []
    while open_pairs:
        case: Case = {}
        first = min(open_pairs, key=lambda p: (names.index(p[0]), names.index(p[2]), str(p)))
        case[first[0]], case[first[2]] = first[1], first[3]
        for name in names:
            if name not in case:
                case[name] = max(AXES[name], key=lambda v: len(met({**case, name: v}, open_pairs)))
        open_pairs -= met(case, open_pairs)
        cases.append(case)
    return cases


def met(case: Case, pairs: set[Any]) -> set[Any]:
    found = set()
    for (one, a), (other, b) in product(case.items(), repeat=2):
        if (one, a, other, b) in pairs:
            found.add((one, a, other, b))
    return found


def named(case: Case) -> str:
    return "-".join(str(value).replace(" ", "_") or "none" for value in case.values())


CASES = pairwise()


def test_the_cases_have_every_pair_and_few_of_all_combinations() -> None:
    pairs = {frozenset(each) for case in CASES for each in combinations(case.items(), 2)}
    wanted = sum(len(AXES[a]) * len(AXES[b]) for a, b in combinations(AXES, 2))
    assert len(pairs) == wanted
    assert len(CASES) < 80


def table(source: str) -> dict[str, Any]:
    """Columns of values that tell all samples apart, in the order in which a source has them."""
    draw = np.random.default_rng(3)
    columns = {
        "x": draw.standard_normal((SAMPLES, 4)).astype(np.float32),
        "labels": draw.choice(3, SAMPLES, p=(0.6, 0.3, 0.1)),
        "owners": draw.integers(0, PARTICIPANTS, SAMPLES),
        "groups": draw.integers(0, 14, SAMPLES),
        "times": draw.integers(0, 60, SAMPLES),  # some at the same time
    }
    if source == "images":  # which stand in folders of their classes
        rank = np.argsort(columns["labels"], kind="stable")
        columns = {name: values[rank] for name, values in columns.items()}
        columns["x"] = draw.integers(0, 256, (SAMPLES, 2, 2, 3)).astype(np.uint8)
    return columns


def write(folder: Path, source: str) -> dict[str, Any]:
    """The raw files, and shards of them."""
    columns = table(source)
    np.savez(folder / "table.npz", **columns)
    rows = [
        {name: values[number].tolist() for name, values in columns.items()}
        for number in range(SAMPLES)
    ]
    raw = folder / "raw"
    match source:
        case "images":
            for number, (pixels, label) in enumerate(
                zip(columns["x"], columns["labels"], strict=True)
            ):
                (at := folder / "images" / f"{label}").mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(at / f"{number:04}.png")
        case "json lines":
            raw = raw.with_suffix(".jsonl")
            raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "csv":
            raw = raw.with_suffix(".csv")
            with raw.open("w", newline="") as file:
                flat = [{**{f"x{n}": v for n, v in enumerate(r.pop("x"))}, **r} for r in rows]
                writer = csv.DictWriter(file, list(flat[0]), quoting=csv.QUOTE_NONNUMERIC)
                writer.writeheader()
                writer.writerows(flat)
        case "parquet":
            raw = raw.with_suffix(".parquet")
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), raw, row_group_size=10)
    if raw.suffix:
        command = ["prepare", str(raw), "--to", str(folder / "shards"), "--workers", "2"]
        function = f"{RECIPES / 'any_source.py'}:record"
        assert (
            main(
                [
                    *command,
                    "--map",
                    function,
                ]
            )
            == 0
        )
    return columns


def contents(columns: dict[str, Any]) -> list[int]:
    """Of each sample, as one that reads the arrays plainly."""
    x = torch.from_numpy(columns["x"])
    if x.dtype == torch.uint8:
        x = x.permute(0, 3, 1, 2) / 255
    labels = torch.from_numpy(columns["labels"])
    return [content_of((x[number].contiguous(), labels[number])) for number in range(SAMPLES)]


def check_sides(case: Case, columns: dict[str, Any], trained: np.ndarray[Any, Any]) -> None:
    """Held against the law of the split, or what scikit-learn does."""
    held = ~trained
    share = len(truth_of.train_test_split(range(SAMPLES), test_size=0.2)[1])
    labels, folds = columns["labels"], case["sides"] == "folds"
    match case["split"]:
        case "":
            assert trained.all()
        case "random":
            assert held.sum() == (SAMPLES // FOLDS if folds else share)
        case "blocks":
            wanted = range(25, 49) if folds else range(SAMPLES - share, SAMPLES)
            assert np.flatnonzero(held).tolist() == list(wanted)
        case "stratified":
            counts = np.bincount(labels[held], minlength=3)
            if folds:
                truth = list(truth_of.StratifiedKFold(FOLDS).split(labels, labels))[1][1]
                assert counts.tolist() == np.bincount(labels[truth], minlength=3).tolist()
            else:
                assert held.sum() == share
                assert np.abs(counts - 0.2 * np.bincount(labels)).max() < 1
        case "group" | "stratified_group" | "hash":
            assert not set(columns["groups"][held]) & set(columns["groups"][trained])
            assert held.any()
        case "time":
            assert columns["times"][trained].max() < columns["times"][held].min()


def job(case: Case, folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = {"loaders": case["loaders"], "order": case["order"], "window": 20}
    if case["source"] not in ("images", "tensors"):
        if "group" in case["split"] or case["split"] == "hash":
            data["groups"] = "groups"
        if case["split"] == "time":
            data["times"] = "times"
        if "stratified" in case["split"] or case["partition"] == "labels":
            data["labels"] = "labels"
        if case["partition"] == "owner":
            data["owners"] = "owners"
    if case["split"]:
        data["split"] = case["split"]
        data |= {"folds": FOLDS, "fold": 1} if case["sides"] == "folds" else {"validation": 0.2}
    made: dict[str, Any] = {
        "recipe": f"{RECIPES / 'any_source.py'}:recipe",
        "name": "planned",
        "seed": 5,
        "workers": case["workers"],
        "arguments": {"source": case["source"], "path": str(folder)},
        "train": {"epochs": EPOCHS, "global_batch": BATCH, "merge": "never"},
        "check": {"content": "all"},
        "checkpoint": {"every": 5},
        "data": data,
    }
    if case["partition"]:
        options: dict[str, Any] = {"local_steps": 2, "partition": case["partition"]}
        if case["partition"] == "labels":
            options["skew"] = 50.0  # so that each participant has some samples
        made["sync"] = {"name": "averaging", "participants": PARTICIPANTS, "options": options}
    return made


def ran(case: Case, folder: Path) -> Iterator[Path]:
    """The run of a case, disturbed as it says; both runs of one that is killed."""
    made, runs = job(case, folder), folder / "runs"
    if case["disturbed"] == "killed":
        target = folder / "job.toml"
        target.write_text(toml(made))
        command = ["chaos", str(target), "--runs", str(runs), "--kills", "2"]
        roles = ["worker", "loader"] if case["loaders"] else ["worker"]
        assert main([*command, "--roles", ",".join(roles)]) == 0
        yield from (each.parent for each in runs.glob("*/run.id"))
        return
    given = {name: value for name, value in made.items() if name != "recipe"}
    if case["disturbed"]:
        given["train"] = {**given["train"], "stop_after_steps": 11}
    path = instep.train(made["recipe"], runs=runs, quiet=True, **given).path
    if case["disturbed"]:
        instep.resume(path, workers=1 + case["workers"] % 3, quiet=True)
    yield path


def toml(made: dict[str, Any]) -> str:
    """A job file, of tables one and two deep."""
    plain, tables = [], []
    for name, value in made.items():
        if isinstance(value, dict):
            inner = {k: v for k, v in value.items() if not isinstance(v, dict)}
            tables.append(f"[{name}]\n" + toml(inner))
            tables += [f"[{name}.{k}]\n" + toml(v) for k, v in value.items() if k not in inner]
        else:
            plain.append(f"{name} = {json.dumps(value)}\n")
    return "".join(plain + tables)


def given_to(run: Path) -> np.ndarray[Any, Any]:
    """(epoch, index, content) of all that a run's steps were given."""
    return np.unique(np.concatenate([read_records(f, CONTENTS) for f in run.glob("contents-*")]))


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.slow
def test_each_sample_of_the_training_side_was_given_as_it_lies_in_the_raw_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: Case
) -> None:
    columns = write(tmp_path, case["source"])
    number = {content: place for place, content in enumerate(contents(columns))}
    assert len(number) == SAMPLES
    for run in ran(case, tmp_path):
        assert RunFolder(run).audit.exact
        capsys.readouterr()
        assert main(["audit", str(run), "--content"]) == 0
        rows = given_to(run)
        samples = np.array([number[content] for content in rows["content"].tolist()])
        trained = np.isin(np.arange(SAMPLES), samples)
        check_sides(case, columns, trained)
        if not case["partition"]:  # whose participants have epochs of their own
            for epoch in range(EPOCHS):
                of_epoch = np.sort(samples[rows["epoch"] == epoch])
                assert of_epoch.tolist() == np.flatnonzero(trained).tolist()
