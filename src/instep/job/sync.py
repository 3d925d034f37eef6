"""The tables `[sync]` and `[sync.options]` of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from instep.job.base import Natural, Positive, Section

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

    clip: Annotated[float, Meta(ge=0)] = 0.0
    """Limit of the norm of how far a participant comes in a round, over all parameters: one that
    came farther gives less. 0 for none. Needs `train.determinism = "bits"`."""

    secure_sums: bool = False
    """Whether participants mask what they give, so that nobody sees more than the sum. Needs `clip`
    and `partition`."""

    least: Natural = 0
    """With `secure_sums`: of how many participants a sum is at least; more than half of those in a
    round. 0 for the fewest that is."""


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
    "clip": "needs a number above 0; leave it out for no limit",
    "secure_sums": "needs to be true or false",
    "least": "needs a whole number of at least 0",
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

    codec_options: dict[str, Any] = field(default_factory=dict)
    """Options of the codec, which has their names, defaults and checks."""

    participants: Positive = 8
    """Of the strategies with rounds (`averaging`, `fedprox`, `fedopt`, `diloco`): how many take
    local steps of their own. Fixed for the job, at any number of workers; they take the place of
    `train.micro_batches`."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of the strategy, which has their names, defaults and checks."""

    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
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
            self._check_sums(self.rounds)

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

    def _check_sums(self, rounds: RoundSpec) -> None:
        least, those = rounds.least, self.taking_part
        if not rounds.secure_sums:
            if least:
                raise ValueError(f"options.least = {least} needs options.secure_sums = true.")
            return
        if rounds.local_optimizers == "kept":
            raise ValueError(
                "options.secure_sums = true with options.local_optimizers = 'kept': every worker "
                "would have the state of each participant's optimizer. Set it to 'reset'."
            )
        if rounds.partition == SHARED:
            raise ValueError(
                "options.secure_sums = true needs options.partition: participants without data of "
                "their own have nothing to hide."
            )
        if those < 2 or not (not least or those < 2 * least <= 2 * those):
            raise ValueError(
                f"options.least = {least}, and a round has {those} participants: a secure sum is "
                f"of more than half of them, and of two at least. Set it to {those // 2 + 1} to "
                f"{those}."
                if those > 1
                else f"options.secure_sums = true, and a round has {those} participant: the sum of "
                "one is what it gives. Set more sync.participants."
            )

    @property
    def sealed(self) -> int:
        """Participants that a secure sum has at least; 0 where sums are open."""
        rounds = self.rounds
        if rounds is None or not rounds.secure_sums:
            return 0
        return rounds.least or self.taking_part // 2 + 1

    @property
    def own_state(self) -> bool:
        """Whether a worker remembers what no other does, and hands it over before it leaves."""
        return self.codec != "none" or self.delayed or self.votes or self.streams

    @property
    def streams(self) -> bool:
        """Whether one fragment of the parameters agrees after the other."""
        return self.rounds is not None and self.rounds.fragments > 1

    @property
    def median(self) -> bool:
        """Whether participants' medians are taken, instead of their mean."""
        return self.name == "averaging" and self.all_options.get("combine") == "median"

    @property
    def votes(self) -> bool:
        """Whether each micro-batch is a voter, and is computed apart."""
        return self.name == "sign_vote"

    @property
    def delayed(self) -> bool:
        """Whether each gradient is applied one step late."""
        return self.name == "all_reduce" and self.all_options.get("delayed") is True
