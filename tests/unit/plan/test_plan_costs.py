"""Prices of ways beside closed forms, and laws that hold for any figures."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.plan.machine import HostLink, Machines
from instep.plan.measured import BucketShare, CrewFigures, JobFigures, PassTime, ProbedMachine
from instep.plan.pricing import Measurements, price
from instep.plan.search import missing_bytes, search
from instep.plan.steps import (
    SEGMENTS,
    BucketExchange,
    FullBucket,
    WorkerPass,
    in_lockstep,
    in_round,
    leased,
)
from instep.plan.traffic import rescaled, sent_by_worker
from instep.plan.ways import TrainingWay

SECONDS = st.floats(1e-4, 10.0)
BYTES = st.floats(1e3, 1e9)
RATES = st.floats(1e6, 1e11)


@st.composite
def exchanges(draw: st.DrawFn, servers: int = 0) -> BucketExchange:
    sizes = draw(st.lists(BYTES, min_size=1, max_size=6))
    full = sorted(draw(st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes))))
    buckets = [FullBucket(size, at) for size, at in zip(sizes, full, strict=True)]
    software, update = draw(st.floats(0, 1e-8)), draw(SECONDS)
    return BucketExchange(buckets, software, draw(st.floats(0, 0.1)), servers, update)


@st.composite
def crowds(draw: st.DrawFn) -> list[WorkerPass]:
    found = []
    for seconds in draw(st.lists(SECONDS, min_size=1, max_size=5)):
        found.append(WorkerPass(seconds, seconds * draw(st.floats(0, 1))))
    return found


def over(rate: float, hosts: int, latency_s: float = 0.0) -> Machines:
    return Machines(hosts, 2, HostLink(rate, latency_s))


@pytest.mark.parametrize("servers", [0, 1, 3])
@pytest.mark.parametrize("encoded", [False, True])
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_more_bandwidth_never_lengthens_a_step(
    encoded: bool, servers: int, data: st.DataObject
) -> None:
    exchange, passes = data.draw(exchanges(servers)), data.draw(crowds())
    exchange = exchange._replace(encoded=encoded)
    slow, fast = sorted([data.draw(RATES), data.draw(RATES)])
    hosts = data.draw(st.integers(1, 5))
    steps = [in_lockstep(over(rate, hosts), passes, exchange).seconds for rate in (slow, fast)]
    assert steps[1] <= steps[0] * (1 + 1e-12)


@given(exchanges(), crowds(), RATES, SECONDS, SECONDS)
@settings(max_examples=40, deadline=None)
def test_the_parts_of_a_step_are_the_step_and_none_is_shorter_than_what_computes_or_moves(
    exchange: BucketExchange, passes: list[WorkerPass], rate: float, update: float, rest: float
) -> None:
    machines = over(rate, len(passes))
    parts = in_lockstep(machines, passes, exchange, update_s=update, rest_s=rest)
    assert min(parts) >= 0
    assert parts.seconds == pytest.approx(sum(parts))
    slowest = max(each.seconds for each in passes)
    assert parts.seconds >= (slowest + update + rest) * (1 - 1e-12)
    assert parts.passes + parts.waits == pytest.approx(slowest)
    if len(passes) > 1:
        on_link = sum(machines.seconds_on_link(each.size) for each in exchange.buckets)
        assert parts.seconds >= (on_link + update + rest) * (1 - 1e-9)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_ring_without_overlap_takes_its_closed_form(workers: int) -> None:
    size, rate, latency = 40e6, 1e9, 2e-4
    sent = sent_by_worker("all_reduce", size, workers)
    assert sent == 2 * (workers - 1) / workers * size
    exchange = BucketExchange([FullBucket(sent, 1.0, 2 * (workers - 1))])
    machines = over(rate, workers, latency)
    parts = in_lockstep(machines, [WorkerPass(0.1, 0.05)] * workers, exchange)
    payload = rate / 8 * 0.956
    assert parts.wire == pytest.approx(2 * (workers - 1) * (latency + size / workers / payload))


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 1), (4, 4)])
def test_pushes_and_pulls_take_the_closed_form_of_parameter_servers(
    workers: int, servers: int
) -> None:
    """With hosts of their own, each server's line carries all workers' parts; what it sends back
    follows by a segment, the other way."""
    size, rate = 40e6, 1e9
    machines = over(rate, workers + servers)
    exchange = BucketExchange([FullBucket(size, 1.0)], servers=servers)
    parts = in_lockstep(machines, [WorkerPass(0.1, 0.05)] * workers, exchange)
    one = workers * size / servers / (rate / 8 * 0.956)
    assert parts.wire == pytest.approx(one * (1 + 1 / SEGMENTS), rel=1e-6)


def test_an_encoded_exchange_sends_sums_only_once_they_are_decoded() -> None:
    """One bucket: half of it on the link, all of its decoding, the other half, decoding again."""
    size, rate, software = 40e6, 1e9, 5e-9
    exchange = BucketExchange([FullBucket(size, 1.0)], software, encoded=True)
    passes = [WorkerPass(0.1, 0.05)] * 2
    parts = in_lockstep(over(rate, 2), passes, exchange)
    on_link = size / (rate / 8 * 0.956)
    assert parts.wire == pytest.approx(on_link + size * software)
    several = exchange._replace(buckets=[FullBucket(size / 8, 1.0)] * 8)
    hidden = in_lockstep(over(rate, 2), passes, several).wire
    assert max(on_link, size * software) < hidden < parts.wire


def test_a_round_of_diloco_is_its_local_steps_and_one_exchange() -> None:
    size, rate, workers, local = 40e6, 1e8, 4, 20
    sent = sent_by_worker("diloco", size, workers)
    exchange = BucketExchange([FullBucket(sent / 2, 0.3), FullBucket(sent / 2, 1.0)])
    parts = in_round(over(rate, workers), [WorkerPass(local * 0.05, 0.02)] * workers, exchange)
    assert parts.seconds == pytest.approx(local * 0.05 + sent / (rate / 8 * 0.956))


def test_a_leased_step_is_bound_by_the_passes_or_by_the_servers_line() -> None:
    size, units, workers = 1e6, 32, 4
    exchange = BucketExchange([FullBucket(size, 1.0)], servers=1)
    passes = [WorkerPass(0.1, 0.0)] * workers
    fast = leased(over(1e12, 5), passes, size, units, exchange).seconds
    assert fast == pytest.approx(0.1 * units / workers, rel=0.02)
    slow = leased(over(1e7, 5), passes, size, units, exchange).seconds
    assert slow == pytest.approx(units * size / (1e7 / 8 * 0.956), rel=0.05)


def test_buckets_leave_while_passes_compute() -> None:
    """Half of the bytes are hidden by the second half of the backward pass."""
    second = 1e9 / 8 * 0.956
    exchange = BucketExchange([FullBucket(0.5 * second, 0.5), FullBucket(0.5 * second, 1.0)])
    parts = in_lockstep(over(1e9, 2), [WorkerPass(2.0, 1.0)] * 2, exchange)
    assert parts.wire == pytest.approx(0.5)


# ---- ways of a job


def figures(**changes: object) -> JobFigures:
    given = {
        "global_batch": 64,
        "micro_batches": 8,
        "steps": 100,
        "merged": True,
        "passes": [PassTime(8, 0.030), PassTime(64, 0.200)],
        "trained_bytes": 8_000_000,
    }
    return JobFigures(**{**given, **changes})  # type: ignore[arg-type]


def crew(workers: int, passes_s: float, wire_s: float = 0.0, **more: object) -> CrewFigures:
    sent = sent_by_worker("all_reduce", 8e6, workers) if workers > 1 else 0.0
    given = {
        "passes_s": passes_s,
        "slowest_s": (1.02 if workers > 1 else 1.0) * passes_s,
        "last_s": 0.6 * passes_s,
        "wire_s": wire_s,
        "update_s": 0.004,
        "whole_s": (1.02 if workers > 1 else 1.0) * passes_s + wire_s + 0.006,
        "sent_bytes": sent,
        "buckets": [BucketShare(0.5, 0.5), BucketShare(0.5, 1.0)],
        "worker_bytes": 300_000_000,
    }
    return CrewFigures(workers=workers, **{**given, **more})  # type: ignore[arg-type]


CREWS = [crew(1, 0.2), crew(2, 0.105, 0.004), crew(4, 0.11, 0.012)]
KNOWN = Measurements(figures(), CREWS, ProbedMachine(2))


@pytest.mark.parametrize("of", CREWS)
def test_a_way_that_was_measured_costs_what_was_measured(of: CrewFigures) -> None:
    priced = price(TrainingWay(of.workers), KNOWN, Machines(1, 2))
    assert priced is not None
    assert priced.measured
    assert priced.seconds == pytest.approx(of.whole_s, rel=0.01)
    assert priced.low < of.whole_s < priced.high


LINKED = crew(2, 0.105, 0.5, hosts=2, bits_per_s=1e8)


@pytest.mark.parametrize("wire_s", [0.9, 0.3])
def test_a_crew_on_links_is_taken_as_it_is_and_other_rates_are_simulated_from_it(
    wire_s: float,
) -> None:
    """Its exchange may be longer than the rate of its links says, or shorter, as bursts are."""
    linked = crew(2, 0.105, wire_s, hosts=2, bits_per_s=1e8)
    known = KNOWN._replace(crews=[CREWS[0], linked])
    found = []
    for rate in (5e7, 1e8, 2e8, 1e10):
        priced = price(TrainingWay(2), known, Machines(2, 2, HostLink(rate), emulated=True))
        assert priced is not None
        found.append(priced.seconds)
    assert found[1] == pytest.approx(linked.whole_s, rel=0.01)
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.2 * found[1]


@pytest.mark.parametrize("more_s", [0.0, 0.05])
def test_what_a_slow_link_takes_is_not_held_against_a_fast_one(more_s: float) -> None:
    """All of a crew's exchange at 100 Mbit/s was its link, a percent more for acknowledgements, and
    perhaps what is the same at each rate."""
    one, sent = BucketShare(1.0, 1.0), sent_by_worker("all_reduce", 8e6, 2)
    on_link = sent / (1e8 / 8 * 0.956)
    linked = crew(2, 0.105, 1.022 * on_link + more_s, hosts=2, bits_per_s=1e8, buckets=[one])
    known = KNOWN._replace(crews=[CREWS[0], linked])
    for times in (10, 100):
        there = Machines(2, 2, HostLink(times * 1e8), emulated=True)
        priced = price(TrainingWay(2), known, there)
        assert priced is not None
        assert priced.parts.wire == pytest.approx(1.022 * on_link / times + more_s, rel=0.03)


def test_the_interval_is_as_wide_as_visits_are_apart_and_wider_for_what_is_simulated() -> None:
    def wide(apart: float, rate: float) -> float:
        seen = [LINKED.whole_s * (1 - apart), LINKED.whole_s * (1 + apart)]
        alone = msgspec.structs.replace(CREWS[0], visits=[0.2, 0.2])
        known = KNOWN._replace(crews=[alone, msgspec.structs.replace(LINKED, visits=seen)])
        found = price(TrainingWay(2), known, Machines(2, 2, HostLink(rate), emulated=True))
        assert found is not None
        return found.wide

    assert wide(0.0, 1e8) < wide(0.03, 1e8) < wide(0.1, 1e8)
    assert wide(0.0, 1e8) <= 0.0625  # BASE alone
    assert wide(0.0, 2e8) > wide(0.0, 1e8)


@given(st.lists(RATES, min_size=2, max_size=2), st.sampled_from([2, 4]))
@settings(max_examples=30, deadline=None)
def test_more_bandwidth_never_makes_a_way_slower(rates: list[float], workers: int) -> None:
    slow, fast = sorted(rates)
    found = [
        price(TrainingWay(workers), KNOWN, Machines(workers, 2, HostLink(rate), emulated=True))
        for rate in (slow, fast)
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].seconds <= found[0].seconds * (1 + 1e-9)


@given(st.floats(0.05, 1.0))
@settings(max_examples=30, deadline=None)
def test_a_slow_host_shortens_a_step_by_no_more_than_its_share(speed: float) -> None:
    """It brings `speed` to a sum of 2, and may bring nothing: then it gets no work."""
    link = HostLink(1e12, 0.0)
    two = price(TrainingWay(2), KNOWN, Machines(2, 2, link, speeds=(1.0, 1.0)))
    three = price(TrainingWay(3), KNOWN, Machines(3, 2, link, speeds=(1.0, 1.0, speed)))
    assert two is not None
    assert three is not None
    slowest = [each.parts.passes + each.parts.waits for each in (two, three)]
    assert slowest[1] >= slowest[0] * 2 / (2 + speed) * 0.999
    assert slowest[1] <= slowest[0] * 1.001


def test_the_rate_from_which_it_pays_is_the_one_at_which_two_are_as_fast_as_one() -> None:
    machines = Machines(2, 2, HostLink(1e8))
    found = search([TrainingWay(1), TrainingWay(2)], KNOWN, machines)
    assert found.break_even_rate is not None
    at = machines._replace(link=HostLink(found.break_even_rate))
    one, two = (price(TrainingWay(n), KNOWN, at) for n in (1, 2))
    assert one is not None
    assert two is not None
    assert two.seconds == pytest.approx(one.seconds, rel=1e-3)
    assert not found.pays
    quick = search([TrainingWay(1), TrainingWay(2)], KNOWN, machines._replace(link=HostLink(1e11)))
    assert quick.pays
    assert quick.best is not None
    assert quick.best.way.workers == 2


def test_what_does_not_fit_is_ranked_but_never_the_best() -> None:
    machines = Machines(1, 2)
    found = search([TrainingWay(1), TrainingWay(2)], KNOWN, machines, memory_bytes=500_000_000)
    assert found.same[0].way.workers == 2
    assert missing_bytes(found.same[0], machines, 500_000_000) == 100_000_000
    assert found.best is found.alone


def test_a_busy_machine_widens_every_interval() -> None:
    quiet = price(TrainingWay(2), KNOWN, Machines(1, 2))
    uneven = [msgspec.structs.replace(each, spread=0.2) for each in CREWS]
    known = KNOWN._replace(probed=ProbedMachine(2, 9.0, 1.9, 0.5), crews=uneven)
    busy = price(TrainingWay(2), known, Machines(1, 2))
    assert quiet is not None
    assert busy is not None
    assert busy.wide > 2 * quiet.wide
    assert quiet.wide <= 0.125
    assert ProbedMachine(2, 9.0, 1.9, 0.0).is_busy
    assert not ProbedMachine(2, 9.0, 0.1, 0.05).is_busy


def test_a_search_over_hundreds_of_ways_does_not_take_a_second() -> None:
    ways = [TrainingWay(n) for n in range(1, 129)] + [
        TrainingWay(n, codec="int8", same=False) for n in range(2, 129)
    ]
    found = search(ways, KNOWN, Machines(16, 2, HostLink(1e9)))
    assert len(found.same) == 128
    assert all(math.isfinite(each.seconds) and each.seconds > 0 for each in found.same)


def test_bytes_of_another_number_of_workers_follow_from_those_counted() -> None:
    assert rescaled("all_reduce", 8e6, 2, 4) == pytest.approx(12e6)
    assert rescaled("server_sync", 8e6, 2, 4) == 8e6
