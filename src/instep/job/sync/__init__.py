"""The tables `[sync]` and `[sync.options]` of a job.

What is known of each strategy and codec is in `tables.py`, what a round is in `rounds.py`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import field

from instep.job.base import Positive, Section
from instep.job.sync.rounds import ROUND_OPTIONS, SHARED, RoundSpec
from instep.job.sync.tables import STRATEGY_ROWS, UNKNOWN, StrategyRow


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
    def row(self) -> StrategyRow:
        """All that is known of the strategy before it is imported."""
        return STRATEGY_ROWS.get(self.name, UNKNOWN)

    @property
    def served(self) -> bool:
        """Whether servers move the parameters."""
        return self.row.served

    @property
    def leased(self) -> bool:
        """Whether no step waits for all workers: each micro-batch is an update of its own."""
        return self.row.leased

    @property
    def server_count(self) -> int:
        """How many parameter servers there are; 0 if the strategy has none."""
        return self.servers if self.served else 0

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
        if (known := self.row.rounds) is None:
            return None
        options = self.all_options
        given = {key: options[key] for key in ROUND_OPTIONS if key in options}
        return msgspec.convert(msgspec.structs.asdict(known) | given, RoundSpec)

    @property
    def taking_part(self) -> int:
        """How many participants there are in a round; 0 for a strategy without rounds."""
        rounds = self.rounds
        return max(1, int(rounds.fraction * self.participants + 0.5)) if rounds is not None else 0

    def __post_init__(self) -> None:
        if self.row.rounds is None:
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
        if fragments > 1 and not self.row.fragments:
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
        return "combine" in self.row.options and self.all_options.get("combine") == "median"

    @property
    def votes(self) -> bool:
        """Whether each micro-batch is a voter, and is computed apart."""
        return self.row.votes

    @property
    def delayed(self) -> bool:
        """Whether each gradient is applied one step late."""
        return "delayed" in self.row.options and self.all_options.get("delayed") is True
