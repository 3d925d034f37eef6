"""What a job is: frozen, checked data, without torch, files or clocks.

`JobSpec` and its sections are the job file, key for key: a field here is a key there, the string
under a field is its documentation, and the checks live beside what they check. As plain data a
spec can be printed, compared, hashed, sent to a worker and stored in a checkpoint.

The tables of strategies and codecs check their names and options (`client/job_checks.py`),
`file.build` types and bounds of data that comes in, a section the rest when it is made.
"""

from __future__ import annotations

import ast
from datetime import date, datetime, time
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from instep.formats import FORMAT
from instep.job.base import Natural, Positive, Section
from instep.job.checkpoint import CheckpointSpec
from instep.job.data import DataSpec, PrepareSpec
from instep.job.launch import ClusterSpec, LaunchSpec
from instep.job.mesh import MeshSpec
from instep.job.privacy import PrivacySpec, places_of
from instep.job.search import SearchSpec
from instep.job.start import LoraSpec, StartSpec
from instep.job.sync import SyncSpec
from instep.job.sync.rounds import SHARED
from instep.job.train import StopSpec, TrainSpec


class ReportSpec(Section, frozen=True, kw_only=True):
    """What to write beside the report."""

    trace_steps: Natural = 2000
    """Steps of each worker to draw in `trace.json`: half from the start, half from the end."""

    profile: tuple[Positive, ...] = ()
    """The first and the last step to trace with torch's profiler, such as `[100, 103]`: each worker
    writes `profile/worker-N.json` into the run's folder, for Perfetto or `chrome://tracing`."""

    loggers: tuple[str, ...] = ()
    """Where the curves go too: `csv`, `tensorboard`, `wandb`, `mlflow`. All but `csv` need an
    extra, as in `pip install 'instep[wandb]'`. A process of its own feeds them."""

    gradient_norm: bool = False
    """Whether to compute the norm of the gradient in every step, for the curve. It is there anyway
    with `train.max_grad_norm`, or `stop.gradient_norm`."""

    def __post_init__(self) -> None:
        if self.profile and (len(self.profile) != 2 or self.profile[0] > self.profile[1]):
            raise ValueError(
                f"profile = {[*self.profile]}: needs the first and the last step to trace, such "
                "as [100, 103]."
            )


class CheckSpec(Section, frozen=True, kw_only=True):
    """What a run checks about itself."""

    corruption: bool = False
    """Find a worker whose machine computes or stores something wrong, by comparing states, and
    gradients of micro-batches that are computed twice. Needs `determinism = "bits"`."""

    content: Literal["off", "sample", "all"] = "sample"
    """Record the content of training samples when a step uses them, for `instep audit --content`:
    of a keyed sample (1 in 256, at most about 512 per epoch), or of all."""

    strict: bool = False
    """Refuse to train unless the run is shown to give the result of one machine
    (`same_as_one_machine` is `yes`)."""


class JobSpec(Section, frozen=True, kw_only=True):
    """One job: what to train, on how many workers, and how they agree."""

    format: Positive = FORMAT
    """Version of the file format. A run writes it into its folder. Your own file does not need it;
    with it, another version of instep refuses the file."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run and of its folder: letters, digits, `.`, `_` and `-`."""

    recipe: Annotated[str, Meta(pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$")]
    """`file.py:function`, or `package.module:function`; the function returns an `instep.Recipe`.
    Relative to the job file. A file in a package is imported as its package has it."""

    python_path: tuple[str, ...] = ()
    """Folders in which the recipe's imports are looked up too, such as `["src"]`. The recipe's own
    folder, or that above its package, needs not be named. Relative to the job file."""

    workers: Positive = 2
    """Processes that compute gradients. With `[mesh]` they make whole replicas: a multiple of
    shard x tensor x stages. With `"auto"`, `instep run` plans the number."""

    seed: Natural = 0
    """Decides the order of the data, the initial parameters, and every random draw."""

    network: Literal["loopback", "private"] = "loopback"
    """`loopback`: nothing leaves a machine unless it is encrypted. `private` declares that only
    trusted machines can reach the network between the hosts, so that nothing is encrypted."""

    train: TrainSpec = field(default_factory=TrainSpec)
    stop: StopSpec = field(default_factory=StopSpec)
    sync: SyncSpec = field(default_factory=SyncSpec)
    mesh: MeshSpec = field(default_factory=MeshSpec)
    prepare: PrepareSpec = field(default_factory=PrepareSpec)
    data: DataSpec = field(default_factory=DataSpec)
    start: StartSpec = field(default_factory=StartSpec)
    lora: LoraSpec = field(default_factory=LoraSpec)
    privacy: PrivacySpec = field(default_factory=PrivacySpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    launch: LaunchSpec = field(default_factory=LaunchSpec)
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    report: ReportSpec = field(default_factory=ReportSpec)
    check: CheckSpec = field(default_factory=CheckSpec)
    search: SearchSpec = field(default_factory=SearchSpec)

    arguments: dict[str, Any] = field(default_factory=dict)
    """Passed to the recipe function by name."""

    @property
    def server_hosts(self) -> range:
        """Numbers of the hosts that are for parameter servers alone."""
        if self.launch.on != "by_hand":
            return range(0)
        return range(len(self.cluster.workers), len(self.cluster.places))

    @property
    def per_commit(self) -> TrainSpec:
        """`train`, with the portions of a commit: those of a step, or of a whole round.

        A round of averaging takes a global batch for each local step, cut into participants.
        """
        step = self.per_iteration
        if step is self.train:
            return step
        return msgspec.structs.replace(step, global_batch=step.global_batch * self.local_steps)

    @property
    def start_after(self) -> int:
        """How many commits are steps that all take together, before the first round."""
        rounds = self.sync.rounds
        return rounds.start_after if rounds is not None else 0

    @property
    def local_steps(self) -> int:
        """Steps of a participant in one commit; 1 for a strategy without rounds."""
        rounds = self.sync.rounds
        return rounds.local_steps // rounds.fragments if rounds is not None else 1

    @property
    def keeps_optimizers(self) -> bool:
        """Whether participants keep the states of their optimizers from round to round."""
        rounds = self.sync.rounds
        return rounds is not None and rounds.local_optimizers == "kept"

    @property
    def measures_norm(self) -> bool:
        """Whether the norm of the gradient is wanted even where nothing clips it."""
        return self.stop.by_norm or self.report.gradient_norm

    @property
    def own_data(self) -> str:
        """The partition by which each participant has data, and epochs, of its own; or empty."""
        rounds = self.sync.rounds
        return rounds.partition if rounds is not None and rounds.partition != SHARED else ""

    @property
    def per_iteration(self) -> TrainSpec:
        """`train`, with the portions of one step, or of one local step of all participants."""
        if self.sync.rounds is None:
            return self.train
        those, places, batch = self.sync.taking_part, self.places, self.train.global_batch
        batch = batch if places == those else max(1, batch // those) * places
        return msgspec.structs.replace(self.train, micro_batches=places, global_batch=batch)

    @property
    def places(self) -> int:
        """How many participants a round has room for: more than are in it where they are drawn at
        random; 0 for a strategy without rounds."""
        sync = self.sync
        if sync.rounds is None or not self.privacy.of_participants:
            return sync.taking_part
        return places_of(sync.participants, sync.taking_part)

    @property
    def portions(self) -> str:
        """The key that says how many portions a commit has."""
        rounds = self.sync.rounds
        if rounds is None:
            return "train.micro_batches"
        return "sync.participants" + (" * sync.options.fraction" if rounds.fraction < 1 else "")

    @property
    def unit(self) -> int:
        """How many micro-batches a replica is dealt as one: one for each of its `shard` ranks. A
        participant of a round is one by itself, and the ranks share its samples."""
        return self.mesh.shard if self.sync.rounds is None else 1

    @property
    def most_workers(self) -> int:
        """The most workers that make replicas with a unit each."""
        return self.per_commit.micro_batches // self.unit * self.mesh.ranks

    @property
    def _who_needs_one(self) -> str:
        if self.mesh.ranks == 1:
            return "a worker"
        return "each replica" if self.unit == 1 else "each `shard` rank of each replica"

    def __post_init__(self) -> None:
        key, most, those = self.portions, self.per_commit.micro_batches, self.sync.taking_part
        what = "micro-batch of each step"
        if self.sync.rounds is not None:
            what = "participant of each round"
            if those > self.train.global_batch:
                raise ValueError(
                    f"{key} = {those} but train.global_batch = {self.train.global_batch}: a "
                    "participant needs at least one sample of each local step. "
                    f"Set {key} to at most {self.train.global_batch}."
                )
            if self.own_data and self.train.global_batch % those:
                even = -(-self.train.global_batch // those) * those
                raise ValueError(
                    f"train.global_batch = {self.train.global_batch} but {key} = {those}: with "
                    "sync.options.partition each participant takes as many samples in a local "
                    f"step. Set train.global_batch to a multiple of {those}, such as {even}."
                )
        elif most > self.train.global_batch:
            raise ValueError(
                f"train.micro_batches = {most} but train.global_batch = {self.train.global_batch}: "
                "a micro-batch needs at least one sample. "
                f"Set micro_batches to at most {self.train.global_batch}."
            )
        if wrong := self.mesh.refusal(self.workers):
            raise ValueError(wrong)
        if self.workers > (workers := self.most_workers):
            passes = self.workers // self.mesh.ranks * self.unit
            fewer = f"Set workers to at most {workers}; or, in a new run, " if workers else "Set "
            raise ValueError(
                f"workers = {self.workers} but {key} = {most}: {self._who_needs_one} needs at "
                f"least one {what}. {fewer}{key} to {passes} or more."
            )
        self._settle_cluster()
        self._check_clip()
        if self.data.length and self.train.tokens_per_batch is None:
            raise ValueError(
                f"data.length = {self.data.length!r} says how long samples are, and "
                "train.tokens_per_batch is not given. Set it, or leave data.length out."
            )
        if self.check.corruption and self.train.determinism != "bits":
            raise ValueError(
                f"check.corruption = true with train.determinism = {self.train.determinism!r}: "
                "workers can be compared only if they compute the same bits. "
                "Set train.determinism to 'bits', or leave check.corruption out."
            )
        if self.check.corruption and self.data.unreadable == "skip":
            raise ValueError(
                "check.corruption = true with data.unreadable = 'skip': a sample that only one of "
                "two workers can read would look like corruption. Leave one of them out."
            )

    def _check_clip(self) -> None:
        """Refuse what does not go with whole numbers of participants, or names samples of one."""
        rounds = self.sync.rounds
        if (
            rounds is not None
            and rounds.secure_sums
            and not (rounds.clip or self.privacy.of_participants)
        ):
            raise ValueError(
                "sync.options.secure_sums = true needs sync.options.clip: masks are over whole "
                "numbers, and their range follows from it. Set it to about how far participants "
                "come in a round."
            )
        if rounds is None or not rounds.clip:
            return
        if self.train.determinism != "bits":
            raise ValueError(
                f"sync.options.clip = {rounds.clip:g} with train.determinism = "
                f"{self.train.determinism!r}: what is clipped is summed as whole numbers. Set "
                "train.determinism to 'bits', or leave sync.options.clip out."
            )
        if self.sync.sealed and self.data.unreadable == "skip":
            raise ValueError(
                "sync.options.secure_sums = true with data.unreadable = 'skip': the log would name "
                "samples of a participant. Leave data.unreadable out."
            )

    def _settle_cluster(self) -> None:
        """A job with machines that join by hand waits for these, unless it says otherwise."""
        launch = self.launch
        if self.cluster.workers and launch.launcher == "hosts":
            raise ValueError(
                "both cluster.workers and launch.hosts name machines. Leave one of them out."
            )
        if self.cluster.workers and not launch.on:
            launch = msgspec.structs.replace(launch, on="by_hand")
            msgspec.structs.force_setattr(self, "launch", launch)
        if launch.on == "by_hand" and not self.cluster.workers:
            raise ValueError(
                "launch.on = 'by_hand', but [cluster] names no machines. Set cluster.master and "
                "cluster.workers."
            )


def as_table(job: JobSpec) -> dict[str, Any]:
    """A job as plain nested tables, with every key."""
    table: dict[str, Any] = msgspec.to_builtins(job, builtin_types=(datetime, date, time))
    return table


@cache
def documentation() -> dict[tuple[str, str], str]:
    """(class, field) to the string under that field, read from the sources of this package."""
    found = {}
    files = sorted(Path(__file__).parent.rglob("*.py"))
    for node in chain.from_iterable(ast.parse(file.read_text("utf-8")).body for file in files):
        if not isinstance(node, ast.ClassDef):
            continue
        for key, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(key.target, ast.Name)
                assert isinstance(text.value, ast.Constant)
                found[node.name, key.target.id] = " ".join(str(text.value.value).split())
    return found
