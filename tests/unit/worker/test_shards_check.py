"""The windowed order follows from shards, so these are compared."""

import json
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from instep.comm.memory import run_ranks
from instep.data.loader import Loader
from instep.data.windowed import Windowed
from instep.engine.alike import check_shards
from instep.errors import DataError, RecipeError
from instep.job import file as spec_file
from instep.worker.reading.dataset_check import check_datasets

DATA = TensorDataset(torch.arange(10))


def test_a_run_is_not_resumed_with_other_shards(tmp_path):
    job = spec_file.build({"recipe": "a.py:f", "data": {"order": "windowed"}}, source="a test")
    (tmp_path / "job.toml").write_text(spec_file.dump(job))
    events = tmp_path / "events.jsonl"

    def emit(event, **fields):
        with events.open("a") as file:
            file.write(json.dumps({"event": event, "time": 1.0, **fields}) + "\n")

    def start(sizes, checkpoint):
        member = SimpleNamespace(run=tmp_path, job=job, checkpoint=checkpoint, emit=emit)
        options = {"seed": 1, "shuffle": True, "processes": 0}
        with closing(Loader(DATA, order=Windowed(sizes, 3, 1), **options)) as loader:
            check_datasets(member, loader, None)

    start([5, 5], None)
    start([5, 5], tmp_path / "checkpoint")
    assert json.loads(events.read_text().splitlines()[-1])["shards"] == [[5, 2]]
    with pytest.raises(DataError, match="in other shards than when the run was started"):
        start([4, 6], tmp_path / "checkpoint")


def test_workers_with_other_shards_do_not_train_together():
    def check(comm):
        sizes = [4, 6] if comm.rank == 1 else [5, 5]
        check_shards(comm, torch.device("cpu"), Windowed(sizes, 3, 1).digest)

    with pytest.raises(
        RecipeError, match="rank 1 has the training set in other shards or parts than rank"
    ):
        run_ranks(2, check)
