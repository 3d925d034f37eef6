"""What Python, a shell or a spreadsheet does every day: closed streams, ASCII, CSV files."""

import errno
import subprocess
import sys
from importlib import resources

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from instep.cli import main
from instep.errors import RecipeError, RunError
from instep.job.file import build
from instep.job.train import TrainSpec
from instep.recipe.build import build_model
from instep.recipe.recipe import Recipe
from instep.store.folder import ID, held, make_run_folder
from instep.system import kernels
from instep.system.causes import sentence
from instep.system.environment import INSIDE, POOLS, THREADS, settings
from made_up_runs import make_run


def test_closed_standard_streams_are_opened_and_others_print_what_they_can():
    program = (
        "import os, sys\nfor n in (0, 1): os.close(n)\nsys.stdout = None\n"
        "from instep.system.output import open_standard_streams\nopen_standard_streams()\n"
        "print('to nobody')\nprint(os.open(os.devnull, 0), file=sys.stderr)\n"
        "sys.stdout = open(2, 'w', encoding='ascii')\nopen_standard_streams()\nprint('\u2501 3')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "3\n? 3\n")


def test_the_program_alone_prints_its_help(capsys):
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 0
    assert "usage: instep" in capsys.readouterr().out


AFTER = {"table": "def encoder", "hugging-face": "def words_of"}


def rows_of(kind):
    text = (resources.files("instep") / "templates" / kind / "recipe.py").read_text()
    names = text[text.index("def rows_of") : text.index(AFTER[kind])]
    scope = {}
    exec(f"import csv, io\nfrom pathlib import Path\n{names}", scope)
    return scope["rows_of"]


@pytest.mark.parametrize("kind", ["table", "hugging-face"])
@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"text,label\ngood,1\n", "good"),
        (b"\xef\xbb\xbftext,label\r\ngood,1\r\n", "good"),
        (b"text;label\ngood, so;1\n", "good, so"),
        (b"text\tlabel\ngood\t1\n", "good"),
        ("text,label\nsch\xf6n,1\n".encode("latin-1"), "sch\xf6n"),
        ("text,label\nsch\xf6n,1\n".encode(), "sch\xf6n"),
        (b'text,label\n"two\nlines",1\n\n', "two\nlines"),
    ],
)
def test_a_table_is_read_as_spreadsheets_save_it(tmp_path, kind, data, value):
    file = tmp_path / "table.csv"
    file.write_bytes(data)
    assert rows_of(kind)(file) == [{"text": value, "label": "1"}]


def test_a_row_that_is_too_short_is_named_and_a_decimal_comma_is_a_number(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("a;b\n1,5;x,y\n-3;4,25\n")
    assert rows_of("table")(file) == [{"a": "1.5", "b": "x,y"}, {"a": "-3", "b": "4.25"}]
    for text in ("a,b\n1,2\n3\n", "a,b\n1,2\n3,4,5\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"row 2 has other columns"):
            rows_of("table")(file)


def test_who_sets_the_number_of_threads_means_it(monkeypatch):
    monkeypatch.delenv(INSIDE, raising=False)
    monkeypatch.setattr(kernels.torch, "set_num_threads", lambda count: counts.append(count))
    for given, job, expected in (
        ("3", TrainSpec(), 3),
        ("3", TrainSpec(threads=2), 2),
        ("3", TrainSpec(determinism="bits"), 1),
        ("none", TrainSpec(), 7),
        ("0", TrainSpec(), 7),
    ):
        monkeypatch.setenv(POOLS[0], given)
        found, counts = settings(), []
        assert found[POOLS[0]] == "1"
        with monkeypatch.context() as inside:
            inside.delenv(THREADS, raising=False)
            for name, value in found.items():
                inside.setenv(name, value)
            assert settings().get(THREADS) is None  # what is ours is not the user's
            kernels.set_threads(job, 7)
        assert counts == [expected]


def recipe(**changes):
    given = {
        "model": nn.Linear(2, 1),
        "loss": nn.MSELoss(),
        "train": TensorDataset(torch.ones(3, 2)),
    }
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    return Recipe(**{**given, "optimizer": optimizer, **changes})


@pytest.mark.parametrize("ones", [torch.ones, np.ones])
def test_a_pair_of_columns_is_no_dataset_of_two_samples(ones):
    with pytest.raises(RecipeError, match=r"2 tensors, each with 4 rows.*TensorDataset"):
        recipe(train=(ones((4, 2)), ones(4)))
    recipe(train=[(torch.ones(2), torch.ones(1)), (torch.ones(2), torch.ones(1))])


@pytest.mark.parametrize("as_function", [False, True])
def test_a_model_that_is_wrapped_for_several_devices_is_refused(as_function):
    model = nn.DataParallel(nn.Linear(2, 1))
    with pytest.raises(RecipeError, match="is wrapped in DataParallel: instep does that itself"):
        build_model(recipe(model=(lambda: model) if as_function else model), 0, torch.device("cpu"))


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: nn.Linear(2, 1)(torch.ones(1, 2, dtype=torch.float64)), "x.float()"),
        (lambda: nn.Conv1d(1, 1, 1)(torch.ones(1, 1, 2, dtype=torch.float64)), "x.float()"),
        (lambda: nn.CrossEntropyLoss()(torch.ones(2, 3), torch.ones(2)), "target.long()"),
        (lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 1)), "leave Distributed"),
    ],
)
def test_what_torch_says_of_an_everyday_mistake_gets_a_remedy(call, hint):
    with pytest.raises(Exception) as raised:
        call()
    assert hint in sentence(raised.value)


@pytest.mark.parametrize("outcome", ["interrupted", None])
def test_a_run_that_ended_before_its_first_step_leaves_its_name_free(
    tmp_path, outcome, monkeypatch
):
    folder = make_run(tmp_path / "net", steps=0, outcome=outcome)
    (folder / ID).write_text("first")
    job = build({"name": "net", "recipe": "a.py:f"}, source="a test")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="there is already a run"):
        make_run_folder(tmp_path, job, named=True)
    (folder / "notes.txt").unlink()
    with held(folder), pytest.raises(RunError, match="there is already a run"):
        make_run_folder(tmp_path, job, named=True)

    def without_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    with monkeypatch.context() as patch:
        patch.setattr("instep.store.folder.fcntl.flock", without_locks)  # it may be in its trial
        with pytest.raises(RunError, match="there is already a run"):
            make_run_folder(tmp_path, job, named=True)
    assert make_run_folder(tmp_path, job, named=True) == folder
    assert (folder / ID).read_text() != "first"
    assert (tmp_path / "net-2" / ID).read_text() == "first", "with the logs that were proposed"
    with pytest.raises(RunError, match="there is already a run"):  # another start makes it just now
        make_run_folder(tmp_path, job, named=True)
    assert make_run_folder(tmp_path, job, named=False).name == "net-3"


@pytest.mark.parametrize(("steps", "outcome"), [(1, "interrupted"), (1, None), (0, "failed")])
def test_a_run_with_a_step_or_a_failure_keeps_its_name(tmp_path, steps, outcome):
    (make_run(tmp_path / "net", steps=steps, outcome=outcome) / ID).write_text("first")
    job = build({"name": "net", "recipe": "a.py:f"}, source="a test")
    with pytest.raises(RunError, match="there is already a run"):
        make_run_folder(tmp_path, job, named=True)
