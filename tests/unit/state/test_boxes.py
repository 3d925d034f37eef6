"""Boxes against the same done with masks of whole tensors."""

import random

import torch

from instep.state.boxes import elements, extent, gap, inside, meet, whole


def drawn_box(rng, shape):
    ends = [sorted(rng.choices(range(length + 1), k=2)) for length in shape]
    return tuple((first, stop) for first, stop in ends)


def mask_of(shape, box):
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[inside(box, whole(shape))] = True
    return mask


def test_what_boxes_share_and_what_none_has_is_what_masks_say():
    rng = random.Random(3)
    for _ in range(300):
        shape = [rng.randrange(0, 5) for _ in range(rng.randrange(0, 4))]
        one, other = drawn_box(rng, shape), drawn_box(rng, shape)
        both, common = mask_of(shape, one) & mask_of(shape, other), meet(one, other)
        assert elements(one) == int(mask_of(shape, one).sum())
        assert (0 if common is None else elements(common)) == int(both.sum())
        if common is not None:
            assert torch.equal(mask_of(shape, common), both)
            part = torch.arange(elements(one)).view(extent(one))[inside(common, one)]
            numbers = torch.full(shape, -1)
            numbers[inside(one, whole(shape))] = torch.arange(elements(one)).view(extent(one))
            assert torch.equal(part.reshape(-1), numbers[both])

        boxes = [drawn_box(rng, shape) for _ in range(rng.randrange(0, 6))]
        covered = torch.zeros(shape, dtype=torch.bool)
        for box in boxes:
            covered |= mask_of(shape, box)
        lacking = gap(shape, boxes)
        assert (lacking is None) == bool(covered.all())
        if lacking is not None:
            assert elements(lacking)
            assert not covered[inside(lacking, whole(shape))].any()


def test_a_box_outside_its_tensor_covers_nothing():
    assert gap([4], [((0, 5),)]) == ((0, 4),)
    assert gap([4], [((-1, 4),)]) == ((0, 4),)
    assert gap([], []) == ()
    assert gap([], [()]) is None
