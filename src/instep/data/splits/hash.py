"""Each group's side follows from its name alone, so it stays there when data are added."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from instep.data.order import key, keys
from instep.data.splits.base import Request, Sides
from instep.data.splits.columns import Classes
from instep.data.splits.sides import sides_of

_OF_NAME = 22
"""What a key is drawn for: the side of a group."""

_ALL = float(1 << 63)


def by_hash(request: Request) -> Sides:
    """Validate on groups whose keyed hash says so; about the share of all groups."""
    assert request.groups is not None, "something to hash for each sample"
    groups = Classes.of(request.groups, request.samples)
    if isinstance(groups.names, np.ndarray) and groups.names.dtype.kind in "iub":
        drawn = keys(request.seed, _OF_NAME, groups.names.astype(np.int64))
    else:
        words = (key(request.seed, _OF_NAME, _word(name)) for name in groups.names)
        drawn = np.fromiter(words, np.uint64, len(groups.names))
    if request.folds:
        chosen = drawn % np.uint64(request.folds) == request.fold
    else:
        chosen = drawn / _ALL < request.validation
    return sides_of(chosen[groups.codes])


def _word(name: Any) -> int:
    """A name as a number: a whole one as it is, else the hash of its text."""
    name = name.item() if isinstance(name, np.generic) else name
    if isinstance(name, int):
        return int(name)
    text = name if isinstance(name, bytes) else str(name).encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
