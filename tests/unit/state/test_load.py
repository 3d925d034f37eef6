"""Nothing is loaded that was not checked; a model takes what fits it."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil

import pytest
import safetensors.torch
import torch
from torch import nn

from instep.errors import CheckpointError
from instep.state.files.manifest import seal
from instep.state.files.staging import save_model
from instep.state.intact import newest_intact
from instep.state.load import LoadReport, load, load_model
from instep.state.packing import pack_state
from instep.state.restore import restore
from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot, model_tensors, parameters_sha256


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
    match draw.randrange(9):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(folder)
        case 2:
            path.write_bytes(pickle.dumps({"w": [1.0, 2.0]}))
        case 3:
            os.mkfifo(path)
        case 4:
            path.symlink_to(path)
        case 5:
            path.symlink_to("/dev/zero")
        case 6:
            path.symlink_to(folder / "nowhere")
        case 7:
            save_model(path, nn.Linear(5, 3), {})


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
    match draw.randrange(8):
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
        case 5:
            entries["version"] += draw.randrange(1, 9)
        case 6:
            entries["format"] = "checkpoint of another program"
        case 7:
            path.write_bytes(b'{"facts": ' * 100_000)
            return
    path.write_bytes(seal((json.dumps(entries)[:-1] + ',\n"seal": "').encode()))


def reseal(folder):
    """Make the manifest agree with the model's file, whatever that is now."""
    path = folder / "manifest.json"
    entries = json.loads(path.read_bytes())
    del entries["seal"]
    data = (folder / "model.safetensors").read_bytes()
    entry = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    entries["files"]["model.safetensors"] = entry
    path.write_bytes(seal((json.dumps(entries)[:-1] + ',\n"seal": "').encode()))


def forge_a_header(folder, draw):
    """A dtype, a shape, a place or a name is changed in the model's file; every SHA-256 fits."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = draw.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    match draw.randrange(8):
        case 0:
            entry["dtype"] = draw.choice(["F64", "I32", "BF16", "BOOL", "X9", "", None, 7])
        case 1:
            entry["shape"] = draw.choice([[2], [-1], [1, *entry["shape"]], [2**62, 4], "x", None])
        case 2:
            entry["data_offsets"] = draw.choice([[0, 1], [4, 0], [0, 2**63], [-4, 8], [], None])
        case 3:
            header[name + "x"] = header.pop(name)
        case 4:
            header.pop(name)
        case 5:
            header["__metadata__"] = draw.choice([{"more": name}, {"a": 1}, [], None, {"a": {}}])
            header[name + "y"] = header.pop(name)
        case 6:
            entry["more"] = 1
            entry["shape"] = [*entry["shape"][::-1], 1]
        case 7:
            header = draw.choice([[], 7, None, {}, {name: None}, {name: []}])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    reseal(folder)


def forge_a_file(folder, draw):
    """The model's file is another kind of file altogether; every SHA-256 fits."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    deep = b"[" * 200_000
    match draw.randrange(7):
        case 0:
            length = draw.choice([2**64 - 1, 2**63, 2**40, len(data), len(data) - 7, 0])
            path.write_bytes(length.to_bytes(8, "little") + data[8:])
        case 1:
            path.write_bytes(len(deep).to_bytes(8, "little") + deep)
        case 2:
            path.write_bytes(data[: draw.randrange(len(data))])
        case 3:
            torch.save({"weight": torch.ones(3, 5)}, path)
        case 4:
            safetensors.torch.save_file({"a": torch.ones(2)}, path)  # of another program
        case 5:
            path.write_bytes(draw.randbytes(draw.randrange(200)))
        case 6:
            save_model(path, nn.Linear(5, 4), {})  # of another run
    reseal(folder)


MUTATIONS = [
    flip_a_bit,
    flip_a_bit,
    cut_or_lengthen,
    swap_files,
    take_from_another_step,
    remove_or_replace,
    edit_the_manifest,
    forge_the_manifest,
    forge_a_header,
    forge_a_file,
]


def test_a_thousand_damaged_checkpoints_give_checkpoint_errors_only(whole, tmp_path, no_pickle):
    shutil.copytree(whole.parent / "step-00000001", tmp_path / "earlier")
    copy = tmp_path / whole.name
    draw = random.Random(11)
    for number in range(1000):
        shutil.copytree(whole, copy)
        mutate = MUTATIONS[number % len(MUTATIONS)]
        mutate(copy, draw)
        model = nn.Linear(5, 3)
        before = parameters_sha256(model)
        with pytest.raises(CheckpointError) as caught:
            restore(load(copy).tensors["model"], model)
        text = str(caught.value)
        assert str(tmp_path) in text or "now builds another model" in text, "it must say which file"
        assert "\n" not in text
        assert parameters_sha256(model) == before
        found, sentences = newest_intact(tmp_path)
        if mutate not in (forge_a_header, forge_a_file):  # which only loading can see
            assert found is None
            assert str(copy) in sentences[0]
        shutil.rmtree(copy)
    assert load(whole).step == 2


def test_the_checkpoint_of_another_run_is_read_and_not_restored(whole, tmp_path):
    writer = CheckpointWriter(tmp_path / "other")
    tensors = {"model": model_tensors(nn.Linear(5, 4))}
    writer.save(Snapshot(step=2, tensors=tensors, facts={}))
    writer.finish()
    shutil.rmtree(whole)
    shutil.copytree(tmp_path / "other" / whole.name, whole)
    with pytest.raises(
        CheckpointError, match=r"another model than .* weight \(\[4, 5\] when saved"
    ):
        restore(load(whole).tensors["model"], nn.Linear(5, 3))


def test_a_folder_of_a_newer_format_is_refused_with_both_versions(whole):
    path = whole / "manifest.json"
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"version": 2', b'"version": 3'))
    assert path.read_bytes() != text
    with pytest.raises(CheckpointError, match=r"in format 3; this is instep .* reads format 2\."):
        load(whole)


def test_a_link_to_the_very_bytes_that_were_saved_is_as_good_as_the_file(whole, tmp_path):
    file = whole / "model.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert load(whole).step == 2


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(whole, name):
    (whole / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load(whole)


def test_what_lies_beside_the_listed_files_is_not_read(whole):
    (whole / ".DS_Store").write_text("")
    assert load(whole).step == 2


def test_a_missing_checkpoint_is_an_error(tmp_path):
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


class NamedLikeAFact(nn.Module):
    """Its parameters have the names and the values of what a file says of itself."""

    def __init__(self):
        super().__init__()
        for name in ("pt", "digits", "9", "job"):
            self.register_parameter(name, nn.Parameter(torch.rand(2)))
        self.register_parameter("step", self.job)


def test_a_parameter_may_be_called_like_anything_that_a_file_says_of_itself(tmp_path):
    model, twin = NamedLikeAFact(), NamedLikeAFact()
    path = tmp_path / "model.safetensors"
    save_model(path, model, {"step": "9", "job": "digits"})
    report = load_model(path, twin)
    assert set(report.matched) == {"pt", "digits", "9", "job", "step"}
    assert not report.unexpected
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)
    writer = CheckpointWriter(tmp_path / "checkpoints")
    writer.save(Snapshot(step=1, tensors={"model": model_tensors(model)}, facts={}))
    writer.finish()
    writer.poll()
    again = load(tmp_path / "checkpoints" / "step-00000001").tensors["model"]
    assert again.keys() == model.state_dict().keys()
