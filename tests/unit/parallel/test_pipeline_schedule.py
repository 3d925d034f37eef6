"""Orders of a pipeline, cuts of a chain, and parts of a batch: pure functions."""

import itertools
import random

import pytest
import torch
from torch import nn

from instep.errors import RecipeError, SpecError
from instep.parallel.pipeline.blocks import find
from instep.parallel.pipeline.cuts import best_cuts, slowest
from instep.parallel.pipeline.measure import measure
from instep.parallel.pipeline.parts import cut, rows_in, sizes_of
from instep.parallel.pipeline.schedule import Action, makespan, orders

SHAPES = [
    (name, ranks, chunks, parts)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
    for ranks in (1, 2, 3, 4)
    for parts in (0, 1, 2, 3, 4, 5, 8, 11)
]


@pytest.mark.parametrize(("name", "ranks", "chunks", "parts"), SHAPES)
def test_every_part_goes_once_through_each_stage_in_both_directions(name, ranks, chunks, parts):
    found = orders(name, ranks, parts, chunks=chunks)
    assert makespan(found) is not None
    for rank, order in enumerate(found):
        stages = range(rank, ranks * chunks, ranks)
        wanted = itertools.product((True, False), stages, range(parts))
        assert sorted(order) == sorted(Action(*each) for each in wanted)
    only = orders(name, ranks, parts, chunks=chunks, backward=False)
    assert [sorted(order) for order in only] == [
        sorted(action for action in order if action.forward) for order in found
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 3, 4, 9])
def test_the_bubble_is_that_of_theory(name, ranks, parts):
    assert makespan(orders(name, ranks, parts)) == 3.0 * (parts + ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_stages_divide_the_bubble(ranks, chunks):
    parts = 4 * ranks
    found = makespan(orders("interleaved", ranks, parts, chunks=chunks))
    assert found == 3.0 * (parts * chunks + ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_1f1b_keeps_few_parts_under_way(ranks):
    for rank, order in enumerate(orders("1f1b", ranks, 12)):
        under_way = itertools.accumulate(1 if action.forward else -1 for action in order)
        assert max(under_way) == ranks - rank


def test_an_unknown_schedule_is_refused():
    with pytest.raises(SpecError, match=r"mesh.schedule = '1f1c'\. Did you mean '1f1b'\?"):
        orders("1f1c", 2, 4)


def test_ranks_that_wait_in_a_circle_are_found():
    first, second = Action(True, 0, 0), Action(False, 0, 0)
    third = [Action(True, 1, 0), Action(False, 1, 0)]
    assert makespan([[second, first], third]) is None


class Advance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        clock[0] += seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock[0] += 2 * ctx.seconds
        return grad, None, None


def test_blocks_that_look_alike_are_timed_one_by_one():
    class Takes(nn.Module):
        def __init__(self, seconds):
            super().__init__()
            self.scale, self.seconds = nn.Parameter(torch.ones(2)), seconds

        def forward(self, x):
            return Advance.apply(x * self.scale, clock, self.seconds)

    clock = [0.0]
    model = nn.Sequential(*map(Takes, (1.0, 4.0, 2.0, 0.5)))

    def call(batch, samples):
        return model(batch).mean(), samples

    chain = find(model, call, torch.ones(3, 2), 3)
    found = measure(model, chain, call, torch.ones(3, 2), 3, lambda: clock[0])
    assert found == pytest.approx([3.0, 12.0, 6.0, 1.5])
    assert all(parameter.grad is None for parameter in model.parameters())


def every_cut(blocks, stages, banned):
    places = [place for place in range(1, blocks) if place not in banned]
    return itertools.combinations(places, stages - 1)


def test_cuts_are_the_best_of_all_cuts():
    draw = random.Random(4)
    for _ in range(300):
        blocks, stages = draw.randint(1, 12), draw.randint(1, 5)
        times = [draw.choice((0.0, 1.0, draw.random() * 5)) for _ in range(blocks)]
        banned = {place for place in range(blocks) if draw.random() < 0.2}
        every = list(every_cut(blocks, stages, banned))
        found = best_cuts(times, stages, banned)
        if not every:
            assert found is None
            continue
        least = min(slowest(times, cuts) for cuts in every)
        assert found in every
        assert slowest(times, found) == pytest.approx(least)


def test_equal_times_give_equal_numbers_of_blocks():
    borders = [0, *best_cuts([1.0] * 11, 4), 11]
    assert max(b - a for a, b in itertools.pairwise(borders)) == 3


@pytest.mark.parametrize("samples", [0, 1, 3, 7, 8, 9])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_parts_are_even_and_none_is_empty(samples, parts):
    sizes = sizes_of(samples, parts)
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, parts)
    assert max(sizes, default=1) - min(sizes, default=1) <= 1


def test_a_batch_is_cut_along_its_samples():
    batch = {"x": torch.arange(10).view(5, 2), "names": list("abcde"), "scale": torch.ones(2)}
    found = cut(batch | {"nested": (torch.arange(5), None)}, 5, 2)
    assert [size for _, size in found] == [3, 2]
    assert torch.equal(found[1][0]["x"], torch.tensor([[6, 7], [8, 9]]))
    assert found[1][0]["names"] == ["d", "e"]
    assert found[1][0]["scale"] is batch["scale"]
    assert torch.equal(found[0][0]["nested"][0], torch.arange(3))


def test_what_has_as_many_rows_as_samples_by_chance_is_not_cut():
    weights = torch.ones(3)
    rows = rows_in((torch.ones(4, 6), weights), 4)
    assert rows == [True, False]
    for samples in (3, 5):
        parts = cut((torch.ones(samples, 6), weights), samples, 2, rows)
        assert [len(x) for (x, _), _ in parts] == [samples - samples // 2, samples // 2]
        assert all(kept is weights for (_, kept), _ in parts)
    with pytest.raises(RecipeError, match="without a row for each"):
        cut((torch.ones(1, 5, 6), weights), 5, 2, rows)


def test_a_batch_without_rows_for_its_samples_is_refused():
    with pytest.raises(RecipeError, match=r"mesh.pipeline_batches = 2 cuts a batch of 6 samples"):
        cut(torch.ones(3, 6), 6, 2)
