#!/usr/bin/env bash
# torch 2.13.0: after torch.func.functional_call on a model that has one layer under two names, the layer's
# parameters stay replaced by the tensors of the call.
#
# Guessed: functional_call gives the parameters back when it returns, as its pages say, so a model whose encoder
# and decoder are one layer object can be used for gradients of single samples and then trained on.
# Seen: with tie_weights=True, the default, layer.weight is afterwards the plain tensor that was given,
# which model.parameters() then yields, without a gradient: an optimizer goes on with a Parameter that the
# model no longer has, and nothing is trained. Two layers that share only their weight get it back, and so does the shared layer with
# tie_weights=False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$folder/venv/bin/python" - <<'PY'
import torch
from torch import nn
from torch.func import functional_call


class Twice(nn.Module):
    def __init__(self, shared_layer):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = self.first if shared_layer else nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


print(f"torch {torch.__version__.partition('+')[0]}")
for shared_layer, tie_weights in ((True, True), (False, True), (True, False)):
    model, x = Twice(shared_layer), torch.ones(1, 3)
    before = model.first.weight
    given = {"first.weight": torch.zeros(3, 3)}
    assert not functional_call(model, given, (x,), tie_weights=tie_weights).any()
    back = model.first.weight is before
    (left,) = model.parameters()
    what = "one layer under two names" if shared_layer else "two layers with one weight"
    print(f"{what}, tie_weights={tie_weights}: given back {back}, left is a {type(left).__name__}")
    assert back != (shared_layer and tie_weights), "the behaviour has changed"
    assert isinstance(left, nn.Parameter) == back == left.requires_grad, "the behaviour has changed"
PY
