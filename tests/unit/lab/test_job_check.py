"""What `instep check` says of a job, against closed forms and against what a run says."""

import json
import os
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn

from instep.cli import main

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import instep

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)
        self.last.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.scale[0]

def recipe(lr: float = 0.1, optimizer: str = "AdamW"):
    x = torch.randn(101, 6)
    return instep.Recipe(
        model=Net(), loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: getattr(torch.optim, optimizer)(p, lr=lr),
        train=TensorDataset(x, x[:, :3].argmax(dim=1)),
        validate=TensorDataset(x[:20], x[:20, :3].argmax(dim=1)),
    )
"""

PARAMETERS, FROZEN = 6 * 16 + 16 + 2 * 16 + 16 * 3 + 3, 3


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """`check(text, *options)`: exit code, and what `--json` prints, of a job with that text."""
    (tmp_path / "net.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads = torch.get_num_threads()

    def checked(text="", *options, recipe="net.py:recipe"):
        head = "" if "recipe =" in text else f'recipe = "{recipe}"\n'
        (tmp_path / "job.toml").write_text(head + text)
        code = main(["check", "job.toml", "--json", *options])
        said = capsys.readouterr()
        return code, json.loads(said.out), said.err

    yield checked
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("default")
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


TRAIN = "[train]\nepochs = 4\nglobal_batch = 16\nmicro_batches = 4\n"


def test_numbers_of_a_good_job_follow_closed_forms(check):
    code, found, _ = check(f"workers = 4\n{TRAIN}")
    assert (code, found["starts"], found["refusals"]) == (0, True, [])
    assert found["same_as_one_machine"]["verdict"] == "yes"
    model = found["model"]
    assert (model["parameters"], model["trained"]) == (PARAMETERS, PARAMETERS - FROZEN)
    assert model["parameter_bytes"] == 4 * PARAMETERS
    assert (model["buffers"], model["buffer_bytes"]) == (5, 20)
    batches = found["batches"]
    assert (batches["steps_per_epoch"], batches["steps"]) == (7, 28)
    assert (batches["last_batch"], batches["last_batch_parts"]) == (5, 2)
    assert (batches["part_samples"], batches["of_a_worker"]) == ([4], 1)
    assert (found["data"]["train"], found["data"]["validate"]) == (101, 20)
    assert found["data"]["batch"] == [
        {"name": "0", "shape": [4, 6], "dtype": "float32"},
        {"name": "1", "shape": [4], "dtype": "int64"},
    ]


def test_memory_follows_closed_forms(check):
    _, found, _ = check(f"workers = 4\n{TRAIN}")
    memory, trained = found["memory"], PARAMETERS - FROZEN
    assert memory["model_bytes"] == 4 * PARAMETERS + 20
    assert memory["gradient_bytes"] == 4 * trained
    # two moments for each, and the number of the step for each tensor
    assert memory["optimizer_bytes"] == found["optimizer"]["state_bytes"] == 8 * trained + 5 * 4
    assert memory["exchange_bytes"] == 5 * 4  # marks: which tensors had a gradient
    known = ("model", "gradient", "optimizer", "exchange", "activation")
    assert memory["total_bytes"] == sum(memory[f"{name}_bytes"] for name in known)
    assert found["sent"]["sent_bytes"] == pytest.approx(2 * 3 / 4 * 4 * trained)


@pytest.mark.parametrize(("optimizer", "each"), [("SGD", 0), ("Adagrad", 4)])
def test_the_state_of_other_optimizers_follows_closed_forms(check, optimizer, each):
    _, found, _ = check(f'[arguments]\noptimizer = "{optimizer}"\n')
    steps = 5 * 4 if each else 0
    assert found["optimizer"]["state_bytes"] == each * (PARAMETERS - FROZEN) + steps


def test_activations_of_a_pass_are_counted(check):
    small = check("[train]\nglobal_batch = 16\nmicro_batches = 8\n")[1]["memory"]
    large = check("[train]\nglobal_batch = 64\nmicro_batches = 8\n")[1]["memory"]
    ratio = large["activation_bytes"] / small["activation_bytes"]
    assert 2 < ratio <= 4  # four times the samples, and what does not depend on them
    assert large["activation_bytes"] > 8 * 16 * 4 * 2  # what tanh and the norm keep


def test_mistakes_of_job_recipe_and_optimizer_are_told_at_once(check, tmp_path):
    (tmp_path / "net.py").write_text(
        RECIPE.replace("lr=lr)", "lr=-1.0)").replace("validate=", "metrics={}, validate=")
    )
    text = (
        "workers = 3\n[train]\nepochs = 0\nprecision = 'float16'\n"
        "[stop]\nmetric = 'accuracy'\ntarget = 0.9\n[sync]\nparticipants = 4\n"
    )
    code, found, err = check(text)
    told = [each["text"] for each in found["refusals"]]
    for words in (
        "train.epochs = 0",
        "sync.participants = 4: all_reduce agrees on every step",
        "precision = 'float16' needs CUDA",
        "stop.metric = 'accuracy'",
        "Recipe.optimizer() refused",
    ):
        assert sum(words in text for text in told) == 1, (words, told)
        assert words in err
    assert len(told) == 5
    assert code == found["exit_code"] == 2
    assert [each["exit_code"] for each in found["refusals"]] == [2, 2, 2, 2, 3]
    assert found["data"]["train"] == 101  # what else can be checked still is
    assert found["model"]["parameters"] == PARAMETERS


def test_all_parts_of_a_recipe_that_are_wrong_are_told_at_once(check, tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch, instep\nfrom torch import nn\ndef recipe():\n"
        "    return instep.Recipe(model=nn.Linear(1, 1), loss=3, optimizer=5, train=[],\n"
        "        metrics={'loss': abs}, scheduler=1)\n"
    )
    code, found, _ = check("")
    told = " ".join(each["text"] for each in found["refusals"])
    assert code == 3
    for words in ("Recipe.loss is", "length zero", "Recipe.optimizer", "Recipe.scheduler", "taken"):
        assert words in told
    assert len(found["refusals"]) == 5
    assert {each["stage"] for each in found["refusals"]} == {"recipe"}


def test_settings_that_clash_are_told_pair_by_pair(check):
    text = (
        "workers = 2\n[train]\ndeterminism = 'bits'\nema = 0.9\n[sync]\nname = 'server_async'\n"
        "[check]\ncorruption = true\n"
    )
    code, found, _ = check(text)
    told = [each["text"] for each in found["refusals"]]
    assert code == 2
    assert sum("does not go with" in text for text in told) == 3
    assert all("Leave one of the two out" in text for text in told)


STREAM = """
import torch
from torch.utils.data import IterableDataset, get_worker_info

class Numbers(IterableDataset):
    def __iter__(self):
        number = get_worker_info().id
        while True:
            yield torch.full((6,), number % 7 / 7), number % 3
            number += get_worker_info().num_workers
"""


def test_parts_of_a_stream_go_with_a_mesh_and_those_of_shards_are_refused(check, tmp_path):
    job = "workers = 2\n[train]\nsteps = 9\nglobal_batch = 16\nmicro_batches = 4\n"
    parts = '[data]\norder = "windowed"\nparts = 4\n'
    _, found, _ = check(f"{job}{parts}[mesh]\nshard = 2\n")
    told = [each["text"] for each in found["refusals"]]
    assert any("mesh.shard = 2 does not go with data.parts = 4" in text for text in told)
    text = RECIPE.replace("train=TensorDataset(x, x[:, :3].argmax(dim=1))", "train=Numbers()")
    (tmp_path / "stream.py").write_text(STREAM + text)
    for more in ("[mesh]\nshard = 2\n", "once = true\n"):
        _, found, _ = check(f"{job}{parts}{more}", recipe="stream.py:recipe")
        assert found["refusals"] == []
    assert any("are not trained on" in text for text in found["warnings"])


def test_an_error_of_the_users_own_names_its_line(check, tmp_path):
    (tmp_path / "net.py").write_text(RECIPE.replace("return self.last(", "return self.lost("))
    code, found, _ = check("")
    (refusal,) = found["refusals"]
    assert code == 5  # as a worker that fails
    assert "AttributeError" in refusal["text"]
    assert "net.py:" in refusal["where"]
    assert "self.lost" in refusal["line"]
    assert found["model"]["parameters"] == PARAMETERS


@pytest.mark.parametrize(
    ("line", "by"),
    [
        ("def recipe(", "sys.exit(0)\ndef recipe("),
        ("    x = torch.randn", "    sys.exit(0)\n    x = torch.randn"),
        ("return self.last", "return sys.exit(0) or self.last"),
    ],
)
def test_a_recipe_that_ends_the_process_is_refused(check, tmp_path, line, by):
    (tmp_path / "net.py").write_text(f"import sys\n{RECIPE.replace(line, by)}")
    code, table, _ = check()
    assert (code, table["starts"]) == (5, False)
    assert table["refusals"][0]["text"].startswith("SystemExit: 0")
    assert "net.py" in table["refusals"][0]["where"]


def test_a_dataset_that_cannot_be_read_is_of_the_data(check, tmp_path):
    broken = "train=[Broken()][0],"
    (tmp_path / "net.py").write_text(
        "class Broken:\n    def __len__(self): return 9\n"
        "    def __getitem__(self, n): raise ValueError('no file')\n"
        + RECIPE.replace("train=TensorDataset(x, x[:, :3].argmax(dim=1)),", broken)
    )
    code, found, _ = check("")
    assert code == 4
    assert found["refusals"][0]["stage"] == "data"
    assert "no file" in found["refusals"][0]["text"]
    assert found["model"]["parameters"] == PARAMETERS


def test_a_recipe_that_is_missing_leaves_the_job_checked(check):
    code, found, _ = check("[sync]\nservers = 2\n", recipe="nett.py:recipe")
    told = [each["text"] for each in found["refusals"]]
    assert code == 2
    assert any("sync.servers = 2" in text for text in told)
    assert any("there is no recipe file" in text and "net.py" in text for text in told)
    assert any("there is no recipe" in text for text in found["not_tried"])


def test_strict_refuses_what_is_not_the_same(check):
    code, found, _ = check("[sync]\ncodec = 'bfloat16'\n", "--strict")
    assert code == 2
    assert found["same_as_one_machine"]["verdict"].startswith("no: sync.codec = 'bfloat16' rounds")
    assert "check.strict = true refuses to train" in found["refusals"][0]["text"]
    assert found["memory"]["exchange_bytes"] is None


def test_a_mesh_is_said_to_be_tried_at_the_start(check):
    code, found, _ = check("workers = 4\n[mesh]\nshard = 2\n")
    assert code == 0
    assert any("shard = 2" in text for text in found["not_tried"])
    assert found["job"]["replicas"] == 2


@pytest.mark.parametrize("axis", ["tensor", "stages"])
def test_cuts_of_a_mesh_are_found_in_one_process(check, axis, tmp_path):
    net = "nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))"
    (tmp_path / "net.py").write_text(RECIPE.replace("model=Net()", f"model={net}"))
    code, found, err = check(f"workers = 4\n[mesh]\n{axis} = 2\n")
    assert (code, found["refusals"]) == (0, [])
    if axis == "stages":
        assert len(found["mesh"]["cuts"]) == 1
        assert "stages     begin with the first module" in err
    else:
        assert {"0", "2"} >= set(found["mesh"]["tensor"]) > set()
        assert "tensor     cuts 0 by" in err


def test_a_split_that_is_refused_leaves_the_rest_checked(check):
    code, found, _ = check("[data]\nsplit = 'random'\n")
    assert code == 3
    (refusal,) = found["refusals"]
    assert "there can be one validation set" in refusal["text"]
    assert found["same_as_one_machine"]["verdict"] == "yes"
    assert any("data.split" in text for text in found["not_tried"])


def test_a_model_that_is_refused_leaves_the_data_checked(check, tmp_path):
    (tmp_path / "net.py").write_text(RECIPE.replace("model=Net()", "model=nn.ReLU()"))
    code, found, _ = check("")
    assert code == 3
    (refusal,) = found["refusals"]
    assert (refusal["stage"], "no parameters to train" in refusal["text"]) == ("model", True)
    assert found["data"]["batch"][0]["shape"] == [8, 6]


def test_rounds_are_cut_into_participants(check):
    text = (
        "workers = 2\n[train]\nglobal_batch = 16\n[sync]\nname = 'averaging'\nparticipants = 4\n"
        "[sync.options]\nlocal_steps = 3\n"
    )
    code, found, _ = check(text)
    assert code == 0
    assert found["same_as_one_machine"]["verdict"].startswith("no: sync.name = 'averaging'")
    assert (found["batches"]["unit"], found["batches"]["parts"]) == ("participant", 4)
    assert found["batches"]["part_samples"] == [12]


def test_a_loop_of_ones_own_has_its_settings_checked(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text("import instep\ninstep.join(train={'epochs': 2})\n")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "own.py", "--json", "--set", "mesh.shard=2", "--workers", "2"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert "a loop of your own" in found["refusals"][0]["text"]
    assert any("a loop of your own makes them" in text for text in found["not_tried"])


def test_lines_end_with_the_command_that_starts_the_job(check, capsys):
    check(TRAIN)
    assert main(["check", "job.toml"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "check      job.toml"
    assert out[1] == "starts     yes"
    assert out[-1] == "next       instep run job.toml"
    assert any(line.startswith("memory     model") for line in out)


def test_generators_of_this_process_are_not_what_the_figures_depend_on(check):
    first = check(TRAIN)[1]
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    second = check(TRAIN)[1]
    for part in ("same_as_one_machine", "batches", "data", "model", "sent"):
        assert first[part] == second[part]
    assert first["optimizer"]["state_bytes"] == second["optimizer"]["state_bytes"]


def test_nothing_is_left_in_the_folder(check, tmp_path):
    (tmp_path / "beside.py").write_text("x = 1\n")
    (tmp_path / "net.py").write_text("import beside\n" + RECIPE)
    check(TRAIN)
    assert sorted(os.listdir(tmp_path)) == ["beside.py", "job.toml", "net.py"]


def test_help_needs_no_torch_and_shows_an_example(capsys):
    with pytest.raises(SystemExit) as end:
        main(["check", "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("Example: instep check job.toml --workers 4")


def test_live_bytes_are_those_of_storages():
    from instep.lab.check.live_bytes import LiveBytes

    known = torch.ones(10)
    with LiveBytes([known]) as counted:
        one = torch.zeros(100)
        view = one[:50]
        known.add_(1)
        two = torch.zeros(1000)
        assert counted.live == 4 * 1100
        del two
        assert (counted.live, counted.peak) == (400, 4400)
        del one
        assert counted.live == 400  # the view has the memory
    assert view.numel() == 50


def test_live_bytes_see_a_backward_pass():
    from instep.lab.check.live_bytes import LiveBytes

    layer = nn.Linear(8, 8, bias=False)
    x = torch.ones(4, 8)
    with LiveBytes([layer.weight, x]) as counted:
        torch.tanh(layer(x)).sum().backward()
    assert counted.live == layer.weight.grad.nbytes
    assert counted.peak >= 4 * 4 * 8 * 2
