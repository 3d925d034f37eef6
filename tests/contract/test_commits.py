"""A commit happens everywhere or nowhere, wherever a rank dies and whatever result gets lost.

The real engine and real strategies on ranks as threads (`tests/ranks.py`). Each case is one
run in which something goes wrong at one place; what must hold then stands in `World`. A
strategy is found through its table, and a further one needs a line in `SAME` where its
result has to be that of an undisturbed run.
"""

import itertools
import random
from functools import cache
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch

from instep.errors import PeerError
from instep.sync import STRATEGIES
from instep.worker import committed
from instep.worker.buffers import Buffers
from instep.worker.catch_up import Place, beginning
from instep.worker.engine import Engine
from ranks import WORKERS, Death, Lapse, Point, Script, World

STEP = 2
"""In which something goes wrong; steps are before and after it."""

SAME = {"all_reduce": ("order", "bits")}
"""Of strategies that have nothing to lose with a worker: in which kinds of sums a disturbed run
ends with the parameters of an undisturbed one."""

OPTIONS = {"all_reduce": [{}, {"bucket_mb": 0.00005}]}
CASES = [
    (name, options, determinism)
    for name in STRATEGIES
    for options in OPTIONS.get(name, [{}])
    for determinism in SAME.get(name, ("order",))
]
FIRST = [case for case in CASES if case[1] == {}]
VOTES = pytest.mark.parametrize("votes", [False, True], ids=["no_vote", "vote"])


@pytest.fixture
def folder(tmp_path):
    torch.set_num_threads(1)
    return tmp_path


@cache
def _undisturbed(name, options, determinism):
    """What every rank holds at the end, and the points that it came by."""
    worlds = []
    for votes in (False, True):
        with TemporaryDirectory() as folder:
            worlds.append(World(folder, name, dict(options), determinism=determinism, votes=votes))
            worlds[-1].train()
    ends = [world.members[0].tensors() for world in worlds]
    assert all(torch.equal(tensor, ends[1][key]) for key, tensor in ends[0].items())
    return ends[0], [world.members[0].trace for world in worlds]


def undisturbed(name, options, determinism):
    return _undisturbed(name, tuple(options.items()), determinism)


def places(case, votes, step=STEP):
    """Each point of a step at which a rank may end, and the last collective that it began.

    The first step has those of the group's forming too.
    """
    trace = undisturbed(*case)[1][votes]
    begins = trace.index(Point("committed", step - 1)) + 1 if step > 1 else 0
    last = max((point.number for point in trace[:begins] if point.what == "sent"), default=0)
    for point in trace[begins : trace.index(Point("committed", step)) + 1]:
        last = point.number if point.what == "sent" else last
        yield point, last


def subsets(ranks):
    return [frozenset(some) for n in range(len(ranks) + 1) for some in itertools.combinations(ranks, n)]


def deaths(case, votes):
    """Every rank dies at every point, and of what it sent last every selection is lost."""
    for point, last in places(case, votes):
        for rank in range(WORKERS):
            others = [other for other in range(WORKERS) if other != rank]
            for lost in subsets(others):
                yield Script(deaths=[Death(rank, point)], lost={last: lost})


def losses(case, votes):
    """Nobody dies, but the result of a collective is lost to some."""
    for call in sorted({last for _, last in places(case, votes)}):
        for lost in subsets(range(WORKERS))[1:]:
            yield Script(lost={call: lost})


def lapses():
    """A rank is cut off from the master: before its commit, or in the middle of it."""
    for what, rank in itertools.product(("agreed", "moved"), range(WORKERS)):
        yield Script(lapses=[Lapse(rank, Point(what, STEP))])


def check(folder, case, votes, scripts, *, replace):
    name, options, determinism = case
    world = World(folder, name, options, determinism=determinism, votes=votes)
    try:
        world.train(scripts, replace=replace)
        if determinism in SAME.get(name, ()):
            exact = determinism == "bits" or len(world.members) == WORKERS
            same_as_undisturbed(world, undisturbed(*case)[0], exact=exact)
    except AssertionError as error:
        error.add_note(f"generation by generation: {'; '.join(map(str, scripts))}")
        raise
    return world


def same_as_undisturbed(world, wanted, *, exact):
    found = world.members[0].tensors()
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        if exact:
            assert torch.equal(tensor, wanted[key]), key
        else:
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-4, atol=1e-6)


# ---- one thing goes wrong


@VOTES
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_rank_that_dies_at_any_message_leaves_one_commit_or_none(folder, case, votes):
    every = list(deaths(case, votes))
    for number, script in enumerate(every[:: len(every) // 30]):
        check(folder, case, votes, [script], replace=number % 3 > 0)


@VOTES
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_result_that_is_lost_to_some_leaves_one_commit_or_none(folder, case, votes):
    for script in list(losses(case, votes))[::2]:
        check(folder, case, votes, [script], replace=True)


@VOTES
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_rank_that_is_cut_off_from_the_master_in_a_commit_ends_with_the_others(
    folder, case, votes
):
    for script in lapses():
        check(folder, case, votes, [script], replace=True)


@pytest.mark.slow
@VOTES
@pytest.mark.parametrize("replace", [True, False], ids=["newcomer", "survivors"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_death_and_every_loss(folder, case, votes, replace):
    for script in itertools.chain(deaths(case, votes), losses(case, votes), lapses()):
        check(folder, case, votes, [script], replace=replace)


# ---- several things go wrong


def a_story(draw, case, votes):
    """Up to two deaths in the first generation, and more while the next ones form."""
    members = range(WORKERS)
    points = [point for step in (1, 2, 3) for point, _ in places(case, votes, step)]
    first = [Death(rank, draw.choice(points)) for rank in draw.sample(members, draw.choice((1, 2)))]
    scripts = [Script(deaths=first, lost=a_loss(draw, first))]
    for _ in range(draw.choice((1, 1, 2))):
        point = Point(draw.choice(("start", "sent", "got")), draw.randint(1, 16))
        later = [Death(draw.randrange(WORKERS), point)]
        scripts.append(Script(deaths=later, lost=a_loss(draw, later)))
    return scripts


def a_loss(draw, deaths):
    calls = [at.number - (at.what == "start") for _, at in deaths if at.what in ("start", "sent")]
    return {call: draw.choice(subsets(range(WORKERS))) for call in calls}


def check_stories(folder, case, votes, count):
    draw = random.Random(f"{case} {votes}")
    for _ in range(count):
        check(folder, case, votes, a_story(draw, case, votes), replace=True)


@VOTES
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_deaths_while_the_next_generation_forms_leave_one_commit_or_none(folder, case, votes):
    check_stories(folder, case, votes, 10)


@pytest.mark.slow
@VOTES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_such_stories(folder, case, votes):
    check_stories(folder, case, votes, 300)
