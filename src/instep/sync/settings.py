"""Settings of a job or a recipe, by the names that the table of clashes has for them.

Way in: `SETTINGS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from instep.job.spec import JobSpec


class Traits(Protocol):
    """What a recipe has that not every job can train."""

    @property
    def turns(self) -> object:
        """Several updates in a step, if there are any."""

    @property
    def batch_loss(self) -> object:
        """A loss over the whole batch, if there is one."""


class Setting(NamedTuple):
    """Something that a job or a recipe asks for."""

    name: str
    """As a sentence says it; `job` may stand in it."""
    asked: Callable[[JobSpec, Traits | None], bool]


NOT_IN_ROUNDS = frozenset({"dgc", "nonzero", "powersgd"})
"""Codecs that sum over workers in a way of their own."""


def _turns(job: JobSpec, recipe: Traits | None) -> bool:
    return recipe is not None and bool(recipe.turns)


def _batch_loss(job: JobSpec, recipe: Traits | None) -> bool:
    return recipe is not None and recipe.batch_loss is not None


def _loader_has(name: str) -> Callable[[JobSpec, Traits | None], bool]:
    def asked(job: JobSpec, recipe: Traits | None) -> bool:
        return getattr(getattr(recipe, "given", {}).get("train"), name, None) is not None

    return asked


SETTINGS = {
    "averaging": Setting(
        "sync.name = {job.sync.name!r}", lambda job, _: job.sync.rounds is not None
    ),
    "own_data": Setting(
        "sync.options.partition = {job.own_data!r}", lambda job, _: bool(job.own_data)
    ),
    "start_after": Setting(
        "sync.options.start_after = {job.start_after}", lambda job, _: job.start_after > 0
    ),
    "streams": Setting(
        "sync.options.fragments = {job.sync.rounds.fragments}", lambda job, _: job.sync.streams
    ),
    "local_parameters": Setting(
        "sync.options.local_parameters",
        lambda job, _: job.sync.rounds is not None and bool(job.sync.rounds.local_parameters),
    ),
    "local_optimizers": Setting(
        "sync.options.local_optimizers = 'reset'",
        lambda job, _: (
            job.sync.rounds is not None and job.sync.options.get("local_optimizers") == "reset"
        ),
    ),
    "clip": Setting(
        "sync.options.clip = {job.sync.rounds.clip:g}",
        lambda job, _: job.sync.rounds is not None and job.sync.rounds.clip > 0,
    ),
    "secure_sums": Setting("sync.options.secure_sums", lambda job, _: job.sync.sealed > 0),
    "private_rounds": Setting(
        "privacy.protects = 'participant'", lambda job, _: job.privacy.of_participants
    ),
    "median": Setting("sync.options.combine = 'median'", lambda job, _: job.sync.median),
    "fraction": Setting(
        "sync.options.fraction = {job.sync.rounds.fraction}",
        lambda job, _: job.sync.rounds is not None and job.sync.rounds.fraction < 1,
    ),
    "server_sync": Setting(
        "sync.name = {job.sync.name!r}", lambda job, _: job.sync.served and not job.sync.leased
    ),
    "leased": Setting("sync.name = {job.sync.name!r}", lambda job, _: job.sync.leased),
    "codec": Setting("sync.codec = {job.sync.codec!r}", lambda job, _: job.sync.codec != "none"),
    "sign_vote": Setting("sync.name = {job.sync.name!r}", lambda job, _: job.sync.votes),
    "merge": Setting("train.merge = 'always'", lambda job, _: job.train.merge == "always"),
    "clipping": Setting("train.max_grad_norm", lambda job, _: job.train.max_grad_norm is not None),
    "delayed": Setting("sync.options.delayed = true", lambda job, _: job.sync.delayed),
    "powersgd": Setting(
        "sync.codec = {job.sync.codec!r}", lambda job, _: job.sync.codec == "powersgd"
    ),
    "dgc": Setting("sync.codec = {job.sync.codec!r}", lambda job, _: job.sync.codec == "dgc"),
    "no_rounds": Setting(
        "sync.codec = {job.sync.codec!r}", lambda job, _: job.sync.codec in NOT_IN_ROUNDS
    ),
    "shard": Setting("mesh.shard = {job.mesh.shard}", lambda job, _: job.mesh.shard > 1),
    "tensor": Setting("mesh.tensor = {job.mesh.tensor}", lambda job, _: job.mesh.tensor > 1),
    "stages": Setting("mesh.stages = {job.mesh.stages}", lambda job, _: job.mesh.stages > 1),
    "bits": Setting("train.determinism = 'bits'", lambda job, _: job.train.determinism == "bits"),
    "batch_norm": Setting(
        "train.batch_norm = 'global'", lambda job, _: job.train.batch_norm == "global"
    ),
    "cuda": Setting("train.device = 'cuda'", lambda job, _: job.train.device == "cuda"),
    "float16": Setting(
        "train.precision = 'float16'", lambda job, _: job.train.precision == "float16"
    ),
    "ema": Setting("train.ema = {job.train.ema}", lambda job, _: job.train.ema is not None),
    "corruption": Setting("check.corruption = true", lambda job, _: job.check.corruption),
    "norm_rule": Setting("stop.gradient_norm", lambda job, _: job.stop.by_norm),
    "learning_rates": Setting(
        "start.learning_rates", lambda job, _: bool(job.start.learning_rates)
    ),
    "parts": Setting("data.parts = {job.data.parts}", lambda job, _: job.data.parts > 0),
    "balance": Setting(
        "data.balance = {job.data.balance!r}", lambda job, _: bool(job.data.balance)
    ),
    "sampler": Setting("a DataLoader with a WeightedRandomSampler", _loader_has("wishes")),
    "draws": Setting("a DataLoader whose sampler draws for each epoch", _loader_has("draws")),
    "sources": Setting("data.sources", lambda job, _: bool(job.data.sources)),
    "iterable": Setting(
        "a stream (IterableDataset)",
        lambda _, recipe: getattr(getattr(recipe, "given", {}).get("train"), "streams", False),
    ),
    "once": Setting("data.once = true", lambda job, _: job.data.once),
    "reweight": Setting("data.balance = 'reweight'", lambda job, _: job.data.balance == "reweight"),
    "stratified": Setting(
        "data.balance = 'stratified'", lambda j, _: j.data.balance == "stratified"
    ),
    "in_order": Setting("data.order = 'dataset'", lambda job, _: job.data.order == "dataset"),
    "tokens": Setting(
        "train.tokens_per_batch = {job.train.tokens_per_batch}",
        lambda job, _: job.train.tokens_per_batch is not None,
    ),
    "length_sampler": Setting("a DataLoader with a sampler by length", _loader_has("grouped")),
    "own_loop": Setting("a loop of your own", lambda job, _: job.recipe.endswith(":__main__")),
    "private": Setting(
        "privacy.protects = {job.privacy.protects!r}", lambda job, _: job.privacy.on
    ),
    "private_samples": Setting(
        "privacy.protects = 'sample'", lambda job, _: job.privacy.protects == "sample"
    ),
    "turns": Setting("Recipe.turns", _turns),
    "batch_loss": Setting("Recipe.batch_loss", _batch_loss),
}
