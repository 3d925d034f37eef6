"""Faults that a cost could have: each of them moves a price away from its closed form."""

import msgspec
import pytest

from instep.plan import machine, memory, pricing, steps
from instep.plan.machine import HostLink, Machines
from instep.plan.measured import BucketShare, CrewFigures, JobFigures, PassTime, ProbedMachine
from instep.plan.pricing import Measurements, price
from instep.plan.ways import TrainingWay

SIZE, RATE, LATENCY = 20e6, 1e9, 5e-3
RESIDENT = 300_000_000
PASSES_S, HALF = 0.1, BucketShare(0.5, 0.5)
JOB = JobFigures(64, 8, 100, False, [PassTime(8, 0.1), PassTime(64, 0.8)], int(SIZE))


def crew(workers: int, servers: int = 0) -> CrewFigures:
    """A crew without links, whose exchange took no time: what is added is the link's."""
    sent = SIZE if servers else 2 * (workers - 1) / workers * SIZE
    seconds = {"passes_s": PASSES_S, "slowest_s": PASSES_S, "last_s": PASSES_S}
    strategy = "server_sync" if servers else "all_reduce"
    buckets = [HALF, BucketShare(0.5, 1.0)]
    given = {**seconds, "whole_s": PASSES_S, "sent_bytes": sent, "buckets": buckets}
    given["worker_bytes"] = RESIDENT
    return CrewFigures(workers, strategy, servers=servers, **given)  # type: ignore[arg-type]


KNOWN = Measurements(JOB, [crew(1), crew(2), crew(2, servers=1)], ProbedMachine(2))


def seconds(way: TrainingWay, hosts: int) -> float:
    priced = price(way, KNOWN, Machines(hosts, 2, HostLink(RATE, LATENCY)))
    assert priced is not None
    return priced.parts.wire


def agrees() -> bool:
    """Whether the wire of two ways is as long as closed forms say, and what a codec carries over
    takes memory; half of a ring's bytes leave after half of the pass, which is shorter than they
    take."""
    second = RATE / 8 * 0.956
    half = 0.5 * 2 * 3 / 4 * SIZE / second + 2 * 3 * LATENCY
    passes = PASSES_S / 4
    ring = max(0.5 * passes + half, passes) + half - passes
    four = seconds(TrainingWay(4), 4) == pytest.approx(ring, rel=1e-3)
    last = 2 * 0.5 * SIZE / second  # of the second half, from two workers
    served = seconds(TrainingWay(2, "server_sync", servers=1), 3)
    coded = price(TrainingWay(4, codec="int8", same=False), KNOWN, Machines(4, 2))
    assert coded is not None
    carried = coded.worker_bytes == RESIDENT + 2 * SIZE  # nobody took steps with that codec
    return four and carried and 0.98 * last <= served <= 2 * (last + LATENCY)


FAULTS = {
    "what a ring sends does not depend on its workers": (
        pricing,
        "rescaled",
        lambda strategy, sent, measured_with, workers: sent,
    ),
    "a message needs no time to begin": (Machines, "latency_s", 0.0),
    "packets have no headers": (machine, "PAYLOAD", 1.0),
    "everything is sent during the passes": (steps, "_full", lambda one, at: 0.0),
    "nothing is sent during the passes": (steps, "_full", lambda one, at: one.seconds),
    "residuals take no memory": (memory, "SLOTS", 0),
    "the link is never full": (Machines, "seconds_on_link", lambda self, size: 0.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_price_with_a_planted_fault_is_not_its_closed_form(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert agrees()
    where, name, instead = FAULTS[fault]
    monkeypatch.setattr(where, name, instead)
    assert not agrees()


def test_a_loop_of_ones_own_that_ran_on_one_worker_tells_nothing_of_more() -> None:
    loop = JobFigures(64, 8, 0, False, [PassTime(64, 0.8)], 0)  # nobody has counted its bytes
    alone = Measurements(loop, [crew(1)], ProbedMachine(2))
    assert price(TrainingWay(1), alone, Machines()) is not None
    assert price(TrainingWay(2), alone, Machines()) is None
    with_two = alone._replace(crews=[crew(1), crew(2)])
    assert price(TrainingWay(4), with_two, Machines()) is not None


@pytest.mark.parametrize("batch", [1, 16, 32])
def test_a_batch_of_a_64th_has_a_sample_at_least(batch: int) -> None:
    small = KNOWN._replace(job=msgspec.structs.replace(JOB, global_batch=batch), batch=1 / 64)
    priced = price(TrainingWay(2), small, Machines())
    assert priced is not None
    assert priced.step_samples == 1
    assert priced.seconds > 0
