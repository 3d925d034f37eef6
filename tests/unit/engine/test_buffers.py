"""Buffers that passes move are agreed on, counted once a step, and restored in between."""

import pytest
import torch
from torch import nn

from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks
from instep.engine.state.buffers import Buffers
from instep.errors import RecipeError


class Counter(nn.Module):
    """One buffer of each sort: moved in place, replaced, never moved, not there."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.full((2,), 10.0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        self.count = self.count + 1
        return x * self.weight


def committed(model, buffers):
    """One step of one rank."""
    buffers.exchange(buffers.marks(), AloneComm())
    buffers.apply()
    return model


def test_each_pass_starts_from_the_committed_buffers():
    model = Counter()
    buffers = Buffers(model)
    mean = model.mean
    model(torch.full((4, 2), 6.0))
    assert buffers.after_pass(0.5, 0)
    assert model.mean is mean
    assert model.mean.tolist() == [10, 10]
    assert int(model.count) == 0


def test_a_step_is_the_mean_of_its_passes_by_weight_and_counts_once():
    model = Counter()
    buffers = Buffers(model)
    for value, weight in ((6.0, 0.25), (2.0, 0.75)):
        model(torch.full((4, 2), value))
        buffers.after_pass(weight, 0)
    committed(model, buffers)
    assert model.mean.tolist() == [0.25 * 8 + 0.75 * 6] * 2
    assert int(model.count) == 1


def test_statistics_that_only_the_pass_of_the_whole_batch_moves_are_its_own():
    """Torch does not count what a BatchNorm writes to them."""
    model = nn.BatchNorm1d(2)
    buffers, plain = Buffers(model), nn.BatchNorm1d(2)
    for step in range(3):
        for number in range(2):
            buffers.after_pass(0.5, number)
        batch = torch.full((4, 2), float(step)) + torch.arange(4.0)[:, None]
        model(batch)
        plain(batch)
        buffers.after_pass(1.0, 2, beside=True)
        committed(model, buffers)
        torch.testing.assert_close(model.running_mean, plain.running_mean)
        torch.testing.assert_close(model.running_var, plain.running_var)
    assert int(model.num_batches_tracked) == 3


def in_place(model):
    model.mean.add_(1)


def another_tensor(model):
    model.mean = model.mean + 1


def by_its_data(model):
    model.mean.data += 1  # which torch does not count


@pytest.mark.parametrize("hook", [in_place, another_tensor, by_its_data])
@pytest.mark.parametrize("passes", [1, 3])
def test_what_a_hook_of_the_optimizer_writes_is_there_in_every_pass_of_the_next_step(hook, passes):
    model = Counter()
    buffers = Buffers(model)
    mean, expected = model.mean, 10.0
    for _ in range(3):
        for number in range(passes):
            assert model.mean.tolist() == [expected] * 2
            model(torch.full((4, 2), 6.0))
            buffers.after_pass(1 / passes, number)
        committed(model, buffers)
        hook(model)
        buffers.after_update()
        expected = (expected + 6) / 2 + 1
        assert model.mean is mean
        assert id(mean) in buffers.moved
    model(torch.zeros(4, 2))
    buffers.undo()
    assert model.mean.tolist() == [expected] * 2
    assert int(model.count) == 3


def test_a_hook_that_changes_the_shape_of_a_buffer_is_refused():
    model = Counter()
    buffers = Buffers(model)
    model.mean = torch.zeros(3)
    with pytest.raises(RecipeError, match=r"a hook of the optimizer changed the buffer 'mean'"):
        buffers.after_update()


def test_running_statistics_of_batch_normalisation_are_the_mean_over_passes():
    model = nn.BatchNorm1d(3)
    buffers = Buffers(model)
    apart = [torch.randn(4, 3), 5 + torch.randn(4, 3)]
    for batch in apart:
        model(batch)
        assert buffers.after_pass(0.5, 0)
        assert model.running_mean.tolist() == [0, 0, 0]
    committed(model, buffers)
    expected = 0.1 * torch.stack([batch.mean(0) for batch in apart]).mean(0)
    torch.testing.assert_close(model.running_mean, expected)
    spread = 0.9 + 0.1 * torch.stack([batch.var(0) for batch in apart]).mean(0)
    torch.testing.assert_close(model.running_var, spread)
    assert int(model.num_batches_tracked) == 1


def test_statistics_that_a_layer_moves_without_counting_are_found_by_their_values():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("var", torch.ones(3))

        def forward(self, x):
            return nn.functional.batch_norm(x, self.mean, self.var, training=True)

    model = Bare()
    buffers = Buffers(model)
    for _ in range(2):
        model(3 + torch.randn(5, 3))
        assert buffers.after_pass(1.0, 0)
        before = model.mean.clone()
        committed(model, buffers)
        assert (model.mean > before).all()


def test_batch_normalisation_that_thaws_later_is_followed_from_then_on():
    model = nn.BatchNorm1d(3).eval()
    buffers = Buffers(model)
    model(torch.randn(4, 3))
    assert not buffers.after_pass(1.0, 0)
    model.train()
    model(5 + torch.randn(4, 3))
    assert buffers.after_pass(1.0, 0)
    assert model.running_mean.tolist() == [0, 0, 0]
    committed(model, buffers)
    assert (model.running_mean > 0).all()


def test_buffers_that_nothing_moves_stay_as_they_are_and_cost_no_message():
    class Silent(AloneComm):
        def all_reduce(self, tensor):
            raise AssertionError("something was sent")

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    buffers = Buffers(model)
    model(torch.randn(4, 2))
    assert not buffers.after_pass(1.0, 0)
    assert buffers.marks() == [0.0] * 3
    buffers.exchange(buffers.marks(), Silent())
    buffers.apply()


def test_a_constant_mask_of_infinities_survives_beside_buffers_that_move():
    model = Counter()
    buffers = Buffers(model)
    for _ in range(3):
        model(torch.ones(4, 2))
        buffers.after_pass(1 / 3, 0)
        model(torch.ones(4, 2))
        buffers.after_pass(2 / 3, 0)
        committed(model, buffers)
    assert model.mask.tolist() == [0.0, -torch.inf]


def test_a_buffer_that_was_infinite_takes_its_first_finite_value():
    class Largest(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("largest", torch.tensor(-torch.inf))

        def forward(self, x):
            self.largest.copy_(torch.maximum(self.largest, x.max()))
            return x

    model = Largest()
    buffers = Buffers(model)
    for weight in (1 / 3, 1 / 3, 1 / 3):
        model(torch.tensor([2.0, 1.0]))
        buffers.after_pass(weight, 0)
    committed(model, buffers)
    assert float(model.largest) == 2


def test_a_buffer_of_two_modules_is_counted_once():
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    second.running_mean = first.running_mean
    assert len(Buffers(nn.ModuleList([first, second]))) == 5


def test_ranks_with_different_passes_and_with_none_hold_the_same_buffers():
    batches = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1))
    dealt = {0: [0], 1: [], 2: [1, 2, 3]}

    def body(comm):
        model = nn.BatchNorm1d(3)
        buffers = Buffers(model)
        for number in range(4) if comm.size == 1 else dealt[comm.rank]:
            model(batches[number])
            buffers.after_pass(0.25, 0)
        marks = torch.tensor(buffers.marks())
        comm.all_reduce(marks).wait()
        buffers.exchange(marks.tolist(), comm)
        buffers.apply()
        return torch.cat([model.running_mean, model.running_var, model.num_batches_tracked[None]])

    (alone,) = run_ranks(1, body)
    together = run_ranks(3, body)
    assert all(torch.equal(one, together[0]) for one in together)
    torch.testing.assert_close(together[0], alone)


class Writer(nn.Module):
    """Writes, in its forward pass, to whatever `write` says."""

    def __init__(self, write):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.target = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("late", None)
        self.register_buffer("table", torch.ones(2))
        self.write = write

    def forward(self, x):
        self.write(self)
        return x * self.weight


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda m: m.target.mul_(2), "frozen.*'target'"),
        (lambda m: setattr(m, "table", torch.ones(2, dtype=torch.cfloat)), "'table'.*must be real"),
    ],
)
def test_what_workers_could_not_agree_on_is_refused(write, words):
    model = Writer(write)
    buffers = Buffers(model)
    with torch.no_grad():
        model(torch.ones(2))
    with pytest.raises(RecipeError, match=words):
        buffers.after_pass(1.0, 0)


def test_an_optimizers_hook_may_write_to_a_frozen_parameter():
    """As a moving average of the weights does, on every worker alike; it is no pass."""
    model = Writer(lambda m: None)
    buffers = Buffers(model)
    with torch.no_grad():
        model.target.mul_(2)
        buffers.after_update()
        model(torch.ones(2))
        assert not buffers.after_pass(1.0, 0)
        model.target.mul_(2)
    with pytest.raises(RecipeError, match="frozen"):
        buffers.after_pass(1.0, 1)


class Now(nn.Module):
    """Batch normalisation in some passes only; torch does not count how its statistics move."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.norm.num_batches_tracked = None

    def forward(self, inputs):
        return self.norm(inputs) if inputs[0, 0] > 0 else inputs


def test_statistics_that_move_only_in_a_later_pass_are_seen():
    model = Now().train()
    buffers = Buffers(model)
    model(-torch.ones(4, 2))
    assert not buffers.after_pass(0.5, 0)
    model(torch.rand(4, 2) + 1)
    assert buffers.after_pass(0.5, 1)
    assert torch.equal(model.norm.running_mean, torch.zeros(2))


def test_a_pass_that_broke_off_leaves_no_trace():
    model = nn.BatchNorm1d(2).train()
    buffers = Buffers(model)
    model(torch.rand(4, 2) + 1)
    buffers.after_pass(0.5, 0)
    model(torch.rand(4, 2) + 1)  # and the backward pass after it raises
    buffers.undo()
    assert torch.equal(model.running_mean, torch.zeros(2))
    assert model.num_batches_tracked == 0
    assert buffers.marks() == [0.0] * 3


@pytest.mark.parametrize("parts", [0, 4])
def test_what_was_left_out_of_a_step_falls_to_the_passes_that_were_run(parts):
    model = Counter()
    buffers = Buffers(model, parts=parts)
    for number, (value, weight) in enumerate(((6.0, 0.25), (2.0, 0.5))):
        model(torch.full((4, 2), value))
        buffers.after_pass(weight, number)
    buffers.exchange(buffers.marks(), AloneComm(), read=0.75)
    buffers.apply()
    torch.testing.assert_close(model.mean, torch.full((2,), (8 + 2 * 6) / 3))
    assert int(model.count) == 1


def by_assignment(module, value):
    module.first = value if module.first is None else (module.first + value) / 2
    module.range = value if not module.range.numel() else (module.range + value) / 2


def in_its_memory(module, value):
    """As observers of quantisation do."""
    module.first = value.clone() if module.first is None else module.first
    if not module.range.numel():
        module.range.resize_(value.shape).copy_(value)
    else:
        module.range.add_(value).div_(2)


class Observer(nn.Module):
    """Its buffers get their shape in the first pass; from then on they are moving averages."""

    def __init__(self, write):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("range", torch.empty(0))
        self.register_buffer("first", None)
        self.write = write

    def forward(self, x):
        if x.sum() < 100:  # else it is not used
            self.write(self, x.detach().mean(0))
        return x * self.weight


@pytest.mark.parametrize("write", [by_assignment, in_its_memory])
@pytest.mark.parametrize("parts", [0, 3])
def test_a_buffer_has_the_shape_and_the_mean_that_the_first_passes_give_it(write, parts):
    """The third pass uses the layer in neither step; a rank may have no other pass, or none."""
    batches = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(1))
    batches[2] += 1000

    def body(comm):
        model = Observer(write)
        model.range.numpy()  # torch resizes no memory that numpy has seen
        buffers = Buffers(model, parts=parts)
        for _ in range(2):
            buffers.begin_step()
            for number in range(comm.rank, 3, comm.size):
                model(batches[number])
                buffers.after_pass((0.25, 0.5, 0.25)[number], number)
            marks = torch.tensor(buffers.marks())
            comm.all_reduce(marks).wait()
            buffers.exchange(marks.tolist(), comm)
            buffers.apply()
        model(torch.zeros(4, 2))
        buffers.undo()  # a pass of the next step broke off
        return model.range, model.first

    used = batches[:2].mean(1)
    first = used[0] / 3 + used[1] * 2 / 3
    second = 0.25 * (first + used[0]) / 2 + 0.5 * (first + used[1]) / 2 + 0.25 * first
    for ranks in (1, 2, 4):
        for range_, own in run_ranks(ranks, body):
            torch.testing.assert_close(range_, second)
            torch.testing.assert_close(own, second if write is by_assignment else first)


@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_that_give_a_buffer_different_shapes_are_refused(ranks):
    def body(comm):
        model = Observer(lambda m, value: None)
        buffers = Buffers(model)
        for number in range(comm.rank, 2, comm.size):
            model.first = torch.zeros(3 + number)
            buffers.after_pass(0.5, number)
        marks = torch.tensor(buffers.marks())
        comm.all_reduce(marks).wait()
        buffers.exchange(marks.tolist(), comm)

    with pytest.raises(RecipeError, match=r"'first' of a Observer the shape \[3\] .* \[4\]"):
        run_ranks(ranks, body)
