"""The tables `[data]` and `[prepare]` of a job."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from instep.job.base import Natural, Positive, Section
from instep.units import seconds_in

SOURCE_KEYS: dict[str, tuple[str, ...]] = {
    "name": (),
    "weight": (),
    "of": ("samples", "tokens"),
    "when_exhausted": ("again", "end"),
}
"""Keys of `[[data.sources]]`, and the words that some may be."""


class DataSpec(Section, frozen=True, kw_only=True):
    """How samples are read."""

    loaders: Natural | Literal["auto"] = "auto"
    """Loader processes of each worker; 0: read inside the worker; `auto`: measure both."""

    order: Literal["global", "windowed", "dataset"] = "global"
    """Order of samples in an epoch: `global`, another one each time, from the job's seed;
    `windowed`, the same shard by shard, mixed within a `window`; `dataset`, as they stand there. A
    stream is always mixed within a window, unless this is `dataset`."""

    window: Positive = 16384
    """Samples that the windowed order mixes with each other, or `train.tokens_per_batch` sorts. Of
    a stream, they are in memory."""

    parts: Natural = 0
    """Parts that the shards are cut into, each of which lies on some of the hosts; 0: all have all.
    A micro-batch, or participant, is of one and computed there. Needs `order = "windowed"`. Of a
    stream (`IterableDataset`): the iterators it is divided into; 0: the `num_workers` of its
    `DataLoader`, or 1."""

    once: bool = False
    """A stream gives each sample once, as a socket or a queue does, and cannot be read again: what
    was read is kept in memory that outlives its process until its step is committed."""

    copies: Positive = 1
    """Hosts that are to have each shard of `parts`: where they are fewer, others copy it into their
    folders while the run trains. A lost host's parts are computed where their copies lie."""

    sources: tuple[dict[str, Any], ...] = ()
    """Several datasets in shares, a table `[[data.sources]]` for each, of `Recipe(train={...})`:
    `name`, its key there; `weight`, its share of the samples among those of all, 1 if left out;
    `of = "tokens"`, its share of tokens instead; and `when_exhausted`: `"again"`, or `"end"` if an
    epoch ends when each of its samples has come once."""

    unreadable: Literal["stop", "skip"] = "stop"
    """End the run at a sample that cannot be read in three attempts, or leave it out: `skip`."""

    cache: str = ""
    """Folder on each host for what is at URLs; by default `INSTEP_CACHE`, or `~/.cache/instep`."""

    cache_gb: Annotated[float, Meta(gt=0)] | None = None
    """Gigabytes of shards in it at most, if `shards()` is not told, of other files as many; 20."""

    changed: Literal["refuse", "accept"] = "refuse"
    """If a run is resumed and the contents of 32 keyed samples (4 if these take long; repeatable
    ones) or the length of the validation set have changed: `refuse`, or `accept` the data that is
    there now, with a warning. A training set of another length is always refused."""

    balance: Literal["", "resample", "stratified", "reweight", "augment"] = ""
    """Classes of unequal size: `resample`, rare ones come more often, none less than once;
    `augment`, the same, and only what comes again goes through `Recipe.augment`; `stratified`, each
    global batch has them in proportion; `reweight`, rare ones count more in the loss."""

    weights: Literal["inverse", "effective"] = "inverse"
    """Weights of classes, for all of `balance` but `stratified`: by the `inverse` of their samples,
    or of the `effective` number of samples, which favours rare ones less (Cui et al. 2019)."""

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

    length: str = ""
    """For `train.tokens_per_batch`: the column with how long each sample is, or of which it has
    more or less, such as its tokens; instead of `Recipe.length`."""

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
        if self.weights != "inverse" and self.balance in ("", "stratified"):
            raise ValueError(
                f"weights = {self.weights!r} is for balance = 'resample', 'augment' or 'reweight', "
                f"and balance = {self.balance!r}. Leave it out."
            )
        if self.balance not in ("", "reweight") and self.order != "global":
            raise ValueError(
                f"balance = {self.balance!r} with order = {self.order!r}: classes are mixed over "
                "the whole set. Set order = 'global', or balance = 'reweight', which leaves the "
                "order as it is."
            )
        for key in ("validation", "folds", "groups", "times"):
            if not self.split and (given := getattr(self, key)):
                raise ValueError(
                    f"{key} = {given!r} says how to divide the data, and split is not given. Set "
                    "split, such as split = 'random', or leave it out."
                )
        self._check_lengths()
        self._check_sources()

    def _check_sources(self) -> None:
        for number, source in enumerate(self.sources):
            name, where = source.get("name"), f"sources[{number}]"
            if not isinstance(name, str) or not name:
                raise ValueError(f"{where} has no name: set it to a key of Recipe(train={{...}}).")
            for key, value in source.items():
                if key not in SOURCE_KEYS:
                    known = ", ".join(SOURCE_KEYS)
                    raise ValueError(f"{where} has {key} = {value!r}. Known: {known}.")
                words = SOURCE_KEYS[key]
                if words and value not in words:
                    raise ValueError(
                        f"{where}.{key} = {value!r}: needs to be {' or '.join(map(repr, words))}."
                    )
            weight = source.get("weight", 1.0)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
                raise ValueError(f"{where}.weight = {weight!r}: needs to be a number above 0.")
            if not math.isfinite(weight):
                raise ValueError(f"{where}.weight = {weight!r}: needs to be a finite number.")
        names = [source["name"] for source in self.sources]
        if len({*names}) < len(names):
            raise ValueError(f"sources has a name twice: {', '.join(names)}. Name each once.")
        if len({source.get("of", "samples") for source in self.sources}) > 1:
            raise ValueError(
                "sources has weights of samples and of tokens: shares are of one kind. Set of = "
                "'tokens' for all of them, or for none."
            )
        if self.sources and self.order != "global":
            raise ValueError(
                f"sources with order = {self.order!r}: an epoch mixes all of them. Set order = "
                "'global'."
            )
        if self.sources and self.split:
            raise ValueError(
                f"sources with split = {self.split!r}: a split divides one dataset. Split each in "
                "the recipe, give Recipe(validate=...), and leave split out."
            )

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

    shard_mb: Annotated[float, Meta(ge=1e-6, le=1e9)] | None = None
    """About so many MB (10^6 bytes) does a shard have; 33.6 by default. `data.parts` needs one
    shard or more for each part."""

    unreadable: Literal["some", "skip", "stop"] = "some"
    """A bad record is left out and kept aside, unless its file has no others; `skip`: always."""

    types: dict[str, str] = field(default_factory=dict)
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
