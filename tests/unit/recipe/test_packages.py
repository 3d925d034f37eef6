"""A recipe's file is imported as its package has it, from a job file, a program and `python -m`."""

import os
import subprocess
import sys

import pytest

from instep.errors import RecipeError
from instep.job import file as spec_file
from instep.recipe.source_file import load_function, package_of

FILES = {
    "parent_pkg/__init__.py": "",
    "parent_pkg/model.py": "WIDTH = 3",
    "parent_pkg/sub/__init__.py": "",
    "parent_pkg/sub/beside.py": "DEPTH = 4",
    "parent_pkg/sub/relative.py": "from ..model import WIDTH\nfrom .beside import DEPTH\n",
    "parent_pkg/sub/absolute.py": "from parent_pkg.model import WIDTH\nfrom beside import DEPTH\n",
    "parent_pkg/entry/__init__.py": "from ..model import WIDTH\nDEPTH = 4\n",
    "no_init/here/plain.py": "from no_init.there import other\nfrom ..there.other import *\n",
    "no_init/there/other.py": "WIDTH, DEPTH = 3, 4",
}
FUNCTION = "def recipe():\n    return WIDTH, DEPTH, __name__\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + (FUNCTION if "import" in text else ""))
    before = {*sys.modules}
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "instep_recipe", raising=False)
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("parent_pkg/sub/relative.py:recipe", "parent_pkg.sub.relative"),
        ("parent_pkg/sub/absolute.py:recipe", "parent_pkg.sub.absolute"),
        ("parent_pkg.sub.relative:recipe", "parent_pkg.sub.relative"),
        ("parent_pkg.entry:recipe", "parent_pkg.entry"),
        ("no_init.here.plain:recipe", "no_init.here.plain"),
    ],
)
def test_a_recipe_in_a_package_imports_what_its_package_has(root, recipe, name):
    (root / "job.toml").write_text(f'recipe = "{recipe}"')
    job = spec_file.load(root / "job.toml")
    again = spec_file.build(spec_file.as_table(job), source="job.toml of the run")
    assert again == job
    function = load_function(job.recipe, places=job.python_path)
    assert function() == (3, 4, name)
    assert load_function(job.recipe, places=job.python_path) is function


def test_a_folder_of_the_job_is_looked_in_for_the_recipe_and_its_imports(root):
    (root / "jobs").mkdir()
    (root / "jobs" / "job.toml").write_text(
        'recipe = "parent_pkg.sub.relative:recipe"\npython_path = [".."]'
    )
    job = spec_file.load(root / "jobs" / "job.toml")
    assert job.python_path == (str(root),)
    assert load_function(job.recipe, places=job.python_path)()[0] == 3


def test_a_package_that_cannot_be_imported_is_the_cause(root):
    (root / "parent_pkg" / "__init__.py").write_text("1 / 0")
    with pytest.raises(RecipeError, match="cannot be imported: ZeroDivisionError"):
        load_function(f"{root}/parent_pkg/sub/relative.py:recipe")


def test_a_folder_with_the_name_of_another_package_is_no_package(root):
    (root / "json").mkdir()
    (root / "json" / "__init__.py").touch()
    (root / "json" / "mine.py").write_text("WIDTH, DEPTH = 3, 4\n" + FUNCTION)
    assert package_of(root / "json" / "mine.py", ()) == ("json", root)
    assert load_function(f"{root}/json/mine.py:recipe")() == (3, 4, "instep_recipe")


@pytest.mark.parametrize("module", ["parent_pkg.sub.relative", "no_init.here.plain"])
def test_a_program_that_is_a_module_hands_its_folders_on(root, module):
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    told = "from instep.client.references import places_of, reference_to\n"
    told += "print(reference_to(recipe), *places_of(recipe), sep='\\n')\n"
    path.write_text(path.read_text() + told)
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:2] == [f"{path}:recipe", str(root)]


def test_a_file_is_compiled_as_it_is_after_an_edit_in_the_same_second(tmp_path, monkeypatch):
    file, found = tmp_path / "clean.py", []
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    for number in (2, 3):
        file.write_text(f"def record(raw):\n    return {number} * raw\n")
        os.utime(file, (1e9, 1e9))
        found.append(load_function(f"{file}:record", what=f"edit_{number}")(1))
        monkeypatch.delitem(sys.modules, f"instep_edit_{number}")
    assert found == [2, 3]
