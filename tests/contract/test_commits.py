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

from instep.engine.engine import Engine
from instep.engine.served.optimizer import ServedUpdate
from instep.engine.state import committed
from instep.engine.state.buffers import Buffers
from instep.engine.state.catch_up import HeldCommit, beginning
from instep.engine.step import records
from instep.errors import PeerError, RecipeError, RunError
from instep.job.sync.tables import STRATEGY_ROWS
from instep.sync.all_reduce import AllReduce
from instep.sync.rounds.coded import Coded
from instep.sync.servers.server_sync import ServerSync
from instep.sync.sign_vote import SignVote
from instep.worker.rounds.local_states import LocalStates
from marks import slow, tail
from ranks import COLUMN, WORKERS, Break, Death, Lapse, Point, Script, World

STEP = 2
"""In which something goes wrong; steps are before and after it."""

SAME = {
    "all_reduce": ("order", "bits"),
    "averaging": ("bits",),
    "diloco": ("bits",),
    "server_sync": ("order", "bits"),
    "sign_vote": ("bits",),
}
"""Of strategies that have nothing to lose with a worker: in which kinds of sums a disturbed run
ends with the parameters of an undisturbed one."""

OPTIONS = {
    "all_reduce": [{}, {"bucket_mb": 0.00005}, {"codec": "int8"}, {"delayed": True}],
    "averaging": [{}, {"local_optimizers": "kept"}],
    "server_sync": [
        {"servers": 1},
        {"servers": 2},
        {"servers": 2, "copy": True},
        {"servers": 2, "bucket_mb": 0.00005},
        {"servers": 1, "codec": "int8"},
        {"servers": 2, "codec": "int4", "bucket_mb": 0.00005},
    ],
    "diloco": [
        {"codec": "int4"},  # a codec in rounds, and state of the outer step
        {"fragments": 2, "local_steps": 2},
        {"fragments": 2, "local_steps": 2, "delay": 1, "codec": "int4"},
    ],
    "fedprox": [],  # which are the same class with other rules
    "fedopt": [],
    "sign_vote": [{"momentum": 0.9}, {"momentum": 0.0}],
}


def has_own(options):
    """Whether a rank has state of its own."""
    return any(options.get(name) for name in ("codec", "delayed", "momentum", "fragments"))


CASES = [
    (name, options, determinism)
    for name, row in STRATEGY_ROWS.items()
    if not row.leased
    for options in OPTIONS.get(name, [{}])
    for determinism in SAME.get(name, ("order",))
    if (determinism == "order") == (name == "all_reduce" or "servers" in options)
    or "codec" not in options
    if name != "server_sync" or (determinism == "order") == ("codec" in options)
]
FIRST = [case for case in CASES if "bucket_mb" not in case[1]]
VOTES = pytest.mark.parametrize("votes", [False, True], ids=["no_vote", "vote"])


def each_of(cases):
    """With votes and without; a strategy that asks for votes itself has them in any case."""
    asks = [has_own(case[1]) or "servers" in case[1] for case in cases]
    pairs = [(case, True) for case in cases]
    pairs += [(case, False) for case, own in zip(cases, asks, strict=True) if not own]
    ids = [f"{case}-{'vote' if votes else 'no_vote'}" for case, votes in pairs]
    return pytest.mark.parametrize(("case", "votes"), pairs, ids=ids)


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
    return ends[0], [[rank.trace for rank in world.members] for world in worlds]


def undisturbed(name, options, determinism):
    return _undisturbed(name, tuple(options.items()), determinism)


def places(case, votes, step=STEP, rank=0):
    """Each point of a step at which a rank may end, and the last collective that it began.

    The first step has those of the group's forming too.
    """
    trace = undisturbed(*case)[1][votes][rank]
    begins = trace.index(Point("committed", step - 1)) + 1 if step > 1 else 0
    last = max((point.number for point in trace[:begins] if point.what == "sent"), default=0)
    for point in trace[begins : trace.index(Point("committed", step)) + 1]:
        last = point.number if point.what == "sent" else last
        yield point, last


def subsets(ranks):
    return [
        frozenset(some) for n in range(len(ranks) + 1) for some in itertools.combinations(ranks, n)
    ]


def deaths(case, votes):
    """Every rank dies at every point, and of what it sent last every selection is lost."""
    for rank in range(WORKERS):
        for point, last in places(case, votes, rank=rank):
            others = [other for other in range(WORKERS) if other != rank]
            for lost in subsets(others):
                yield Script(deaths=[Death(rank, point)], lost={last: lost})


def losses(case, votes):
    """Nobody dies, but the result of a collective is lost to some."""
    for call in sorted({last for _, last in places(case, votes)}):
        for lost in subsets(range(WORKERS))[1:]:
            yield Script(lost={call: lost})


def breaks(case, votes):
    """A rank hears in a call that its group has come apart; a backward pass may be under way."""
    for rank in range(WORKERS):
        for point, _ in places(case, votes, rank=rank):
            if point.what in ("start", "sent", "gives", "awaits"):
                yield Script(breaks=[Break(rank, point)])


def lapses():
    """A rank is cut off from the master: before its commit, or in the middle of it."""
    for what, rank in itertools.product(("agreed", "moved"), range(WORKERS)):
        yield Script(lapses=[Lapse(rank, Point(what, STEP))])


def check(folder, case, votes, scripts, *, replace):
    name, options, determinism = case
    world = World(folder, name, options, determinism=determinism, votes=votes)
    try:
        world.train(scripts, replace=replace)
        carried_on = not has_own(options) or len(world.members) == WORKERS
        if determinism in SAME.get(name, ()) and carried_on:
            exact = determinism == "bits" or len(world.members) == WORKERS
            same_as_undisturbed(world, undisturbed(*case)[0], exact=exact)
    except AssertionError as error:
        error.add_note(f"generation by generation: {'; '.join(map(str, scripts))}")
        raise
    return world


def check_all(folder, case, votes, scripts, *, replace):
    for script in scripts:
        check(folder, case, votes, [script], replace=replace)


def some_of(scripts, count):
    """Drawn: every so-many-th would always have the same rank, or lose the same results."""
    every = list(scripts)
    return random.Random(len(every)).sample(every, count)


def same_as_undisturbed(world, wanted, *, exact):
    same_as(world.members[0].tensors(), wanted, exact=exact)


def same_as(found, wanted, *, exact):
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        if exact:
            assert torch.equal(tensor, wanted[key]), key
        else:
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-4, atol=1e-6)


# ---- one thing goes wrong


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_vote_is_one_message_and_left_out_where_nothing_can_be_in_doubt(case):
    plain, forced = (
        sum(point.what == "sent" for point, _ in places(case, votes)) for votes in (False, True)
    )
    votes_anyway = has_own(case[1]) or case[0] == "server_sync"
    assert forced - plain == (0 if votes_anyway else 1)


@pytest.mark.grid
@pytest.mark.parametrize("count", [3, tail(7)])
@each_of(FIRST)
def test_a_rank_that_dies_at_any_message_leaves_one_commit_or_none(folder, case, votes, count):
    for number, script in enumerate(some_of(deaths(case, votes), count)):
        check(folder, case, votes, [script], replace=number % 3 > 0)


@pytest.mark.grid
@pytest.mark.parametrize("count", [1, tail(2)])
@each_of(FIRST)
def test_a_result_that_is_lost_to_some_leaves_one_commit_or_none(folder, case, votes, count):
    some = [*some_of(losses(case, votes), count), *some_of(breaks(case, votes), count)]
    check_all(folder, case, votes, some, replace=True)


@pytest.mark.parametrize("case", [case for case in FIRST if has_own(case[1])], ids=str)
def test_a_step_that_happens_although_all_were_in_doubt_has_its_loss_in_the_records(folder, case):
    vote = max(last for _, last in places(case, True))
    check(folder, case, True, [Script(lost={vote: frozenset(range(WORKERS))})], replace=True)


@pytest.mark.grid
@pytest.mark.parametrize("count", [1, tail(2)])
@each_of(FIRST)
def test_a_rank_that_is_cut_off_from_the_master_in_a_commit_ends_with_the_others(
    folder, case, votes, count
):
    check_all(folder, case, votes, some_of(lapses(), count), replace=True)


@pytest.mark.slow
@pytest.mark.parametrize("replace", [True, False], ids=["newcomer", "survivors"])
@each_of(CASES)
def test_every_death_and_every_loss(folder, case, votes, replace):
    one_each = deaths(case, votes), losses(case, votes), breaks(case, votes), lapses()
    check_all(folder, case, votes, itertools.chain(*one_each), replace=replace)


# ---- a step with several turns


@pytest.mark.parametrize("every", [19, tail(7), slow(1)])
@VOTES
def test_a_rank_that_dies_within_or_between_the_turns_of_a_step_leaves_no_trace(
    folder, votes, every
):
    """Commits are numbered by turns: 3 and 4 are the two of step 2."""
    calm = World(folder, determinism="bits", votes=votes, turns=2)
    calm.train()
    wanted, trace = calm.members[0].tensors(), calm.members[0].trace
    assert {"optimizer-first", "optimizer-last"} <= {name.split()[0] for name in wanted}
    begins = trace.index(Point("committed", 2)) + 1
    points = trace[begins : trace.index(Point("committed", 4)) + 1]
    for number, point in list(enumerate(points))[::every]:
        last = max(p.number for p in trace[: begins + number + 1] if p.what == "sent")
        for rank, lost in enumerate((frozenset({1}), frozenset(), frozenset({1}))):
            script = Script(deaths=[Death(rank, point)], lost={last: lost})
            world = World(folder, determinism="bits", votes=votes, turns=2)
            world.train([script], replace=number % 3 > 0)
            same_as_undisturbed(world, wanted, exact=True)


# ---- replicas of several ranks


MESHES = pytest.mark.parametrize(
    "case",
    [
        ("all_reduce", (), "order"),
        ("all_reduce", (), "bits"),
        ("all_reduce", (("codec", "int8"),), "order"),
        ("averaging", (("local_optimizers", "kept"),), "bits"),
        ("diloco", (("codec", "int4"),), "bits"),
    ],
    ids=str,
)


def mesh_of(folder, case):
    name, options, determinism = case
    return World(folder, name, dict(options), determinism=determinism, shard=2)


@cache
def calm_mesh(case):
    with TemporaryDirectory() as folder:
        world = mesh_of(folder, case)
        world.train()
    return [rank.tensors() for rank in world.members], [rank.trace for rank in world.members]


@pytest.mark.grid
@pytest.mark.parametrize("every", [503, tail(101), slow(1)])
@MESHES
def test_a_replica_that_loses_a_rank_at_any_message_leaves_one_commit_or_none(folder, case, every):
    check_meshes(folder, case, every)


@pytest.mark.grid
@pytest.mark.parametrize("every", [31, tail(7), slow(1)])
@MESHES
def test_a_replica_that_loses_a_rank_while_the_next_generation_begins_leaves_one_commit_or_none(
    folder, case, every
):
    """The first loss is in step 2, the second at messages before the steps that follow."""
    wanted, traces = calm_mesh(case)
    first = Script(deaths=[Death(1, Point("agreed", STEP))])
    for rank, trace in enumerate(traces):
        begins = trace[: trace.index(Point("agreed", 1))]
        for point in [p for p in begins if p.what in ("start", "got")][rank % every :: every]:
            world = mesh_of(folder, case)
            world.train([first, Script(deaths=[Death(rank, point)])])
            for each in world.members:
                same_as(each.tensors(), wanted[each.place], exact=True)


def test_what_a_rank_laid_out_counts_only_once_all_places_of_the_mesh_have_laid_out_theirs(folder):
    """Rank 0 ends as the only one that has come through the start; the ranks at the other place
    have heard less of it than the one at its own."""
    case = MESHES.args[1][2]
    wanted, _ = calm_mesh(case)
    first = Script(deaths=[Death(1, Point("agreed", STEP))])
    for call in [*range(2, 9), *range(COLUMN + 2, COLUMN + 9)]:
        lost = {call - 1: frozenset({1, 3}), call: frozenset({2})}
        world = mesh_of(folder, case)
        world.train([first, Script(deaths=[Death(0, Point("start", call + 1))], lost=lost)])
        for each in world.members:
            same_as(each.tensors(), wanted[each.place], exact=True)


def check_meshes(folder, case, every):
    """Each rank at each message of a step, with all selections of who misses its last one."""
    wanted, traces = calm_mesh(case)
    first, second = ({n.split(" ", 1)[1]: t for n, t in each.items()} for each in wanted[:2])
    assert any(not torch.equal(first[n], second[n]) for n in first.keys() & second.keys())
    cases = []
    for rank, trace in enumerate(traces):
        begins = trace.index(Point("committed", STEP - 1)) + 1
        for place, point in enumerate(trace[begins : trace.index(Point("committed", STEP)) + 1]):
            sent = [p.number for p in trace[: begins + place + 1] if p.what == "sent"]
            others = [other for other in range(4) if other != rank]
            cases += [
                (Script(deaths=[Death(rank, point)], lost={sent[-1]: lost}), replace)
                for lost in subsets(others)
                for replace in (True, False)
            ]
    for script, replace in cases[::every]:
        world = mesh_of(folder, case)
        try:
            world.train([script], replace=replace)
            for rank in world.members:
                exact = case[2] == "bits" or len(world.members) == 4
                same_as(rank.tensors(), wanted[rank.place], exact=exact)
        except AssertionError as error:
            error.add_note(f"{script}, {'replaced' if replace else 'without it'}")
            raise


# ---- several things go wrong


def a_story(draw, case, votes):
    """Up to two ranks die or break off in the first generation, and more while later ones form."""
    members = range(WORKERS)
    who = draw.sample(members, draw.choice((1, 2)))
    steps = (1, 2, 3)
    points = {n: [p for step in steps for p, _ in places(case, votes, step, n)] for n in who}
    scripts = [a_script(draw, [(rank, draw.choice(points[rank])) for rank in who])]
    for _ in range(draw.choice((1, 1, 2))):
        point = Point(draw.choice(("start", "sent", "got")), draw.randint(1, 16))
        scripts.append(a_script(draw, [(draw.choice(members), point)]))
    return scripts


TALKS = ("start", "sent", "got", "gives", "gave", "awaits", "took")


def a_script(draw, faults):
    talks = [fault for fault in faults if fault[1].what in TALKS]
    breaks = [Break(*fault) for fault in talks if draw.random() < 0.3]
    deaths = [Death(*fault) for fault in faults if Break(*fault) not in breaks]
    return Script(deaths=deaths, breaks=breaks, lost=a_loss(draw, faults))


def a_loss(draw, faults):
    calls = [at.number - (at.what == "start") for _, at in faults if at.what in ("start", "sent")]
    return {call: draw.choice(subsets(range(WORKERS))) for call in calls}


def check_stories(folder, case, votes, count):
    draw = random.Random(f"{case} {votes}")
    for _ in range(count):
        story = a_story(draw, case, votes)
        replace = draw.random() < 0.8
        check(folder, case, votes, story if replace else story[:1], replace=replace)


@pytest.mark.grid
@pytest.mark.parametrize("count", [1, tail(2)])
@each_of(FIRST)
def test_deaths_while_the_next_generation_forms_leave_one_commit_or_none(
    folder, case, votes, count
):
    check_stories(folder, case, votes, count)


@pytest.mark.slow
@each_of(CASES)
def test_many_such_stories(folder, case, votes):
    check_stories(folder, case, votes, 300)


# ---- one story each


def test_a_newcomer_that_was_given_the_state_keeps_it_though_its_giver_dies(folder):
    """All that is left of the run is what the newcomers were given a moment ago."""
    point = next(p for p, _ in places(FIRST[0], False) if p.what == "start")
    others_die = Script(deaths=[Death(1, point), Death(2, point)])
    given = 4  # collectives: what they hold, then a length, a header and tensors
    giver_dies = Script(deaths=[Death(0, Point("start", given + 1))])
    world = check(folder, FIRST[0], False, [others_die, giver_dies], replace=True)
    assert [len(generation) for generation in world.generations] == [3, 3, 3]


def test_a_vote_that_only_a_dead_rank_saw_come_back_counts(folder):
    """It had committed, and its ledger says so; the others had all prepared."""
    world = check(folder, FIRST[0], True, [vote_is_seen_by_rank_0_alone()], replace=False)
    assert [rank.number for rank in world.generations[1]] == [1, 2]


def test_what_else_must_hold_is_asked_in_every_generation_and_at_the_end(folder):
    asked = []
    world = World(folder, votes=True, invariant=lambda world: asked.append(world.generation))
    world.train([vote_is_seen_by_rank_0_alone()])
    assert asked == [1, 2, 2]


def vote_is_seen_by_rank_0_alone():
    point, vote = next((p, c) for p, c in places(FIRST[0], True) if p.what == "recorded")
    return Script(deaths=[Death(0, point)], lost={vote: frozenset({1, 2})})


@pytest.mark.parametrize(
    ("places", "step"),
    [
        ([(3, 4, 2), (3, 4, 2)], 4),  # all have prepared: one who is gone may have committed
        ([(4, -1, 2), (3, 4, 2)], 4),  # one has it
        ([(3, -1, 2), (3, 4, 2)], 3),  # one has not prepared, so nobody can have it
        ([(3, 4, 2), (-1, -1, -1)], 4),  # a newcomer was not asked
        ([(3, -1, 3), (3, 4, 2)], 3),  # who was in the newer generation knows
    ],
)
def test_from_where_a_generation_continues(places, step):
    table = [
        HeldCommit(0, at, ready, inside, at, told=False, ends=False) for at, ready, inside in places
    ]
    assert beginning(table).number == step


# ---- the tests above can fail


def _forgets_who_prepared(places):
    return beginning([place._replace(prepared=-1) for place in places])


def _one_who_prepared_is_enough(places):
    ready = max(place.prepared for place in places)
    return beginning([place._replace(prepared=ready) for place in places])


def _drops_what_is_in_doubt(engine, real=Engine.leave):
    engine._in_doubt = False
    real(engine)


def _moves_buffers_before_the_vote(buffers, *args, real=Buffers.exchange, **more):
    real(buffers, *args, **more)
    buffers.apply()


def _keeps_buffers_of_a_step_that_broke(buffers):
    buffers.forget()


def _lets_the_ledger_stand(*_, **__):
    pass


def _is_not_in_doubt(engine, staged, real=Engine._prepare):
    try:
        real(engine, staged)
    except PeerError:
        engine._in_doubt = False
        raise


MUTANTS = {
    "who prepared is forgotten": (committed, "beginning", _forgets_who_prepared),
    "one who prepared is enough": (committed, "beginning", _one_who_prepared_is_enough),
    "what is in doubt is dropped": (Engine, "leave", _drops_what_is_in_doubt),
    "a vote without an answer means no": (Engine, "_prepare", _is_not_in_doubt),
    "buffers move before the vote": (Buffers, "exchange", _moves_buffers_before_the_vote),
    "buffers of a broken step stay": (Buffers, "undo", _keeps_buffers_of_a_step_that_broke),
    "the ledger is not mended": (records, "mend", _lets_the_ledger_stand),
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_in_the_rule_is_found(folder, name):
    where, attribute, fault = MUTANTS[name]
    early = [case for case in CASES if "bucket_mb" in case[1]]  # send while a pass is under way
    case = early[-1] if "broken" in name else FIRST[0]
    some = [*breaks(case, True), vote_is_seen_by_rank_0_alone(), *list(deaths(case, True))[::3]]
    with (
        mock.patch.object(where, attribute, fault),
        pytest.raises((AssertionError, RecipeError, RunError)),
    ):
        check_all(folder, case, True, some, replace=True)


@pytest.mark.parametrize(
    ("name", "kind"), [("all_reduce", AllReduce), ("diloco", Coded), ("sign_vote", SignVote)]
)
def test_what_a_dead_rank_alone_had_and_nobody_takes_up_is_found(folder, name, kind):
    """The check can fail: a residual or a voter's momentum is lost."""
    case = next(case for case in FIRST if has_own(case[1]) and case[0] == name)
    some = list(deaths(case, False))[::40]  # the undisturbed run is kept: it has no fault
    with mock.patch.object(kind, "load_left"), pytest.raises(AssertionError):
        check_all(folder, case, False, some, replace=True)


@pytest.mark.parametrize("attribute", ["exchange", "load_state", "apply"])
def test_optimizers_of_participants_that_are_not_given_to_all_are_found(folder, attribute):
    case = next(case for case in FIRST if "local_optimizers" in case[1])
    some = list(deaths(case, False))[::40]
    with mock.patch.object(LocalStates, attribute), pytest.raises(AssertionError):
        check_all(folder, case, False, some, replace=True)


def _only_forgets(server):
    server._sums.abandon()
    server._forget()
    server._moved = False


@pytest.mark.parametrize(
    ("where", "attribute"), [(ServedUpdate, "load_states"), (ServerSync, "abandon")]
)
def test_a_server_that_does_not_go_back_or_takes_nothing_up_is_found(folder, where, attribute):
    """What it has moved for a step that did not happen stays; what lay in memory does not count."""
    case = next(case for case in FIRST if case[0] == "server_sync")
    fault = {"load_states": lambda *_: None, "abandon": _only_forgets}[attribute]
    some = list(deaths(case, False))[::9]
    with mock.patch.object(where, attribute, fault), pytest.raises(AssertionError):
        check_all(folder, case, False, some, replace=True)
