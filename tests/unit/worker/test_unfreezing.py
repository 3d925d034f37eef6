"""A parameter that is thawed in the middle of a run is refused: nobody exchanges its gradient."""

import pytest
from torch import nn

from instep.errors import RecipeError
from instep.worker.passes.unfreezing import Frozen


def test_a_parameter_that_is_thawed_later_is_refused_by_name():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].requires_grad_(False)
    frozen = Frozen(model)
    frozen.check(1)
    model[1].weight.requires_grad_(False)
    frozen.check(2)
    model[0].bias.requires_grad_(True)
    with pytest.raises(RecipeError, match=r"step 3: the parameter '0.bias' needs a gradient now"):
        frozen.check(3)
