"""Starts programs for real, and ends whatever a failed test leaves of them."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from started import RECIPES, Start, Started

from warm import warm_roles

sys.path.append(str(RECIPES))  # so that a test can import a recipe, as its neighbours do


def _is_cold(node: pytest.Item) -> bool:
    return node.get_closest_marker("cold") is not None


@pytest.fixture(scope="module", autouse=True)
def _roles(request: pytest.FixtureRequest) -> Iterator[None]:
    """The first master and fork server of a run that a test itself starts are forks."""
    with contextlib.nullcontext() if _is_cold(request.node) else warm_roles():
        yield


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """`start(*arguments)`: this Python with these arguments, watched."""
    programs: list[Started] = []
    warm = not _is_cold(request.node)

    def begin(*command: object, environment: dict[str, str] | None = None) -> Started:
        folder = tmp_path / f"program-{len(programs)}"
        programs.append(Started(folder, command, environment, warm=warm))
        return programs[-1]

    yield begin
    for program in programs:
        program.kill()


@pytest.fixture
def run(start: Start, tmp_path: Path) -> Start:
    """`run("file.py:function", "train.epochs=3", ...)`: `instep run` on two processes."""

    def begin(recipe: str, *settings: str, options: tuple[str, ...] = ()) -> Started:
        return start(*instep_run(tmp_path, recipe, *settings), *options)

    return begin


def instep_run(folder: Path, recipe: str, *settings: str) -> list[object]:
    """The command line that runs a recipe, with its job file in `folder`."""
    job = folder / "job.toml"
    job.write_text(f'name = "tested"\nrecipe = "{RECIPES / recipe}"\nworkers = 2\n')
    sets = [part for setting in settings for part in ("--set", setting)]
    return ["-m", "instep", "run", job, *sets]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A run of `tiny.py` on two workers that has come to its end."""
    folder = tmp_path_factory.mktemp("finished")
    command = instep_run(folder, "tiny.py:recipe", *TINY)
    program = Started(folder, [*command, "--json"])
    try:
        program.end()
        yield program
    finally:
        program.kill()


TINY = ("seed=5", "train.epochs=3", "train.global_batch=16", "train.threads=1")
