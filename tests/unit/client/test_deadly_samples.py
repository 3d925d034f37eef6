"""Samples that kill who reads them are skipped, if that is wanted and they are known to do it."""

from instep.client.predict.deadly_samples import DeadlySamples
from instep.comm.protocol.messages import Whereabouts


def at(sample, count=1):
    return Whereabouts(dataset="validation", sample=sample, count=count)


def test_a_sample_at_which_three_workers_died_is_skipped():
    deadly = DeadlySamples(skip=True)
    assert [deadly.learn(2, at(17), "it was killed by SIGSEGV") for _ in range(3)] == [0, 0, 1]
    (mark,) = deadly.marks
    assert (mark.dataset, mark.sample) == ("validation", 17)
    assert mark.cause.startswith("it was killed by SIGSEGV while it read validation sample 17")
    assert deadly.needed == {2: deadly.changes}


def test_samples_that_were_read_together_are_read_apart_first():
    deadly = DeadlySamples(skip=True)
    assert deadly.learn(0, at(8, count=3), "it was killed")
    assert [(mark.sample, mark.cause) for mark in deadly.marks] == [(8, ""), (9, ""), (10, "")]
    assert not deadly.learn(0, at(8, count=3), "it was killed")  # that does not help for ever
    for _ in range(3):
        found = deadly.learn(0, at(9), "it was killed")
    assert found
    assert [mark.sample for mark in deadly.marks if mark.cause] == [9]


def test_nothing_is_skipped_that_should_not_be():
    assert not DeadlySamples(skip=False).learn(0, at(1), "it was killed")
    deadly = DeadlySamples(skip=True)
    assert not deadly.learn(0, None, "it was killed")
    assert deadly.marks == []
    assert deadly.said(None) == ""
    assert deadly.said(at(3)) == ", while it read validation sample 3"
