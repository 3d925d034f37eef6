"""A worker that predicts: turns come one by one, and each batch's part goes to the run's folder.

A batch knows nothing of other batches: its samples, its draws and its threads do not depend on
how many workers there are, or on which one predicts it. The processes of a replica compute a turn
together, each the batch at its place; replicas have nothing to agree on. Which turns this worker
gets, the master decides (`client/predict/master.py`).
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from instep.comm.protocol.messages import COMPILING, READING, Heartbeat
from instep.data.loader import Loader, Read, Slice
from instep.data.order import key
from instep.data.reading.threads import cpu_clock
from instep.data.samples.fingerprint import Fingerprint, confirmed_fingerprint
from instep.data.shards.urls.remote import use_cache
from instep.data.torch_loader import LoaderParts, columns_in, unpack_loader
from instep.engine.member import Member
from instep.errors import DataError, PeerError, RecipeError
from instep.job.spec import JobSpec
from instep.parallel.compiled import compiling
from instep.parallel.nested import on_tensors
from instep.recipe import lora
from instep.recipe.build import call, make_model, seed_everything, set_generators
from instep.recipe.forward import Forward, to_device
from instep.recipe.outputs import as_lines, as_rows, columns, predictor
from instep.recipe.recipe import Recipe
from instep.recipe.source_file import load_function
from instep.state.load import load_model
from instep.store.predictions import Plan, Predictions
from instep.system.kernels import set_kernels
from instep.words import a_or_an
from instep.worker.passes.evaluate import first_readable
from instep.worker.predict.replica import split_model
from instep.worker.reading.early_reads import EarlyReads
from instep.worker.reading.loader_watch import LoaderWatch
from instep.worker.replica.replica import Replica
from instep.worker.training.devices import check_device, choose_device

OF_PREDICTION = 6
"""What a key is drawn for, beside the draws of training and of the data layer: one batch."""

THREADS = 1
"""Of each worker, unless the job says how many: sums of more threads round differently."""


class Predictor:
    """Predicts the batches that the master hands out.

    Args:
        member: this worker's membership.
        local_rank: its number on this machine.
    """

    def __init__(self, member: Member, local_rank: int) -> None:
        self._member, self._job, self._local_rank = member, member.job, local_rank
        self._folder = Predictions.at(member.run)
        self._at = member.job.mesh.coordinate(member.number)
        self._replica: Replica | None = None
        self._phase, self._done, self._number = "recipe", 0, -1
        self._queue: deque[list[int]] = deque()
        self._loader: Loader | None = None
        self._spare: Any = None  # a batch to compute with where there is nothing to predict
        self._watch, self._clock = LoaderWatch(), cpu_clock()

    @property
    def at(self) -> tuple[int, str]:
        """What this worker was doing: steps are of training."""
        batch = f" of batch {self._number}" if self._number >= 0 else ""
        return 0, f"{self._phase}{batch}"

    def released(self) -> None:
        """Nothing is to be handed over."""

    def run(self) -> None:
        """Predict until there are no more batches."""
        try:
            self._run()
        except PeerError:  # of this worker's replica, unless the master is gone
            if self._job.mesh.ranks == 1:
                raise
            self._member.wait_to_be_killed()
        finally:
            if self._replica is not None:
                self._replica.close()
            if self._loader is not None:
                self._loader.close()

    def _run(self) -> None:
        job, plan = self._job, self._folder.plan()
        set_kernels(job.train, THREADS)
        device = _device(job, self._local_rank)
        check_device(job, device)
        use_cache(job.data.cache, job.data.cache_gb)
        recipe = call(load_function(job.recipe, places=job.python_path), job.arguments, job.seed)
        self._phase = "dataset"
        parts = _dataset(plan, job)
        self._phase = "building"
        early = EarlyReads(self._watch)
        self._member.at = lambda: early.heartbeat(self._phase, self._clock())
        self._loader = loader = Loader.of_job(
            job,
            parts,
            "validation",
            collate=recipe.collate,
            marks=self._member.marks,
            say=lambda text: self._member.emit("warning", text=text),
        )
        loader.begin()
        model = self._model(recipe, plan, device)
        if self._member.number == 0:
            for each in parts.unused("--data", shuffled=None, batch=plan.batch):
                if each.remedy:
                    what = each.text.partition(", which")[0]
                    text = f"{what}, which is not used: each sample is predicted once, in order."
                    self._member.emit("warning", text=text)
            self._check_dataset(loader)
        self._member.emit("dataset_known", samples=loader.samples)
        self._member.at = self._heartbeat
        self._member.predictions.ready()
        self._predict_all(loader, recipe, model, plan, device)

    def _model(self, recipe: Recipe, plan: Plan, device: torch.device) -> nn.Module:
        """The trained model; in a replica of several processes this one's part of it."""
        model = make_model(recipe, self._job.seed)
        lora.add(self._job.lora, model, self._job.seed)  # a run's own file has its adapters apart
        model.to(device)
        if self._job.mesh.ranks == 1:
            load_model(plan.model, model)
            return model.eval()
        assert self._loader is not None, "it was made before"
        self._phase = "meeting"
        self._replica = split_model(self._member, recipe, model, plan.model, self._loader, device)
        self._replica.share_batches(self._loader, self._waiting)
        self._phase = "building"
        return model

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """In this context a read only waits for other processes of the replica."""
        before, self._phase = self._phase, "predicting"
        yield
        self._phase = before

    def _check_dataset(self, loader: Loader) -> None:
        """Compare the dataset with what it was when the first parts were made."""
        before = self._folder.dataset()
        if before is None:
            self._folder.know(loader.fingerprint().to_plain())
            return
        was = Fingerprint.from_plain(before)
        now = confirmed_fingerprint(loader.fingerprint, was)
        if not now.same_as(was):
            what = (
                f"had {was.samples:,} samples and has {now.samples:,} now"
                if now.samples != was.samples
                else f"is another one (the first difference is in sample {was.changes(now)[0]})"
            )
            raise DataError(
                f"the dataset {what}, and {self._folder.path} holds predictions of what it was. "
                "Put it back; or remove that folder, to begin anew."
            )

    def _predict_all(
        self, loader: Loader, recipe: Recipe, model: nn.Module, plan: Plan, device: torch.device
    ) -> None:
        forward = Forward(recipe, model, device, self._job.train.precision)
        predict = predictor(recipe)
        if self._replica is not None:
            forward.run = self._replica.run
        while True:
            self._phase, self._number = "waiting", -1
            self._queue += self._member.predictions.arrived(wait=True)
            begun: deque[tuple[list[int], Slice]] = deque()
            reads = loader.read(self._slices(loader.samples, plan.batch, begun))
            while True:
                self._phase = READING
                read = next(reads, None)
                if read is None:
                    break
                turn, part = begun.popleft()
                self._number = self._own(turn)
                batch = read.batch
                if not read.size and self._replica is not None:
                    batch = self._any_batch(loader)  # for the other processes of the replica
                self._phase = "predicting"
                found = None
                if batch is not None:
                    set_generators(key(self._job.seed, OF_PREDICTION, self._number))
                    model.eval()  # the user's function may have changed that
                    with torch.no_grad(), forward.autocast():
                        outputs = forward.run(predict, model, to_device(batch, device))
                    if read.size and self._writes(turn):
                        found = columns(outputs, read.size)
                if self._writes(turn):
                    self._phase = "saving"
                    self._write(part, read, found, plan.format)
                    self._member.predictions.predicted(self._number)
                self._done += 1

    def _any_batch(self, loader: Loader) -> Any:
        if self._spare is None:
            self._spare = first_readable(loader, loader.samples)
        return on_tensors(self._spare, Tensor.clone)  # the user's function may change it

    def _own(self, turn: list[int]) -> int:
        """The batch of a turn that this process computes."""
        return turn[self._at.shard % len(turn)]

    def _writes(self, turn: list[int]) -> bool:
        """Whether this process tells what it computes: one of those with the same batch does."""
        last = self._at.stage == self._job.mesh.stages - 1
        return self._at.shard < len(turn) and self._at.tensor == 0 and last

    def _slices(
        self, samples: int, batch: int, begun: deque[tuple[list[int], Slice]]
    ) -> Iterator[Slice]:
        """The batches in hand; more may come while these are read ahead."""
        while True:
            self._queue += self._member.predictions.arrived(wait=False)
            if not self._queue:
                return
            turn = self._queue.popleft()
            number = self._own(turn)
            part = Slice(0, number * batch, min((number + 1) * batch, samples))
            begun.append((turn, part))
            yield part

    def _write(self, part: Slice, read: Read, found: dict[str, Any] | None, suffix: str) -> None:
        skipped = [[each.sample, each.cause] for each in read.skipped]
        head: dict[str, Any] = {"first": part.first, "stop": part.stop, "skipped": skipped}
        body = b""
        if found is None:
            head["columns"] = None
        elif suffix == ".jsonl":
            missing = {each.sample for each in read.skipped}
            samples = [n for n in range(part.first, part.stop) if n not in missing]
            head["columns"], body = {}, as_lines(found, samples)
        else:
            head["columns"], body = as_rows(found, suffix)
        self._folder.write(self._number, head, body)

    def _heartbeat(self) -> Heartbeat:
        loader, waits = self._loader, self._phase == READING
        pids = loader.pids if loader is not None else []
        if pids:
            at = (self._phase, self._done)
            self._watch.turn(time.monotonic(), pids, at=at, waits=waits, known=self._done > 0)
        read_s = loader.cpu_s if loader is not None else 0.0
        return Heartbeat(
            phase=COMPILING if compiling() else self._phase,
            progress=self._done + self._watch.ended,
            cpu_s=self._clock() + read_s,
        )


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _device(job: JobSpec, local_rank: int) -> torch.device:
    """A GPU if there is one, which several workers may share: the numbers do not depend on them."""
    count = torch.cuda.device_count()
    return choose_device(job, local_rank % count, 1) if count else choose_device(job, 0, 1)


def _dataset(plan: Plan, job: JobSpec) -> LoaderParts:
    """What the function of `--data` returns; it gets those of the job's arguments that it takes."""
    function = load_function(plan.data, "data", job.python_path)
    wanted = inspect.signature(function).parameters.values()
    taken = {p.name: job.arguments[p.name] for p in wanted if p.name in job.arguments}
    for p in wanted:
        if p.default is p.empty and p.kind not in _ANY and p.name not in taken:
            raise RecipeError(
                f"the function of --data, {plan.data}, needs {p.name!r}, which is none of the "
                "job's [arguments]: give it a default."
            )
    seed_everything(job.seed)
    given = function(**taken)
    try:
        parts = unpack_loader(given)
    except ValueError as error:
        raise RecipeError(f"--data {plan.data} returned a DataLoader that {error}.") from None
    if columns := columns_in(parts.dataset):
        raise RecipeError(f"--data {plan.data} returned {a_or_an(parts.dataset)} {columns}")
    return parts
