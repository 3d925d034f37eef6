"""The wheel, in an environment of its own: it installs, trains, and has its types."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest

from instep import __version__

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.process, pytest.mark.slow]


def ran(*words, cwd):
    done = subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build")
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    words = ("-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", source)
    ran(sys.executable, *words, cwd=source)
    (found,) = (source / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """With the wheel; what it depends on is lent by this environment, whose own `instep` is not."""
    folder = tmp_path_factory.mktemp("environment")
    ran(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    install = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    ran(sys.executable, *install, cwd=folder)
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "lent.pth").write_text("\n".join(lent))
    return folder


def test_it_has_all_that_is_no_python_file_and_nothing_besides(wheel):
    names = ran(sys.executable, "-m", "zipfile", "-l", wheel, cwd=ROOT)
    files = [line.split()[0] for line in names.splitlines()[1:]]
    assert {each.split("/")[0] for each in files} == {"instep", f"instep-{__version__}.dist-info"}
    wanted = [
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "instep").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert sorted(each for each in files if each.startswith("instep/")) == sorted(wanted)


def test_what_it_needs_is_what_the_project_says_and_can_be_had(wheel, environment):
    check = "import importlib.metadata as m; print(*m.requires('instep'), sep='\\n')"
    needed = ran(environment / "bin" / "python", "-c", check, cwd=environment).splitlines()
    assert any(each.startswith("torch") for each in needed)
    assert not [each for each in needed if "mkdocs" in each and "extra" not in each]
    dry = ("-m", "pip", "--python", environment / "bin" / "python", "check")
    assert "No broken requirements" in ran(sys.executable, *dry, cwd=environment)


def test_a_first_recipe_is_written_and_trains(environment, tmp_path):
    instep = environment / "bin" / "instep"
    where = ran(
        environment / "bin" / "python", "-c", "import instep; print(instep.__file__)", cwd=tmp_path
    )
    assert where.startswith(str(environment))
    words = json.loads(ran(instep, "init", "table", "--json", cwd=tmp_path))["next"][1:]
    summary = json.loads(ran(instep, *words, "--json", cwd=tmp_path).splitlines()[-1])
    assert summary["outcome"] == "completed"
    assert (tmp_path / "runs/table/report.html").is_file()


def test_its_page_in_the_browser_is_served_without_node(environment, tmp_path):
    pytest.importorskip("uvicorn")
    (tmp_path / "runs").mkdir()
    words = [environment / "bin" / "instep", "dashboard", tmp_path / "runs", "--json"]
    alone = {"PATH": str(environment / "bin")}
    with subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, env=alone) as server:
        try:
            address = json.loads(server.stdout.readline())["link"].partition("#")[0]
            with urllib.request.urlopen(address) as answer:
                page = answer.read().decode()
            names = re.findall(r'(?:src|href)="/(static/[^"]+)"', page)
            assert len(names) > 6
            for name in names:
                with urllib.request.urlopen(address + name) as answer:
                    assert len(answer.read(10)) == 10
        finally:
            server.terminate()


def test_a_program_that_uses_it_is_checked_against_its_types(environment, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import instep\n"
        "run = instep.train('net.py:recipe', workers=2)\n"
        "reveal_type(run.path)\n"
        "instep.train('net.py:recipe', workers='two')\n"
    )
    words = ("-m", "mypy", "--python-executable", environment / "bin" / "python", program)
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=tmp_path, capture_output=True, text=True
    )
    assert 'Revealed type is "pathlib.Path"' in done.stdout
    assert 'Argument "workers" to "train" has incompatible type "str"' in done.stdout
    assert "Found 1 error" in done.stdout
