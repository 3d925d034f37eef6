import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instep

images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)

train, data = {"epochs": 5, "global_batch": 64}, {"order": "dataset"}
session = instep.join(name="digits", train=train, data=data)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(TensorDataset(images[:1536], digits[:1536]), batch_size=64)
held_out = DataLoader(TensorDataset(images[1536:], digits[1536:]), batch_size=100)
model, optimizer, train, held_out = session.prepare(model, optimizer, train, held_out)

for epoch in session.epochs():
    for inputs, target in train:
        loss = nn.functional.cross_entropy(model(inputs), target)
        session.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    right = 0
    for inputs, target in held_out:
        with torch.no_grad():
            guesses = model(inputs).argmax(dim=1)
        guesses, target = session.gather_for_metrics((guesses, target))
        right += int((guesses == target).sum())
    session.validated(261, accuracy=right / 261)
    session.print(f"epoch {epoch + 1}  accuracy {right / 261:.3f}")

session.close()
