"""A stream as the user gave it, and what its samples are recognised by.

Ways in: `GivenStream`, `hash_of`, `digest_of`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from instep.data.order import key
from instep.data.reading.streams.state import has_state
from instep.data.samples.contents import content_of
from instep.errors import DataError

_HASHED = 8
"""Samples of a window whose contents are compared."""


class GivenStream(NamedTuple):
    """A stream as the user gave it."""

    dataset: Any
    worker_init: Callable[[int], Any] | None = None
    """`worker_init_fn` of its `DataLoader`."""
    name: str = ""
    """In a mixture."""

    @property
    def named(self) -> str:
        """Its name in messages."""
        return f"the stream {self.name!r}" if self.name else "the stream"

    @property
    def has_state(self) -> bool:
        """Whether the dataset itself says where it is: `state_dict` and `load_state_dict`."""
        return has_state(self.dataset)

    def copied(self) -> Any:
        """A copy for one iterator; tensors and arrays are shared.

        Raises:
            DataError: it cannot be copied.
        """
        attributes = getattr(self.dataset, "__dict__", {})  # runs no property of the user's
        kept = [v for v in attributes.values() if isinstance(v, torch.Tensor | np.ndarray)]
        try:
            return copy.deepcopy(self.dataset, {id(each): each for each in kept})
        except Exception as error:
            raise DataError(
                f"{self.named} ({type(self.dataset).__name__}) cannot be copied: "
                f"{type(error).__name__}: {error}. Each part is read from a copy of its own: open "
                "files and connections, and make generators, in __iter__."
            ) from error


def hash_of(sample: Any) -> int:
    """A hash of a sample; 0 where its content is not known."""
    with suppress(Exception):  # a type of the user's may raise anything
        return content_of(sample)
    return 0


def digest_of(rows: list[Any]) -> int:
    """Hash a few samples of a window, evenly over it."""
    if not rows:
        return 0
    chosen = sorted({n * (len(rows) - 1) // (_HASHED - 1) for n in range(_HASHED)})
    return key(len(rows), *(hash_of(rows[n]) for n in chosen))
