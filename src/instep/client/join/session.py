"""A process's view of a run that it has joined, or whose script it runs.

With a recipe, `Session.steps()` trains it; without one, `Session.prepare()` returns model,
optimizer and loader for the user's own loop. With `join(resume=True)` both continue an earlier run,
if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from instep.client.join.participation import Participation
from instep.client.join.prepared import Prepared
from instep.data.batches import Batches
from instep.errors import SpecError, WorkerError
from instep.recipe.callbacks import checked_value
from instep.recipe.weights import WeightedLoss
from instep.worker.loop.after_commit import Step
from instep.worker.own.evaluation import EvaluationLoader
from instep.worker.own.loader import OwnLoader
from instep.worker.own.loop import OwnLoop
from instep.worker.own.rounds import OwnLoopRounds
from instep.worker.training.devices import check_device
from instep.worker.training.training import Training

_LEFT = "the loop over session.steps() was left before its end."
_NOTHING = (
    "the session was closed before it trained anything: call session.prepare(...) and loop over "
    "its loader, or session.steps() with a recipe."
)


class Session:
    """This process's part in a run; use it in a `with` statement, or call `close` at the end."""

    def __init__(self, part: Participation) -> None:
        self._part, self._member = part, part.member
        self.job = part.member.job
        self.run = part.member.run
        self.device = part.device
        self.summary: dict[str, Any] | None = None
        """Of the finished run, on process 0."""

    @property
    def rank(self) -> int:
        """This process's number among those that train together now, from 0."""
        form = self._member.form
        return form.rank if form is not None else self._part.place.rank

    @property
    def size(self) -> int:
        """How many processes train together now."""
        form = self._member.form
        return len(form.members) if form is not None else self._part.place.size

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0 of those that train together now."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """`print` on process 0; nothing on the others."""
        if self.is_main_process:
            print(*values, **options)

    def steps(self) -> Iterator[Step]:
        """Train the recipe; yields every committed step, and closes the session after the last.

        In a resumed run, the first is the one after its checkpoint; in a complete run there
        is none.

        Raises:
            InstepError: the recipe cannot be trained, or a worker failed.
        """
        if self._member.complete:
            self.summary = self._part.end()
            return
        part = self._part
        if part.recipe is None:
            raise SpecError("steps() trains a recipe; give one: instep.join(recipe).")
        try:
            part.training = Training(self._member, part.recipe, self.device)
            part.training.join()
            part.formed()
            yield from part.training.steps()
        except GeneratorExit:
            if not self._part.closed:
                self._part.fail(WorkerError(_LEFT))
            raise
        except BaseException as error:
            self._part.fail(error)
            raise
        self.summary = self._part.end()

    def prepare(
        self,
        *parts: Any,
        scheduler: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        augment: Callable[[Any, torch.Generator], Any] | None = None,
    ) -> tuple[Any, ...]:
        """Make model, optimizer and data those of a run, for an ordinary loop.

        It follows the conventions of Accelerate. Each iteration of the first loader is one
        micro-batch of this process's share of the global batch. In the last iteration of a step
        (`sync_gradients`), `optimizer.step()` updates the parameters with the gradients of all
        processes and commits the step; in the others it does nothing. The same holds for
        `scheduler.step()`, `scaler.step(optimizer)` and `scaler.update()`.

        In a resumed run, model, optimizer, scheduler and scaler get the state of the checkpoint,
        the loader continues in the middle of the epoch, and `step` is the last committed step.

        Args:
            parts: in any order: a model, the same in every process, which is moved to
                `self.device`; an optimizer of its parameters; what to train on, a map-style
                dataset or a `DataLoader` of one; further ones to evaluate on; a learning-rate
                scheduler; a gradient scaler.
            scheduler: one that the session advances after every step; not handed back.
            collate: from samples to a batch, instead of the `DataLoader`'s.
            augment: a training sample's random change, keyed by the sample.

        Returns:
            The same in the same order, with loaders in place of the data.

        Raises:
            InstepError: the processes cannot train together.
        """
        part = self._part
        if part.work is not None:
            raise SpecError("prepare() was called before: a session trains one model.")
        try:
            check_device(self.job, self.device)
            shuffled = self.job.data.shuffled
            given = Prepared.of(parts, scheduler, self.job.per_iteration, shuffled=shuffled)
            for number in range(len(given.data)):
                part.readers.append(given.reader(number, self._member, collate, augment))
            for reader in part.readers:
                reader.begin()
            part.loop = loop = self._own_loop(given, advances=scheduler is not None)
            loop.join()
        except BaseException as error:
            part.close_readers()
            self._part.fail(error)
            raise
        part.formed()
        loaders: list[Any] = [OwnLoader(loop, given.data[0].given.info_dataset)]
        for data, reader in zip(given.data[1:], self._part.readers[1:], strict=True):
            batch = data.batch or self.job.train.global_batch
            own = data.given.info_dataset
            loaders.append(EvaluationLoader(loop.shared, reader, reader.samples, batch, own))
        return given.handed_back(loaders)

    def _own_loop(self, given: Prepared, *, advances: bool) -> OwnLoop:
        kind = OwnLoopRounds if self.job.sync.rounds is not None else OwnLoop
        return kind(
            self._member,
            given.model.to(self.device),
            given.optimizer,
            given.scheduler,
            self._part.readers[0],
            Batches.of_job(self.job, self._part.readers[0].samples),
            given.scaler,
            given.lost,
            advances=advances,
        )

    @property
    def step(self) -> int:
        """The last committed step; above 0 at the start of a resumed run."""
        if self._member.complete:
            return self._member.last_step
        at = self._part.work
        return at.engine.state.progress.step if at else 0

    def backward(self, loss: Tensor | WeightedLoss, **options: Any) -> None:
        """`loss.backward()`, with the loss recorded and weighted.

        Args:
            loss: the mean over the batch's samples; or a `WeightedLoss`, where it is a mean of
                something else (tokens, class weights).
            options: for `Tensor.backward`.
        """
        self._own.backward.weigh(loss).backward(**options)

    def skip(self) -> None:
        """Have the present batch count nothing; call it instead of `backward`.

        For a batch whose loss is not finite: a product with 0 would still be NaN. The step is the
        mean over its other batches. `optimizer.step()` is called as ever.
        """
        self._own.backward.skip()

    def record(self, loss: Tensor | float, weight: float | None = None) -> None:
        """Record the mean loss of the present batch, before `backward`, for the table and report.

        Args:
            loss: of this batch.
            weight: of what it is a mean; the number of samples, if left out. The gradient is
                weighted by it.

        Raises:
            SpecError: `backward` has been called for this batch already.
        """
        self._own.backward.record(
            float(loss.detach() if isinstance(loss, Tensor) else loss), weight
        )

    @property
    def sync_gradients(self) -> bool:
        """Whether this iteration is the last of its step, in which the optimizer steps."""
        return self._own.present.sync_gradients

    def no_sync(self, _model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Backward passes inside add to the gradient of the batch; one outside ends it."""
        return self._own.present.no_sync()

    def accumulate(self, *_models: nn.Module) -> AbstractContextManager[None]:
        """For loops written for Accelerate; it does nothing: `train.micro_batches` says how many
        batches make a step."""
        return nullcontext()

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """The numbers of the epochs, from the present one on; `count` (`train.epochs`) in all.

        In a resumed run the first is that of its last step, with the steps that are left.
        """
        return self._own.epochs(count)

    def validated(self, samples: int, **metrics: float) -> None:
        """Record the metrics of a validation, for the table, the report and the summary.

        Every process calls it with the same values; `sum` helps to get them.
        """
        self._own.shared.validated(samples, metrics)

    def log(self, name: str, value: Tensor | float) -> None:
        """Show a number at the last committed step, in the live table, the report and the loggers.

        Every process may call it; what process 0 gives is shown. In a recipe use a callback's
        `context.log`, whose calls a kill neither loses nor doubles.

        Args:
            name: of its curve; those that begin with `train/` or `validation/` are the run's.
            value: one number.

        Raises:
            RecipeError: the name is taken or cannot be one, or the value is no number.
        """
        number = checked_value(name, value)
        if self.rank == 0 and not self._member.complete:
            shown = number if math.isfinite(number) else None
            self._member.emit("logged", step=self.step, values={name: shown})

    @property
    def _own(self) -> OwnLoop:
        if self._part.loop is None:
            raise SpecError("session.prepare(...) comes first.")
        return self._part.loop

    @property
    def stopped(self) -> bool:
        """Whether the run is to stop: the loader yields no more batches, so leave the loop."""
        return self._part.loop is not None and self._part.loop.engine.state.over

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sum numbers over the processes; every process calls it, and gets the same.

        Raises:
            SpecError: in an iteration that is not the last of its step, or not every
                process makes the same calls.
        """
        if self._part.loop is not None:
            return self._part.loop.shared.sum(values)
        at = self._part.training
        assert at is not None, "prepare() or steps() comes first"
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        at.engine.comm.all_reduce(total).wait()
        return tuple(total.tolist())

    def gather_for_metrics(self, tensors: Any) -> Any:
        """The tensors of all processes, on every process, each sample once.

        Args:
            tensors: with a row for each sample of the present batch; or tuples, lists and
                dicts of them.

        Returns:
            The same nesting, with the rows of all processes in the order of the dataset.
            Over an evaluation loader, what all calls gave together has each sample once.

        Raises:
            SpecError: something else is in there, the tensors of the processes do not fit
                together, or not every process makes the same calls.
        """
        return self._own.shared.gather(tensors)

    def close(self) -> None:
        """Save the model, end the run with the others, and write the report; may be repeated.

        Raises:
            SpecError: your own loop was left in the middle of a step, or not in all processes.
            InstepError: the model cannot be saved, or a worker failed.
        """
        if self._part.closed:
            return
        if self._member.complete:
            self.summary = self._part.end()
            return
        if self._part.loop is not None:
            try:
                self._part.loop.finish()
            except BaseException as error:
                self._part.fail(error)
                raise
            self.summary = self._part.end()
            return
        unfinished = WorkerError(_NOTHING if self._part.training is None else _LEFT)
        self._part.fail(unfinished)
        raise unfinished

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self._part.closed:
            self._part.fail(error)
        else:
            self.close()
