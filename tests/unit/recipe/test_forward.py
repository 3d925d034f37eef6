"""From a batch to a loss, with every loss that cannot be trained on refused by name."""

from collections import namedtuple

import pytest
import torch
from torch import nn

import instep
from instep.comm.alone import AloneComm
from instep.errors import RecipeError
from instep.recipe.forward import Forward, to_device
from instep.recipe.losses import checked
from instep.recipe.recipe import Recipe

CPU, META = torch.device("cpu"), torch.device("meta")
LEAF = torch.ones(3, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (0.5, ["Recipe.loss returned a float", "scalar tensor"]),
        (None, ["Recipe.loss returned None"]),
        ({"loss": LEAF.sum()}, ["Recipe.loss returned a dict"]),
        (LEAF, ["shape [3]", "the mean over the samples"]),
        (torch.tensor(3), ["torch.int64", "floating-point"]),
        (torch.tensor(1.0), ["does not depend on the model's parameters", "detached"]),
        (LEAF.sum().detach(), ["does not depend on the model's parameters"]),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss, words):
    with pytest.raises(RecipeError) as error:
        checked(loss, "loss")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_loss_of_one_element_becomes_a_scalar():
    assert checked(LEAF.sum().reshape(1, 1), "loss").shape == ()


def test_without_gradients_a_loss_needs_not_depend_on_anything():
    with torch.no_grad():
        assert float(checked(torch.tensor(2.0), "loss")) == 2


def forward(**changes):
    model = nn.Linear(2, 1)
    settings = {
        "model": model,
        "loss": nn.functional.mse_loss,
        "train": [0],
        "optimizer": lambda p: None,
    }
    recipe = Recipe(**{**settings, **changes})
    return Forward(recipe, model, CPU, changes.pop("precision", "float32"))


BATCH = (torch.ones(4, 2), torch.zeros(4, 1))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.ones(4, 2), ["a batch is a Tensor", "(inputs, target)"]),
        ((*BATCH, BATCH), ["a batch is a tuple of 3", "compute_loss="]),
        ({"inputs": 1, "target": 2}, ["a batch is a dict of 2", "compute_loss="]),
    ],
)
def test_a_batch_that_is_no_inputs_and_target_is_refused_with_the_way_out(batch, words):
    with pytest.raises(RecipeError) as error:
        forward().loss(batch, 4)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_compute_loss_gets_the_batch_as_it_is():
    batch = {"x": torch.ones(4, 2), "text": "as it is"}
    one = forward(loss=None, compute_loss=lambda model, b: model(b["x"]).mean() * len(b["text"]))
    assert one.loss(batch, 4).loss.requires_grad
    assert one.phase == "compute_loss"


def test_metrics_come_after_the_loss_in_their_order_and_need_no_gradient():
    metrics = {"b": lambda o, t: 2, "a": lambda o, t: torch.tensor([3.0])}
    values, weight, *_ = forward(metrics=metrics).measure(BATCH, 4)
    assert weight == 4
    assert list(values) == ["loss", "b", "a"]
    assert (values["b"], values["a"]) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.ones(4), "shape [4]"), (None, "None"), ("good", "a str"), ([1], "a list")],
)
def test_a_metric_that_is_no_number_is_refused_by_its_name(value, words):
    with pytest.raises(RecipeError, match=r"Recipe\.metrics\['quality'\]") as error:
        forward(metrics={"quality": lambda o, t: value}).measure(BATCH, 4)
    assert words in str(error.value)


def test_the_phase_says_what_was_being_done_when_something_broke():
    def broken(*_):
        raise ZeroDivisionError

    one = forward(loss=broken)
    with pytest.raises(ZeroDivisionError):
        one.loss(BATCH, 4)
    assert one.phase == "loss"
    one = forward(metrics={"m": broken})
    with pytest.raises(ZeroDivisionError):
        one.measure(BATCH, 4)
    assert one.phase == "metric m"


def test_autocast_computes_in_the_lower_precision_and_float32_does_not():
    model = nn.Linear(2, 1)
    seen = []

    def loss(outputs, target):
        seen.append(outputs.dtype)
        return outputs.float().mean()

    recipe = Recipe(model=model, loss=loss, train=[0], optimizer=lambda p: None)
    for precision in ("float32", "bfloat16"):
        Forward(recipe, model, CPU, precision).loss(BATCH, 4)
    assert seen == [torch.float32, torch.bfloat16]


def test_every_tensor_of_a_nested_batch_moves_and_the_rest_stays():
    Point = namedtuple("Point", "x y")
    batch = {"a": [torch.ones(2), "text"], "b": Point(torch.ones(1), 3), "c": (None, torch.ones(1))}
    moved = to_device(batch, META)
    assert moved["a"][0].device == moved["b"].x.device == moved["c"][1].device == META
    assert (moved["a"][1], moved["b"].y, moved["c"][0]) == ("text", 3, None)
    assert type(moved["b"]) is Point
    assert to_device(batch, CPU) is batch


IGNORED = (torch.ones(4, 2), torch.full((4,), -100))


def test_a_batch_in_which_nothing_counts_gives_no_loss_and_is_not_computed():
    one = forward(loss=nn.CrossEntropyLoss())
    assert one.loss(IGNORED, 4) is None
    assert one.batches == 0
    values, weight, *_ = one.measure((torch.ones(4, 2), torch.full((4,), -100)), 4)
    assert (values["loss"], weight) == (0.0, 0.0)


def test_a_weighted_loss_of_weight_zero_gives_no_loss_though_it_is_nan():
    def nothing(model, batch):
        return instep.WeightedLoss(model(batch[0]).sum() * torch.nan, torch.tensor(0))

    assert forward(loss=None, compute_loss=nothing).loss(BATCH, 4) is None


def test_a_weighted_loss_of_weight_zero_counts_with_its_total():
    """As of all anchors of images without an object, where the objects are what is counted."""

    def negatives(model, batch):
        return instep.WeightedLoss(model(batch[0]).sum() * 0 + 6.0, 0)

    one = forward(loss=None, compute_loss=negatives)
    found = one.loss(BATCH, 4)
    assert (found.loss.item(), found.weight, found.factor) == (6.0, 0.0, 1.0)
    assert one.measure(BATCH, 4)[:2] == ({"loss": 6.0}, 0.0)


def test_a_weighted_loss_is_its_total_over_its_weight():
    def two(model, batch):
        return instep.WeightedLoss(model(batch[0]).sum() * 0 + 6.0, 4)

    found = forward(loss=None, compute_loss=two).loss(BATCH, 4)
    assert (found.loss.item(), found.weight) == (1.5, 4.0)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (lambda batch: None, "returned a NoneType, but one number is wanted"),
        (lambda batch: torch.ones(3), "returned a Tensor, but one number is wanted"),
        (lambda batch: -1, "returned -1.0, but a number of 0 or more"),
        (lambda batch: float("nan"), "returned nan"),
    ],
)
def test_a_weight_that_is_no_number_of_zero_or_more_is_refused(weight, words):
    with pytest.raises(RecipeError, match=r"^Recipe\.weight ") as error:
        forward(weight=weight).loss(BATCH, 4)
    assert words in str(error.value)


def test_a_bare_tuple_is_refused_with_the_name_of_what_is_wanted():
    def pair(model, batch):
        return model(batch[0]).sum(), 4

    with pytest.raises(RecipeError, match=r"instep\.WeightedLoss\(total, weight\)"):
        forward(loss=None, compute_loss=pair).loss(BATCH, 4)


def embed(model, batch):
    return model(batch[0]), batch[1]


def spread(model, embeddings, targets):
    return ((embeddings - embeddings.mean()) * (1 + targets)).square().mean()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_loss_of_the_global_batch_is_that_of_one_plain_pass(precision):
    tried = forward(loss=None, embed=embed, batch_loss=spread)
    tried.precision = precision
    step, wide = tried.cached(), torch.arange(8.0).view(4, 2)
    batches = [(wide, torch.zeros(4, 1)), (wide.sin(), torch.ones(4, 1))]
    for number, batch in enumerate(batches):
        step.embed(number, batch, 4)
    step.gather(AloneComm(), 2, CPU)
    loss = step.loss()
    for number, batch in enumerate(batches):
        step.backward(number, batch)
    found = [parameter.grad for parameter in tried.model.parameters()]
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    with tried.autocast():
        plain = spread(tried.model, *embed(tried.model, whole))
    near = 1e-6 if precision == "float32" else 2e-2
    torch.testing.assert_close(loss, plain.detach(), rtol=near, atol=near)
    wanted = torch.autograd.grad(plain, list(tried.model.parameters()))
    torch.testing.assert_close(found, list(wanted), rtol=near, atol=near)
    assert tried.phase == "embed"


def test_what_is_tried_of_a_loss_of_the_global_batch_is_each_embedding():
    tried = forward(loss=None, embed=embed, batch_loss=spread)
    with tried.on(tried.model, "float32", tried.tried):
        whole = tried.loss((torch.arange(8.0).view(4, 2), torch.ones(4, 1)), 4)
        parts = [
            tried.loss((rows, torch.ones(2, 1)), 2) for rows in torch.arange(8.0).view(2, 2, 2)
        ]
    assert float(whole.loss.detach()) == pytest.approx(
        sum(float(part.loss.detach()) for part in parts) / 2
    )
    assert forward().tried == forward().losses


def test_a_validation_batch_is_embedded_and_compared_by_itself():
    tried = forward(loss=None, embed=embed, batch_loss=spread)
    measured = tried.measure((torch.ones(4, 2), torch.ones(4, 1)), 4)
    assert (measured.values, measured.weight) == ({"loss": pytest.approx(0, abs=1e-6)}, 4.0)


def test_a_batch_loss_that_is_no_scalar_is_refused_by_name():
    tried = forward(loss=None, embed=embed, batch_loss=lambda m, e, t: e)
    step = tried.cached()
    step.embed(0, BATCH, 4)
    step.gather(AloneComm(), 1, CPU)
    with pytest.raises(RecipeError, match=r"Recipe.batch_loss returned a tensor of shape \[4, 1\]"):
        step.loss()


def test_a_batch_in_which_nothing_counts_is_computed_where_others_look_at_it():
    ignoring = forward(loss=nn.CrossEntropyLoss())
    ignoring.model = nn.Linear(2, 3)
    batch = (torch.ones(4, 2), torch.full((4,), -100))
    assert ignoring.loss(batch, 4) is None
    found = ignoring.loss(batch, 4, always=True)
    assert found is not None
    assert not found.counts
    clamped = forward(weight=lambda batch: 0.0)
    found = clamped.loss(BATCH, 4, always=True)
    assert found is not None
    assert not found.counts


def test_a_loss_that_is_a_module_is_moved_to_the_device():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    recipe = Recipe(
        model=nn.Linear(3, 2), loss=loss, train=[0], optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    Forward(recipe, recipe.model, torch.device("meta"), "float32")
    assert loss.weight.device.type == "meta"
