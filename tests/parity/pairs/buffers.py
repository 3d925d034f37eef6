"""Buffers that a forward pass moves: averages, and everything else."""

from __future__ import annotations

import torch
from pair import Parts, pair, refused, said, samples_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from pairs.common import classes, mlp, regression


class Queue(nn.Module):
    """MoCo: the last keys are what a query is told apart from."""

    def __init__(self):
        super().__init__()
        self.encoder = mlp(outputs=8)
        self.register_buffer("queue", F.normalize(torch.randn(24, 8), dim=1))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, one, other):
        query = F.normalize(self.encoder(one), dim=1)
        with torch.no_grad():
            key = F.normalize(self.encoder(other), dim=1)
        right = (query * key).sum(1, keepdim=True)
        logits = torch.cat([right, query @ self.queue.clone().T], 1) / 0.2
        rows = (self.at + torch.arange(len(key), device=key.device)) % len(self.queue)
        self.queue[rows] = key
        self.at.copy_((self.at + len(key)) % len(self.queue))
        return logits


@pair("MoCo, a queue of keys", said("queue"))
def moco():
    def loss(model, batch):
        noisy = batch[0] + 0.1 * batch[0].roll(1, 1)
        logits = model(batch[0], noisy)
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long))

    return Parts(model=Queue(), train=classes(), compute_loss=loss, given={"weight": samples_of})


class Momentum(nn.Module):
    """A second encoder that follows the first, moved by the forward pass."""

    def __init__(self):
        super().__init__()
        self.encoder, self.slow = mlp(outputs=8), mlp(outputs=8)
        self.slow.load_state_dict(self.encoder.state_dict())
        self.slow.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.encoder.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.slow(x.flip(1))
        return (self.encoder(x) - target).square().sum(1).mean() - self.encoder(x)[:, 0].mean()


@pair("momentum encoder of frozen parameters", refused("frozen|buffer", alone=False))
def momentum_of_parameters():
    return Parts(
        model=Momentum(),
        train=classes(),
        compute_loss=lambda model, batch: model(batch[0]),
        given={"weight": samples_of},
    )


class MomentumBuffers(nn.Module):
    """The same, its slow half in buffers: they follow the parameters, whatever the batch is."""

    def __init__(self):
        super().__init__()
        self.fast = nn.Linear(6, 8)
        self.register_buffer("slow", self.fast.weight.detach().clone())

    def forward(self, x):
        with torch.no_grad():
            self.slow.mul_(0.9).add_(self.fast.weight, alpha=0.1)
        return (self.fast(x) - x.flip(1) @ self.slow.T).square().sum(1).mean() - self.fast(
            x
        ).sin().mean()


@pair("momentum encoder of buffers")
def momentum_of_buffers():
    """A pass begins with the committed buffers, so every one of them moves them alike."""
    return Parts(
        model=MomentumBuffers(),
        train=classes(),
        compute_loss=lambda model, batch: model(batch[0]),
        given={"weight": samples_of},
    )


class Codebook(nn.Module):
    """VQ-VAE: the codes follow moving sums of what was assigned to them."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("cluster_size", torch.ones(8))
        self.register_buffer("cluster_sum", self.codes.clone())

    def forward(self, x):
        z = self.encoder(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        code = self.codes[nearest]
        with torch.no_grad():
            chosen = F.one_hot(nearest, 8).to(x)
            self.cluster_size.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.cluster_sum.mul_(0.9).add_(chosen.T @ z, alpha=0.1)
            self.codes.copy_(self.cluster_sum / (self.cluster_size.unsqueeze(1) + 1e-3))
        return self.decoder(z + (code - z).detach()), 0.25 * F.mse_loss(z, code)


@pair("VQ codebook with moving sums", said("codes|cluster|codebook"))
def codebook():
    def loss(model, batch):
        outputs, commitment = model(batch[0])
        return F.mse_loss(outputs, batch[0]) + commitment

    return Parts(model=Codebook(), train=classes(), compute_loss=loss, given={"weight": samples_of})


class Centre(nn.Module):
    """DINO: a moving mean of the outputs, of the shape [1, width]."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.register_buffer("centre", torch.zeros(1, 4))

    def forward(self, x):
        out = self.body(x)
        centred = out - self.centre
        with torch.no_grad():
            self.centre.mul_(0.9).add_(out.mean(0, keepdim=True), alpha=0.1)
        return centred


@pair("a moving mean of the outputs")
def centre():
    return Parts(model=Centre(), train=classes(), loss=nn.CrossEntropyLoss())


class Seen(nn.Module):
    """Counts the samples that it saw, and grows colder with them."""

    def __init__(self, acts):
        super().__init__()
        self.body, self.acts = mlp(), acts
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        out = self.body(x)
        if self.acts:
            out = out * (1 + self.seen / 100)
        self.seen += len(x)
        return out


@pair("a buffer that counts samples", said("seen"))
def counts_samples():
    return Parts(model=Seen(False), train=classes(), loss=nn.CrossEntropyLoss())


@pair("a buffer that counts samples, and acts", said("seen"))
def counts_and_acts():
    return Parts(
        model=Seen(True),
        train=classes(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.02),
    )


class Steps(nn.Module):
    """Counts its forward passes, of which a plain step has one."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.body(x) * (1 + 1 / (1 + self.calls))


@pair("a buffer that counts passes")
def counts_passes():
    """Each pass of a step begins with the committed count, so a step counts once."""
    return Parts(model=Steps(), train=classes(), loss=nn.CrossEntropyLoss())


class Largest(nn.Module):
    """The largest input so far, by which all are divided."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.register_buffer("largest", torch.ones(6))

    def forward(self, x):
        out = self.body(x / self.largest)
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.abs().amax(0)))
        return out


@pair("a running maximum", said("largest"))
def maximum():
    return Parts(model=Largest(), train=classes(), loss=nn.CrossEntropyLoss())


class Cumulative(nn.Module):
    """A running mean of squares over all batches, and its root as a scale."""

    def __init__(self):
        super().__init__()
        self.body = mlp(outputs=3)
        self.register_buffer("level", torch.ones(6))

    def forward(self, x):
        out = self.body(x / self.level)
        with torch.no_grad():
            deviation = x.square().mean(0).sqrt()
            self.level.mul_(0.8).add_(deviation, alpha=0.2)
        return out


@pair("a moving mean of root mean squares", said("level"))
def root_mean_squares():
    """The mean of roots is not the root of means."""
    return Parts(model=Cumulative(), train=regression(), loss=nn.MSELoss())


class Short(nn.Module):
    """A bfloat16 buffer: a constant, or a moving mean."""

    def __init__(self, moves):
        super().__init__()
        self.body, self.moves = mlp(), moves
        self.register_buffer("short", torch.linspace(0.5, 2, 6, dtype=torch.bfloat16))

    def forward(self, x):
        if self.moves:
            with torch.no_grad():
                self.short.mul_(0.9).add_(x.mean(0).to(torch.bfloat16), alpha=0.1)
            return self.body(x)
        return self.body(x * self.short.to(x))


@pair("a bfloat16 buffer, constant")
def bfloat16_constant():
    return Parts(model=Short(False), train=classes(), loss=nn.CrossEntropyLoss())


@pair("a bfloat16 buffer, a moving mean", said("short"))
def bfloat16_moving():
    """A mean of rounded means is rounded otherwise than the mean: 0.4 % apart."""
    return Parts(model=Short(True), train=classes(), loss=nn.CrossEntropyLoss())


class Whitened(nn.Module):
    """Data-dependent initialisation: the first batch sets the scale (ActNorm)."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.ready.fill_(True)
        return self.body(x * self.scale)


@pair("a scale that the first batch sets", said("scale"))
def set_by_first_batch():
    return Parts(model=Whitened(), train=classes(), loss=nn.CrossEntropyLoss())


class Inputs(nn.Module):
    """Takes off a running mean of what it has seen so far."""

    def __init__(self):
        super().__init__()
        self.body = mlp(outputs=4)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        out = self.body(x - self.mean)
        with torch.no_grad():
            self.mean.mul_(0.7).add_(x.mean(0), alpha=0.3)
        return out


def some_ignored(left_out):
    """Those of the seventh step, and others: a micro-batch of two has none, one, or both."""
    data = classes()
    bad = {*range(74, 78), *range(40, 100, 7)}
    ignored = [(x, torch.tensor(-100) if i in bad else y) for i, (x, y) in enumerate(data)]

    def collate(samples):
        given = [(x, y) for x, y in samples if y != -100]
        none = samples[0][0].new_zeros(0, 6), torch.zeros(0, dtype=torch.long)
        return default_collate(given) if given else none

    given = {"collate": collate} if left_out else {}
    return Parts(model=Inputs(), train=ignored, loss=nn.CrossEntropyLoss(), **given)


@pair("a running mean, and targets that are ignored")
def mean_beside_ignored():
    return some_ignored(left_out=False)


@pair("a running mean, and samples that collate leaves out")
def mean_beside_left_out():
    return some_ignored(left_out=True)
