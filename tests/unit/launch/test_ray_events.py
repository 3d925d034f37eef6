"""What Ray's dashboard is told of the events of a run."""

import json

import pytest

from instep.launch.ray.events import Events

EVENTS = [
    {"event": "run_started", "time": 10.5, "job": {"name": "run"}},
    {"event": "worker_joined", "time": 11.0, "worker": 2, "role": "server", "host": 1},
    {"event": "traffic", "time": 11.2, "worker": 0, "sent_bytes": 1},
    {"event": "generation_started", "time": 11.5, "generation": 1, "members": [0, 2]},
    {"event": "host_lost", "time": 12.0, "host": 1, "why": "it hung up"},
    {
        "event": "generation_started",
        "time": 13.9,
        "generation": 2,
        "members": [0, 2],
        "reason": "server 2 was lost",
    },
]


@pytest.fixture
def run(tmp_path):
    """A run with events, of which the last is being written."""
    made = tmp_path / "run"
    made.mkdir()
    lines = [json.dumps(event) for event in EVENTS]
    (made / "events.jsonl").write_text("\n".join(lines))
    return made


def told(folder):
    files = sorted(folder.glob("event_JOBS*.log"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_events_are_shown_once_each_and_whole_as_ray_has_them(run, tmp_path):
    events = Events(run, tmp_path / "events")
    events.show()
    events.show()
    assert [e["label"] for e in told(tmp_path / "events")] == [
        "run_started",
        "worker_joined",
        "host_lost",
    ]
    with (run / "events.jsonl").open("a") as file:
        file.write("\n")
    events.show()
    *_, lost, again = told(tmp_path / "events")
    assert lost["message"] == "instep run: host lost: host 1, why it hung up"
    assert (lost["severity"], lost["timestamp"]) == ("WARNING", "12")
    assert lost["custom_fields"] | {"run": "run", "host": "1"} == lost["custom_fields"]
    assert again["message"] == (
        "instep run: continuing with worker 0, server 2 (server 2 was lost)"
    )
    assert again["severity"] == "INFO"


def test_another_actor_gives_an_event_the_same_id(run, tmp_path):
    Events(run, tmp_path / "one").show()
    Events(run, tmp_path / "other").show()
    first, second = told(tmp_path / "one"), told(tmp_path / "other")
    assert [e["event_id"] for e in first] == [e["event_id"] for e in second]
    assert len({e["event_id"] for e in first}) == len(first)


def test_a_run_that_has_no_events_yet_shows_none(tmp_path):
    Events(tmp_path, tmp_path / "events").show()
    assert told(tmp_path / "events") == []


def test_ray_reads_what_is_written(run, tmp_path):
    events = pytest.importorskip("ray._private.event.event_logger")
    Events(run, tmp_path / "events").show()
    (file,) = (tmp_path / "events").iterdir()
    parsed = [events.parse_event(line) for line in file.read_text().splitlines()]
    assert [event.label for event in parsed] == ["run_started", "worker_joined", "host_lost"]
