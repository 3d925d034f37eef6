"""Stages of models that run one after the other in one process, and models that are refused."""

import copy
import random

import numpy as np
import pytest
import torch
from pipeline_models import GPT, UNet, batch_of, gpt, hugging_face, loss_of, mlp
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from instep.data.order import key
from instep.engine.passes import OF_PASS
from instep.errors import RecipeError, SpecError
from instep.parallel.pipeline import Pipeline, find_cuts
from instep.parallel.pipeline.absent import Absent, NeedsValues, absent


def in_stages(model, samples, *, stages=2, call=None, batch=None, parts=3, cuts=()):
    """All stages in this process, in the interleaved order."""
    given = (
        model,
        call or loss_of(model),
        batch_of(model, samples) if batch is None else batch,
        samples,
    )
    options = {"schedule": "interleaved" if stages == 2 or cuts else "1f1b", "parts": parts}
    found, _ = find_cuts(*given, ranks=1, cuts=cuts, timed=False, **options)
    return Pipeline(*given, cuts=found, **options)


def gradients(pipeline, batch, samples, key=5):
    """Of one micro-batch, with its loss."""
    pipeline.module.zero_grad()
    total, weight = pipeline.run(batch, samples, key)
    found = {n: p.grad.clone() for n, p in pipeline.module.named_parameters() if p.grad is not None}
    return found, total / weight


def same(one, other):
    assert one[0].keys() == other[0].keys()
    for name, gradient in one[0].items():
        torch.testing.assert_close(gradient, other[0][name], rtol=1e-11, atol=1e-13, msg=name)
    assert one[1] == pytest.approx(other[1], rel=1e-12)


def both(make, samples=7, cuts=()):
    """The gradients of two stages, and those of one, of the same model."""
    torch.manual_seed(1)
    model = make().double().train()
    batch = batch_of(model, samples, 3)
    cut = in_stages(copy.deepcopy(model), samples, cuts=cuts)
    whole = in_stages(copy.deepcopy(model), samples, stages=1)
    assert len(cut.cuts) == 1
    assert not whole.cuts
    return gradients(cut, batch, samples), gradients(whole, batch, samples)


class Odd(nn.Module):
    """Four linear blocks and a forward pass that is given."""

    def __init__(self, forward, **more):
        super().__init__()
        self.start, self.end = nn.Linear(8, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.drop = nn.Dropout(0.5)
        self.own = forward
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.own(self, x)


def chain(model, x, change=lambda x: x):
    for block in model.blocks:
        x = block(change(x)).relu()
    return x


# ---- the same result


@pytest.mark.parametrize("tied", [False, True])
def test_dropout_ties_and_unused_parameters_are_those_of_one_stage(tied):
    cut, whole = both(lambda: GPT(tied))
    same(cut, whole)
    assert "never" not in cut[0]


class Dropping(nn.Module):
    """Drops what it is called with, and notes which; the first column is left."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.masks = nn.Linear(64, 64), nn.Dropout(0.3), {}

    def forward(self, x):
        mask = self.drop(torch.ones_like(x))
        if not isinstance(mask, Absent):
            self.masks[int(x[0, 0])] = mask.detach()  # by the first sample of the part
        return torch.cat([x[:, :1], (self.inner(x) * mask)[:, 1:]], 1)


def test_masks_differ_by_block_part_micro_batch_and_step_and_keep_what_they_should():
    def forward(model, x):
        return model.end(model.after(chain(model, model.before(x), lambda x: x)).relu()[:, :8])

    more = {"before": Dropping(), "after": Dropping()}
    more["blocks"] = nn.ModuleList([Dropping() for _ in range(4)])
    model = Odd(forward, **more).double().train()
    x = torch.randn(6, 64, dtype=torch.float64)
    x[:, 0] = torch.arange(6)
    batch = x, torch.randn(6, 2, dtype=torch.float64)
    cut, found = in_stages(model, 6, batch=batch, parts=3), []
    for step in (1, 2):
        for number in (0, 1):
            cut.run(batch, 6, key(0, OF_PASS, step, number))
            for module in model.modules():
                if isinstance(module, Dropping):
                    assert sorted(module.masks) == [0, 2, 4]
                    found += module.masks.values()
                    module.masks.clear()
    masks = torch.stack(found).flatten(1)
    assert len(masks) == 2 * 2 * 3 * 6
    kept = masks != 0
    assert kept.unique(dim=0).shape == kept.shape, "two are the same"
    likeness = torch.corrcoef(kept.double()).fill_diagonal_(0)
    assert float(likeness.abs().max()) < 0.5, "one follows from another"
    assert float(kept.double().mean()) == pytest.approx(0.7, abs=4 * (0.21 / kept.numel()) ** 0.5)
    assert torch.equal(masks[kept], torch.full_like(masks[kept], 1 / 0.7))


def test_a_draw_after_one_that_another_stage_makes_is_the_same():
    def forward(model, x):
        x = model.drop(model.start(x))
        kept = torch.rand(x.shape[0], 1, dtype=x.dtype) < 0.5  # for all blocks, after the dropout
        return model.end(model.drop(chain(model, x, lambda x: x * kept + torch.rand_like(x))))

    same(*both(lambda: Odd(forward)))


def test_blocks_that_change_their_input_in_place():
    def make():
        return nn.Sequential(*mlp()[0][:3], nn.ReLU(inplace=True), nn.Linear(24, 2))

    for first in ("1", "2", "3"):
        same(*both(make, cuts=[first]))


def test_code_between_blocks_may_use_what_the_first_block_was_called_with():
    def forward(model, x):
        x = model.start(x)
        for block in model.blocks:
            x = model.drop(x + block(x) * 0.3)
        return model.end(x)

    def shared(model, x):
        bias = model.start(x)
        for block in model.blocks:
            x = block(x, bias)
            x += bias.sum(1, keepdim=True)
        return model.end(x)

    class Biased(nn.Linear):
        def forward(self, x, bias):
            return super().forward(x) * bias

    same(*both(lambda: Odd(shared, blocks=nn.ModuleList([Biased(8, 8) for _ in range(4)]))))
    same(*both(lambda: Odd(forward), cuts=["blocks.2"]))


def test_what_arrives_is_passed_on_through_a_stage_in_the_middle():
    class Biased(nn.Linear):
        def forward(self, x, bias):
            return super().forward(x) + bias.sin()

    def forward(model, x):
        bias = model.start(x)
        for block in model.blocks:
            x = block(x, bias)
        return model.end(x)

    torch.manual_seed(1)
    model = Odd(forward, blocks=nn.ModuleList([Biased(8, 8) for _ in range(4)])).double().train()
    batch = batch_of(model, 6)
    cut = in_stages(copy.deepcopy(model), 6, cuts=["blocks.1", "blocks.2", "blocks.3"])
    same(gradients(cut, batch, 6), gradients(in_stages(model, 6, stages=1), batch, 6))


def test_activation_checkpoints_around_blocks():
    def forward(model, x):
        x = model.start(x)
        for block in model.blocks:
            x = model.drop(checkpoint(block, x, use_reentrant=False))
        return model.end(x)

    same(*both(lambda: Odd(forward)))


@pytest.mark.slow
def test_hugging_face_checkpointing():
    torch.manual_seed(1)
    model = hugging_face("llama")[0].double().train()
    batch = batch_of(model, 4)
    whole = in_stages(copy.deepcopy(model), 4, stages=1)
    model.activation_checkpointing_enable()
    same(gradients(in_stages(model, 4), batch, 4), gradients(whole, batch, 4))


def draws_if_told(how):
    """Blocks that draw once `model.draws` is set."""

    def forward(model, x):
        x = model.start(x)
        for block in model.blocks:
            x = block(x)
            if model.draws:
                x = x * how(x)
        return model.end(x)

    return lambda: Odd(forward, draws=False)


@pytest.mark.parametrize(
    "how",
    [
        lambda x: torch.rand(x.shape, dtype=x.dtype),
        lambda x: torch.from_numpy(np.random.rand(*x.shape)),
        lambda x: random.random(),
    ],
    ids=["torch", "numpy", "python"],
)
def test_a_model_that_begins_to_draw_draws_what_one_stage_draws(how):
    torch.manual_seed(1)
    model = draws_if_told(how)().double().train()
    batch = batch_of(model, 6)
    cut, whole = in_stages(copy.deepcopy(model), 6), in_stages(model, 6, stages=1)
    same(gradients(cut, batch, 6), gradients(whole, batch, 6))
    first = gradients(cut, batch, 6)
    for pipeline in (cut, whole):
        pipeline.module.draws = True
    for number in (6, 7):
        found = gradients(cut, batch, 6, number)
        same(found, gradients(whole, batch, 6, number))
        assert found[1] != first[1]


def test_a_model_that_begins_to_draw_and_changes_what_arrived_is_refused():
    def forward(model, x):
        x = model.start(x)
        for place, block in enumerate(model.blocks):
            y = block(x)
            x += 1.0
            x = x * torch.rand_like(x) + y if model.draws and place > 1 else x + y
        return model.end(x)

    torch.manual_seed(1)
    model = Odd(forward, draws=False, blocks=nn.ModuleList([nn.ReLU() for _ in range(4)]))
    cut = in_stages(model.double().train(), 6)
    model.draws = True
    with pytest.raises(RecipeError, match=r"did not draw .* after 'blocks.2' change in place"):
        cut.run(batch_of(model, 6), 6, 1)


def test_nothing_is_set_for_a_model_that_draws_nothing():
    states = []
    model = Odd(lambda model, x: model.end(chain(model, x, noting))).double().train()

    def noting(x):
        states.append(torch.get_rng_state())
        return x

    cut = in_stages(model, 6)
    states.clear()
    cut.run(batch_of(model, 6), 6, 1)
    assert len(states) > 12
    assert all(torch.equal(state, states[0]) for state in states)


def test_a_parameter_that_a_stage_is_called_with_and_does_not_use():
    class Given(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * (scale if self.uses else 1.0)

    def forward(model, x):
        x = model.start(x)
        for place, block in enumerate(model.blocks):
            block.uses = place in (0, 3)
            x = block(x, model.scale)
        return model.end(x)

    torch.manual_seed(1)
    model = Odd(
        forward,
        blocks=nn.ModuleList([Given(8, 8) for _ in range(4)]),
        scale=nn.Parameter(torch.rand(8)),
    )
    model = model.double().train()
    batch = batch_of(model, 6)
    cut = in_stages(copy.deepcopy(model), 6, cuts=["blocks.1", "blocks.2", "blocks.3"])
    wanted = gradients(in_stages(model, 6, stages=1), batch, 6)
    for _ in range(2):
        same(gradients(cut, batch, 6), wanted)


def test_the_sequence_length_may_change_from_step_to_step():
    torch.manual_seed(1)
    model = gpt()[0].double().train()
    cut, whole = in_stages(copy.deepcopy(model), 6), in_stages(model, 6, stages=1)
    for length in (8, 5, 12, 8):
        batch = batch_of(model, 4, length, length)
        same(gradients(cut, batch, 4), gradients(whole, batch, 4))


def test_parts_of_different_weight_give_the_gradient_of_the_whole():
    torch.manual_seed(1)
    model = gpt()[0].double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids, target = batch_of(model, 5)
    target = target.clone()
    target[:3, 2:] = -100
    target[4] = -100  # nothing counts in the last part

    def call(batch, samples):
        made = model(batch[0])
        counts = int(batch[1].ne(-100).sum())
        if not counts:
            return None
        return functional.cross_entropy(made.flatten(0, 1), batch[1].flatten()), counts

    loss, counts = call((ids, target), 5)
    (loss * counts).backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    cut = in_stages(model, 5, call=call, batch=(ids, target), parts=5)
    found = gradients(cut, (ids, target), 5)
    same(found, (wanted, float(loss.detach())))


def test_frozen_parameters_get_no_gradient_and_stages_before_them_no_message():
    torch.manual_seed(1)
    model = gpt()[0].double().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.3", "head")))
    cut, whole = in_stages(copy.deepcopy(model), 6), in_stages(model, 6, stages=1)
    batch = batch_of(model, 6)
    assert cut._cuts.boundaries[0].differentiable == (False,)
    same(gradients(cut, batch, 6), gradients(whole, batch, 6))


def test_results_are_those_of_the_model_and_leave_no_gradient():
    torch.manual_seed(1)
    model = gpt()[0].double().eval()
    batch = batch_of(model, 7)
    wanted = model(batch[0]).detach()
    cut = in_stages(model, 7)
    found = cut.results(batch, 7, 0, lambda part, _: model(part[0]))
    assert torch.equal(torch.cat(found), wanted)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bfloat16_autocast_and_tied_weights():
    torch.manual_seed(1)
    model = GPT(tied=True).train()
    loss = loss_of(model)

    def call(batch, samples):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(batch, samples)

    batch = batch_of(model, 6)
    whole = in_stages(model, 6, stages=1, call=call)
    wanted = gradients(whole, batch, 6)
    found = gradients(in_stages(model, 6, call=call), batch, 6)
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, wanted[0][name], rtol=1e-2, atol=1e-4, msg=name)


def test_skip_connections_are_cut_only_where_the_next_block_is_called_with_all_of_them():
    same(*both(UNet))
    assert in_stages(UNet().double().train(), 6).cuts == ["downs.1"]
    same(*both(UNet, cuts=["ups.2"]))


# ---- refused


def tangled(model, x):
    first = x = model.start(x)
    return model.end(chain(model, x) + first)


class Counts(nn.Linear):
    calls = 0.0

    def forward(self, x):
        Counts.calls += 1.0
        return super().forward(x) * Counts.calls


def by_value(model, x):
    x = model.start(x)
    if x.sum() > 1000:
        x = -x
    return model.end(chain(model, x))


def twice(model, x):
    return model.end(chain(model, chain(model, model.start(x))))


def test_what_only_a_run_can_show_is_refused_by_name():
    model = Odd(lambda model, x: model.end(chain(model, x)))
    model.blocks = nn.ModuleList([Counts(8, 8) for _ in range(3)])
    with pytest.raises(RecipeError, match=r"in front of 'blocks.1': the .* than that of the whole"):
        in_stages(model.double().train(), 6, parts=1)


@pytest.mark.parametrize(
    ("model", "cuts", "text"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), (),
         "'1' is a BatchNorm1d, which looks at its whole batch"),
        (lambda: Odd(tangled), (), "the loss, after 'blocks.3', needs them"),
        (lambda: Odd(by_value), (), "at 'blocks.0', torch's _local_scalar_dense wants them"),
        (lambda: Odd(twice), (), "'blocks.0' is called 2 times in one pass"),
        (lambda: nn.Linear(8, 2), (), "it has no list of layers"),
        (UNet, ("ups.0",), "in front of 'ups.0': only what .* 'ups.1' is called with them"),
        (UNet, ("upps.0",), r"mesh.cuts names 'upps.0'. Did you mean 'ups.0'\?"),
        (lambda: Odd(lambda m, x: m.end(chain(m, m.start(x)))), ("drop",), "'drop' is called 0"),
    ],
)  # fmt: skip
def test_models_that_are_no_chain_are_refused_by_name(model, cuts, text):
    with pytest.raises(RecipeError, match=text):
        in_stages(model().double().train(), 6, cuts=cuts)


def test_a_buffer_that_moves_is_refused_by_name():
    class Moves(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return super().forward(x)

    with pytest.raises(RecipeError, match=r"'1' \(Moves\) writes its buffer 'mean'"):
        in_stages(nn.Sequential(nn.Linear(8, 8), Moves(), nn.Linear(8, 2)).double().train(), 6)


def test_blocks_in_another_order_than_on_the_example_are_refused():
    def forward(model, x):
        x = model.start(x)
        for place in (0, 1, 2, 3) if x.shape[1] == 8 and not model.other else (0, 2, 1, 3):
            x = model.blocks[place](x)
        return model.end(x)

    model = Odd(forward, other=False).double().train()
    cut = in_stages(model, 6)
    model.other = True
    with pytest.raises(RecipeError, match=r"'blocks.2' was called where 'blocks.1' was expected"):
        cut.run(batch_of(model, 6), 6, 1)


def test_cuts_that_do_not_fit_the_stages_are_refused():
    model = mlp()[0].double().train()
    with pytest.raises(SpecError, match=r"mesh.cuts = \['4', '2'\]: the blocks are called in"):
        in_stages(model, 6, cuts=["4", "2"])
    with pytest.raises(SpecError, match=r"mesh.cuts = \['2', '2'\]: each module may be named once"):
        in_stages(model, 6, cuts=["2", "2"])
    with pytest.raises(SpecError, match=r"'0' is the first block, and belongs to the first stage"):
        in_stages(model, 6, cuts=["0"])
    with pytest.raises(SpecError, match=r"mesh.cuts has 1 name, but mesh.stages = 1 .* wants 0"):
        Pipeline(model, loss_of(model), batch_of(model, 6), 6, cuts=["4"])
    with pytest.raises(RecipeError, match="needs 2 stages, and the model has 1 block: 0"):
        in_stages(nn.Sequential(nn.Linear(8, 2)).double(), 6)


@pytest.mark.parametrize(("frozen", "cut"), [((2, 3), 1), ((0, 1), 3), ((), 2)])
def test_each_stage_has_something_to_train(frozen, cut):
    model = Odd(lambda model, x: model.end(chain(model, model.start(x)))).double().train()
    for module in (*(model.blocks[place] for place in frozen), model.start, model.end):
        module.requires_grad_(False)
    options = {"ranks": 2, "schedule": "1f1b", "parts": 1, "timed": False}
    given = model, loss_of(model), batch_of(model, 6), 6
    assert find_cuts(*given, **options)[0] == [f"blocks.{cut}"]
    model.requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    with pytest.raises(RecipeError, match="stage 1 of 2 has nothing to train, as all its"):
        find_cuts(*given, cuts=["blocks.2"], **options)
    with pytest.raises(RecipeError, match="stage 1 of 2 has nothing to train, as all its"):
        find_cuts(*given, **options)


def test_a_loss_that_a_stage_alone_cannot_compute_is_refused():
    def call(batch, samples):
        x = batch[0].detach().requires_grad_()
        made = model(x)
        (slope,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        return made.square().mean() + slope.square().mean(), samples

    model = Odd(lambda model, x: model.end(chain(model, model.start(x)))).double().train()
    with pytest.raises(RecipeError, match=r"'blocks.3' cannot \(RuntimeError: .* the graph"):
        in_stages(model, 6, call=call)


def test_a_loss_that_compares_samples_is_refused():
    def call(batch, samples):
        made = functional.normalize(model(batch[0]), dim=1)
        return functional.cross_entropy(made @ made.T, torch.arange(samples)), samples

    model = mlp()[0].double().train()
    with pytest.raises(RecipeError, match=r"mesh.pipeline_batches = 3 would change the result"):
        in_stages(model, 6, call=call)
    assert in_stages(model, 6, call=call, parts=1).cuts
    assert all(module.training for module in model.modules())


def test_a_loss_of_16_bits_is_that_of_its_parts_to_its_rounding():
    torch.manual_seed(1)
    model = GPT(False).bfloat16().train()
    for seed in range(6):
        batch = batch_of(model, 6, seed)
        assert in_stages(model, 6, batch=batch).cuts


# ---- absent tensors


def test_an_absent_tensor_has_a_shape_and_no_values():
    ids, weight = torch.randint(10, (2, 3)), absent(torch.randn(10, 4))
    made = functional.layer_norm(functional.embedding(ids, weight), (4,))
    assert isinstance(made, Absent)
    assert made.shape == (2, 3, 4)
    assert made.device == ids.device
    for use in (
        lambda: bool(made.sum() > 0),
        lambda: made.sum().item(),
        lambda: torch.zeros(2, 3, 4).copy_(made),
        lambda: made.nonzero(),
        lambda: torch.equal(made, made),
    ):
        with pytest.raises(NeedsValues, match="torch's"):
            use()


def test_what_depends_on_a_shape_alone_is_not_absent():
    nothing = absent(torch.randn(2, 3))
    for made in (torch.zeros_like(nothing), nothing.new_ones(4), torch.rand_like(nothing)):
        assert not isinstance(made, Absent)


def test_operations_on_absent_tensors_draw_as_the_real_ones_do():
    states = []
    for tensor in (torch.ones(5, 3), absent(torch.ones(5, 3))):
        torch.manual_seed(2)
        functional.dropout(tensor, 0.3)
        torch.bernoulli(tensor)
        states.append(torch.rand(1))
    assert torch.equal(*states)
