"""Digests of what an object keeps, by attribute: whether another one, made anew, has the same.

Numbers, texts, tensors, arrays, generators and what holds them are taken: containers, plain
objects, what functions close over. Of any other object its pickled bytes are; of what cannot be
pickled, only that it is there. The user's objects may be anything, so nothing here raises.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.usercode.places import is_filled

_SIZE = 8
_PLAIN = type(None), bool, int, float, complex, str, bytes, bytearray
_NAMED = type, ModuleType
_DRAWS = np.random.Generator, np.random.RandomState


def digests(owner: Any, known: Mapping[int, str], but: Collection[str] = ()) -> dict[str, str]:
    """The digest of each attribute of an object, as hexadecimal digits.

    Args:
        owner: it may refer to itself.
        known: by the identity (`id`) of an object, what stands for its contents.
        but: names of attributes that are left out, here and in objects of the same kind.
    """
    walk = _Walk({**known, id(owner): "itself"}, but)
    return {name: walk.digest(value).hex() for name, value in walk.attributes(owner)}


def digest_of(value: Any, known: Mapping[int, str]) -> str:
    """The digest of one object, as `digests` has it."""
    return _Walk(known, ()).digest(value).hex()


class _Walk:
    def __init__(self, known: Mapping[int, str], but: Collection[str]) -> None:
        self._known, self._but = dict(known), but
        self._inside = dict[int, str]()  # what is being taken: a way back to it is not taken again

    def attributes(self, owner: Any) -> Iterator[tuple[str, Any]]:
        found = dict(getattr(owner, "__dict__", {}))
        for kind in type(owner).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(owner, name):
                    found[name] = getattr(owner, name)
        return ((name, each) for name, each in found.items() if name not in self._but)

    def digest(self, value: Any) -> bytes:
        kind = f"{type(value).__module__}.{type(value).__qualname__}:".encode()
        known = self._known.get(id(value)) or self._inside.get(id(value))
        if known is not None:
            return blake2b(known.encode(), digest_size=_SIZE).digest()
        self._inside[id(value)] = f"inside {len(self._inside)}"
        try:
            found = kind + self._contents(value)
        except Exception:  # of the user's own code, or of what cannot be pickled
            found = kind
        del self._inside[id(value)]
        return blake2b(found, digest_size=_SIZE).digest()

    def _contents(self, value: Any) -> bytes:
        if isinstance(value, _PLAIN):
            return repr(value).encode()
        if isinstance(value, _NAMED):
            return str(getattr(value, "__qualname__", value.__name__)).encode()
        if isinstance(value, Tensor):
            return self._tensor(value.detach()) + self._of_attributes(value)
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject:
                return self._each(value.tolist())
            return repr((value.dtype.str, value.shape)).encode() + value.tobytes()
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, _DRAWS):
            state = value.get_state() if hasattr(value, "get_state") else value.bit_generator.state
            return self.digest(state)
        if isinstance(value, random.Random):
            return repr(value.getstate()).encode()
        if isinstance(value, Mapping):
            pairs = (self.digest(key) + self.digest(each) for key, each in value.items())
            return b"".join(sorted(pairs)) + self._of_attributes(value)
        if isinstance(value, set | frozenset):
            return b"".join(sorted(map(self.digest, value)))
        if isinstance(value, list | tuple | deque):
            return self._each(value) + self._of_attributes(value)
        return self._object(value)

    def _object(self, value: Any) -> bytes:
        if isinstance(value, FunctionType):
            cells = [each.cell_contents for each in value.__closure__ or () if is_filled(each)]
            parts = [*cells, value.__defaults__, value.__kwdefaults__]
            return value.__qualname__.encode() + self._each(parts) + self._of_attributes(value)
        if isinstance(value, MethodType):
            return value.__func__.__qualname__.encode() + self.digest(value.__self__)
        if isinstance(value, partial):
            return self._each([value.func, value.args, value.keywords])
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            if frame is None:
                return b"ended"
            return self._each([frame.f_lasti, dict(frame.f_locals), value.gi_yieldfrom])
        if hasattr(value, "__dict__") or any("__slots__" in vars(k) for k in type(value).__mro__):
            return self._of_attributes(value)
        return pickle.dumps(value)

    def _tensor(self, value: Tensor) -> bytes:
        if value.is_sparse:
            value = value.coalesce()
            return self._each([tuple(value.shape), value.indices(), value.values()])
        size = repr((value.dtype, tuple(value.shape))).encode()
        flat = value.contiguous().cpu().reshape(-1).view(torch.uint8)
        return size + blake2b(flat.numpy().data, digest_size=_SIZE).digest()

    def _each(self, values: Sequence[Any]) -> bytes:
        return b"".join(map(self.digest, values))

    def _of_attributes(self, owner: Any) -> bytes:
        if isinstance(owner, Tensor | np.ndarray):
            return b""
        named = [name.encode() + self.digest(each) for name, each in self.attributes(owner)]
        return b"".join(sorted(named))
