"""A damaged model file is refused by every reader."""

from __future__ import annotations

import random

import pytest
import safetensors.torch
import torch
from torch import nn

from instep.errors import CheckpointError
from instep.state.export.export import copy_own
from instep.state.files.model_file import check_hash, open_tensors
from instep.state.files.staging import save_model
from instep.state.load import load_model
from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot, model_tensors

FACTS = {"step": "3", "job": "net", "parameters_sha256": "0" * 64}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture
def run(tmp_path):
    """A run folder, as far as its model is concerned."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.id").write_text("7\n")
    save_model(folder / "model.safetensors", net(), FACTS)
    return folder


def test_the_model_of_a_run_has_its_own_hash_and_other_programs_read_it(run, tmp_path):
    file = run / "model.safetensors"
    assert check_hash(file)
    twin = net(1)
    safetensors.torch.load_model(twin, file)
    assert torch.equal(twin[0].weight, net()[0].weight)
    copy_own(file, tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").read_bytes() == file.read_bytes()
    assert load_model(tmp_path / "copy.safetensors", twin).matched


def flips(data, count, seed):
    """Places all over a file, those of its header more often than its share."""
    dice = random.Random(seed)
    head = 8 + int.from_bytes(data[:8], "little")
    return [dice.randrange(head if n % 2 else len(data)) for n in range(count)]


def test_a_flip_anywhere_in_the_model_of_a_run_is_refused_and_nothing_is_written(run, tmp_path):
    file, target = run / "model.safetensors", tmp_path / "copy.safetensors"
    whole = file.read_bytes()
    for place in flips(whole, 200, 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            copy_own(file, target)
        model = net(1)
        before = model[0].weight.clone()
        with pytest.raises(CheckpointError):
            load_model(file, model)
        assert torch.equal(model[0].weight, before)
    assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_copy_that_was_damaged_on_its_way_is_refused_by_name(run, tmp_path):
    copy = tmp_path / "body.safetensors"
    data = bytearray((run / "model.safetensors").read_bytes())
    data[-1] ^= 64
    copy.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"body\.safetensors is damaged: its SHA-256 is "):
        load_model(copy, net(1), strict=False)


def test_the_model_of_a_checkpoint_is_held_against_its_manifest(tmp_path):
    writer = CheckpointWriter(tmp_path / "checkpoints")
    writer.save(Snapshot(step=4, tensors={"model": model_tensors(net())}, facts={}))
    writer.finish()
    writer.poll()
    file = tmp_path / "checkpoints" / "step-00000004" / "model.safetensors"
    assert load_model(file, net(1)).matched
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step-00000004/model\.safetensors is damaged"):
        load_model(file, net(1))
    renamed = (tmp_path / "checkpoints" / "step-00000004").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"elsewhere/model\.safetensors is damaged"):
        load_model(renamed / file.name, net(1))


def test_a_plain_file_has_no_hash_to_be_held_against(tmp_path):
    file = tmp_path / "plain.safetensors"
    safetensors.torch.save_file(net().state_dict(), file, {"format": "pt"})
    (tmp_path / "manifest.json").write_text("{}")  # of another program
    assert not check_hash(file)
    assert len(load_model(file, net(1)).matched) == 9


@pytest.mark.parametrize(
    "head",
    [
        b"[]",
        b'{"a": 3}',
        b'{"a": {"data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, 0, 0]}}',
        b'{"a": {"dtype": "F32", "data_offsets": "no"}}',
    ],
)
def test_a_list_of_tensors_that_makes_no_sense_is_refused(tmp_path, head):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        open_tensors(path)


def test_what_the_format_forbids_is_refused_as_by_its_own_reader(tmp_path):
    path = tmp_path / "odd.safetensors"
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(0, 4), "c": torch.ones((), dtype=torch.int8)}
    safetensors.torch.save_file(tensors, path, {"note": "7"})
    whole, dice = path.read_bytes(), random.Random(5)
    head = 8 + int.from_bytes(whole[:8], "little")
    places = dice.choices(range(head), k=600)
    odd = [whole[: dice.randrange(len(whole))] for _ in range(20)] + [whole + b"0"]
    odd += [whole[:at] + bytes([dice.randrange(128)]) + whole[at + 1 :] for at in places]
    verdicts = set()
    for data in odd:
        path.write_bytes(data)
        try:
            with safetensors.safe_open(path, "pt") as file:
                wanted = sorted(file.keys())
        except safetensors.SafetensorError:
            wanted = None
        try:
            with open_tensors(path) as ours:
                found = sorted(ours.entries)
        except CheckpointError:
            found = None
        assert found == wanted, data[:head]
        verdicts.add(found is None)
    assert verdicts == {True, False}


def test_a_header_as_long_as_a_pickles_first_bytes_say_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    for padding in range(8, 700):
        safetensors.torch.save_file({"a": torch.ones(2)}, path, {"note": "x" * padding})
        if path.read_bytes().startswith(b"\x80\x02"):
            break
    else:
        pytest.fail("no header had 640 bytes")
    assert not check_hash(path)
