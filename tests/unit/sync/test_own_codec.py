"""A codec of the user's own is one class in a file, and one line of the job."""

import sys

import pytest
import torch
from torch.nn import Parameter

from instep.comm.codecs import CODECS
from instep.comm.memory import run_ranks
from instep.errors import SpecError
from instep.sync.base import make_strategy
from instep.sync.generation import Generation

CODE = """
import torch

class Halves:
    linear = unbiased = False
    segmentable = fixed_size = True

    def __init__(self, *, limit=4.0):
        self.limit = limit

    def size(self, count):
        return 2 * count

    def encode(self, values, out, *, key, left=None):
        short = out[: self.size(len(values))].view(torch.float16)
        short.copy_(values.clamp(-self.limit, self.limit))
        if left is not None:
            torch.sub(values, short, out=left)
        return self.size(len(values))

    def add_into(self, total, payload, weight=1.0):
        total.add_(payload.view(torch.float16), alpha=weight)

class Sum:
    def reduce(self, values, comm, *, key, left):
        assert left is None
        comm.all_reduce(values).wait()

class Half:
    def encode(self, values, out, *, key, left=None):
        return 0
"""


VECTORS = {"encode_vectors": True}


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_own_codecs.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_own_codecs", None)


def test_it_sums_gradients_by_its_path():
    def body(comm):
        options = {"limit": 3.0}
        strategy = make_strategy("all_reduce", VECTORS, "my_own_codecs:Halves", options)
        weight = Parameter(torch.zeros(3))
        strategy.start([weight], comm, Generation(notes=0))
        strategy.begin_pass(1.0, last=True)
        strategy.gradient(0, torch.tensor([1.0, -0.5, 5.0]))
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        agreed = strategy.apply(lambda: weight.grad.tolist())
        return agreed, strategy.own_state()["residual/0"].tolist()

    (one, left), (other, _) = run_ranks(2, body)
    assert one == other == [2.0, -1.0, 3.0]
    assert left[:2] == [0.0, 0.0]


def test_a_hook_sums_gradients_its_own_way_and_nothing_is_remembered_unless_it_says_so():
    def body(comm):
        strategy = make_strategy("all_reduce", VECTORS, "my_own_codecs:Sum")
        weight = Parameter(torch.zeros(3))
        strategy.start([weight], comm, Generation(notes=0))
        strategy.begin_pass(0.5, last=True)
        strategy.gradient(0, torch.tensor([1.0, -0.5, 4.0 * comm.rank]))
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        assert not strategy.laws
        return strategy.apply(lambda: weight.grad.tolist())

    assert run_ranks(2, body) == [[1.0, -0.5, 2.0]] * 2
    with pytest.raises(SpecError, match="rounds need a codec that is segmentable"):
        make_strategy("averaging", {}, "my_own_codecs:Sum")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("no_such_file:Codec", {}, "Put no_such_file.py beside the recipe's file, or install it."),
        (
            "my_own_codecs:Halvs",
            {},
            "has no 'Halvs'. Did you mean 'Halves'? Known: Half, Halves,",
        ),
        ("my_own_codecs:Halves", {"limits": 1}, "has no option 'limits'. Did you mean 'limit'?"),
        (
            "my_own_codecs:Half",
            {},
            "lacks linear, segmentable, unbiased, fixed_size, size, add_into",
        ),
        ("my own:Half", {}, "no codec is called 'my own:Half'"),
        (":Half", {}, "no codec is called ':Half'"),
    ],
)
def test_one_that_cannot_be_used_is_refused_with_the_reason(name, options, words):
    with pytest.raises(SpecError) as refused:
        make_strategy("all_reduce", {}, name, options)
    assert words in str(refused.value)


def test_a_path_is_not_imported_to_be_checked():
    CODECS.check("no_such_file:Codec")
    assert "no_such_file:Codec" not in CODECS
