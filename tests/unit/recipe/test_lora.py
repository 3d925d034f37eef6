"""What an adapter adds, what stays as it was, and which layers cannot have one."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from instep.errors import SpecError
from instep.job.start import LoraSpec, StartSpec
from instep.recipe.build import build
from instep.recipe.lora import add
from instep.recipe.recipe import Recipe


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.attention = nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, 4)
        self.out = nn.Linear(8, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(x))


def lora(*modules, rank=2, **more):
    return LoraSpec(modules=modules, rank=rank, **more)


def moved(model):
    """Give every adapter's second factor values other than 0."""
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter)
    return model


def test_a_new_adapter_changes_nothing_and_a_trained_one_adds_its_product():
    model = Net().eval()
    x, before = torch.randn(7, 8), model.state_dict().keys()
    plain = model(x)
    adapted = add(lora("body.0", "head", alpha=3.0), model, seed=1)
    assert torch.equal(model(x), plain)
    moved(model)
    merged = Net().eval()
    merged.load_state_dict({name: model.state_dict()[name] for name in before})
    for layer in ("body.0", "head"):
        own = model.get_submodule(layer)
        merged.get_submodule(layer).weight.data += 3 / 2 * own.lora_B @ own.lora_A
    torch.testing.assert_close(model(x), merged(x))
    assert (model(x) - plain).abs().max() > 0.1
    assert list(adapted.layers) == ["body.0", "head"]
    assert adapted.trained == 2 * (8 + 6) + 2 * (6 + 4)
    assert "rank 2 on 2 layers: 48 values are trained" in adapted.fields()["text"]


def test_names_and_types_are_those_of_the_model_without_adapters():
    model, plain = Net(), Net().state_dict()
    add(lora("body.0"), model, seed=1)
    missing, unexpected = model.load_state_dict(plain, strict=False)
    assert (missing, unexpected) == (["body.0.lora_A", "body.0.lora_B"], [])
    assert type(model.body[0]) is nn.Linear
    needs = {name for name, p in model.named_parameters() if p.requires_grad}
    assert needs == set(missing)
    assert copy.deepcopy(model)(torch.ones(2, 8)).shape == (2, 4)


def test_first_values_follow_from_the_seed_and_the_layer_alone():
    def first(seed, *modules):
        model = Net()
        add(lora(*modules), model, seed)
        return model.head.lora_A

    torch.manual_seed(8)
    assert torch.equal(first(1, "head"), first(1, "body.0", "head"))
    assert not torch.equal(first(1, "head"), first(2, "head"))
    model = nn.ModuleList([nn.Linear(400, 50), nn.Linear(400, 50)])
    add(lora("*", rank=50 - 1), model, 1)
    one, other = (layer.lora_A.detach() for layer in model)
    assert not torch.equal(one, other)
    assert one.abs().max() == pytest.approx(400**-0.5, rel=1e-3)  # as peft: uniform
    assert one.std() == pytest.approx((3 * 400) ** -0.5, rel=0.02)


def test_running_statistics_stay_and_dropout_follows_train():
    model = Net()
    add(lora("head"), model, seed=1)
    model.train()
    assert [m.training for m in model.body] == [True, False, True]
    model = Net()
    add(lora("head", also_train=("body.1.*",)), model, seed=1)
    model.train()
    assert model.body[1].training
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "body.1.weight",
        "body.1.bias",
        "head.lora_A",
        "head.lora_B",
    }


def test_dropout_is_of_the_adapters_inputs_in_training_alone():
    model = nn.Sequential(nn.Linear(400, 3))
    add(lora("0", dropout=0.25), model, seed=1)
    x = torch.ones(1, 400)
    model[0].lora_A.data.fill_(1.0)
    model[0].lora_B.data.fill_(1.0)
    plain = nn.functional.linear(x, model[0].weight, model[0].bias)
    whole = model.eval()(x) - plain
    torch.testing.assert_close(whole, torch.full((1, 3), 2 * 400 * 16 / 2))
    parts = torch.cat([model.train()(x) - plain for _ in range(30)])[:, 0] / whole[0, 0]
    assert 0.9 < parts.mean() < 1.1
    assert 0.01 < parts.std() < 0.1  # of 400 inputs of which a quarter is dropped: 0.029


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_quick_path_of_torchs_transformer_is_not_taken_past_an_adapter():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2)
    add(lora("*.linear1", "*.linear2"), model, seed=1)
    moved(model)
    x, padded = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padded[0, 3:] = True
    wanted = model.train()(x, src_key_padding_mask=padded)
    with torch.no_grad():
        found = model.eval()(x, src_key_padding_mask=padded)
    torch.testing.assert_close(found[~padded], wanted[~padded])


def test_weights_of_16_bits_have_adapters_of_32():
    model = nn.Sequential(nn.Linear(8, 8)).bfloat16()
    add(lora("0"), model, seed=1)
    assert model[0].lora_A.dtype is model[0].lora_B.dtype is torch.float32
    moved(model)
    assert model(torch.randn(2, 8).bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (lora("heat"), "'heat', which matches no layer of the model. Did you mean 'head'?"),
        (lora("0"), "'0', which matches no layer of the model. Did you mean '*.0'?"),
        (lora("embed"), "only 'embed' (Embedding): LoRA adapts Linear layers, and Conv1D"),
        (lora("head", "body.1"), "only 'body.1' (BatchNorm1d)"),
        (lora("*"), "'attention.out_proj', whose weight nn.MultiheadAttention uses without"),
        (lora("out"), "'out', whose weight is tied to embed.weight"),
        (lora("head", rank=5), "rank = 5 is more than the layer 'head' has, with 6 inputs and 4"),
        (lora("head", also_train=("haed.*",)), "lora.also_train has 'haed.*', which matches no"),
        (lora("head", also_train=("head.*",)), "lora.also_train matches 'head.weight', and lora"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_a_sentence(spec, words):
    model = Net()
    with pytest.raises(SpecError, match=re.escape(words)) as refused:
        add(spec, model, seed=1)
    assert str(refused.value).endswith(".")
    assert all(p.requires_grad for p in model.parameters())  # nothing was changed


def test_a_weight_that_is_computed_is_refused():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(SpecError, match=r"'0', .*no plain parameter"):
        add(lora("0"), model, seed=1)


def test_a_recipe_with_adapters_of_its_own_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    add(lora("0"), model, seed=1)
    with pytest.raises(SpecError, match="has an adapter already, from the recipe"):
        add(lora("0"), model, seed=1)


def test_the_full_rank_of_a_square_layer_is_refused():
    with pytest.raises(SpecError, match=r"lora\.rank = 4 is the full rank of the layer '0'"):
        add(lora("0", rank=4), nn.Sequential(nn.Linear(4, 4)), seed=1)


def test_a_layer_that_is_not_called_is_known_after_a_pass_of_a_copy():
    model = Net()
    model.also = nn.Linear(6, 4)
    adapted = add(lora("head", "also"), model, seed=1)
    assert adapted.unused == []
    copy.deepcopy(model)(torch.ones(2, 8))
    assert adapted.unused == ["also"]


def built(lora, **start):
    recipe = Recipe(
        model=Net,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=[(torch.ones(8), torch.ones(4))] * 4,
    )
    return build(recipe, 0, torch.device("cpu"), 10, StartSpec(**start), lora)


def test_the_optimizer_gets_adapters_alone_with_rates_of_their_own():
    rates = {"*.lora_B": 1.6}
    made = built(lora("head", "body.0"), learning_rates=rates, freeze=("body.0.lora_A",))
    names = {p: name for name, p in made.model.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in made.optimizer.param_groups]
    assert groups == [["head.lora_A"], ["body.0.lora_B", "head.lora_B"]]
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.1, 1.6]
    assert made.adapted.rank == 2
    assert built(LoraSpec()).adapted is None
