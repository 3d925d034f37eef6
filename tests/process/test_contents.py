"""What was handed to training is what lies in the file; where it is not, that is found and said."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from in_a_file import GIVEN, SAMPLES, VALUES, write
from started import RECIPES

import instep
from instep.cli import main
from instep.data.order import Order
from instep.errors import DataError, RunError, WorkerError
from instep.events import CONTENTS, read_records
from instep.store.run_folder import RunFolder
from marks import slow, tail

pytestmark = pytest.mark.process

Out = pytest.CaptureFixture[str]

ALONE = {"workers": 1, "loaders": 0}
"""Where it does not matter who reads."""


def trained(folder: Path, *, loaders: object = 2, workers: int = 2, **changes: Any) -> Path:
    """A run of in_a_file.py in which every content is recorded."""
    data = folder / "rows"
    if not data.exists():
        write(data)
    arguments = {"path": str(data), **changes.pop("arguments", {})}
    job = {
        "train": {"epochs": 2, "global_batch": 16, "merge": "never"},
        "check": {"content": "all"},
        "data": {"loaders": loaders},
        **changes,
    }
    return instep.train(
        f"{RECIPES / 'in_a_file.py'}:recipe",
        name="read",
        runs=folder,
        workers=workers,
        seed=5,
        quiet=True,
        arguments=arguments,
        **job,
    ).path


def audited(run: Path, capsys: Out, *options: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["audit", str(run), "--content", *options, "--json"])
    return code, json.loads(capsys.readouterr().out)["content"]


@pytest.mark.parametrize(
    ("loaders", "how"),
    [
        tail(0, "plainly"),
        ("auto", "drawing"),
        *(
            slow(*each)
            for each in ((0, "drawing"), (2, "plainly"), (2, "drawing"), ("auto", "plainly"))
        ),
    ],
)
def test_each_sample_of_each_epoch_was_what_a_plain_read_gives(
    tmp_path: Path, capsys: Out, loaders: object, how: str
) -> None:
    run = trained(tmp_path, loaders=loaders, arguments={"how": how})
    code, content = audited(run, capsys)
    assert (code, content["wrong"], content["unrepeatable"]) == (0, [], [])
    assert content["due"] == content["recorded"] == content["compared"] == 2 * SAMPLES
    assert named_as_not_repeatable(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("order", ["dataset", "windowed"])
def test_the_samples_to_record_are_known_in_every_order(
    tmp_path: Path, capsys: Out, order: str
) -> None:
    train = {"epochs": 2, "global_batch": 16, "merge": "never"}
    data = {"order": order, "window": 20}
    run = trained(tmp_path, train=train, data=data, check={"content": "sample"})
    code, content = audited(run, capsys)
    assert (code, content["wrong"]) == (0, [])
    assert content["due"] == content["recorded"] > 0


def named_as_not_repeatable(run: Path) -> list[str]:
    texts = [event["text"] for event in RunFolder(run).named("warning")]
    return [text for text in texts if "repeatable" in text]


@pytest.mark.tail
def test_a_file_that_was_opened_at_import_is_read_by_each_worker_from_a_place_of_its_own(
    tmp_path: Path, capsys: Out
) -> None:
    """The workers are forks of a process that has imported the recipe's file."""
    write(tmp_path / "rows", samples=2000)
    recipe = tmp_path / "opened.py"
    recipe.write_text(
        f"import sys\nsys.path.insert(0, {str(RECIPES)!r})\n"
        "import in_a_file\n"
        f"DATA = in_a_file.InAFile({str(tmp_path / 'rows')!r}, 'plainly')\n"
        "DATA.handle = open(DATA.path, 'rb', buffering=0)\n"
        "def recipe():\n"
        "    made = in_a_file.recipe(DATA.path)\n"
        "    object.__setattr__(made, 'train', DATA)\n"
        "    made.given['train'] = made.given['train']._replace(dataset=DATA)\n"
        "    return made\n"
    )
    run = instep.train(
        f"{recipe}:recipe",
        runs=tmp_path,
        workers=2,
        quiet=True,
        train={"epochs": 2, "global_batch": 200, "merge": "never"},
        check={"content": "all"},
        data={"loaders": 0},
    ).path
    code, content = audited(run, capsys)
    assert (code, content["wrong"], content["compared"]) == (0, [], 4000)


@pytest.mark.tail
def test_a_record_that_is_changed_afterwards_is_found(tmp_path: Path, capsys: Out) -> None:
    run = trained(tmp_path, **ALONE)
    with (tmp_path / "rows").open("r+b") as file:
        file.seek(4 * VALUES * 7)
        file.write(b"\x01")
    code, content = audited(run, capsys)
    assert code == RunError.exit_code
    assert [(each["epoch"], each["sample"]) for each in content["wrong"]] == [(0, 7), (1, 7)]
    assert main(["audit", str(run), "--content"]) == RunError.exit_code
    said = capsys.readouterr()
    assert "fault   sample 7 in epoch 1 was " in said.out
    assert "2 of 192 samples handed to training were not what a plain read" in said.err
    assert audited(run, capsys, "20")[1]["compared"] == 20


@pytest.mark.slow
def test_a_dataset_that_is_read_wrongly_in_loader_processes_is_found(
    tmp_path: Path, capsys: Out
) -> None:
    run = trained(tmp_path, workers=1, arguments={"how": "wrongly"})
    code, content = audited(run, capsys)
    assert code == RunError.exit_code
    found = {each["sample"] for each in content["wrong"]}
    assert found == set(range(0, SAMPLES, 3))


@pytest.mark.slow
def test_by_default_a_keyed_sample_is_recorded_in_any_process_that_reads_it(
    tmp_path: Path, capsys: Out
) -> None:
    write(tmp_path / "rows", samples=1000)
    found = []
    for workers, loaders in ((1, 0), (2, 2)):
        folder = tmp_path / f"{workers}"
        folder.mkdir()
        run = trained(
            folder,
            workers=workers,
            loaders=loaders,
            check={},
            arguments={"path": str(tmp_path / "rows")},
        )
        assert audited(run, capsys)[0] == 0
        rows = [read_records(file, CONTENTS) for file in run.glob("contents-*.bin")]
        found.append(np.unique(np.concatenate(rows)).tolist())
    assert found[0] == found[1]
    assert 5 < len(found[0]) < 100
    assert len({index for _, index, _ in found[0]}) > len(found[0]) // 2  # others in each epoch


@pytest.mark.slow
def test_a_killed_worker_and_its_loader_processes_leave_no_wrong_sample(
    tmp_path: Path, capsys: Out
) -> None:
    train = {"epochs": 40, "global_batch": 16, "merge": "never"}  # there must be time for all kills
    run = trained(tmp_path, arguments={"how": "drawing"}, workers=2, train=train)
    whole = np.unique(read_all(run)).tolist()
    other = tmp_path / "broken"
    other.mkdir()
    job = other / "job.toml"
    job.write_text(
        f'recipe = "{RECIPES / "in_a_file.py"}:recipe"\nseed = 5\nworkers = 2\nname = "read"\n'
        '[train]\nepochs = 40\nglobal_batch = 16\nmerge = "never"\n[check]\ncontent = "all"\n'
        f'[data]\nloaders = 2\n[arguments]\npath = "{tmp_path / "rows"}"\nhow = "drawing"\n'
    )
    broken = ["chaos", str(job), "--runs", str(other), "--kills", "3", "--roles", "worker,loader"]
    assert main(broken) == 0
    runs = [file.parent for file in other.glob("*/run.id")]
    assert len(runs) == 2
    for each in runs:
        assert np.unique(read_all(each)).tolist() == whole
        assert audited(each, capsys)[0] == 0


def read_all(run: Path) -> Any:
    return np.concatenate([read_records(f, CONTENTS) for f in run.glob("contents-*.bin")])


@pytest.mark.slow
def test_a_dataset_with_a_generator_of_its_own_is_named_and_the_audit_does_not_hold(
    tmp_path: Path, capsys: Out
) -> None:
    run = trained(tmp_path, **ALONE, arguments={"how": "its own draws"})
    (text,) = named_as_not_repeatable(run)
    assert "the training dataset is not repeatable: sample " in text
    code, content = audited(run, capsys)
    assert (code, content["compared"], content["wrong"]) == (RunError.exit_code, 0, [])
    assert len(content["unrepeatable"]) == content["recorded"] == 2 * SAMPLES
    assert main(["audit", str(run), "--content"]) == RunError.exit_code
    assert "none of the 192 samples could be compared" in capsys.readouterr().err


@pytest.mark.slow
def test_samples_that_do_not_repeat_are_not_counted_among_those_that_were_compared(
    tmp_path: Path, capsys: Out
) -> None:
    run = trained(tmp_path, **ALONE, arguments={"how": "a few draws of its own"})
    code, content = audited(run, capsys)
    assert (code, content["wrong"]) == (0, [])
    assert {index % 8 for index in content["unrepeatable"]} == {0}
    assert len(content["unrepeatable"]) == 2 * SAMPLES // 8
    assert content["compared"] == 2 * SAMPLES - len(content["unrepeatable"])


def halted(folder: Path, **changes: Any) -> Path:
    train = {"epochs": 2, "global_batch": 16, "stop_after_steps": 4}
    return trained(folder, train=train, **changes)


class Halted(NamedTuple):
    """A run to go on with, and the files of its two datasets."""

    run: Path
    train: Path
    validate: Path


@pytest.fixture(scope="module")
def halted_once(tmp_path_factory: pytest.TempPathFactory) -> Halted:
    """A run that was stopped after 4 of 12 steps; whoever goes on with it takes a copy."""
    folder = tmp_path_factory.mktemp("halted")
    write(folder / "validate")
    run = halted(folder, arguments={"validate": str(folder / "validate")})
    return Halted(run, folder / "rows", folder / "validate")


@pytest.fixture
def stopped(halted_once: Halted, tmp_path: Path) -> Iterator[Halted]:
    """A copy of that run; the files are again as they were when the test has ended."""
    before = [(path, path.read_bytes()) for path in halted_once[1:]]
    yield halted_once._replace(run=shutil.copytree(halted_once.run, tmp_path / "read"))
    for path, content in before:
        path.write_bytes(content)


def resumed(run: Path, **data: Any) -> dict[str, Any]:
    """The summary of a run after it went on, with little beside what is looked at."""
    return instep.resume(run, quiet=True, workers=1, data={"loaders": 0, **data}).summary


@pytest.mark.tail
def test_what_is_read_before_the_first_step_is_not_recorded_as_trained_on(
    halted_once: Halted,
) -> None:
    """The trial that decides on merging reads from all over the first epoch."""
    first = Order(SAMPLES, 5).indices(0, 0, 4 * 16)
    rows = np.unique(read_all(halted_once.run))
    assert rows["epoch"].tolist() == [0] * len(first)
    assert rows["index"].tolist() == sorted(first.tolist())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "loaders"), [slow("plainly", 0), ("drawing", 2), slow("its own draws", 2)]
)
def test_a_run_resumes_with_its_own_dataset(tmp_path: Path, how: str, loaders: int) -> None:
    run = halted(tmp_path, loaders=loaders, arguments={"how": how})
    done = instep.resume(run, quiet=True, workers=1)
    assert done.summary["outcome"] == "completed"
    assert len(RunFolder(run).named("dataset_known")) == 4  # two datasets, twice
    verdicts = [event["verdict"] for event in RunFolder(run).named("same_as_one_machine")]
    named = [text.startswith("no: the training dataset is not repeatable") for text in verdicts]
    assert named == [how == "its own draws"] * 2


@pytest.mark.slow
def test_a_run_does_not_resume_with_a_dataset_of_another_length(stopped: Halted) -> None:
    write(stopped.train, samples=120)
    message = "the training dataset had 96 samples when the run was started and has 120 now"
    for changed in ("refuse", "accept"):  # no order of half an epoch is that of the other length
        with pytest.raises(WorkerError, match=message) as caught:
            resumed(stopped.run, changed=changed)
        assert caught.value.exit_code == DataError.exit_code
        assert f"--set start.model={stopped.run}" in str(caught.value)


@pytest.mark.slow
def test_a_run_resumes_with_a_validation_set_of_another_length_if_accepted(
    stopped: Halted,
) -> None:
    write(stopped.validate, samples=20)
    message = "the validation dataset had 96 samples when the run was started and has 20 now"
    with pytest.raises(WorkerError, match=message):
        resumed(stopped.run)
    assert resumed(stopped.run, changed="accept")["outcome"] == "completed"
    assert any(message in event["text"] for event in RunFolder(stopped.run).named("warning"))
    assert RunFolder(stopped.run).audit.exact


@pytest.mark.slow
def test_a_run_does_not_resume_with_other_contents_until_they_are_restored(stopped: Halted) -> None:
    for path, name in ((stopped.validate, "validation"), (stopped.train, "training")):
        before = path.read_bytes()
        path.write_bytes(before[::-1])
        message = (
            rf"the {name} dataset is not what it was .* of 32 samples, 32 are different .* "
            r"the fingerprint was (\w{16}) and is (\w+)"
        )
        with pytest.raises(WorkerError, match=message) as caught:
            resumed(stopped.run)
        assert "--set data.changed=accept" in str(caught.value)
        path.write_bytes(before)
    assert resumed(stopped.run)["outcome"] == "completed"


@pytest.mark.slow
def test_a_data_loader_is_taken_apart_and_what_is_lost_is_said(tmp_path: Path, capsys: Out) -> None:
    run = trained(tmp_path, loaders="auto", arguments={"loader": 1}, workers=1)
    assert audited(run, capsys)[0] == 0
    ready = RunFolder(run).last("worker_ready")
    assert (ready["samples"], ready["loader"]) == (GIVEN, "processes: data.loaders = 1")
    texts = [event["text"] for event in RunFolder(run).named("warning")]
    assert texts == [
        "Recipe.train's DataLoader has batch_size = 5, which is not used: "
        "train.global_batch = 16 says how many samples a step takes."
    ]


@pytest.mark.slow
def test_the_job_says_how_many_loader_processes_there_are_if_it_says_anything(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, loaders=0, arguments={"loader": 2}, workers=1)
    assert RunFolder(run).last("worker_ready")["loader"].startswith("inline")
