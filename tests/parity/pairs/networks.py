"""Networks as people train them, without random draws."""

from __future__ import annotations

import torch
from pair import SAMPLES, Parts, pair, said, samples_of
from torch import Tensor, nn
from torch.nn import functional as F

from pairs.common import classes, gentle_adamw, images, mlp


class Block(nn.Module):
    """Two convolutions and a way round them."""

    def __init__(self, width, norm):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(norm(width) for _ in range(2))

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))


class ResNet(nn.Module):
    """A residual network with a norm of one's choice."""

    def __init__(self, norm):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), norm(8)
        self.blocks = nn.Sequential(Block(8, norm), nn.MaxPool2d(2), Block(8, norm))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        return self.head(self.blocks(x).mean((2, 3)))


def resnet(norm):
    return Parts(model=ResNet(norm), train=images(), loss=nn.CrossEntropyLoss())


@pair("ResNet, BatchNorm", said("batch_?norm|norm"))
def with_batch_norm():
    return resnet(nn.BatchNorm2d)


@pair("ResNet, SyncBatchNorm", said("batch_?norm|norm"))
def with_sync_batch_norm():
    """Without a process group of torch's own it is BatchNorm."""
    parts = resnet(nn.BatchNorm2d)
    return Parts(
        model=nn.SyncBatchNorm.convert_sync_batchnorm(parts.model),
        train=parts.train,
        loss=parts.loss,
    )


@pair("ResNet, GroupNorm")
def with_group_norm():
    return resnet(lambda width: nn.GroupNorm(2, width))


class Kept(ResNet):
    """Fine-tuning with the statistics as they are: BatchNorm stays in evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


@pair("ResNet, BatchNorm in evaluation mode")
def with_kept_batch_norm():
    return Parts(model=Kept(nn.BatchNorm2d), train=images(), loss=nn.CrossEntropyLoss())


@pair("ResNet, InstanceNorm with running statistics")
def with_instance_norm():
    """Each sample by itself; the running statistics are means over samples."""
    return resnet(lambda width: nn.InstanceNorm2d(width, affine=True, track_running_stats=True))


@pair("ResNet, BatchNorm without running statistics", said("batch_?norm|norm"))
def without_running_statistics():
    return resnet(lambda width: nn.BatchNorm2d(width, track_running_stats=False))


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.inner = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        outer = self.down(x)
        return self.out(torch.cat([outer, self.up(self.inner(outer))], 1))


@pair("UNet")
def unet():
    train = [(x, (x.sum(0, keepdim=True) > 0).to(x)) for x, _ in images()]
    return Parts(model=UNet(), train=train, loss=nn.BCEWithLogitsLoss())


# ---- graphs: a batch is one large graph


def graphs():
    """Random graphs of 3 to 9 nodes: features, edges, a class."""
    made = []
    for number in range(SAMPLES):
        nodes = 3 + int(torch.randint(0, 7, ()))
        features = torch.randn(nodes, 5)
        edges = torch.randint(0, nodes, (2, 2 * nodes))
        made.append((features, edges, number % 3))
    return made


def one_graph(samples):
    """Several graphs as one, with the number of the graph of each node."""
    features, edges, owners, before = [], [], [], 0
    for number, (own, between, _) in enumerate(samples):
        features.append(own)
        edges.append(between + before)
        owners.append(torch.full((len(own),), number))
        before += len(own)
    return torch.cat(features), torch.cat(edges, 1), torch.cat(owners)


class GCN(nn.Module):
    """Two rounds of messages between neighbours; an answer of each graph, or of each node."""

    def __init__(self, pools):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.pools = pools

    def forward(self, graph):
        features, edges, owners = graph
        x = F.relu(self._spread(self.first(features), edges))
        x = F.relu(self._spread(self.second(x), edges))
        if self.pools:
            number_of = int(owners.max()) + 1
            pooled = x.new_zeros(number_of, x.shape[1]).index_add(0, owners, x)
            x = pooled / torch.bincount(owners).unsqueeze(1)
        return self.out(x)

    def _spread(self, x: Tensor, edges: Tensor) -> Tensor:
        degree = 1 + torch.bincount(edges[1], minlength=len(x)).unsqueeze(1)
        return x.index_add(0, edges[1], x[edges[0]]) / degree


@pair("GCN, a class of each graph")
def gcn():
    def collate(samples):
        return one_graph(samples), torch.tensor([kind for _, _, kind in samples])

    return Parts(model=GCN(True), train=graphs(), collate=collate, loss=nn.CrossEntropyLoss())


@pair("GCN, a class of each node")
def gcn_nodes():
    """The loss is a mean over nodes, of which samples have 3 to 9."""

    def collate(samples):
        graph = one_graph(samples)
        return graph, (graph[0].sum(1) > 0).long() + (graph[0][:, 0] > 1).long()

    return Parts(model=GCN(False), train=graphs(), collate=collate, loss=nn.CrossEntropyLoss())


# ---- mixtures of experts


class Mixture(nn.Module):
    """The best two of four experts answer; `balance` is what evens out their work."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList(mlp(outputs=4) for _ in range(4))
        self.balance = torch.zeros(())

    def forward(self, x):
        shares = self.router(x).softmax(1)
        top, chosen = shares.topk(2, 1)
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * top[rows, place].unsqueeze(1))
        used = F.one_hot(chosen, 4).to(x).sum(1).mean(0)
        self.balance = 4 * (used * shares.mean(0)).sum()
        return out


@pair("mixture of experts")
def mixture():
    return Parts(model=Mixture(), train=classes(), loss=nn.CrossEntropyLoss())


@pair("mixture of experts, load balance", said("apart|gradient|micro-batch|samples"))
def balanced_mixture():
    """A product of two means over the batch is no mean over samples."""

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.5 * model.balance

    return Parts(model=Mixture(), train=classes(), compute_loss=loss, given={"weight": samples_of})


class Rarely(nn.Module):
    """A part that only few samples use: in some steps it has no gradient at all."""

    def __init__(self):
        super().__init__()
        self.often, self.rarely = mlp(), mlp()

    def forward(self, x):
        out = self.often(x)
        rare = x[:, 0] > 1.6
        if rare.any():
            out = out.index_add(0, torch.where(rare)[0], self.rarely(x[rare]))
        return out


@pair("a part without gradient in some steps")
def rarely_used():
    """Weight decay and momentum move a parameter whose gradient is 0, not one that has none."""
    return Parts(
        model=Rarely(),
        train=classes(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.05),
    )


@pair("a part that is never used")
def unused():
    model = nn.Sequential(mlp(), nn.Identity())
    model[1].spare = nn.Parameter(torch.ones(5))
    return Parts(
        model=model,
        train=classes(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=5e-3, eps=1e-3, weight_decay=0.1),
    )


@pair("siamese: the model called twice")
def siamese():
    def loss(model, batch):
        apart = (model(batch[0]) - model(batch[1])).square().sum(1)
        same = batch[2]
        return torch.where(same, apart, F.relu(1 - apart)).mean()

    one, other = torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 6)
    train = list(zip(one, other, torch.rand(SAMPLES) < 0.5, strict=True))
    return Parts(model=mlp(), train=train, compute_loss=loss, given={"weight": samples_of})


@pair("frozen body")
def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return Parts(model=model, train=classes(), loss=nn.CrossEntropyLoss())


@pair("tied weights")
def tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    model[2].weight = model[0].weight
    return Parts(model=model, train=classes(), loss=nn.CrossEntropyLoss(), optimizer=gentle_adamw)


class Remembering(nn.Module):
    """Computed once more in the backward pass, to save memory."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(outputs=8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False))


@pair("activation checkpoints")
def checkpoints():
    import torch.utils.checkpoint  # noqa: F401

    return Parts(model=Remembering(), train=classes(), loss=nn.CrossEntropyLoss())
