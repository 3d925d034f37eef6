"""Which device a worker computes on: by its number among the workers of its machine."""

import pytest
import torch

from instep.errors import SpecError
from instep.job import file as spec_file
from instep.worker.training.devices import choose_device


@pytest.fixture
def gpus(monkeypatch):
    """Have the machine say that it has so many."""
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def job(device, workers=4, **more):
    table = {"recipe": "a.py:f", "workers": workers, "train": {"device": device}, **more}
    return spec_file.build(table, source="a test")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_worker_has_the_gpu_of_its_number_on_its_machine(gpus, device):
    gpus(2)  # of each of two machines
    assert [choose_device(job(device), n, 2) for n in (0, 1)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]


def test_where_a_machine_has_more_workers_than_gpus_they_compute_on_the_cpu_or_are_refused(gpus):
    gpus(2)
    assert choose_device(job("auto"), 0, 4) == torch.device("cpu")
    assert choose_device(job("auto"), 2, 2) == torch.device("cpu")  # it took in those of another
    with pytest.raises(SpecError, match="has 2 GPUs, and 2 workers or more"):
        choose_device(job("cuda"), 2, 2)


@pytest.mark.parametrize(
    ("name", "determinism", "options"),
    [
        ("averaging", "bits", {"clip": 1.0, "partition": "blocks"}),
        ("diloco", "order", {"fragments": 2, "local_steps": 4}),
        ("server_async", "order", {}),
    ],
)
def test_what_is_summed_on_the_cpu_is_computed_there(gpus, name, determinism, options):
    gpus(4)
    sync = {"name": name, "participants": 4, "options": options}
    asked = job("auto", sync=sync, train={"device": "auto", "determinism": determinism})
    assert choose_device(asked, 0, 4) == torch.device("cpu")
