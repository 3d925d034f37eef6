"""What to break in a run, in which process, and when: drawn from a seed.

Pure: it knows no processes and no clock. `breaker.py` carries out what is drawn here. To add
a kind, give it a number in `draw`, and say in `breaker.py` how to do it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from instep.errors import SpecError, near_miss

Kind = Literal["kill", "hang", "partition"]

WEIGHTS = {"worker": 6, "server": 3, "loader": 2, "master": 1, "host": 1, "spare": 1}
"""How often each role is chosen, relative to the others: about as often as it has processes."""

LAST = 0.92
"""Nothing is broken after this share of the run's steps, or time: the rest is for recovery."""

_IN_A_STEP_S = 0.05
_IN_A_RECOVERY_S = 0.6
_CLOSE = 0.2
"""Share of the injections that come while the run still recovers from the one before."""

HOLD_S = 1.0, 5.0
"""Least and most seconds of a partition: a lease just expired, or expired long ago."""

NETWORK = "network"
"""The role of a partition, which breaks no process."""

STEPS_EACH = 2
"""Steps that a run needs for each injection."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One thing to break."""

    kind: Kind
    role: str
    """Of the process: a key of `WEIGHTS`; or `NETWORK`."""
    pick: float
    """Which process of that role, or which partition: from 0 to 1, in their order."""
    at: float
    """Share of the steps, or of the time, after which it is due."""
    delay_s: float
    """From then on, so that it comes anywhere within a step, or during a recovery."""
    hold_s: float = 0.0
    """Of a partition: until the network is healed."""


MOST = 100_000
"""Injections of one kind."""


def draw(
    kills: int, hangs: int, roles: Sequence[str], seed: int, partitions: int = 0
) -> list[Injection]:
    """Draw so many kills, hangs and partitions, in the order in which they are due.

    The same seed, numbers and roles give the same injections. About one in five comes so
    soon after the one before that the run is still recovering.
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
    """Refuse unknown roles.

    Raises:
        SpecError: names the role, and the known ones.
    """
    for role in asked:
        if role not in WEIGHTS:
            raise SpecError(f"--roles: there is no role {role!r}. {near_miss(role, WEIGHTS)}")


def check_numbers(kills: int, hangs: int, partitions: int, over_s: float = 0.0) -> None:
    """Refuse impossible numbers of injections.

    Raises:
        SpecError: one is below 0, or all are 0.
    """
    for name, number in (("kills", kills), ("hangs", hangs), ("partitions", partitions)):
        if not 0 <= number <= MOST:
            raise SpecError(f"--{name} {number}: needs to be at least 0, and at most {MOST}.")
    if not 0 <= over_s < float("inf"):
        raise SpecError(f"--over {over_s:g}: needs to be a number of seconds, at least 0.")
    if not kills + hangs + partitions:
        raise SpecError("--kills 0: there is nothing to break. Give --hangs or --partitions.")


def check_long_enough(steps: int, injections: int, longer: str) -> None:
    """Refuse a run that is too short for so many injections.

    Args:
        steps: of the run, or those that are left.
        injections: how many are asked for.
        longer: a sentence on how to make it longer.

    Raises:
        SpecError: says how many steps there are, and how many are needed.
    """
    wanted = STEPS_EACH * injections
    if steps < wanted:
        raise SpecError(
            f"{steps} steps are too few to break something {injections} times: at least {wanted} "
            f"are needed. {longer}"
        )
