"""A strategy by its name, with its options checked and misuse told apart."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks
from instep.engine.gradients import Gradients
from instep.errors import SpecError, WorkerError
from instep.job.sync.rounds import OF_FRAGMENTS
from instep.job.sync.tables import STRATEGY_ROWS, defaults_of
from instep.sync.all_reduce import AllReduce
from instep.sync.base import Price, make_strategy
from instep.sync.generation import Generation


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("all_redcue", {}, "no sync strategy is called 'all_redcue'. Did you mean 'all_reduce'?"),
        ("all_reduce", {"bucket_md": 1}, "all_reduce has no option 'bucket_md'"),
        ("all_reduce", {"bucket_md": 1}, "Did you mean 'bucket_mb'? Known: bucket_mb,"),
        ("all_reduce", {"bucket_mb": 0}, "sync.options.bucket_mb = 0: needs a number above 0"),
        ("all_reduce", {"bucket_mb": -1.5}, "bucket_mb = -1.5"),
        ("all_reduce", {"bucket_mb": "8"}, "bucket_mb = '8'"),
        ("all_reduce", {"bucket_mb": True}, "bucket_mb = True"),
        ("all_reduce", {"bucket_mb": math.nan}, "bucket_mb = nan: needs a number above 0"),
        ("averaging", {"bucket_mb": math.inf}, "bucket_mb = inf: needs a number above 0"),
        ("all_reduce", {"codec": "int8"}, "all_reduce has no option 'codec'"),
        ("all_reduce", {"overlap": 1}, "sync.options.overlap = 1: needs to be true or false"),
    ],
)
def test_a_wrong_name_or_option_is_refused(name, options, words):
    with pytest.raises(SpecError) as error:
        make_strategy(name, options)
    assert words in str(error.value)


@pytest.mark.parametrize("name", [name for name, row in STRATEGY_ROWS.items() if row.rounds])
def test_the_options_that_a_strategy_is_said_to_know_are_its_own(name):
    make_strategy(name, defaults_of(name))  # as a run writes them down
    with pytest.raises(SpecError) as error:
        make_strategy(name, {"bucket_md": 1})
    known = str(error.value).partition("Known: ")[2].rstrip(".").split(", ")
    assert "local_steps" in known
    assert OF_FRAGMENTS.issubset(known) == (name == "diloco")
    assert OF_FRAGMENTS.isdisjoint(known) == (name != "diloco")


def test_options_are_checked_with_a_codec_too():
    with pytest.raises(SpecError, match="all_reduce has no option 'codec'"):
        make_strategy("all_reduce", {"codec": "int8"}, "int8")


@pytest.mark.parametrize(
    ("codec", "options", "words"),
    [
        ("int7", {}, "no codec is called 'int7'. Did you mean 'int8'?"),
        (
            "int8",
            {"blok": 64},
            "sync.codec_options: int8 has no option 'blok'. Did you mean 'block'?",
        ),
        ("int4", {"block": 100}, "sync.codec_options.block = 100: needs a power of two"),
        ("bfloat16", {"block": 64}, "bfloat16 has no option 'block'. There are none."),
        ("none", {"block": 64}, "sync.codec_options: none has no option 'block'. There are none."),
    ],
)
def test_a_wrong_codec_or_option_of_one_is_refused(codec, options, words):
    with pytest.raises(SpecError) as error:
        make_strategy("all_reduce", {}, codec, options)
    assert words in str(error.value)


def test_the_price_of_a_ring_is_that_of_the_textbook():
    assert AllReduce.price(1000, 1) == Price(0, 0)
    assert AllReduce.price(1000, 4) == Price(1500, 6)


class Twice(nn.Module):
    """Uses one layer inside and outside of a re-entrant checkpoint."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(checkpoint(self.layer, x, use_reentrant=True))


MODEL = Twice()


def trained_twice(comm, overlap):
    model = copy.deepcopy(MODEL)
    strategy = make_strategy("all_reduce", {"overlap": overlap, "bucket_mb": 1e-6})
    parameters = [nn.Parameter(torch.ones(1)), *model.parameters()]
    strategy.start(parameters, comm, Generation(notes=1))
    gradients = Gradients(parameters, strategy.gradient)
    strategy.begin_pass(1 / comm.size, last=True)
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    gradients.close()
    strategy.exchange(torch.zeros(1, dtype=torch.float64))
    strategy.hand_out()
    return strategy.apply(lambda: model.layer.weight.grad.clone())


def test_a_second_gradient_after_the_first_was_sent_is_refused_with_the_way_out():
    with pytest.raises(WorkerError, match=r"sync\.options\.overlap = false"):
        run_ranks(2, trained_twice, True)


def test_without_overlap_a_re_entrant_checkpoint_gives_the_true_gradient():
    model = copy.deepcopy(MODEL)
    model.layer(model.layer(torch.ones(1, 2))).sum().backward()
    for grad in [*run_ranks(2, trained_twice, False), trained_twice(AloneComm(), True)]:
        torch.testing.assert_close(grad, model.layer.weight.grad)


CONVOLUTION, IMAGES = nn.Conv2d(3, 4, 2), torch.randn(1, 3, 2, 2)


def handed_out(comm):
    """What a fused optimizer makes of weights that lie in memory as images do."""
    model = copy.deepcopy(CONVOLUTION).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    if comm is None:
        model(IMAGES).square().sum().backward()
        optimizer.step()
        return model.weight.detach()
    strategy = make_strategy("all_reduce", {})
    parameters = list(model.parameters())
    strategy.start(parameters, comm, Generation(notes=1))
    gradients = Gradients(parameters, strategy.gradient)
    strategy.begin_pass(1 / comm.size, last=True)
    model(IMAGES).square().sum().backward()
    gradients.close()
    strategy.exchange(torch.zeros(1, dtype=torch.float64))
    strategy.hand_out()
    strategy.apply(optimizer.step)
    return model.weight.detach()


def test_a_fused_optimizer_moves_parameters_whose_memory_is_in_another_order():
    for weight in [*run_ranks(2, handed_out), handed_out(AloneComm())]:
        torch.testing.assert_close(weight, handed_out(None))
