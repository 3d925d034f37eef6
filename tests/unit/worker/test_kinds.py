"""Kinds of devices in one run: which jobs can have several, and what they are refused with."""

import pytest
import torch

from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.worker.loop.kinds import check_kinds, kind_of

CPU, OLDER = "cpu: x86_64 AVX512", "cpu: x86_64 AVX2"
GPU, OTHER = "cuda: NVIDIA H200", "cuda: NVIDIA L4"
ORDER = JobSpec(recipe="net.py:recipe")
BITS = JobSpec(recipe="net.py:recipe", train=TrainSpec(determinism="bits"))


@pytest.mark.parametrize("kinds", [[CPU, OLDER], [CPU, CPU, OLDER], [GPU, OTHER], [GPU, CPU]])
def test_the_same_bits_need_one_kind_and_both_are_named(kinds: list[str]) -> None:
    check_kinds(BITS, [kinds[0]] * 3)
    with pytest.raises(SpecError, match="determinism = 'bits'") as caught:
        check_kinds(BITS, kinds)
    assert repr(kinds[0]) in str(caught.value)
    assert repr(kinds[-1]) in str(caught.value)


def test_cpus_and_gpus_are_refused_before_they_wait_for_each_other() -> None:
    for alike in ([CPU, OLDER], [GPU, OTHER], [CPU], [GPU, GPU]):
        check_kinds(ORDER, alike)
    with pytest.raises(SpecError, match=r"rank 2 on 'cuda: NVIDIA H200'.*train\.device = 'cpu'"):
        check_kinds(ORDER, [CPU, CPU, GPU])


def test_a_cpu_is_known_by_the_instructions_that_torch_uses() -> None:
    assert kind_of(torch.device("cpu")).endswith(torch.backends.cpu.get_cpu_capability())
