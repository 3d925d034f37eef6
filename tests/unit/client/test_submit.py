"""What a client does before a process starts: names the recipe, checks the job, makes a folder."""

import functools
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as torch_save_file

from instep.client.job_checks import check_job, open_switchboard
from instep.client.keywords import tables
from instep.client.references import reference_to
from instep.client.results import about, failure
from instep.client.submit import resume, train
from instep.comm.protocol.messages import Failed
from instep.errors import CheckpointError, RecipeError, RunError, SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe
from instep.store.folder import make_run_folder
from instep.system.addresses import address_towards


def top_level():
    """A recipe that another process could import."""


def job(**changes):
    table = {"recipe": f"{__file__}:top_level", "name": "mine", **changes}
    return spec_file.build(table, source="test")


def rounds(sync=(), **more):
    """Tables of a job that averages."""
    return {"sync": {"name": "averaging", "participants": 2, **dict(sync)}, **more}


def test_a_function_at_the_top_level_of_a_file_has_a_reference():
    assert reference_to(top_level) == f"{__file__}:top_level"


def inner():
    def nested():
        """Not to be had from outside."""

    return nested


@pytest.mark.parametrize("function", [lambda: None, inner(), len, JobSpec.__init__])
def test_a_function_that_others_cannot_import_is_refused(function):
    with pytest.raises(RecipeError, match=r"at the top level of a \.py file"):
        reference_to(function)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (functools.partial(top_level, lr=0.1), "the function top_level, and arguments={'lr': 0.1}"),
        (torch.nn.Linear(1, 1), "'Linear' was given for a recipe"),
        (3, "'int' was given for a recipe"),
        (
            Recipe(model=torch.nn.Linear(1, 1), compute_loss=len, optimizer=len, train=[1]),
            "give the function recipe itself, not what recipe() returns",
        ),
    ],
    ids=["partial", "model", "number", "recipe"],
)
def test_what_is_no_function_is_answered_with_what_to_give(given, words):
    with pytest.raises(RecipeError, match=re.escape(words)):
        reference_to(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": 1}, "belongs into 'train': instep.train(..., train={'epochs': 1})."),
        ({"steps": 10}, "instep.train(..., train={'steps': 10})"),
        ({"worker": 2}, "Did you mean 'workers'?"),
        ({"lr": 0.1}, "if the recipe function takes it: instep.train(..., arguments={'lr': 0.1})"),
        ({"batch_size": 32}, "instep.train(..., train={'global_batch': 32})"),
        ({"device": "cpu"}, "instep.train(..., train={'device': 'cpu'})"),
        ({"epoch": 3}, "instep.train(..., train={'epochs': 3})"),
        ({"world_size": 2}, "Did you mean instep.train(..., workers=2)?"),
        ({"trian": {"epochs": 1}}, "Did you mean 'train'?"),
        ({"xyz": 1}, "Known: "),
    ],
    ids=str,
)
def test_a_keyword_that_belongs_into_a_table_is_answered_with_the_line_to_type(given, words):
    with pytest.raises(SpecError, match=re.escape(words)):
        train(top_level, **given)
    with pytest.raises(SpecError, match=re.escape(words.replace("instep.train", "instep.resume"))):
        resume("runs/nowhere", **given)
    assert tables("instep.train", (), {"train": {"epochs": 1}}) == {"train": {"epochs": 1}}


def test_a_run_folder_has_the_job_as_run_and_a_place_for_logs(tmp_path):
    folder = make_run_folder(tmp_path / "runs", job(seed=5), named=False)
    assert folder == tmp_path / "runs" / "mine"
    assert (folder / "logs").is_dir()
    assert spec_file.load(folder / "job.toml") == job(seed=5)


def test_a_second_run_is_numbered_unless_its_name_was_asked_for(tmp_path):
    names = [make_run_folder(tmp_path, job(), named=False).name for _ in range(3)]
    assert names == ["mine", "mine-2", "mine-3"]
    with pytest.raises(RunError, match=r"already a run at .*mine.*--name"):
        make_run_folder(tmp_path, job(), named=True)


def test_a_folder_that_cannot_be_made_is_refused_with_the_reason(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunError, match="cannot be made"):
        make_run_folder(tmp_path / "runs", job(), named=False)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"sync": {"name": "all_reduc"}}, SpecError, "Did you mean 'all_reduce'"),
        ({"sync": {"servers": 2}}, SpecError, "sync.servers = 2: all_reduce has no servers"),
        (
            {"sync": {"name": "server_sync", "codec": "nonzero"}},
            SpecError,
            "'server_sync' does not go with sync.codec = 'nonzero': servers are sent segments",
        ),
        (
            {"sync": {"name": "server_sync"}, "train": {"device": "cuda"}},
            SpecError,
            "does not go with train.device = 'cuda': servers and workers compute on the CPU",
        ),
        (
            {"sync": {"name": "server_sync"}, "train": {"precision": "float16"}},
            SpecError,
            "does not go with train.precision = 'float16'",
        ),
        (
            {
                "sync": {"name": "server_sync"},
                "train": {"determinism": "bits"},
                "check": {"corruption": True},
            },
            SpecError,
            "does not go with check.corruption = true: it compares states that every worker has",
        ),
        (
            {"sync": {"name": "server_sync"}, "recipe": f"{__file__}:__main__"},
            SpecError,
            "does not go with a loop of your own: your own loop calls the optimizer",
        ),
        ({"sync": {"codec": "half"}}, SpecError, "no codec is called 'half'"),
        (
            {"sync": {"codec": "int8"}, "train": {"determinism": "bits"}},
            SpecError,
            "does not go with train.determinism",
        ),
        (
            {"sync": {"codec": "int8"}, "train": {"precision": "float16"}},
            SpecError,
            "does not go with train.precision",
        ),
        (
            {"sync": {"options": {"bucket_md": 1}}},
            SpecError,
            "all_reduce has no option 'bucket_md'. Did you mean 'bucket_mb'?",
        ),
        (
            rounds(sync={"options": {"bucket_mb": 0}}),
            SpecError,
            "sync.options.bucket_mb = 0: needs a number above 0",
        ),
        ({"sync": {"participants": 2}}, SpecError, "all_reduce agrees on every step"),
        (
            {"sync": {"options": {"local_steps": 2}}},
            SpecError,
            "all_reduce has no option 'local_steps'",
        ),
        (rounds(train={"batch_norm": "global"}), SpecError, "with train.batch_norm = 'global'"),
        (rounds(train={"precision": "float16"}), SpecError, "with train.precision = 'float16'"),
        (
            rounds(check={"corruption": True}, train={"determinism": "bits"}),
            SpecError,
            "does not go with check.corruption",
        ),
        (rounds(stop={"gradient_norm": 0.1}), SpecError, "does not go with stop.gradient_norm"),
        ({"workers": 4, "mesh": {"stages": 2, "shard": 2}}, SpecError, "Set mesh.zero = 2"),
        ({"mesh": {"cuts": ["a"]}}, SpecError, "mesh.cuts = ('a',) is for mesh.stages above 1"),
        ({"mesh": {"plan": {"*": "row"}}}, SpecError, "is for mesh.tensor above 1"),
        ({"mesh": {"zero": 2}}, SpecError, "mesh.zero = 2 is for mesh.shard above 1"),
        (
            {"mesh": {"tensor": 2, "zero": 2}, "workers": 2},
            SpecError,
            "mesh.zero = 2 is for mesh.shard above 1",
        ),
        *(
            ({"mesh": {"build": how}}, SpecError, f"mesh.build = {how!r} is for a replica of")
            for how in ("parts", "whole")
        ),
        (
            {"mesh": {"stages": 2, "schedule": "gpipe"}, "recipe": "nowhere.py:f"},
            RecipeError,
            "no recipe file 'nowhere.py'",
        ),
        (
            {"mesh": {"sequence": True}},
            SpecError,
            "mesh.sequence = True is for mesh.tensor above 1. Leave the key out",
        ),
        *(
            ({"mesh": {"shard": 2}, **other}, SpecError, "mesh.shard = 2 does not go with")
            for other in (
                {"sync": {"name": "server_sync"}},
                {"check": {"corruption": True}, "train": {"determinism": "bits"}},
            )
        ),
        ({"recipe": "nowhere.py:f"}, RecipeError, "no recipe file 'nowhere.py'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(changes, error, words):
    with pytest.raises(error) as refused:
        check_job(job(**changes))
    assert words in str(refused.value)


FITS = "class Own:\n    linear = False\n    segmentable = True\n    fixed_size = True\n"


@pytest.mark.parametrize("name", ["averaging", "server_sync", "bounded_stale"])
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (FITS.replace("fixed_size = True", "fixed_size: bool = False"), "fixed_size = False"),
        (FITS.replace("segmentable = True", "segmentable = False"), "segmentable = False"),
        ("class Own:\n    def reduce(self, values, comm, *, key, left):\n        pass", "reduce"),
        (FITS, ""),
        # importing it tells
        (FITS + "    def __init__(self):\n        self.reduced = self.fixed_size = False\n", ""),
        (FITS.replace("Own:", "Own(Other):").replace("True", "False"), ""),
        ("from there import Own", ""),
        (FITS.replace("True", "False") + "Own = print", ""),
    ],
)
def test_a_codec_of_ones_own_that_does_not_fit_is_refused_where_its_text_tells(
    tmp_path, name, text, wrong
):
    (tmp_path / "mine.py").write_text("raise RuntimeError('imported')\n" + text)
    (tmp_path / "recipe.py").write_text("def top_level():\n    pass\n")
    sync = {"name": name, "codec": "mine:Own"}
    given = job(recipe=f"{tmp_path / 'recipe.py'}:top_level", sync=sync)
    if not wrong:
        check_job(given)
        return
    with pytest.raises(
        SpecError, match=rf"{name}.* and of fixed size: Own in .* has {wrong}\. Use"
    ):
        check_job(given)


def test_a_codec_that_sums_by_itself_goes_with_all_reduce(tmp_path):
    (tmp_path / "mine.py").write_text("class Own:\n    def reduce(self):\n        pass\n")
    (tmp_path / "recipe.py").write_text("def top_level():\n    pass\n")
    check_job(job(recipe=f"{tmp_path / 'recipe.py'}:top_level", sync={"codec": "mine:Own"}))


def test_processes_are_started_before_anything_large_is_imported():
    code = (
        "import sys, instep.cli, instep.job.file, instep.client.submit, instep.launch.local\n"
        "assert not {'torch', 'numpy', 'psutil'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_job_that_can_be_run_is_not_refused():
    check_job(job())
    check_job(job(**rounds()))
    check_job(job(sync={"codec": "int8"}))


@pytest.mark.parametrize("model", ["mine.safetensors", "a_run", "torch.safetensors"])
def test_a_sound_model_to_start_from_is_not_refused(tmp_path, model):
    (tmp_path / "a_run").mkdir()
    save_file({}, tmp_path / "mine.safetensors")
    save_file({"a": np.ones(3)}, tmp_path / "a_run" / "model.safetensors", {"step": "3"})
    torch_save_file({"b": torch.ones(3)}, tmp_path / "torch.safetensors")
    check_job(job(start={"model": str(tmp_path / model)}))


def test_a_job_that_goes_on_needs_its_first_file_no_longer(tmp_path):
    gone = job(start={"model": str(tmp_path / "gone.safetensors")})
    check_job(gone, resumed=True)
    with pytest.raises(SpecError, match="there is no such file"):
        check_job(gone)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        bytes(8),
        b"\x02" + bytes(7) + b"[]",
        b"\xff" * 99,
        b"\x02" + bytes(7) + b"{}x",
    ],
)
def test_a_file_that_cannot_be_a_model_is_refused_before_anything_starts(tmp_path, data):
    file = tmp_path / "m.safetensors"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"m\.safetensors is no (sound )?safetensors file"):
        check_job(job(start={"model": str(file)}))


def test_a_run_tells_where_and_how_it_was_made():
    facts = about(job())
    assert len(facts["recipe_sha256"]) == 64
    assert facts["versions"].keys() >= {"python", "instep", "torch", "numpy"}
    assert facts["host"]["memory_bytes"] > 0


def blamed(worker, **changes):
    words = {
        "kind": "error",
        "cause": "ValueError: no",
        "where": "",
        "line": "",
        "step": 0,
        "phase": "",
        "exit_code": 5,
    }
    return worker, Failed(**{**words, **changes})


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("worker-1.log", "host.log"):
        (tmp_path / "logs" / name).touch()
    return tmp_path


def test_a_failed_run_names_worker_step_phase_cause_line_and_log(run_folder):
    blame = blamed(1, step=7, phase="loss", where="a.py:3 in f", line="return 1", exit_code=3)
    error = failure(*blame, run_folder)
    assert str(error).splitlines() == [
        "worker 1 failed at step 7, in loss: ValueError: no",
        "  a.py:3 in f: return 1",
        f"  full log: {run_folder / 'logs' / 'worker-1.log'}",
    ]
    assert error.exit_code == 3


def test_a_failed_launcher_is_named_as_such(run_folder):
    assert str(failure(*blamed(-1), run_folder)).startswith("the launcher failed: ValueError: no")
    assert "host.log" in str(failure(*blamed(-1), run_folder))


def test_a_log_that_somebody_else_keeps_is_not_promised(tmp_path):
    assert str(failure(*blamed(1), tmp_path)) == "worker 1 failed: ValueError: no"


def test_off_the_machine_connections_are_encrypted_unless_the_network_is_private():
    own = address_towards("192.0.2.1")
    if own.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    launch = {"hosts": ["ssh node1"], "address": own}
    board = open_switchboard(job(launch=launch))
    assert board.endpoint.context is not None
    assert board.for_host(1).credentials is not None
    board.close()
    board = open_switchboard(job(network="private", launch=launch))
    assert board.endpoint.context is None
    board.close()


def test_a_run_with_hosts_listens_where_they_reach_this_machine(monkeypatch):
    launch = {"hosts": ["ssh node1"], "address": "127.0.0.1"}
    for network in ("loopback", "private"):
        board = open_switchboard(job(network=network, launch=launch))
        assert board.endpoint.address.host == "127.0.0.1"
        assert board.authority is None
        board.close()
    for wild in ("0.0.0.0", "::", "0"):
        launch["address"] = wild
        with pytest.raises(SpecError, match=r"every address of this machine.*such as 10\.0\.0\.1"):
            open_switchboard(job(network="private", launch=launch))
    launch["address"] = "203.0.113.7"  # kept for documents: nobody has it
    with pytest.raises(SpecError, match=r"launch\.address = '203.*an address of this machine"):
        check_job(job(network="private", launch=launch))
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    with pytest.raises(SpecError, match=r"leads to 127.*Say launch\.address"):
        check_job(job(network="private", launch={"hosts": ["ssh node1"]}))
