"""`instep plan` of emulated hosts, meshes and scripts: real processes, which leave nothing."""

import json
import tempfile
from pathlib import Path

import pytest

from instep.cli import main
from instep.lab import netlab

NO_NETWORK = netlab.why_not()

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import instep

def recipe():
    x = torch.randn(256, 20)
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 5)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        train=TensorDataset(x, x[:, :5].argmax(dim=1)),
    )
"""
SCRIPT = """
import instep, torch
from torch import nn
from torch.utils.data import TensorDataset

train = {"epochs": 100, "global_batch": 32, "micro_batches": 4}
with instep.join(train=train) as session:
    x = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(x, x[:, :5].argmax(dim=1))
    model, optimizer, loader = session.prepare(model, optimizer, data)
    for epoch in session.epochs():
        for inputs, target in loader:
            session.backward(nn.functional.cross_entropy(model(inputs), target))
            optimizer.step()
            optimizer.zero_grad()
"""
STREAM = """
import torch
from net import recipe as plain
from torch.utils.data import IterableDataset
import instep

class Endless(IterableDataset):
    def __iter__(self):
        for number in range(10_000):
            yield torch.full((20,), number / 10_000), number % 5

def recipe():
    whole = plain()
    return instep.Recipe(
        model=whole.model, loss=whole.loss, optimizer=whole.optimizer, train=Endless()
    )
"""
BY_LENGTH = """
import torch
from net import recipe as plain
import instep

def recipe():
    whole = plain()
    return instep.Recipe(
        model=whole.model,
        loss=whole.loss,
        optimizer=whole.optimizer,
        train=whole.train,
        length=[1 + number % 7 for number in range(256)],
    )
"""
JOB = """
name = "net"
recipe = "net.py:recipe"
[train]
steps = 6
global_batch = 32
micro_batches = 4
"""


@pytest.fixture
def there(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(RECIPE)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, text in (("stream", STREAM), ("length", BY_LENGTH)):
        (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / f"{name}.toml").write_text(JOB.replace("net.py", f"{name}.py"))
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} == before
    assert not list(Path(tempfile.gettempdir()).glob("instep-plan-*"))


def planned(capsys, *words):
    assert main(["plan", *words, "--seconds", "1500", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    return table, {row["way"]: row for row in table["ways"]}


@pytest.mark.process
@pytest.mark.slow
def test_meshes_are_priced_by_crews_of_their_own(there, capsys):
    table, rows = planned(capsys, "job.toml", "--most", "2", "--meshes")
    for axis in ("shard", "tensor", "stages"):
        assert f"2 all_reduce, {axis} = 2" in rows, table["refused"]
        row = rows[f"2 all_reduce, {axis} = 2"]
        assert row["measured"], table["refused"]
        assert row["same_result"]
        assert row["changes"] == [f"mesh.{axis}=2"]
        assert 0 < row["low_s"] < row["step_s"] < row["high_s"]
        assert row["sent_bytes"] > 1000
    own = [f"mesh.{key}" for key in ("shard=2", "zero=2")]
    words = [word for each in own for word in ("--set", each)]
    table, rows = planned(capsys, "job.toml", "--most", "2", *words)
    assert rows["2 all_reduce, shard = 2"]["changes"] == []
    assert rows["2 all_reduce"]["changes"] == ["mesh.shard=1", "mesh.zero=3"]


@pytest.mark.process
@pytest.mark.slow
def test_a_script_is_priced_by_short_runs_of_it(there, capsys):
    table, rows = planned(capsys, "train.py", "--most", "2")
    assert set(rows) == {"1 worker", "2 all_reduce"}
    for row in rows.values():
        assert row["measured"]
        assert row["worker_bytes"] > 50e6
    assert rows["2 all_reduce"]["sent_bytes"] > 4 * 2605
    assert table["next"][0].startswith("instep run train.py --workers ")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(NO_NETWORK is not None, reason=str(NO_NETWORK))
def test_crews_of_emulated_hosts_take_steps_over_their_links(there, capsys):
    """At 4 Mbit/s the gradients alone take longer than all else, and nothing is simulated."""
    emulated = "--hosts", "2", "--rate", "4mbit", "--emulated", "--most", "2"
    table, rows = planned(capsys, "job.toml", *emulated)
    alike = {"workers": 2, "strategy": "all_reduce", "codec": "none", "mesh": ""}
    (pair,) = [each for each in table["crews"] if alike.items() <= each.items()]
    assert (pair["hosts"], pair["bits_per_s"]) == (2, 4e6)
    row = rows["2 all_reduce"]
    assert row["step_s"] == pytest.approx(pair["whole_s"], rel=0.02)
    assert row["step_s"] > 4 * 2605 / (4e6 / 8)
    assert not any("simulated" in note for note in table["notes"])


@pytest.mark.process
@pytest.mark.slow
def test_servers_that_lease_are_not_offered_for_a_stream(there, capsys):
    assert main(["plan", "stream.toml", "--most", "2", "--seconds", "0", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    refused = {each["name"]: each["why"] for each in table["refused"]}
    (stale,) = [name for name in refused if "bounded_stale" in name]
    assert "a stream (IterableDataset) does not go with sync.name" in refused[stale]
    assert "2 all_reduce, int8" not in refused
    assert stale not in {row["way"] for row in table["ways"]}


@pytest.mark.process
@pytest.mark.slow
def test_a_job_whose_batches_are_made_by_length_is_priced_by_these(there, capsys):
    tokens = "--set", "train.tokens_per_batch=64"
    words = "length.toml", "--most", "2", "--seconds", "0", *tokens
    assert main(["plan", *words, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["job"]["global_batch"] == 16  # of a mean length of 4
    assert (table["job"]["tokens_per_batch"], table["job"]["steps"]) == (64, 6)
    assert table["best"] == "1 worker"
    refused = {each["name"]: each["why"] for each in table["refused"]}
    assert "train.tokens_per_batch" in refused["2 diloco"]
