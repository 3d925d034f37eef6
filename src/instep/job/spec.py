"""What a job is: frozen, checked data, without torch, files or clocks.

`JobSpec` and its sections are the job file, key for key: a field here is a key there, the string
under a field is its documentation, and the checks live beside what they check. As plain data a
spec can be printed, compared, hashed, sent to a worker and stored in a checkpoint.

The tables of strategies and codecs check their names and options (`client/job_checks.py`),
`spec_file.build` types and bounds of data that comes in, a section the rest when it is made.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, field

from instep.formats import FORMAT
from instep.units import host_and_port, seconds_in

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the job file: no unknown keys, no guessed types, never changed."""


class TrainSpec(Section, frozen=True, kw_only=True):
    """How long to train, in which portions, and how exactly."""

    epochs: Positive | None = None
    """Passes over the training data; 10 if neither this nor `steps` is given."""

    steps: Positive | None = None
    """Updates of the parameters, instead of `epochs`."""

    global_batch: Positive = 64
    """Samples of one step, over all workers together."""

    micro_batches: Positive = 8
    """Parts of a global batch, in which work is distributed. Fixed for the job."""

    merge: Literal["auto", "always", "never"] = "auto"
    """Whether a worker runs its micro-batches as one larger forward pass: `auto` if a trial
    shows that no layer can tell the difference, `never` to save memory."""

    batch_norm: Literal["micro_batch", "global"] = "micro_batch"
    """What batch normalisation sees: each micro-batch, or the `global` batch of the step, over all
    workers. With `global` a worker runs its micro-batches as one pass, and the workers wait for
    each other in every such layer."""

    deal: Literal["speed", "even"] = "speed"
    """How work is distributed: `speed` gives a slow worker, or with `[mesh]` a slow replica, fewer
    micro-batches, `even` gives all the same number. Your own loop always has `even`."""

    determinism: Literal["order", "bits"] = "order"
    """`order`: the same global batches at any number of workers, results equal to rounding.
    `bits`: the same parameters, bit for bit."""

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number type of the forward pass (autocast); `float16` scales the loss and needs CUDA."""

    max_grad_norm: Annotated[float, Meta(gt=0)] | None = None
    """Clip the gradient to this global norm."""

    ema: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Keep a moving average of the parameters with this decay, such as 0.999, moved at each step.
    The run validates with it, and saves it as `model.safetensors`; checkpoints have both."""

    validate_every: Natural = 0
    """Steps between validations; 0: validate at the end of every epoch."""

    stop_after_steps: Natural = 0
    """Above 0: stop cleanly after this step, resumable. A resumed run forgets it."""

    threads: Natural = 0
    """Threads of each worker; 0: divide the machine's cores evenly."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto`: a GPU for each worker if there are enough, otherwise the CPU."""

    @property
    def passes(self) -> int:
        """Epochs of a job that does not count steps."""
        return self.epochs or 10

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"both epochs = {self.epochs} and steps = {self.steps} are given: "
                "a run has one length. Leave one of them out."
            )
        if self.determinism == "bits" and self.merge == "always":
            raise ValueError(
                "merge = 'always' with determinism = 'bits': for the same bits each micro-batch is "
                "computed separately. Leave merge out."
            )
        if self.batch_norm == "global" and self.determinism == "bits":
            raise ValueError(
                "batch_norm = 'global' with determinism = 'bits': the same bits need each "
                "micro-batch computed apart. Leave one of them out."
            )
        if self.batch_norm == "global" and self.merge == "never":
            raise ValueError(
                "batch_norm = 'global' with merge = 'never': a worker's micro-batches are one "
                "pass, as a layer needs all of them at once. Leave merge out."
            )
        if self.max_grad_norm is not None and not math.isfinite(self.max_grad_norm):
            raise ValueError(f"max_grad_norm = {self.max_grad_norm}: needs to be a finite number.")


class StopSpec(Section, frozen=True, kw_only=True):
    """When to stop before the run reaches its length. A rule that is not set never fires."""

    metric: str = "loss"
    """The metric of each validation that `target` and `patience` watch: `loss`, or one of the
    recipe."""

    mode: Literal["auto", "min", "max"] = "auto"
    """Whether small or large is better; `auto` is `min` for `loss` and `max` for all others."""

    target: float | None = None
    """Stop at the validation in which the metric reaches this value."""

    patience: Natural = 0
    """Stop after this many validations in a row without an improvement; 0: never."""

    least_change: Annotated[float, Meta(ge=0)] = 0.0
    """The smallest improvement of the metric that resets `patience`."""

    non_finite: bool = True
    """Stop if the loss is not finite, or the norm of the gradient if it is computed anyway; false:
    only warn."""

    rise: Annotated[float, Meta(gt=1)] | None = None
    """Stop if the mean loss of the last `window` steps exceeds the lowest so far so many times."""

    window: Positive = 100
    """Steps over which `rise` takes the mean."""

    gradient_norm: Annotated[float, Meta(gt=0)] | None = None
    """Stop if the global norm of the gradient, before clipping, is below this."""

    spread: Annotated[float, Meta(gt=0)] | None = None
    """Of the strategies with rounds: stop if the participants are this many times as far from their
    mean as the mean has moved in the round."""

    time_limit: str | Annotated[float, Meta(gt=0)] | None = None
    """Stop when the whole run has taken this long: `"90s"`, `"30m"`, `"1h30m"`, or seconds."""

    @property
    def time_limit_s(self) -> float | None:
        """The time limit in seconds."""
        return seconds_in(self.time_limit) if isinstance(self.time_limit, str) else self.time_limit

    @property
    def upwards(self) -> bool:
        """Whether a larger value of the metric is a better one."""
        return self.mode == "max" or (self.mode == "auto" and self.metric != "loss")

    @property
    def by_metric(self) -> bool:
        """Whether a rule looks at validations."""
        return self.target is not None or self.patience > 0

    @property
    def by_step(self) -> bool:
        """Whether a rule needs the master at every step."""
        return self.by_norm or self.rise is not None

    @property
    def by_norm(self) -> bool:
        """Whether a rule needs the norm of the gradient."""
        return self.gradient_norm is not None

    def __post_init__(self) -> None:
        for name in ("target", "least_change", "rise", "gradient_norm", "spread", "time_limit"):
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} = {value}: needs to be a finite number.")
        try:
            positive = self.time_limit_s is None or self.time_limit_s > 0
        except ValueError:
            positive = False
        if not positive:
            raise ValueError(
                f"time_limit = {self.time_limit!r}: needs a length of time above 0, "
                "such as '90s', '30m' or '1h30m'."
            )


SHARED = "none"
"""The partition of data that all participants share."""


class RoundSpec(Section, frozen=True, kw_only=True):
    """Options of the strategies with rounds that say what a round is."""

    local_steps: Positive = 10
    """How many steps a participant takes in a round, before all are averaged."""

    local_optimizers: Literal["reset", "kept"] = "reset"
    """Whether a participant's optimizer state (moments, momentum) is dropped at the end of a
    round, or kept for its next one."""

    start_after: Natural = 0
    """How many steps all take together, as with `all_reduce`, before the first round (post-local
    SGD). They count as steps of the job, as a round does."""

    fragments: Positive = 1
    """Of `diloco`: into how many parts the parameters are cut, of which one after the other agrees,
    while participants go on (Streaming DiLoCo). A commit is then `local_steps` / `fragments` local
    steps, and the agreement of one of them."""

    delay: Natural = 0
    """With `fragments`: so many local steps participants take while a fragment is under way."""

    fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """How much of the participants are in a round; which, is drawn for each by the seed."""

    local_parameters: tuple[str, ...] = ()
    """Patterns of names, such as `["*.norm.*"]`: parameters and buffers that stay with their
    participant, and are not shared (FedBN). The shared model has their mean."""

    partition: str = SHARED
    """Whose data are whose: `none`, all participants share them; or `blocks`, `random`, `labels`,
    `owner`, `parts` (of `data.parts`): each has some of its own."""

    skew: Annotated[float, Meta(gt=0)] = 0.5
    """Of `partition = "labels"`: 100 is near even, 0.1 severe."""


ROUNDS: Mapping[str, RoundSpec] = {
    "averaging": RoundSpec(),
    "fedprox": RoundSpec(),
    "fedopt": RoundSpec(),
    "diloco": RoundSpec(local_steps=20, local_optimizers="kept"),
}
"""Strategies in which participants take steps of their own, and one commit is a round of them; with
the defaults of these options."""

ROUND_OPTIONS = {
    "local_steps": "needs a whole number of at least 1",
    "local_optimizers": "needs to be 'reset' or 'kept'",
    "start_after": "needs a whole number of at least 0",
    "fragments": "needs a whole number of at least 1",
    "delay": "needs a whole number of at least 0",
    "fraction": "needs a number above 0, and at most 1",
    "local_parameters": "needs a list of patterns of names, such as ['*.norm.*']",
    "partition": "needs the name of a partition, such as 'blocks', in quotes",
    "skew": "needs a number above 0",
}
"""What each needs to be."""

OF_FRAGMENTS = frozenset({"fragments", "delay"})
"""Those of them that `diloco` alone knows."""


class SyncSpec(Section, frozen=True, kw_only=True):
    """How replicas agree."""

    name: str = "all_reduce"
    """A key of `sync.STRATEGIES`."""

    servers: Positive = 1
    """Of strategies with parameter servers: how many share the parameters. They are processes
    beside the workers, and hold the optimizer's state. At most as many as there may be workers
    (`train.micro_batches`), or hosts."""

    codec: str = "none"
    """How what is sent is encoded: `none` sends them as they are; `bfloat16` and
    `float16` send 16 bits a value, `int8`, `int4` and `sign` 8, 4 and 1; `top_k` sends the largest
    1 % of the values, `dgc` fewer, with SGD's momentum, `nonzero` all but zeros, `powersgd` two
    thin factors of each matrix; `module:Class` is one of your own, in a file beside the recipe's.
    With a codec the result depends on the number of workers, with `server_sync` on that of servers
    too; in rounds it does not."""

    codec_options: dict[str, Any] = {}
    """Options of the codec, which has their names, defaults and checks."""

    participants: Positive = 8
    """Of the strategies with rounds (`averaging`, `fedprox`, `fedopt`, `diloco`): how many take
    local steps of their own. Fixed for the job, at any number of workers; they take the place of
    `train.micro_batches`."""

    options: dict[str, Any] = {}
    """Options of the strategy, which has their names, defaults and checks."""

    defaults: dict[str, dict[str, Any]] = {}
    """Written by a run into its own `job.toml`: what `options` and `codec_options` leave out, by
    the name of strategy and codec, so that a resume with another version goes on with it."""

    @property
    def all_options(self) -> dict[str, Any]:
        """Options of the strategy, with those that the run wrote down."""
        return self.defaults.get(self.name, {}) | self.options

    @property
    def all_codec_options(self) -> dict[str, Any]:
        """Options of the codec, with those that the run wrote down."""
        return self.defaults.get(self.codec, {}) | self.codec_options

    @property
    def rounds(self) -> RoundSpec | None:
        """What the options say of the rounds; None for a strategy that agrees on every step."""
        if self.name not in ROUNDS:
            return None
        options = self.all_options
        given = {key: options[key] for key in ROUND_OPTIONS if key in options}
        known = msgspec.structs.asdict(ROUNDS[self.name])
        return msgspec.convert(known | given, RoundSpec)

    @property
    def taking_part(self) -> int:
        """How many participants there are in a round; 0 for a strategy without rounds."""
        rounds = self.rounds
        return max(1, int(rounds.fraction * self.participants + 0.5)) if rounds is not None else 0

    def __post_init__(self) -> None:
        if self.name not in ROUNDS:
            return
        given = {key: self.options[key] for key in ROUND_OPTIONS if key in self.options}
        try:
            msgspec.convert(given, RoundSpec)
        except msgspec.ValidationError as error:
            key = next(key for key in ROUND_OPTIONS if re.search(rf"`\$\.{key}\b", str(error)))
            raise ValueError(f"options.{key} = {given[key]!r}: {ROUND_OPTIONS[key]}.") from None
        if self.rounds is not None:
            self._check_fragments(self.rounds)

    def _check_fragments(self, rounds: RoundSpec) -> None:
        steps, fragments, delay = rounds.local_steps, rounds.fragments, rounds.delay
        if fragments > 1 and self.name != "diloco":
            raise ValueError(
                f"options.fragments = {fragments}: {self.name} agrees on all parameters at once. "
                "Set name = 'diloco', or leave it out."
            )
        if steps % fragments:
            raise ValueError(
                f"options.local_steps = {steps}: a fragment agrees every local_steps / fragments "
                f"steps, so it needs to be a multiple of options.fragments = {fragments}."
            )
        if delay > (steps // fragments if fragments > 1 else 0):
            raise ValueError(
                f"options.delay = {delay}: a fragment has to be there before the next one is sent. "
                f"Set it to at most local_steps / fragments = {steps // fragments}."
                if fragments > 1
                else f"options.delay = {delay} needs options.fragments of at least 2."
            )

    @property
    def own_state(self) -> bool:
        """Whether a worker remembers what no other does, and hands it over before it leaves."""
        return self.codec != "none" or self.delayed or self.votes or self.streams

    @property
    def streams(self) -> bool:
        """Whether one fragment of the parameters agrees after the other."""
        return self.rounds is not None and self.rounds.fragments > 1

    @property
    def votes(self) -> bool:
        """Whether each micro-batch is a voter, and is computed apart."""
        return self.name == "sign_vote"

    @property
    def delayed(self) -> bool:
        """Whether each gradient is applied one step late."""
        return self.name == "all_reduce" and self.all_options.get("delayed") is True


class Coordinate(NamedTuple):
    """The place of a worker in the mesh: its replica, and its index on each axis within that."""

    replica: int
    stage: int
    shard: int
    tensor: int


OF_AXIS = {
    "shard": ("zero",),
    "tensor": ("plan", "sequence"),
    "stages": ("schedule", "pipeline_batches", "cuts"),
}
"""Keys of `[mesh]` that are for one of its axes."""


class MeshSpec(Section, frozen=True, kw_only=True):
    """Processes that share one replica (copy) of the model: shard x tensor x stages of them."""

    shard: Positive = 1
    """Processes that split parameters, gradients and optimizer state."""

    tensor: Positive = 1
    """Processes that share one matrix product."""

    sequence: bool = False
    """Whether `tensor` splits activations between the layers that it cuts too, along the sequence.
    As many bytes, less memory. A model that does not allow it is refused."""

    stages: Positive = 1
    """Pipeline stages, split by layer."""

    zero: Literal[2, 3] = 3
    """What `shard`, above 1, splits: 3: parameters too, which are gathered for each block of layers
    and freed again; 2: parameters stay whole from the forward pass to the end of the backward
    pass."""

    plan: Literal["auto"] | dict[str, str] = "auto"
    """How `tensor` cuts layers: `auto` finds it from the model's structure, by trials. Or a table
    from patterns of module names to `column`, `row`, `column_gather`, `vocabulary` or
    `replicate`."""

    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """In which order `stages` run their parts: `1f1b` keeps the least activations, `gpipe` runs
    all forward passes first, `interleaved` gives each process several stages and waits less."""

    pipeline_batches: Positive = 8
    """Parts that `stages` cut a micro-batch into; as many as it has samples, if it has fewer. More
    parts, less waiting; smaller parts compute less efficiently."""

    cuts: tuple[str, ...] = ()
    """Names of the modules that begin a stage, without the first one; empty: blocks are timed."""

    checkpointing: Literal["none", "blocks"] = "none"
    """`blocks`: a block of layers keeps only its inputs, and runs again in the backward pass. Less
    memory, about a third more time."""

    offload: Literal["none", "optimizer"] = "none"
    """`optimizer`: on a GPU, the optimizer's state lies in memory of the host, where its step is
    computed. Less memory of the GPU, more time."""

    compile: Literal["none", "blocks"] = "none"
    """`blocks`: each block of layers trains with code that `torch.compile` makes of it."""

    build: Literal["auto", "whole", "parts"] = "auto"
    """How a process of several builds the model: `whole` in memory before it is split, or in
    `parts`, so that no process ever has all of it. `auto`: in parts if its memory is too small for
    the whole."""

    @property
    def ranks(self) -> int:
        """Processes of one replica."""
        return self.shard * self.tensor * self.stages

    @property
    def axes(self) -> str:
        """The axes with several processes, as the job file has them."""
        sizes = {"shard": self.shard, "tensor": self.tensor, "stages": self.stages}
        return ", ".join(f"{axis} = {size}" for axis, size in sizes.items() if size > 1)

    def __post_init__(self) -> None:
        if self.build == "parts" and self.same_batch > 1:
            raise ValueError(
                f"build = 'parts' with {self.axes}: only shard works on a model of which no "
                "process has all. Leave build out, or use shard alone."
            )

    @property
    def same_batch(self) -> int:
        """Processes of a replica that get the same micro-batch: those on `tensor` and `stages`."""
        return self.tensor * self.stages

    def batches_of(self, workers: int) -> int:
        """How many of so many workers get a micro-batch of their own at the same time."""
        return workers // self.same_batch

    def batch_of(self, worker: int) -> int:
        """Which of these a worker gets."""
        place = self.coordinate(worker)
        return place.replica * self.shard + place.shard

    def refusal(self, workers: int) -> str:
        """Why so many workers make no whole replicas; empty if they do."""
        if workers % self.ranks == 0:
            return ""
        return (
            f"workers = {workers}: a replica has {self.ranks} processes ([mesh] {self.axes}), "
            f"so {self.ranks}, {2 * self.ranks}, ..."
        )

    def coordinate(self, worker: int) -> Coordinate:
        """The place of a worker. Workers are numbered replica by replica; within one, neighbours
        on the `tensor` axis are numbered first, then those on `shard`, then `stages`."""
        replica, inner = divmod(worker, self.ranks)
        rest, tensor = divmod(inner, self.tensor)
        stage, shard = divmod(rest, self.shard)
        return Coordinate(replica, stage, shard, tensor)

    def replica(self, number: int) -> range:
        """The workers of a replica, in rank order."""
        return range(number * self.ranks, (number + 1) * self.ranks)

    def column(self, members: Sequence[int], worker: int) -> list[int]:
        """Those of `members` that have the same place in their replicas as `worker`."""
        return [each for each in members if each % self.ranks == worker % self.ranks]


class DataSpec(Section, frozen=True, kw_only=True):
    """How samples are read."""

    loaders: Natural | Literal["auto"] = "auto"
    """Loader processes of each worker; 0: read inside the worker; `auto`: measure both."""

    order: Literal["global", "windowed", "dataset"] = "global"
    """Order of samples in an epoch: `global`, another one each time, from the job's seed;
    `windowed`, the same shard by shard, mixed within a `window`; `dataset`, as they stand there."""

    window: Positive = 16384
    """Samples that the windowed order mixes with each other."""

    parts: Natural = 0
    """Parts that the shards are cut into, each of which lies on some of the hosts; 0: all have all.
    A micro-batch, or participant, is of one and computed there. Needs `order = "windowed"`."""

    unreadable: Literal["stop", "skip"] = "stop"
    """End the run at a sample that cannot be read in three attempts, or leave it out: `skip`."""

    cache: str = ""
    """Folder on each host for shards of URLs; by default `INSTEP_CACHE`, or `~/.cache/instep`."""

    cache_gb: Annotated[float, Meta(gt=0)] | None = None
    """Gigabytes of shards in it at most, if `shards()` is not told; by default 20."""

    changed: Literal["refuse", "accept"] = "refuse"
    """If a run is resumed and the contents of 32 keyed samples (4 if these take long; repeatable
    ones) or the length of the validation set have changed: `refuse`, or `accept` the data that is
    there now, with a warning. A training set of another length is always refused."""

    split: str = ""
    """How `Recipe.train` is divided: `random`, `stratified` (each class in its proportion), `group`
    (whole groups), `stratified_group`, `time` (the end is validated on), `hash` (groups stay on
    their sides when data are added), `blocks` (neighbours); empty: `Recipe.validate`, or none."""

    validation: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Share of the samples to validate on; 0.1 if neither this nor `folds` is given."""

    folds: Annotated[int, Meta(ge=2)] | None = None
    """Parts of a cross-validation: each is validated on once, in a run of its own."""

    fold: Natural = 0
    """Which of the `folds` this run validates on, from 0; `instep run JOB --folds 5` takes all."""

    labels: str = ""
    """The column of the dataset with each sample's class; instead of `Recipe.labels`."""

    owners: str = ""
    """The column with each sample's participant (partition `owner`), for `Recipe.owners`."""

    groups: str = ""
    """The column with each sample's group, such as its patient; instead of `Recipe.groups`."""

    times: str = ""
    """The column with each sample's time: numbers, or dates; instead of `Recipe.times`."""

    gap: str | Annotated[float, Meta(ge=0)] = 0.0
    """Time before the validation side of `split = "time"` that is not trained on. A number in the
    unit of the times, seconds for dates; or, for dates, such as `"7d"`."""

    embargo: str | Annotated[float, Meta(ge=0)] | None = None
    """Of `split = "time"` with `folds`: also train on what is later than the validation side by
    more than this (purged folds). Left out: a run trains on the past alone."""

    @property
    def shuffled(self) -> bool:
        """Whether each epoch takes the samples in another order."""
        return self.order != "dataset"

    @property
    def validation_share(self) -> float:
        """Share of the validation side, where there are no folds."""
        return 0.1 if self.validation is None else self.validation

    def __post_init__(self) -> None:
        if self.validation is not None and self.folds is not None:
            raise ValueError(
                f"both validation = {self.validation} and folds = {self.folds} are given: a split "
                "has one validation side, or one for each fold. Leave one of them out."
            )
        if self.fold >= (self.folds or 1):
            wrong = "folds is not given" if self.folds is None else f"folds = {self.folds}"
            last = f"Set fold from 0 to {self.folds - 1}." if self.folds else "Set folds."
            raise ValueError(f"fold = {self.fold}, and {wrong}: they are counted from 0. {last}")
        for key in ("validation", "folds", "groups", "times"):
            if not self.split and (given := getattr(self, key)):
                raise ValueError(
                    f"{key} = {given!r} says how to divide the data, and split is not given. Set "
                    "split, such as split = 'random', or leave it out."
                )
        self._check_lengths()

    def _check_lengths(self) -> None:
        for key in ("gap", "embargo"):
            given = getattr(self, key)
            if given and self.split != "time":
                raise ValueError(
                    f"{key} = {given!r} is for split = 'time', and split = {self.split!r}. Leave "
                    "it out."
                )
            try:
                length = seconds_in(given) if isinstance(given, str) else given or 0.0
            except ValueError:
                length = math.nan
            if not math.isfinite(length):
                raise ValueError(
                    f"{key} = {given!r}: needs a number in the unit of the times, or a length of "
                    "time such as '12h' or '7d'."
                )
        if self.embargo is not None and self.folds is None:
            raise ValueError(
                f"embargo = {self.embargo!r} says what to train on after the validation side, "
                "which without folds is the end. Set folds, or leave embargo out."
            )


class PrepareSpec(Section, frozen=True, kw_only=True):
    """Raw files to make shards of before the run; only what has changed since is made again."""

    sources: tuple[str, ...] = ()
    """Files, folders of files of one format, patterns such as `"raw/*.jsonl"`, or URLs. Relative to
    the job file; empty: nothing is prepared."""

    to: str = ""
    """Folder of the shards, for `instep.data.sources.shards`. Relative to the job file."""

    map: str = ""
    """`file.py:function`, relative to the job file: gives the samples of one record; or empty."""

    key: str = ""
    """Column whose equal values have samples put together, by `reduce`."""

    reduce: str = ""
    """`file.py:function`: gives the sample, several, or None of all samples of one key."""

    shuffle: bool = False
    """Put all samples into a random order, through the disk."""

    keep: bool = True
    """With `key` or `shuffle`: leave results of tasks beside the shards, for the next run."""

    tokens: str = ""
    """Turn text into tokens: a file that the package tokenizers saved, or `"bytes"`."""

    length: Positive | None = None
    """Most tokens of a sample."""

    unreadable: Literal["some", "skip", "stop"] = "some"
    """A bad record is left out and kept aside, unless its file has no others; `skip`: always."""

    types: dict[str, str] = {}
    """Types of columns of CSV files whose heads say another one, such as `{price = "float64"}`."""

    seed: Natural = 0
    """Of random draws of `map`, and of `shuffle`; the run's own seed changes no shard."""

    workers: Positive | None = None
    """Worker processes, on the hosts of `[launch]`; by default one for each processor, on a cluster
    as many as the run has. The shards are the same."""

    def __post_init__(self) -> None:
        if bool(self.sources) != bool(self.to):
            raise ValueError("sources and to need each other: raw files, and the shards' folder.")
        if bool(self.key) != bool(self.reduce):
            raise ValueError("key and reduce need each other: a column, and file.py:function.")


class StartSpec(Section, frozen=True, kw_only=True):
    """The model that a run starts from, what stays frozen, and learning rates by pattern."""

    model: str = ""
    """Safetensors file to load, or the index of several; or the folder of a run, a checkpoint or a
    Hugging Face model; or its URL. Relative to the job file; empty: as the recipe builds it."""

    version: str = ""
    """The version of a model at a URL, which a run writes into its `job.toml` when it begins."""

    partial: bool = False
    """Load tensors that match in name and shape, and report others; false: all must match."""

    freeze: tuple[str, ...] = ()
    """Patterns such as `"encoder.*"`: parameters with such names keep their values, and layers that
    are frozen as a whole keep their running statistics."""

    learning_rates: dict[str, Annotated[float, Meta(gt=0)]] = {}
    """Pattern to learning rate, such as `"encoder.*" = 0.0001`; other parameters have the
    optimizer's own. If several match, the one with the most letters wins, not counting
    wildcards."""

    def __post_init__(self) -> None:
        if self.partial and not self.model:
            raise ValueError(
                "partial = true says how to load a file, but no model is given. "
                "Give model, or leave partial out."
            )
        for pattern, rate in self.learning_rates.items():
            if not math.isfinite(rate):
                raise ValueError(
                    f"learning_rates gives {pattern!r} the rate {rate}: needs to be a finite "
                    "number."
                )


class LoraSpec(Section, frozen=True, kw_only=True):
    """Train low-rank adapters (LoRA) of some layers, and freeze the model itself."""

    modules: tuple[str, ...] = ()
    """Patterns such as `"*.q_proj"`: which Linear layers (and Conv1D layers of transformers) get an
    adapter. Empty: none, and nothing is frozen."""

    rank: Positive = 8
    """Rows of an adapter's first factor; at most the smaller side of each layer."""

    alpha: Annotated[float, Meta(gt=0)] = 16.0
    """What an adapter adds is multiplied by `alpha / rank`."""

    dropout: Annotated[float, Meta(ge=0)] = 0.0
    """Share of an adapter's inputs that are set to 0 in training; below 1."""

    also_train: tuple[str, ...] = ()
    """Patterns such as `"head.*"`: parameters that are trained as a whole beside the adapters."""

    def __post_init__(self) -> None:
        others = (self.rank, self.alpha, self.dropout, self.also_train)
        if not self.modules and others != (8, 16.0, 0.0, ()):
            raise ValueError(
                "modules is missing or empty: no layer would get an adapter. "
                'Give patterns of layers, such as modules = ["*.q_proj", "*.v_proj"].'
            )
        if not self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout}: needs to be below 1.")
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha = {self.alpha}: needs to be a finite number.")

    @property
    def scale(self) -> float:
        """What the product of an adapter's factors is multiplied by (Hu et al. 2021, section 4)."""
        return self.alpha / self.rank


class CheckpointSpec(Section, frozen=True, kw_only=True):
    """When to save during training, and what to keep; a run always saves at its end."""

    every: str | Positive = "5m"
    """Steps between checkpoints, or a time: `"90s"`, `"5m"`, `"1h30m"`; `"never"`: at the end."""

    keep_last: Positive = 2
    """Newest checkpoints to keep; older ones are deleted once a newer one is complete."""

    keep_every: Natural = 0
    """Above 0: also save each step that is a multiple of it, whatever `every` says, and keep it for
    good."""

    keep_best: Natural = 0
    """How many of the best to keep too; a validation among the best so far is saved at once,
    whatever `every` says."""

    copy_to: str = ""
    """Folder or URL, such as `s3://bucket/runs`, that gets copies too while training goes on."""

    best_metric: str = "loss"
    """The metric of the validation that decides: `loss`, or one of the recipe."""

    best_mode: Literal["auto", "min", "max"] = "auto"
    """Whether small or large is better; `auto` is `min` for `loss` and `max` for all others."""

    @property
    def every_s(self) -> float | None:
        """Seconds between checkpoints; None if steps are counted, or none is saved."""
        if isinstance(self.every, int) or self.every == "never":
            return None
        return seconds_in(self.every)

    def due(self, step: int) -> bool:
        """Whether a checkpoint follows a step because of its number alone."""
        rhythms = (self.every, self.keep_every)
        return any(isinstance(n, int) and n > 0 and step % n == 0 for n in rhythms)

    def __post_init__(self) -> None:
        try:
            bare = isinstance(self.every, str) and self.every.strip()[-1:].isdigit()
            sensible = not bare and (self.every_s is None or self.every_s > 0)
        except ValueError:
            sensible = False
        if not sensible:
            raise ValueError(
                f"every = {self.every!r}: needs to be a number of steps, a time above 0 such as "
                "'90s', '5m' or '1h30m', or 'never'."
            )


class LaunchSpec(Section, frozen=True, kw_only=True):
    """On which machines the workers are started, and by what."""

    on: str = ""
    """What starts the processes: a key of `launch.LAUNCHERS`; empty: `hosts` if `hosts` is given,
    `by_hand` if `[cluster]` is, otherwise `local`."""

    hosts: tuple[str, ...] = ()
    """For each host, the command that runs another command there, such as `"ssh node2"`; none:
    all workers start on this machine."""

    nodes: Natural = 0
    """Of a cluster: how many hosts to start, each on a node of its own if possible; 0: one on each
    node that it has, at most one for each worker."""

    cpus: Natural = 0
    """Of a cluster: cores that a host asks for; 0: one for each of its workers."""

    gpus: Natural = 0
    """Of a cluster: GPUs that a host asks for."""

    address: str = ""
    """Address of this machine that the hosts can reach; empty: look up this machine's name, or ask
    the cluster."""

    options: dict[str, Any] = {}
    """Options of the launcher, which has their names, defaults and checks."""

    @property
    def launcher(self) -> str:
        """The key of `launch.LAUNCHERS` that is meant."""
        return self.on or ("hosts" if self.hosts else "local")

    @property
    def count(self) -> int:
        """How many hosts there are, on machines that may lose each other; 0: one, on this one."""
        return len(self.hosts) or self.nodes

    def host(self, number: int) -> str:
        """A host in words, for messages."""
        return f"host {number} ({self.hosts[number] if self.hosts else self.on})"

    def __post_init__(self) -> None:
        for host in self.hosts:
            try:
                words = shlex.split(host)
            except ValueError as error:
                raise ValueError(f"hosts has {host!r}: {error}. Write it as in a shell.") from None
            if not words:
                raise ValueError(
                    f"hosts has {host!r}: needs a command that runs another one on a host, such "
                    "as 'ssh node2'."
                )
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f"hosts = {list(self.hosts)}: a host may be named once.")
        if self.hosts and self.launcher == "local":
            raise ValueError("hosts are given, and on = 'local'. Leave one of them out.")
        if self.launcher == "hosts" and not self.hosts:
            raise ValueError("on = 'hosts', but there are none. Give hosts, or leave on out.")
        if self.address and self.launcher == "local":
            raise ValueError(
                f"address = {self.address!r} is where hosts find this machine, but there are "
                "none. Give hosts, or leave address out."
            )
        for key in ("nodes", "cpus", "gpus", "options"):
            if getattr(self, key) and self.launcher in ("local", "hosts"):
                raise ValueError(
                    f"{key} = {getattr(self, key)!r} is for a cluster. Say which with on, or leave "
                    f"{key} out."
                )


class ClusterSpec(Section, frozen=True, kw_only=True):
    """Machines that join by hand: on each of them somebody starts `instep host`."""

    master: str = ""
    """Where the machine of `instep run` listens for the others, such as `"a:2220"`."""

    workers: tuple[str, ...] = ()
    """Machines for workers, `"b:2222"` each; the port tells hosts of one machine apart, and nothing
    listens on it. Every one gets an even part of `workers` at the top."""

    servers: tuple[str, ...] = ()
    """Machines for the parameter servers alone; none: they are where the workers are."""

    certificates: str = "certificates"
    """The folder of the certificates with which machines join, as `instep certificates` makes it.
    Relative to the job file. `instep run` makes it if it is not there, and writes a token file for
    each machine."""

    @property
    def places(self) -> tuple[str, ...]:
        """All machines; the number of one is that of its host."""
        return (*self.workers, *self.servers)

    def __post_init__(self) -> None:
        given = [("workers", place) for place in self.workers]
        given += [("servers", place) for place in self.servers]
        if not given and not self.master:
            return
        for key, place in [*given, ("master", self.master)]:
            try:
                host_and_port(place)
            except ValueError:
                raise ValueError(
                    f"{key} has {place!r}: needs a machine and a port from 1 to 65535, such as "
                    "'node1:2222'."
                ) from None
        if not self.workers:
            raise ValueError("workers is empty: name a machine for them, such as 'node1:2222'.")
        every = (self.master, *self.places)
        if len(set(every)) < len(every):
            twice = next(place for place in every if every.count(place) > 1)
            raise ValueError(f"{twice!r} is named twice. Give each its own port.")


class ReportSpec(Section, frozen=True, kw_only=True):
    """What to write beside the report."""

    trace_steps: Natural = 2000
    """Steps of each worker to draw in `trace.json`: half from the start, half from the end."""

    loggers: tuple[str, ...] = ()
    """Where the curves go too: `csv`, `tensorboard`, `wandb`, `mlflow`. All but `csv` need an
    extra, as in `pip install 'instep[wandb]'`. A process of its own feeds them."""

    gradient_norm: bool = False
    """Whether to compute the norm of the gradient in every step, for the curve. It is there anyway
    with `train.max_grad_norm`, or `stop.gradient_norm`."""


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
    shard x tensor x stages."""

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
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    launch: LaunchSpec = field(default_factory=LaunchSpec)
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    report: ReportSpec = field(default_factory=ReportSpec)
    check: CheckSpec = field(default_factory=CheckSpec)

    arguments: dict[str, Any] = {}
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
        return msgspec.structs.replace(self.train, micro_batches=self.sync.taking_part)

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
        key, most = self.portions, self.per_commit.micro_batches
        what = "micro-batch of each step"
        if self.sync.rounds is not None:
            what = "participant of each round"
            if most > self.train.global_batch:
                raise ValueError(
                    f"{key} = {most} but train.global_batch = {self.train.global_batch}: a "
                    "participant needs at least one sample of each local step. "
                    f"Set {key} to at most {self.train.global_batch}."
                )
            if self.own_data and self.train.global_batch % most:
                even = -(-self.train.global_batch // most) * most
                raise ValueError(
                    f"train.global_batch = {self.train.global_batch} but {key} = {most}: with "
                    "sync.options.partition each participant takes as many samples in a local "
                    f"step. Set train.global_batch to a multiple of {most}, such as {even}."
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
    """(class, field) to the string under that field, read from this file's own source."""
    found = {}
    for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for key, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(key.target, ast.Name)
                assert isinstance(text.value, ast.Constant)
                found[node.name, key.target.id] = " ".join(str(text.value.value).split())
    return found
