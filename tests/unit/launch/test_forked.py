"""Which recipes of a notebook or a prompt are refused, before anything is forked."""

import pytest
import torch

from instep.errors import RecipeError, SpecError
from instep.job import file as spec_file
from instep.launch.forked import ForkedLauncher


def job(**more):
    return spec_file.build({"recipe": "/nowhere/ipykernel_1/2.py:recipe", **more}, source="here")


def test_once_cuda_has_started_the_recipe_is_refused_with_what_to_do(monkeypatch):
    ForkedLauncher.of(job())
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # what a fork would be told
    with pytest.raises(RecipeError, match=r"CUDA has started in this process.*Restart the kernel"):
        ForkedLauncher.of(job())


@pytest.mark.parametrize("more", [{"train": {"threads": 2}}, {"launch": {"on": "ray"}}])
def test_what_forks_cannot_do_is_refused(more):
    with pytest.raises(SpecError, match=r"into a \.py file"):
        ForkedLauncher.of(job(**more))
