"""Which layers stay with a participant, and that a model is as before when they have been lent."""

import pytest
import torch
from torch import nn

from instep.errors import SpecError
from instep.worker.rounds.local_parameters import LocalParameters


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.block = nn.ModuleDict({"norm": nn.BatchNorm1d(2)})


def local(model, *patterns):
    return LocalParameters(model, patterns, list(model.parameters()))


def test_a_pattern_is_of_names_at_any_depth_with_their_buffers():
    own = local(Model(), "*.norm.*").pack()
    kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert own.keys() == {f"{at}norm.{kind}" for at in ("", "block.") for kind in kinds}
    assert local(Model(), "norm.*").pack().keys() == {f"norm.{kind}" for kind in kinds}
    assert local(Model(), "last.weight").slots == {2}


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("*.nrom.*", r"'\*\.nrom\.\*': no parameter .* has such a name.*; buffers: norm.running_m"),
        ("*", "all"),
    ],
)
def test_patterns_of_nothing_and_of_all_are_refused(pattern, why):
    with pytest.raises(SpecError, match=why):
        local(Model(), pattern)


def test_layers_that_were_lent_leave_the_model_as_it_was_and_move_no_buffer():
    model = Model()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    versions = [buffer._version for buffer in model.buffers()]
    part = local(model, "norm.*")
    with part.lent({name: each + 1 for name, each in part.pack().items()}):
        assert torch.equal(model.norm.running_mean, before["norm.running_mean"] + 1)
        assert torch.equal(model.norm.weight, before["norm.weight"] + 1)
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])
    assert [buffer._version for buffer in model.buffers()] == versions
