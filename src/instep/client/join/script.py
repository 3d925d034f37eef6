"""`instep run script.py`: the arguments of the script's `instep.join` become the job.

A run needs its job before a worker exists. So the script is started once with no run to
join: at its call of `instep.join` it prints the arguments, and exits. The command line
overrides them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.errors import RecipeError, SpecError, file_beside
from instep.job import file as spec_file
from instep.job.overrides import apply_overrides
from instep.job.spec import JobSpec
from instep.system.environment import ASKED, INSIDE

MAIN = "__main__"
"""In place of a recipe's function: the file itself is run."""


def load_script(
    path: Path,
    argv: Sequence[str],
    overrides: Sequence[str],
    say: Callable[[str], object] | None = None,
) -> JobSpec:
    """The job of a script.

    Args:
        path: of the script.
        argv: what is passed on to it.
        overrides: `section.key=value`, which override it.
        say: told of each value that went away with one of those.

    Raises:
        InstepError: there is no such file, it does not join, or its job is wrong.
    """
    if not path.is_file():
        raise SpecError(f"there is no script {str(path)!r}. {file_beside(path, '*.py')}")
    table = {"name": _name(path), **_asked(path, argv)}
    table["recipe"] = f"{path}:{MAIN}"
    if argv:
        table["arguments"] = {**table.get("arguments", {}), "argv": [*argv]}
    typed = apply_overrides(table, overrides, say)
    return spec_file.absolute(spec_file.build(table, source=str(path), typed=typed), Path.cwd())


def _name(path: Path) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in path.stem)
    return kept.lstrip("._-") or "script"


def _asked(path: Path, argv: Sequence[str]) -> dict[str, Any]:
    read, write = os.pipe()
    environment = {**os.environ, ASKED: str(write), INSIDE: "1"}
    try:
        done = subprocess.run(
            [sys.executable, str(path), *argv],
            env=environment,
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    if said:
        table: dict[str, Any] = json.loads(said)
        return table
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        sys.stderr.write(done.stderr)
        raise RecipeError(f"{path} ended before it called instep.join: {lines[-1]}")
    raise SpecError(
        f"{path} did not call instep.join, so there is nothing to run workers for. A Python file "
        "with a recipe function is named by a job file, in TOML: write job.toml with the line "
        f'recipe = "{path.name}:recipe", and give that.'
    )


def print_job_if_asked(
    name: str | None,
    seed: int,
    network: str,
    arguments: Mapping[str, Any] | None,
    sections: Mapping[str, Mapping[str, Any]],
) -> None:
    """In `instep.join`: if this process was started only to print its job, print it and end.

    Raises:
        InstepError: it is not a valid job.
    """
    asked = os.environ.pop(ASKED, None)
    if asked is None:
        return
    table = {
        **({"name": name} if name is not None else {}),
        "seed": seed,
        "network": network,
        **({"arguments": dict(arguments)} if arguments else {}),
        **sections,
    }
    # how many workers there are, the command line says
    spec_file.build({"recipe": f"script.py:{MAIN}", "workers": 1, **table}, source="instep.join")
    with os.fdopen(int(asked), "w") as answer:
        json.dump(table, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without anything that the script does at its end
