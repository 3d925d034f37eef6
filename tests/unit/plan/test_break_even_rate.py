"""The rate from which on several workers pay, and which crews tell more of it."""

import pytest

from instep.job.spec import JobSpec
from instep.lab.plan.answers import CrewRequest
from instep.lab.plan.break_even import asked_at, measured_at
from instep.plan.machine import HostLink, Machines
from instep.plan.measured import BucketShare, CrewFigures, JobFigures, PassTime, ProbedMachine
from instep.plan.pricing import Measurements, price
from instep.plan.search import Ranking, search
from instep.plan.ways import TrainingWay

ALONE, PAIR = TrainingWay(1), TrainingWay(2)
JOB = JobFigures(64, 8, 100, True, [PassTime(8, 0.03), PassTime(64, 0.2)], 8_000_000)
ASKED = Machines(2, 2, HostLink(1e8), emulated=True)


def crew(workers: int, wire_s: float = 0.0, rate: float = 0.0, **more: object) -> CrewFigures:
    passes = 0.2 / workers
    given = {"passes_s": passes, "slowest_s": passes, "last_s": 0.6 * passes, "wire_s": wire_s}
    given |= {"whole_s": passes + wire_s, "buckets": [BucketShare(1.0, 1.0)]}
    linked = {"sent_bytes": 8e6, "hosts": 2, "bits_per_s": rate} if rate else {}
    return CrewFigures(workers, **{**given, **linked, **more})  # type: ignore[arg-type]


KNOWN = Measurements(JOB, [crew(1), crew(2, 0.7, 1e8)], ProbedMachine(2))
BEFORE = search([ALONE, PAIR], KNOWN, ASKED)


def requests() -> list[CrewRequest]:
    job = JobSpec(recipe="net.py:recipe")
    return [CrewRequest(ALONE, job), CrewRequest(PAIR, job, 2, "100000000bit")]


def test_the_rate_follows_from_the_crews_that_took_steps_near_it() -> None:
    near = [crew(1), crew(2, 0.13, 8e8)]  # where a link alone would take 0.08 s
    after = search([ALONE, PAIR], KNOWN, ASKED, near=near)
    assert (BEFORE.break_even_measured, after.break_even_measured) == (False, True)
    assert BEFORE.break_even_rate is not None
    assert after.break_even_rate is not None
    assert after.break_even_rate > 1.2 * BEFORE.break_even_rate
    there = ASKED._replace(link=HostLink(after.break_even_rate))
    one, two = (price(way, KNOWN.in_place_of(near), there) for way in (ALONE, PAIR))
    assert one is not None
    assert two is not None
    assert two.seconds == pytest.approx(one.seconds, rel=1e-3)
    assert [each.seconds for each in after.same] == [each.seconds for each in BEFORE.same]


def test_one_worker_and_the_best_pair_take_turns_at_the_rate_that_was_found() -> None:
    asked = asked_at(BEFORE, requests(), ASKED, [])
    assert [each.way.workers for each in asked] == [1, 2, 2, 1]
    assert asked[1].rate == f"{BEFORE.break_even_rate:.0f}bit"
    visits = [crew(1), crew(2, 0.1, 9e8), crew(2, 0.2, 9e8), crew(1)]
    one, two = measured_at([each.__class__(**_with_visit(each)) for each in visits])
    assert (one.workers, two.workers, two.bits_per_s) == (1, 2, 9e8)
    assert two.wire_s == pytest.approx(0.15)


def _with_visit(one: CrewFigures) -> dict[str, object]:
    return {**{name: getattr(one, name) for name in one.__struct_fields__}, "visits": [one.whole_s]}


def test_what_tells_nothing_new_is_not_asked() -> None:
    rate = BEFORE.break_even_rate
    assert rate is not None
    near = [crew(1), crew(2, 0.1, rate * 1.1)]
    none: list[Ranking] = [
        BEFORE._replace(break_even_rate=1.2e8),  # as good as that of the links
        BEFORE._replace(break_even_rate=None),
        BEFORE._replace(break_even_rate=1e12),  # no such link can be emulated
    ]
    assert not any(asked_at(each, requests(), ASKED, []) for each in none)
    assert not asked_at(BEFORE, requests(), ASKED, near)
    assert not asked_at(BEFORE, requests(), ASKED._replace(link=None), [])
    failed = crew(2, 0.1, rate, failed="no memory")
    assert measured_at([crew(1), failed]) == []
