"""Measures what decides from which rate of the links on several workers pay.

Where links are emulated, the rate that a plan has found is a guess from links of another rate. Here
the best way with several workers takes steps on links of that rate, in turns with one worker: they
should be as fast as each other. The rate is then simulated from these steps. Ways in: `asked_at`,
`measured_at`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from instep.lab.plan.answers import CrewRequest, with_new
from instep.plan.machine import Machines
from instep.plan.measured import CrewFigures
from instep.plan.search import Ranking

_RATES = (1e6, 2e10)
"""Bits a second that a link can be given here."""

_NEAR = 1.25
"""A rate that is so many times another one is simulated from it as it is."""


def asked_at(
    ranking: Ranking,
    requests: Sequence[CrewRequest],
    machines: Machines,
    near: Sequence[CrewFigures],
) -> list[CrewRequest]:
    """The crews whose steps tell more of the rate; none where they would tell nothing new.

    Args:
        ranking: has the rate.
        requests: crews that have taken steps on the links of the machines.
        machines: hosts, with links.
        near: what crews have found for an earlier guess.
    """
    rate, rival = ranking.break_even_rate, ranking.rival
    if rate is None or rival is None or machines.link is None:
        return []
    known = [machines.link.bits_per_s, *(each.bits_per_s for each in near if each.bits_per_s)]
    if not _RATES[0] <= rate <= _RATES[1] or any(_is_near(rate, each) for each in known):
        return []
    pair = next((each for each in requests if each.way.key == rival.way.key and each.rate), None)
    if pair is None or rival.way.mesh:
        return []
    pair = pair._replace(rate=f"{rate:.0f}bit")
    return [requests[0], pair, pair, requests[0]]


def _is_near(rate: float, other: float) -> bool:
    return abs(math.log(rate / other)) <= math.log(_NEAR)


def measured_at(visits: Sequence[CrewFigures]) -> list[CrewFigures]:
    """One crew of one worker, and one of several, of the visits; none where one of them failed."""
    alone = [each for each in visits if each.workers == 1 and not each.failed]
    several = [each for each in visits if each.workers > 1 and not each.failed]
    if not alone or not several:
        return []
    return [*with_new(alone[:1], alone[1:]), *with_new(several[:1], several[1:])]
