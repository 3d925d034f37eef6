#!/usr/bin/env bash
# opacus 1.6.0 with torch 2.13.0: gradients of single samples of a convolution whose padding_mode is "circular",
# "reflect" or "replicate" are those of one that is padded with zeros.
#
# Guessed: GradSampleModule gives the gradients of a backward pass of each sample alone, or ModuleValidator
# refuses the layer, as it does BatchNorm.
# Seen: the validator finds nothing, the forward pass is right, and the weight's gradients of single samples are
# wrong by 11 to 31 % of their norm here, so their sum is not the gradient that autograd puts into weight.grad in
# the same pass. What is clipped and released is the gradient of another model; private it is all the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "opacus==1.6.0" "numpy==2.4.6"
"$folder/venv/bin/python" -W ignore - <<'PY'
import opacus
import torch
from opacus import GradSampleModule
from opacus.validators import ModuleValidator
from torch import nn

print(f"opacus {opacus.__version__}, torch {torch.__version__.partition('+')[0]}")
for make, shape in ((nn.Conv1d, (16,)), (nn.Conv2d, (8, 8))):
    for mode in ("zeros", "circular", "reflect", "replicate"):
        torch.manual_seed(0)
        model, x = make(3, 4, 3, padding=1, padding_mode=mode), torch.randn(6, 3, *shape)
        assert not ModuleValidator.validate(model), "the behaviour has changed"
        plain = []
        for sample in x:
            model.zero_grad()
            model(sample[None]).square().sum().backward()
            plain.append(model.weight.grad.clone())
        model.zero_grad()
        private = GradSampleModule(model, loss_reduction="sum")
        private(x).square().sum().backward()
        found, right = model.weight.grad_sample, torch.stack(plain)
        off = ((found - right).norm() / right.norm()).item()
        print(f"{make.__name__}, {mode}: off by {off:.1%}")
        assert torch.allclose(model.weight.grad, right.sum(0), rtol=1e-3, atol=1e-3)
        assert (off < 1e-5) == (mode == "zeros"), "the behaviour has changed"
PY
