#!/usr/bin/env bash
# torch 2.13.0: eval() on a stage that torch.distributed.pipelining.pipeline() made says nothing and changes
# nothing: dropout still drops, and BatchNorm still uses the batch and moves its running statistics.
#
# Guessed: a stage is an nn.Module, so eval() before validation does what it does for the model it was cut
# from; or it raises, as eval() of torch.export.export(...).module() does, on which pipeline() is built.
# Seen: the stage's flag `training` becomes False and no error is raised, but the graph was recorded in
# training mode. A validation between two epochs is computed with dropout and changes the running statistics
# by the validation set.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$folder/venv/bin/python" -W ignore - <<'PY'
import copy

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


torch.manual_seed(0)
x, model = torch.randn(16, 8), Net()
plain = copy.deepcopy(model).eval()
pipe = pipeline(model, (x,), split_spec={"last": SplitPoint.BEGINNING})
stages = [pipe.get_stage_module(at).eval() for at in range(pipe.num_stages)]


def through(x):
    for stage in stages:
        x = stage(x)
        x = x[0] if isinstance(x, tuple) else x
    return x


counted = stages[0].get_buffer("norm.num_batches_tracked")
with torch.no_grad():
    one, two = through(x), through(x)
print(f"torch {torch.__version__.partition('+')[0]}, {len(stages)} stages after eval()")
print("flag `training`:", [stage.training for stage in stages])
print("the same input twice gives the same output:", torch.equal(one, two))
print("it gives the output of the model in eval mode:", torch.allclose(one, plain(x)))
print("batches that BatchNorm has counted in eval mode:", counted.item())
assert not any(stage.training for stage in stages), "the behaviour has changed"
assert not torch.equal(one, two), "the behaviour has changed"
assert counted.item() == 2, "the behaviour has changed"
assert torch.equal(plain(x), plain(x)) and plain.norm.num_batches_tracked.item() == 0
try:
    torch.export.export(model, (x,)).module().eval()
except NotImplementedError:
    print("eval() of an exported program's module: NotImplementedError")
else:
    raise AssertionError("the behaviour has changed")
PY
