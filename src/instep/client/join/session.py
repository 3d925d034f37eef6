"""The part that a process has in a run that it has joined, or whose script it runs.

With a recipe, `Session.steps()` trains it; without one, `Session.prepare()` returns model,
optimizer and loader for the user's own loop. With `join(resume=True)` both continue an earlier run,
if there is one.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from instep.client.join import placement
from instep.client.join.hosting import Host
from instep.client.join.prepared import Prepared
from instep.data.loader import Loader
from instep.data.reading.choose import cores
from instep.data.shards.urls.remote import use_cache
from instep.engine.member import Member
from instep.engine.membership import Released
from instep.errors import InstepError, PeerError, SpecError, WorkerError
from instep.process import Script
from instep.recipe.build import call, seed_everything
from instep.recipe.callbacks import checked_value
from instep.recipe.recipe import Recipe
from instep.recipe.weights import WeightedLoss
from instep.system import causes
from instep.system.kernels import set_kernels, share
from instep.worker.loop.after_commit import Step
from instep.worker.own.evaluation import EvaluationLoader
from instep.worker.own.loop import OwnLoader, OwnLoop
from instep.worker.own.rounds import OwnRounds
from instep.worker.training.devices import check_device, check_encrypted, choose_device
from instep.worker.training.training import Training

_OPEN = set[Path]()
"""Runs of which this is process 0, and whose session is not closed."""


@atexit.register
def _warn_of_open_sessions() -> None:
    failed = hasattr(sys, "last_value")  # an exception nobody caught, which says enough
    for run in _OPEN if not failed else ():
        print(
            "instep: warning: the program ended without session.close(), so the run has no model "
            f"and no report: {run}. Use `with instep.join(...) as session:`.",
            file=sys.stderr,
        )


class Session:
    """This process's part in a run; use it in a `with` statement, or call `close` at the end."""

    def __init__(
        self,
        member: Member,
        place: placement.Placement,
        host: Host | None,
        script: Script | None = None,
    ) -> None:
        self._member, self._host, self._place, self._script = member, host, place, script
        self._recipe: Recipe | None = None
        self.job = member.job
        self.run = member.run
        self.device = torch.device("cpu")
        self.summary: dict[str, Any] | None = None
        """Of the finished run, on process 0."""
        self._training: Training | None = None
        self._loop: OwnLoop | None = None
        self._readers: list[Loader] = []
        self._closed = False
        if host is not None:
            _OPEN.add(self.run)

    @property
    def rank(self) -> int:
        """This process's number among those that train together now, from 0."""
        form = self._member.form
        return form.rank if form is not None else self._place.rank

    @property
    def size(self) -> int:
        """How many processes train together now."""
        form = self._member.form
        return len(form.members) if form is not None else self._place.size

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0 of those that train together now."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """`print` on process 0; nothing on the others."""
        if self.is_main_process:
            print(*values, **options)

    def begin(self, recipe: Callable[..., Any] | Recipe | None) -> None:
        """Seed everything, choose a device, make the recipe if needed; `join` calls it."""
        seed_everything(self.job.seed)
        use_cache(self.job.data.cache, self.job.data.cache_gb)
        self.device = choose_device(self.job, self._place.local_rank, self._place.local_size)
        check_encrypted(self._member, self.device)
        chosen = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 0
        if self._script is not None:
            chosen = share(cores(), self.job.workers, self.job.launch.count)
        set_kernels(self.job.train, chosen or max(1, cores() // self._place.local_size))
        if not self._member.complete:
            arguments = dict(self.job.arguments)
            if self._script is not None:
                arguments.pop("argv", None)  # the script's own
            made = call(recipe, arguments, self.job.seed) if callable(recipe) else recipe
            self._recipe = made

    def steps(self) -> Iterator[Step]:
        """Train the recipe; yields every committed step, and closes the session after the last.

        In a resumed run, the first is the one after its checkpoint; in a complete run there
        is none.

        Raises:
            InstepError: the recipe cannot be trained, or a worker failed.
        """
        if self._member.complete:
            self._end()
            return
        if self._recipe is None:
            raise SpecError("steps() trains a recipe; give one: instep.join(recipe).")
        try:
            self._training = Training(self._member, self._recipe, self.device)
            self._training.join()
            self._formed()
            yield from self._training.steps()
        except GeneratorExit:
            self.fail(WorkerError("the loop over session.steps() was left before its end."))
            raise
        except BaseException as error:
            self.fail(error)
            raise
        self._end()

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
        if self._loop is not None or self._training is not None:
            raise SpecError("prepare() was called before: a session trains one model.")
        try:
            check_device(self.job, self.device)
            shuffled = self.job.data.shuffled
            given = Prepared.of(parts, scheduler, self.job.per_iteration, shuffled=shuffled)
            self._readers = [
                self._reader(given, n, collate, augment) for n in range(len(given.data))
            ]
            for reader in self._readers:
                reader.begin()
            self._loop = loop = self._own_loop(given, advances=scheduler is not None)
            loop.join()
        except BaseException as error:
            self._close_readers()
            self.fail(error)
            raise
        self._formed()
        loaders: list[Any] = [OwnLoader(loop, given.data[0].given.info_dataset)]
        for data, reader in zip(given.data[1:], self._readers[1:], strict=True):
            batch = data.batch or self.job.train.global_batch
            own = data.given.info_dataset
            loaders.append(EvaluationLoader(loop.shared, reader, reader.samples, batch, own))
        return given.handed_back(loaders)

    def _own_loop(self, given: Prepared, *, advances: bool) -> OwnLoop:
        kind = OwnRounds if self.job.sync.rounds is not None else OwnLoop
        return kind(
            self._member,
            given.model.to(self.device),
            given.optimizer,
            given.scheduler,
            self._readers[0],
            self._readers[0].samples,
            given.scaler,
            given.lost,
            advances=advances,
        )

    def _reader(self, given: Prepared, number: int, collate: Any, augment: Any) -> Loader:
        parts = given.data[number].given
        return Loader.of_job(
            self.job,
            parts,
            "training" if number == 0 else "validation",
            collate=collate if number == 0 else parts.collate or collate,
            augment=augment,
            say=lambda text: self._member.emit("warning", text=text),
        )

    def _close_readers(self) -> None:
        for reader in self._readers:
            reader.close()
        self._readers = []

    @property
    def step(self) -> int:
        """The last committed step; above 0 at the start of a resumed run."""
        if self._member.complete:
            return self._member.last_step
        at = self._training or self._loop
        return at.state.progress.step if at else 0

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
        if self._loop is None:
            raise SpecError("session.prepare(...) comes first.")
        return self._loop

    @property
    def stopped(self) -> bool:
        """Whether the run is to stop: the loader yields no more batches, so leave the loop."""
        return self._loop is not None and self._loop.state.over

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sum numbers over the processes; every process calls it, and gets the same.

        Raises:
            SpecError: in an iteration that is not the last of its step, or not every
                process makes the same calls.
        """
        if self._loop is not None:
            return self._loop.shared.sum(values)
        at = self._training
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

    def _formed(self) -> None:
        if self._host is not None:
            self._host.formed()

    def close(self) -> None:
        """Save the model, end the run with the others, and write the report; may be repeated.

        Raises:
            SpecError: your own loop was left in the middle of a step, or not in all processes.
            InstepError: the model cannot be saved, or a worker failed.
        """
        if self._closed:
            return
        if self._member.complete:
            self._end()
            return
        if self._loop is not None:
            try:
                self._loop.finish()
            except BaseException as error:
                self.fail(error)
                raise
            self._end()
        elif self._training is None:
            nothing = WorkerError(
                "the session was closed before it trained anything: call session.prepare(...) and "
                "loop over its loader, or session.steps() with a recipe."
            )
            self.fail(nothing)
            raise nothing
        self._closed = True
        self._member.close()

    @property
    def closed(self) -> bool:
        """Whether this process has finished its part in the run."""
        return self._closed

    @property
    def at(self) -> tuple[int, str]:
        """The step that is being computed, and the phase."""
        at = self._training or self._loop
        return (at.in_flight, at.doing) if at else (0, "preparing")

    def _end(self) -> None:
        self._closed = True
        _OPEN.discard(self.run)
        self._close_readers()
        self._member.close()
        if self._host is not None:
            self.summary = self._host.end()

    def fail(self, error: BaseException) -> None:
        """Report an error, so that the run ends in every process with this as its cause.

        Raises:
            InstepError: the cause, if `error` is only a consequence of another process's error.
        """
        self._closed = True
        _OPEN.discard(self.run)
        at, over = self._training or self._loop, None
        if self._script is not None:  # which sends the last message
            self._script.at = self.at
            if at is not None and isinstance(error, Released):
                at.released()
            elif at is not None:
                at.close()
            self._close_readers()
            return
        try:
            self._member.failed(causes.failed(error, *self.at))
        except PeerError as ended:  # says why, if the master has said so
            over = ended
        self._member.close()
        try:
            if self._host is not None:
                self._host.end()
        except InstepError as cause:
            if isinstance(error, PeerError):
                raise cause from error  # the cause, not its consequence
        else:
            if over is not None and self._host is None and type(error) is PeerError:
                raise over from error
        finally:
            self._close_readers()
            if at is not None:
                at.close()  # last: it waits for collectives that are in flight

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self._closed:
            self.fail(error)
        else:
            self.close()
