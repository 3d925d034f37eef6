"""Digests of attributes: equal for what is equal, another for whatever is another."""

import collections
import decimal
import random
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from instep.usercode.digests import digest_of, digests


class Slotted:
    __slots__ = ("inner", "value")

    def __init__(self, value):
        self.value = value


def counting(start):
    yield from range(start, 10)


def after(steps):
    made = counting(0)
    for _ in range(steps):
        next(made)
    return made


def closed(value):
    return lambda: value


def drawn(make, draws):
    made = make()
    for _ in range(draws):
        made.random()
    return made


def torch_drawn(draws):
    made = torch.Generator().manual_seed(3)
    torch.rand(draws, generator=made)
    return made


PAIRS = {
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "complex": (1j, 2j),
    "bytes": (b"a", b"b"),
    "bytearray": (bytearray(b"a"), bytearray(b"b")),
    "decimal": (decimal.Decimal("0.1"), decimal.Decimal("0.2")),
    "array": (np.array([1.0, 2.0]), np.array([1.0, 3.0])),
    "shape of an array": (np.zeros((2, 3)), np.zeros((3, 2))),
    "number of numpy": (np.float32(1), np.float32(2)),
    "array of objects": (np.array([1, "a"], object), np.array([1, "b"], object)),
    "tensor": (torch.zeros(3), torch.ones(3)),
    "type of a tensor": (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    "bfloat16": (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    "view": (torch.arange(6)[::2], torch.arange(6)[1::2]),
    "sparse": (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    "deque": (collections.deque([1.0], maxlen=2), collections.deque([2.0], maxlen=2)),
    "order of a list": ([1, 2], [2, 1]),
    "set": ({"a"}, {"b"}),
    "dict": ({"a": 1}, {"a": 2}),
    "counter": (collections.Counter("ab"), collections.Counter("aab")),
    "object": (SimpleNamespace(a=1), SimpleNamespace(a=2)),
    "slots": (Slotted(1), Slotted(2)),
    "closure": (closed(1), closed(2)),
    "partial": (partial(closed, 1), partial(closed, 2)),
    "generator function": (after(1), after(2)),
    "random": (drawn(partial(random.Random, 1), 1), drawn(partial(random.Random, 1), 2)),
    "numpy's generator": (
        drawn(partial(np.random.default_rng, 1), 1),
        drawn(partial(np.random.default_rng, 1), 2),
    ),
    "numpy's older one": (
        drawn(partial(np.random.RandomState, 1), 1),
        drawn(partial(np.random.RandomState, 1), 2),
    ),
    "torch's generator": (torch_drawn(1), torch_drawn(2)),
    "deep": ([{"a": [SimpleNamespace(b={1: (2,)})]}], [{"a": [SimpleNamespace(b={1: (3,)})]}]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_another_has_another_digest(name):
    one, other = PAIRS[name]
    assert digest_of(one, {}) != digest_of(other, {})
    assert digest_of(one, {}) == digest_of(one, {})


EQUALS = {
    "array": lambda: np.arange(4.0),
    "tensor": lambda: torch.arange(4.0),
    "strided tensor": lambda: torch.arange(8.0)[::2],
    "set of strings": lambda: {str(each) for each in range(50)},
    "objects": lambda: [SimpleNamespace(a=Slotted(np.float64(2)))],
    "generator": lambda: torch_drawn(3),
    "lock": threading.Lock,
}


@pytest.mark.parametrize("name", EQUALS)
def test_what_is_made_alike_has_the_same_digest(name):
    assert digest_of(EQUALS[name](), {}) == digest_of(EQUALS[name](), {})


def test_what_is_known_stands_for_what_it_has():
    one, other = torch.zeros(2), torch.ones(2)
    assert digest_of([one], {id(one): "p"}) == digest_of([other], {id(other): "p"})


def test_an_object_may_refer_to_itself():
    owner = SimpleNamespace(number=1)
    owner.me, owner.held = owner, [owner]
    owner.held.append(owner.held)
    before = digests(owner, {})
    assert before.keys() == {"number", "me", "held"}
    owner.number = 2
    now = digests(owner, {})
    assert [name for name in now if now[name] != before[name]] == ["number"]


def test_names_that_are_left_out_are_left_out_within_too():
    owner = SimpleNamespace(a=1, within=SimpleNamespace(a=1, b=2))
    before = digests(owner, {}, but=["a"])
    owner.a = owner.within.a = 5
    assert digests(owner, {}, but=["a"]) == before
    assert before.keys() == {"within"}


def test_an_object_that_raises_is_no_error():
    class Raising:
        def __getattribute__(self, name):
            raise OSError("no")

    assert digest_of([Raising()], {})
