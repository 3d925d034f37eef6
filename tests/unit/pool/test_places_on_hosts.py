"""Places on the hosts of a pool: gangs, drains, hosts out of reach; and the machines' own end."""

import json
import signal
import socket
import sys

import pytest
from msgspec.structs import replace

from instep import detached
from instep.cli import main
from instep.errors import RunError, SpecError
from instep.job.file import build
from instep.launch.pooled.launcher import Placed, PoolLauncher
from instep.pool.decide import decide
from instep.pool.flow_submit import submit_flow
from instep.pool.hosts.attending import Attendance
from instep.pool.hosts.placement import BACK_S, BEGIN_S
from instep.pool.jobs import (
    ClientEnded,
    DrainAsked,
    HostAway,
    HostSeen,
    HostSpec,
    JobSubmitted,
    PlacesTold,
    PoolHost,
    PoolJob,
    PoolSpec,
    PoolState,
    RunSeen,
    TimePassed,
)
from instep.pool.local_runs import LocalRuns
from instep.pool.pool_file import PoolFolder, pool_of
from instep.pool.pool_journal import PoolJournal
from instep.pool.scheduler import REFUSED, JobSight, PoolScheduler
from instep.pool.submit import submit
from instep.pool.view import (
    as_tables,
    explanation,
    host_lines,
    job_lines,
    pool_lines,
    status_table,
)
from made_up_searches import make_pool
from simulation.hosted import hosted_story


def job(name, least=1, most=8, **more):
    return PoolJob(id=name, share="a", at_least=least, at_most=most, **more)


def pool(**cores):
    hosts = {name: PoolHost(cores=number) for name, number in cores.items()}
    return PoolState(cores=sum(cores.values()), hosts=hosts)


def after(state, *events, now=1.0):
    for number, event in enumerate(events):
        state = decide(state, event, now + number)
    return state


def places(state):
    return {each.id: dict(each.places) for each in state.jobs.values()}


def told(state, now):
    """Runs that confirm their places, and whose processes have come and gone."""
    for each in state.jobs.values():
        state = decide(state, PlacesTold(each.id, each.places), now)
    for name in state.hosts:
        here = {each.id: each.places[name] for each in state.jobs.values() if name in each.places}
        state = decide(state, HostSeen(name, here), now)
    return state


def test_in_every_story_no_host_has_more_than_its_places_and_all_jobs_end():
    seen = [hosted_story(seed) for seed in range(110)]
    assert sum(each["kills"] for each in seen) > 100
    assert sum(each["losses"] for each in seen) > 10
    assert sum(each["moves"] for each in seen) > 20


@pytest.mark.slow
def test_ten_thousand_stories_over_hosts_hold():
    for seed in range(10_000):
        hosted_story(seed)


def test_a_gang_has_all_its_places_or_none_and_fills_few_hosts():
    state = after(pool(a=2, b=3, c=2), JobSubmitted(job("one", least=3, most=3)))
    assert places(state) == {"one": {"b": 3}}
    state = after(state, JobSubmitted(job("two", least=3, most=3)), now=5)
    assert places(state)["two"] == {"a": 2, "c": 1}
    state = after(state, JobSubmitted(job("three", least=2, most=2)), now=6)
    assert places(state)["three"] == {}, "half a gang"
    state = after(state, ClientEnded("one", "completed"), now=7)
    assert len(places(state)["three"]) == 1


def test_a_place_is_free_once_the_run_knows_it_and_the_host_has_no_process_there():
    state = told(after(pool(a=2), JobSubmitted(job("old", most=2))), now=2)
    state = after(state, JobSubmitted(job("new", most=1)), now=10)
    assert places(state) == {"old": {"a": 1}, "new": {}}
    early = after(state, HostSeen("a", {"old": 1}), now=11)
    assert places(early)["new"] == {}, "the run may start another"
    state = after(state, PlacesTold("old", {"a": 1}), now=11)
    assert places(state)["new"] == {}, "its process has not ended"
    assert places(after(state, HostSeen("a", {"old": 1}), now=12))["new"] == {"a": 1}


def test_a_host_that_drains_gives_its_workers_to_others_and_then_has_none():
    state = told(after(pool(a=2, b=2), JobSubmitted(job("net", least=2, most=2))), now=2)
    assert places(state) == {"net": {"a": 2}}
    state = after(state, DrainAsked("a"), now=3)
    assert places(state) == {"net": {"b": 2}}
    assert state.held == 4
    assert host_lines(state)[0] == "host    a: 2 of 2 cores busy (net 2), draining"
    state = told(state, now=4)
    assert host_lines(state)[0] == "host    a: 0 of 2 cores busy, drained"
    state = after(state, DrainAsked("b"), now=5)
    assert state.jobs["net"].status == "stopping", "there is no room for two anywhere"
    state = after(state, DrainAsked("a", drained=False), ClientEnded("net", ""), now=6)
    assert places(state)["net"] == {}, "it has processes on b"
    assert places(after(state, HostSeen("b", {}), now=9))["net"] == {"a": 2}


def test_what_a_host_out_of_reach_had_stays_there_and_nothing_else_comes():
    state = told(after(pool(a=2, b=2), JobSubmitted(job("net", least=2, most=2))), now=2)
    hosts = {**state.hosts, "a": replace(state.hosts["a"], cores=4)}  # with room for two more
    state = after(replace(state, hosts=hosts), HostAway("a"), now=3)
    state = after(state, JobSubmitted(job("new", least=2, most=3)), now=4)
    assert places(state) == {"net": {"a": 2}, "new": {"b": 2}}
    state = after(state, TimePassed(), now=3 + 10 * BACK_S)
    assert places(state) == {"net": {"a": 2}, "new": {"b": 2}}
    assert "out of reach since" in host_lines(state)[0]
    ended = after(state, ClientEnded("net", "completed"), now=200)
    assert ended.held == 4, "its processes may be there"
    later = after(replace(ended, jobs={"net": ended.jobs["net"]}), TimePassed(), now=4000)
    assert later.used["a"] < ended.used["a"], "nobody uses what is out of reach"
    assert after(ended, HostSeen("a", {}), now=201).held < 4


def test_a_run_that_has_lost_a_host_goes_on_and_gets_places_elsewhere():
    state = told(after(pool(a=2, b=1, c=1), JobSubmitted(job("net", most=3))), now=2)
    assert places(state) == {"net": {"a": 2, "b": 1}}
    lost = RunSeen("net", 2, lost=("b", "c"))
    state = after(state, HostAway("b"), lost, now=3)
    assert places(state) == {"net": {"a": 2, "b": 1}}, "it may be back in a moment"
    state = after(state, lost, now=4 + BACK_S)
    assert places(state) == {"net": {"a": 2, "c": 1}}
    alone = after(pool(a=1), JobSubmitted(job("one")), HostAway("a"))
    alone = after(alone, RunSeen("one", 0, lost=("a",)), now=100)
    assert places(alone) == {"one": {"a": 1}}, "nobody else has its state"


def test_a_run_that_cannot_be_resized_keeps_the_places_of_a_host_that_it_has_lost():
    class Fixed:
        """The hands of a run on GPUs."""

        def look(self, each):
            return JobSight(True, 1, lost=("b",))

        def scale(self, each):
            return REFUSED

    class Entries(list):
        def write(self, event, before, after):
            self.append(event)

    state = after(pool(a=1, b=1), JobSubmitted(job("net", most=2)), HostAway("b"))
    scheduler = PoolScheduler(state, entries := Entries(), Fixed())
    scheduler._known.add("net")
    for number in range(40):
        scheduler.turn([], 100 + number / 10)
    assert scheduler.state.jobs["net"].fixed
    assert places(scheduler.state) == {"net": {"a": 1, "b": 1}}
    assert len(entries) < 6, "it was refused again and again"


def test_what_a_host_out_of_reach_has_is_not_in_the_forecast_of_a_table(tmp_path):
    state = after(pool(a=1, b=1), JobSubmitted(job("net", most=1, left_s=50.0)), HostAway("b"))
    state = after(state, JobSubmitted(job("next", most=1, left_s=5.0)), now=100)
    (_, table) = as_tables(state, 101.0)
    assert table["starts_at"] > 110.0
    (_, host) = status_table(state, True)["hosts"]
    assert (host["out_of_reach_since"], host["workers"]) == (2.0, {})


def test_a_pool_of_which_no_host_is_in_reach_is_shown():
    state = after(pool(a=1), HostAway("a"), JobSubmitted(job("one")))
    state = after(state, TimePassed(), now=100)
    assert places(state) == {"one": {}}
    assert "the hosts in reach have 0 cores" in "".join(job_lines(state, 101.0))
    assert pool_lines(state, True)[0].startswith("pool    0 of 1 cores busy")


def test_a_gang_that_does_not_begin_gives_all_back():
    state = after(pool(a=1, b=1), JobSubmitted(job("net", least=2, most=2)), HostAway("b"))
    never = RunSeen("net", 1, lost=("b",), begun=False)
    state = after(state, never, now=4 + BACK_S)
    assert (state.jobs["net"].status, places(state)["net"]) == ("stopping", {})
    late = after(pool(a=1), JobSubmitted(job("slow")))
    for number in range(1, 5):
        late = after(late, RunSeen("slow", 0, begun=False), now=number * 2 * BEGIN_S)
        late = after(late, ClientEnded("slow", ""), HostSeen("a", {}), now=number * 2 * BEGIN_S)
    assert late.jobs["slow"].outcome == "failed"


def test_memory_is_a_place_too():
    state = pool(a=4, b=4)
    hosts = {name: replace(host, memory=10) for name, host in state.hosts.items()}
    state = after(replace(state, hosts=hosts), JobSubmitted(job("big", most=8, memory=4)))
    assert places(state) == {"big": {"a": 2, "b": 2}}
    state = after(state, JobSubmitted(job("more", memory=4)), now=2)
    assert places(state)["more"] == {}
    small = after(state, JobSubmitted(job("small", most=4, memory=1)), now=3)
    assert sum(places(small)["small"].values()) > 0


def test_the_journal_keeps_what_hosts_are_and_the_file_says_how_large(tmp_path):
    state = after(pool(a=2), JobSubmitted(job("net", most=2)), DrainAsked("a"), HostAway("a"))
    journal = PoolJournal(tmp_path, write=True)
    journal.write(TimePassed(), pool(a=2), state)
    again = journal.load(pool(a=3, new=1))
    journal.close()
    assert again.hosts["a"] == replace(state.hosts["a"], cores=3)
    assert again.hosts["new"] == PoolHost(cores=1)
    assert again.jobs == state.jobs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[hosts.a]\ncores = 1", "hosts and listen belong together"),
        ('listen = "h:1"', "hosts and listen belong together"),
        ('listen = "h"\n[hosts.a]\ncores = 1', "listen: 'h' is no machine with a port"),
        ('listen = "0.0.0.0:1"\n[hosts.a]\ncores = 1', "means every address"),
        ('listen = "h:1"\n[hosts.a]\ncores = 0', "hosts.a.cores needs to be at least 1"),
        ('listen = "h:1"\n[hosts.a]\ncores = 1\nmemory = "much"', "'much' is no size in bytes"),
        ('listen = "h:1"\ncores = 2\n[hosts.a]\ncores = 1', "is for a pool without hosts"),
        ('listen = "h:1"\n[hosts."a/b"]\ncores = 1', "a name has letters, digits"),
        ('listen = "h:1"\n[hosts."a\\n"]\ncores = 1', "a name has letters, digits"),
        ('listen = "h:1"\n[hosts.a]\ncores = 1\nstart = "ssh \'a"', "is no command"),
        ('listen = "h:1"\n[hosts.a]\ncores = 1\nstart = " "', "is no command"),
        ('listen = "h:1"\n[hosts.a]\ncores = 1\nstart = "a\\u0000"', "is no command"),
    ],
)
def test_a_file_whose_hosts_cannot_join_is_refused(tmp_path, text, said):
    (tmp_path / "pool.toml").write_text(text)
    with pytest.raises(SpecError, match=said):
        pool_of(tmp_path / "pool.toml")


def test_hosts_keep_their_numbers_and_jobs_that_hosts_cannot_run_are_refused(tmp_path):
    folder = PoolFolder(tmp_path / "pool")
    hosts = {name: HostSpec(cores=2, memory="8GB") for name in ("a", "b")}
    folder.make(PoolSpec(listen="h:1", hosts=hosts))
    with pytest.raises(RunError, match="new ones are named after these"):
        folder.make(PoolSpec(listen="h:1", hosts={"b": hosts["b"]}))
    folder.make(PoolSpec(listen="h:1", hosts={**hosts, "c": hosts["a"]}))
    (tmp_path / "recipe.py").touch()
    (tmp_path / "job.toml").write_text('recipe = "recipe.py:recipe"\n')
    with pytest.raises(SpecError, match="the hosts have room for 0 workers with so much memory"):
        submit(folder, tmp_path / "job.toml", memory=9_000_000_000)
    (tmp_path / "search.toml").write_text(
        'recipe = "recipe.py:recipe"\n[search]\ntrials = 2\nmetric = "loss"\n'
        "[search.space]\nseed = [1, 2]\n"
    )
    with pytest.raises(SpecError, match="a search runs on one machine"):
        submit(folder, tmp_path / "search.toml")
    name = submit(folder, tmp_path / "job.toml", at_least=5, memory=1_000_000_000)[0]
    wanted = JobSubmitted(folder.state().jobs[name])
    state = after(folder.empty, DrainAsked("c"), wanted)
    assert "the hosts in reach have 4 cores" in "".join(explanation(state, wanted.job, 9.0))


def test_a_pool_with_jobs_of_one_machine_gets_no_hosts_and_says_where_nothing_can_listen(
    tmp_path, capsys
):
    pool = make_pool(tmp_path / "pool")
    with pytest.raises(RunError, match="was given busy, late for this machine alone"):
        PoolFolder(pool).make(PoolSpec(listen="h:1", hosts={"a": HostSpec(cores=1)}))
    for words in (["--json", "status"], ["status", "--json"]):
        assert main(["pool", "--pool", str(pool), *words]) == 0
        table = json.loads(capsys.readouterr().out)
        assert (table["cores"], table["hosts"], len(table["jobs"])) == (4, [], 3)
    hosted = PoolFolder(tmp_path / "hosted")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        hosted.make(PoolSpec(listen=listen, hosts={"a": HostSpec(cores=1)}))
        PoolJournal(hosted.folder, write=True).close()  # it was there before
        assert main(["pool", "--pool", str(hosted.folder), "start"]) == 2
    assert "nothing can listen there" in capsys.readouterr().err


def test_a_run_of_a_pool_that_somebody_else_resumes_is_refused_and_waits_for_no_host(tmp_path):
    Placed(["a"], [1]).write(tmp_path / "net.places")
    (tmp_path / "net.gate").write_text("127.0.0.1:1")  # of the client that has ended
    files = {"certificates": "certificates", "placed": "net.places", "gate": "net.gate"}
    options = {key: str(tmp_path / name) for key, name in files.items()}
    launch = {"on": "pool", "address": "127.0.0.1", "options": options}
    job_file = build({"recipe": "a.py:a", "network": "private", "launch": launch}, source="a test")
    with pytest.raises(SpecError, match="only its scheduler starts it there"):
        PoolLauncher.of(job_file)


SLEEPS = "import sys, time; time.sleep(600)"


class Commands:
    """Starts a program that sleeps instead of each command."""

    def __init__(self):
        self.words, self.started = [], []

    def start(self, words, lock, log):
        self.words.append(words)
        process = detached.start_program([sys.executable, "-c", SLEEPS], lock, log)
        self.started.append(process)

    def look(self):
        pass

    def close(self):
        pass


def test_a_machine_without_room_for_its_folder_stays(tmp_path):
    made = Attendance(tmp_path / "gone" / "host-0.token", Commands)
    made.want({"net": "h:1"})
    assert made.turn() == {}
    assert not made._commands.started


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_machine_that_a_scheduler_signals_will_soon_be_gone(tmp_path, number):
    made, before = Attendance(tmp_path / "host-0.token", Commands), {}
    for each in (signal.SIGUSR1, signal.SIGUSR2):
        before[each] = signal.getsignal(each)
    try:
        made.listen()
        assert not made.leaving
        signal.raise_signal(number)
        assert made.leaving
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_machine_is_a_host_of_the_runs_that_are_wanted_also_after_it_was_killed(tmp_path):
    commands = Commands()

    def machine():
        made = Attendance(tmp_path / "host-0.token", lambda: commands)
        made.want({"net": "h:1", "../evil": "h:1"})
        return made

    first = machine()
    first.turn()
    ((*words, gate, _, token, _, _),) = commands.words
    assert (words, gate) == (["host", "--join"], "h:1")
    assert token == str(tmp_path / "host-0.token")
    lock = tmp_path / "host-0.token.runs" / "net.lock"
    while (pid := detached.pid_of(lock)) is None:
        pass
    second = machine()  # the first was killed
    second.turn()
    assert len(commands.words) == 1, "started twice"
    second.want({"net": "h:2"})  # its client was started again, and listens elsewhere
    while detached.pid_of(lock) in (pid, None):
        second._counted = 0.0
        second.turn()
    assert commands.words[1][2] == "h:2"
    second.want({})
    while lock.exists():
        second._counted = 0.0
        second.turn()
    for process in commands.started:
        process.wait()


def with_machine(**cores):
    """A pool of which the first host is the machine of the scheduler."""
    state = pool(**cores)
    first = next(iter(cores))
    return replace(state, hosts={**state.hosts, first: replace(state.hosts[first], local=True)})


def test_what_runs_on_one_machine_has_places_on_that_of_the_scheduler_until_it_has_ended():
    search = job("search", most=4, kind="search", local=True)
    state = after(with_machine(here=2, far=4), JobSubmitted(search))
    assert places(state) == {"search": {"here": 2}}
    state = after(state, PlacesTold("search", {"here": 2}), JobSubmitted(job("net")), now=5)
    assert places(state)["net"] == {"far": 4}, "no core is kept for what can use none of it"
    step = job("step", most=1, kind="command", local=True, command=("true",))
    state = after(state, RunSeen("search", 2), JobSubmitted(step), now=10)
    assert places(state) == {"search": {"here": 1}, "net": {"far": 4}, "step": {}}
    state = after(state, PlacesTold("search", {"here": 1}), RunSeen("search", 2), now=20)
    assert places(state)["step"] == {}, "a process of the search has not ended"
    state = after(state, RunSeen("search", 1), now=30)
    assert places(state) == {"search": {"here": 1}, "net": {"far": 4}, "step": {"here": 1}}
    state = after(state, HostAway("here"), TimePassed(), now=90)
    assert places(state)["search"] == {"here": 1}, "its processes need no agent"
    state = after(state, HostSeen("here", {}), DrainAsked("here"), now=100)
    assert (state.jobs["search"].status, state.jobs["step"].status) == ("stopping", "running")
    state = after(state, ClientEnded("search", "", step=3), now=110)
    assert places(state) == {"search": {}, "net": {"far": 4}, "step": {"here": 1}}
    said = "".join(explanation(state, state.jobs["search"], 111.0))
    assert "it runs on the scheduler's machine, which gives 0 cores now" in said


def test_a_search_a_mesh_and_a_command_need_the_machine_of_the_scheduler(tmp_path):
    far = {"far": HostSpec(cores=4, start="ssh far")}
    (tmp_path / "recipe.py").touch()
    head = 'recipe = "recipe.py:recipe"\n'
    search = '[search]\ntrials = 6\nmetric = "loss"\nwidth = 6\n[search.space]\nseed = [1, 2, 3]\n'
    (tmp_path / "search.toml").write_text(head + search)
    (tmp_path / "mesh.toml").write_text(f"{head}[mesh]\ntensor = 2\n")
    (tmp_path / "flow.toml").write_text('[job.echo]\ncommand = ["echo", "hello"]\n')
    without = PoolFolder(tmp_path / "without")
    without.make(PoolSpec(listen="h:1", hosts=far))
    for name, what in (("search", "a search"), ("mesh", "a mesh of 2 ranks")):
        with pytest.raises(SpecError, match=f"{what} runs on one machine there, that of the sch"):
            submit(without, tmp_path / f"{name}.toml")
    with pytest.raises(SpecError, match=r"a command runs on one machine there.*start = 'env'"):
        submit_flow(without, tmp_path / "flow.toml")
    found = PoolFolder(tmp_path / "pool")
    here = HostSpec(cores=3, memory="4GB", start="env A=1")
    found.make(PoolSpec(listen="h:1", hosts={**far, "here": here}))
    names = [submit(found, tmp_path / f"{name}.toml", at_most=6)[0] for name in ("search", "mesh")]
    names += submit_flow(found, tmp_path / "flow.toml").jobs
    jobs = found.state().jobs
    assert [(jobs[name].local, jobs[name].at_most) for name in names] == [
        (True, 3),
        (True, 2),
        (True, 1),
    ]
    with pytest.raises(SpecError, match="the hosts have room for 0 workers"):
        submit(found, tmp_path / "search.toml", memory=5_000_000_000)
    with pytest.raises(SpecError, match=r"a mesh of 4 ranks .* which gives 3 cores"):
        submit(found, tmp_path / "mesh.toml", ["mesh.tensor=4", "workers=4"])


def test_a_run_on_the_machine_of_the_scheduler_is_an_ordinary_one(tmp_path):
    started = []
    hands = LocalRuns(
        tmp_path, tmp_path / "runs", lambda words, *_: started.append(words), ["here", "far"], "h"
    )
    wanted = job("net", local=True, unit=2, target=2, places={"here": 2})
    hands.start(wanted)
    (words,) = started
    assert words[-3:] == ["--workers", "2", "--json"]
    assert not (tmp_path / "net.places").exists()
