"""Widths of the intervals of prices.

Visits of a crew differ, others may be busy, and what is simulated or scaled is less sure. Ways in:
`width`, `is_seen`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from instep.plan.machine import Machines
from instep.plan.measured import CrewFigures, ProbedMachine, visits_apart
from instep.plan.steps import StepParts

BASE, OF_LINK, OF_SCALING, OF_FORMULA = 0.06, 0.08, 0.12, 0.25
"""How wrong a price may be, as a share: always; of what a link adds; of what is scaled from another
number of workers; and of a strategy that no crew ran."""

OF_NEIGHBOURS = 0.5
"""How wrong where others keep all cores busy: nine of ten runs were so far from their plan, of 36
at loads of 13 to 25."""


def width(
    parts: StepParts,
    base: CrewFigures,
    own: CrewFigures | None,
    crews: Sequence[CrewFigures],
    probed: ProbedMachine,
    machines: Machines,
    *,
    exact: bool,
    formula: bool,
) -> float:
    """How far the true time may be away, as a share of it.

    Args:
        parts: of the step.
        base: the crew whose passes it has.
        own: the crew whose exchange it has.
        crews: all.
        probed: the machine.
        machines: where it would run.
        exact: whether a crew of this very way took steps.
        formula: whether no crew exchanged as this way does.
    """
    wire = parts.wire / parts.seconds if parts.seconds else 0.0
    on_link = machines.link is not None and machines.hosts > 1
    seen = exact and own is not None and is_seen(own, machines)
    still = 1.0 if seen or not on_link else 1 - wire  # a link is as fast beside a neighbour
    doubts = [BASE, still * _between_visits(base, own, crews)]
    doubts.append(OF_LINK * wire if on_link and not seen else 0.0)
    doubts.append(0.0 if exact or formula else OF_SCALING)
    doubts.append(OF_FORMULA if formula else 0.0)
    busy = min(1.0, probed.others_busy / probed.cores)
    doubts.append(OF_NEIGHBOURS * busy * (1 - wire / 2))
    return min(0.9, math.sqrt(sum(each**2 for each in doubts)))


def _between_visits(
    base: CrewFigures, own: CrewFigures | None, crews: Sequence[CrewFigures]
) -> float:
    """How far a run may be from the mean of a crew's visits, in nine of ten cases, by how far these
    are apart: a run is one visit more."""
    mine = own or base
    apart, count = visits_apart(crews)
    if not count:
        return 1.5 * max(base.spread, mine.spread)
    visits = [each for each in mine.visits if each > 0]
    if len(visits) > 1:
        apart = max(apart, math.log(max(visits) / min(visits)) / 2)
    student = min(3.0, 1.645 * (1 + 1.5 / count))  # of so many differences, nearly
    return student * apart * math.sqrt(1 + 1 / max(1, len(visits)))


def is_seen(own: CrewFigures, machines: Machines) -> bool:
    """Whether a crew has had the links that are asked for."""
    return machines.link is not None and own.bits_per_s == machines.link.bits_per_s
