"""How replicas agree on parameters: the table of strategies.

To add one: write a class that keeps the promises of `base.Strategy` in a file of its own, and add
its line here, and another to `DEFAULTS` if it has options. Those of two families lie in `rounds/`
and `servers/`. The suite in `tests/contract` finds it, and a page of
`docs/concepts/strategies*.md` needs its heading.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from instep.comm.codecs import DEFAULTS as OF_CODECS
from instep.job.sync import ROUNDS, SyncSpec
from instep.registry import Registry

__all__ = ["DEFAULTS", "LEASED", "ROUNDS", "SERVERS", "STRATEGIES", "defaults_of", "servers_of"]

STRATEGIES = Registry(
    "sync strategy",
    {
        "all_reduce": "instep.sync.delayed:all_reduce",
        "averaging": "instep.sync.rounds.averaging:averaging",
        "bounded_stale": "instep.sync.servers.bounded_stale:BoundedStale",
        "diloco": "instep.sync.rounds.diloco:diloco",
        "fedopt": "instep.sync.rounds.fedopt:fedopt",
        "fedprox": "instep.sync.rounds.fedprox:fedprox",
        "server_async": "instep.sync.servers.server_async:ServerAsync",
        "server_sync": "instep.sync.servers.server_sync:ServerSync",
        "sign_vote": "instep.sync.sign_vote:SignVote",
    },
)

DEFAULTS: Mapping[str, Mapping[str, Any]] = OF_CODECS | {
    "all_reduce": {
        "bucket_mb": 8.0,
        "overlap": True,
        "encode_vectors": False,
        "delayed": False,
    },
    "averaging": {"combine": "mean", "bucket_mb": 8.0, "encode_vectors": False},
    "bounded_stale": {
        "staleness": 2,
        "compensation": 0.0,
        "slow_late": False,
        "encode_vectors": False,
    },
    "diloco": {
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "mixing": 0.5,
        "bucket_mb": 8.0,
        "encode_vectors": False,
    },
    "fedopt": {
        "rule": "adam",
        "outer_beta2": 0.99,
        "tau": 0.001,
        "bucket_mb": 8.0,
        "encode_vectors": False,
    },
    "fedprox": {"mu": 0.01, "bucket_mb": 8.0, "encode_vectors": False},
    "server_async": {"compensation": 0.0, "slow_late": False, "encode_vectors": False},
    "server_sync": {"bucket_mb": 1.0, "overlap": True, "copy": False, "encode_vectors": False},
    "sign_vote": {"momentum": 0.9},
}
"""The options of each that has some, and of codecs, as they are if they are left out; without
those that follow from others. A run writes them down (`defaults_of`)."""

LEASED = frozenset({"bounded_stale", "server_async"})
"""Those in which no step waits for all workers: a server leases micro-batches, and each of them is
an update of its own."""

SERVERS = frozenset({"server_sync"}) | LEASED
"""Those with parameter servers: members that get no work, and move parameters for the workers."""


def servers_of(sync: SyncSpec) -> int:
    """How many parameter servers a job has; 0 if its strategy has none."""
    return sync.servers if sync.name in SERVERS else 0


def defaults_of(name: str) -> dict[str, Any]:
    """The options of a strategy or codec as they are if a job leaves them out."""
    rounds = msgspec.json.encode(ROUNDS[name]) if name in ROUNDS else b"{}"
    return {**msgspec.json.decode(rounds), **DEFAULTS.get(name, {})}  # as a job file has them
