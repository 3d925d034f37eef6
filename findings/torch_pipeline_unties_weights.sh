#!/usr/bin/env bash
# torch 2.13.0: a weight that an embedding and the output layer share becomes two parameters when
# torch.distributed.pipelining.pipeline() cuts the model between them, and their gradients never meet.
#
# Guessed: the cut keeps the tie, by adding the gradients of both stages, or is refused, since the traced
# program knows that both names are one parameter.
# Seen: no word. After one step of Schedule1F1B and SGD the two stages have different weights, neither of
# which is that of the model on one process; the mean loss of the first step is equal, so it looks right.
# The first stage also keeps the shared weight under the name of the last one's, never used and without a gradient.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/tied.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.body = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.body(self.words(x)))


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, x, target = Tied(), torch.arange(8), torch.arange(8)
    plain, loss = Tied(), nn.CrossEntropyLoss()
    plain.load_state_dict(model.state_dict())
    pipe = pipeline(model, (x[:4],), split_spec={"body": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss)
    losses = []
    schedule.step(*([x] if rank == 0 else []), **({"target": target, "losses": losses} if rank else {}))
    torch.optim.SGD(stage.submod.parameters(), lr=1.0).step()
    expected = loss(plain(x), target)
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    own = stage.submod.get_parameter("head.weight" if rank else "words.weight").detach()
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    if rank:
        mean = torch.stack(losses).mean()
        print(f"torch {torch.__version__.partition('+')[0]}: loss {mean:.4f}, on one process {expected:.4f}")
        apart = [(each - plain.words.weight).abs().max().item() for each in both]
        print(f"after a step: the stages differ by {(both[0] - both[1]).abs().max():.3f}, "
              f"and from one process by {apart[0]:.3f} and {apart[1]:.3f}")
        assert torch.allclose(mean, expected), "the behaviour has changed"
        assert not torch.allclose(*both) and min(apart) > 0.01, "the behaviour has changed"
    else:
        unused = stage.submod.get_parameter("head.weight")
        print("the first stage has a head.weight of its own, with a gradient:", unused.grad is not None)
        assert unused.grad is None, "the behaviour has changed"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/tied.py" "$folder"
