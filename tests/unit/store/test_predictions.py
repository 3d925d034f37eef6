"""Parts of predictions: whole or not there, and put together in order, each sample once."""

import json
import resource

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from disks import Syncs
from instep.errors import DataError, RecipeError, RunError, SpecError
from instep.recipe.outputs import as_lines, as_rows, columns
from instep.store.joined import publish
from instep.store.predictions import Damaged, Plan, Predictions

SAMPLES, BATCH = 11, 4
OUTPUTS = {
    "rows": torch.randn(SAMPLES, 3),
    "half": torch.randn(SAMPLES, 2).bfloat16(),
    "count": torch.arange(SAMPLES),
    "empty": torch.zeros(SAMPLES, 0),
    "whole": torch.arange(SAMPLES) % 2 == 0,
}


def plan(**changes):
    same = {"of": "m", "model": "m", "model_sha256": "a", "step": None, "data": "d:d"}
    more = {"data_sha256": "b", "recipe_sha256": "c", "batch": BATCH, "format": ".safetensors"}
    return Plan(**{**same, **more, "job": {"seed": 0}, "versions": {"torch": "2"}, **changes})


def folder_of(out, outputs=OUTPUTS, skipped=(), only=None):
    """A folder with the parts of these outputs."""
    folder = Predictions(out)
    with folder.held():
        folder.begin(plan())
        for number in reversed(range(3)):
            if only is not None and number not in only:
                continue
            first, stop = number * BATCH, min((number + 1) * BATCH, SAMPLES)
            there = [n for n in range(first, stop) if n not in skipped]
            found = columns({k: v[there] for k, v in outputs.items()}, len(there)) if there else {}
            missing = [[n, "no picture"] for n in range(first, stop) if n in skipped]
            head = {"first": first, "stop": stop, "skipped": missing}
            if out.suffix == ".jsonl":
                table, body = ({}, as_lines(found, there)) if there else (None, b"")
            else:
                table, body = as_rows(found, out.suffix) if there else (None, b"")
            folder.write(number, {**head, "columns": table}, body)
    return folder


def test_parts_become_one_file_with_every_row_in_its_place(tmp_path):
    folder = folder_of(tmp_path / "all.safetensors")
    done = publish(folder, SAMPLES, BATCH)
    found = load_file(folder.out)
    assert found.keys() == OUTPUTS.keys()
    assert all(torch.equal(found[name], value) for name, value in OUTPUTS.items())
    assert done.outputs["half"] == {"dtype": "bfloat16", "shape": [SAMPLES, 2]}
    assert list(tmp_path.iterdir()) == [folder.out]


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".jsonl"])
def test_the_file_is_flushed_to_the_disk_before_it_has_its_name(tmp_path, monkeypatch, suffix):
    folder = folder_of(tmp_path / f"all{suffix}", {"rows": OUTPUTS["rows"]})
    syncs = Syncs(monkeypatch)
    publish(folder, SAMPLES, BATCH)
    assert syncs.first(folder.out)


def test_an_npz_holds_the_same(tmp_path):
    outputs = {name: value for name, value in OUTPUTS.items() if name != "half"}
    folder = folder_of(tmp_path / "all.npz", outputs, skipped={5})
    publish(folder, SAMPLES, BATCH)
    found = np.load(folder.out)
    left = [n for n in range(SAMPLES) if n != 5]
    for name, value in outputs.items():
        assert np.array_equal(found[name][left], value.numpy()[left])
    assert found["skipped_samples"].tolist() == [5]


@pytest.mark.parametrize("skipped", [{5}, {4, 5, 6, 7}, {0, 10}])
def test_a_skipped_sample_keeps_its_place(tmp_path, skipped):
    folder = folder_of(tmp_path / "all.safetensors", skipped=skipped)
    done = publish(folder, SAMPLES, BATCH)
    found, gone = load_file(folder.out), sorted(skipped)
    left = [n for n in range(SAMPLES) if n not in skipped]
    assert all(torch.equal(found[name][left], value[left]) for name, value in OUTPUTS.items())
    assert found["rows"][gone].isnan().all()
    assert found["half"][gone].isnan().all()
    assert found["count"][gone].tolist() == [0] * len(gone)
    assert found["skipped_samples"].tolist() == gone
    assert done.skipped == [(n, "no picture") for n in gone]


def test_lines_of_json_keep_lengths_and_places(tmp_path):
    outputs = {"words": torch.arange(SAMPLES)}
    folder = folder_of(tmp_path / "all.jsonl", outputs, skipped={0, 6})
    publish(folder, SAMPLES, BATCH)
    lines = [json.loads(line) for line in folder.out.read_text().splitlines()]
    assert [line["sample"] for line in lines] == list(range(SAMPLES))
    assert lines[6] == {"sample": 6, "skipped": "no picture"}
    assert lines[7] == {"sample": 7, "words": 7}


def test_no_sample_that_could_be_read_is_an_error(tmp_path):
    folder = folder_of(tmp_path / "all.safetensors", skipped=set(range(SAMPLES)))
    with pytest.raises(DataError, match="none of the 11 samples can be read; of sample 0"):
        publish(folder, SAMPLES, BATCH)


@pytest.mark.parametrize("at", [0, 40, 90, -1])
def test_a_changed_byte_of_a_part_is_found(tmp_path, at):
    folder = folder_of(tmp_path / "all.safetensors")
    file = folder.path / "batch-00000001.part"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged) as error:
        publish(folder, SAMPLES, BATCH)
    assert error.value.args == (1,)
    assert not folder.out.exists()
    folder.drop(1)
    assert folder.done() == {0, 2}


def test_a_part_that_finds_no_room_is_one_sentence_and_leaves_nothing(tmp_path):
    folder = folder_of(tmp_path / "all.safetensors", only=[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        said = (
            r"all\.safetensors\.parts cannot be written: File too large\. Free some room, and give"
        )
        with pytest.raises(RunError, match=said):
            folder.write(1, {}, bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folder.done() == {0}
    assert not list(folder.path.glob(".*"))


def test_a_part_that_is_missing_or_of_other_batches_is_found(tmp_path):
    folder = folder_of(tmp_path / "all.safetensors", only={0, 2})
    with pytest.raises(Damaged, match="1"):
        publish(folder, SAMPLES, BATCH)
    whole = folder_of(tmp_path / "all.safetensors")
    with pytest.raises(Damaged, match="0"):
        publish(whole, SAMPLES, BATCH - 1)


def test_rows_of_different_shapes_are_refused_by_name(tmp_path):
    folder = folder_of(tmp_path / "all.safetensors", {"tokens": torch.zeros(SAMPLES, 3)})
    table, body = as_rows({"tokens": torch.zeros(BATCH, 5)}, ".safetensors")
    folder.write(1, {"first": 4, "stop": 8, "skipped": [], "columns": table}, body)
    with pytest.raises(RecipeError, match=r"'tokens' has rows of shape \[3\] \(float32\) in batch"):
        publish(folder, SAMPLES, BATCH)


def test_the_same_command_takes_up_and_another_one_is_refused(tmp_path):
    folder = folder_of(tmp_path / "all.safetensors", only={2})
    folder.begin(plan(step=7))
    assert folder.done() == {2}
    for changes, says in (
        ({"batch": 5}, "batch was 4"),
        ({"job": {"seed": 1}}, "a value of the job is another one"),
        ({"model_sha256": "z"}, "the model's file is another one"),
    ):
        with pytest.raises(SpecError, match=f"holds 1 part of another command: {says}"):
            folder.begin(plan(**changes))
    folder.drop(2)
    folder.begin(plan(batch=5))  # nothing is lost with that
    assert folder.plan().batch == 5


def test_two_commands_do_not_write_to_one_folder(tmp_path):
    one, other = (Predictions(tmp_path / "all.npz") for _ in range(2))
    refused = pytest.raises(RunError, match="another command writes")
    with one.held(), refused, other.held():
        pass
