"""Which blocks of a model stay where only two are tried."""

import copy

import torch
from torch import nn

from instep.parallel.two_blocks import TwoBlocks


def test_two_blocks_of_each_list_stay_and_all_are_there_again():
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(3, 4),
            "layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(5)),
            "tail": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)),
        }
    )
    names = list(dict(model.named_parameters()))
    two = TwoBlocks(model)
    assert two
    assert two.names == ["layers.0", "layers.1", "tail.0", "tail.2"]
    with two.alone():
        kept = copy.deepcopy(model)
        assert len(model["layers"]) == 2
        assert [type(each).__name__ for each in model["tail"]] == ["Linear", "Tanh", "Linear"]
    assert list(dict(model.named_parameters())) == names
    assert len(kept["layers"]) == 2
    assert torch.equal(kept["layers"][1].weight, model["layers"][1].weight)


def test_a_model_without_a_longer_list_has_nothing_to_leave_out():
    assert not TwoBlocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
