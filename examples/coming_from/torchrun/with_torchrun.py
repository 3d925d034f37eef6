import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
first = 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt")
    net.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    first = snapshot["epochs"]

model = nn.parallel.DistributedDataParallel(net)
dataset = TensorDataset(images[:1536], digits[:1536])
sampler = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

for epoch in range(first, 5):
    for inputs, target in loader:
        loss = nn.functional.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        right = (net(images[1536:]).argmax(dim=1) == digits[1536:]).float().mean()
        print(f"epoch {epoch + 1}  accuracy {right:.3f}")
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epochs": epoch + 1}, "snapshot.new")
        os.replace("snapshot.new", "snapshot.pt")

if dist.get_rank() == 0:
    torch.save(net.state_dict(), "model.pt")
dist.destroy_process_group()
