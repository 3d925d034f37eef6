"""Participants that are computed by nobody but a worker that has their data."""

import numpy as np
import pytest

from instep.client.job_checks import check_job
from instep.comm.protocol.messages import Form
from instep.data.batches import Batches
from instep.data.participants import OwnRounds, Sampling
from instep.data.partition.regions import HomeRegions, Regions
from instep.engine.assignment import Finished, Lockstep
from instep.engine.passes import Near
from instep.errors import DataError, SpecError
from instep.events import Kind
from instep.job import file as spec_file
from instep.job.train import TrainSpec

HELD = [[20, 20, 0, 0, 0, 0], [0, 0, 20, 20, 0, 0], [0, 0, 20, 19, 20, 0]]
"""Two have part 2, the third not all of part 3; nobody has part 5."""


def members(count: int = 4, finished: Finished | None = None) -> tuple[OwnRounds, list[Lockstep]]:
    own = OwnRounds([20] * 6, 5, Sampling(seed=3, participants=6, count=count))
    more = {} if finished is None else {"finished": finished}
    return own, [
        Lockstep(
            Form(generation=2, rank=rank, members=[5, 6, 7]),
            TrainSpec(global_batch=20, micro_batches=count),
            Batches(120, 20),
            by_speed=True,
            own=own,
            near=Near(own, HELD, bound=True),
            **more,
        )
        for rank in range(3)
    ]


@pytest.mark.parametrize("speeds", [None, (1.0, 1.0, 50.0)])
def test_a_participant_is_with_a_worker_that_has_all_its_data_or_the_ledger_says_it_is_away(speeds):
    own, every = members()
    away = 0
    for step in range(1, 12):
        who, computed = own.who(step), []
        for rank, member in enumerate(every):
            member.dealing.speeds = speeds
            ((where, share),) = member.plan(step, step, merge=False)
            mine = [who[part.number] for part in share.passes]
            assert all(HELD[rank][each] == 20 for each in mine)
            computed += mine
            member.prepared(0, step, where)
        assert sorted(computed) == [each for each in who if each != 5]
        for member in every:  # whatever is due is in the ledger, once
            rows = [row for row in member.records() if row[-1] > row[-2]]
            assert sorted(row[6] for row in rows) == list(range(4))
            assert [who[row[6]] for row in rows if row[5] == Kind.AWAY] == [5] * (5 in who)
            due = [(part.epoch, *part[1:]) for part in own.of(step)]
            assert sorted((row[1], *row[-2:]) for row in rows) == sorted(due)
        away += 5 in who
    assert 0 < away < 11
    assert every[0]._near is not None
    assert every[0]._near.away() == [5]


def test_what_is_computed_of_a_round_stays_and_the_rest_goes_to_who_has_it():
    """The third has computed participant 2, and the second has it too."""
    own, every = members(6, Finished(3, {2: 2}))
    taken = [next(member.plan(3, 3, merge=False))[1].passes for member in every]
    assert own.who(3) == list(range(6))
    assert [[part.number for part in each] for each in taken] == [[0, 1], [3], [2, 4]]


def test_what_is_tried_is_of_this_host_and_what_is_trained_on_stands_behind():
    regions = Regions([range(n * 10, n * 10 + 10) for n in range(4)], 1)
    home = HomeRegions(regions, range(10, 30))
    for epoch in (0, 2):
        tried = home.indices(epoch, 0, 40)
        assert np.array_equal(tried[:20], regions.indices(epoch, 10, 30))
        assert np.array_equal(tried[:20], tried[20:])
        behind = home.indices(epoch, home.behind(25), home.behind(40))
        assert np.array_equal(behind, regions.indices(epoch, 25, 40))
    nothing = HomeRegions(regions, range(0))
    assert np.array_equal(nothing.indices(0, 45, 50), regions.indices(0, 5, 10))
    with pytest.raises(DataError, match="no participant has its data on this host"):
        nothing.indices(0, 0, 1)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"sync.options.partition": "random"}, "Set sync.options.partition = 'parts', or leave"),
        ({"data.split": "random"}, "would validate on samples of participants of others"),
    ],
)
def test_what_would_have_data_leave_their_host_is_refused(more, why):
    options = {"partition": "parts", "clip": 1.0, "secure_sums": True}
    table = {
        "recipe": "a.py:f",
        "train": {"global_batch": 12, "determinism": "bits"},
        "data": {"parts": 4, "order": "windowed"},
        "sync": {"name": "averaging", "participants": 4, "options": options},
    }
    for name, value in more.items():
        *place, key = name.split(".")
        at = table
        for each in place:
            at = at[each]
        at[key] = value
    with pytest.raises(SpecError, match=why):
        check_job(spec_file.build(table, source="a test"))
