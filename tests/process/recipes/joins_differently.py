"""Calls `instep.join` with other arguments in each process: folder of runs."""

import os
import sys

import torch
from torch import nn

import instep

batch = 16 + int(os.environ["SLURM_PROCID"])
with instep.join(name="own", runs=sys.argv[1], train={"global_batch": batch}) as session:
    model = nn.Linear(2, 1)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(32, 2))
