"""Loops that do something else than one backward pass and one step a batch: folder of runs,
and which.

Each is a session of its own. Prints, by name, the error that it ended with, and what its
ledger holds; where it was accepted, also how far the model is from the loop that is right.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.store.run_folder import RunFolder

RUNS, ONLY = sys.argv[1], sys.argv[2:]
DATA = TensorDataset(torch.arange(96.0).reshape(24, 4) / 50, torch.arange(24) % 3)
EVERY_SECOND = 2


class Loop:
    """A model and what trains it, ready for a batch."""

    def __init__(self, session: instep.Session) -> None:
        torch.manual_seed(0)
        self.session, self.model = session, nn.Linear(4, 3)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.wanted: float | None = None
        """The mean loss of the epoch, where the loop knows it."""

    def prepare(self, data: Any = DATA, *more: Any) -> Any:
        return self.session.prepare(data, self.optimizer, self.model, *more)[0]

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def train(self, work: Callable[[int, Any], None], data: Any = DATA) -> None:
        for number, batch in enumerate(self.prepare(data), 1):
            work(number, batch)

    def right(self, batch: Any) -> None:
        self.loss(batch).backward()
        self.optimizer.step()


def as_it_should(loop: Loop) -> None:
    loop.train(lambda _, batch: loop.right(batch))


def without_backward(loop: Loop) -> None:
    def work(number: int, batch: Any) -> None:
        if number != 3:
            loop.loss(batch).backward()
        loop.optimizer.step()

    loop.train(work)


def without_anything(loop: Loop) -> None:
    loop.train(lambda number, batch: loop.right(batch) if number != 5 else None)


def backward_that_reaches_nothing(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        torch.zeros(1, requires_grad=True).sum().backward()
        loop.optimizer.step()

    loop.train(work)


def step_on_every_second_batch(loop: Loop) -> None:
    def work(number: int, batch: Any) -> None:
        loop.loss(batch).backward()
        if number % EVERY_SECOND == 0:
            loop.optimizer.step()

    loop.train(work)


def step_on_every_third_batch(loop: Loop) -> None:
    def work(number: int, batch: Any) -> None:
        loop.loss(batch).backward()
        if number % 3 == 0:
            loop.optimizer.step()

    loop.train(work)


def step_where_gradients_are_agreed(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        loop.loss(batch).backward()
        if loop.session.sync_gradients:
            loop.optimizer.step()

    loop.train(work)


def two_steps_for_one_batch(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        loop.right(batch)
        loop.optimizer.step()

    loop.train(work)


def step_before_backward(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        loop.optimizer.step()
        loop.loss(batch).backward()

    loop.train(work)


def step_with_a_closure(loop: Loop) -> None:
    loop.train(lambda _, batch: loop.optimizer.step(lambda: loop.loss(batch)))


def backward_twice(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        (loop.loss(batch) / 2).backward()
        (loop.loss(batch) / 2).backward()
        loop.optimizer.step()

    loop.train(work)


def backward_twice_the_first_without_sync(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        with loop.session.no_sync():
            (loop.loss(batch) / 2).backward()
        (loop.loss(batch) / 2).backward()
        loop.optimizer.step()

    loop.train(work)


def backward_only_without_sync(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        with loop.session.no_sync(loop.model):
            loop.loss(batch).backward()
        loop.optimizer.step()

    loop.train(work)


def accumulate_as_in_accelerate(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        with loop.session.accumulate(loop.model):
            loop.session.backward(loop.loss(batch))
            if loop.session.sync_gradients:
                nn.utils.clip_grad_norm_(loop.model.parameters(), 100.0)
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    loop.train(work)


def only_the_last_with_sync_as_in_accelerate(loop: Loop) -> None:
    def work(number: int, batch: Any) -> None:
        if number % 4:
            with loop.session.no_sync(loop.model):
                loop.session.backward(loop.loss(batch))
        else:
            loop.session.backward(loop.loss(batch))
            loop.optimizer.step()

    loop.train(work)


def no_sync_and_no_step(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        with loop.session.no_sync(loop.model):
            loop.session.backward(loop.loss(batch))

    loop.train(work)


def backward_of_many_numbers(loop: Loop) -> None:
    loop.train(lambda _, batch: loop.session.backward(loop.model(batch[0])))


def written_between_micro_batches(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        loop.right(batch)
        with torch.no_grad():
            loop.model.bias.mul_(0.9)

    loop.train(work)


def unfrozen_after_prepare(loop: Loop) -> None:
    loop.model.bias.requires_grad_(False)

    def work(number: int, batch: Any) -> None:
        loop.model.bias.requires_grad_(number > 4)
        loop.right(batch)

    loop.train(work)


def backward_outside(loop: Loop) -> None:
    loader = loop.prepare()
    for batch in loader:
        loop.right(batch)
    loop.loss(DATA[:4]).backward()


def step_outside(loop: Loop) -> None:
    loop.prepare()
    loop.optimizer.step()


def record_after_backward(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        loss = loop.loss(batch)
        loss.backward()
        loop.session.record(loss)

    loop.train(work)


def sum_within_a_step(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        loop.session.sum(1.0)

    loop.train(work)


def scheduler_made_after(loop: Loop) -> None:
    loader = loop.prepare()
    StepLR(loop.optimizer, 1)
    for batch in loader:
        loop.right(batch)


def scheduler_that_the_session_advances(loop: Loop) -> None:
    scheduler = StepLR(loop.optimizer, 1, gamma=0.5)
    loader = loop.session.prepare(loop.model, loop.optimizer, DATA, scheduler=scheduler)[2]
    for batch in loader:
        loop.right(batch)
    assert scheduler.get_last_lr() == [0.1 * 0.5**3]


def scheduler_that_both_advance(loop: Loop) -> None:
    scheduler = StepLR(loop.optimizer, 1, gamma=0.5)
    loader = loop.session.prepare(loop.model, loop.optimizer, DATA, scheduler=scheduler)[2]
    for batch in loader:
        loop.right(batch)
        scheduler.step()


def scheduler_before_the_step(loop: Loop) -> None:
    scheduler = StepLR(loop.optimizer, 1, gamma=0.5)
    for batch in loop.prepare(DATA, scheduler):
        loop.loss(batch).backward()
        scheduler.step()
        loop.optimizer.step()


def two_weights_for_one_batch(loop: Loop) -> None:
    def work(_: int, batch: Any) -> None:
        with loop.session.no_sync():
            loop.session.backward(instep.WeightedLoss(loop.loss(batch) * 2, 2.0))
        loop.session.backward(instep.WeightedLoss(loop.loss(batch) * 3, 3.0))
        loop.optimizer.step()

    loop.train(work)


def losses_of_one_batch_add_up(loop: Loop) -> None:
    losses: list[float] = []

    def work(_: int, batch: Any) -> None:
        losses.append(float(loop.loss(batch).detach()))
        with loop.session.no_sync():
            loop.session.backward(0.25 * loop.loss(batch))
        loop.session.backward(0.75 * loop.loss(batch))
        loop.optimizer.step()

    loop.train(work)
    loop.wanted = sum(losses) / len(losses)


def batch_size_of_a_step(loop: Loop) -> None:
    loop.train(lambda _, batch: loop.right(batch), DataLoader(DATA, batch_size=8, shuffle=True))


def batch_size_of_an_iteration(loop: Loop) -> None:
    loop.train(lambda _, batch: loop.right(batch), DataLoader(DATA, batch_size=2))


LOOPS: list[Callable[[Loop], None]] = [
    value
    for value in list(vars().values())
    if getattr(value, "__annotations__", {}).get("loop") is Loop
]


def told(act: Callable[[Loop], None], right: Tensor | None) -> tuple[dict[str, Any], Tensor]:
    train = {"global_batch": 8, "micro_batches": 4}
    session = instep.join(name=act.__name__, runs=RUNS, train=train, quiet=True)
    error, made = "", None
    try:
        with session:
            made = Loop(session)
            act(made)
    except instep.InstepError as raised:
        error = str(raised)
    assert made is not None
    weight = made.model.weight.detach()
    found: dict[str, Any] = {"error": error}
    if session.run.is_dir() and (session.run / "ledger.bin").exists():
        run = RunFolder(session.run)
        found |= {"steps": run.last_step, "records": len(run.ledger), "exact": run.audit.exact}
        found["unknown"] = any("the loss is not known" in e["text"] for e in run.named("warning"))
    if made.wanted is not None and session.summary is not None:
        found["loss"] = session.summary["loss"] - made.wanted
    if right is not None and not error:
        found["apart"] = float((weight - right).abs().max())
    return found, weight


if __name__ == "__main__":
    torch.set_num_threads(1)
    results, right = {}, None
    for act in [each for each in LOOPS if not ONLY or each.__name__ in ("as_it_should", *ONLY)]:
        results[act.__name__], weight = told(act, right)
        right = weight if right is None else right
    print(json.dumps(results))
