"""Runs whose layers or loss see the global batch, against a plain loop over whole batches."""

import looks_at_the_batch as recipes
import pytest
import torch
from safetensors.torch import load_file
from started import Start
from torch import nn
from torch.nn import functional

from instep.data.order import Order, key, micro_batch, position
from marks import slow

pytestmark = pytest.mark.process

SAMPLES, BATCH, MICRO_BATCHES, STEPS = 100, 30, 4, 8
QUICK = (
    "train.epochs=2",
    f"train.global_batch={BATCH}",  # the last batch of an epoch has 10 samples: 2 micro-batches
    f"train.micro_batches={MICRO_BATCHES}",
    "train.threads=1",
    "check.strict=true",
)


def plain_loop(recipe, compute_loss, monkeypatch):
    """The whole batch in one pass, dropout drawn micro-batch by micro-batch; of ours the keys."""
    torch.manual_seed(0)
    model = recipe().model
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.SyncBatchNorm):  # which torch refuses on a CPU
            model.set_submodule(name, nn.BatchNorm1d(layer.num_features).double())
    optimizer, order, drop = recipes.sgd(model.parameters()), Order(SAMPLES, 0), functional.dropout
    for step in range(1, STEPS + 1):
        epoch, first, stop = position(step, SAMPLES, BATCH)
        rows = torch.from_numpy(order.indices(epoch, first, stop))
        parts = -(-(stop - first) * MICRO_BATCHES // BATCH)
        cuts = [micro_batch(first, stop, number, parts) for number in range(parts)]
        states = []
        for number in range(parts):
            torch.manual_seed(key(0, 1, step, number))
            states.append(torch.get_rng_state())

        def by_micro_batch(x, p, training, inplace, states=states, cuts=cuts):
            made = []
            for number, part in enumerate(x.split([high - low for low, high in cuts])):
                torch.set_rng_state(states[number])
                made.append(drop(part, p, training))
                states[number] = torch.get_rng_state()
            return torch.cat(made)

        with monkeypatch.context() as patch:
            patch.setattr(functional, "dropout", by_micro_batch)
            optimizer.zero_grad()
            compute_loss(model, tuple(t[rows] for t in recipes.pairs().tensors)).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.tail
@pytest.mark.parametrize("kind", ["per_sample", "twins", slow("contrast")])
def test_three_workers_give_the_parameters_and_statistics_of_a_plain_loop(
    run: Start, monkeypatch, kind
):
    """In the last step of an epoch one of them has no work."""
    check_against_a_plain_loop(run, monkeypatch, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["per_sample", "contrast"])
def test_a_worker_that_is_killed_between_the_reads_of_its_layers_leaves_no_trace(
    run: Start, monkeypatch, tmp_path, kind
):
    program = check_against_a_plain_loop(
        run, monkeypatch, kind, f'arguments.mark="{tmp_path / "mark"}"'
    )
    (lost,) = program.events("worker_lost")
    assert lost["step"] > 1  # and not in the trial before
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0


def check_against_a_plain_loop(run: Start, monkeypatch, kind, *settings):
    options = (*QUICK, "workers=3", 'train.batch_norm="global"', *settings)
    program = run(f"looks_at_the_batch.py:{kind}", *options)
    assert program.end() == 0, program.stderr
    losses = {"per_sample": recipes.each, "contrast": of_the_batch, "twins": of_twins}
    loss = losses[kind]
    check_equal(program, plain_loop(getattr(recipes, kind), loss, monkeypatch), 1e-12)
    return program


def of_twins(model, batch):
    return recipes.cross_correlation(model, *recipes.embed(model, batch))


def of_the_batch(model, batch):
    return recipes.batch_loss(model, *recipes.embed(model, batch))


def check_equal(program, wanted, near):
    found = load_file(program.work / "runs" / "tested" / "model.safetensors")
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=near, atol=near, msg=name)


@pytest.mark.slow
def test_a_loss_of_the_global_batch_is_that_of_a_plain_loop_and_has_the_same_bits_on_any_number(
    run: Start, monkeypatch
):
    """Without layers that read, a worker's last pass sends its buckets while it runs."""
    wanted = plain_loop(lambda: recipes.contrast(sees_batch=False), of_the_batch, monkeypatch)
    hashes = []
    for workers, determinism, near in ((3, "order", 1e-12), (1, "bits", 1e-8), (3, "bits", 1e-8)):
        program = run(
            "looks_at_the_batch.py:contrast",
            *QUICK,
            f"workers={workers}",
            f'train.determinism="{determinism}"',
            "sync.options.bucket_mb=0.0001",
            "arguments.sees_batch=false",
        )
        assert program.end() == 0, program.stderr
        check_equal(program, wanted, near)
        hashes.append(program.summary["parameters_sha256"])
    assert hashes[1] == hashes[2]
