"""Losses of torch, and what each is a mean of."""

from __future__ import annotations

import torch
from pair import SAMPLES, Parts, honest, pair, refused, said, samples_of
from torch import nn
from torch.nn import functional as F

from pairs.common import classes, first_of_each_step, images, lengths, mlp, regression

WEIGHTS = (0.2, 3.0, 1.0, 0.1)


def class_weights():
    return torch.tensor(WEIGHTS)


@pair("cross-entropy")
def cross_entropy():
    return Parts(model=mlp(), train=classes(), loss=nn.CrossEntropyLoss())


@pair("class weights")
def weighted_classes():
    weights = class_weights()
    return Parts(
        model=mlp(),
        train=classes(),
        loss=nn.CrossEntropyLoss(weight=weights),
        of=lambda batch: float(weights[batch[1]].sum()),
    )


@pair("class weights, NLL")
def nll():
    return Parts(
        model=nn.Sequential(mlp(), nn.LogSoftmax(1)),
        train=classes(),
        loss=nn.NLLLoss(weight=class_weights()),
    )


@pair("class weights with label smoothing")
def smoothed_weights():
    loss = nn.CrossEntropyLoss(weight=class_weights(), label_smoothing=0.1)
    return Parts(model=mlp(), train=classes(), loss=loss)


@pair("label smoothing")
def smoothed():
    return Parts(model=mlp(), train=classes(), loss=nn.CrossEntropyLoss(label_smoothing=0.2))


@pair("class weights, soft targets")
def soft():
    """With probabilities as targets torch divides by the samples, class weights or not."""
    train = [(x, torch.softmax(torch.randn(4) * 2, 0)) for x, _ in classes()]
    return Parts(model=mlp(), train=train, loss=nn.CrossEntropyLoss(weight=class_weights()))


def some_ignored(count, ignored=-100):
    """The targets of `count` samples say nothing, but in every step there is one that does."""
    needed = first_of_each_step()
    drawn = [i for i in torch.randperm(SAMPLES).tolist() if i not in needed][:count]
    return [
        (x, torch.tensor(ignored) if i in drawn else y % 3) for i, (x, y) in enumerate(classes())
    ]


@pair("ignore_index")
def ignored():
    return Parts(model=mlp(), train=some_ignored(40, 3), loss=nn.CrossEntropyLoss(ignore_index=3))


@pair("ignore_index, micro-batches of nothing")
def nearly_all_ignored():
    """Most micro-batches of two samples have no target at all: their mean is 0 / 0."""
    return Parts(model=mlp(), train=some_ignored(70), loss=nn.CrossEntropyLoss())


@pair("ignore_index and class weights")
def ignored_and_weighted():
    loss = nn.CrossEntropyLoss(weight=class_weights(), ignore_index=0)
    return Parts(model=mlp(), train=classes(), loss=loss)


@pair("segmentation, ignored pixels")
def segmentation():
    def labels(picture):
        target = (picture.sum(0) > 0).long() + (picture[0] > 1).long()
        border = int(torch.randint(0, 8, ()))
        target[:border] = 255
        return target

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    train = [(picture, labels(picture)) for picture, _ in images()]
    return Parts(model=model, train=train, loss=nn.CrossEntropyLoss(ignore_index=255))


@pair("BCE with pos_weight")
def positive():
    train = [(x, (y > 0.5).to(x)) for x, y in regression()]
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([5.0, 0.3, 1.0]))
    return Parts(model=mlp(outputs=3), train=train, loss=loss)


@pair("mean squared error")
def squares():
    return Parts(model=mlp(outputs=3), train=regression(), loss=nn.MSELoss())


@pair("Huber")
def huber():
    return Parts(model=mlp(outputs=3), train=regression(), loss=nn.HuberLoss(delta=0.5))


@pair("KL divergence, batchmean")
def divergence():
    train = [(x, torch.softmax(torch.randn(4), 0)) for x, _ in classes()]
    model = nn.Sequential(mlp(), nn.LogSoftmax(1))
    return Parts(model=model, train=train, loss=nn.KLDivLoss(reduction="batchmean"))


@pair("cosine embedding")
def cosine():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x)

    inputs, other = torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 6)
    sign = torch.where(torch.rand(SAMPLES) < 0.5, 1, -1)
    loss = nn.CosineEmbeddingLoss(margin=0.1)
    return Parts(
        model=Two(),
        train=list(zip(inputs, other, sign, strict=True)),
        compute_loss=lambda model, b: loss(model(b[0]), model(b[1]), b[2]),
        given={"weight": samples_of},
    )


@pair("CTC")
def ctc():
    """A mean over samples of a mean over each one's targets."""
    sizes = lengths(5)
    targets = [torch.randint(1, 5, (size,)) for size in sizes]
    train = [(torch.randn(14, 6), target) for target in targets]

    def collate(samples):
        inputs = torch.stack([x for x, _ in samples])
        target = nn.utils.rnn.pad_sequence([y for _, y in samples], batch_first=True)
        return inputs, target, torch.tensor([len(y) for _, y in samples])

    def loss(model, batch):
        inputs, target, sizes = batch
        logs = model(inputs).log_softmax(2).transpose(0, 1)
        return F.ctc_loss(logs, target, torch.full_like(sizes, 14), sizes, reduction="mean")

    return Parts(
        model=mlp(outputs=5),
        train=train,
        collate=collate,
        compute_loss=loss,
        given={"weight": samples_of},
    )


@pair("Gaussian likelihood")
def likelihood():
    def loss(model, batch):
        mean, spread = model(batch[0]).chunk(2, 1)
        return F.gaussian_nll_loss(mean, batch[1], F.softplus(spread) + 0.1)

    return Parts(
        model=mlp(outputs=6),
        train=regression(),
        compute_loss=loss,
        given={"weight": samples_of},
    )


@pair("two heads")
def two_heads():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
            self.kind, self.size = nn.Linear(16, 4), nn.Linear(16, 2)

        def forward(self, x):
            x = self.body(x)
            return self.kind(x), self.size(x)

    def loss(model, batch):
        kind, size = model(batch[0])
        return F.cross_entropy(kind, batch[1]) + 0.5 * F.mse_loss(size, batch[2])

    train = [(x, y, x[:2].sin()) for x, y in classes()]
    return Parts(model=Heads(), train=train, compute_loss=loss, given={"weight": samples_of})


@pair("two heads, one with ignored targets", said("micro-batch|gradient|apart"))
def two_denominators():
    """Two means of two different things: no one weight is right, and samples are not."""
    model = nn.ModuleDict({"kind": mlp(), "size": mlp(outputs=2)})

    def loss(model, batch):
        kind = F.cross_entropy(model["kind"](batch[0]), batch[1], reduction="sum", ignore_index=0)
        kind = kind / (batch[1] != 0).sum().clamp(min=1)
        return kind + F.mse_loss(model["size"](batch[0]), batch[2])

    train = [(x, y, x[:2].sin()) for x, y in classes()]
    return Parts(model=model, train=train, compute_loss=loss, given={"weight": samples_of})


@pair("gradient penalty")
def penalty():
    """A loss that is made of a gradient."""

    def loss(model, batch):
        inputs = batch[0].detach().requires_grad_()
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.mse_loss(outputs, batch[1]) + 0.1 * slope.square().sum(1).mean()

    return Parts(
        model=mlp(outputs=3),
        train=regression(),
        compute_loss=loss,
        given={"weight": samples_of},
    )


@pair("a backward within compute_loss", refused("backward.*loss that you return"))
def backward_within():
    def loss(model, batch):
        found = F.mse_loss(model(batch[0]), batch[1])
        (0.5 * model(batch[0]).square().mean()).backward()
        return found

    return Parts(
        model=mlp(outputs=3),
        train=regression(),
        compute_loss=loss,
        given={"weight": samples_of},
    )


@pair("an attack on the inputs by backward, its gradients dropped", refused("autograd.grad"))
def attacked():
    """The textbook's FGSM: no gradient is left when the loss is returned."""

    def loss(model, batch):
        inputs = batch[0].detach().requires_grad_()
        F.mse_loss(model(inputs), batch[1]).backward()
        model.zero_grad()
        return F.mse_loss(model((inputs + 0.1 * inputs.grad.sign()).detach()), batch[1])

    return Parts(
        model=mlp(outputs=3),
        train=regression(),
        compute_loss=loss,
        given={"weight": samples_of},
    )


@pair("weight decay in the loss")
def decay_in_loss():
    """A term that no batch changes."""

    def loss(model, batch):
        decay = sum(p.square().sum() for p in model.parameters())
        return F.mse_loss(model(batch[0]), batch[1]) + 1e-3 * decay

    return Parts(
        model=mlp(outputs=3),
        train=regression(),
        compute_loss=loss,
        given={"weight": samples_of},
    )


@pair("a loss of the user's own, no weight", said("^not shown.*(weight|loss)"))
def own_loss():
    return Parts(
        model=mlp(outputs=3),
        train=regression(),
        loss=lambda outputs, target: (outputs - target).abs().pow(1.5).mean(),
    )


@pair("a loss of the user's own, weighed by samples")
def own_loss_weighed():
    return Parts(
        model=mlp(outputs=3),
        train=regression(),
        loss=lambda outputs, target: (outputs - target).abs().pow(1.5).mean(),
        given={"weight": samples_of},
    )


@pair("a loss of the user's own, weighed by the len of a tuple (wrong)", honest("weight"))
def own_loss_weighed_by_fields():
    """`len((inputs, target))` is 2: wrong wherever micro-batches are of different sizes, and right
    here, where they are not."""
    return Parts(
        model=mlp(outputs=3),
        train=regression(),
        loss=lambda outputs, target: (outputs - target).abs().pow(1.5).mean(),
        given={"weight": len},
    )


@pair("sum loss of torch", refused("sum", alone=False))
def sum_of_torch():
    return Parts(
        model=mlp(),
        train=classes(),
        loss=nn.CrossEntropyLoss(reduction="sum"),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.002),
    )


@pair("sum loss of the user's own", refused("sum", alone=False))
def own_sum():
    return Parts(
        model=mlp(outputs=3),
        train=regression(),
        compute_loss=lambda model, batch: (model(batch[0]) - batch[1]).square().sum(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.001),
    )


@pair("a bare tuple from compute_loss", refused("tuple"))
def bare_tuple():
    return Parts(
        model=mlp(outputs=3),
        train=regression(),
        compute_loss=lambda model, batch: ((model(batch[0]) - batch[1]).square().sum(), 12),
    )
