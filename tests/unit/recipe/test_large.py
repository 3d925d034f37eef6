"""How a process builds a model that is larger than its memory."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import instep
from instep.errors import RecipeError, SpecError
from instep.job.mesh import MeshSpec
from instep.job.start import StartSpec
from instep.parallel import meta_start
from instep.recipe.build import build_model
from instep.recipe.large import TRIAL, Building
from instep.state.files.staging import save_model

CPU = torch.device("cpu")


class Net(nn.Module):
    """Tied, with copies of a layer, numbers that are drawn between, and an odd initialization."""

    def __init__(self, drawn=False, reads=False):
        super().__init__()
        self.first = nn.Linear(6, 6)
        if drawn:
            self.register_buffer("waves", torch.randn(6), persistent=False)
        layer = nn.TransformerEncoderLayer(6, 2, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(6, 6)
        nn.init.orthogonal_(self.last.weight)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.last.weight
        self.scale = float(self.first.weight.detach().norm()) if reads else 1.0
        self.register_buffer("counted", torch.ones(3))


def recipe(**arguments):
    return instep.Recipe(
        model=lambda: Net(**arguments).double(),
        loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        train=[(torch.zeros(6), torch.zeros(6))],
    )


def built(folder, build="auto", room=0, start="", made=None, **arguments):
    building = Building(MeshSpec(shard=2, build=build), room, folder)
    spec = StartSpec(model=str(start))
    return build_model(made or recipe(**arguments), 5, CPU, spec, building=building)


def plain(**arguments):
    model, _ = build_model(recipe(**arguments), 5, CPU)
    return model


def is_empty(model):
    kinds = {parameter.is_meta for parameter in model.parameters()}
    assert len(kinds) == 1
    return kinds == {True}


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(1)
    save_model(tmp_path / "start.safetensors", Net().double(), {})
    return tmp_path / "start.safetensors"


def test_a_model_that_a_file_has_gets_its_values_when_its_parts_have_memory(tmp_path, file):
    model, begun = built(tmp_path, start=file)
    assert is_empty(model)
    assert not begun.small
    assert torch.equal(model.counted, torch.ones(3, dtype=torch.float64))
    assert model.tied.weight is model.last.weight
    meta_start.give_memory(model, CPU)
    begun.fill(model)
    whole, _ = build_model(recipe(), 5, CPU, StartSpec(model=str(file)))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("arguments", [{}, {"drawn": True}, {"reads": True}])
def test_values_that_are_in_no_file_are_those_of_a_plain_build_and_use_no_memory(
    tmp_path, monkeypatch, arguments
):
    mapped = []
    before = meta_start._mapped
    monkeypatch.setattr(meta_start, "_mapped", lambda t, f: mapped.append(f) or before(t, f))
    model, begun = built(tmp_path, "parts", **arguments)
    assert set(mapped) == {tmp_path}
    assert not begun.small
    assert not list(tmp_path.iterdir())
    assert model.tied.weight is model.last.weight
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    shared = [[int(x, 16) for x in row[0].split("-")] for row in maps if row[1].endswith("s")]
    for parameter in model.parameters():
        assert any(a <= parameter.data_ptr() < b for a, b in shared)
    wanted = plain(**arguments)
    assert model.scale == wanted.scale
    for name, tensor in [*wanted.named_parameters(), *wanted.named_buffers()]:
        assert torch.equal(dict([*model.named_parameters(), *model.named_buffers()])[name], tensor)


@pytest.mark.parametrize("arguments", [{"drawn": True}, {"reads": True}])
def test_a_file_is_not_enough_where_parameters_decide_about_the_rest(tmp_path, file, arguments):
    model, _ = built(tmp_path, "parts", start=file, **arguments)
    assert not is_empty(model)
    assert getattr(model, "scale", 0) == plain(**arguments).scale
    assert torch.equal(
        model.last.weight, build_model(recipe(), 5, CPU, StartSpec(model=str(file)))[0].last.weight
    )


def test_a_process_with_room_for_the_model_and_its_trial_builds_it_whole(tmp_path, file):
    size = sum(p.numel() * 8 for p in Net().parameters())
    model, begun = built(tmp_path, room=TRIAL * size, start=file)
    assert begun.small
    assert not is_empty(model)
    assert is_empty(built(tmp_path, room=TRIAL * size - 1, start=file)[0])
    assert not is_empty(built(tmp_path, "whole", start=file)[0])


def test_a_model_that_is_built_already_is_not_tried_whole_if_it_is_large(tmp_path):
    made = dataclasses.replace(recipe(), model=Net())
    model, begun = built(tmp_path, made=made)
    assert model is made.model
    assert not begun.small
    with pytest.raises(SpecError, match=r"Give the function that builds it: model=lambda: Net\(\)"):
        built(tmp_path, "parts", made=made)


def test_a_disk_without_room_is_named_before_anything_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RecipeError, match=r"needs .* there: No space left on device\. Make room"):
        built(tmp_path, "parts")


def test_a_buffer_that_nothing_gives_values_is_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].register_buffer("table", torch.ones(2), persistent=False)
    with pytest.raises(instep.InstepError, match=r"the buffer '0\.table' is on the meta device"):
        meta_start.give_memory(model, CPU)
