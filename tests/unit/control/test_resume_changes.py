"""What a run that goes on may be changed to, from Python and on the command line."""

import datetime
import json
from pathlib import Path

import pytest

import instep
from instep.control.changed_job import changed
from instep.errors import RecipeError, SpecError
from instep.job import file as spec_file
from instep.store.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """Of a run, as far as its job is asked for."""
    table = {
        "recipe": "/gone/a.py:f",
        "seed": 5,
        "train": {"steps": 9, "stop_after_steps": 3},
        "stop": {"target": 0.5, "patience": 2},
        "arguments": {"day": datetime.date(2026, 1, 2)},
    }
    (tmp_path / "job.toml").write_text(spec_file.dump(spec_file.build(table, source="test")))
    return tmp_path


@pytest.fixture
def run(folder):
    return RunFolder(folder)


def test_none_gives_a_key_its_default_again_and_tables_change_what_they_name(run):
    job = changed(run, [], {"stop": {"target": None}, "data": {"loaders": 1}, "workers": 3})
    assert (job.stop.target, job.stop.patience) == (None, 2)
    assert (job.data.loaders, job.workers) == (1, 3)
    assert (job.train.steps, job.train.stop_after_steps) == (9, 0)
    assert changed(run, [], {"train": {"epochs": 4}}).train.steps is None
    assert changed(run, [], {"arguments": {"day": datetime.date(2026, 1, 2)}}) == changed(run, [])


@pytest.mark.parametrize(("shuffle", "order"), [("true", "global"), ("false", "dataset")])
def test_a_run_of_an_earlier_instep_has_its_order_under_the_present_name(folder, shuffle, order):
    file = folder / "job.toml"
    text = file.read_text().replace("[train]", f"[train]\nshuffle = {shuffle}")
    file.write_text(text.replace("order = 'global'\n", "").replace('order = "global"\n', ""))
    run = RunFolder(folder)
    assert run.spec.data.order == changed(run, []).data.order == order
    with pytest.raises(SpecError, match=r"train\.shuffle is now called data.order"):
        changed(run, ["train.shuffle=true"])
    with pytest.raises(SpecError, match=r"train\.shuffle is now called data.order"):
        changed(run, [], {"train": {"shuffle": True}})


STARTED = {"event": "run_started", "job": {"workers": 2}}
JOINED = {"before": 2, "workers": 5, "hosts": [2]}
LEAVING = {"event": "hosts_leaving", "hosts": [2], "why": "a test"}


@pytest.mark.parametrize(
    ("events", "workers"),
    [
        ([STARTED], 2),
        ([STARTED, {"workers": 4}], 4),
        ([STARTED, {"workers": 4}, {"workers": 3}], 3),
        ([STARTED, {"workers": 4}, {"workers": 6, "hosts": [1]}], 4),  # those hosts may be gone
        ([STARTED, JOINED, {"workers": 8}], 5),  # three of them leave with those hosts
        ([STARTED, JOINED, {"workers": 8}, {"before": 8, "workers": 5, "hosts": [2]}], 5),
        ([STARTED, JOINED, {"workers": 2}], 2),  # too few for three to leave
        ([STARTED, JOINED, LEAVING, {"workers": 4}], 4),
        ([STARTED, JOINED, STARTED, {"workers": 4}], 4),
        ([STARTED, {"workers": 4}, STARTED], 2),  # since then it was resumed with --workers 2
        ([STARTED | {"job": {"workers": 5}}, {"workers": 4}], 2),  # since then the file was changed
        ([], 2),
    ],
)
def test_a_run_resumes_with_the_number_of_workers_it_was_last_scaled_to(folder, events, workers):
    lines = [json.dumps({"event": "scaled", "time": 1.0, **each}) for each in events]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    run = RunFolder(folder)
    assert changed(run, []).workers == workers
    assert run.spec.workers == 2  # the job as run stays what it was
    assert changed(run, ["workers=1"]).workers == 1
    assert changed(run, [], {"workers": 1}).workers == 1


def test_a_path_is_a_recipe_that_has_moved(folder, run, monkeypatch):
    monkeypatch.chdir(folder)
    job = changed(run, [], {"recipe": Path("moved.py:g")})
    assert job.recipe == f"{folder.resolve()}/moved.py:g"
    with pytest.raises(RecipeError, match=r"no recipe file '.*/moved\.py'"):
        instep.resume(folder, recipe=Path("moved.py:g"), stop={"target": None})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": None}, "seed was 5 and cannot become 0"),
        ({"data": {"order": "dataset"}}, "data.order was 'global' and cannot become 'dataset'"),
        ({"arguments": {"day": None}}, "arguments was .* and cannot become {}"),
        ({"train": {"steps": Path("9")}}, 'train.steps = "9": needs to be a whole number'),
        ({"trian": {"steps": 9}}, "Did you mean 'train'"),
        ({"shuffle": False}, r"no argument 'shuffle': train\.shuffle is now called data\.order"),
        ({"workers": {"more": 3}}, r'workers = {"more": 3}: needs to be a whole number'),
        ({"recipe": "\udcff.py:f"}, "cannot be written as UTF-8"),
        ({"name": "a\ud800"}, "cannot be written as UTF-8"),
    ],
)
def test_what_may_not_change_is_refused_in_one_sentence(folder, changes, words):
    with pytest.raises(SpecError, match=words):
        instep.resume(folder, **changes)


@pytest.mark.parametrize("change", ["data.parts=3", "data.once=true"])
def test_a_stream_is_divided_as_it_was_and_other_data_may_not_be(folder, change):
    """It was refused by the workers, when the job was written and the model gone."""
    (folder / "events.jsonl").write_text('{"time": 1.0, "event": "run_started"}\n')
    key, _, value = change.partition("=")
    assert str(getattr(changed(RunFolder(folder), [change]).data, key[5:])).lower() == value
    told = {"time": 2.0, "event": "stream_divided", "parts": 4, "window": 0, "sizes": []}
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({**told, "has_state": False, "once": False}) + "\n")
    with pytest.raises(SpecError, match=rf"{key} was .* cannot become {value} when a run is res"):
        changed(RunFolder(folder), [change])


def test_a_run_goes_on_with_another_number_of_servers_and_no_other_strategy(folder):
    table = {"recipe": "/gone/a.py:f", "sync": {"name": "server_sync", "servers": 2}}
    (folder / "job.toml").write_text(spec_file.dump(spec_file.build(table, source="test")))
    run = RunFolder(folder)
    assert changed(run, ["sync.servers=3"]).sync.servers == 3
    with pytest.raises(SpecError, match=r"sync\.name was 'server_sync' and .* 'all_reduce'"):
        changed(run, ["sync.name=all_reduce", "sync.servers=1"])
    with pytest.raises(SpecError, match=r"sync\.codec was 'none' and cannot become 'int8' when"):
        changed(run, ["sync.codec=int8"])
