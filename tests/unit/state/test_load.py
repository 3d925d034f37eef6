"""Nothing is believed that was not checked; a model takes what fits it."""

from __future__ import annotations

import json
import pickle
import random
import shutil

import pytest
import safetensors.torch
import torch
from torch import nn

from instep.errors import CheckpointError
from instep.state.load import LoadReport, latest, load, load_model
from instep.state.manifest import seal
from instep.state.save import CheckpointWriter, save_model
from instep.state.snapshot import Snapshot, model_tensors, pack_state, parameters_sha256


@pytest.fixture
def no_pickle(monkeypatch):
    def refuse(*_args, **_options):
        pytest.fail("something was unpickled")

    for module, name in [
        (pickle, "loads"),
        (pickle, "load"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ]:
        monkeypatch.setattr(module, name, refuse)


@pytest.fixture
def whole(tmp_path):
    """Two checkpoints of a small run; the newest is returned."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    writer = CheckpointWriter(tmp_path / "whole")
    for step in (1, 2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        tensors, skeleton = pack_state(optimizer.state_dict())
        groups = {"model": model_tensors(model), "optimizer": tensors}
        writer.save(Snapshot(step=step, tensors=groups, facts={"optimizer": skeleton, "at": step}))
    writer.finish()
    return writer.poll()[-1].path


FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors"]


def flip_a_bit(folder, draw):
    path = folder / draw.choice(FILES)
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut_or_lengthen(folder, draw):
    path = folder / draw.choice(FILES)
    data = path.read_bytes()
    path.write_bytes(draw.choice([data[: draw.randrange(len(data))], data + b"\0", b""]))


def swap_files(folder, draw):
    one, other = draw.sample(FILES, 2)
    (folder / one).rename(folder / "aside")
    (folder / other).rename(folder / one)
    (folder / "aside").rename(folder / other)


def take_from_another_step(folder, draw):
    name = draw.choice(FILES)
    shutil.copy(folder.parent / "earlier" / name, folder / name)


def remove_or_replace(folder, draw):
    path = folder / draw.choice(FILES)
    path.unlink()
    match draw.randrange(4):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(folder)
        case 2:
            path.write_bytes(pickle.dumps({"w": [1.0, 2.0]}))


def edit_the_manifest(folder, draw):
    """A figure is changed by hand; the seal is left as it was."""
    path = folder / "manifest.json"
    entries = json.loads(path.read_bytes())
    entry = draw.choice(list(entries))
    entries[entry] = draw.choice([None, 7, "x", [], {}, draw.random()])
    path.write_text(json.dumps(entries))


def forge_the_manifest(folder, draw):
    """Size, digest, step or a name is changed, and a new seal put under it."""
    path = folder / "manifest.json"
    entries = json.loads(path.read_bytes())
    del entries["seal"]
    files = entries["files"]
    name = draw.choice(list(files))
    match draw.randrange(5):
        case 0:
            files[name]["size_bytes"] += draw.choice([-1, 1])
        case 1:
            files[name]["sha256"] = draw.randbytes(32).hex()
        case 2:
            files["../" + name] = files.pop(name)
        case 3:
            files["more.safetensors"] = files[name]
        case 4:
            entries["step"] += 1
    path.write_bytes(seal((json.dumps(entries)[:-1] + ',\n"seal": "').encode()))


MUTATIONS = [
    flip_a_bit,
    flip_a_bit,
    cut_or_lengthen,
    swap_files,
    take_from_another_step,
    remove_or_replace,
    edit_the_manifest,
    forge_the_manifest,
]


def test_a_thousand_damaged_checkpoints_give_checkpoint_errors_only(whole, tmp_path, no_pickle):
    shutil.copytree(whole.parent / "step-00000001", tmp_path / "earlier")
    copy = tmp_path / whole.name
    draw = random.Random(11)
    for number in range(1000):
        shutil.copytree(whole, copy)
        mutate = MUTATIONS[number % len(MUTATIONS)]
        mutate(copy, draw)
        with pytest.raises(CheckpointError) as caught:
            load(copy)
        assert str(tmp_path) in str(caught.value), "the message must say which file"
        shutil.rmtree(copy)
    assert load(whole).step == 2


def test_a_damaged_newest_checkpoint_is_passed_over_where_a_look_shows_it(whole):
    (whole / "model.safetensors").write_bytes(b"")
    assert latest(whole.parent) == whole.parent / "step-00000001"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(whole, name):
    (whole / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load(whole)


def test_what_lies_beside_the_listed_files_is_not_read(whole):
    (whole / ".DS_Store").write_text("")
    assert load(whole).step == 2


def test_no_checkpoint_at_all_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "nothing")


def test_what_was_loaded_outlives_its_files(whole):
    before = load(whole)
    found = load(whole)
    for path in whole.iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    shutil.rmtree(whole)
    assert torch.equal(found.tensors["model"]["weight"], before.tensors["model"]["weight"])
    found.tensors["model"]["weight"].zero_()


class Tied(nn.Module):
    def __init__(self, seed, classes=5):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.classify = nn.Linear(3, classes)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(path, Tied(0), {})
    return path


def test_a_model_is_loaded_to_the_bit_and_stays_tied(file, no_pickle):
    model = Tied(1)
    report = load_model(file, model)
    assert sorted(report.matched) == sorted(model.state_dict())
    assert not (report.missing)
    assert not (report.unexpected)
    assert not (report.wrong)
    assert parameters_sha256(model) == parameters_sha256(Tied(0))
    assert model.head.weight is model.embedding.weight


def test_a_tied_weight_is_found_under_either_name(tmp_path):
    path = tmp_path / "foreign.safetensors"
    state = {k: v for k, v in Tied(0).state_dict().items() if k != "embedding.weight"}
    safetensors.torch.save_file(state, path)
    model = Tied(1)
    assert not load_model(path, model).missing
    assert torch.equal(model.embedding.weight, Tied(0).embedding.weight)


def test_files_of_other_programs_with_ties_fit_a_model_without(tmp_path):
    path = tmp_path / "foreign.safetensors"
    safetensors.torch.save_model(Tied(0), path)
    model = Tied(1)
    model.head.weight = nn.Parameter(torch.zeros(5, 3))
    load_model(path, model)
    assert torch.equal(model.head.weight, Tied(0).embedding.weight)
    assert model.head.weight is not model.embedding.weight


def test_two_tensors_for_one_tied_weight_are_refused(tmp_path):
    path = tmp_path / "loose.safetensors"
    state = {k: v.clone() for k, v in Tied(0).state_dict().items()}
    state["head.weight"] += 1
    safetensors.torch.save_file(state, path)
    with pytest.raises(CheckpointError, match=r"head.weight \(tied to embedding.weight"):
        load_model(path, Tied(1))
    state["head.weight"] -= 1
    state["head.weight"].copy_(state["embedding.weight"])
    safetensors.torch.save_file(state, path)
    load_model(path, Tied(1))


def test_strict_refuses_with_the_list_and_changes_nothing(file):
    model = Tied(1, classes=7)
    model.extra = nn.Parameter(torch.ones(1))
    del model.head
    before = parameters_sha256(model)
    with pytest.raises(CheckpointError) as caught:
        load_model(file, model)
    text = str(caught.value)
    assert "missing: extra" in text
    assert "unexpected: head.weight" in text
    assert "classify.weight ([5, 3] in the file, [7, 3] in the model)" in text
    assert parameters_sha256(model) == before


def test_partial_loading_takes_what_fits_and_reports_the_rest(file):
    model = Tied(1, classes=7)
    model.extra = nn.Parameter(torch.ones(1))
    head = model.classify.weight.clone()
    report = load_model(file, model, strict=False)
    assert report == LoadReport(
        matched=("embedding.weight", "head.weight"),
        missing=("extra",),
        wrong={
            "classify.weight": "[5, 3] in the file, [7, 3] in the model",
            "classify.bias": "[5] in the file, [7] in the model",
        },
    )
    assert str(report).startswith("2 of 5 tensors match; missing: extra; wrong: classify.weight (")
    assert torch.equal(model.embedding.weight, Tied(0).embedding.weight)
    assert torch.equal(model.classify.weight, head)


def test_a_file_with_nothing_for_the_model_is_refused_even_when_partial(file):
    with pytest.raises(CheckpointError, match=r"nothing for this model: it holds .*wants"):
        load_model(file, nn.Sequential(nn.Linear(2, 2)), strict=False)


def test_precisions_convert_and_integers_do_not(tmp_path):
    path = tmp_path / "half.safetensors"
    safetensors.torch.save_file(
        {"weight": torch.ones(1, 2).bfloat16(), "bias": torch.ones(1)}, path
    )
    model = nn.Linear(2, 1)
    load_model(path, model)
    assert model.weight.dtype == torch.float32
    assert model.weight.tolist() == [[1, 1]]
    safetensors.torch.save_file({"weight": torch.ones(1, 2).int(), "bias": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"torch.int32 in the file"):
        load_model(path, model)


def test_a_file_of_torch_save_is_refused_unread(tmp_path, no_pickle):
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(1, 1).state_dict(), path)
    with pytest.raises(CheckpointError, match=r"torch\.save, which may hold code"):
        load_model(path, nn.Linear(1, 1))


def test_damaged_model_files_give_a_report_or_a_checkpoint_error(file, no_pickle):
    data = file.read_bytes()
    draw = random.Random(5)
    header = int.from_bytes(data[:8], "little") + 8
    for number in range(400):
        broken = bytearray(data)
        broken[draw.randrange(header if number % 2 else len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(broken if number % 4 else broken[: draw.randrange(len(data))])
        try:
            load_model(file, Tied(1), strict=False)
        except CheckpointError:
            pass
