"""Every figure of the page is one that the command line, the summary or the report says too."""

import asyncio
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from instep import growing_file
from instep.cli import main
from instep.dashboard import early, listing, live, watch
from instep.dashboard.compared import compare
from instep.dashboard.curves import live_charts, plain, settled_charts
from instep.dashboard.listing import RunList
from instep.dashboard.live import LiveRun
from instep.dashboard.sections import _live_workers
from instep.dashboard.watch import Feed, WatchedList, WatchedRun
from instep.events import LEDGER, LEDGER_START, STEPS, read_events
from instep.report.figures.curves import charts
from instep.report.figures.summary import finite, summarise
from instep.report.terminal.status import Status, states_of
from instep.store.folder import held
from instep.store.run_folder import RunFolder
from made_up_runs import make_run, with_servers, write_events

FILES = {"events.jsonl": 1, "ledger.bin": LEDGER.itemsize, "steps.bin": STEPS.itemsize}


def of_report(found):
    return {c["title"]: [{**line, "run": 0} for line in c["lines"]] for c in found}


def shown_as_report(found):
    return {c["title"]: [{**line, "run": 0} for line in c["lines"]] for c in plain(found)}


def growing(source, target, parts, seed=0):
    """Copy the files of a run in pieces that end anywhere; yields after each."""
    draw = np.random.default_rng(seed)
    target.mkdir()
    for name in ("job.toml", "run.id"):
        shutil.copy(source / name, target / name)
    data = {name: (source / name).read_bytes() for name in FILES}
    cuts = {
        name: np.sort(np.append(draw.integers(0, len(d) + 1, parts), len(d)))
        for name, d in data.items()
    }
    for part in range(parts + 1):
        for name, bytes_ in data.items():
            (target / name).write_bytes(bytes_[: cuts[name][part]])
            begin = cuts[name][part - 1] if part else 0
            with open(target / name, "r+b") as file:  # appended to, as its writer does
                file.seek(begin)
                file.write(bytes_[begin : cuts[name][part]])
        yield part


@pytest.fixture
def run(tmp_path):
    path = make_run(tmp_path / "runs" / "digits", workers=3)
    (path / "run.id").write_text("it")
    return path


def test_a_run_that_is_read_as_it_grows_has_the_figures_and_the_curves_of_the_whole(run, tmp_path):
    pieces = growing(run, tmp_path / "copy", 12)
    next(pieces)
    live = LiveRun(tmp_path / "copy", clock=lambda: 0.0)
    live.look()
    for _ in pieces:
        live.look()
    assert not live.look()
    folder = RunFolder(run)
    status, known = live.status("completed"), Status(run).as_table()
    rates = {"samples_per_s": pytest.approx(known["samples_per_s"], rel=0.2)}
    assert {**status, "run": ""} == {**known, "run": "", **rates}
    assert live.times.seconds == pytest.approx(folder.times.seconds)
    assert live.ledger.samples == folder.audit.used
    assert (live.ledger.wrong, live.ledger.checked) == (0, folder.last_step)
    mine = shown_as_report(live_charts(live))
    theirs = of_report(charts([folder]))
    assert mine.keys() == theirs.keys()
    for title in mine.keys() - {"samples per second"}:  # whose parts are other ones until the end
        assert mine[title] == theirs[title]


def test_a_run_that_has_ended_is_shown_with_the_figures_of_status_summary_and_report(run, capsys):
    (run / "summary.json").write_text(json.dumps(summarise(RunFolder(run))))
    seen = WatchedRun(run).look()
    assert main(["status", str(run), "--json"]) == 0
    assert finite(seen.sections["status"]) == json.loads(capsys.readouterr().out)
    assert seen.sections["summary"] == json.loads((run / "summary.json").read_text())
    assert shown_as_report(seen.charts) == of_report(charts([RunFolder(run)]))
    assert "each exactly once per epoch" in seen.sections["verdict"]["text"]
    assert seen.sections["verdict"]["mark"] == "good"
    assert [row["name"] for row in seen.sections["workers"]] == ["0", "1", "2"]
    assert sum(row["share"] for row in seen.sections["workers"]) == pytest.approx(1.0)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_long_run_that_has_ended_has_the_same_figures_and_is_not_read_at_once(
    run, monkeypatch, resumed
):
    if resumed:
        events, steps = (
            list(read_events(run / "events.jsonl")),
            np.fromfile(run / "steps.bin", STEPS),
        )
        later_s = events[-1]["time"] + 5.0 - events[0]["time"]
        second = [{**e, "time": e["time"] + later_s} for e in events if e.get("step", 99) > 20]
        second[0] = {**second[0], "resumed_step": 20}
        write_events(run, [*events, *second])
        again = steps[steps["step"] > 20].copy()
        again["begin"] += later_s
        np.concatenate([steps, again]).tofile(run / "steps.bin")
    (run / "summary.json").write_text(json.dumps(summarise(RunFolder(run))))
    settled = WatchedRun(run).look().sections
    monkeypatch.setattr(watch, "SETTLED_BYTES", 0)
    monkeypatch.setattr(live, "_LEDGER_S", 0.0)
    watched, seen = WatchedRun(run), None
    while (looked := watched.look()) is not None:
        seen = looked.sections
    for name in ("verdict", "summary", "next", "logs"):
        assert seen[name] == settled[name], name
    assert seen["audit"]["text"] == settled["audit"]["text"]
    for mine, theirs in zip(seen["workers"], settled["workers"], strict=True):
        figures = {key: mine.pop(key) for key in ("share", "rate", "wait")}
        assert figures == pytest.approx({key: theirs.pop(key) for key in figures})
        assert mine.pop("parts") == pytest.approx(theirs.pop("parts"), abs=2e-4)
        assert mine == theirs


def test_while_a_run_trains_the_page_says_what_status_says(run, capsys):
    events = [e for e in read_events(run / "events.jsonl") if e["event"] != "run_finished"]
    write_events(run, events)
    watched = WatchedRun(run)
    with held(run):
        seen = watched.look()
        assert main(["status", str(run), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        quiet = {name: text.split()[0] for name, text in told.pop("workers").items()}
        shown = dict(seen.sections["status"])
        mine = {name: text.split()[0] for name, text in shown.pop("workers").items()}
        assert (mine, finite(shown)) == (quiet, told)
        assert seen.sections["verdict"]["mark"] == "live"
        assert seen.sections["audit"]["exact"] is True
        assert watched.look() is None
    at_once, whole = watched.look().sections, watched.look().sections
    assert (at_once["summary"], whole["summary"]["outcome"]) == (None, "unfinished")
    for sections in (at_once, whole):
        assert sections["status"]["state"] == "unfinished"
        assert sections["verdict"]["text"].startswith("Cut short after")
    assert watched.look() is None


def test_a_ledger_that_took_other_samples_is_said_while_the_run_trains(run):
    records = np.frombuffer((run / "ledger.bin").read_bytes()[LEDGER_START:], LEDGER).copy()
    records["first"][30] += 1
    (run / "ledger.bin").write_bytes(
        (run / "ledger.bin").read_bytes()[:LEDGER_START] + records.tobytes()
    )
    live = LiveRun(run)
    live.look()
    assert live.ledger.as_table()["exact"] is False
    assert live.ledger.wrong == 1


def test_of_a_long_run_some_steps_are_shown_first_and_then_all_of_them(tmp_path, monkeypatch):
    long = make_run(tmp_path / "long", workers=3, epochs=120)
    (long / "run.id").write_text("it")
    data = (long / "steps.bin").read_bytes()
    later = 30 * STEPS.itemsize
    (long / "steps.bin").write_bytes(data[:-later])
    for name, value in {"LONG": 500, "PLACES": 16, "AT_EACH": 6, "AT_THE_END": 90}.items():
        monkeypatch.setattr(early, name, value)
    monkeypatch.setattr(early, "READ_S", 0.0)
    monkeypatch.setattr(growing_file, "MOST_BYTES", 700 * STEPS.itemsize)
    live = LiveRun(long, clock=lambda: 0.0)
    live.look()
    first = {c["title"]: c["lines"] for c in plain(live_charts(live))}
    assert live.share_read < 1.0
    assert first["loss"][0]["step"][-1] == 1910
    assert len(first["loss"][0]["step"]) < 60
    with open(long / "steps.bin", "ab") as file:
        file.write(data[-later:])
    looks = 0
    while live.share_read < 1.0:
        assert live.look()
        looks += 1
    assert looks > 3
    monkeypatch.setattr(early, "LONG", 1 << 30)
    whole = LiveRun(long, clock=lambda: 0.0)
    whole.look()
    assert shown_as_report(live_charts(live)) == shown_as_report(live_charts(whole))
    theirs = {**whole.status("completed"), "samples_per_s": pytest.approx(3125, rel=0.3)}
    assert live.status("completed") == theirs
    (long / "steps.bin").write_bytes(data[: 600 * STEPS.itemsize])  # written anew, while it is read
    assert live.look()
    assert shown_as_report(live_charts(live))["loss"][0]["step"][-1] == 200


def test_a_run_that_goes_back_or_is_written_anew_is_read_again(run):
    events = list(read_events(run / "events.jsonl"))
    live = LiveRun(run)
    live.look()
    again = {**events[0], "time": events[-1]["time"] + 5.0, "resumed_step": 20}
    write_events(run, [*events, again])
    assert live.look()
    step = shown_as_report(live_charts(live))["loss"][0]["step"]
    assert (step[0], step[-1]) == (1, 20)
    shorter = make_run(run.with_name("other"), steps=7)
    os.replace(shorter / "steps.bin", run / "steps.bin")
    assert live.look()
    assert shown_as_report(live_charts(live))["loss"][0]["step"] == list(range(1, 8))


@pytest.mark.parametrize("at_once", [1 << 24, -1])
def test_the_list_has_what_the_command_says_of_each_run(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(listing, "_READ_AT_ONCE", at_once)
    make_run(tmp_path / "whole")
    make_run(tmp_path / "cut", steps=20, outcome=None)
    make_run(tmp_path / "failed", steps=9, outcome="failed")
    make_run(tmp_path / "none", steps=0, outcome="interrupted", metrics=False)
    with_servers(make_run(tmp_path / "served", workers=3), 2)
    resumed = make_run(tmp_path / "resumed")
    events = list(read_events(resumed / "events.jsonl"))
    write_events(resumed, [*events, {**events[0], "time": events[-1]["time"] + 9.0}])
    for each in tmp_path.iterdir():
        (each / "run.id").write_text(each.name)
    runs = RunList(tmp_path)
    rows = runs.rows()
    known = {state.name: state.as_table() for state in states_of(tmp_path)[0]}
    assert rows.keys() == known.keys()
    for name, table in known.items():
        table.pop("best")
        mine = {key: rows[name][key] for key in table}
        assert mine == {**table, "seconds": pytest.approx(table["seconds"])}
    assert rows["whole"]["best"]["accuracy"]["most"] == [pytest.approx(1 - 0.4 / 3), 48]
    assert all(runs.rows()[name] is row for name, row in rows.items())
    with held(tmp_path / "cut"):
        assert runs.rows()["cut"]["state"] == "running"


@pytest.mark.parametrize("fault", ["half of a pair", "pipe", "deep"])
def test_what_a_run_has_in_place_of_its_summary_hides_no_other(tmp_path, fault):
    for name in ("odd", "plain"):
        (make_run(tmp_path / name) / "run.id").write_text(name)
    file = tmp_path / "odd" / "summary.json"
    if fault == "pipe":
        os.mkfifo(file)
    else:
        rate = '"\\ud800"' if fault == "half of a pair" else "[" * 50_000
        file.write_text(f'{{"samples_per_second": {rate}}}')

    async def first():
        with ThreadPoolExecutor(1) as executor:
            messages = Feed(WatchedList(RunList(tmp_path)), executor).messages()
            frames = [await anext(messages), await anext(messages)]
            await messages.aclose()
            return json.loads(frames[1].removeprefix(b"data: "))["sections"]

    rows = asyncio.run(first())
    assert rows["row plain"]["state"] == "completed"
    assert ("error" in rows["row odd"]) == (fault == "pipe")


def test_the_best_of_a_list_is_none_of_the_validations_that_were_discarded(run):
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    events.append({"time": events[-1]["time"] + 1, "event": "run_started", "resumed_step": 0})
    write_events(run, events)
    row = RunList(run.parent).rows()["digits"]
    assert (row["best"], Status(run).as_table()["validation"]) == ({}, None)


def test_a_run_that_was_resumed_with_fewer_workers_is_shown_with_all_that_they_did(run):
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    at = events[-1]["time"] + 60
    again = [{"event": "run_started", "resumed_step": 48}]
    again += [{"event": "generation_started", "generation": 2, "members": [0, 1], "reason": ""}]
    again += [{"event": "run_finished", "outcome": "stopped", "rule": None, "step": 48}]
    write_events(run, [*events, *({"time": at, **each} for each in again)])
    text = (run / "job.toml").read_text().replace("workers = 3", "workers = 2")
    (run / "job.toml").write_text(text)
    assert list(Status(run).as_table()["workers"]) == ["0", "1"]
    workers = WatchedRun(run).look().sections["workers"]
    assert [(each["name"], each["state"]) for each in workers][2:] == [("2", "left")]
    assert sum(each["share"] for each in workers) == pytest.approx(1)
    live = LiveRun(run)
    live.look()
    live.status("stopped")
    for mine, settled in zip(_live_workers(live, over=True), workers, strict=True):
        assert mine["share"] == pytest.approx(settled["share"])


def test_a_folder_of_runs_may_have_a_job_in_it(tmp_path):
    make_run(tmp_path / "one")
    (tmp_path / "job.toml").write_text('recipe = "mine.py:recipe"')
    runs = RunList(tmp_path)
    assert (runs.single, [*runs.rows()]) == (False, ["one"])
    runs = RunList(tmp_path / "one")
    assert (runs.single, [*runs.rows()]) == (True, ["one"])


def test_runs_are_compared_by_curves_and_by_what_their_jobs_differ_in(tmp_path):
    paths = [make_run(tmp_path / f"r{n}", workers=n, epochs=8) for n in (1, 2)]
    found = compare([*paths, tmp_path])
    assert found["runs"] == ["r1", "r2"]
    assert ("workers", "1", "2") in found["settings"]
    assert [line["run"] for line in found["charts"][0]["lines"]] == [0, 0, 1, 1]
    assert [each["name"] for each in found["unread"]] == [tmp_path.name]
    shas = [RunFolder(path).last("model_saved")["parameters_sha256"] for path in paths]
    assert [each["parameters"] for each in found["hashes"]] == shas
    many = compare([paths[0]] * 13)["charts"][0]["lines"][0]
    assert "low" not in many
    assert (many["step"][-1], len(many["step"])) == (128, 128)


def test_a_run_whose_events_lack_something_is_said_and_others_are_shown(run):
    odd = make_run(run.with_name("odd"))
    (odd / "run.id").write_text("odd")
    events = list(read_events(odd / "events.jsonl"))
    for event in events:
        event.pop("pid", None)
    write_events(odd, events)

    async def first():
        with ThreadPoolExecutor(1) as executor:
            messages = Feed(WatchedRun(odd), executor).messages()
            frames = [await anext(messages), await anext(messages)]
            await messages.aclose()
            return frames[1]

    assert b"its files say what cannot be: KeyError" in asyncio.run(first())
    assert RunList(run.parent).rows()["digits"]["state"] == "completed"


class Page:
    """A page, as the script keeps it."""

    def __init__(self):
        self.sections, self.charts, self.whole = {}, [], 0

    def take(self, frame):
        if not frame.startswith(b"data: "):
            return
        message = json.loads(frame[6:])
        self.whole += message.get("whole", False)
        if message.get("whole"):
            self.sections = {}
        for name in message.get("gone", ()):
            self.sections.pop(name)
        self.sections |= message["sections"]
        self.charts = message.get("charts", self.charts)
        for point in message.get("points", ()):
            line = self.charts[point.pop("chart")]["lines"][point.pop("line")]
            at = point.pop("from")
            for name, values in point.items():
                line[name][at:] = values


def test_pages_that_are_told_changes_show_the_same_as_one_that_is_told_all(run, tmp_path):
    """Also one that was slow, and one that comes late."""
    pieces, copy = growing(run, tmp_path / "copy", 10, seed=3), tmp_path / "copy"
    next(pieces)
    watched, pages = WatchedRun(copy), [Page(), Page(), Page()]

    async def watch():
        with ThreadPoolExecutor(1) as executor:
            feed = Feed(watched, executor, look_s=60.0)
            streams = [feed.messages() for _ in pages]
            for stream in streams[:2]:
                assert (await anext(stream)).startswith(b"retry")
            seen = None
            for number, _ in enumerate(pieces):
                feed.show(watched.look() or seen)
                pages[0].take(await anext(streams[0]))
                if number % 4 == 0:
                    pages[1].take(await anext(streams[1]))
            pages[1].take(await anext(streams[1]))
            await anext(streams[2])
            pages[2].take(await anext(streams[2]))
            for stream in streams:
                await stream.aclose()
            return feed.pages

    with held(copy):
        assert asyncio.run(watch()) == 0
    assert pages[0].whole == 1
    assert pages[0].sections == pages[1].sections == pages[2].sections
    assert pages[0].charts == pages[1].charts == pages[2].charts
    mine = {c["title"]: [{**line, "run": 0} for line in c["lines"]] for c in pages[0].charts}
    assert mine["loss"] == of_report(charts([RunFolder(run)]))["loss"]
    assert settled_charts(RunFolder(run))[0].title == "loss"
