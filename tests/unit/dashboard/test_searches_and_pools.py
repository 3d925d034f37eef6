"""The pages of a search and of a pool say what the commands say, and no link leads out of them."""

import json
import os
from pathlib import Path

import pytest

from instep.cli import main
from instep.dashboard.listing import RunList
from instep.dashboard.pools import pool_sections
from instep.dashboard.watch import Feeds, WatchedList, WatchedPool, WatchedSearch
from instep.errors import RunError
from instep.pool.decide import decide
from instep.pool.jobs import (
    DrainAsked,
    HostAway,
    HostSeen,
    HostSpec,
    JobSubmitted,
    PlacesTold,
    PoolJob,
    PoolSpec,
)
from instep.pool.pool_file import PoolFolder
from instep.pool.pool_journal import PoolJournal
from instep.pool.view import explanation
from instep.search.begin import found_in
from instep.search.record import SearchRecord
from instep.search.results import Result
from instep.store.folder import held
from made_up_runs import make_run
from made_up_searches import TOLD, make_pool, make_search


@pytest.fixture
def runs(tmp_path):
    (make_run(tmp_path / "runs" / "one") / "run.id").write_text("one")
    make_search(tmp_path / "runs" / "net-search")
    return RunList(tmp_path / "runs")


def test_a_search_is_shown_with_the_figures_of_its_command(runs):
    watched = WatchedSearch(runs, "net-search")
    shown = watched.look().sections
    known = found_in(runs.folder / "net-search").as_table()
    assert {key: shown["search"][key] for key in ("metric", "of", "best")} == {
        key: known[key] for key in ("metric", "of", "best")
    }
    over = [each for each in shown["trials"] if each["state"] not in ("running", "waiting")]
    for mine, theirs in zip(over, known["trials"], strict=True):
        assert {key: mine[key] for key in theirs} == theirs
    assert [each["state"] for each in shown["trials"][5:]] == ["waiting"]
    assert shown["top"] == ["net-search/trial-002", "net-search/trial-004", "net-search/trial-000"]
    assert "at validation 1 with 0.3000, the bound was 0.3500" in shown["trials"][1]["pruned"]
    assert (
        "5 of 8 trials have their result: 3 completed, 1 pruned, 1 failed."
        in (shown["verdict"]["text"])
    )
    assert shown["next"][0] == f"instep search {runs.folder / 'net-search'}"
    assert watched.look() is None


def test_a_search_is_shown_as_it_goes_on(runs):
    watched, folder = WatchedSearch(runs, "net-search"), runs.folder / "net-search"
    watched.look()
    path = make_run(folder / "trial-005", steps=20, outcome=None)
    (path / "run.id").write_text("trial-005")
    with held(path):
        row = watched.look().sections["trials"][5]
        assert (row["state"], row["steps"]) == ("running", 20)
    with SearchRecord(folder, write=True) as record:
        record.tell(5, Result("completed", 0.95, (), 48, 2.0, "99"))
    seen = watched.look().sections
    assert seen["search"]["best_trial"] == "trial-005"
    assert "6 of 8" in seen["verdict"]["text"]


def test_the_list_has_searches_and_their_trials_can_be_opened(runs):
    sections = WatchedList(runs).look().sections
    row = {"name": "net-search", "metric": "accuracy", "told": 5, "of": 8, "best": 0.9}
    assert sections["searches"] == [{**row, "running": False}]
    assert "row one" in sections
    assert "row net-search" not in sections
    trial = runs.folder / "net-search" / "trial-002"
    assert runs.path_of("net-search/trial-002") == trial
    inner = RunList(runs.folder / "net-search")
    assert inner.path_of("trial-002") == trial
    assert inner.path_of("net-search/trial-002") == trial
    assert len(inner.rows()) == len(TOLD)


@pytest.mark.parametrize(
    "name",
    [
        "away",
        "away/trial-000",
        "one/logs",
        "net-search/../one",
        "../net-search",
        "",
        ".",
        300 * "a",
    ],
)
def test_no_search_and_no_trial_is_opened_that_a_link_or_a_path_upwards_leads_to(
    runs, tmp_path, name
):
    make_search(tmp_path / "elsewhere")
    (runs.folder / "away").symlink_to(tmp_path / "elsewhere")
    (runs.folder / "net-search" / "trial-007").symlink_to(runs.folder / "one")
    feeds = Feeds(runs, None)
    for ask in (feeds.of_search, runs.path_of):
        with pytest.raises(RunError, match="there is no such"):
            ask(name)
    with pytest.raises(RunError, match="there is no such"):
        runs.path_of("net-search/trial-007")
    assert [each["name"] for each in runs.searches()] == ["net-search"]


def test_a_pool_is_shown_with_what_its_commands_say_of_each_job(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    folder = make_pool(tmp_path / "pool")
    runs = RunList(tmp_path / "runs")
    assert runs.pool == folder
    assert main(["list", "--pool", str(folder), "--json"]) == 0
    tables = {each["id"]: each for each in json.loads(capsys.readouterr().out)}
    watched = WatchedPool(folder)
    shown = watched.look().sections
    for row in json.loads(json.dumps(shown["jobs"])):
        same = tables[row["id"]].keys() - {"starts_at", "ends_at", "told"}  # of the moment
        assert {key: row[key] for key in same} == {key: tables[row["id"]][key] for key in same}
    assert [row["id"] for row in shown["jobs"]] == ["busy", "late", "done"]
    told = dict(shown["jobs"][1]["told"])
    assert told["waits"] == explanation(PoolFolder(folder).state(), _job(folder, "late"))[1][8:]
    shares = {each["share"]: each for each in shown["shares"]}
    assert (shares["alice"]["held"], shares["bob"]["held"]) == (4, 0)
    assert sum(each["due"] for each in shares.values()) == pytest.approx(1.0)
    assert "4 of 4 cores are busy. No scheduler" in shown["verdict"]["text"]
    assert watched.look() is None
    brief = WatchedList(runs).look().sections["pool"]
    assert (brief["held"], brief["cores"]) == (4, 4)


def test_the_hosts_of_a_pool_are_shown_with_what_is_said_of_them(tmp_path):
    pool = PoolFolder(tmp_path / "pool")
    hosts = {name: HostSpec(cores=2, memory="8GB") for name in ("one", "two", "three", "four")}
    pool.make(PoolSpec(listen="127.0.0.1:1", hosts=hosts))
    wanted = PoolJob(id="net", share="a", at_least=4, at_most=4, memory=2_000_000_000)
    events = [JobSubmitted(wanted), PlacesTold("net", {"one": 2, "two": 2})]
    events += [HostSeen("one", {"net": 2}), HostSeen("two", {"net": 2})]
    events += [DrainAsked("two"), DrainAsked("four"), HostAway("three"), HostAway("four")]
    journal, state = PoolJournal(pool.folder, write=True), pool.empty
    for number, event in enumerate(events):
        after = decide(state, event, 100.0 + number)
        journal.write(event, state, after)
        state = after
    journal.close()
    shown = json.loads(json.dumps(pool_sections(pool.folder)))["hosts"]
    assert [(each["host"], each["state"], each["out_of_reach_since"]) for each in shown] == [
        ("one", "in reach", None),
        ("two", "draining", None),
        ("three", "out of reach", 106.0),
        ("four", "drained, out of reach", 107.0),
    ]
    one = shown[0]
    assert (one["busy"], one["cores"], one["workers"]) == (2, 2, {"net": 2})
    assert (one["memory_used"], one["memory"]) == (4_000_000_000, 8_000_000_000)
    assert [each["busy"] for each in shown[1:]] == [2, 2, 0], "it moves"


def _job(folder, name):
    return PoolFolder(folder).state().jobs[name]


def test_a_pool_of_other_runs_or_behind_a_link_is_not_taken_for_that_of_these(tmp_path):
    (tmp_path / "runs").mkdir()
    make_pool(tmp_path / "pool", runs="others")
    assert RunList(tmp_path / "runs").pool is None
    os.rename(tmp_path / "pool", tmp_path / "real")
    make_pool(tmp_path / "there" / "pool", runs=str(tmp_path / "runs"))
    (tmp_path / "pool").symlink_to(tmp_path / "there" / "pool")
    assert RunList(tmp_path / "runs").pool is None
    given = tmp_path / "there" / "pool"
    assert RunList(tmp_path / "runs", given).pool == given
    with pytest.raises(RunError, match="there is no pool"):
        Feeds(RunList(tmp_path / "runs"), None).of_pool()


def test_what_cannot_be_read_is_said(runs, tmp_path, capsys):
    (runs.folder / "net-search" / "search.sqlite").write_bytes(b"no database" * 100)
    assert "cannot be used" in runs.searches()[0]["error"]
    with pytest.raises(RunError):
        pool_sections(tmp_path / "none")
    words = ["dashboard", str(runs.folder), "--pool", str(tmp_path / "none")]
    assert main(words) == RunError.exit_code
    assert "there is no pool in" in capsys.readouterr().err
    assert not Path(tmp_path / "none").exists()
