"""A live model is restored bit for bit; another model is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from instep.errors import CheckpointError
from instep.state.load import load, load_model
from instep.state.open_pieces import open_pieces
from instep.state.restore import restore, restore_pieces
from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot, model_tensors, parameters_sha256


class Net(nn.Module):
    """Tied weights, buffers of every kind, several types, and extra state."""

    def __init__(self, seed, width=3, tied=True, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(width)
        self.norm(torch.randn(4, width))
        self.fine = nn.Parameter(torch.randn(7).to(dtype))
        self.register_buffer("seen", torch.randint(0, 9, (3,), dtype=torch.uint16))
        self.register_buffer("turned", torch.randn(2, 3).T)
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("empty", torch.empty(0, 2))
        self.register_buffer("not_kept", torch.randn(2), persistent=False)
        self.history = torch.randn(seed + 1)

    def get_extra_state(self):
        return self.history.clone()

    def set_extra_state(self, state):
        self.history = state.clone()


def saved(model, folder):
    """The model's tensors, by way of the disk."""
    return load(checkpoint(model, folder)).tensors["model"]


def checkpoint(model, folder):
    writer = CheckpointWriter(folder)
    writer.save(Snapshot(step=1, tensors={"model": model_tensors(model)}, facts={}))
    writer.finish()
    return writer.poll()[0].path


def test_every_tensor_comes_back_to_the_bit_into_the_models_own_memory(tmp_path):
    trained, model = Net(4), Net(1)
    with torch.no_grad():
        trained.fine[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    assert parameters_sha256(model) != parameters_sha256(trained)
    restore(saved(trained, tmp_path), model)
    assert parameters_sha256(model) == parameters_sha256(trained)
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == before
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.history, trained.history)


def test_what_was_restored_is_not_tied_to_the_snapshot(tmp_path):
    tensors, model = saved(Net(4), tmp_path), Net(1)
    restore(tensors, model)
    for tensor in tensors.values():
        tensor.zero_()
    assert parameters_sha256(model) == parameters_sha256(Net(4))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: Net(1, width=4), r"wrong: embedding.weight \(\[5, 3\] when saved, \[5, 4\] in"),
        (lambda: Net(1, dtype=torch.float16), "torch.bfloat16 when saved, torch.float16 in"),
        (
            lambda: Net(1, tied=False),
            r"head.weight \(tied to embedding.weight when saved, a tensor of its own in the model",
        ),
        (lambda: nn.Linear(2, 2), "0 of 2 tensors match; missing: weight, bias; unexpected: "),
    ],
)
def test_another_model_is_refused_with_names_and_left_as_it_was(tmp_path, other, says):
    model = other()
    before = parameters_sha256(model)
    with pytest.raises(CheckpointError, match=says) as caught:
        restore(saved(Net(4), tmp_path), model)
    assert str(caught.value).startswith("the recipe now builds another model than the one that")
    assert parameters_sha256(model) == before


class Observer(nn.Module):
    """Its buffers get their shape in the first pass."""

    def __init__(self, *passed):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(len(passed))))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("one", torch.tensor([1.0]))
        self.register_buffer("none", None)
        for value in passed:
            self.empty, self.one, self.none = value, value + 1, value + 2


@pytest.mark.parametrize(
    "take",
    [
        lambda path, model: restore(load(path).tensors["model"], model),
        lambda path, model: restore_pieces(open_pieces(path, {}).pieces, model),
        lambda path, model: load_model(path / "model.safetensors", model),
    ],
)
def test_buffers_that_passes_gave_their_shape_come_back_in_a_fresh_model(tmp_path, take):
    trained, fresh = Observer(torch.rand(3)), Observer()
    take(checkpoint(trained, tmp_path / "one"), fresh)
    assert parameters_sha256(fresh) == parameters_sha256(trained)
    take(checkpoint(Observer(torch.rand(1)), tmp_path / "two"), trained)  # the run goes back
    assert trained.empty.shape == (1,)
    with pytest.raises(CheckpointError, match=r"empty \(\[3\] [a-z ]+, \[4\] in the model\)"):
        take(checkpoint(fresh, tmp_path / "three"), Observer(torch.rand(4)))


def test_a_weight_that_was_not_tied_is_not_forced_into_one_that_is(tmp_path):
    with pytest.raises(CheckpointError, match=r"a tensor of its own when saved, tied to"):
        restore(saved(Net(4, tied=False), tmp_path), Net(1))


def test_a_module_that_refuses_its_own_state_gives_one_line(tmp_path):
    class Spread(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.register_buffer("row", torch.full((2,), value).expand(3, 2))

    with pytest.raises(CheckpointError, match="does not take its own state back") as caught:
        restore(saved(Spread(1.0), tmp_path), Spread(2.0))
    assert not re.search("\n", str(caught.value))
