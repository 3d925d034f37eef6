"""What a node of a cluster lacks, and where a recipe's file is on it."""

import os

import pytest

from instep.job.file import build
from instep.launch.node import Needs, enter
from instep.system.environment import RECIPE, recipe_here


@pytest.fixture
def needs(tmp_path, monkeypatch):
    """Of a run that was started in a folder `here`, with its recipe in `here/nets`."""
    (tmp_path / "here" / "nets").mkdir(parents=True)
    (tmp_path / "here" / "nets" / "net.py").write_text("a recipe")
    monkeypatch.chdir(tmp_path / "here")
    return Needs.of(build({"recipe": f"{tmp_path}/here/nets/net.py:net"}, source="a test"))


@pytest.fixture
def elsewhere(tmp_path, needs):
    """A node that has a copy of `here`, and no `here`."""
    (tmp_path / "here").rename(tmp_path / "copy")
    return tmp_path / "copy"


def test_a_recipe_in_its_own_place_is_taken_from_there(needs, tmp_path):
    assert needs.missing() == ""
    assert needs.in_copy(str(tmp_path)) == needs


def test_a_recipe_is_found_in_a_copy_of_any_folder_above_it(needs, elsewhere):
    assert "does not have the recipe's file" in needs.missing()
    whole, part = needs.in_copy(str(elsewhere)), needs.in_copy(str(elsewhere / "nets"))
    assert whole.recipe == part.recipe == str(elsewhere / "nets" / "net.py")
    assert whole.missing() == part.missing() == ""
    assert whole.folder == str(elsewhere)


def test_another_file_of_that_name_in_a_copy_is_not_taken(needs, elsewhere):
    (elsewhere / "nets" / "net.py").write_text("another recipe")
    assert needs.in_copy(str(elsewhere)).recipe == needs.recipe
    assert "does not have the recipe's file" in needs.in_copy(str(elsewhere)).missing()


def test_a_node_without_the_runs_folder_says_so(needs, tmp_path):
    missing = enter(needs, tmp_path / "runs" / "net" / "logs", "an id")
    assert missing.startswith(f"does not see the run's folder {tmp_path / 'runs' / 'net'}.")
    assert os.getcwd() == needs.folder


def test_a_host_that_has_the_recipe_elsewhere_loads_it_there(monkeypatch):
    assert recipe_here("/a/net.py:net") == "/a/net.py:net"
    monkeypatch.setenv(RECIPE, "/b/net.py")
    assert recipe_here("/a/net.py:net") == "/b/net.py:net"
