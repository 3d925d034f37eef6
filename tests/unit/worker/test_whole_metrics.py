"""Metrics of the whole dataset: the same bits at any number of workers, those of torchmetrics."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks
from instep.data.loader import Loader
from instep.errors import RecipeError
from instep.recipe.forward import Forward
from instep.recipe.metrics import WholeMetrics, is_whole, number
from instep.recipe.recipe import Recipe
from instep.worker.passes.evaluate import Sharing, evaluate
from instep.worker.passes.in_order import decoded, encoded
from lazily import Lazy

torchmetrics = Lazy("torchmetrics")

SAMPLES, BATCH = 61, 7


class InTheOrderOfSamples:
    """Depends on the order of batches, to the bit."""

    def reset(self):
        self.value, self.rows = 0.0, []

    def update(self, outputs, targets):
        self.rows += targets[:, 0].tolist()
        for row in outputs.flatten().tolist():
            self.value = math.sin(self.value) * 1.7 + row

    def compute(self):
        return self.value


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    noise = torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(inputs, (inputs[:, :1] + noise > 0).float())


def linear():
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.9, 0.1, -0.2, 0.05]]))
        model.bias.fill_(0.1)
    return model


def whole_metrics():
    return {
        "ordered": InTheOrderOfSamples(),
        "mean": lambda outputs, target: (outputs - target).abs().mean(),
        "auroc": Flat(torchmetrics.classification.BinaryAUROC()),
        "f1": Flat(torchmetrics.F1Score("binary")),
        "auroc_in_bins": Flat(torchmetrics.classification.BinaryAUROC(thresholds=11)),
    }


class Flat:
    """A metric of torchmetrics, of columns."""

    def __init__(self, metric):
        self.metric = metric
        self.reset, self.compute = metric.reset, metric.compute

    def update(self, outputs, targets):
        self.metric.update(torch.sigmoid(outputs.flatten()), targets.flatten().long())


def found(comm, speeds=None, samples=SAMPLES, **given):
    dataset, model = data(), linear()
    parts = {"loss": nn.functional.mse_loss, "metrics": whole_metrics()} | given
    recipe = Recipe(
        model=model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=[0],
        validate=dataset,
        **parts,
    )
    loader = Loader(dataset, seed=0, shuffle=False, processes=0)
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    try:
        return evaluate(forward, loader, samples, BATCH, comm, Sharing(speeds)).metrics
    finally:
        loader.close()


@pytest.fixture(scope="module")
def of_one():
    return found(AloneComm())


def test_every_metric_is_that_of_one_process_over_the_whole_dataset_bit_for_bit(of_one):
    inputs, target = data().tensors
    truth = whole_metrics()
    mean = truth.pop("mean")
    with torch.no_grad():
        model = linear()
        for metric in truth.values():
            metric.reset()
            for first in range(0, SAMPLES, BATCH):
                part = slice(first, first + BATCH)
                metric.update(model(inputs[part]), target[part])
    assert {name: float(metric.compute()) for name, metric in truth.items()} == {
        name: of_one[name] for name in truth
    }
    with torch.no_grad():
        assert of_one["mean"] == pytest.approx(float(mean(linear()(inputs), target)))
    assert list(of_one) == ["loss", *whole_metrics()]
    assert 0.6 < of_one["auroc"] < 1.0


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("speeds", [None, (1.0, 0.1, 3.0, 1.0, 0.5)])
def test_any_number_of_workers_gives_the_same_bits(of_one, workers, speeds):
    given = None if speeds is None else speeds[:workers]
    for metrics in run_ranks(workers, lambda comm: found(comm, given)):
        assert metrics == of_one


def test_a_second_validation_begins_anew(of_one):
    metrics = whole_metrics()
    for _ in range(2):
        assert found(AloneComm(), metrics=metrics) == of_one


def test_predict_and_targets_say_what_metrics_compare_where_there_is_no_loss(of_one):
    parts = {
        "loss": None,
        "compute_loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        "predict": lambda model, batch: model(batch[0]),
        "targets": lambda batch: batch[1],
    }
    for metrics in run_ranks(3, lambda comm: found(comm, **parts)):
        assert metrics == of_one


WORDS = ["the cat sat on the mat", "a dog ran over the hill today", "the mat is on the floor"]
SAID = ["the cat sat on a mat", "a dog ran over a hill today", "the mat is on the floor here"]


def test_text_travels_too():
    def texts(batch):
        return [round(float(each)) % 3 for each in batch[0][:, 0] * 10]

    parts = {
        "loss": None,
        "compute_loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        "predict": lambda model, batch: [SAID[at] for at in texts(batch)],
        "targets": lambda batch: [[WORDS[at]] for at in texts(batch)],
    }
    first, *others = run_ranks(
        3,
        lambda comm: found(comm, **parts, metrics={"bleu": torchmetrics.text.BLEUScore(n_gram=2)}),
    )
    assert all(each == first for each in others)
    every = texts([data().tensors[0]])
    truth = torchmetrics.text.BLEUScore(n_gram=2)
    truth.update([SAID[at] for at in every], [[WORDS[at]] for at in every])
    assert first["bleu"] == pytest.approx(float(truth.compute()), rel=1e-6)


def test_several_classes_as_torchmetrics_has_them():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(50, 3, generator=generator)
    target = torch.randint(3, (50,), generator=generator)
    whole, truth = (
        WholeMetrics({"f1": torchmetrics.classification.MulticlassF1Score(3)}),
        torchmetrics.classification.MulticlassF1Score(3),
    )
    for first in range(0, 50, 8):
        whole.update(logits[first : first + 8], target[first : first + 8])
    truth.update(logits, target)
    assert whole.compute() == [float(truth.compute())]


def test_what_is_sent_arrives_with_its_bits_and_form():
    value = {
        "a": (torch.randn(3, 2).bfloat16(), [torch.tensor([True, False]), torch.zeros(0, 5)]),
        "text": ["ä", None, 1.5, 7],
        3: torch.tensor(float("nan")),
    }
    back = decoded(encoded(value))
    assert list(back) == ["a", "text", 3]
    assert torch.equal(back["a"][0], value["a"][0])
    assert back["a"][0].dtype == torch.bfloat16
    assert back["a"][1][1].shape == (0, 5)
    assert isinstance(back["a"], tuple)
    assert back["text"] == value["text"]
    assert back[3].isnan()


def test_an_output_that_cannot_be_sent_is_named():
    with pytest.raises(RecipeError, match="were given a object"):
        encoded([object()])


def test_what_is_no_number_is_refused():
    collection = torchmetrics.MetricCollection([torchmetrics.classification.MulticlassF1Score(3)])
    assert not is_whole(torchmetrics.F1Score)
    assert all(is_whole(each) for each in {**collection}.values())
    with pytest.raises(RecipeError, match=r"dict of 'rouge1', 'rouge2', but one number is wanted"):
        number({"rouge1": 1.0, "rouge2": 2.0}, "rouge")
    per_class = torchmetrics.classification.MulticlassF1Score(3, average="none")
    with pytest.raises(RecipeError, match=r"shape \[3\]"):
        WholeMetrics({"f1": per_class}).rehearse(torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))


def test_metrics_without_targets_are_refused_where_there_is_no_loss():
    with pytest.raises(RecipeError, match=r"which compute_loss does not give. Give predict=.*targ"):
        found(AloneComm(), loss=None, compute_loss=lambda model, batch: None)
