"""Where a trial of a few batches is easily wrong: small effects, state, settings that meet."""

from __future__ import annotations

import threading

import torch
from pair import SAMPLES, Parts, honest, pair, refused, said, samples_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import instep
from pairs.common import classes, first_of_each_step, gentle_adamw, lengths, mlp, regression
from pairs.draws import Dropping, WithDropout
from pairs.layers import COMPARED, Centred, classifier
from pairs.losses import WEIGHTS
from pairs.networks import Mixture
from pairs.tokens import count, mean_over_tokens, padded, reader, sentences, total

# ---- small effects


@pair("mixture of experts, a little load balance", said(COMPARED + "|weight|loss"))
def little_balance():
    """The usual coefficient: the term is a hundredth of the loss."""

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * model.balance

    return Parts(model=Mixture(), train=classes(), compute_loss=loss, given={"weight": samples_of})


class Faint(nn.Module):
    """Centres its batch by a five-hundredth."""

    def forward(self, x):
        return x - 0.002 * x.mean(0)


@pair("a layer that looks at its batch a little", said(COMPARED))
def faint():
    return classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Faint(), nn.Linear(8, 4)))


@pair("a small decorrelation term", said(COMPARED + "|weight|loss"))
def decorrelated():
    """Barlow's: the covariances of the outputs, over the batch."""

    def loss(outputs, target):
        centred = outputs - outputs.mean(0)
        covariance = centred.T @ centred / len(outputs)
        off = covariance - torch.diag(covariance.diag())
        return F.cross_entropy(outputs, target) + 0.01 * off.square().sum()

    return Parts(model=mlp(), train=classes(), loss=loss, given={"weight": samples_of})


# ---- ways around what a pass is given


@pair("a penalty on parameters, by a closure", said("not given as an argument"))
def penalised():
    model = mlp()

    def loss(outputs, target):
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return F.cross_entropy(outputs, target) + 1e-2 * penalty

    return Parts(model=model, train=classes(), loss=loss, given={"weight": samples_of})


class Scaled(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs, target):
        return self.scale * F.cross_entropy(outputs, target)


class WithCriterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.criterion = mlp(), Scaled()

    def forward(self, x):
        return self.body(x)


@pair("a criterion that is part of the model")
def criterion():
    model = WithCriterion()
    return Parts(model=model, train=classes(), loss=model.criterion, given={"weight": samples_of})


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2).sub_(0.5)


@pair("inputs changed in place")
def in_place():
    return classifier(nn.Sequential(InPlace(), *mlp()))


@pair("the hardest samples, where there are many", said(COMPARED))
def hardest():
    def loss(outputs, target):
        each = F.cross_entropy(outputs, target, reduction="none")
        return each.topk(6).values.mean() if len(each) > 6 else each.mean()

    return Parts(model=mlp(), train=classes(), loss=loss, given={"weight": samples_of})


# ---- draws beside something else


@pair("dropout and BatchNorm", said("batch_?norm|norm"), draws=True)
def dropout_and_batch_norm():
    layers = (nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    return classifier(nn.Sequential(*layers))


@pair("dropout and a layer that centres its batch", said(COMPARED), draws=True)
def dropout_and_centred():
    layers = (nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), Centred(), nn.Linear(16, 4))
    return classifier(nn.Sequential(*layers))


@pair("dropout and contrastive", said(COMPARED), draws=True)
def simcse():
    """SimCSE: two draws of each sample, told apart from those of the others."""

    def loss(model, batch):
        one, other = (F.normalize(model(batch[0]), dim=1) for _ in range(2))
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one), device=one.device))

    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8))
    return Parts(model=model, train=classes(), compute_loss=loss, given={"weight": samples_of})


@pair("mixup", said(COMPARED), draws=True)
def mixup():
    """Each sample is mixed with another of its batch: of two, where one machine has twelve."""

    def loss(model, batch):
        inputs, target = batch
        other, share = torch.randperm(len(inputs)), torch.rand(())
        outputs = model(share * inputs + (1 - share) * inputs[other])
        return share * F.cross_entropy(outputs, target) + (1 - share) * F.cross_entropy(
            outputs, target[other]
        )

    return Parts(model=mlp(), train=classes(), compute_loss=loss, given={"weight": samples_of})


class Mixed(nn.Module):
    """Mixes each sample with another, whose order is that of numbers drawn."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        if self.training:
            x = 0.8 * x + 0.2 * x[torch.rand(len(x)).argsort()]
        return self.body(x)


@pair("mixup by sorted draws", said(COMPARED), draws=True)
def mixup_by_sorted_draws():
    return Parts(model=Mixed(), train=classes(), loss=nn.CrossEntropyLoss())


class Masked(nn.Module):
    """Drops features that are chosen by sorted draws, for each sample apart."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        if self.training:
            x = x.scatter(1, torch.rand_like(x).argsort(dim=1)[:, :2], 0.0)
        return self.body(x)


@pair("features masked by sorted draws", draws=True)
def masked_by_sorted_draws():
    return Parts(model=Masked(), train=classes(), loss=nn.CrossEntropyLoss())


# ---- settings


@pair("class weights and gradient clipping", train={"max_grad_norm": 0.2})
def weights_and_clipping():
    """It is the gradient of the true mean that is clipped."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS))
    return Parts(model=mlp(), train=classes(), loss=loss)


@pair("class weights, some of them 0")
def zero_weights():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 3.0, 0.5]))
    return Parts(model=mlp(), train=classes(), loss=loss)


@pair("class weights, never merged", train={"merge": "never"})
def weights_never_merged():
    loss = nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS))
    return Parts(model=mlp(), train=classes(), loss=loss)


@pair("padded tokens, always merged", train={"merge": "always"})
def tokens_always_merged():
    return reader(given={"weight": count})


@pair("padded tokens, the same bits", train={"determinism": "bits"})
def tokens_by_bits():
    return reader(given={"weight": count})


@pair("class weights, the same bits", train={"determinism": "bits"})
def weights_by_bits():
    loss = nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS))
    return Parts(model=mlp(), train=classes(), loss=loss)


@pair("dropout and padded tokens, the same bits", draws=True, train={"determinism": "bits"})
def dropout_by_bits():
    return Parts(
        model=WithDropout(),
        train=sentences(),
        collate=padded,
        compute_loss=mean_over_tokens,
        of=count,
        given={"weight": count},
    )


@pair("BatchNorm, always merged", said("batch_?norm|norm|merge"), train={"merge": "always"})
def batch_norm_always_merged():
    return classifier(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)))


@pair("dropout, always merged", said("merge|draw|dropout"), draws=True, train={"merge": "always"})
def dropout_always_merged():
    """A larger pass draws other numbers, so the result depends on the number of workers."""
    layers = (nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))
    return classifier(nn.Sequential(*layers))


# ---- weights


@pair("padded tokens, micro-batches of nothing")
def tokens_of_nothing():
    """A text of one token has none to predict: often a micro-batch's mean is 0 / 0."""
    needed = first_of_each_step()
    texts = [
        (torch.randint(1, 20, (1 if number % 3 and number not in needed else size,)),)
        for number, size in enumerate(lengths(12, 2))
    ]
    return reader(
        train=texts,
        compute_loss=lambda model, batch: (
            total(model, padded_to_two(batch)) / count(padded_to_two(batch))
        ),
        given={"weight": count},
    )


def padded_to_two(batch):
    """At least two columns, so that there is something to predict from."""
    return {"tokens": F.pad(batch["tokens"], (0, max(0, 2 - batch["tokens"].shape[1])))}


@pair("WeightedLoss of importance weights")
def importance():
    """Each sample has a weight of its own, far from 1."""

    def parts(model, batch):
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (each * batch[2]).sum(), batch[2].sum()

    def plain(model, batch):
        summed, weight = parts(model, batch)
        return summed / weight

    train = [(x, y, torch.rand(()) ** 4 * 10) for x, y in classes()]
    return Parts(
        model=mlp(),
        train=train,
        compute_loss=plain,
        given={"compute_loss": lambda model, batch: instep.WeightedLoss(*parts(model, batch))},
    )


def detector():
    """Every anchor counts in the sum, which is divided by those that hold an object: often none."""

    def parts(model, batch):
        anchors, objects = model(batch[0]), batch[1]
        return F.binary_cross_entropy_with_logits(anchors, objects, reduction="sum"), objects.sum()

    def plain(model, batch):
        summed, objects = parts(model, batch)
        return summed / objects

    held = torch.zeros(SAMPLES, 4)
    held[::5, 1] = held[list(first_of_each_step()), 3] = 1.0
    return Parts(
        model=mlp(),
        train=list(zip(torch.randn(SAMPLES, 6), held, strict=True)),
        compute_loss=plain,
        given={"compute_loss": lambda model, batch: instep.WeightedLoss(*parts(model, batch))},
    )


@pair("detection, micro-batches without an object", train={"merge": "never"})
def few_objects():
    return detector()


@pair("detection, the same bits", train={"determinism": "bits"})
def few_objects_to_the_bit():
    return detector()


class Focal(nn.CrossEntropyLoss):
    """A loss that inherits from torch's, and divides by the samples whatever the weights are."""

    def forward(self, outputs, target):
        each = F.cross_entropy(outputs, target, weight=self.weight, reduction="none")
        return ((1 - (-each).exp()).clamp(min=0).square() * each).mean()


@pair("a subclass of torch's loss that divides otherwise", said("weight|loss|focal"))
def subclass():
    loss = Focal(weight=torch.tensor(WEIGHTS))
    return Parts(model=mlp(), train=classes(), loss=loss)


@pair("a subclass of torch's loss, weighed by samples")
def subclass_weighed():
    loss = Focal(weight=torch.tensor(WEIGHTS))
    return Parts(model=mlp(), train=classes(), loss=loss, given={"weight": samples_of})


class Tagger(nn.Module):
    """A class of each token, as [samples, classes, tokens]."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, tokens):
        return self.out(self.embed(tokens).tanh()).transpose(1, 2)


def tagged(fill):
    def collate(samples):
        tokens = pad_sequence([x for (x,) in samples], batch_first=True)
        return tokens, torch.where(tokens > 0, tokens % 4, fill)

    return collate


@pair("a class of each token, padding ignored")
def tags():
    loss = nn.CrossEntropyLoss()
    return Parts(model=Tagger(), train=sentences(), collate=tagged(-100), loss=loss)


@pair("a class of each token, padding counted", said(COMPARED + "|weight|loss|padd"))
def tags_of_padding():
    """How much padding there is depends on the longest text of the batch."""
    loss = nn.CrossEntropyLoss()
    return Parts(model=Tagger(), train=sentences(), collate=tagged(0), loss=loss)


@pair("mean squared error over padded sequences", said(COMPARED + "|weight|loss|padd"))
def padded_squares():
    def collate(samples):
        inputs = pad_sequence([x for (x,) in samples], batch_first=True)
        return inputs, inputs.sin()

    train = [(torch.randn(size, 6),) for size in lengths(10, 1)]
    return Parts(model=mlp(outputs=6), train=train, collate=collate, loss=nn.MSELoss())


# ---- what a model does to itself


@pair("an embedding with a largest norm", refused("parameter", alone=False))
def largest_norm():
    """Scales down the rows that a batch looks up, in place: each worker others."""

    class Limited(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 8, max_norm=1.5), nn.Linear(8, 3)

        def forward(self, tokens):
            return self.out(self.embed(tokens).sum(1))

    train = [(torch.randint(0, 20, (4,)), number % 3) for number in range(SAMPLES)]
    return Parts(model=Limited(), train=train, loss=nn.CrossEntropyLoss())


@pair("parameters clamped by the forward pass", refused("parameter", alone=False))
def clamped_parameters():
    class Clamping(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            for parameter in self.body.parameters():
                parameter.data.clamp_(-0.2, 0.2)
            return self.body(x)

    return classifier(Clamping())


@pair("a table that is kept in an attribute")
def kept_table():
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.table = mlp(), None

        def forward(self, x):
            if self.table is None or self.table.dtype != x.dtype:
                self.table = torch.linspace(0, 1, 6, dtype=x.dtype, device=x.device)
            return self.body(x + self.table)

    return classifier(Places())


@pair("a model that cannot be copied", honest("cop(y|ied)|cannot be tried"))
def holds_a_lock():
    model = mlp()
    model.lock = threading.Lock()
    return classifier(model)


@pair("weight norm, the old way", honest("cop(y|ied)"))
def old_weight_norm():
    """Keeps a weight with a history beside its parameters, which `deepcopy` refuses."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    nn.utils.weight_norm(model[0])
    return classifier(model)


class Remembered(nn.Module):
    """Keeps its last output, for a term of the loss."""

    def __init__(self):
        super().__init__()
        self.body, self.last = mlp(outputs=3), None

    def forward(self, x):
        self.last = self.body(x)
        return self.last


@pair("an output kept for the loss")
def kept_output():
    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1]) + 0.1 * model.last.abs().mean()

    return Parts(
        model=Remembered(), train=regression(), compute_loss=loss, given={"weight": samples_of}
    )


@pair("a buffer that was made in the first pass", said("as one batch"))
def buffer_of_first_pass():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()
            self.register_buffer("mean", None)

        def forward(self, x):
            if self.mean is None:
                self.mean = x.mean(0)
            return self.body(x - self.mean)

    return classifier(Late())


@pair("transformer without its dropout")
def undropped():
    """Dropout of 0 draws nothing."""
    model = Dropping()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    train = [(torch.randn(3, 4, 4), number % 4) for number in range(SAMPLES)]
    return Parts(model=model, train=train, loss=nn.CrossEntropyLoss(), optimizer=gentle_adamw)
