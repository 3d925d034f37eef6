#!/usr/bin/env bash
# opacus 1.6.0 with torch 2.13.0: an embedding's padding row has a gradient under GradSampleModule, and is trained.
#
# Guessed: nn.Embedding(padding_idx=0) keeps its row 0 at zero under Opacus as it does under autograd, which
# gives that row no gradient; noise apart.
# Seen: the gradients of single samples have that of the padding in row 0, so with noise_multiplier=0 one step
# of DP-SGD moves it and padded texts are no longer read as if nothing stood there. A sample with much padding
# also has a larger norm, so its other gradients are clipped more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "opacus==1.6.0" "numpy==2.4.6"
"$folder/venv/bin/python" -W ignore - <<'PY'
import opacus
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


torch.manual_seed(0)
x, target = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]]), torch.tensor([0, 2])
model = Net()
nn.functional.cross_entropy(model(x), target).backward()
assert not model.words.weight.grad[0].any()  # as autograd has it
model.zero_grad()
private = GradSampleModule(model)
sgd = torch.optim.SGD(private.parameters(), lr=0.1)
sgd = DPOptimizer(sgd, noise_multiplier=0.0, max_grad_norm=1e9, expected_batch_size=2)
nn.functional.cross_entropy(private(x), target).backward()
norms = model.words.weight.grad_sample[:, 0].norm(dim=1)
sgd.step()
moved = model.words.weight[0].norm().item()
print(f"opacus {opacus.__version__}, torch {torch.__version__.partition('+')[0]}")
print(f"gradients of the padding row, of two samples: {norms[0]:.4f} and {norms[1]:.4f}")
print(f"the padding row after a step without noise: norm {moved:.4f}")
assert (norms > 1e-3).all() and moved > 1e-3, "the behaviour has changed"
PY
