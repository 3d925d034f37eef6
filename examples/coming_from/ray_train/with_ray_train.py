import tempfile

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_loop_per_worker(config):
    images, digits = load_digits(return_X_y=True)
    images, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)
    dataset = TensorDataset(images[:1536], digits[:1536])

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = prepare_model(net)
    loader = prepare_data_loader(DataLoader(dataset, batch_size=32))
    for _ in range(5):
        for inputs, target in loader:
            loss = nn.functional.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        right = (net(images[1536:]).argmax(dim=1) == digits[1536:]).float().mean()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(net.state_dict(), f"{folder}/model.pt")
            first = ray.train.get_context().get_world_rank() == 0
            checkpoint = Checkpoint.from_directory(folder) if first else None
            ray.train.report({"accuracy": right.item()}, checkpoint=checkpoint)


trainer = TorchTrainer(
    train_loop_per_worker,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="digits", storage_path="/shared/runs"),
)
result = trainer.fit()
print(f"accuracy {result.metrics['accuracy']:.3f}, see {result.checkpoint.path}")
