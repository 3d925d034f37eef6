"""Activations between blocks that are split along the sequence: what is found, and what refused."""

from dataclasses import replace

import msgspec
import pytest
import tensor_models
import torch
from tensor_models import GPT, Block, made, next_word, words
from torch import nn

from instep.errors import RecipeError
from instep.parallel.tensor import Plan, find_plan
from instep.parallel.tensor.alone import PlanDiffers
from instep.parallel.tensor.plan import Draw
from instep.parallel.tensor.trial import PlanTrial


def plan_of(name, ranks=2):
    model, compute_loss, batches = made(name)
    return find_plan(model, compute_loss, batches[0], ranks, sequence=True)


def crossings(plan):
    return {
        name: [(each.side, each.change, each.dim) for each in found]
        for name, found in plan.sequence.items()
    }


GATHERED, SUMMED = [("input", "gather_sum", -2)], [("output", "sum_split", -2)]
WITHIN = {"attention": GATHERED, "attention.wo": SUMMED, "up": GATHERED, "down": SUMMED}


def test_a_transformer_is_split_as_by_hand():
    plan = plan_of("GPT")
    assert crossings(plan) == {
        "embed": [("output", "split", -2)],
        "places": [("output", "split", -2)],
        **{f"blocks.{n}.{name}": found for n in range(2) for name, found in WITHIN.items()},
        "head": GATHERED,
    }
    assert plan.unsplit == {}
    norms = {
        f"blocks.{n}.norm{i}.{key}" for n in (0, 1) for i in (1, 2) for key in ("weight", "bias")
    }
    assert norms <= set(plan.summed)
    without = find_plan(*made("GPT")[:2], made("GPT")[2][0], 2)
    assert (plan.cuts, plan.edits, plan.kept) == (without.cuts, without.edits, without.kept)
    assert without.sequence == {}


def test_an_embedding_by_the_vocabulary_leaves_each_rank_its_part():
    assert crossings(plan_of("tied"))["embed"] == SUMMED


def test_layers_that_read_the_same_tensor_each_get_it_gathered():
    found = crossings(plan_of("llama"))
    assert found["layers.0.mlp.gate"] == found["layers.0.mlp.up"] == GATHERED
    assert found["layers.0.attention"] == GATHERED


def test_the_sequence_may_come_before_the_batch():
    dims = {each.dim for found in plan_of("time first").sequence.values() for each in found}
    assert dims == {-3}


def test_an_attention_that_stays_whole_gets_the_whole_sequence():
    found = crossings(plan_of("encoder"))
    assert found["encoder.layers.0.self_attn"] == [
        *(("input", "gather", -2),) * 3,
        ("output", "split", -2),
    ]
    assert found["encoder.layers.1"] == [("output", "gather", -2)]  # its mean is taken then


class Remembering(Block):
    """Puts its lengths into what its model hands over, as a cache of keys does; not twice."""

    def forward(self, x, cache):
        assert self not in cache
        cache[self] = x.shape
        return super().forward(x)


class Remembered(GPT):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Remembering(tensor_models.WIDTH) for _ in range(2))

    def forward(self, ids):
        x, cache = self.embed(ids) + self.places(torch.arange(ids.shape[1])), {}
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x))


def test_a_block_that_cannot_be_called_again_is_split():
    plan = find_plan(Remembered().double(), next_word, words(), 2, sequence=True)
    within = {f"blocks.{n}.{name}": found for n in range(2) for name, found in WITHIN.items()}
    assert within.items() <= crossings(plan).items()


def test_draws_of_residuals_are_cut_by_the_sequence():
    of_sequence = Draw(1, "blocks")
    assert plan_of("dropout").draws == {
        "": (of_sequence,),
        **{f"blocks.{n}.attention": (Draw(1),) for n in range(2)},
        **{f"blocks.{n}": (of_sequence, Draw(2), of_sequence) for n in range(2)},
    }


def test_a_plan_with_a_split_sequence_goes_through_json_and_prints():
    plan = plan_of("dropout")
    again = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    assert again == plan
    text = str(again)
    assert "blocks.*.attention     sequence gathered at its input  (2 times)" in text
    assert "embed                  sequence split at its output" in text


class Summing(Block):
    """What it adds to a position depends on those before."""

    def forward(self, x):
        return super().forward(x) + 0.1 * x.cumsum(1)


class TwoLists(GPT):
    """The second list's blocks compute across positions themselves."""

    def __init__(self):
        super().__init__()
        self.more = nn.ModuleList(Summing(tensor_models.WIDTH) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in [*self.blocks, *self.more]:
            x = block(x)
        return self.head(x)


def test_a_list_of_blocks_that_cannot_be_split_is_named_and_others_are():
    torch.manual_seed(0)
    plan = find_plan(TwoLists(), next_word, words(), 2, sequence=True)
    assert plan.unsplit == {"more": "more.0 itself computes across positions"}
    assert "blocks.0.up" in plan.sequence
    assert not any(name.startswith("more") for name in plan.sequence)
    assert "more                   sequence not split: more.0 itself computes" in str(plan)


class Only(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(x)


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize(
    ("build", "shape", "says"),
    [
        (
            lambda: Only(Summing(16), Summing(16)),
            (4, 6, 16),
            "in blocks, blocks.0 itself computes across positions",
        ),
        (
            lambda: Only(Perceptron(), Perceptron()),
            (4, 16),
            r"in blocks, blocks.0 gets samples and features \(shape \[4, 16\]\), no sequence",
        ),
        (lambda: Only(Block(16)), (4, 6, 16), "it has no list of repeated blocks"),
        (
            lambda: Only(Block(16), Block(16)),
            (4, 1, 16),
            "the example's sequence of 1 is shorter than the number of ranks",
        ),
    ],
)
def test_a_model_that_does_not_allow_it_is_refused(build, shape, says):
    torch.manual_seed(0)
    with pytest.raises(
        RecipeError, match=rf"^mesh.sequence = true, but .*{says}.* Set it to false."
    ):
        find_plan(build(), tensor_models.squares, torch.randn(shape), 2, sequence=True)


def test_a_loss_over_the_whole_sequence_gets_it_whole():
    torch.manual_seed(0)
    model = Only(Block(16), Block(16))

    def furthest(model, x):
        made = model(x)
        return (made - made.mean(1, keepdim=True)).square().sum(-1).amax(1).mean()

    plan = find_plan(model, furthest, torch.randn(4, 6, 16), 2, sequence=True)
    assert crossings(plan)["blocks.1"] == [("output", "gather", -2)]


def without(name, plan):
    return {key: found for key, found in plan.sequence.items() if key != name}


def with_change(name, plan, change):
    found = tuple(replace(each, change=change) for each in plan.sequence[name])
    return {**plan.sequence, name: found}


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("dropout", lambda plan: without("blocks.0.attention", plan)),
        ("dropout", lambda plan: without("blocks.1.down", plan)),
        ("dropout", lambda plan: without("places", plan)),
        ("dropout", lambda plan: without("head", plan)),
        ("encoder", lambda plan: with_change("encoder.layers.0.self_attn", plan, "gather_sum")),
    ],
    ids=["not gathered", "not split", "half split", "not joined", "summed twice"],
)
def test_a_trial_finds_what_is_wrong_with_a_split(name, spoil):
    model, compute_loss, batches = made(name)
    plan = find_plan(model, compute_loss, batches[0], 2, sequence=True)
    trial = PlanTrial(model, compute_loss, batches[0], 2)
    trial.check(plan)
    with pytest.raises(PlanDiffers):
        trial.check(replace(plan, sequence=spoil(plan)))
