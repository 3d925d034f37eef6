"""Which samples belong to which participant: the table of partition schemes.

To add one: write a function that keeps the promises of `Scheme` in a file of its own, add its
line here. `regions.py` lays out what it returns, `data/participants.py` says who takes what of
that in which round. Nothing here knows datasets, ranks or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from instep.registry import Registry

if TYPE_CHECKING:  # a job is checked, and its processes are on their way, before numpy is loaded
    from instep.data.order import Indices


class Scheme(Protocol):
    """Deals the samples of a dataset to participants."""

    def __call__(
        self, samples: int, participants: int, *, column: Indices | None, skew: float, seed: int
    ) -> Sequence[Indices | range]:
        """The samples of each participant.

        Args:
            samples: in the dataset.
            participants: how many parts to return.
            column: [samples] int64, what the recipe says of each sample; None where the scheme
                needs nothing.
            skew: concentration of a Dirichlet distribution, above 0.
            seed: the same seed gives the same parts on every machine, and the same proportions
                for another dataset.

        Returns:
            `participants` parts, disjoint, each in ascending order; together they hold every
            sample once. Some may be empty.
        """


PARTITIONS = Registry(
    "partition",
    {
        "blocks": "instep.data.partition.blocks:blocks",
        "labels": "instep.data.partition.labels:labels",
        "owner": "instep.data.partition.owner:owner",
        "parts": "instep.data.partition.owner:owner",
        "random": "instep.data.partition.at_random:at_random",
    },
)

COLUMNS = {"labels": "labels", "owner": "owners"}
"""The column that a scheme needs: a field of `Recipe`, and a key of `[data]`."""
