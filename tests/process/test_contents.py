"""What was handed to training is what lies in the file; where it is not, that is found and said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_a_file import SAMPLES, VALUES, write
from started import RECIPES, slow

import instep
from instep.cli import main
from instep.errors import DataError, RunError, WorkerError
from instep.events import CONTENTS, read_records
from instep.report.run_folder import RunFolder

pytestmark = pytest.mark.process

Out = pytest.CaptureFixture[str]


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
        (0, "plainly"),
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


def test_a_record_that_is_changed_afterwards_is_found(tmp_path: Path, capsys: Out) -> None:
    run = trained(tmp_path)
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


def test_a_dataset_that_is_read_wrongly_in_loader_processes_is_found(
    tmp_path: Path, capsys: Out
) -> None:
    run = trained(tmp_path, arguments={"how": "wrongly"})
    code, content = audited(run, capsys)
    assert code == RunError.exit_code
    found = {each["sample"] for each in content["wrong"]}
    assert found == set(range(0, SAMPLES, 3))


@pytest.mark.slow
def test_by_default_a_keyed_sample_is_recorded_whoever_reads_it(
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


def test_a_dataset_with_a_generator_of_its_own_is_named(tmp_path: Path, capsys: Out) -> None:
    run = trained(tmp_path, arguments={"how": "its own draws"})
    texts = [event["text"] for event in RunFolder(run).named("warning")]
    (text,) = [text for text in texts if "repeatable" in text]
    assert "the training dataset is not repeatable: sample " in text
    code, content = audited(run, capsys)
    assert len(content["unrepeatable"]) == content["compared"]
    assert (code, content["wrong"]) == (0, [])


@pytest.mark.parametrize("how", ["plainly", "drawing"])
def test_a_dataset_that_draws_from_the_global_generators_is_not_named(
    tmp_path: Path, how: str
) -> None:
    run = trained(tmp_path, arguments={"how": how})
    assert not [e for e in RunFolder(run).named("warning") if "repeatable" in e["text"]]


def halted(folder: Path, **changes: Any) -> Path:
    return trained(
        folder, train={"epochs": 2, "global_batch": 16, "stop_after_steps": 4}, **changes
    )


@pytest.mark.parametrize(
    ("how", "loaders"), [slow("plainly", 0), ("drawing", 2), slow("its own draws", 2)]
)
def test_a_run_goes_on_with_the_dataset_that_it_had(tmp_path: Path, how: str, loaders: int) -> None:
    run = halted(tmp_path, loaders=loaders, arguments={"how": how})
    done = instep.resume(run, quiet=True, workers=1)
    assert done.summary["outcome"] == "completed"
    assert len(RunFolder(run).named("dataset_known")) == 4  # two datasets, twice


def test_a_run_does_not_go_on_with_a_dataset_of_another_length(tmp_path: Path) -> None:
    run = halted(tmp_path)
    write(tmp_path / "rows", samples=120)
    message = "the training dataset had 96 samples when the run was started and has 120 now"
    with pytest.raises(WorkerError, match=message) as caught:
        instep.resume(run, quiet=True)
    assert caught.value.exit_code == DataError.exit_code
    assert instep.resume(run, quiet=True, data={"changed": "accept"}).summary["steps"] == 16
    assert any(message in event["text"] for event in RunFolder(run).named("warning"))


def test_a_run_does_not_go_on_with_other_contents_unless_that_is_accepted(tmp_path: Path) -> None:
    run = halted(tmp_path)
    before = (tmp_path / "rows").read_bytes()
    (tmp_path / "rows").write_bytes(before[::-1])
    message = r"of 32 samples, 32 hold something else .* the fingerprint was (\w{16}) and is (\w+)"
    with pytest.raises(WorkerError, match=message) as caught:
        instep.resume(run, quiet=True)
    assert "--set data.changed=accept" in str(caught.value)
    (tmp_path / "rows").write_bytes(before)
    assert instep.resume(run, quiet=True).summary["outcome"] == "completed"


def test_a_data_loader_is_taken_apart_and_what_is_lost_is_said(tmp_path: Path, capsys: Out) -> None:
    run = trained(tmp_path, loaders="auto", arguments={"loader": 1}, workers=1)
    assert audited(run, capsys)[0] == 0
    ready = RunFolder(run).last("worker_ready")
    assert (ready["samples"], ready["loader"]) == (SAMPLES, "processes: data.loaders = 1")
    texts = [event["text"] for event in RunFolder(run).named("warning")]
    assert texts == [
        "the DataLoader of Recipe.train has batch_size = 5, which is not used: "
        "train.global_batch = 16 says how many samples a step takes."
    ]


def test_the_job_says_how_many_loader_processes_there_are_if_it_says_anything(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, loaders=0, arguments={"loader": 2}, workers=1)
    assert RunFolder(run).last("worker_ready")["loader"].startswith("inline")
