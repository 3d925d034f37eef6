"""What `instep data JOB` says, against plain counts over the same samples."""

import json

import numpy as np
import pytest

from instep.cli import main
from instep.data.shards.dataset import Shards
from instep.data.shards.encode import encode
from instep.data.shards.manifest import Manifest, Shard, write_manifest
from instep.data.shards.writer import ShardWriter
from instep.errors import SpecError
from instep.job.file import load
from instep.lab.about_data import about_data

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import instep

inputs = torch.arange(40.0).reshape(40, 1)
inputs[39] = inputs[0]
labels = torch.arange(40) % 4
labels[39] = labels[0]

def recipe():
    return instep.Recipe(
        model=nn.Linear(1, 4), train=TensorDataset(inputs, labels), loss=nn.CrossEntropyLoss(),
        labels=labels.tolist(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)

    def loaded(text):
        (tmp_path / "job.toml").write_text(f"recipe = 'net.py:recipe'\n{text}")
        return load(tmp_path / "job.toml")

    return loaded


def test_sides_classes_and_what_is_on_both(job, capsys):
    made = job("[data]\nsplit = 'blocks'\nvalidation = 0.25\n")
    about = about_data(made, sample=7)
    assert (about.train, about.validate, about.left_out) == (30, 10, 0)
    labels = [*(i % 4 for i in range(39)), 0]
    for side, found in ((labels[:30], about.classes[0]), (labels[30:], about.classes[1])):
        assert found == {str(name): side.count(name) for name in range(4)}
    assert about.twins.looked_at == [30, 10]
    assert about.twins.twins == [(9, 0)]  # the last sample is the first one, once more
    assert about.sample[0].item() == 7
    assert main(["data", "job.toml", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["train"], said["on_both_sides"], said["compared"]) == (30, 1, [30, 10])
    assert main(["data", "job.toml"]) == 0
    out = capsys.readouterr().out
    assert "lengths    the same in all of 30 samples that were read" in out
    assert "leaks      1 of 10 samples to validate on are among 30 to train on" in out


def test_all_samples_are_compared_where_a_choice_shows_nothing(job, tmp_path, capsys):
    made = job("[data]\nsplit = 'blocks'\nvalidation = 0.5\n")
    many = RECIPE.replace("40", "9000").replace("[39]", "[8999]")
    (tmp_path / "net.py").write_text(many)
    assert about_data(made).twins.twins == []  # 2,000 of 4,500 of each
    assert main(["data", "job.toml", "--duplicates", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["on_both_sides"], said["compared"]) == (1, [4500, 4500])


def test_comparing_all_samples_needs_two_sides(job, tmp_path, capsys):
    job("")
    assert main(["data", "job.toml", "--duplicates"]) == 2
    assert "there are none" in capsys.readouterr().err
    assert main(["data", str(tmp_path), "--duplicates"]) == 2
    assert "is no job file" in capsys.readouterr().err


OF_TEXT = RECIPE.replace(
    "train=TensorDataset(inputs, labels)",
    "train=[(torch.zeros(1 + 7 * n % 40, 3), 'x' * 300, n % 4) for n in range(40)]",
)


def test_lengths_of_what_differs_and_a_sample_in_json_that_no_array_makes_long(
    job, tmp_path, capsys
):
    job("")
    (tmp_path / "net.py").write_text(OF_TEXT)
    sizes = np.array([1 + 7 * n % 40 for n in range(40)])
    assert main(["data", "job.toml", "--sample", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["measured"] == 40
    assert said["lengths"]["0"] == pytest.approx(
        {
            "samples": 40,
            "mean": sizes.mean(),
            "deviation": sizes.std(),
            "least": 1,
            "largest": sizes.max(),
        }
    )
    assert list(said["lengths"]) == ["0"]
    first = {"shape": [22, 3], "dtype": "float32", "first": [0.0] * 8}
    text = {"text": "x" * 200, "length": 300}
    assert said["sample"] == {"number": 3, "values": {"0": first, "1": text, "2": 3}}
    assert main(["data", "job.toml", "--sample", "3"]) == 0
    out = capsys.readouterr().out
    assert "lengths    0: 1 to 40, mean 20.5000 (of 40 samples that were read)" in out
    assert "           0: float32 [22, 3]: 0, 0, 0, 0, 0, 0, 0, 0, ...\n" in out


def test_parts_of_participants_and_how_far_their_labels_are_from_all(job):
    options = "[sync]\nname = 'averaging'\nparticipants = 3\n"
    options = f"[train]\nglobal_batch = 3\n{options}"
    made = job(f"{options}[sync.options]\npartition = 'blocks'\n")
    about = about_data(made)
    labels = np.array([*(i % 4 for i in range(39)), 0])
    whole, begin = np.bincount(labels, minlength=4) / 40, 0
    assert sum(part.samples for part in about.parts) == 40
    for part in about.parts:
        own = np.bincount(labels[begin : begin + part.samples], minlength=4) / part.samples
        wanted = sum(p * np.log(p / q) for p, q in zip(own, whole, strict=True) if p)
        assert part.skew == pytest.approx(wanted, abs=1e-12)
        assert part.share == part.samples / 40
        begin += part.samples


def test_a_sample_that_is_not_there_is_refused(job):
    with pytest.raises(SpecError, match="the training side has 40 samples"):
        about_data(job(""), sample=40)


IN_PARTS = """
import torch
from torch import nn
import instep
from instep.data.sources import shards

def recipe():
    return instep.Recipe(
        model=nn.Linear(1, 1), train=shards("here"), compute_loss=lambda model, batch: batch["n"],
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )
"""


def test_the_parts_of_a_set_on_hosts_and_what_of_them_is_here(job, tmp_path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    samples = [{"n": float(number)} for number in range(40)]
    shards = []
    for number in range(4):
        encoded = encode(samples[number * 10 : number * 10 + 10], None)
        with ShardWriter(tmp_path / "here" / f"{number}.arrow", encoded.columns) as writer:
            writer.write(encoded.views)
            writer.close()
        shards.append(Shard(f"{number}.arrow", 10, writer.bytes))
    manifest = Manifest(
        columns=encoded.columns, samples=40, bytes=1, sha256="s", bad=0, shards=shards
    )
    write_manifest(tmp_path / "here", manifest)
    (tmp_path / "here" / "3.arrow").unlink()
    job("[data]\norder = 'windowed'\nparts = 2\n")
    (tmp_path / "net.py").write_text(IN_PARTS)
    looked = []
    held = Shards.held.fget
    monkeypatch.setattr(Shards, "held", property(lambda each: looked.append(each) or held(each)))
    assert main(["data", "job.toml"]) == 0
    assert len(looked) == 1  # for all parts
    out = capsys.readouterr().out
    assert "part 0     20 samples (50.0%), 2 of 2 shards here: 0.arrow to 1.arrow" in out
    assert "part 1     20 samples (50.0%), 1 of 2 shards here: 2.arrow to 3.arrow" in out


def test_the_folders_of_a_job_are_compared_with_their_checksums(job, tmp_path, capsys):
    job("")
    (tmp_path / "net.py").write_text(IN_PARTS)
    (tmp_path / "raw.jsonl").write_text("".join(f'{{"n": {n}.5}}\n' for n in range(40)))
    assert main(["prepare", "raw.jsonl", "--to", "here", "--workers", "1"]) == 0
    assert main(["data", "job.toml", "--verify"]) == 0
    assert "verified   all samples" in capsys.readouterr().out
    (shard,) = (tmp_path / "here").glob("*.arrow")
    good = shard.read_bytes()
    at = good.index(np.array([7.5, 8.5]).tobytes())
    shard.write_bytes(good[:at] + b"x" + good[at + 1 :])
    assert main(["data", "job.toml", "--verify", "--json"]) == 4
    told = capsys.readouterr()
    (text,) = json.loads(told.out.splitlines()[-1])["damaged"]
    assert text.startswith("samples 0 to 39 are not what was written (shard-")
    assert "here is damaged in 1 place. Remove the files that are named" in told.err
    (tmp_path / "plain.py").write_text(RECIPE)
    (tmp_path / "job.toml").write_text("recipe = 'plain.py:recipe'\n")
    assert main(["data", "job.toml", "--verify"]) == 2
    assert "--verify compares samples with the checksums of a prepared" in capsys.readouterr().err
