"""The house is in order: public names, cheap imports, layers, and everything documented."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import instep
import limits
from instep import errors
from instep.data import SOURCES
from instep.data.raw import FORMATS
from instep.data.splits import SPLITS
from instep.events import LEDGER, STEPS
from instep.launch import LAUNCHERS
from instep.sync import STRATEGIES
from instep.vocabulary import EVENTS

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "src" / "instep").rglob("*.py"))
ERRORS = [n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)]
FIELDS = [name for record in (LEDGER, STEPS) for name in record.names or ()]


@pytest.mark.tail
def test_a_run_needs_no_package_of_an_extra():
    others = ["pyarrow", "fsspec", "tokenizers", "PIL"]
    code = f"import sys; sys.modules.update(dict.fromkeys({others}))\n"
    code += "import instep.process, instep.worker.training.training, instep.lab.data_page"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_these_and_can_be_imported():
    names = ["InstepError", "JobSpec", "Recipe", "RowwiseAdagrad", "Run", "Session", "Turn"]
    names += [
        "Callback",
        "CallbackContext",
        "WeightedLoss",
        "join",
        "load_model",
        "resume",
        "train",
    ]
    assert sorted(instep.__all__) == sorted(names)
    for name in names:
        assert getattr(instep, name).__name__ == name
    assert set(names) <= set(dir(instep))
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        _ = instep.Recipes


@pytest.mark.parametrize(
    "code",
    [
        "import instep",
        "from instep.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from instep.cli import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass",
        "from instep.cli import main\nassert main(['run', 'nowhere.toml']) == 2",
        "import instep.control.master, instep.client.submit",
    ],
    ids=["import", "help", "help of run", "a job that is not there", "master and client"],
)
def test_whoever_does_not_compute_does_not_import_torch(code):
    check = f"{code}\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_each_layer_imports_only_what_lies_below_it():
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def text_of(*folders_or_files):
    """What the documentation says in these places, under `docs/`."""
    files = []
    for name in folders_or_files:
        path = ROOT / "docs" / name
        files += sorted(path.rglob("*.md")) if path.is_dir() else [path]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


@pytest.mark.parametrize(
    ("what", "names", "places"),
    [
        ("strategy", list(STRATEGIES), ["concepts/strategies.md"]),
        ("launcher", list(LAUNCHERS), ["."]),
        ("source", list(SOURCES), ["reference/sources.md"]),
        ("raw format", list(FORMATS), ["reference/raw-files.md"]),
        ("split", list(SPLITS), ["concepts/splits.md"]),
        ("error", ERRORS, ["reference/errors.md"]),
        ("event", list(EVENTS), ["reference/events.md"]),
        ("field of a record", FIELDS, ["reference/events.md"]),
        ("public name", instep.__all__, ["reference/python.md"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_in_a_table_is_documented(what, names, places):
    text = text_of(*places)
    named = set(re.findall(r"(?:`|# |\.)([A-Za-z_]\w*)", text))
    missing = [name for name in names if name not in named]
    assert not missing, (
        f"docs/{', '.join(places)} does not mention the {what}: {', '.join(missing)}"
    )


def test_every_exit_code_is_documented():
    text = text_of("reference/errors.md")
    codes = {getattr(errors, name).exit_code for name in ERRORS} | {errors.INTERRUPTED}
    assert [code for code in sorted(codes) if str(code) not in text] == []


def test_a_module_opens_with_its_purpose():
    for module in MODULES:
        opening = re.match(r'r?"""(.+)', module.read_text(encoding="utf-8"))
        assert opening, f"{module} has no docstring"
        assert opening[1].removesuffix('"""').rstrip().endswith((".", ":", "?")), module


def test_no_file_speaks_of_one_machine():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    private = ["/" + "work/", "/" + "tmp/"]
    speaking = []
    for name in listed.stdout.splitlines():
        file = ROOT / name
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        speaking += [f"{name}: {path}" for path in private if path in text]
    assert not speaking, "\n".join(speaking)


def test_whoever_waits_for_others_does_not_import_torch():
    """Client and master: it would take both cores of a small machine while the workers start."""
    names = ("client.watchdog", "client.submit", "control.master_process", "lab.chaos")
    modules = ", ".join(f"instep.{name}" for name in names)
    program = f"import {modules}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0


def test_no_two_files_of_tests_have_one_name():
    """They are modules of one name space: pytest collects the first alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_no_figure_of_the_house_is_above_its_limit():
    """They may only fall: `limits.toml`."""
    known, found = limits.limits(), limits.measured()
    above = [
        f"{name}: {found[name]} > {most}" for name, most in known.items() if found[name] > most
    ]
    assert not above, "; ".join(above)
