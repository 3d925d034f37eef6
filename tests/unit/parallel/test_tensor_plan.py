"""Tensor plans: what is found, what is said, and what a trial finds out."""

from dataclasses import replace

import msgspec
import pytest
import tensor_models
import torch
from tensor_models import made
from torch import nn

from instep.errors import RecipeError, SpecError
from instep.parallel.pipeline.calls import intercepted
from instep.parallel.tensor import Plan, find_plan
from instep.parallel.tensor.alone import PlanDiffers
from instep.parallel.tensor.layers import exchange, kind_of
from instep.parallel.tensor.links import Links
from instep.parallel.tensor.plan import Cut, Draw
from instep.parallel.tensor.trial import PlanTrial

BLOCK = {
    **{f"attention.w{each}": "column" for each in "qkv"},
    "attention.wo": "row",
    "up": "column",
    "down": "row",
}
HAND = {f"blocks.*.{name}": style for name, style in BLOCK.items()}


def plan_of(name, ranks=2, **options):
    model, compute_loss, batches = made(name)
    return find_plan(model, compute_loss, batches[0], ranks, **options)


def styles(plan):
    return {name: cut.style for name, cut in plan.cuts.items()}


def test_a_transformer_is_cut_as_by_hand_and_its_heads_are_divided():
    plan = plan_of("GPT")
    blocks = {f"blocks.{n}.{name}": style for n in range(2) for name, style in BLOCK.items()}
    assert styles(plan) == {**blocks, "embed": "column_gather", "head": "column_gather"}
    assert plan.edits == {f"blocks.{n}.attention": {"heads": 2, "pairs": 2} for n in range(2)}
    assert plan.kept["places"] == "too small to be worth an exchange"
    assert plan.kept["norm"] == "LayerNorm is not a layer that can be cut"


def test_a_plan_is_the_same_each_time_and_leaves_the_model_alone():
    model, compute_loss, batches = made("dropout")
    before = {name: each.clone() for name, each in model.state_dict().items()}
    attributes, state = dict(vars(model.blocks[0].attention)), torch.get_rng_state()
    plans = [find_plan(model, compute_loss, batches[0], 2) for _ in range(2)]
    assert plans[0] == plans[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert vars(model.blocks[0].attention) == attributes
    assert type(model.head) is nn.Linear
    assert not any(each.grad is not None for each in model.parameters())


def test_a_plan_prints_one_line_for_layers_of_one_kind():
    text = str(plan_of("GPT"))
    assert text.startswith("tensor plan for 2 ranks\n")
    assert "blocks.*.up            column  (2 times)" in text
    assert "blocks.*.attention     with heads = 2, pairs = 2  (2 times)" in text


def test_tied_weights_are_cut_by_the_vocabulary_together():
    found = styles(plan_of("tied"))
    assert (found["embed"], found["head"]) == ("vocabulary", "column_gather")


def test_grouped_heads_are_divided_and_gradients_of_their_norm_summed():
    plan = plan_of("grouped")
    assert plan.edits["blocks.0.attention"] == {"heads": 2, "pairs": 1}
    assert plan.summed == ("blocks.0.attention.norm.weight", "blocks.1.attention.norm.weight")


def test_a_module_that_two_blocks_have_is_cut_once():
    plan = plan_of("one attention")
    assert [name for name in plan.cuts if name.endswith("attention.wo")] == [
        "blocks.0.attention.wo",
        "blocks.1.attention.wo",
    ]
    assert plan.cuts["blocks.0.attention.wo"].style == "row"


def test_heads_that_cannot_be_divided_are_not_cut():
    plan = plan_of("odd heads", 3)
    found = styles(plan)
    assert (found["blocks.0.up"], found["blocks.0.down"]) == ("column", "row")
    assert {found[f"blocks.0.attention.w{each}"] for each in "qkvo"} == {"column_gather"}
    assert plan.edits == {}


def test_a_layer_that_gives_queries_keys_and_values_at_once_is_gathered():
    found = styles(plan_of("fused"))
    assert (found["qkv"], found["out"]) == ("column_gather", "column_gather")
    chain = {name: style for name, style in found.items() if "chain" in name}
    assert list(chain.values()) == ["column", "row", "column", "row"]


def test_what_stays_whole_is_said():
    assert plan_of("gated").kept == {
        "conv": "Conv1d is not a layer that can be cut",
        "lstm": "LSTM is not a layer that can be cut",
        "out": "too small to be worth an exchange",
    }
    assert plan_of("experts").kept["raw"] == "its weight is read without a call of the layer"
    kept = plan_of("encoder").kept
    assert kept["encoder.layers.0.self_attn"] == (
        "MultiheadAttention is not a layer that can be cut"
    )


def test_draws_between_cut_layers_are_found():
    draws = plan_of("dropout").draws
    assert draws == {  # probabilities by heads, then the perceptron's hidden values
        **{f"blocks.{n}.attention": (Draw(1),) for n in range(2)},
        **{f"blocks.{n}": (None, Draw(2), None) for n in range(2)},
    }


def test_a_table_by_hand_gives_what_is_found():
    table = {**HAND, "embed": "column_gather", "head": "column_gather"}
    by_hand, found = plan_of("GPT", table=table), plan_of("GPT")
    assert by_hand.cuts == found.cuts
    assert by_hand.edits == found.edits
    assert by_hand.kept["places"] == "too small to be worth an exchange"


def test_a_table_may_keep_layers_whole():
    assert set(plan_of("GPT", table={"blocks.0.*": "replicate", **HAND}).cuts) == {
        f"blocks.1.{name}" for name in BLOCK
    }


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"blocks.*.up": "colum"}, r"'colum': no style has this name. Did you mean 'column'\?"),
        (
            {"blocks.*.ups": "column"},
            r"\['blocks.\*.ups'\] matches no .* Did you mean 'blocks.\*.up'",
        ),
        ({"head": "vocabulary"}, "only an embedding has a vocabulary"),
        ({"embed": "row"}, "an embedding like this cannot be cut by row"),
    ],
)
def test_a_table_that_cannot_be_is_refused(table, says):
    with pytest.raises(SpecError, match=says):
        plan_of("GPT", table=table)


@pytest.mark.parametrize(
    "table",
    [{"head": "column_gather"}, {"embed": "column_gather", "head": "column_gather"}],
)
def test_a_table_that_cuts_a_shared_weight_in_two_ways_is_refused(table):
    with pytest.raises(SpecError, match="but they share one weight"):
        plan_of("tied", table=table)
    plan = plan_of("tied", table={**table, "embed": "vocabulary"})
    assert styles(plan) == {"embed": "vocabulary", "head": "column_gather"}


class Beside(nn.Module):
    """A layer that reads the raw input, one that is read by nothing, and one never called."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unread, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        self.unread(x)
        return self.leave(torch.relu(self.enter(x)))


PAIR = {"enter": "column", "leave": "row"}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"enter": "row"}, "enter = 'row': it reads the output of no other layer"),
        ({**PAIR, "unread": "column"}, "unread = 'column': its output is read by no other layer"),
        ({**PAIR, "spare": "column"}, "spare = 'column': it is not called in the example"),
        ({"spare": "column_gather"}, "spare = 'column_gather': it is not called in the example"),
    ],
)
def test_a_table_of_which_something_would_be_left_out_is_refused(table, says):
    def compute_loss(model, batch):
        return model(batch).square().sum()

    model, batch = Beside().double(), torch.randn(4, 8, dtype=torch.float64)
    assert styles(find_plan(model, compute_loss, batch, 2, table=PAIR)) == PAIR
    with pytest.raises(SpecError, match=says):
        find_plan(model, compute_loss, batch, 2, table=table)


def in_a_row():
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    return nn.Sequential(*layers).double(), torch.randn(4, 8, dtype=torch.float64)


def test_what_a_stage_begins_with_is_not_cut():
    model, batch = in_a_row()
    assert styles(find_plan(model, tensor_models.squares, batch, 2)) == {
        "0": "column",
        "2": "row",
        "4": "column_gather",
    }
    whole = styles(find_plan(model, tensor_models.squares, batch, 2, whole=["2"]))
    assert whole == {"0": "column_gather", "2": "column", "4": "row"}


def test_a_layer_that_is_cut_and_is_a_block_of_a_pipeline_is_still_a_layer():
    layer = nn.Linear(4, 6)
    exchange(layer, "layer", Cut("column", "layer"), Links(0, 2), 6)
    with intercepted({"layer": layer}, lambda *_: None):
        assert kind_of(layer) == "linear"
    assert kind_of(layer) == "linear"


def test_a_table_that_cuts_what_a_stage_begins_with_is_refused():
    model, batch = in_a_row()
    table = {"0": "column", "2": "row"}
    assert styles(find_plan(model, tensor_models.squares, batch, 2, table=table)) == table
    with pytest.raises(RecipeError, match="'2', where a stage begins, is called with a part of a"):
        find_plan(model, tensor_models.squares, batch, 2, table=table, whole=["2"])


def test_a_table_for_another_number_of_ranks_is_refused():
    with pytest.raises(
        SpecError, match="head = 'column_gather': its 24 outputs cannot be divided by 5"
    ):
        plan_of("GPT", 5, table={"head": "column_gather"})


@pytest.mark.parametrize(
    "table", [{"embed": "column"}, {"blocks.*.down": "row"}, {"*.up": "column"}]
)
def test_a_table_that_computes_something_else_is_refused(table):
    with pytest.raises(RecipeError, match=r"mesh.plan: with .* and the layers beside it cut, "):
        plan_of("GPT", table=table)


def changed(plan, **cuts):
    names = {name.replace("_", "."): style for name, style in cuts.items()}
    whole = {name: cut for name, cut in plan.cuts.items() if names.get(name, "") is not None}
    found = {name: Cut(style, name) for name, style in names.items() if style}
    return replace(plan, cuts={**whole, **found})


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("GPT", lambda plan: replace(plan, edits={})),
        ("GPT", lambda plan: changed(plan, embed="column")),
        ("GPT", lambda plan: changed(plan, blocks_0_up=None)),
        ("tied", lambda plan: changed(plan, embed=None)),
        ("tied", lambda plan: changed(plan, head=None)),
    ],
    ids=["whole heads", "not gathered", "half a pair", "tie cut apart", "tie cut apart below"],
)
def test_a_trial_finds_what_is_wrong_with_a_plan(name, spoil):
    model, compute_loss, batches = made(name)
    plan, trial = (
        find_plan(model, compute_loss, batches[0], 2),
        PlanTrial(*made(name)[:2], batches[0], 2),
    )
    trial.check(plan)
    with pytest.raises(PlanDiffers):
        trial.check(spoil(plan))


class Scaled(nn.Module):
    """Needs the whole width; two parameters that start at 0 hide it, in gradients too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.one, self.other = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden + self.one * self.other * hidden.mean(-1, keepdim=True))


def test_a_start_of_zeros_hides_nothing():
    torch.manual_seed(0)
    plan = find_plan(Scaled(), tensor_models.squares, torch.randn(4, 8), 2)
    assert "row" not in styles(plan).values()


class Telling(nn.Module):
    """Gives its hidden values too, which its loss does not use."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.up(x)
        return {"made": self.down(hidden), "hidden": hidden}


def test_all_that_a_model_gives_stays_the_same():
    torch.manual_seed(0)
    plan = find_plan(Telling(), lambda m, x: m(x)["made"].square().mean(), torch.randn(4, 8), 2)
    assert styles(plan) == {"up": "column_gather", "down": "column_gather"}


class OutsideOfItsNorm(nn.Module):
    """The weight of `norm` works on cut values, read where `norm` is not called."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x) * self.norm.weight))


def test_a_gradient_that_cannot_be_summed_where_its_module_is_called_keeps_layers_apart():
    torch.manual_seed(0)
    plan = find_plan(OutsideOfItsNorm(), tensor_models.squares, torch.randn(4, 8), 2)
    assert plan.summed == ()
    assert "row" not in styles(plan).values()


class OwnPrecision(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.fixed = [torch.ones(8, 8)]

    def forward(self, x):
        return self.down(torch.tanh(self.up(x @ self.fixed[0])))


def test_a_model_that_cannot_be_float64_is_tried_in_float32():
    torch.manual_seed(0)
    plan = find_plan(OwnPrecision(), tensor_models.squares, torch.randn(4, 8), 2)
    assert styles(plan) == {"up": "column", "down": "row"}


def test_an_empty_plan_prints():
    assert str(Plan(2)) == "tensor plan for 2 ranks"


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ["dropout", "grouped", "tied", "encoder"])
def test_a_plan_goes_through_json_to_other_processes(name):
    plan = plan_of(name)
    again = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    assert again == plan
    assert str(again) == str(plan)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", [None, nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_weight_that_a_hook_computes_stays_whole_and_a_loss_may_differentiate_by_inputs(norm):
    layers = (nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    if norm is not None:
        norm(model[4])

    def loss(model, x):
        x = x.clone().requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return (slope + outputs).square().mean()

    cuts = find_plan(model, loss, torch.rand(6, 1), 2).cuts
    assert norm is None or "4" not in cuts
