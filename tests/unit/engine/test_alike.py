"""Parameters that machines of several kinds round differently are those of rank 0 afterwards."""

from collections import Counter

import pytest
import torch
from torch import nn

from instep.comm.memory import MemoryComm, run_ranks
from instep.engine.alike import align_parameters
from instep.errors import RecipeError, SpecError


class CountingComm:
    """A group that counts the broadcasts of this rank."""

    def __init__(self, comm: MemoryComm, counts: Counter[int]) -> None:
        self._comm, self._counts = comm, counts

    def __getattr__(self, name: str) -> object:
        return getattr(self._comm, name)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self._counts[self._comm.rank] += 1
        self._comm.broadcast(tensor, root)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)).to(dtype)


def rounded(dtype: torch.dtype = torch.float32, by: float = 3e-7) -> nn.Module:
    """The same net as another machine would have drawn it."""
    model = net(dtype)
    with torch.no_grad():
        model[0].weight.mul_(1 + by)
        model[1].running_mean.add_(by)
    return model


def aligned(models: list[nn.Module], **how: bool) -> tuple[list[object], Counter[int]]:
    """The ranks' answers, and their broadcasts."""
    counts = Counter[int]()

    def one(comm: MemoryComm) -> object:
        return align_parameters(models[comm.rank], CountingComm(comm, counts), **how)

    return run_ranks(len(models), one), counts


@pytest.mark.parametrize(
    ("dtype", "by"), [(torch.float32, 3e-7), (torch.float64, 1e-12), (torch.bfloat16, 2**-7)]
)
def test_every_rank_has_the_bits_of_the_first_one(dtype: torch.dtype, by: float) -> None:
    models = [net(dtype), net(dtype), rounded(dtype, by)]
    models[0][1].running_mean.add_(1.0)  # zeros have no rounding
    models[1][1].running_mean.add_(1.0)
    models[2][1].running_mean.add_(1.0)
    taken, counts = aligned(models)
    for model in models[1:]:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, models[0].state_dict()[name])
    assert taken[:2] == [None, None]
    assert taken[2].tensors >= 1
    assert 0 < taken[2].apart <= 2 * by
    assert set(counts.values()) == {2 + taken[2].tensors}


def test_equal_ranks_send_each_other_nothing() -> None:
    taken, counts = aligned([net(), net(), net()])
    assert taken == [None, None, None]
    assert set(counts.values()) == {1}


def test_a_rank_that_lacks_the_last_commit_keeps_what_it_has() -> None:
    models = [net(), rounded()]
    before = models[1][0].weight.clone()

    def one(comm: MemoryComm) -> object:
        return align_parameters(models[comm.rank], comm, whole=comm.rank == 0)

    assert run_ranks(2, one) == [None, None]
    assert torch.equal(models[1][0].weight, before)


def test_the_same_bits_are_not_had_from_machines_that_round_differently() -> None:
    with pytest.raises(
        SpecError, match=r"determinism = 'bits': '0\.weight'.*on rank 1 than.*by [34]e-07 of"
    ):
        aligned([net(), rounded(by=3e-7)], exact=True)


@pytest.mark.parametrize("by", [1e-2, float("nan")])
def test_what_no_rounding_explains_is_refused(by: float) -> None:
    with pytest.raises(RecipeError, match=r"'0\.weight' has other values on rank 1"):
        aligned([net(), rounded(by=by)])


def test_a_count_that_differs_is_refused() -> None:
    other = net()
    other[1].num_batches_tracked.add_(1)
    with pytest.raises(RecipeError, match=r"'1\.num_batches_tracked' has other values on rank 1"):
        aligned([net(), other])


def test_a_model_of_another_shape_is_refused_before_anything_is_sent() -> None:
    torch.manual_seed(5)
    wider = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pytest.raises(RecipeError, match=r"'0\.weight' takes 192 bytes on rank 1, but 168 on"):
        aligned([net(), wider])


class Holder(nn.Module):
    """A model with one buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("held", buffer)


INF, NAN = float("inf"), float("nan")
FLOAT8 = torch.float8_e4m3fn

OTHER_VALUES = {
    "a complex number": (torch.tensor([1 + 1j, 2.0]), torch.tensor([1 + 2j, 2.0])),
    "an integer that float64 does not hold": (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
    "no limit": (torch.tensor([-INF, 1.0]), torch.tensor([0.0, 1.0])),
    "another sign": (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0])),
    "beside a limit": (torch.tensor([-INF, 1.0]), torch.tensor([-INF, 2.0])),
    "no number": (torch.tensor([NAN, 1.0]), torch.tensor([3.0, 1.0])),
    "beside no number": (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 2.0])),
    "eight bits": (torch.tensor([1.0, 2.0]).to(FLOAT8), torch.tensor([1.125, 2.0]).to(FLOAT8)),
    "a flag": (torch.tensor([True, False]), torch.tensor([True, True])),
    "zeros": (torch.zeros(2), torch.tensor([0.0, 1e-12])),
    "sparse": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
}


@pytest.mark.parametrize("kind", OTHER_VALUES)
def test_what_only_looks_like_rounding_is_refused(kind: str) -> None:
    models = [Holder(each.clone()) for each in OTHER_VALUES[kind]]
    with pytest.raises(RecipeError, match=r"'held' has other values on rank 1"):
        aligned(models)


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1 + 3j, 2.0], dtype=torch.complex64),
        torch.tensor([1 + 3j, 2.0], dtype=torch.complex64).conj(),
        torch.tensor([-INF, 1.0, NAN, INF, 3.0]),
        torch.tensor(3.0),
    ],
)
def test_rounding_beside_what_is_no_number_is_that_of_the_first_rank(values: torch.Tensor) -> None:
    models = [Holder(values.clone()), Holder(values * (1 + 3e-7))]
    taken, _ = aligned(models)
    assert torch.equal(torch.nan_to_num(models[1].held), torch.nan_to_num(values))
    assert taken[1].tensors == 1


def test_an_expanded_buffer_is_written_once() -> None:
    first, other = (Holder(torch.tensor([[by], [3.0]]).expand(2, 4)) for by in (1.0, 1.0 + 3e-7))
    aligned([first, other])
    assert torch.equal(first.held, other.held)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.ones(3, 2), r"shape \[3, 2\] and type float32"),
        (torch.ones(2, 3).view(torch.int32), r"shape \[2, 3\] and type int32"),
        (torch.ones(1, 3).expand(2, 3), r"shape \[2, 3\] and type float32"),
        (torch.ones(7), "takes 28 bytes on rank 1, but 24"),
    ],
)
def test_the_same_bytes_with_another_meaning_are_refused(other: torch.Tensor, said: str) -> None:
    with pytest.raises(RecipeError, match=rf"'held' (is of )?{said}.*must build the same model"):
        aligned([Holder(torch.ones(2, 3)), Holder(other)])


def test_equal_values_of_every_kind_pass() -> None:
    for first, _ in OTHER_VALUES.values():
        assert aligned([Holder(first.clone()), Holder(first.clone())])[0] == [None, None]
