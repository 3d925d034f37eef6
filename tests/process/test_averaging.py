"""Rounds of averaging, against federated averaging as it stands in the paper, in plain PyTorch."""

import copy
import random
import time

import averages as recipes
import pytest
import torch
from safetensors.torch import load_file
from started import Start, Started, kill, newest_pids, slow
from torch import nn

import instep
from conftest import instep_run
from instep.data.order import Order, key, micro_batch, position
from instep.state.manifest import published

pytestmark = pytest.mark.process

BATCH, PARTICIPANTS, LOCAL_STEPS, ROUNDS, CLIP = 20, 5, 3, 5, 1.5
QUICK = (
    f"train.steps={ROUNDS}",  # the third has 29 samples for 3 participants
    f"train.global_batch={BATCH}",
    f"train.max_grad_norm={CLIP}",
    "train.threads=1",
    'sync.name="averaging"',
    f"sync.participants={PARTICIPANTS}",
    f"sync.local_steps={LOCAL_STEPS}",
)
BITS = ('train.determinism="bits"',)


def federated_averaging():
    """Each participant by itself: its own copy of all there is. Of ours the order and the keys."""
    torch.manual_seed(0)
    server, order = recipes.model(), Order(recipes.SAMPLES, 0)
    data = recipes.pairs().tensors
    for step in range(1, ROUNDS + 1):
        epoch, first, stop = position(step, recipes.SAMPLES, BATCH * LOCAL_STEPS)
        parts = -(-(stop - first) * PARTICIPANTS // (BATCH * LOCAL_STEPS))
        mean = {name: torch.zeros_like(t).double() for name, t in server.state_dict().items()}
        for participant in range(parts):
            low, high = micro_batch(first, stop, participant, parts)
            model = copy.deepcopy(server)
            optimizer = recipes.adam(model.parameters())
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * 0.99 ** ((step - 1) * LOCAL_STEPS)
            scheduler = recipes.half_way_down(optimizer)
            for local in range(LOCAL_STEPS):
                rows = order.indices(epoch, *micro_batch(low, high, local, LOCAL_STEPS))
                inputs, target = (tensor[torch.from_numpy(rows)] for tensor in data)
                torch.manual_seed(key(0, 1, step, participant, local))
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), target).backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
            for name, tensor in model.state_dict().items():
                mean[name] += (high - low) / (stop - first) * tensor
        counts = server.state_dict()
        whole = {n: t if counts[n].is_floating_point() else t.round() for n, t in mean.items()}
        server.load_state_dict(whole)
    return server.state_dict()


@pytest.fixture(scope="module")
def wanted():
    return federated_averaging()


def trained(run, workers, *settings, recipe="all_moves"):
    program = run(f"averages.py:{recipe}", *QUICK, *settings, f"workers={workers}")
    assert program.end() == 0, program.stderr
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    return program


def check_equal(program, wanted):
    found = load_file(program.run / "model.safetensors")
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("workers", [2, slow(1), slow(3)])
def test_a_run_equals_federated_averaging_in_plain_pytorch(run: Start, wanted, workers):
    check_equal(trained(run, workers), wanted)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The hash that one undisturbed worker comes to, with bits."""
    folder = tmp_path_factory.mktemp("alone")
    recipe, settings = "averages.py:all_moves", (*QUICK, *BITS, "workers=1")
    program = Started(folder, instep_run(folder, recipe, *settings))
    try:
        assert program.end() == 0, program.stderr
        return program.summary["parameters_sha256"]
    finally:
        program.kill()


@pytest.mark.parametrize("workers", [3, slow(2), slow(5)])
def test_with_bits_the_hash_is_the_same_on_any_number_of_workers(
    run: Start, wanted, alone, workers
):
    program = trained(run, workers, *BITS)
    check_equal(program, wanted)
    assert program.summary["parameters_sha256"] == alone


@pytest.mark.slow
def test_a_run_is_resumed_from_a_checkpoint_between_two_rounds_on_other_workers(run: Start, alone):
    """Checkpoints and stops count rounds, and the scheduler is where its local steps have led."""
    program = trained(run, 2, *BITS, "train.stop_after_steps=3", "checkpoint.every=2")
    assert program.summary["steps"] == 3
    assert {step for step, _ in published(program.run / "checkpoints")} == {2, 3}
    resumed = instep.resume(program.run, workers=3, quiet=True)
    assert resumed.summary["steps"] == ROUNDS
    assert resumed.summary["parameters_sha256"] == alone


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kills", "rounds"), [slow(3, 60), slow(100, 1200)])
def test_killed_workers_leave_no_trace(run: Start, kills, rounds):
    """Killed anywhere in a round: in its local steps, and in what is said after them."""
    longer = (*QUICK, *BITS, f"train.steps={rounds}", "data.loaders=0")
    draw, killed = random.Random(kills), 0
    program = run("averages.py:all_moves", *longer, "workers=3", "arguments.pause_s=0.002")
    program.until(program.is_training, "training")
    while killed < kills and program.process.poll() is None:
        time.sleep(draw.uniform(0.2, 0.8))  # the moment is what is drawn
        killed += kill(draw.choice(list(newest_pids(program).values())))
    assert program.end(300) == 0, program.stderr
    assert len(program.events("worker_lost")) > kills // 2
    alone = trained(run, 1, *longer)
    assert program.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0


def test_what_the_others_have_computed_of_a_round_is_not_computed_again(
    run: Start, alone, tmp_path
):
    """Of 3 workers with 5 participants the last dies in its last local step of a round."""
    number, notes = 2, tmp_path / "notes"
    keys = {
        (participant, local): key(0, 1, number, participant, local)
        for participant in range(PARTICIPANTS)
        for local in range(LOCAL_STEPS)
    }
    last = LOCAL_STEPS - 1
    program = trained(
        run,
        3,
        *BITS,
        f'arguments.notes="{notes}"',
        f"arguments.dies_at={keys[4, last]}",
        f"arguments.waits_for={[keys[0, last], keys[2, last]]}",
        recipe="kills_itself",
    )
    assert len(program.events("worker_lost")) == 1
    noted = [line.split() for line in notes.read_text().splitlines()]
    times = {unit: [int(seed) for _, seed in noted].count(keys[unit]) for unit in keys}
    dead = next(pid for pid, seed in noted if int(seed) == keys[4, last])
    by_the_dead = {unit for unit in keys if [dead, str(keys[unit])] in noted}
    assert by_the_dead == {(n, local) for n in (3, 4) for local in range(LOCAL_STEPS)}
    assert times == {unit: 2 if unit in by_the_dead else 1 for unit in keys}
    assert program.summary["parameters_sha256"] == alone


def test_one_local_step_of_plain_sgd_is_a_step_of_one_machine(run: Start):
    """Also where losses are means over weights, and the last step of an epoch is shorter."""
    torch.manual_seed(0)
    model, order = recipes.plain_sgd().model(), Order(recipes.SAMPLES, 0)
    for step in range(1, 11):
        epoch, first, stop = position(step, recipes.SAMPLES, BATCH)
        rows = torch.from_numpy(order.indices(epoch, first, stop))
        loss = recipes.weighed(model, tuple(tensor[rows] for tensor in recipes.pairs().tensors))
        gradients = torch.autograd.grad(loss.total / loss.weight, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
    settings = ("sync.local_steps=1", "train.steps=10", "train.max_grad_norm=1e9")
    check_equal(trained(run, 2, *settings, recipe="plain_sgd"), model.state_dict())
