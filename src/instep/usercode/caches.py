"""Caches of an object's methods, in copies of the object.

`copy.deepcopy` shares what `functools.lru_cache` has made. Where an object keeps such a cache of a
method of its own, the one of a copy would call the original, and fill its cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MethodType
from typing import Any

from instep.usercode.places import CACHE, own_of


def rebind_caches(memo: Mapping[int, Any]) -> None:
    """Give the copies that a deep copy has made empty caches of their own methods.

    Args:
        memo: of `copy.deepcopy`, after it.
    """
    for original in memo.get(id(memo), ()):  # where it keeps alive what it has copied
        for name, cache in own_of(original).items():
            method = getattr(cache, "__wrapped__", None)
            if type(cache) is not CACHE or type(method) is not MethodType:
                continue
            owner, copied = memo.get(id(method.__self__)), memo.get(id(original))
            if owner is not None and copied is not None:
                anew = lru_cache(**cache.cache_parameters())
                own_of(copied)[name] = anew(MethodType(method.__func__, owner))
