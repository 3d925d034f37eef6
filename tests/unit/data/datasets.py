"""Datasets of every sort that the loader must treat alike."""

import os
import random
import signal

import numpy as np
import torch


class Plain:
    """Samples by index: inputs that tell which, and a label."""

    def __init__(self, samples=100):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.full((3,), float(index)), index % 10


class Many(Plain):
    """Also gives many at once, in torch's convention."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Drawing(Plain):
    """Draws from all three global generators, as many datasets do."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(3) + random.random() + np.random.rand(), target


class Nested(Plain):
    """Dictionaries, tuples, strings, and tensors of several types and no size."""

    def __getitem__(self, index):
        return {
            "pixels": torch.full((2, 2), index, dtype=torch.uint8),
            "pair": (torch.tensor(index), torch.tensor(index / 2, dtype=torch.bfloat16)),
            "name": f"sample {index}",
            "empty": torch.empty(0, 3),
            "number": index / 3,
        }


class Raising(Plain):
    """Cannot read one of its samples."""

    def __init__(self, samples=100, bad=70):
        super().__init__(samples)
        self.bad = bad

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"pixel of {index} is purple")
        return super().__getitem__(index)


class Uneven(Plain):
    """One of its samples is longer."""

    def __getitem__(self, index):
        return torch.zeros(4 if index == 70 else 3), index


class KillsItself(Plain):
    """Ends the process that reads sample 70: `times` counts down in a file."""

    def __init__(self, path, times):
        super().__init__()
        self.files = [f"img_{index}.png" for index in range(len(self))]
        self.path = path
        path.write_text(str(times))

    def __getitem__(self, index):
        if index == 70 and (times := int(self.path.read_text())):
            self.path.write_text(str(times - 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def augment(sample, generator):
    inputs, target = sample
    return inputs + torch.rand(3, generator=generator), target


def load(loader, slices):
    return (read.batch for read in loader.read(slices))


def same(one, other):
    """Whether two batches are alike in every bit and type."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other
