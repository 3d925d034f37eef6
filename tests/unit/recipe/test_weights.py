"""What a loss of torch, or of a Hugging Face model, is a mean of."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from instep.errors import RecipeError
from instep.recipe.forward import Forward
from instep.recipe.weights import (
    _BY_SAMPLES,
    DERIVED,
    class_weights,
    derive,
    is_sum,
    kept,
    weighing,
)
from instep.worker.trial.sameness import mean_of
from lazily import Lazy

transformers = Lazy("transformers")

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGET = torch.tensor([0, 1, 1, 3, 2, 3])
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 7.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight": WEIGHT},
        {"ignore_index": 1},
        {"weight": WEIGHT, "ignore_index": 3},
        {"weight": WEIGHT, "label_smoothing": 0.2},
    ],
    ids=lambda settings: " and ".join(settings) or "plain",
)
def test_the_weight_times_the_mean_of_cross_entropy_is_its_sum(settings):
    mean, total = nn.CrossEntropyLoss(**settings), nn.CrossEntropyLoss(reduction="sum", **settings)
    weigh = weighing(None, mean).weigh
    weight = weigh((LOGITS, TARGET))
    assert weight * float(mean(LOGITS, TARGET)) == pytest.approx(float(total(LOGITS, TARGET)))
    by_function = weighing(None, functools.partial(functional.cross_entropy, **settings)).weigh
    assert by_function((LOGITS, TARGET)) == weight


@pytest.mark.filterwarnings("ignore:reduction")  # torch's own, of KLDivLoss
@pytest.mark.parametrize("kind", _BY_SAMPLES)
def test_what_is_in_a_batch_counts_where_the_users_code_makes_it(kind):
    """A mean over a batch is that of its parts, though `collate` left samples out of one."""
    loss = getattr(nn, kind)()
    values = LOGITS.sigmoid()
    target = {
        "MultiMarginLoss": TARGET,
        "MultiLabelMarginLoss": torch.tensor([[0, 1, -1, -1]] * 6),
        "HingeEmbeddingLoss": LOGITS.sign(),
        "SoftMarginLoss": LOGITS.sign(),
    }.get(kind, values.flip(0))
    weigh = weighing(None, loss, collates=True).weigh
    parts = [(values[part], target[part]) for part in (slice(5), slice(5, 6))]
    weights = [weigh(part) for part in parts]
    mean = sum(w * float(loss(*part)) for w, part in zip(weights, parts, strict=True))
    assert mean / sum(weights) == pytest.approx(float(loss(values, target)))


def test_probabilities_as_targets_count_one_each_whatever_the_classes_weigh():
    target = LOGITS.softmax(1)
    mean = functional.cross_entropy(LOGITS, target, WEIGHT)
    total = functional.cross_entropy(LOGITS, target, WEIGHT, reduction="sum")
    assert class_weights(target, WEIGHT) * float(mean) == pytest.approx(float(total))


@pytest.mark.parametrize(
    ("loss", "known", "name"),
    [
        (nn.MSELoss(), True, "nn.MSELoss"),
        (functional.mse_loss, True, "nn.MSELoss"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)), True, "nn.BCEWithLogitsLoss"),
        (nn.KLDivLoss(reduction="batchmean"), True, "nn.KLDivLoss"),
        (lambda outputs, target: outputs.mean(), False, "Recipe.loss"),
        (type("Own", (nn.MSELoss,), {})(), False, "Recipe.loss"),
        (None, False, "compute_loss"),
    ],
)
def test_a_loss_of_torch_is_known_and_one_of_the_users_own_is_not(loss, known, name):
    weighed = weighing(None, loss)
    assert (weighed.known, weighed.name, weighed.weigh) == (known, name, None)
    assert weighing(len, loss).known


def test_a_sum_is_known_as_one():
    assert is_sum(nn.CrossEntropyLoss(reduction="sum"))
    assert is_sum(functools.partial(functional.mse_loss, reduction="sum"))
    assert not is_sum(nn.MSELoss())
    assert not is_sum(lambda o, t: (o - t).sum())


def test_a_target_that_is_no_tensor_is_refused():
    with pytest.raises(RecipeError, match="a list, but cross entropy wants a tensor"):
        weighing(None, nn.CrossEntropyLoss()).weigh((LOGITS, [1, 2]))


def own_loss(model, batch):
    return model(**batch).loss


def texts():
    tokens = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 3:] = -100
    labels[1, :2] = -100
    return tokens, labels


@pytest.mark.parametrize(
    ("made", "of_class", "expected", "weight"),
    [
        ("gpt2", "GPT2LMHeadModel", "next tokens", 6 * 3 - 4 - 1),
        ("bert", "BertForTokenClassification", "tokens", 7 * 3 - 4 - 2),
        ("bert", "BertForSequenceClassification", "tokens", 3),
    ],
    ids=["next tokens", "tokens", "texts"],
)
def test_what_a_hugging_face_loss_is_a_mean_of_is_found(made, of_class, expected, weight):
    torch.manual_seed(0)
    small = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = (
        transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16)
        if made == "gpt2"
        else transformers.BertConfig(**small, intermediate_size=16, num_labels=20)
    )
    model = getattr(transformers, of_class)(config).eval()
    tokens, labels = texts()
    if of_class == "BertForSequenceClassification":
        labels = torch.tensor([4, 0, 9])
    batch = {"input_ids": tokens, "labels": labels}
    found = derive(model, own_loss, batch)
    assert found == {expected}
    assert DERIVED[expected](batch) == weight
    assert derive(model, lambda m, b: 2 * own_loss(m, b), batch) == set()
    assert derive(nn.Linear(2, 2), own_loss, batch) == set()


class Recipe(NamedTuple):
    """As much of one as a forward pass asks for."""

    compute_loss: Any
    loss: Any = None
    weight: Any = None
    embed: Any = None
    batch_loss: Any = None
    turns: Any = ()
    collates: bool = False


@pytest.mark.parametrize("seed", range(6))
def test_what_the_loss_of_a_fresh_t5_is_a_mean_of_is_not_mistaken(seed):
    """Its loss is near the logarithm of the vocabulary, whichever tokens are left out."""
    torch.manual_seed(seed)
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=20, **small, decoder_start_token_id=0)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [
        {"input_ids": tokens, "labels": tokens.flip(1)}
        for tokens in torch.randint(0, 20, (4, 3, 7))
    ]
    forward = Forward(Recipe(own_loss), model, torch.device("cpu"), "float32")
    assert mean_of(forward, batches, seed=7) == "tokens"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert forward.model is model


def test_one_batch_is_not_enough_to_say_what_a_loss_is_a_mean_of():
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    )
    tokens, labels = texts()
    batch = {"input_ids": tokens, "labels": labels}
    forward = Forward(Recipe(own_loss), model, torch.device("cpu"), "float32")
    assert mean_of(forward, [batch], seed=7) == ""
    assert mean_of(forward, [batch, batch], seed=7) == "next tokens"


@pytest.mark.parametrize(
    ("shapes", "samples", "count"),
    [
        (((3, 6), (3,)), 3, 3),
        (((2, 3), (2,)), 3, 2),  # one was left out, and each has as many numbers
        (((0, 6), (0,)), 3, 0),
        (((5, 3, 6), (5, 3)), 3, 3),  # time comes first
        (((2, 6), (2, 6), (2,)), 3, 2),  # not (inputs, target)
        (((9, 6), (2, 12), (9,)), 3, 3),  # packed: the shapes do not show it
    ],
)
def test_the_samples_of_a_batch_are_counted_by_its_shapes(shapes, samples, count):
    assert kept([torch.zeros(shape) for shape in shapes], samples) == count
