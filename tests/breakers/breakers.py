"""What breaks models that are split over processes: each a small model that does one such thing.

Made as the pairs of `tests/parity` are, so the plain loop there and its judge serve here too. Each
is trained for fifty steps. An epoch has 101 samples, so that its last global batch has five, in
three micro-batches of which one has a single sample: no part of it divides.

To add one: a function under `@breaker` that returns its `Parts`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from pair import SAME, Expected, Pair, Parts, honest, samples_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import instep

SAMPLES, STEPS = 101, 50
WIDTH, WORDS, LENGTH, CLASSES = 12, 16, 6, 3
NEEDS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")

PAIRS: dict[str, Pair] = {}
"""By name."""


def breaker(
    name: str,
    *,
    draws: bool = False,
    train: Mapping[str, Any] | None = None,
    expected: Expected = SAME,
) -> Callable[[Callable[[], Parts]], Callable[[], Parts]]:
    """Enter a breaker."""

    def enter(build: Callable[[], Parts]) -> Callable[[], Parts]:
        assert name not in PAIRS, f"two breakers are called {name!r}"
        PAIRS[name] = Pair(
            name=name,
            build=build,
            expected=expected,
            draws=draws,
            train=dict(train or {}),
            needs=NEEDS,
            steps=STEPS,
        )
        return build

    return enter


# ---- what they are made of


def numbers(count: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    """Samples of five numbers, and a class."""
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(1))
    return list(zip(x, x[:, :CLASSES].argmax(1), strict=True))


def texts() -> list[tuple[Tensor, Tensor]]:
    """Words, and which word is wanted for each; of every text another number of them counts."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
    wanted = (tokens + tokens.roll(1, 1)) % WORDS
    for number, row in enumerate(wanted):
        row[1 + number % LENGTH :] = -100
    return list(zip(tokens, wanted, strict=True))


def words_in(batch: Any) -> float:
    """How many words of a batch count."""
    return float((batch[1] != -100).sum())


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.drop(torch.tanh(self.inner(x))))


class Net(nn.Module):
    """From numbers to classes, through blocks."""

    def __init__(self, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def classified(model: nn.Module, **more: Any) -> Parts:
    own = {"train": numbers(), "loss": nn.CrossEntropyLoss(), "optimizer": momentum}
    return Parts(model=model, **{**own, "given": {"weight": samples_of}, **more})


@breaker("nothing")
def nothing() -> Parts:
    return classified(Net())


# ---- parameters


class Writer(nn.Module):
    """Embedding and head are one weight, one parameter is frozen, some are never used, one has no
    dimension."""

    def __init__(self, drop: float = 0.1, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(drop) for _ in range(4))
        self.blocks[2].inner.bias.requires_grad_(False)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if not sparse:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x) * self.scale).transpose(1, 2)


def two_rates(model: nn.Module) -> list[dict[str, Any]]:
    """Biases have another rate, and no decay."""
    every = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in every if not n.endswith("bias")]},
        {"params": [p for n, p in every if n.endswith("bias")], "lr": 0.2, "weight_decay": 0.0},
    ]


def written(model: nn.Module, **more: Any) -> Parts:
    own = {
        "train": texts(),
        "loss": nn.CrossEntropyLoss(),
        "of": words_in,
        "optimizer": momentum,
        "parameters": two_rates,
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98),
    }
    return Parts(model=model, **{**own, **more})


@breaker("parameters of all sorts", draws=True, train={"max_grad_norm": 0.5})
def all_sorts() -> Parts:
    return written(Writer())


@breaker("autocast", draws=True, train={"precision": "bfloat16"})
def autocast() -> Parts:
    """Trained gently: else plain loops that differ by the order of micro-batches drift apart."""
    model = Writer()
    nn.init.normal_(model.embed.weight, std=0.2)
    return written(
        model,
        parameters=None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@breaker("sparse embedding", draws=True)
def sparse_embedding() -> Parts:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    return written(Writer(0.1, sparse=True), optimizer=optimizer, parameters=None)


@breaker("several types")
def several_types() -> Parts:
    class Single(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).to(x.dtype)

    return classified(Net([Block(), Single().float(), Block(), Single().float()]))


@breaker("a frozen half")
def frozen_half() -> Parts:
    model = Net()
    for module in (model.enter, *model.blocks[:2]):
        module.requires_grad_(False)
    return classified(model)


@breaker("a frozen end")
def frozen_end() -> Parts:
    model = Net()
    for module in (model.head, *model.blocks[2:]):
        module.requires_grad_(False)
    return classified(model)


@breaker("a parameter in two blocks")
def shared_parameter() -> Parts:
    model = Net()
    model.blocks[3].inner.weight = model.blocks[0].inner.weight
    return classified(model)


@breaker("a block that is called twice")
def shared_block() -> Parts:
    one, other = Block(), Block()
    return classified(Net([one, other, one, other]))


@breaker("weight norm")
def weight_norm() -> Parts:
    model = Net()
    for block in model.blocks:
        block.inner = nn.utils.parametrizations.weight_norm(block.inner)
    return classified(model)


@breaker("orthogonal weights")
def orthogonal() -> Parts:
    model = Net()
    for block in model.blocks:
        nn.utils.parametrizations.orthogonal(block.outer)
    return classified(model)


# ---- losses and calls


class Warm(Net):
    """Its temperature is used by the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))


@breaker("a loss with parameters")
def penalty() -> Parts:
    def compute_loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x) * model.temperature, y)
        return loss + 0.1 * model.head.weight.square().sum() + 0.1 * model.enter.bias.square().sum()

    return classified(Warm(), loss=None, compute_loss=compute_loss)


@breaker("layers in a row")
def layers_in_a_row() -> Parts:
    sizes = (5, WIDTH, 2 * WIDTH, WIDTH, WIDTH)
    layers = [(nn.Linear(*each), nn.Tanh()) for each in pairwise(sizes)]
    model = nn.Sequential(*(each for pair in layers for each in pair), nn.Linear(WIDTH, CLASSES))
    return classified(model)


@breaker("a model that is called twice")
def called_twice() -> Parts:
    def compute_loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y) + (model(x) - model(-x)).square().mean()

    return classified(Net(), loss=None, compute_loss=compute_loss)


@dataclass
class Output:
    logits: Tensor
    hidden: dict[str, Tensor]


class Mixed(nn.Module):
    """Whole numbers cross each cut, and what crosses is changed in place; results are of a class
    of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Passing() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, given: dict[str, Tensor]) -> Output:
        x, largest = self.enter(given["x"]), given["number"]
        for block in self.blocks:
            x, largest = block(x, largest)
        return Output(self.head(x), {"last": x, "largest": largest})


class Passing(Block):
    def forward(self, x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x += 0.1 * largest[:, None]
        with torch.no_grad():
            mean = x.mean(1, keepdim=True)
        x = super().forward(x - mean)
        return x, (largest + x.argmax(1)) % 5


@breaker("whole numbers across cuts")
def whole_numbers() -> Parts:
    def compute_loss(model: Any, batch: Any) -> Tensor:
        found = model(batch)
        extra = found.hidden["last"].square().mean()
        return F.cross_entropy(found.logits, batch["y"]) + 0.01 * extra

    samples = [{"x": x, "y": y, "number": n % 3} for n, (x, y) in enumerate(numbers())]
    return classified(Mixed(), train=samples, loss=None, compute_loss=compute_loss)


@breaker("checkpoints of its own", draws=True)
def own_checkpoints() -> Parts:
    class Recomputed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    return classified(Net([Recomputed(0.2) for _ in range(4)]))


@breaker("noise", draws=True)
def noise() -> Parts:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x + 0.1 * torch.randn_like(x))
            return F.dropout(x, 0.1, self.training) * (0.9 + 0.2 * torch.rand(len(x), 1))

    return classified(Net([Noisy() for _ in range(4)]))


@breaker("blocks that some samples use")
def routed() -> Parts:
    class Sometimes(Block):
        def forward(self, x: Tensor) -> Tensor:
            rows = (x.detach()[:, 0] > 0).nonzero()[:, 0]
            return x.index_put((rows,), super().forward(x[rows])) if len(rows) else x

    return classified(Net([Sometimes() for _ in range(4)]))


# ---- hooks


@breaker("hooks on modules")
def module_hooks() -> Parts:
    model = Net()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, given: (given[0] * 1.1,))
        block.register_forward_hook(lambda _, given, out: out + 0.1 * given[0])
        block.inner.register_full_backward_hook(lambda _, grads, __: (0.5 * grads[0],))
    return classified(model)


@breaker("hooks on parameters")
def parameter_hooks() -> Parts:
    model = Net()
    for parameter in (model.head.weight, model.blocks[1].inner.weight, model.enter.bias):
        parameter.register_hook(lambda grad: 0.5 * grad)
    return classified(model)


# ---- what layers remember


@breaker("batch norm", train={"batch_norm": "global"})
def batch_norm() -> Parts:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.outer(torch.tanh(self.norm(self.inner(x))))

    return classified(Net([Normed() for _ in range(4)]))


# ---- optimizers


class Lamb(torch.optim.Optimizer):
    """Moves each tensor by a share of its own norm, and clips by the norm of all."""

    def __init__(self, parameters: Any, lr: float, limit: float | None = None) -> None:
        super().__init__(parameters, {"lr": lr})
        self.limit = limit

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        by = 1.0
        if self.limit is not None:
            by = self.limit / float(sum(p.grad.square().sum() for p in every).sqrt())
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / (by * parameter.grad).norm().clamp(min=1e-3)
                    parameter.sub_(group["lr"] * ratio.clamp(max=1.0) * by * parameter.grad)


@breaker("norms of tensors")
def lamb() -> Parts:
    return classified(Net(), optimizer=lambda parameters: Lamb(parameters, 0.05))


@breaker("an optimizer's own norm of all")
def lamb_of_all() -> Parts:
    return classified(Net(), optimizer=lambda parameters: Lamb(parameters, 0.05, 1.0))


class Factored(torch.optim.Optimizer):
    """Keeps the mean square of each row of a gradient."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows = parameter.grad.square()
                    rows = rows.mean(1) if rows.ndim == 2 else rows
                    kept = self.state[parameter].setdefault("rows", torch.zeros_like(rows))
                    kept.lerp_(rows, 0.1)
                    by = kept.sqrt() + 1e-3
                    by = by.unsqueeze(1) if parameter.ndim == 2 else by
                    parameter.sub_(group["lr"] * parameter.grad / by)


@breaker("means of rows")
def factored() -> Parts:
    return classified(Net(), optimizer=lambda parameters: Factored(parameters, 0.01))


@breaker("Adafactor")
def adafactor() -> Parts:
    return classified(
        Net(), optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.05)
    )


@breaker("Muon")
def muon() -> Parts:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.01)

    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]

    model = Net()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return classified(model, optimizer=optimizer, parameters=matrices)


@breaker("AdamW, all at once")
def adamw() -> Parts:
    return classified(
        Net(), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True)
    )


@breaker("named parameters")
def named() -> Parts:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = momentum(parameters)
        (group,) = made.param_groups
        group["lr"] = 0.05 if all("." in name for name in group["param_names"]) else 1.0
        return made

    return classified(
        Net(), optimizer=optimizer, parameters=lambda model: list(model.named_parameters())
    )


# ---- what cannot be read, and what is drawn by others


class Holes:
    """Some samples cannot be read."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if not index % 9 or index in BAD:
            raise OSError(f"sector {index} is gone")
        return self.samples[index]


BAD = range(40, 47)


@breaker("samples that cannot be read")
def unreadable() -> Parts:
    samples = numbers()
    marked = [
        (x, torch.tensor(-100) if not n % 9 or n in BAD else y) for n, (x, y) in enumerate(samples)
    ]

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs, target)

    return classified(
        Net(),
        train=marked,
        loss=loss,
        of=lambda batch: float((batch[1] != -100).sum()),
        given={"train": Holes(samples), "weight": samples_of},
    )


@breaker("running means of its own", expected=honest("running|buffer|writes"))
def running_means() -> Parts:
    class Running(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return super().forward(x - self.mean)

    return classified(Net([Running() for _ in range(4)]))


@breaker("spectral norm", expected=honest("running|buffer|writes"))
def spectral_norm() -> Parts:
    model = Net()
    for block in model.blocks:
        block.inner = nn.utils.parametrizations.spectral_norm(block.inner)
    return classified(model)


@breaker("attention", draws=True)
def attention() -> Parts:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attend = (
                nn.LayerNorm(WIDTH),
                nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True),
            )
            self.after = Block(0.1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y = self.norm(x)
            y, _ = self.attend(y, y, y, key_padding_mask=mask, need_weights=False)
            return self.after(x + y)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
            self.blocks = nn.ModuleList(Attending() for _ in range(4))
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, tokens: Tensor) -> Tensor:
            x, mask = self.embed(tokens), tokens == 0
            for block in self.blocks:
                x = block(x, mask)
            return self.head(x).transpose(1, 2)

    return written(Reader(), parameters=None)


# ---- what differs from pass to pass


@breaker("blocks that are left out at random", draws=True)
def stochastic_depth() -> Parts:
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.training and float(torch.rand(())) < 0.3 else super().forward(x)

    return classified(Net([Dropped(0.1) for _ in range(4)]))


@breaker("blocks that are seldom called", draws=True)
def layer_drop() -> Parts:
    class Dropping(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                if not self.training or random.random() > 0.03:
                    x = block(x)
            return self.head(x)

    return classified(Dropping())


@breaker("texts of any length")
def ragged() -> Parts:
    samples = [
        (tokens[: 2 + n % 5], wanted[: 2 + n % 5]) for n, (tokens, wanted) in enumerate(texts())
    ]

    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        pad = nn.utils.rnn.pad_sequence
        tokens, wanted = zip(*rows, strict=True)
        return pad(list(tokens), True), pad(list(wanted), True, padding_value=-100)

    class Short(Writer):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens) + self.places[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(x * self.scale).transpose(1, 2)

    return written(Short(0.0), train=samples, collate=collate)


@breaker("a loss that tells its weight")
def weighted() -> Parts:
    def loss_of(model: nn.Module, batch: Any) -> instep.WeightedLoss:
        tokens, wanted = batch
        total = F.cross_entropy(model(tokens), wanted, reduction="sum")
        return instep.WeightedLoss(total, words_in(batch))

    def mean(model: nn.Module, batch: Any) -> Tensor:
        found = loss_of(model, batch)
        return found.total / found.weight

    return written(Writer(0.0), loss=None, compute_loss=mean, given={"compute_loss": loss_of})


@breaker("calls that are counted", expected=honest("calls|count|attribute|state|differ"))
def counted() -> Parts:
    class Counting(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.training
            return super().forward(x * min(1.0, self.calls / 50))

    return classified(Net([Counting() for _ in range(4)]))


@breaker("rows of one length")
def row_norms() -> Parts:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = momentum(parameters)

        @torch.no_grad()
        def shorten(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.dim() == 2:
                        p.mul_((0.5 / p.norm(dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1.0))

        made.register_step_post_hook(shorten)
        return made

    return classified(Net(), optimizer=optimizer)


def followed(net: Net, follow: Callable[[], None]) -> Parts:
    """Something else in the model moves after each step."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = momentum(parameters)
        made.register_step_post_hook(torch.no_grad()(lambda *_: follow()))
        return made

    return classified(net, optimizer=optimizer)


@breaker("averages in a frozen net")
def average_net() -> Parts:
    net = Net()
    net.slow = Net().requires_grad_(False)

    def follow() -> None:
        slow = dict(net.slow.named_parameters())
        for name, parameter in net.named_parameters():
            if name in slow:
                slow[name].lerp_(parameter, 0.1)

    return followed(net, follow)


@breaker("averages in buffers")
def average_buffers() -> Parts:
    net = Net()
    for name, parameter in list(net.named_parameters()):
        net.register_buffer(name.replace(".", "_"), parameter.detach().clone())

    def follow() -> None:
        for name, parameter in net.named_parameters():
            net.get_buffer(name.replace(".", "_")).lerp_(parameter, 0.1)

    return followed(net, follow)


@breaker("validated", draws=True)
def validated() -> Parts:
    def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs.argmax(1) == target).double().mean()

    given = {"validate": texts()[:21], "metrics": {"accuracy": accuracy}}
    return written(Writer(), given=given)


# ---- more ways to differ


@breaker("micro-batches of which nothing counts")
def nothing_counts() -> Parts:
    samples = [
        (tokens, torch.full_like(wanted, -100) if n % 5 < 3 else wanted)
        for n, (tokens, wanted) in enumerate(texts())
    ]
    return written(Writer(0.0), train=samples)


@breaker("noise around the model", draws=True)
def noise_around() -> Parts:
    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        outputs = model(x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(F.dropout(outputs, 0.1), y)

    return classified(Net([Block(0.1) for _ in range(4)]), loss=None, compute_loss=compute_loss)


@breaker("a teacher")
def teacher() -> Parts:
    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = Net().requires_grad_(False)
            self.student = Net()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                wanted = self.teacher(x)
            return self.student(x), wanted

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        found, wanted = model(x)
        return F.cross_entropy(found, y) + F.mse_loss(found, wanted)

    return classified(Taught(), loss=None, compute_loss=compute_loss)


@breaker("another way in evaluation")
def early_exit() -> Parts:
    class Early(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks if self.training else self.blocks[:2]:
                x = block(x)
            return self.head(x)

    return classified(Early(), given={"weight": samples_of, "validate": numbers(21)})


@breaker("two lists of blocks")
def two_lists() -> Parts:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.others = nn.Sequential(*(Block() for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block, other in zip(self.blocks, [*self.others, nn.Identity()], strict=True):
                x = block(x) * torch.sigmoid(other(x))
            return self.head(x)

    return classified(Two())


@breaker("skips between blocks")
def skips() -> Parts:
    class Unet(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            first = self.blocks[0](x)
            second = self.blocks[1](first)
            third = self.blocks[2](second + 0.5 * x)
            return self.head(self.blocks[3](third) + first)

    return classified(Unet())


@breaker("a gradient penalty")
def gradient_penalty() -> Parts:
    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        outputs = model(x)
        if not torch.is_grad_enabled():
            return F.cross_entropy(outputs, y)
        (slope,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
        return F.cross_entropy(outputs, y) + 0.1 * slope.square().sum(1).mean()

    return classified(Net(), loss=None, compute_loss=compute_loss)


@breaker("functional calls")
def functional_calls() -> Parts:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            own = {"weight": self.inner.weight * self.by, "bias": self.inner.bias}
            inner = torch.func.functional_call(self.inner, own, (x,))
            return x + self.outer(torch.tanh(inner))

    return classified(Net([Scaled() for _ in range(4)]))


@breaker("a parameter in a list")
def listed() -> Parts:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = [self.blocks[0].inner.weight]

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x + (x @ self.first[0].T) @ self.first[0])

    return classified(Listed())


@breaker("a buffer that is a parameter")
def aliased() -> Parts:
    class Aliased(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", self.blocks[0].inner.weight.detach())

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x + (x @ self.first.T) @ self.first)

    return classified(Aliased())


@breaker("two parameters in one memory")
def overlapping() -> Parts:
    model = Net()
    model.blocks[1].inner.weight = nn.Parameter(model.blocks[0].inner.weight.data)
    return classified(model)
