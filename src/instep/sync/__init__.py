"""How replicas agree on parameters: the table of strategies.

To add one: write a class that keeps the promises of `base.Strategy` in a file of its own, and add
its line here. Those of two families lie in `rounds/` and `servers/`. The suite in `tests/contract`
finds it, and `docs/concepts/strategies.md` needs its heading.
"""

from instep.registry import Registry
from instep.spec import ROUNDS, SyncSpec

__all__ = ["LEASED", "ROUNDS", "SERVERS", "STRATEGIES", "servers_of"]

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

LEASED = frozenset({"bounded_stale", "server_async"})
"""Those in which no step waits for all workers: a server leases micro-batches, and each of them is
an update of its own."""

SERVERS = frozenset({"server_sync"}) | LEASED
"""Those with parameter servers: members that get no work, and move parameters for the workers."""


def servers_of(sync: SyncSpec) -> int:
    """How many parameter servers a job has; 0 if its strategy has none."""
    return sync.servers if sync.name in SERVERS else 0
