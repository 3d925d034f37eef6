"""Kinds of devices in one run: which jobs can have several, and what they are refused with."""

import pytest
import torch
from msgspec import convert

from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.worker.loop.kinds import backend_of, check_kinds, kind_of

CPU, OLDER = "cpu: x86_64 AVX512", "cpu: x86_64 AVX2"
GPU, OTHER = "cuda: NVIDIA H200", "cuda: NVIDIA L4"
ORDER = JobSpec(recipe="net.py:recipe")
BITS = JobSpec(recipe="net.py:recipe", train=TrainSpec(determinism="bits"))
OF_ONE_KIND = {
    "sync.name = 'averaging'": {"sync": {"name": "averaging", "participants": 4}},
    "sync.name = 'server_sync'": {"sync": {"name": "server_sync"}},
    "sync.codec = 'int8'": {"sync": {"codec": "int8"}},
    "[sync.options]": {"sync": {"options": {"delayed": True}}},
    "[mesh]": {"mesh": {"shard": 2}},
    "train.batch_norm = 'global'": {"train": {"batch_norm": "global"}},
}
"""Jobs that devices of one kind alone can train, by what of each is refused."""


@pytest.mark.parametrize("kinds", [[CPU, OLDER], [CPU, CPU, OLDER], [GPU, OTHER], [GPU, CPU]])
def test_the_same_bits_need_one_kind_and_both_are_named(kinds: list[str]) -> None:
    check_kinds(BITS, [kinds[0]] * 3)
    with pytest.raises(SpecError, match="determinism = 'bits'") as caught:
        check_kinds(BITS, kinds)
    assert repr(kinds[0]) in str(caught.value)
    assert repr(kinds[-1]) in str(caught.value)


def test_cpus_and_gpus_sum_whole_gradients_together() -> None:
    for kinds in ([CPU, OLDER], [GPU, OTHER], [CPU], [GPU, GPU], [CPU, CPU, GPU], [GPU, OLDER]):
        check_kinds(ORDER, kinds)


@pytest.mark.parametrize("what", OF_ONE_KIND)
def test_what_a_device_keeps_for_itself_is_refused_where_some_are_gpus(what: str) -> None:
    tables = OF_ONE_KIND[what]
    job = convert({"recipe": "net.py:recipe", "workers": 4, **tables}, JobSpec)
    for alike in ([CPU, OLDER], [GPU, OTHER]):
        check_kinds(job, alike)
    with pytest.raises(SpecError, match=r"rank 0 .*AVX512' and rank 2 on 'cuda: NVIDIA H200'") as e:
        check_kinds(job, [CPU, OLDER, GPU])
    assert str(e.value).startswith(f"{what}: ")
    assert "train.device = 'cpu'" in str(e.value)


def test_only_where_all_have_gpus_they_talk_to_each_other() -> None:
    assert [backend_of([GPU, OTHER], rank) for rank in range(2)] == ["nccl"] * 2
    assert [backend_of([CPU, OLDER], rank) for rank in range(2)] == ["gloo"] * 2
    mixed = [GPU, CPU, OTHER, OLDER]
    assert [backend_of(mixed, rank) for rank in range(4)] == ["staged", "gloo"] * 2


def test_a_cpu_is_known_by_the_instructions_that_torch_uses() -> None:
    assert kind_of(torch.device("cpu")).endswith(torch.backends.cpu.get_cpu_capability())
