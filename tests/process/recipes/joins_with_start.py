"""An own loop under a job that wants to load and freeze for it."""

import tiny
import torch
from torch import nn

import instep

with instep.join(seed=1, start={"freeze": ["0.*"]}) as session:
    model = nn.Linear(6, 3)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), tiny.recipe().train)
