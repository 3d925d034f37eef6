"""As `server_async.py`, but no worker computes far ahead of what is still missing.

The stale synchronous parallel model (Ho et al. 2013), with the clock on the steps of the data
instead of on workers: see `leases.py`.
"""

from __future__ import annotations

from instep.comm.codecs.base import Codec
from instep.errors import SpecError
from instep.sync.servers.server_async import ServerAsync


class BoundedStale(ServerAsync):
    """An update for each micro-batch, of steps that are not too far apart.

    Args:
        staleness: a micro-batch of step t waits until all of steps up to t - staleness - 1 are
            committed; 0 or more.
        compensation, slow_late, encode_vectors, codec: as for `server_async`.

    Raises:
        SpecError: an option is refused.
    """

    def __init__(
        self,
        *,
        staleness: int = 2,
        compensation: float = 0.0,
        slow_late: bool = False,
        encode_vectors: bool = False,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(
            compensation=compensation,
            slow_late=slow_late,
            encode_vectors=encode_vectors,
            codec=codec,
        )
        if not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0:
            raise SpecError(
                f"sync.options.staleness = {staleness!r}: it is how many steps a micro-batch may "
                "be ahead, a whole number of 0 or more. For no bound use sync.name = "
                "'server_async'."
            )
        self.staleness = staleness
