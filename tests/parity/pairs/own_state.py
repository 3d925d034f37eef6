"""What model or dataset keep beside parameters and buffers: counters, generators, lists."""

from __future__ import annotations

import torch
from pair import Parts, pair, said
from torch import nn
from torch.utils.data import Dataset

from pairs.common import classes, mlp

TWICE = "twice|second|again|repeat|counter|state of its own|not the same"


class Calls(nn.Module):
    """Counts its calls in Python, and anneals by the count."""

    def __init__(self):
        super().__init__()
        self.body, self.calls = mlp(), 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) * (1 + 1 / self.calls)


@pair("a counter in Python", said(TWICE, alone=True))
def counter():
    return Parts(model=Calls(), train=classes(), loss=nn.CrossEntropyLoss())


class Late(Calls):
    """Changes only after some passes, as a warm-up does."""

    def forward(self, x):
        self.calls += 1
        return self.body(x) * (2 if self.calls > 10 else 1)


@pair(
    "a counter in Python that acts late",
    said(TWICE + "|apart|each pass changes 'calls'", alone=True),
)
def late_counter():
    return Parts(model=Late(), train=classes(), loss=nn.CrossEntropyLoss())


class Noisy(nn.Module):
    """Noise from a generator of the model's own."""

    def __init__(self):
        super().__init__()
        self.body, self.generator = mlp(), torch.Generator().manual_seed(3)

    def forward(self, x):
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return self.body(x + 0.3 * noise.to(x.device))


@pair("a generator of the model's own", said(TWICE + "|generator|random", alone=True))
def generator():
    return Parts(model=Noisy(), train=classes(), loss=nn.CrossEntropyLoss())


class Recalled(nn.Module):
    """Remembers the mean of its last batch in an attribute."""

    def __init__(self):
        super().__init__()
        self.body, self.last = mlp(), None

    def forward(self, x):
        last, self.last = self.last, x.detach().mean(0)
        return self.body(x if last is None else x - 0.5 * last)


@pair("a memory of the last batch in Python", said(TWICE, alone=True))
def recalled():
    return Parts(model=Recalled(), train=classes(), loss=nn.CrossEntropyLoss())


class Jittered(Dataset):
    """Adds noise from a generator of its own: other noise at each reading."""

    def __init__(self):
        self.samples, self.generator = classes(), torch.Generator().manual_seed(3)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, target = self.samples[index]
        noise = torch.rand(inputs.shape, generator=self.generator, dtype=torch.float64)
        return inputs + noise.to(inputs), target


@pair("a generator of the dataset's own", said("^no: the training dataset.*Draw", alone=True))
def drawing_dataset():
    """The run reads samples to know them again and to try them: a plain loop draws other noise."""
    return Parts(model=mlp(), train=Jittered(), loss=nn.CrossEntropyLoss())


class Normalised(nn.Module):
    """A criterion that divides by the running mean of what it gave, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def forward(self, outputs, target):
        found = nn.functional.cross_entropy(outputs, target)
        self.level.mul_(0.9).add_(found.detach(), alpha=0.1)
        return found / self.level


@pair(
    "a running mean in a buffer of the criterion",
    said(f"Recipe.loss.*buffer 'level'|{TWICE}", alone=True),
)
def normalised():
    return Parts(
        model=mlp(),
        train=classes(),
        loss=Normalised(),
        given={"weight": lambda batch: len(batch[1])},
    )


@pair(
    "a list in a closure of the loss",
    said("keeps something from call to call.*list|each pass changes 'before'", alone=True),
)
def listed():
    before = []

    def loss(outputs, target):
        found = nn.functional.cross_entropy(outputs, target)
        before.append(float(found.detach()))
        return found / (sum(before[-5:]) / len(before[-5:]))

    return Parts(
        model=mlp(),
        train=classes(),
        loss=loss,
        given={"weight": lambda batch: len(batch[1])},
    )
