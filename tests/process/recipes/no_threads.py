"""`tiny.py`, in a process that the system gives no more memory once it reads, and so no thread."""

import dataclasses
import resource
from typing import Any

import tiny
from torch.utils.data import Dataset

import instep


class Limited(Dataset[Any]):
    """Its first read takes the memory away: a thread that reads, if there is one, has started."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        resource.setrlimit(resource.RLIMIT_AS, (10 << 20, 10 << 20))
        return self._samples[index]


def recipe() -> instep.Recipe:
    made = tiny.recipe()
    return dataclasses.replace(made, train=Limited(made.train))
