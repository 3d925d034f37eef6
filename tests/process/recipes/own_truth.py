"""Loops of one's own beside plain PyTorch loops over the same micro-batches: folder of runs.

Started once for each process of a group. Each case trains a model with layers that see their
batch and draw, in a loop written for one process, and then in a session. Process 0 prints, by
case, how far the two are apart, the sum of the parameters' bits and what torch warned of.
"""

import hashlib
import json
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.data.order import Order, key, micro_batch, position
from instep.recipe.build import set_generators

RUNS, ONLY = sys.argv[1], sys.argv[2:]
SAMPLES, BATCH, PARTS, EPOCHS, SEED = 50, 16, 4, 2, 7
STEPS = EPOCHS * -(-SAMPLES // BATCH)
LIMIT = 0.5
"""The largest norm, by the user's code or by the job."""
OVERFLOWS = (1, 6)
"""Steps that a scaler leaves out."""
OF_PASS, OF_UPDATE = 1, 2  # what the job's keys are drawn for


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=dtype)
    y = torch.randint(3, (SAMPLES,), generator=generator)
    y[::3] = -100  # ignored by a cross entropy: targets that count are uneven
    return TensorDataset(x, y)


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def mean_of_samples(outputs: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, target.clamp(min=0))


def of_targets(outputs: Tensor, target: Tensor) -> instep.WeightedLoss:
    total = functional.cross_entropy(outputs, target, reduction="sum")
    return instep.WeightedLoss(total, float((target >= 0).sum()))


class Case:
    """What a loop does beside loss, backward and step."""

    def __init__(self, **how: Any) -> None:
        self.adam = how.pop("adam", False)
        self.clips = how.pop("clips", False)
        self.edits = how.pop("edits", False)
        self.schedules = how.pop("schedules", "")
        self.scales = how.pop("scales", None)
        self.overflows = how.pop("overflows", False)
        self.weighted = how.pop("weighted", False)
        self.bits = how.pop("bits", False)
        assert not how, how

    def optimizer(self, made: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(made.parameters(), lr=0.01)
        return torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)

    def scaler(self) -> Any:
        if self.scales is None:
            return None
        return torch.amp.GradScaler("cpu", enabled=self.scales, init_scale=8.0, growth_interval=3)

    def overflow(self, step: int) -> float:
        """What a loss is multiplied by before its backward pass in a step."""
        return math.inf if self.overflows and step in OVERFLOWS else 1.0

    def before_step(self, made: nn.Module, optimizer: Any, scaler: Any) -> None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self.edits:
            for parameter in made.parameters():
                parameter.grad.mul_(0.7)
        if self.clips:
            nn.utils.clip_grad_norm_(made.parameters(), LIMIT)


CASES = {
    "sgd": Case(),
    "adam, clipped, edited": Case(adam=True, clips=True, edits=True),
    "each step": Case(schedules="step"),
    "each epoch": Case(schedules="epoch", adam=True),
    "scaled": Case(scales=True, clips=True),
    "overflowing": Case(scales=True, overflows=True),
    "not scaled": Case(scales=False),
    "weighted": Case(weighted=True, clips=True),
    "bits": Case(bits=True, clips=True, schedules="epoch"),
}


def plainly(case: Case) -> nn.Module:
    """Gradient accumulation over the micro-batches, weighted; nothing but torch in it."""
    made, every = model(), data()
    optimizer, scaler = case.optimizer(made), case.scaler()
    scheduler = StepLR(optimizer, 1, gamma=0.8) if case.schedules else None
    for step in range(1, STEPS + 1):
        where = position(step, SAMPLES, BATCH)
        parts = list(micro_batches(every, where))
        weights = [float((y >= 0).sum()) if case.weighted else len(y) for _, y in parts]
        for number, (x, y) in enumerate(parts):
            set_generators(key(SEED, OF_PASS, step, number))
            if case.weighted:
                loss = of_targets(made(x), y).total / sum(weights)
            else:
                loss = mean_of_samples(made(x), y) * (weights[number] / sum(weights))
            loss = loss * case.overflow(step)
            (scaler.scale(loss) if scaler is not None else loss).backward()
        case.before_step(made, optimizer, scaler)
        if case.overflows:
            nn.utils.clip_grad_norm_(made.parameters(), LIMIT)
        set_generators(key(SEED, OF_UPDATE, step))
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        if scheduler and (case.schedules == "step" or where.stop == SAMPLES):
            scheduler.step()
    return made


def micro_batches(every: TensorDataset, where: Any) -> Iterator[tuple[Tensor, Tensor]]:
    count = -(-(where.stop - where.first) * PARTS // BATCH)
    for number in range(count):
        first, stop = micro_batch(where.first, where.stop, number, count)
        yield every[Order(SAMPLES, SEED).indices(where.epoch, first, stop)]


def in_a_session(case: Case, session: instep.Session) -> nn.Module:
    made = model()
    optimizer, scaler = case.optimizer(made), case.scaler()
    scheduler = StepLR(optimizer, 1, gamma=0.8) if case.schedules else None
    loader: Any = DataLoader(data(), batch_size=BATCH, shuffle=True)
    parts = [each for each in (scaler, loader, scheduler, optimizer, made) if each is not None]
    prepared = session.prepare(*parts)
    loader = prepared[0 if scaler is None else 1]
    assert all(new is old for new, old in zip(prepared, parts, strict=True) if new is not loader), (
        "the same objects"
    )
    moved = iterations = 0
    for _ in session.epochs(EPOCHS):
        for x, y in loader:
            iterations += 1
            if case.weighted:
                session.backward(of_targets(made(x), y))
            elif scaler is not None:
                loss = mean_of_samples(made(x), y)
                session.record(loss)
                scaler.scale(loss * case.overflow(session.step + 1)).backward()
            else:
                mean_of_samples(made(x), y).backward()
            if session.sync_gradients:
                moved += 1
                case.before_step(made, optimizer, scaler)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
            if scheduler and case.schedules == "step":
                scheduler.step()
        if scheduler and case.schedules == "epoch":
            scheduler.step()
    assert session.step == STEPS
    assert moved == STEPS
    if not case.bits:  # with them, batches may come twice
        assert iterations == EPOCHS * len(loader)
    return made


def run(name: str, case: Case) -> dict[str, Any]:
    train: dict[str, Any] = {"global_batch": BATCH, "micro_batches": PARTS}
    if case.bits:
        train["determinism"] = "bits"
    if case.overflows:
        train["max_grad_norm"] = LIMIT
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        session = instep.join(
            name=name.replace(", ", "-").replace(" ", "-"),
            runs=RUNS,
            seed=SEED,
            train=train,
            quiet=True,
        )
        with session:
            made = in_a_session(case, session)
    plain = plainly(case)
    apart = max(
        float(((one - other).norm() / (other.norm() + 1e-9)).detach())
        for one, other in zip(made.parameters(), plain.parameters(), strict=True)
    )
    schedulers = [str(each.message) for each in told if "lr_scheduler" in str(each.message)]
    bits = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in made.state_dict().values())
    )
    return {
        "apart": apart,
        "warned": schedulers,
        "summary": session.summary,
        "bits": bits.hexdigest(),
        "loss": session.summary["loss"] if session.summary else None,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: run(name, case) for name, case in CASES.items() if name in (ONLY or CASES)}
    print(json.dumps(found))
