"""Training inside processes that somebody else started: torchrun, Slurm, MPI, or just Python.

`instep.join()` makes this process a worker of a run. Process 0 also starts the
master, a process of its own, and watches it in a thread (`hosting.py`). With a
recipe, `Session.steps()` trains it; without one, `Session.prepare()` hands back
an ordinary model, optimizer and loader for the user's own loop. Either goes on
with an earlier run where `join(resume=True)` found one; one that is complete is
left as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep import spec_file
from instep.client import early_words, placement
from instep.client.hosting import Host, meet
from instep.client.submit import check_job
from instep.data.choose import cores
from instep.data.loader import Loader
from instep.errors import InstepError, PeerError, SpecError, WorkerError
from instep.recipe.build import Recipe, call, seed_everything
from instep.recipe.quick_start import spare_dynamo
from instep.spec import JobSpec
from instep.store.run_folder import RunFolder
from instep.system import blame
from instep.system.kernels import set_kernels
from instep.worker.member import Member
from instep.worker.own_loop import OwnLoader, OwnLoop, OwnOptimizer
from instep.worker.training import Step, Training, check_device, choose_device

Model = TypeVar("Model", bound=nn.Module)
Moves = TypeVar("Moves", bound=Optimizer)


def join(
    recipe: Callable[..., Any] | Recipe | None = None,
    *,
    name: str | None = None,
    runs: str | Path = "runs",
    arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
    quiet: bool = False,
    network: str = "loopback",
    resume: bool = False,
    **sections: Mapping[str, Any],
) -> Session:
    """Become a worker of a run, together with the other processes of this start.

    How many there are, and which one this is, is read from the environment
    (torchrun, Slurm, Open MPI); a process that was started alone trains alone.
    All generators are seeded from `seed` before this returns, so a model
    that is built next is the same in every process.

    Args:
        recipe: what to train, or the function that makes it; None for an own loop.
        name: of the run and its folder.
        runs: folder of run folders; must be shared where there are several hosts.
        arguments: handed to the recipe function by name.
        seed: decides the order of the data, first parameters, every draw.
        quiet: print no progress.
        network: `private` where the hosts' network is reached by trusted machines only.
        resume: go on with the run of this name from its newest checkpoint, if there is
            one; how many processes there are may have changed. With a recipe, a run
            that is complete is no mistake: `steps()` yields nothing.
        sections: tables of the job file: `train={"epochs": 3}`, `sync={...}`.

    Raises:
        InstepError: the job is wrong, the run cannot go on, or the processes cannot
            train together. What only process 0 can find, the others raise as well.
    """
    spare_dynamo()
    place = placement.placement()
    with early_words.told(place, Path(runs)):
        job = _job(recipe, name, arguments, seed, network, sections, place.size)
        hosts, launcher = job.launch.hosts, job.launch.name
        if hosts or launcher:
            given = f"hosts = {list(hosts)}" if hosts else f"name = {launcher!r}"
            raise SpecError(
                f"launch.{given}: instep.join starts no processes, on "
                "other hosts either. Leave it out and start the script on each, as torchrun and "
                "Slurm do; or use instep.train or instep run, which honour it."
            )
        check_job(job, resumed=resume)
        placement.check_network(place, job.network)
    host = None
    if place.rank == 0:
        host = Host(place, job, Path(runs), quiet=quiet, resume=resume, own_loop=recipe is None)
        member = host.member()
    else:
        member = meet(placement.meeting_file(Path(runs), place), place.rank)
    member.show_itself()
    session = Session(member, place, host)
    try:
        session.begin(recipe)
    except BaseException as error:
        session.fail(error)
        raise
    return session


def _job(
    recipe: Any,
    name: str | None,
    arguments: Mapping[str, Any] | None,
    seed: int,
    network: str,
    sections: Mapping[str, Mapping[str, Any]],
    workers: int,
) -> JobSpec:
    script = Path(sys.argv[0]).resolve()
    function = getattr(recipe, "__name__", "main")
    table = {
        "name": name or (script.stem if script.is_file() else "session"),
        "recipe": f"{script}:{function if function.isidentifier() else 'main'}",
        "workers": workers,
        "seed": seed,
        "network": network,
        "arguments": dict(arguments or {}),
        **{section: dict(values) for section, values in sections.items()},
    }
    return spec_file.absolute(spec_file.build(table, source="instep.join"), Path.cwd())


class Session:
    """This process's part in a run; use it as a context, or call `close` at the end."""

    def __init__(
        self,
        member: Member,
        place: placement.Placement,
        host: Host | None,
    ) -> None:
        self._member, self._host, self._place = member, host, place
        self._recipe: Recipe | None = None
        self.job = member.job
        self.rank, self.size = place.rank, place.size
        self.run = member.run
        self.device = torch.device("cpu")
        self.summary: dict[str, Any] | None = None
        """Of the finished run, on process 0; what it was, where it was complete before."""
        self._training: Training | None = None
        self._loop: OwnLoop | None = None
        self._closed = False

    def begin(self, recipe: Callable[..., Any] | Recipe | None) -> None:
        """Seed everything, take a device, make the recipe if it is needed; `join` calls it."""
        seed_everything(self.job.seed)
        self.device = choose_device(self.job, self._place.local_rank)
        chosen = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 0
        set_kernels(self.job.train, chosen or max(1, cores() // self._place.local_size))
        if not self._member.complete:
            made = call(recipe, self.job.arguments, self.job.seed) if callable(recipe) else recipe
            self._recipe = made

    def steps(self) -> Iterator[Step]:
        """Train the recipe; yields every committed step, and closes the session after the last.

        Where the run goes on, the first is the one after its checkpoint; where it is
        complete, there is none.

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
            self._training.finish()
        except GeneratorExit:
            self.fail(WorkerError("the loop over session.steps() was left before its end."))
            raise
        except BaseException as error:
            self.fail(error)
            raise
        self._end()

    def prepare(
        self,
        model: Model,
        optimizer: Moves,
        dataset: Any,
        *,
        scheduler: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        augment: Callable[[Any, torch.Generator], Any] | None = None,
    ) -> tuple[Model, Moves, OwnLoader]:
        """Make model, optimizer and dataset those of a run, for an ordinary loop.

        Each iteration of the loader is one step: this worker's share of the
        global batch. `optimizer.step()` agrees with the other workers, moves
        the parameters and commits. With `train={"merge": "never"}` an
        iteration is one micro-batch, and the optimizer moves at the last one
        of a step; layers that see their batch (BatchNorm, dropout) then give
        the same at any number of workers. Clip with `train={"max_grad_norm": 1.0}`:
        gradients are agreed on inside `optimizer.step()`, not before it. With
        `"bits"` the batches of a step may come a second time.

        Where the run goes on, model, optimizer and scheduler take up the state of its
        checkpoint, the loader begins within the epoch, and `step` says where.

        Args:
            model: the same in every process; moved to `self.device`.
            optimizer: of the model's parameters.
            dataset: map-style.
            scheduler: advanced by the session, after every step.
            collate: from samples to a batch.
            augment: a sample's random change, keyed by the sample.

        Raises:
            InstepError: the processes cannot train together.
        """
        if self._loop is not None or self._training is not None:
            raise SpecError("prepare() was called before: a session trains one model.")
        loader = None
        try:
            check_device(self.job, self.device)
            loader = Loader(
                dataset,
                seed=self.job.seed,
                shuffle=True,
                collate=collate,
                augment=augment,
                processes=self.job.data.loaders,
                unreadable=self.job.data.unreadable,
                say=lambda text: self._member.emit("warning", text=text),
            )
            loader.begin()
            self._loop = OwnLoop(
                self._member, model.to(self.device), optimizer, scheduler, loader, len(dataset)
            )
            self._loop.join()
        except BaseException as error:
            if loader is not None:
                loader.close()
            self.fail(error)
            raise
        self._formed()
        proxy: Any = OwnOptimizer(self._loop)
        return model, proxy, OwnLoader(self._loop)

    @property
    def step(self) -> int:
        """The last committed step; above 0 at the start where a run goes on."""
        if self._member.complete:
            return RunFolder(self.run).last_step
        at = self._training or self._loop
        return at.step if at else 0

    def record(self, loss: Tensor | float) -> None:
        """Tell the mean loss of the present batch, for the table and the report.

        Raises:
            SpecError: `optimizer.step()` has been called for this batch already.
        """
        assert self._loop is not None, "prepare() comes first"
        self._loop.record(float(loss.detach() if isinstance(loss, Tensor) else loss))

    def validated(self, samples: int, **metrics: float) -> None:
        """Tell what a validation of the whole gave, for the table, the report and the summary.

        Every process calls it with the same values; `sum` helps to get them.
        """
        assert self._loop is not None, "prepare() comes first"
        self._loop.validated(samples, metrics)

    @property
    def stopped(self) -> bool:
        """Whether the run has been told to stop: the loader gives nothing more, leave the loop."""
        return self._loop is not None and self._loop.stopped

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sum numbers over the processes; every process calls it, and gets the same."""
        replica = self._training.replica if self._training else self._loop and self._loop.replica
        assert replica, "prepare() or steps() comes first"
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        replica.comm.all_reduce(total).wait()
        return tuple(total.tolist())

    def _formed(self) -> None:
        if self._host is not None:
            self._host.formed()

    def close(self) -> None:
        """Save the model, end the run with the others, and write the report; once is enough.

        Raises:
            SpecError: your own loop was left in the middle of a step, or not by all.
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
            self.fail(WorkerError("the session was closed before it trained anything."))
        self._closed = True
        self._member.close()

    def _end(self) -> None:
        self._closed = True
        self._member.close()
        if self._host is not None:
            self.summary = self._host.end()

    def fail(self, error: BaseException) -> None:
        """Say why, so that the run ends for everyone, with this as its cause.

        Raises:
            InstepError: where `error` is the echo of what another did.
        """
        self._closed = True
        at, over = self._training or self._loop, None
        try:
            step, phase = (at.in_flight, at.doing) if at else (0, "preparing")
            self._member.failed(blame.failed(error, step, phase))
        except PeerError as ended:  # why, if the master has said so
            over = ended
        self._member.close()
        try:
            if self._host is not None:
                self._host.end()
        except InstepError as cause:
            if isinstance(error, PeerError):
                raise cause from error  # what broke the collective, and not its echo
        else:
            if over is not None and self._host is None and type(error) is PeerError:
                raise over from error
        finally:
            if at is not None:
                at.close()  # last: it waits for what is under way between the workers

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
