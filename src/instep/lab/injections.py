"""What is to be broken in a run, whose process, and when: drawn from a seed.

Pure: it knows no processes and no clock. `chaos.py` makes what is drawn here
happen. To add a kind, give it a number in `draw`, and in `breaker.py` a way to do it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from instep.errors import SpecError, near_miss

Kind = Literal["kill", "hang", "partition"]

WEIGHTS = {"worker": 6, "loader": 2, "master": 1, "host": 1, "spare": 1}
"""How often each role is struck, beside the others: as often as there are such processes, about."""

LAST = 0.92
"""Up to which share of the run's steps, or time, something is broken: the rest is to recover."""

_IN_A_STEP_S = 0.05
_IN_A_RECOVERY_S = 0.6
_CLOSE = 0.2
"""Share of the injections that follow the one before while the run still recovers from it."""

HOLD_S = 1.0, 5.0
"""For how long a network is parted: from a lease that has hardly run out to one long gone."""

NETWORK = "network"
"""What a partition breaks, where others break a process of a role."""

STEPS_EACH = 2
"""Steps of the run that there must be for each injection."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One thing to break."""

    kind: Kind
    role: str
    """Of the process: a key of `WEIGHTS`; or `NETWORK`."""
    pick: float
    """Which of the processes of that role, or of the ways to part: from 0 to 1, in their order."""
    at: float
    """Share of the steps, or of the time, after which it is due."""
    delay_s: float
    """From then on, so that it falls anywhere within a step, or into a recovery."""
    hold_s: float = 0.0
    """Of a partition: until the network is whole again."""


MOST = 100_000
"""Of anything that may be asked for."""


def draw(
    kills: int, hangs: int, roles: Sequence[str], seed: int, partitions: int = 0
) -> list[Injection]:
    """So many kills, hangs and partitions, in the order in which they are due.

    The same seed, numbers and roles give the same injections. About one in five
    comes so soon after the one before that the run is still recovering.
    """
    rng = random.Random(seed)
    known = sorted(roles)
    numbers: dict[Kind, int] = {"kill": kills, "hang": hangs, "partition": partitions}
    kinds = [kind for kind, number in numbers.items() for _ in range(number)]
    rng.shuffle(kinds)
    moments = sorted(rng.uniform(0.0, LAST) for _ in kinds)
    found: list[Injection] = []
    for kind, moment in zip(kinds, moments, strict=True):
        role = NETWORK
        if kind != "partition":
            (role,) = rng.choices(known, [WEIGHTS[each] for each in known])
        close = bool(found) and rng.random() < _CLOSE
        at = found[-1].at if close else moment
        delay_s = rng.uniform(0.0, _IN_A_RECOVERY_S if close else _IN_A_STEP_S)
        hold_s = rng.uniform(*HOLD_S) if kind == "partition" else 0.0
        found.append(Injection(kind, role, rng.random(), at, delay_s, hold_s))
    return found


def check_roles(asked: Sequence[str]) -> None:
    """Refuse roles that nothing has.

    Raises:
        SpecError: names the role, and those that there are.
    """
    for role in asked:
        if role not in WEIGHTS:
            raise SpecError(f"--roles: there is no role {role!r}. {near_miss(role, WEIGHTS)}")


def check_numbers(kills: int, hangs: int, partitions: int, over_s: float = 0.0) -> None:
    """Refuse numbers of injections that cannot be.

    Raises:
        SpecError: one is below 0, or all are 0.
    """
    for name, number in (("kills", kills), ("hangs", hangs), ("partitions", partitions)):
        if not 0 <= number <= MOST:
            raise SpecError(f"--{name} {number}: needs to be at least 0, and at most {MOST}.")
    if not 0 <= over_s < float("inf"):
        raise SpecError(f"--over {over_s:g}: needs to be a number of seconds, at least 0.")
    if not kills + hangs + partitions:
        raise SpecError("--kills 0 and nothing else: there is nothing to break. Ask for something.")


def check_long_enough(steps: int, injections: int, longer: str) -> None:
    """Refuse a run that is over before all can have happened.

    Args:
        steps: of the run, or those that it still has.
        injections: how many there are to be.
        longer: how it could be made longer, given the steps that are wanted.

    Raises:
        SpecError: says how many steps there are, and how many are wanted.
    """
    wanted = STEPS_EACH * injections
    if steps < wanted:
        raise SpecError(
            f"{steps} steps are too few to break something {injections} times: {wanted} are "
            f"wanted. {longer}"
        )
