import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instep

images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)
dataset = TensorDataset(images[:1536], digits[:1536])

train, data = {"epochs": 5, "global_batch": 64}, {"order": "dataset"}
session = instep.join(name="digits", train=train, data=data)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(dataset, batch_size=64)
model, optimizer, loader = session.prepare(net, optimizer, loader)

for _ in session.epochs():
    for inputs, target in loader:
        loss = nn.functional.cross_entropy(model(inputs), target)
        session.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

if session.rank == 0:
    right = (net(images[1536:]).argmax(dim=1) == digits[1536:]).float().mean()
    print(f"accuracy {right:.3f}")
    torch.save(net.state_dict(), "model.pt")
session.close()
