"""The gate finds any part of any gradient that is not that of one process, and names the first."""

from __future__ import annotations

import pytest
import torch

from instep.comm.memory import run_ranks
from instep.errors import RecipeError
from instep.parallel.gate import NEAR, GradientPiece, check

NAMES = ("embed", "first", "second", "head")


def gradients():
    torch.manual_seed(1)
    return {name: torch.randn(8, 6) for name in NAMES}


def quarters(rank):
    """A part of its own for each of four ranks."""
    return ((0, 4), (4, 8))[rank // 2], ((0, 3), (3, 6))[rank % 2]


def whole(_):
    return ((0, 8), (0, 6))


def cut(tensor, box):
    return tensor[tuple(slice(first, stop) for first, stop in box)].clone()


def on(ranks, spoil=lambda rank, name, gradient: gradient, boxes=quarters, references=None):
    """The verdict of all ranks on gradients that `spoil` has changed."""
    references = references or gradients()

    def one(comm):
        def pieces():
            for name, reference in references.items():
                box = boxes(comm.rank)
                if box is None:
                    yield GradientPiece(name, reference.shape, None, None, None)
                    continue
                own = cut(reference, box)
                yield GradientPiece(
                    name, reference.shape, box, own, spoil(comm.rank, name, own.clone())
                )

        try:
            return check(pieces(), comm, mesh="tensor = 2")
        except RecipeError as error:
            return str(error)

    first, *others = run_ranks(ranks, one)
    assert all(other == first for other in others), "ranks disagree"
    return first


@pytest.mark.parametrize("boxes", [quarters, whole])
def test_equal_gradients_pass(boxes):
    verdict = on(4, boxes=boxes)
    assert verdict.tensors == 4
    assert verdict.distance == 0


@pytest.mark.parametrize("boxes", [quarters, whole])
@pytest.mark.parametrize(("by", "passes"), [(0.2, True), (5.0, False)])
def test_what_one_rank_has_may_differ_by_rounding_only(boxes, by, passes):
    def off(rank, name, gradient):
        if rank == 2 and name == "second":
            gradient += by * NEAR * gradients()[name].norm() / gradient.numel() ** 0.5
        return gradient

    found = on(4, off, boxes)
    if passes:
        assert found.distance == pytest.approx(by * NEAR, rel=0.02)
    else:
        assert "gradient of 'second'" in found
        assert "on rank 2" in found
        assert "5e-05" in found


def test_the_first_in_registration_order_is_named_and_the_others_are_counted():
    def doubled(rank, name, gradient):
        return 2 * gradient if name in ("head", "first") else gradient

    found = on(4, doubled)
    assert "gradient of 'first' is off by 1 of its norm; 1e-05 is allowed" in found
    assert "and so are 1 of the others" in found
    assert "[mesh] tensor = 2 would train another model" in found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_found(value):
    def broken(rank, name, gradient):
        if rank == 1 and name == "head":
            gradient[0, 0] = value
        return gradient

    assert "'head' is not finite on rank 1" in on(4, broken)


def test_a_part_that_no_rank_holds_is_found():
    assert "a part of it is held by no rank" in on(3)  # the last quarter is missing
    assert "a part of it is held by no rank" in on(2, boxes=lambda rank: None)


def test_a_rank_may_hold_nothing_of_a_tensor():
    assert on(3, boxes=lambda rank: whole(rank) if rank else None).tensors == 4


def test_a_sparse_gradient_is_compared():
    def sparse(by):
        return lambda rank, name, g: (by * g).to_sparse(1) if name == "embed" else g

    assert on(2, sparse(1), whole).tensors == 4
    assert "'embed' is off by 1 of its norm" in on(2, sparse(2), whole)


def test_a_gradient_that_only_one_side_has_is_found():
    assert "'first' is off by 1 of its norm" in on(
        2, boxes=whole, spoil=lambda rank, name, g: None if name == "first" else g
    )
    torch.manual_seed(1)
    given = torch.randn(3)

    def alone(comm):
        others = GradientPiece("a", (3,), ((0, 3),), given, given)
        return check([others, GradientPiece("b", (3,), ((0, 3),), None, given)], comm)

    with pytest.raises(RecipeError, match=r"'b' has the norm .*, where that of one process has n"):
        run_ranks(1, alone)


def test_rounding_where_the_gradient_is_nothing_in_exact_arithmetic_passes():
    """As that of the bias of an attention's keys: noise on both sides, tiny beside the weight's."""

    def found(by, among):
        noise = by * torch.ones(8, 6)
        references = {**gradients(), f"{among}.bias": noise, "keys.weight": torch.ones(8, 6)}
        return on(2, lambda r, name, g: -g if "bias" in name else g, whole, references)

    assert found(4e-7, "keys").tensors == 6
    assert "'keys.bias' is off by 2 of its norm" in found(6e-7, "keys")
    assert "'others.bias' is off by 2 of its norm" in found(4e-7, "others")
    assert found(4e-10, "others").tensors == 6


def test_scalars_and_empty_parts_are_compared():
    def one(comm):
        scalar, row = torch.tensor(3.0), torch.ones(1)
        box = ((0, 1),) if comm.rank == 0 else ((1, 1),)
        part = row[slice(*box[0])]
        wrong = scalar + comm.rank
        return check(
            [
                GradientPiece("row", (1,), box, part, part),
                GradientPiece("scale", (), (), scalar, wrong),
            ],
            comm,
        )

    with pytest.raises(RecipeError, match=r"'scale' is off by 0.33 of its norm on rank 1"):
        run_ranks(2, one)
