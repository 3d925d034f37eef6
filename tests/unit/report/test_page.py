import json
import re
from html.parser import HTMLParser

import pytest

from instep.events import LEDGER, read_events, read_records
from instep.report.figures.summary import idle_words
from instep.report.page import bars, markup, sections
from instep.report.page.page import write_report
from instep.store.run_folder import RunFolder
from instep.units import readable_count
from made_up_runs import BEGIN_S, failure, make_run, stopped_by, write_events, write_ledger

ATTACK = "</script><script>alert('x')</script><img src=x onerror=alert(1)> & \"quoted\""
VOID = {"input", "path", "line"}
MANY = {"micro_batches": 64}


class Page(HTMLParser):
    """Headings, text, scripts and addresses of a page; fails on elements that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.headings, self.scripts, self.words, self.addresses = [], [], [], [], []
        self.tags = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.addresses += [value for key, value in attributes if key in ("src", "href")]
        if name != "meta":
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        assert name in VOID
        self.tags.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, text):
        if self.open and self.open[-1] == "script":
            self.scripts.append(text)
        elif self.open and self.open[-1] == "h2":
            self.headings.append(text)
        else:
            self.words.append(text)


def page_of(path, other=None):
    write_report(RunFolder(path), path / "report.html", other and RunFolder(other))
    return (path / "report.html").read_text()


def test_the_page_tells_the_run_from_top_to_bottom(tmp_path):
    page = Page(page_of(make_run(tmp_path / "digits")))
    assert page.headings == [
        "Curves",
        "Throughput",
        "Where the time went",
        "Start-up",
        "Work of each worker",
        "Audit of samples",
        "Generations and failures",
        "Checkpoints",
        "Configuration",
        "How to reproduce",
    ]
    text = " ".join(page.words)
    assert "48 steps, 3,000 samples, each exactly once per epoch." in text
    assert "instep run job.toml --workers 2" in text
    assert "3f" * 32 in text
    assert "sha256 of every (epoch, position) used" in text
    assert "order of the data" not in text  # the hash has no seed in it


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, None),
        ({"encrypted": True}, "Traffic between hosts was encrypted"),
        ({"encrypted": False}, "Traffic between hosts was not encrypted"),
    ],
)
def test_the_page_says_whether_traffic_between_hosts_was_encrypted(tmp_path, more, words):
    path = make_run(tmp_path / "digits")
    events = [*read_events(path / "events.jsonl")]
    events[0].update(more)
    write_events(path, events)
    text = page_of(path)
    assert ("Traffic between hosts" in text) == (words is not None)
    assert words is None or words in text


def test_the_page_asks_nothing_of_any_network(tmp_path):
    text = page_of(make_run(tmp_path / "digits"), make_run(tmp_path / "other"))
    assert Page(text).addresses == []
    assert "default-src 'none'" in text
    addresses = set(re.findall(r"https?://[^\"'\s<]+|url\(|@import|fetch\(|XMLHttp", text))
    assert addresses == set()


def test_the_data_of_the_curves_is_valid_json(tmp_path):
    page = Page(page_of(make_run(tmp_path / "digits", nan_from=30)))
    data = json.loads(page.scripts[0])
    assert data["runs"] == ["digits"]
    assert data["charts"][0]["lines"][0]["mean"][29:] == [None] * 19


def test_nothing_a_run_recorded_becomes_markup(tmp_path):
    folder = tmp_path / "<script>alert(0)<"  # a folder that somebody renamed
    path = make_run(folder, steps=21, outcome="failed", name="digits")
    events = list(read_events(path / "events.jsonl"))
    started = {**events[0], "command": ATTACK, "host": ATTACK, "versions": {ATTACK: ATTACK}}
    metrics = {"time": BEGIN_S + 5, "event": "validated", "step": 9, "metrics": {ATTACK: 1.0}}
    saved = {"time": BEGIN_S + 5, "event": "checkpoint_saved", "step": 9, "path": ATTACK}
    members = {"generation": 2, "members": [ATTACK], "reason": ATTACK, "seconds": 0.1}
    again = {"time": BEGIN_S + 5, "event": "generation_started", **members}
    warning = {"time": BEGIN_S + 5, "event": "warning", "text": ATTACK}
    broken = {**failure(0.3, 22, ATTACK), "where": ATTACK, "line": ATTACK, "kind": ATTACK}
    phases = {
        **events[3],
        "event": "worker_ready",
        "worker": 0,
        "samples": 9,
        "phases": {ATTACK: 1.0},
    }
    rest = [metrics, saved, again, warning, phases, broken, events[-1]]
    write_events(path, [started, *rest])
    text = page_of(path)
    page = Page(text)
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert "<img" not in text
    assert "".join(page.words).count(ATTACK) >= 8


def test_two_runs_are_laid_over_each_other(tmp_path):
    one = make_run(tmp_path / "one")
    other = make_run(tmp_path / "other", workers=4, metrics=False)
    page = Page(page_of(one, other))
    assert page.headings[:2] == ["Side by side", "Curves"]
    loss = json.loads(page.scripts[0])["charts"][0]
    assert [(line["run"], line["kind"]) for line in loss["lines"]] == [
        (0, "training"),
        (0, "validation"),
        (1, "training"),
    ]
    assert "The rest is about one alone." in page.words


def test_two_runs_of_one_name_are_told_apart(tmp_path):
    one, other = make_run(tmp_path / "a" / "digits"), make_run(tmp_path / "b" / "digits")
    page = Page(page_of(one, other))
    assert json.loads(page.scripts[0])["runs"] == [str(one), str(other)]


@pytest.mark.parametrize(
    "how",
    [
        {"steps": 0},
        {"steps": 0, "outcome": None},
        {"workers": 1},
        {"metrics": False},
        {"nan_from": 1},
        {"steps": 21, "outcome": "failed"},
        {"steps": 1, "outcome": "interrupted"},
    ],
)
def test_a_poor_run_has_a_whole_page(tmp_path, how):
    path = make_run(tmp_path / "digits", **how)
    page = Page(page_of(path))
    assert page.headings[0] == "Curves"
    Page(page_of(path, make_run(tmp_path / "good")))


def test_a_folder_with_nothing_but_a_job_has_a_page(tmp_path):
    path = make_run(tmp_path / "digits")
    for name in ("events.jsonl", "ledger.bin", "steps.bin"):
        (path / name).unlink()
    assert "No step was committed." in "".join(Page(page_of(path)).words)


def test_a_failed_run_shows_its_cause_first(tmp_path):
    page = Page(page_of(make_run(tmp_path / "digits", steps=21, outcome="failed")))
    text = "\n".join(page.words)
    assert text.index("Failed after") < text.index("IndexError: target 10") < text.index("workers")


def test_the_page_says_which_rule_stopped_a_run_with_the_figures_and_the_step(tmp_path):
    why = "accuracy 0.98 reached the target 0.97"
    page = page_of(stopped_by(tmp_path / "digits", "target", by="master", step=20, why=why))
    text = " ".join(Page(page).words)
    assert re.search(rf"Stopped early by target after [^:]*: {why}, at step 20\.", text)


def test_a_page_stays_small_whatever_the_run(tmp_path):
    path = make_run(tmp_path / "long", workers=64, steps=1000, train={"steps": 1000, **MANY})
    events = list(read_events(path / "events.jsonl"))
    many = [failure(i * 0.001, i, "x" * 5000) for i in range(500)]
    many += [
        {
            "time": BEGIN_S + 3 + i / 100,
            "event": "validated",
            "step": i + 1,
            "metrics": {"a": i, "b": i},
        }
        for i in range(1000)
    ]
    write_events(path, sorted(events + many, key=lambda event: event["time"]))
    assert len(page_of(path)) < 1_000_000


def test_no_worker_is_hidden_in_silence(tmp_path):
    path = make_run(tmp_path / "wide", workers=64, train={"epochs": 1, **MANY}, steps=4)
    assert "48 of 64 workers shown." in Page(page_of(path)).words


def test_checkpoints_and_failures_are_marked_on_the_strips(tmp_path):
    text = page_of(make_run(tmp_path / "digits", steps=21, outcome="failed"))
    assert len(re.findall(r'<line [^>]*class="checkpoint"/>', text)) == 2
    assert len(re.findall(r'<line [^>]*class="failure"/>', text)) == 1


def test_the_page_says_who_did_how_much_and_how_work_was_dealt(tmp_path):
    folder = make_run(tmp_path / "digits", workers=3)
    ledger = read_records(folder / "ledger.bin", LEDGER).copy()
    first, second = ledger[0::3], ledger[1::3]  # worker 1 gives half to worker 0
    first["stop"] = second["first"] = (second["first"] + second["stop"]) // 2
    write_ledger(folder, ledger)
    dealt = {"step": 18, "members": [0, 1, 2], "micro_batches": [4, 1, 3], "reason": "speed"}
    events = list(read_events(folder / "events.jsonl"))
    event = {"time": BEGIN_S + 3, "event": "work_dealt", "generation": 1, "speeds": [4, 1, 3]}
    write_events(folder, [*events[:-1], {**event, **dealt}, events[-1]])
    words = Page(page_of(folder)).words
    at = words.index("worker 1", words.index("samples/s while computing"))
    its = int((second["stop"] - second["first"]).sum())
    assert words[at + 1 : at + 3] == [readable_count(its), "17 %"]
    at = words.index("micro-batches of each worker")
    assert words[at + 1 : at + 4] == ["18", "speed", "0: 4, 1: 1, 2: 3"]


def test_workers_that_were_given_no_work_are_named(tmp_path):
    folder = make_run(tmp_path / "digits", workers=2)
    events = list(read_events(folder / "events.jsonl"))
    event = {"time": BEGIN_S + 3, "event": "work_dealt", "step": 9, "members": [0, 1]}
    for counts, idle in (([8, 0], "worker 1 none"), ([0, 8], "worker 0 none"), ([7, 1], "")):
        write_events(folder, [*events[:-1], {**event, "micro_batches": counts}, events[-1]])
        found = idle_words(RunFolder(folder))
        assert idle in found
        assert bool(found) == bool(idle)
        assert ("computed all micro-batches" in page_of(folder)) == bool(idle)


def test_the_work_of_a_mesh_is_that_of_its_replicas(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits", workers=4, mesh={"tensor": 2}))
    text = re.sub("<[^>]*>", " ", sections.who_did_what(folder))
    rows = re.findall(r"replica (\d) +(\d to \d) +([\d,]+) +([\d.]+ %) +([\d,.]+)", text)
    shares = [(int(n), workers, share) for n, workers, _, share, _ in rows]
    assert shares == [(0, "0 to 1", "50 %"), (1, "2 to 3", "50 %")]
    speeds = [float(rate.replace(",", "")) for *_, rate in rows]
    alone = RunFolder(make_run(tmp_path / "plain", workers=2))
    text = re.sub("<[^>]*>", " ", sections.who_did_what(alone))
    plain = re.findall(r"worker \d +[\d,]+ +50 % +([\d,.]+)", text)
    assert speeds == [float(rate.replace(",", "")) for rate in plain]
    drawn = bars.throughput_strips(folder)
    assert "worker 0" in drawn
    assert "worker 1" not in drawn


def test_characters_that_nobody_sees_are_written_out():
    shown = markup.tag("p", "a\x1b[31m\u202eb\ud800\t\u00e9\n<")
    assert shown == "<p>a\\u001b[31m\\u202eb\\ud800\t\u00e9\n&lt;</p>"
