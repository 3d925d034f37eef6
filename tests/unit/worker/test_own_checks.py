"""What the user's code does to parameters that other processes would not do alike, is found."""

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.job.start import LoraSpec
from instep.job.train import TrainSpec
from instep.worker.own.checks import Guard, refuse


def guarded(model=None, *, alone=False):
    model = model or nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, alone=alone)
    guard.begin_step()
    return model, optimizer, guard


def test_a_parameter_that_is_written_to_between_the_passes_of_a_step_is_named():
    model, _, guard = guarded()
    guard.check_written(1)
    with torch.no_grad():
        model[1].weight.clamp_(-0.1, 0.1)
    with pytest.raises(SpecError, match=r"step 1: the parameter '1.weight' was written to"):
        guard.check_written(1)
    guard.begin_step()  # after the step it may be
    guard.check_written(2)


def test_an_embedding_with_a_largest_norm_is_found_unless_a_step_is_one_pass():
    embedding = nn.Embedding(5, 3, max_norm=0.01)
    _, _, guard = guarded(embedding)
    embedding(torch.arange(5))
    with pytest.raises(SpecError, match="as an embedding with max_norm does"):
        guard.check_written(1)
    _, _, guard = guarded(embedding, alone=True)
    with torch.no_grad():
        embedding.weight.mul_(2)
    guard.check_written(1)


def test_a_parameter_that_is_trained_only_after_prepare_is_refused():
    model = nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 2))
    _, _, guard = guarded(model)
    guard.check_trained()
    model[0].requires_grad_(True)
    with pytest.raises(SpecError, match=r"'0.weight' needs a gradient now, and did not at prep"):
        guard.check_trained()


def test_a_group_that_the_optimizer_is_given_after_prepare_is_refused():
    _, optimizer, guard = guarded()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(SpecError, match="holds 5 parameters now, and held 4 at prepare"):
        guard.check_trained()


@pytest.mark.parametrize("zeros", [True, False])
def test_a_gradient_that_would_be_zero_and_is_none_is_refused_where_zeros_are_wanted(zeros):
    model, _, guard = guarded()
    guard.leaves_zeros = zeros
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    guard.check_zeros(1)
    model[0].bias.grad = None
    if zeros:
        with pytest.raises(SpecError, match=r"step 2: no batch used the parameter '0.bias'"):
            guard.check_zeros(2)
    else:
        guard.check_zeros(2)


@pytest.mark.parametrize(("far", "found"), [(0.0, False), (1e-6, False), (0.5, True)])
def test_processes_whose_models_have_drifted_apart_say_so(far, found):
    """By more than rounding, which machines of several kinds do differently."""

    def one_rank(comm):
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.copy_(torch.arange(6.0).view(2, 3))
            model.bias.fill_(1.0 + far * (comm.rank == 1))
        try:
            guarded(model)[2].compare(comm)
        except SpecError as error:
            return str(error)
        return ""

    for told in run_ranks(3, one_rank):
        assert ("'bias' has other values in process 1 than in process 0" in told) == found


def test_a_length_in_steps_that_an_own_loop_would_not_keep_is_refused():
    job = JobSpec(recipe="own.py:main", train=TrainSpec(steps=7))
    with pytest.raises(SpecError, match=r"train.steps = 7: your own loop says how long"):
        refuse(job)


def test_adapters_that_an_own_loop_would_not_get_are_refused():
    job = JobSpec(recipe="own.py:main", lora=LoraSpec(modules=("*.q_proj",)))
    with pytest.raises(SpecError, match=r"\[lora\] is set, but your own loop makes model"):
        refuse(job)
