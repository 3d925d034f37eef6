"""A model in several safetensors files is read as the same model in one."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import instep
from instep.errors import CheckpointError
from instep.job.file import absolute
from instep.job.start import LoraSpec, StartSpec
from instep.recipe.start.file import start_file
from instep.recipe.tuning import begin
from instep.state.files.sharded import check_hashes, files_of


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.fixture
def folder(tmp_path):
    """`model.safetensors.index.json` and two files, as Hugging Face writes them."""
    torch.manual_seed(3)
    tensors = net().state_dict()
    homes = {name: f"model-0000{1 + name.startswith('2')}-of-00002.safetensors" for name in tensors}
    for home in set(homes.values()):
        part = {name: tensors[name] for name in tensors if homes[name] == home}
        save_file(part, tmp_path / home, {"format": "pt"})
    write_index(tmp_path, homes)
    return tmp_path


def write_index(folder, homes):
    index = {"metadata": {"total_size": 1}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def values(folder):
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize("given", ["", "model.safetensors.index.json"])
def test_a_job_and_a_loop_of_ones_own_get_the_values_of_all_files(folder, given):
    model, own = net(), net()
    begun = begin(StartSpec(model=str(folder / given)), LoraSpec(), model, 0, load=True)
    instep.load_model(folder / given, own)
    for each in (model, own):
        for name, wanted in values(folder).items():
            assert torch.equal(each.state_dict()[name], wanted)
    fields = begun.loaded.fields()
    assert (fields["matched"], fields["missing"], fields["unexpected"]) == (9, [], [])
    *_, last = files_of(folder / "model.safetensors.index.json")
    last.write_bytes(last.read_bytes()[:-1] + b"\1")
    assert begun.loaded.fields()["sha256"] != fields["sha256"]


def test_what_transformers_saves_in_several_files_is_what_it_loads(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    torch.manual_seed(1)
    saved, model = (GPT2LMHeadModel(GPT2Config(**small)) for _ in range(2))
    saved.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    instep.load_model(tmp_path, model)  # its head is tied to its embeddings
    again = GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again[name]), name


def test_an_index_that_is_a_link_finds_the_files_beside_the_link(folder, tmp_path):
    (tmp_path / "blobs").mkdir()
    for file in [each for each in folder.iterdir() if each.is_file()]:
        file.rename(tmp_path / "blobs" / str(abs(hash(file.name))))
        file.symlink_to(tmp_path / "blobs" / str(abs(hash(file.name))))
    job = instep.JobSpec(recipe="a.py:f", start=StartSpec(model="model.safetensors.index.json"))
    assert len(files_of(start_file(absolute(job, folder).start))) == 3


def remove(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut(folder):
    os.truncate(folder / "model-00002-of-00002.safetensors", 150)


def of_another_model(folder):
    save_file({"x": torch.ones(2)}, folder / "model-00002-of-00002.safetensors")


def elsewhere(folder):
    write_index(folder, {"x": "../model.safetensors"})


def pickled(folder):
    write_index(folder, {"x": "pytorch_model.bin"})
    torch.save({"x": torch.ones(2)}, folder / "pytorch_model.bin")


def no_map(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


def too_deep(folder):
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)


def twice(folder):
    homes = read_index(folder)
    for home in set(homes.values()):
        file = folder / home
        save_file({**load_file(file), "x": torch.ones(2)}, file)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, r"names 2 files, and 1 of them is not there: model-00002-of-00002\.safetensors"),
        (cut, r"model-00002-of-00002\.safetensors is .* truncated or damaged \(150 bytes\)"),
        (
            of_another_model,
            r"says that model-00002-of-00002\.safetensors has 2\.\w+, and it has not",
        ),
        (elsewhere, r"names '\.\./model\.safetensors': the files of a model are in the folder"),
        (pickled, r"pytorch_model\.bin is a file of torch\.save, which may hold code"),
        (no_map, r"is no index, or damaged: .*weight_map"),
        (too_deep, r"is no index, or damaged"),
        (twice, r"has x, as another file beside it has"),
    ],
)
def test_files_that_are_not_one_model_are_refused_before_a_process_starts(folder, damage, words):
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        start_file(StartSpec(model=str(folder)))


def test_a_tensor_that_lies_in_two_files_is_read_from_the_one_that_the_index_names(folder):
    homes = read_index(folder)
    home, other = homes["0.bias"], homes["2.bias"]
    save_file({**load_file(folder / other), "0.bias": torch.ones(8)}, folder / other)
    model = net()
    instep.load_model(folder, model)
    assert torch.equal(model[0].bias, load_file(folder / home)["0.bias"])


def test_one_file_goes_before_an_index_as_in_transformers(folder):
    save_file(values(folder), folder / "model.safetensors")
    assert start_file(StartSpec(model=str(folder))) == folder / "model.safetensors"


def test_files_that_carry_their_own_hash_are_compared_with_it(folder):
    save_file({"x": torch.ones(2)}, folder / "a.safetensors", {"file_sha256": "0" * 64})
    write_index(folder, {"x": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged: its SHA-256"):
        check_hashes(folder / "model.safetensors.index.json")
