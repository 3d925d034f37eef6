"""Sessions one after the other in a process of their own, as in a notebook: folder of runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import tiny
import torch
from torch.nn import functional

import instep

RUNS = Path(sys.argv[1])
COMMON: dict[str, Any] = {"runs": RUNS, "seed": 5, "quiet": True}


@contextmanager
def own_loop(name: str, resume: bool = False, **train: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(session, loader, what to do with each batch)."""
    train = {"global_batch": 16, "micro_batches": 4, "merge": "always", **train}
    with instep.join(name=name, train=train, resume=resume, **COMMON) as session:
        made = tiny.recipe()
        model, optimizer, loader = session.prepare(
            made.model, torch.optim.SGD(made.model.parameters(), lr=0.01), made.train
        )

        def work(batch: Any) -> None:
            loss = functional.cross_entropy(model(batch[0]), batch[1])
            session.backward(loss)
            optimizer.step()

        yield session, loader, work


def refused(act: Any) -> str:
    try:
        act()
    except instep.InstepError as error:
        return str(error)
    return ""


def longer_than_the_job_says() -> None:
    """The job's 10 epochs are not the length of an own loop: 11 are trained, and then 12."""
    for epochs, expected in ((11, 77), (12, 84), (12, 84)):
        with own_loop("long", resume=True) as (session, loader, work):
            for _ in range(session.step // 7, epochs):
                for batch in loader:
                    work(batch)
            assert session.step == expected, session.step
        assert session.summary["steps"] == expected
        assert session.summary["outcome"] == "completed"


def after_a_failure() -> None:
    """A session that failed lets go of its run, and so does one that was left."""
    failed = None
    try:
        with own_loop("fails", merge="never") as (_, loader, work):
            for number, batch in enumerate(loader):
                work(batch)
                if number == 5:
                    raise ValueError("enough")
    except ValueError as error:
        failed = error  # as a notebook does, which keeps the traceback and all it refers to
    with own_loop("fails", resume=True, merge="never") as (session, loader, work):
        for batch in loader:
            work(batch)
        assert session.step == 7
    assert failed is not None
    recipe = {"name": "left", "train": {"epochs": 1, "global_batch": 16}, **COMMON}
    session = instep.join(tiny.recipe, **recipe)
    steps = session.steps()
    next(steps)
    steps.close()
    session = instep.join(tiny.recipe, resume=True, **recipe)
    assert len(list(session.steps())) == 7
    numbered = instep.join(tiny.recipe, **recipe)
    next(steps := numbered.steps())
    steps.close()
    session = instep.join(tiny.recipe, resume=True, **{**recipe, "name": "left-2"})
    assert len(list(session.steps())) == 7
    assert session.run == numbered.run
    recipe["name"] = "held"
    session = instep.join(tiny.recipe, **recipe)
    next(steps := session.steps())
    assert "session.steps() was left before its end" in refused(session.close)
    steps.close()
    session = instep.join(tiny.recipe, resume=True, **recipe)
    assert len(list(session.steps())) == 7


def a_second_dataset_that_cannot_be_read() -> None:
    """The loader processes of the first one end with the session."""
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    made = tiny.recipe()
    session = instep.join(name="empty", data={"loaders": 1}, **COMMON)
    nothing = torch.utils.data.TensorDataset(torch.zeros(0, 3))
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.01)
    said = refused(lambda: session.prepare(made.model, optimizer, made.train, nothing))
    assert "has no samples" in said, said
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


def a_model_that_cannot_be_saved() -> None:
    """It is refused when the ledger is open already."""

    class Odd(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"no": "tensor"}

    for _ in range(2):
        session = instep.join(name="odd", resume=True, **COMMON)
        model = Odd(6, 3)
        made = tiny.recipe()

        def prepare(session: Any = session, model: Any = model, made: Any = made) -> None:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), made.train)

        assert "extra state" in refused(prepare)


def leave(name: str, count: int, work_on_last: bool = True, **train: Any) -> str:
    def act() -> None:
        with own_loop(name, **train) as (_, loader, work):
            for number, batch in enumerate(loader, 1):
                if number < count or work_on_last:
                    work(batch)
                if number == count:
                    break

    return refused(act)


def left_in_the_middle() -> None:
    never = {"merge": "never"}  # four batches a step
    assert leave("whole-step", 1) == ""
    assert leave("not-begun", 2, work_on_last=False) == ""
    assert leave("whole-passes", 8, **never) == ""
    told = leave("some-passes", 6, **never)
    assert "in the middle of step 2: its other batches were still to come" in told, told
    told = leave("bits-again", 4, determinism="bits", merge="auto")
    assert "in the middle of step 1: its gradients did not fit" in told, told
    assert leave("bits-told", 1000, determinism="bits", merge="auto", stop_after_steps=2) == ""

    def comes_back() -> None:
        with own_loop("comes-back", **never) as (_, loader, work):
            for _ in range(2):
                for batch in loader:
                    work(batch)
                    break

    assert "in the middle of step 1: its other batches are still to come" in refused(comes_back)


if __name__ == "__main__":
    longer_than_the_job_says()
    after_a_failure()
    a_second_dataset_that_cannot_be_read()
    a_model_that_cannot_be_saved()
    left_in_the_middle()
