"""Sets the generators that a model draws from: torch's, numpy's and Python's global ones.

A model that draws nothing needs none of them set. So a generator is set only once something was
drawn from it; `ModelDraws` notices that, and then the pass has to be run again. Models are not
known here.
"""

from __future__ import annotations

import hashlib
import random
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Key = tuple[int, int]
"""Of a micro-batch, from the job; and the number of the part."""


class _Generator(Protocol):
    def set(self, number: int) -> None:
        """Begin a sequence."""

    def watch(self, number: int) -> None:
        """Begin a sequence from which nothing should be drawn."""

    def drawn(self) -> bool:
        """Whether something was drawn from it since `watch`, or since the last call."""


class _Torch:
    def __init__(self) -> None:
        self._before: list[Tensor] = []

    def set(self, number: int) -> None:
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)

    def watch(self, number: int) -> None:
        self.set(number)
        self._before = self._states()

    def drawn(self) -> bool:
        before, self._before = self._before, self._states()
        return not all(map(torch.equal, before, self._before))

    def _states(self) -> list[Tensor]:
        own = torch.default_generator.get_state()
        return [own, *torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else [own]


class _Numpy:
    """Its state takes 40 us to read, so the next number is compared with that of a second one."""

    def __init__(self) -> None:
        self._same = np.random.RandomState()

    def set(self, number: int) -> None:
        np.random.seed(number & 0xFFFFFFFF)

    def watch(self, number: int) -> None:
        self.set(number)
        self._same.seed(number & 0xFFFFFFFF)

    def drawn(self) -> bool:
        return bool(np.random.random_sample() != self._same.random_sample())


class _Python:
    def __init__(self) -> None:
        self._same = random.Random()

    def set(self, number: int) -> None:
        random.seed(number)

    def watch(self, number: int) -> None:
        self.set(number)
        self._same.seed(number)

    def drawn(self) -> bool:
        return random.random() != self._same.random()


class ModelDraws:
    """The global generators of this process, while one model runs."""

    def __init__(self) -> None:
        self._watched: list[_Generator] = [_Torch(), _Numpy(), _Python()]
        self._used: list[_Generator] = []

    def watch(self, key: int) -> None:
        """Begin to watch those from which nothing was drawn; again after other code has run."""
        number = _number(f"{key}")
        for generator in self._watched:
            generator.watch(number)

    def set(self, key: Key, name: str) -> None:
        """Set those from which something was drawn, by a key and a name."""
        if self._used:
            number = _number(f"{key[0]} {key[1]} {name}")
            for generator in self._used:
                generator.set(number)

    def more(self) -> bool:
        """Whether something was drawn from one that was not set; from now on it is."""
        drawn = [generator for generator in self._watched if generator.drawn()]
        for generator in drawn:
            self._watched.remove(generator)
            self._used.append(generator)
        return bool(drawn)


def seed(key: Key, name: str) -> None:
    """Set all of them, by a key and a name."""
    for generator in (_Torch(), _Numpy(), _Python()):
        generator.set(_number(f"{key[0]} {key[1]} {name}"))


def _number(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
