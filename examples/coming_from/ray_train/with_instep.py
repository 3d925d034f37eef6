import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import instep


def recipe():
    images, digits = load_digits(return_X_y=True)
    images, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train=TensorDataset(images[:1536], digits[:1536]),
        validate=TensorDataset(images[1536:], digits[1536:]),
        metrics={"accuracy": accuracy},
    )


def accuracy(outputs, target):
    return (outputs.argmax(dim=1) == target).float().mean()


if __name__ == "__main__":
    run = instep.train(
        recipe,
        name="digits",
        workers=2,
        runs="/shared/runs",
        on="ray",
        train={"epochs": 5, "global_batch": 64},
        data={"order": "dataset"},
    )
    print(f"accuracy {run.summary['metrics']['accuracy']:.3f}, see {run.path}")
