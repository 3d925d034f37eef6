"""Steps of the real engine in a process that is thrown away: no master, no run, nothing stays.

The group is real, as are strategy, codec, optimizer and passes. Ways in: `ProbeMember`,
`RehearsedSteps`.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from instep.comm.base import Comm
from instep.comm.buckets import lay_out
from instep.comm.protocol.messages import Form
from instep.data.loader import Read, Slice
from instep.data.order import position
from instep.data.samples import last_read
from instep.engine.gradients import Gradients
from instep.engine.membership import RecordSender, RunStore
from instep.engine.trial_result import Trial
from instep.errors import InstepError, PeerError
from instep.job.spec import JobSpec
from instep.job.sync.tables import defaults_of
from instep.lab.check import measures
from instep.lab.check.lone_member import LoneMember
from instep.worker.loop.after_commit import AfterCommit
from instep.worker.training.training import Training

_NO_STOPPING = SimpleNamespace(
    asked_to_stop=lambda step: False,
    not_finite=lambda loss, norm: "",
    too_far_apart=lambda spread: "",
    spec=SimpleNamespace(non_finite=True),
)
"""Stop rules, of which none stops anything."""

_BUCKET_MB = 8.0

TRIED_STEP = 16
"""One in which a run tries the model that it has trained (`worker/passes/late_trial.py`)."""


class ProbeMember(LoneMember):
    """One of some processes that take steps of a job together, without a master.

    Args:
        job: what they would train.
        form: the group, and this process's rank in it.
        folder: where they meet; thrown away at the end.
        address: at which this process listens.
    """

    def __init__(self, job: JobSpec, form: Form, folder: Path, address: str) -> None:
        super().__init__(job, lambda name, fields: None)
        self.number, self.form, self.run, self.role = form.rank, form, folder, "probe"
        self.address = self.outside = address
        self.sees_run = True  # for the layout of a mesh, which lies there
        self.run_store = cast(RunStore, SimpleNamespace(set=lambda key, value: None))
        self._meet: Store = FileStore(str(folder / "meet"), len(form.members))
        self.started = time.time()
        quiet = SimpleNamespace(add=lambda ledger, steps: None, flush=lambda: None)
        self.records = cast(RecordSender, quiet)

    def broken(self, error: PeerError | None = None, *, holds: bool = False) -> None:
        """End: there is no next group."""
        raise error or PeerError("another process of the crew has ended")

    def store(self, group: str = "") -> Any:
        """The store by which they connect, or a group of them."""
        return PrefixStore(f"generation/{group}", self._meet)

    def replica_store(self, group: str = "") -> Any:
        """The store by which the processes of this one's replica connect."""
        replica = self.job.mesh.coordinate(self.number).replica
        return PrefixStore(f"replica {replica}/{group}", self._meet)


class StepTimes(NamedTuple):
    """Seconds of one step of one process."""

    computed: float
    """Reading and passes."""
    backward: float
    exchanged: float
    """From the end of its passes to the end of the exchange."""
    updated: float
    whole: float


class RehearsedSteps:
    """Takes steps of a job as one of its workers would.

    Args:
        training: built with a `ProbeMember`.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._job = training, training.job

    # ---- before the group

    def try_merging(self) -> Trial:
        """Find out, as worker 0 of a run does, whether micro-batches are run as one pass."""
        return self._training._try()

    def passes(self) -> list[tuple[int, float]]:
        """Time passes of 1, 2, 4 ... micro-batches: samples and seconds of each."""
        found = []
        for samples in self._sizes():
            read = self._read(samples)
            if read is not None:
                forward = self._training._forward
                found.append((read.size, measures.seconds_of_pass(forward, read)))
        return found

    def update(self) -> measures.OfOptimizer:
        """Time the optimizer's step, on gradients that the passes have left."""
        training = self._training
        found = measures.of_optimizer(training._built, training.device)
        training._model.zero_grad(set_to_none=True)
        return found

    def _sizes(self) -> list[int]:
        """Samples of the passes that are timed, each once."""
        each, sizes, many = self._micro_batch, [], 1
        while many < self._job.train.micro_batches:
            sizes.append(each * many)
            many *= 2
        whole = [self._batch] if self._fits(self._batch) else []
        return sorted({*(size for size in sizes if self._fits(size)), *whole})

    @property
    def _batch(self) -> int:
        """Samples of a step; where batches are made by length, of one in the mean."""
        batches = self._training.batches
        return self._job.train.global_batch if batches.sizes is None else batches.size

    @property
    def _micro_batch(self) -> int:
        return max(1, self._batch // self._job.train.micro_batches)

    def _fits(self, samples: int) -> bool:
        """Whether so many samples are few enough to be tried: what one pass takes is not known."""
        return samples <= max(1, self._training.samples)

    def _read(self, samples: int) -> Read | None:
        loader = self._training._loader
        where = position(1, loader.samples, self._batch)
        reads = loader.read([Slice(where.epoch, where.first, where.first + samples)])
        read = next(reads)
        reads.close()
        return read if read.size else None

    def buckets(self) -> list[tuple[float, float]]:
        """Share of all bytes of each bucket, and how much of a backward pass is over when it is
        full."""
        training = self._training
        parameters = training.engine.turns[0].slots
        sync = self._job.sync
        options = defaults_of(sync.name) | sync.all_options
        limit = int(float(options.get("bucket_mb", _BUCKET_MB)) * 1e6)
        encodes = sync.codec != "none" and not options.get("encode_vectors")
        last = [n for n, each in enumerate(parameters) if encodes and each.dim() < 2]
        laid = lay_out(parameters, [limit], last=last)
        times, ends = self._gradient_times(len(parameters))
        whole = sum(each.flat.nbytes for each in laid) or 1
        found, at = [], 0.0
        for each in laid:
            at = max([at, *(times[member] for member in each.members)])
            found.append((each.flat.nbytes / whole, min(1.0, at / ends) if ends else 1.0))
        return found

    def _gradient_times(self, count: int) -> tuple[list[float], float]:
        """When each gradient is there, since a backward pass began, and when it is over."""
        training = self._training
        read = self._read(self._micro_batch)
        times = [0.0] * count
        if read is None:
            return times, 0.0
        begin = ends = 0.0
        for _ in range(2):  # the first one is slower
            training._model.zero_grad(set_to_none=True)
            loss = training._forward.loss(read.batch, read.size, always=True)
            if loss is None:
                return times, 0.0

            def note(slot: int, gradient: object) -> None:
                times[slot] = time.perf_counter()

            noting = Gradients(training.engine.turns[0].slots, note)
            begin = time.perf_counter()
            loss.loss.backward()
            ends = time.perf_counter()
            noting.close()
        return [max(0.0, each - begin) for each in times], ends - begin

    # ---- in the group

    def begin(self, trial: Trial) -> Comm:
        """Form a group, as at the start of a run, and return it."""
        training = self._training
        training.engine.state.trial = trial
        training._comms = comm, column = training._make_comms()
        training.engine.begin(comm, column)
        training._before_steps(comm)
        training.engine.start(comm, column, training._lockstep(comm), compare=False)
        _without_rules(training.after)
        training._model.train()
        self._plan = training._plan(1)
        ahead = (each for _, share in training._plan(1) for each in training.compute.slices(share))
        self._loads = training._loader.read(ahead)
        return comm

    def step(self) -> StepTimes:
        """Take one; what it reads may have been read ahead, as in a run."""
        training = self._training
        since, clock = time.perf_counter(), training.engine.clock
        where, share = next(self._plan)
        training.step += 1
        last_read.set_step(training.step)
        _drained(training._one_step(where, share, self._loads))
        exchanged = clock.wait + clock.wire
        whole = time.perf_counter() - since
        return StepTimes(clock.computing, clock.backward, exchanged, clock.update, whole)

    def steps(self, count: int) -> list[StepTimes]:
        """Take so many, one right after the other: each takes until the next begins."""
        begins, found = list[float](), list[StepTimes]()
        for _ in range(count):
            begins.append(time.perf_counter())
            found.append(self.step())
        ends = [*begins[1:], time.perf_counter()][:count]
        return [
            each._replace(whole=end - begin)
            for each, begin, end in zip(found, begins, ends, strict=True)
        ]

    def end(self) -> None:
        """Read nothing ahead any more."""
        self._loads.close()

    def try_trained(self) -> None:
        """Compare the loss of a step's samples again, as a run does now and then, with other
        passes: the most memory that its first worker takes."""
        training = self._training
        where, share = next(self._plan)
        with suppress(InstepError):  # with check.strict a run would be refused
            training._late.try_trained(where, share, TRIED_STEP)

    @property
    def passes_of_a_step(self) -> int:
        """How many passes this worker runs in a step."""
        _, share = next(self._training._plan(self._training.step + 1))
        return len(share.passes)


def _without_rules(after: AfterCommit) -> None:
    after._stopping = cast(Any, _NO_STOPPING)


def _drained(steps: Generator[Any, None, Any]) -> None:
    for _ in steps:
        pass
