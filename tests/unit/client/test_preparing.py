"""The [prepare] table of a job: what it says, and that a run begins with its shards."""

import json
from pathlib import Path

import pytest

from instep.cli import main
from instep.client.preparing import prepare_data
from instep.data.shards.urls.remote import cache
from instep.data.sources import shards
from instep.errors import SpecError
from instep.job.file import build, load

JOB = """
recipe = "net.py:recipe"
[prepare]
sources = ["raw/*.jsonl"]
to = "shards"
map = "clean.py:record"
"""


@pytest.mark.process
def test_paths_are_relative_to_the_job_file_and_only_what_changed_is_made_again(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "clean.py").write_text("def record(raw):\n    return {'x': raw['x'] * 2}\n")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.jsonl").write_text(
        "".join(f"{json.dumps({'x': i})}\n" for i in range(9))
    )
    monkeypatch.chdir(Path("/"))
    job = load(tmp_path / "job.toml")
    prepare_data(job, quiet=False)
    assert shards(tmp_path / "shards").column("x").tolist() == list(range(0, 18, 2))
    assert "9 samples" in capsys.readouterr().err
    prepare_data(job, quiet=False)
    assert capsys.readouterr().err == ""
    (tmp_path / "clean.py").write_text("def record(raw):\n    return {'x': raw['x'] * 3}\n")
    prepare_data(job, quiet=True)
    assert shards(tmp_path / "shards").column("x").tolist() == list(range(0, 27, 3))
    assert capsys.readouterr().err == ""


@pytest.mark.process
def test_shards_are_as_large_as_one_says_and_have_the_same_samples(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(f"{json.dumps({'x': i / 3})}\n" for i in range(3000)))
    made = []
    for more in ([], ["--shard-mb", "0.005"]):
        command = ["prepare", "a.jsonl", "--to", f"out-{len(more)}", "--workers", "1", "--json"]
        assert main([*command, *more]) == 0
        made.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert made[0]["sha256"] == made[1]["sha256"]
    assert (made[0]["shards"], made[1]["shards"]) == (1, 5)
    assert main([*command, "--shard-mb", "none"]) == 2
    assert "--shard-mb: 'none': wanted is a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("size", [1e-9, float("inf"), float("nan")])
def test_a_size_that_no_shard_can_have_is_refused(size):
    table = {"recipe": "a.py:a", "prepare": {"sources": ["a"], "to": "b", "shard_mb": size}}
    with pytest.raises(SpecError, match=r"prepare\.shard_mb = "):
        build(table, source="a test")


def test_sources_at_urls_are_copied_into_the_cache_of_the_job(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(f"{JOB}[data]\ncache = 'mine'\n")
    seen = []

    def prepared(*_, **__):
        seen.append(cache())
        raise SpecError("enough")

    monkeypatch.setattr("instep.client.preparing.prepared", prepared)
    with pytest.raises(SpecError, match="enough"):
        prepare_data(load(tmp_path / "job.toml"), quiet=True)
    assert seen == [tmp_path / "mine"]
    assert cache() != tmp_path / "mine"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("to = 'x'", "sources and to need each other"),
        ("sources = ['a']\nto = 'x'\nkey = 'u'", "key and reduce need each other"),
        ("sourcs = ['a']", "Did you mean 'sources'"),
        ("sources = ['a']\nto = 'x'\nunreadable = 'no'", "unreadable"),
    ],
)
def test_a_wrong_table_is_one_sentence(line, wanted, tmp_path):
    (tmp_path / "job.toml").write_text(f"recipe = 'net.py:recipe'\n[prepare]\n{line}\n")
    with pytest.raises(SpecError, match=wanted):
        load(tmp_path / "job.toml")
