"""An own loop over data with holes and NaN; the same in plain PyTorch, without these."""

import copy

import tiny
import torch
from torch import nn
from unreadable import Holes

import instep
from instep.data.order import Order, position

BAD = [*range(20, 26), 60]
NAN = [3, 40, 41]
STEPS = 14

if __name__ == "__main__":
    made = tiny.recipe()
    made.train.tensors[0][NAN] = torch.nan
    train = {"global_batch": 16, "micro_batches": 16, "merge": "never"}
    session = instep.join(name="own", quiet=True, seed=5, train=train, data={"unreadable": "skip"})
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, Holes(made.train, BAD, 0.0))
    loss_of = nn.CrossEntropyLoss()
    for _ in range(2):
        for inputs, target in loader:
            loss = loss_of(model(inputs), target)
            if loss.isfinite():
                session.backward(loss)
            else:
                session.skip()
            optimizer.step()
    session.close()
    assert session.step == STEPS
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    order = Order(101, 5)
    for step in range(1, STEPS + 1):
        indices = order.indices(*position(step, 101, 16))
        rows = [int(index) for index in indices if index not in BAD + NAN]
        reference.zero_grad()
        inputs, target = made.train[rows]
        loss_of(plain(inputs), target).backward()
        reference.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
