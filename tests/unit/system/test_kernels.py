"""On how many threads a worker computes."""

import pytest
import torch

from instep.job.train import TrainSpec
from instep.system.kernels import set_threads, share


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.get_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "workers", "hosts", "own"),
    [(8, 1, 0, 8), (8, 3, 0, 2), (8, 16, 0, 1), (8, 4, 2, 4), (8, 5, 2, 2), (1, 1, 3, 1)],
)
def test_workers_share_the_cores_of_their_machine(cores, workers, hosts, own):
    assert share(cores, workers, hosts) == own


@pytest.mark.parametrize(
    ("train", "used"),
    [
        ({}, 2),
        ({"threads": 3}, 3),
        ({"determinism": "bits"}, 1),
        ({"determinism": "bits", "threads": 3}, 3),
    ],
)
def test_a_share_is_used_where_the_job_does_not_say_and_bits_do_not_depend_on_it(
    threads, train, used
):
    set_threads(TrainSpec(**train), 2)
    assert threads() == used
