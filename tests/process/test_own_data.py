"""Participants with data of their own, against federated averaging in plain PyTorch."""

import copy
import random
import time

import numpy as np
import own_data as recipes
import pytest
import torch
from averages import adam, half_way_down, model
from safetensors.torch import load_file
from started import Start, kill, newest_pids
from torch import nn

import instep
from instep.cli import main
from instep.data.order import Order, key, micro_batch
from instep.errors import CheckpointError
from instep.state.export.export import choose
from instep.state.export.own_parts import write_model_of
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

BATCH, PARTICIPANTS, LOCAL_STEPS, ROUNDS = 20, 4, 3, 7
QUICK = (
    'sync.name="averaging"',
    f"sync.participants={PARTICIPANTS}",
    f"sync.options.local_steps={LOCAL_STEPS}",
    f"train.steps={ROUNDS}",
    f"train.global_batch={BATCH}",
    "train.threads=1",
)
OWNER = ('sync.options.partition="owner"',)
BITS = ('train.determinism="bits"',)


def of_owners():
    dataset = recipes.data()
    owners = [recipes.owner(dataset, index) for index in range(len(dataset))]
    return [[n for n, whose in enumerate(owners) if whose == each] for each in range(PARTICIPANTS)]


def its_epochs(number, samples):
    """A participant's samples, epoch after epoch; each shuffled anew. Of ours the keys."""
    order, epoch = Order(len(samples), key(0, 12, number)), 0
    while True:
        yield [samples[place] for place in order.indices(epoch, 0, len(samples))]
        epoch += 1


def federated_averaging(samples, rounds=ROUNDS, fraction=1.0, local="none", kept=None):
    """Each participant by itself, with a pile of its own samples that it uses up.

    A round takes 15 samples of the pile, in local steps of 5 at most, of about the same size. What
    has names that begin with `local`, a participant has for itself, in `kept`.
    """
    kept = {} if kept is None else kept
    torch.manual_seed(0)
    server, (inputs, targets, _) = model(), recipes.data().tensors
    every, count = len(samples), int(fraction * len(samples) + 0.5)
    epochs = [its_epochs(number, each) for number, each in enumerate(samples)]
    piles, batch = [[] for _ in samples], int(BATCH / count)
    for step in range(1, rounds + 1):
        before, given = (step - 1) * LOCAL_STEPS, []
        for participant in sorted(sorted(range(every), key=lambda n: key(0, 7, step, n))[:count]):
            pile = piles[participant] = piles[participant] or next(epochs[participant])
            taken, piles[participant] = pile[: batch * LOCAL_STEPS], pile[batch * LOCAL_STEPS :]
            own = copy.deepcopy(server)
            own.load_state_dict(kept.get(participant, {}), strict=False)
            optimizer = adam(own.parameters())
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * 0.99**before
            scheduler = half_way_down(optimizer)
            steps = -(-len(taken) // batch)
            for number in range(steps):
                rows = taken[slice(*micro_batch(0, len(taken), number, steps))]
                torch.manual_seed(key(0, 1, step, participant, number))
                optimizer.zero_grad()
                nn.functional.mse_loss(own(inputs[rows]), targets[rows]).backward()
                optimizer.step()
                scheduler.step()
            given.append((len(taken), own.state_dict()))
            mine = {n: t for n, t in own.state_dict().items() if n.startswith(local)}
            kept[participant] = mine
        total = sum(size for size, _ in given)
        mean = {
            name: sum(size / total * state[name].double() for size, state in given)
            for name in server.state_dict()
        }
        counts = server.state_dict()
        server.load_state_dict(
            {n: t if counts[n].is_floating_point() else t.round() for n, t in mean.items()}
        )
    return server.state_dict()


def trained(run, workers, *settings, **named):
    more = [f'arguments.{name}="{value}"' for name, value in named.items()]
    program = run("own_data.py:theirs", *QUICK, *settings, *more, f"workers={workers}")
    assert program.end() == 0, program.stderr
    check_audit(program.run)
    return program


def check_audit(folder):
    """By counting, and by the samples that a participant was given."""
    run = RunFolder(folder)
    assert run.audit.exact
    own, sizes = run.plan.own_rounds, run.last("data_divided")["sizes"]
    used = {}
    for epoch, first, stop in run.committed[["epoch", "first", "stop"]].tolist():
        for place in range(first, stop):
            used[epoch, place] = used.get((epoch, place), 0) + 1
    assert set(used.values()) == {1}
    for number, (begin, size) in enumerate(zip(own.offsets.tolist(), sizes, strict=False)):
        mine = [epoch for epoch, place in used if begin <= place < begin + size]
        counts = np.bincount(mine)
        assert set(counts[:-1]) <= {size}, f"participant {number} left its epoch early"


def check_equal(program, wanted):
    for name, value in load_file(program.run / "model.safetensors").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("workers", "fraction"), [slow(2, 1.0), slow(1, 1.0), slow(3, 1.0), slow(2, 0.5)]
)
def test_a_run_equals_federated_averaging_on_the_same_partition(run: Start, workers, fraction):
    """With participants of 57, 23, 18 and 51 samples, which begin their epochs anew."""
    samples = of_owners()
    assert [len(each) for each in samples] == [57, 23, 18, 51]
    wanted = federated_averaging(samples, fraction=fraction)
    even = federated_averaging([list(range(149))[n::4] for n in range(4)], fraction=fraction)
    assert (wanted["0.weight"] - even["0.weight"]).abs().max() > 1e-3  # so that this can fail
    program = trained(run, workers, *OWNER, f"sync.options.fraction={fraction}")
    check_equal(program, wanted)
    verdict = "4 participants with data of their own ('owner') after 3 local steps"
    assert verdict in program.summary["same_as_one_machine"]


@pytest.mark.tail
def test_each_participant_is_validated_on_its_part(run: Start, start: Start):
    program = trained(run, 2, *OWNER, "train.validate_every=3")
    server, dataset = model(), recipes.data(recipes.VALIDATED, 4)
    server.load_state_dict(load_file(program.run / "model.safetensors"))
    server.eval()
    inputs, targets, _ = dataset.tensors
    owners = torch.tensor([recipes.owner(dataset, index) for index in range(len(dataset))])
    with torch.no_grad():
        error = (server(inputs) - targets).square().mean(1)
    wanted = [float(error[owners == each].mean()) for each in range(PARTICIPANTS)]
    validated = program.events("participants_validated")
    assert [event["step"] for event in validated] == [3, 6, 7]
    assert validated[-1]["metrics"]["loss"] == pytest.approx(wanted, rel=1e-9)
    whole = program.events("validated")[-1]["metrics"]["loss"]
    assert whole == pytest.approx(float(error.mean()), rel=1e-9)
    spread = program.summary["participants_spread"]["loss"]
    assert (spread["least"], spread["most"]) == pytest.approx((min(wanted), max(wanted)))
    assert spread["deviation"] == pytest.approx(float(np.std(wanted)))
    report = (program.run / "report.html").read_text()
    assert "Participants" in report
    assert f"{wanted[3]:.4f}" in report
    assert "each    loss 0." in program.stdout + program.stderr
    audited = start("-m", "instep", "audit", program.run)
    assert audited.end() == 0
    assert "4 participants with data of their own" in audited.stdout


NORMS = ('sync.options.local_parameters=["1.*"]',)


@pytest.mark.tail
@pytest.mark.parametrize("workers", [2, slow(1), slow(3)])
def test_layers_that_stay_with_their_participant_equal_fedbn_in_plain_pytorch(
    run: Start, tmp_path, workers
):
    """Weights and statistics of batch normalization; the shared model has their mean."""
    own = {}
    wanted = federated_averaging(of_owners(), local="1.", kept=own)
    shared = federated_averaging(of_owners())
    assert (wanted["0.weight"] - shared["0.weight"]).abs().max() > 1e-3  # so that this can fail
    program = trained(run, workers, *OWNER, *NORMS, "train.validate_every=7")
    check_equal(program, wanted)
    dataset = recipes.data(recipes.VALIDATED, 4)
    inputs, targets, _ = dataset.tensors
    owners = torch.tensor([recipes.owner(dataset, index) for index in range(len(dataset))])
    losses = []
    for number in range(PARTICIPANTS):
        (theirs := model()).load_state_dict({**wanted, **own[number]})
        with torch.no_grad():
            error = (theirs.eval()(inputs) - targets).square().mean(1)
        losses.append(float(error[owners == number].mean()))
    validated = program.events("participants_validated")[-1]["metrics"]["loss"]
    assert validated == pytest.approx(losses, rel=1e-9)
    to = tmp_path / "second.safetensors"
    assert main(["export", str(program.run), "--participant", "1", "--to", str(to)]) == 0
    for name, value in load_file(to).items():
        expected = {**wanted, **own[1]}[name]
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10, msg=name)
    with pytest.raises(CheckpointError, match=r"of 0, 1, 2, 3\. Name one of these"):
        write_model_of(choose(program.run / "checkpoints"), 9, to)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["averaging", "diloco", "fedprox"])
def test_layers_that_stay_have_the_same_bits_on_any_workers_and_resumed(run: Start, strategy):
    name = (f'sync.name="{strategy}"', "sync.options.local_steps=3")
    settings = (*name, *OWNER, *NORMS, *BITS, 'sync.options.local_optimizers="kept"')
    hashes = {trained(run, n, *settings).summary["parameters_sha256"] for n in (1, 3)}
    stopped = trained(run, 1, *settings, "train.stop_after_steps=3")
    hashes.add(instep.resume(stopped.run, workers=2, quiet=True).summary["parameters_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize("partition", [slow("labels"), slow("blocks")])
def test_with_bits_the_hash_is_the_same_on_any_number_of_workers_and_resumed(
    run: Start, start: Start, partition
):
    settings = (
        f'sync.options.partition="{partition}"',
        *BITS,
        "sync.options.fraction=0.75",
        "train.global_batch=21",
    )
    whole = trained(run, 3, *settings)
    stopped = trained(run, 1, *settings, "train.stop_after_steps=3")
    resumed = instep.resume(stopped.run, workers=2, quiet=True)
    check_audit(stopped.run)
    assert resumed.summary["steps"] == ROUNDS
    assert resumed.summary["parameters_sha256"] == whole.summary["parameters_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("mesh.shard=2",),
        ("mesh.shard=2", 'sync.options.local_optimizers="kept"'),
        ('sync.options.local_optimizers="kept"',),
    ],
)
def test_replicas_of_several_processes_compute_participants_with_data_of_their_own(
    run: Start, more
):
    settings = (*OWNER, "arguments.plain=true")
    program = trained(run, 2 * (1 + ("mesh.shard=2" in more)), *settings, *more)
    alone = trained(run, 1, *settings, *(each for each in more if "shard" not in each))
    check_equal(program, load_file(alone.run / "model.safetensors"))


@pytest.mark.slow
def test_killed_workers_leave_no_trace_in_epochs_of_participants(run: Start, start: Start):
    longer = (*QUICK, *OWNER, *BITS, "train.steps=40", "data.loaders=0")
    alone = run("own_data.py:theirs", *longer, "workers=1")
    assert alone.end() == 0, alone.stderr
    draw, killed = random.Random(1), 0
    program = run("own_data.py:theirs", *longer, "workers=3", "arguments.pause_s=0.002")
    program.until(program.is_training, "training")
    while killed < 3 and program.process.poll() is None:
        time.sleep(draw.uniform(0.2, 0.8))  # the moment is what is drawn
        killed += kill(draw.choice(list(newest_pids(program).values())))
    assert program.end() == 0, program.stderr
    assert program.events("worker_lost")
    check_audit(program.run)
    assert program.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    for command in (["audit", program.run, "--content"], ["replay", program.run, "--step", 3]):
        checked = start("-m", "instep", *command)
        assert checked.end() == 0, checked.stderr


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_owners(run: Start, tmp_path):
    moved = tmp_path / "moved"
    stopped = trained(run, 1, *OWNER, "train.stop_after_steps=3", moved_by=moved)
    moved.touch()
    with pytest.raises(instep.InstepError, match="divides the training set otherwise"):
        instep.resume(stopped.run, quiet=True)
