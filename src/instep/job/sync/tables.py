"""The strategies and codecs that a job can name, and what is known of each before it is imported.

To add a strategy, see `sync/__init__.py`; to add a codec, `comm/codecs/__init__.py`. Ways in:
`STRATEGY_ROWS`, `CODEC_ROWS`, and `defaults_of` for what a run writes down.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from instep.job.sync.rounds import OF_FRAGMENTS, ROUND_OPTIONS, RoundSpec

Options = Mapping[str, Any]
NONE: Options = MappingProxyType({})


class OptionValues(NamedTuple):
    """Values of another option with which an option does nothing."""

    option: str
    values: tuple[Any, ...]


class StrategyRow(NamedTuple):
    """All that is known of a strategy before it is imported."""

    made_by: str
    """`module:attribute` of the class or function that takes its options by name."""
    options: Options = NONE
    """Its own options and their defaults; None for a default that follows from other options."""
    unused: Mapping[str, OptionValues] = NONE
    """Options that another one can leave without any effect."""
    rounds: RoundSpec | None = None
    """Defaults of the options of rounds, where participants take steps of their own and one commit
    is a round of them."""
    fragments: bool = False
    """Whether fragments of the parameters may agree in turn."""
    outer: bool = False
    """Whether an optimizer takes a step of what a round has agreed on."""
    pulls: bool = False
    """Whether participants are drawn back to where their round began."""
    served: bool = False
    """Whether it has parameter servers: members that get no work, and move parameters for the
    workers."""
    leased: bool = False
    """Whether a server leases micro-batches, each of which is an update: no step waits for all."""
    votes: bool = False
    """Whether each micro-batch is a voter, and is computed apart."""

    @property
    def round_options(self) -> frozenset[str]:
        """Options that it shares with all strategies that have rounds."""
        if self.rounds is None:
            return frozenset()
        return frozenset(ROUND_OPTIONS) - (frozenset() if self.fragments else OF_FRAGMENTS)


class CodecRow(NamedTuple):
    """All that is known of a codec before it is imported."""

    made_by: str
    """`module:Class`."""
    options: Options = NONE
    """Its options and their defaults."""


_SUMS = {"bucket_mb": 8.0, "encode_vectors": False}
_PUSHES = {"compensation": 0.0, "slow_late": False, "encode_vectors": False}

STRATEGY_ROWS: dict[str, StrategyRow] = {
    "all_reduce": StrategyRow(
        "instep.sync.delayed:all_reduce",
        {"bucket_mb": 8.0, "overlap": True, "encode_vectors": False, "delayed": False},
    ),
    "averaging": StrategyRow(
        "instep.sync.rounds.averaging:averaging", {"combine": "mean", **_SUMS}, rounds=RoundSpec()
    ),
    "bounded_stale": StrategyRow(
        "instep.sync.servers.bounded_stale:BoundedStale",
        {"staleness": 2, **_PUSHES},
        served=True,
        leased=True,
    ),
    "diloco": StrategyRow(
        "instep.sync.rounds.diloco:diloco",
        {"outer_lr": 0.7, "outer_momentum": 0.9, "mixing": 0.5, **_SUMS},
        {"mixing": OptionValues("delay", (0,))},
        rounds=RoundSpec(local_steps=20, local_optimizers="kept"),
        fragments=True,
        outer=True,
    ),
    "fedopt": StrategyRow(
        "instep.sync.rounds.fedopt:fedopt",
        {
            "rule": "adam",
            "outer_lr": None,
            "outer_momentum": None,
            "outer_beta2": 0.99,
            "tau": 0.001,
            **_SUMS,
        },
        {
            "outer_beta2": OptionValues("rule", ("momentum", "adagrad")),
            "tau": OptionValues("rule", ("momentum",)),
        },
        rounds=RoundSpec(),
        outer=True,
    ),
    "fedprox": StrategyRow(
        "instep.sync.rounds.fedprox:fedprox", {"mu": 0.01, **_SUMS}, rounds=RoundSpec(), pulls=True
    ),
    "server_async": StrategyRow(
        "instep.sync.servers.server_async:ServerAsync", _PUSHES, served=True, leased=True
    ),
    "server_sync": StrategyRow(
        "instep.sync.servers.server_sync:ServerSync",
        {"bucket_mb": 1.0, "overlap": True, "copy": False, "encode_vectors": False},
        served=True,
    ),
    "sign_vote": StrategyRow("instep.sync.sign_vote:SignVote", {"momentum": 0.9}, votes=True),
}
"""The strategies, by name."""

CODEC_ROWS: dict[str, CodecRow] = {
    "none": CodecRow("instep.comm.codecs.none:Identity"),
    "bfloat16": CodecRow("instep.comm.codecs.short:BFloat16"),
    "float16": CodecRow("instep.comm.codecs.short:Float16"),
    "int8": CodecRow("instep.comm.codecs.int8:Int8", {"block": 1024, "rounding": "nearest"}),
    "int4": CodecRow("instep.comm.codecs.int4:Int4", {"block": 64, "rounding": "nearest"}),
    "sign": CodecRow("instep.comm.codecs.sign:Sign", {"block": 1024}),
    "dgc": CodecRow("instep.comm.codecs.dgc:DGC", {"density": 0.001, "warm_up": 100, "clip": 0.0}),
    "nonzero": CodecRow("instep.comm.codecs.nonzero:NonZero"),
    "powersgd": CodecRow("instep.comm.codecs.powersgd:PowerSGD", {"rank": 4, "start_after": 100}),
    "top_k": CodecRow("instep.comm.codecs.top_k:TopK", {"density": 0.01}),
}
"""The codecs, by name; one of a user's own has no row."""

UNKNOWN = StrategyRow("")
"""The row of a name that is no strategy's, until the job is refused for it."""


def defaults_of(name: str) -> dict[str, Any]:
    """The options of a strategy or codec as they are if a job leaves them out.

    Those that follow from others are not among them.
    """
    row = STRATEGY_ROWS.get(name) or CODEC_ROWS.get(name) or UNKNOWN
    own = {key: value for key, value in row.options.items() if value is not None}
    if not isinstance(row, StrategyRow) or row.rounds is None:
        return own
    return {**msgspec.json.decode(msgspec.json.encode(row.rounds)), **own}  # as a job file has them
