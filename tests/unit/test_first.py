"""`instep init`: what it writes, and that it replaces nothing."""

import json
from pathlib import Path

import pytest

from instep.cli import main
from instep.client.first import KINDS, NEEDS, write
from instep.errors import RunError


def test_each_kind_has_a_folder_and_each_folder_its_kind():
    import instep

    folders = (Path(instep.__file__).parent / "templates").iterdir()
    assert {each.name for each in folders if each.is_dir()} == set(KINDS)


def test_what_there_is_is_listed_with_the_next_command(capsys):
    for words in (["init"], ["init", "--list"]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert [line.split()[0] for line in shown.splitlines()] == [*KINDS, "next"]
    assert main(["init", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == KINDS


def test_the_last_line_is_the_command_to_go_on_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "table"]) == 0
    *wrote, last = capsys.readouterr().out.splitlines()
    assert wrote == [f"wrote   table/{name}" for name in ("recipe.py", "table.csv", "job.toml")]
    assert last == "next    instep run table/job.toml"
    assert main(["init", "hugging-face"]) == 0
    assert capsys.readouterr().out.endswith("next    instep run hugging-face/job.toml\n")
    monkeypatch.setitem(NEEDS, "vision", "not_there")
    assert main(["init", "vision"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == "next    pip install not_there"
    assert second == "        instep run vision/job.toml"
    assert main(["init", "own-loop", "a b"]) == 0
    assert capsys.readouterr().out.endswith("next    instep run 'a b/train.py' --workers 2\n")


def test_nothing_is_replaced_and_then_nothing_is_written(tmp_path):
    (tmp_path / "job.toml").write_text("mine")
    with pytest.raises(RunError, match=r"job.toml exists, and instep init replaces nothing"):
        write("vision", tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["job.toml"]
    (tmp_path / "job.toml").unlink()
    (tmp_path / "recipe.py").symlink_to("nowhere")
    with pytest.raises(RunError, match=r"recipe.py exists"):
        write("vision", tmp_path)


def test_an_unknown_kind_is_answered_with_the_near_one(capsys):
    assert main(["init", "vison"]) == 2
    assert "there is no template 'vison'. Did you mean 'vision'?" in capsys.readouterr().err
