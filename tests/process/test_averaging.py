"""Rounds of averaging, against federated averaging as it stands in the paper, in plain PyTorch."""

import copy
import functools
import os
import random
import re
import time
from pathlib import Path

import averages as recipes
import pytest
import torch
from safetensors.torch import load_file
from started import RECIPES, Start, Started, kill, kill_members, kill_with_its_memory, newest_pids
from torch import nn

import instep
from conftest import instep_run
from instep.comm.codecs import CODECS
from instep.data.order import Order, key, micro_batch, position
from instep.state.files.manifest import published
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

BATCH, PARTICIPANTS, LOCAL_STEPS, ROUNDS, CLIP = 20, 5, 3, 5, 1.5
QUICK = (
    f"train.steps={ROUNDS}",  # the third has 29 samples for 3 participants
    f"train.global_batch={BATCH}",
    f"train.max_grad_norm={CLIP}",
    "train.threads=1",
    'sync.name="averaging"',
    f"sync.participants={PARTICIPANTS}",
    f"sync.options.local_steps={LOCAL_STEPS}",
)
BITS = ('train.determinism="bits"',)
LOCAL = ("reset", "kept")


def federated_averaging(
    local,
    participants=PARTICIPANTS,
    rounds=ROUNDS,
    *,
    advanced="session",
    model=recipes.model,
    mu=0.0,
    outer=None,
    fraction=1.0,
    start_after=0,
):
    """Each participant by itself: its own copy of all there is. Of ours the order and the keys.

    `outer` is given the parameters of the server, and returns what is called with their means.
    """
    torch.manual_seed(0)
    server, order = model(), Order(recipes.SAMPLES, 0)
    trained = [parameter for parameter in server.parameters() if parameter.requires_grad]
    outer = outer(trained) if outer is not None else None
    every, participants = participants, int(fraction * participants + 0.5)
    data = recipes.pairs().tensors
    moments = {participant: {} for participant in range(every)}
    shared = recipes.adam(server.parameters())
    downward = recipes.half_way_down(shared)
    for step, (epoch, first, stop, whole) in enumerate(walked(rounds, start_after), 1):
        parts = -(-(stop - first) * participants // whole)
        if step <= start_after:
            samples = [
                order.indices(epoch, *micro_batch(first, stop, n, parts)) for n in range(parts)
            ]
            all_together(
                server, [[t[torch.from_numpy(rows)] for t in data] for rows in samples], step
            )
            shared.step()
            downward.step()
            if local == "kept":
                moments = {n: copy.deepcopy(shared.state_dict()["state"]) for n in moments}
            continue
        before = start_after + (step - 1 - start_after) * LOCAL_STEPS
        mean = {name: torch.zeros_like(t).double() for name, t in server.state_dict().items()}
        drawn = sorted(sorted(range(every), key=lambda n: key(0, 7, step, n))[:participants])
        for place, participant in enumerate((drawn if fraction < 1 else range(every))[:parts]):
            low, high = micro_batch(first, stop, place, parts)
            model = copy.deepcopy(server)
            optimizer = recipes.adam(model.parameters())
            optimizer.load_state_dict({**optimizer.state_dict(), "state": moments[participant]})
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * 0.99 ** (epoch if advanced == "epoch" else before)
            scheduler = recipes.half_way_down(optimizer)
            for number in range(LOCAL_STEPS):
                rows = order.indices(epoch, *micro_batch(low, high, number, LOCAL_STEPS))
                inputs, target = (tensor[torch.from_numpy(rows)] for tensor in data)
                torch.manual_seed(key(0, 1, step, participant, number))
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), target).backward()
                for mine, begin in zip(model.parameters(), server.parameters(), strict=True):
                    if mine.grad is not None and mu:
                        mine.grad += mu * (mine.detach() - begin.detach())
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                if advanced == "session":
                    scheduler.step()
            if local == "kept":
                moments[participant] = optimizer.state_dict()["state"]
            for name, tensor in model.state_dict().items():
                mean[name] += (high - low) / (stop - first) * tensor
        counts = server.state_dict()
        whole = {n: t if counts[n].is_floating_point() else t.round() for n, t in mean.items()}
        begin = [parameter.detach().clone() for parameter in trained]
        server.load_state_dict(whole)
        if outer is not None:
            means = [parameter.detach().clone() for parameter in trained]
            with torch.no_grad():
                for parameter, before in zip(trained, begin, strict=True):
                    parameter.copy_(before)
            outer(means)
    return server.state_dict()


def walked(rounds, start_after):
    """Epoch and positions of each commit, and how many a whole one takes."""
    epoch, first = 0, 0
    for step in range(1, rounds + 1):
        whole = BATCH if step <= start_after else BATCH * LOCAL_STEPS
        stop = min(first + whole, recipes.SAMPLES)
        yield epoch, first, stop, whole
        epoch, first = (epoch + 1, 0) if stop == recipes.SAMPLES else (epoch, stop)


def all_together(server, parts, step):
    """Give the server the clipped gradient of a batch, and the mean of what passes do to
    buffers."""
    size = sum(len(target) for _, target in parts)
    mean = {name: torch.zeros_like(t).double() for name, t in server.named_buffers()}
    gradients = [torch.zeros_like(parameter) for parameter in server.parameters()]
    for participant, (inputs, target) in enumerate(parts):
        model = copy.deepcopy(server)
        torch.manual_seed(key(0, 1, step, participant, 0))
        nn.functional.mse_loss(model(inputs), target).backward()
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            if parameter.grad is not None:
                gradient += len(target) / size * parameter.grad
        for name, tensor in model.named_buffers():
            mean[name] += len(target) / size * tensor
    for parameter, used, gradient in zip(
        server.parameters(), model.parameters(), gradients, strict=True
    ):
        parameter.grad = gradient if used.grad is not None else None
    nn.utils.clip_grad_norm_(server.parameters(), CLIP)
    for name, tensor in server.named_buffers():
        tensor.copy_(mean[name] if tensor.is_floating_point() else mean[name].round())


@pytest.fixture(scope="module")
def wanted():
    return {local: federated_averaging(local) for local in LOCAL}


def nesterov(parameters):
    """The outer step of DiLoCo, by the optimizer of PyTorch."""
    optimizer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)

    def step(means):
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = parameter.detach() - mean
        optimizer.step()

    return step


def yogi(parameters):
    """FedYogi, line by line as in Algorithm 2 of Reddi et al. 2021."""
    first = [torch.zeros_like(parameter) for parameter in parameters]
    second = [torch.full_like(parameter, 1e-3**2) for parameter in parameters]

    @torch.no_grad()
    def step(means):
        for n, (x, mean) in enumerate(zip(parameters, means, strict=True)):
            delta = mean - x
            first[n] = 0.9 * first[n] + (1 - 0.9) * delta
            v, squared = second[n], delta**2
            second[n] = v - (1 - 0.99) * squared * torch.sign(v - squared)
            x.add_(0.1 * first[n] / (second[n].sqrt() + 1e-3))

    return step


def sync_of(name, **options):
    return [f'sync.name="{name}"'] + [
        f"sync.options.{key}=" + (f'"{value}"' if isinstance(value, str) else str(value))
        for key, value in options.items()
    ]


FAMILY = {
    "fedprox": (sync_of("fedprox", mu=0.8), {"mu": 0.8}),
    "fedopt": (sync_of("fedopt", rule="yogi"), {"outer": yogi}),
    "diloco": (sync_of("diloco"), {"outer": nesterov}),
    "some": (sync_of("averaging", fraction=0.5), {"fraction": 0.5}),
    "later": (sync_of("averaging", start_after=2), {"start_after": 2}),
    "all_later": (
        sync_of("diloco", start_after=3, fraction=0.7),
        {"outer": nesterov, "start_after": 3, "fraction": 0.7},
    ),
    "all": (
        sync_of("diloco", fraction=0.7),
        {"outer": nesterov, "fraction": 0.7},
    ),
}
"""Settings, and what they are in plain PyTorch."""


@pytest.mark.tail
@pytest.mark.parametrize(
    ("workers", "kind", "local"),
    [
        (2, "diloco", "kept"),
        slow(2, "later", "kept"),
        slow(3, "all_later", "kept"),
        *(slow(2, kind, "reset") for kind in FAMILY),
        slow(3, "all", "kept"),
        slow(1, "fedprox", "kept"),
    ],
)
def test_a_strategy_with_rounds_equals_its_paper_in_plain_pytorch(run: Start, workers, kind, local):
    """With buffers, frozen, shared and unused parameters, and a shorter last round."""
    settings, plain = FAMILY[kind]
    program = trained(run, workers, *settings, recipe="all_sorts", local=local)
    usual = federated_averaging(local, model=recipes.sorts)
    wanted = federated_averaging(local, model=recipes.sorts, **plain)
    assert (usual["first.weight"] - wanted["first.weight"]).abs().max() > 1e-3
    check_equal(program, wanted)
    assert wanted["never"].tolist() == [1.0] * 3
    assert program.summary["same_as_one_machine"].startswith("no: sync.name = ")


SAME = [
    sync_of("fedprox", mu=0.0),
    sync_of("fedopt", rule="momentum", outer_momentum=0, outer_lr=1),
    sync_of("diloco", outer_momentum=0, outer_lr=1.0),
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SAME, ids=lambda settings: settings[0])
def test_what_moves_to_the_mean_is_averaging_to_the_bit(run: Start, alone, settings):
    program = trained(run, 2, *BITS, *settings)
    assert program.summary["parameters_sha256"] == alone("reset")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fedprox", "fedopt", "diloco", "all", "all_later"])
def test_a_strategy_with_rounds_has_the_same_bits_on_any_workers_and_resumed(run: Start, kind):
    settings = [*FAMILY[kind][0], *BITS]
    hashes = {
        trained(run, workers, *settings, local="kept").summary["parameters_sha256"]
        for workers in (1, 2, 3)
    }
    stopped = trained(run, 2, *settings, "train.stop_after_steps=3", local="kept")
    resumed = instep.resume(stopped.run, workers=3, quiet=True)
    assert hashes == {resumed.summary["parameters_sha256"]}


CODED = (*sync_of("diloco"), 'sync.codec="int4"', *BITS)
LATER = (*CODED, "sync.options.start_after=2")


def diloco_with_int4(local, start_after):
    """Each matrix that a participant gives is encoded, and their sum once more; what that leaves
    out is added the next time, but what gradients left out is not added to a round's."""
    torch.manual_seed(0)
    recipe, order, left = recipes.no_bias(), Order(recipes.SAMPLES, 0), {}
    server, data = recipe.model(), recipe.train.tensors
    trained, moments = list(server.parameters()), [{}] * PARTICIPANTS
    shared, outer = recipe.optimizer(trained), nesterov(trained)

    def through(values, *of):
        if values.dim() < 2:
            return values
        codec, decoded = CODECS["int4"](), torch.zeros(values.numel())
        whole, rest = values.flatten() + left.get(of, 0.0), torch.zeros(values.numel())
        payload = torch.zeros(codec.size(len(whole)), dtype=torch.uint8)
        codec.encode(whole, payload, key=0, left=rest)
        codec.add_into(decoded, payload)
        left[of] = rest
        return decoded.view_as(values)

    def gives(model, optimizer, rows, step):
        optimizer.zero_grad()
        inputs, target = (tensor[torch.from_numpy(rows)] for tensor in data)
        recipe.loss(model(inputs), target).backward()
        if step:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        return [parameter.grad for parameter in model.parameters()]

    for step, (epoch, first, stop, whole) in enumerate(walked(ROUNDS, start_after), 1):
        parts, early = -(-(stop - first) * PARTICIPANTS // whole), step <= start_after
        sums = [torch.zeros_like(parameter) for parameter in trained]
        left = {} if step == start_after + 1 else left
        for n in range(parts):
            low, high = micro_batch(first, stop, n, parts)
            model = copy.deepcopy(server)
            optimizer = recipe.optimizer(model.parameters())
            if early:
                given = gives(model, optimizer, order.indices(epoch, low, high), False)
            else:
                known = {**optimizer.state_dict(), "state": copy.deepcopy(moments[n])}
                optimizer.load_state_dict(known)
                for number in range(LOCAL_STEPS):
                    part = micro_batch(low, high, number, LOCAL_STEPS)
                    gives(model, optimizer, order.indices(epoch, *part), True)
                pairs = zip(trained, model.parameters(), strict=True)
                given = [before.detach() - after.detach() for before, after in pairs]
                if local == "kept":
                    moments[n] = optimizer.state_dict()["state"]
            for slot, each in enumerate(given):
                sums[slot] += through(each * ((high - low) / (stop - first)), n, slot)
        agreed = [through(each, "sum", slot) for slot, each in enumerate(sums)]
        if not early:
            outer([parameter - each for parameter, each in zip(trained, agreed, strict=True)])
            continue
        for parameter, each in zip(trained, agreed, strict=True):
            parameter.grad = each
        nn.utils.clip_grad_norm_(trained, CLIP)
        shared.step()
        if local == "kept":
            moments = [copy.deepcopy(shared.state_dict()["state"]) for _ in moments]
    return dict(server.named_parameters())


@pytest.mark.parametrize(("workers", "local"), [(2, "kept"), slow(3, "reset")])
def test_steps_together_and_then_rounds_with_a_codec_equal_plain_pytorch(run, workers, local):
    wanted, other = (diloco_with_int4(local, steps) for steps in (2, 0))
    program = trained(run, workers, *LATER, recipe="no_bias", local=local)
    found = load_file(program.run / "model.safetensors")
    assert (wanted["0.weight"] - other["0.weight"]).abs().max() > 1e-3
    near = {"rtol": 1e-6, "atol": 2e-7}  # of sums of float32 in another order: 1.1e-7 was seen
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), **near, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("coded", [CODED, LATER], ids=["rounds", "later"])
def test_diloco_with_int4_has_the_same_bits_on_any_workers_and_resumed(run: Start, coded):
    """What a codec leaves out goes with its participant, or with its elements."""
    sums = {
        workers: trained(run, workers, *coded, recipe="classes", local="kept").summary
        for workers in (1, 2, 3)
    }
    hashes = {each["parameters_sha256"] for each in sums.values()}
    assert "number of workers" not in sums[3]["same_as_one_machine"]
    for last in (1, 2, 3):
        stop = f"train.stop_after_steps={last}"
        stopped = trained(run, 3, *coded, stop, recipe="classes", local="kept")
        resumed = instep.resume(stopped.run, workers=2, quiet=True)
        hashes.add(resumed.summary["parameters_sha256"])
    assert len(hashes) == 1
    plain = trained(run, 2, *coded, 'sync.codec="none"', recipe="classes", local="kept")
    assert plain.summary["parameters_sha256"] not in hashes


@pytest.mark.slow
@pytest.mark.parametrize("start_after", [0, 40])
@pytest.mark.parametrize("local", LOCAL)
def test_workers_killed_in_rounds_with_a_codec_leave_no_trace(
    run: Start, start: Start, local, start_after
):
    """Before the rounds, at the turn, and in them; and members change."""
    longer = (*QUICK, *CODED, "train.steps=80", "data.loaders=0", optimizers(local))
    longer = (*longer, f"sync.options.start_after={start_after}")
    settings = in_order((*longer, "workers=3", "arguments.pause_s=0.002"))
    program = run("averages.py:classes", *settings)
    program.until(program.is_training, "training")
    draw = random.Random(4)
    for _ in range(3):
        time.sleep(draw.uniform(0.3, 0.9))  # the moment is what is drawn
        kill(draw.choice(list(newest_pids(program).values())))
    for workers in (2, 4):
        asked = start("-m", "instep", "scale", program.run, "--workers", workers)
        assert asked.end() == 0, asked.stderr
    assert program.end() == 0, program.stderr
    assert program.events("worker_lost")
    alone = trained(run, 1, *longer, recipe="classes", local=local)
    assert program.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    assert program.summary["loss"] == pytest.approx(alone.summary["loss"], rel=1e-6)
    assert program.summary["unrecorded_steps"] == 0


@pytest.mark.slow
def test_participants_that_begin_anew_are_named(run: Start):
    """The memory of the only worker that had them is gone with it: 1 and 2, or 1 alone after the
    last round of an epoch, which has fewer."""
    longer = (*QUICK, *CODED, "train.steps=60", "data.loaders=0", optimizers("kept"), "workers=3")
    program = run(
        "averages.py:classes", *in_order(longer), "arguments.pause_s=0.005", 'train.deal="even"'
    )
    program.until(program.is_training, "training")
    kill_with_its_memory(newest_pids(program)[1])
    assert program.end() == 0, program.stderr
    texts = [event["text"] for event in program.events("warning")]
    (named,) = [text for text in texts if "began anew" in text]
    assert re.match(r"participants? 1(, 2)? began anew: what they remembered, of step \d", named)
    assert "(states of optimizers, what sync.codec left out)" in named
    page = (program.run / "report.html").read_text()
    assert named[: named.index(":")] in page


@pytest.mark.slow
def test_how_far_participants_are_apart_is_noted_and_can_end_a_run(run: Start):
    program = trained(run, 2, *CODED, "stop.spread=1e-3", recipe="classes")
    apart = program.events("participants_apart")
    assert [each["step"] for each in apart] == [1]
    assert apart[0]["distance"] > 1e-3 * apart[0]["way"] > 0
    assert 0 < apart[0]["divergence"] < 1
    assert (program.summary["rule"], program.summary["steps"]) == ("spread", 1)
    assert "times as far from their mean as it moved, above 0.001" in program.summary["rule_text"]


def optimizers(local):
    return f'sync.options.local_optimizers="{local}"'


def in_order(settings):
    """The strategy's name first: it takes away options that stand before it."""
    return sorted(settings, key=lambda each: not each.startswith("sync.name"))


def trained(run, workers, *settings, recipe="all_moves", local="reset"):
    settings = (*QUICK, optimizers(local), *settings, f"workers={workers}")
    settings = in_order(settings)
    program = run(f"averages.py:{recipe}", *settings)
    assert program.end() == 0, program.stderr
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    return program


def check_equal(program, wanted):
    found = load_file(program.run / "model.safetensors")
    assert wanted.keys() - found.keys() <= {"again.weight"}  # which is the first's
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("workers", "local"),
    [slow(2, "kept"), slow(2, "reset"), *(slow(n, local) for n in (1, 3) for local in LOCAL)],
)
def test_a_run_equals_federated_averaging_in_plain_pytorch(run: Start, wanted, workers, local):
    apart = (wanted["kept"]["0.weight"] - wanted["reset"]["0.weight"]).abs().max()
    assert apart > 1e-3  # so that this can fail
    check_equal(trained(run, workers, local=local), wanted[local])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The hash that one undisturbed worker comes to, with bits; by what optimizers do."""

    @functools.cache
    def of(local):
        folder = tmp_path_factory.mktemp("alone")
        settings = (*QUICK, *BITS, optimizers(local), "workers=1")
        program = Started(folder, instep_run(folder, "averages.py:all_moves", *settings))
        try:
            assert program.end() == 0, program.stderr
            return program.summary["parameters_sha256"]
        finally:
            program.kill()

    return of


@pytest.mark.tail
@pytest.mark.parametrize(
    ("workers", "local"),
    [
        (3, "reset"),
        slow(2, "reset"),
        slow(5, "reset"),
        slow(2, "kept"),
        slow(3, "kept"),
        slow(5, "kept"),
    ],
)
def test_with_bits_the_hash_is_the_same_on_any_number_of_workers(
    run: Start, wanted, alone, workers, local
):
    program = trained(run, workers, *BITS, local=local)
    check_equal(program, wanted[local])
    assert program.summary["parameters_sha256"] == alone(local)


@pytest.mark.slow
@pytest.mark.parametrize("local", LOCAL)
def test_a_run_is_resumed_from_a_checkpoint_between_two_rounds_on_other_workers(
    run: Start, start: Start, alone, local
):
    """Checkpoints and stops count rounds, and the scheduler is where its local steps have led."""
    stops = ("train.stop_after_steps=3", "checkpoint.every=2")
    program = trained(run, 2, *BITS, *stops, local=local)
    assert program.summary["steps"] == 3
    assert {step for step, _ in published(program.run / "checkpoints")} == {2, 3}
    resumed = instep.resume(program.run, workers=3, quiet=True)
    assert resumed.summary["steps"] == ROUNDS
    assert resumed.summary["parameters_sha256"] == alone(local)
    replayed = start("-m", "instep", "replay", program.run, "--step", 3)
    assert replayed.end() == 0, replayed.stderr
    assert "the same bits" in replayed.stdout


@pytest.mark.parametrize(
    ("kills", "rounds", "local", "start_after"),
    [
        slow(3, 60, "reset", 0),
        slow(3, 60, "kept", 0),
        slow(6, 200, "kept", 120),
        slow(100, 1200, "reset", 0),
        slow(100, 1200, "kept", 0),
    ],
)
def test_killed_workers_leave_no_trace(run: Start, kills, rounds, local, start_after):
    """Killed anywhere in a round: in its local steps, and in what is said after them."""
    longer = (*QUICK, *BITS, f"train.steps={rounds}", "data.loaders=0", optimizers(local))
    longer += (f"sync.options.start_after={start_after}",)
    draw, killed = random.Random(kills), 0
    program = run("averages.py:all_moves", *longer, "workers=3", "arguments.pause_s=0.002")
    program.until(program.is_training, "training")
    while killed < kills and program.process.poll() is None:
        time.sleep(draw.uniform(0.2, 0.8))  # the moment is what is drawn
        killed += kill(draw.choice(list(newest_pids(program).values())))
    assert program.end() == 0, program.stderr
    assert len(program.events("worker_lost")) > kills // 2
    alone = trained(run, 1, *longer, local=local)
    assert program.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0


@pytest.mark.slow
def test_kept_optimizers_go_with_their_participants_where_a_run_is_scaled(run: Start, start: Start):
    longer = (*QUICK, *BITS, "train.steps=150", "data.loaders=0", optimizers("kept"))
    program = run("averages.py:all_moves", *longer, "workers=2", "arguments.pause_s=0.001")
    program.until(program.is_training, "training")
    for workers in (4, 1, 3):
        asked = start("-m", "instep", "scale", program.run, "--workers", workers)
        assert asked.end() == 0, asked.stderr
        program.until(
            lambda: len(program.events("generation_started")[-1]["members"]) == workers,  # noqa: B023
            "scaled",
        )
    assert program.end() == 0, program.stderr
    alone = trained(run, 1, *longer, local="kept")
    assert program.summary["parameters_sha256"] == alone.summary["parameters_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("local", ["reset", "kept"])
def test_what_the_others_have_computed_of_a_round_is_not_computed_again(
    run: Start, alone, tmp_path, local
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
        local=local,
    )
    assert len(program.events("worker_lost")) == 1
    noted = [line.split() for line in notes.read_text().splitlines()]
    times = {unit: [int(seed) for _, seed in noted].count(keys[unit]) for unit in keys}
    dead = next(pid for pid, seed in noted if int(seed) == keys[4, last])
    by_the_dead = {unit for unit in keys if [dead, str(keys[unit])] in noted}
    assert by_the_dead == {(n, local) for n in (3, 4) for local in range(LOCAL_STEPS)}
    assert times == {unit: 2 if unit in by_the_dead else 1 for unit in keys}
    assert program.summary["parameters_sha256"] == alone(local)


OWN = RECIPES / "own_rounds.py"


def own_loop(
    start, workers, local, advanced="session", pause_s=0.0, epochs=2, stop_after=0, more=()
):
    options = ("--set", f'data.unreadable="{"skip" if more else "stop"}"')
    options += ("--workers", workers, "--set", f"train.stop_after_steps={stop_after}")
    arguments = (workers, local, advanced, pause_s, epochs, *more)
    return start("-m", "instep", "run", OWN, *options, "--", *arguments)


@pytest.mark.parametrize(
    ("workers", "local", "advanced"),
    [
        (2, "kept", "session"),
        slow(2, "reset", "epoch"),
        slow(3, "kept", "epoch"),
        slow(3, "reset", "session"),
        slow(1, "kept", "session"),
    ],
)
def test_a_loop_of_ones_own_takes_the_same_local_steps(start: Start, workers, local, advanced):
    program = own_loop(start, workers, local, advanced)
    assert program.end() == 0, program.stderr
    assert program.summary["steps"] == 6
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    assert program.summary["same_as_one_machine"].startswith("no: sync.name = 'averaging'")
    check_equal(program, federated_averaging(local, workers, 6, advanced=advanced))


def of_a_recipe(run, workers, local, epochs=2, more=()):
    """The hash that a recipe's run of the same job comes to."""
    epochs = (f"train.epochs={epochs}", f"sync.participants={workers}")
    settings = [each for each in QUICK if not each.startswith("train.steps")]
    settings += [*BITS, optimizers(local), *epochs, *more, "workers=1"]
    program = run("averages.py:all_moves", *settings)
    assert program.end() == 0, program.stderr
    return program.summary["parameters_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("local", LOCAL)
def test_a_loop_of_ones_own_has_the_hash_of_a_recipe(start: Start, run: Start, local):
    program = own_loop(start, 3, local)
    assert program.end() == 0, program.stderr
    assert program.summary["parameters_sha256"] == of_a_recipe(run, 3, local)


@pytest.mark.slow
def test_local_steps_without_a_readable_sample_are_left_out_in_a_loop_of_ones_own_too(
    start: Start, run: Start
):
    program = own_loop(start, 2, "kept", more=("gaps",))
    assert program.end() == 0, program.stderr
    skipped = ('data.unreadable="skip"', "arguments.gaps=true")
    wanted = of_a_recipe(run, 2, "kept", more=skipped)
    assert program.summary["parameters_sha256"] == wanted
    assert wanted != of_a_recipe(run, 2, "kept")


@pytest.mark.slow
def test_a_loop_of_ones_own_is_resumed_between_two_rounds(start: Start):
    whole, begun = own_loop(start, 2, "kept"), own_loop(start, 2, "kept", stop_after=4)
    assert (whole.end(), begun.end()) == (0, 0), begun.stderr
    assert begun.summary["steps"] == 4  # the first of the second epoch
    resumed = start("-m", "instep", "resume", begun.run)
    assert resumed.end() == 0, resumed.stderr
    sums = [RunFolder(each.run).last("model_saved") for each in (whole, begun)]
    assert [each["step"] for each in sums] == [6, 6]
    assert sums[0]["parameters_sha256"] == sums[1]["parameters_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("local", LOCAL)
def test_killed_workers_of_a_loop_of_ones_own_leave_no_trace(start: Start, run: Start, local):
    """Others have two participants until somebody is there again: each from its beginning."""
    program = own_loop(start, 3, local, pause_s=0.02, epochs=25)
    program.until(program.is_training, "training")
    killed = kill_members(program, 6, random.Random(local), pauses_s=(0.1, 0.6), most_idle=6)
    assert program.end() == 0, program.stderr
    assert killed.total() == 6
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    assert program.summary["parameters_sha256"] == of_a_recipe(run, 3, local, epochs=25)


WITHIN = """
import averages, instep, torch
from torch import nn
sync = {"name": "averaging", "participants": 2, "options": {"local_steps": 3}}
with instep.join(train={"epochs": 2, "global_batch": 20}, sync=sync) as session:
    model = averages.model()
    optimizer = averages.adam(model.parameters())
    scheduler = averages.half_way_down(optimizer)
    model, optimizer, loader, scheduler = session.prepare(
        model, optimizer, averages.pairs(), scheduler
    )
    for epoch in session.epochs():
        for inputs, target in loader:
            session.backward(nn.functional.mse_loss(model(inputs), target))
            %s
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("pass", "round 1: optimizer.step() was not called for a batch"),
        ("optimizer.step(); scheduler.step()", "Give the scheduler as prepare(scheduler=...)"),
        ("optimizer.step(); session.sum(1)", "was called in the middle of round 1"),
        ("optimizer.step(); break", "the loop was left in the middle of step 1"),
        ("optimizer.step(); optimizer.step()", "optimizer.step() was called twice"),
        ("session.backward(model(inputs).sum())", "backward() was called twice"),
    ],
)
def test_what_has_no_sense_in_a_round_is_refused(start: Start, tmp_path, more, sentence):
    script = tmp_path / "script.py"
    script.write_text(WITHIN % more)
    program = start("-m", "instep", "run", script, environment={"PYTHONPATH": paths(RECIPES)})
    assert program.end() in (2, 5), program.stderr
    assert sentence in program.error


@pytest.mark.slow
def test_a_model_that_is_not_averaged_yet_is_not_evaluated(start: Start, tmp_path):
    """A `break` leaves the loop in its round; alone, with nobody who waits."""
    script = tmp_path / "script.py"
    alone = WITHIN.replace('"participants": 2', '"participants": 1')
    script.write_text(alone % "optimizer.step(); break\n        session.validated(9, accuracy=1.0)")
    program = start(script, environment={"PYTHONPATH": paths(RECIPES)})
    assert program.end() != 0
    assert (
        "session.validated was called in the middle of round 1 (a loop that `break` has left"
        in (program.stderr)
    )


@pytest.mark.slow
def test_the_example_of_the_guide_trains_and_sends_as_much_as_it_says(start: Start, tmp_path):
    guide = (Path(__file__).parents[2] / "docs/guides/averaging.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", guide, re.M | re.S)
    codes = dict(reversed(blocks))  # the first of each language
    (tmp_path / "waves.py").write_text(codes["python"])
    (tmp_path / "job.toml").write_text(codes["toml"])
    sent = {}
    for local in LOCAL:
        settings = ("train.epochs=3", optimizers(local))
        more = [word for each in settings for word in ("--set", each)]
        program = start("-m", "instep", "run", tmp_path / "job.toml", *more)
        assert program.end() == 0, program.stderr
        assert (program.summary["steps"], program.summary["samples"]) == (24, 24 * 512)
        sent[local] = program.summary["wire_bytes"] / 24 / 1e6
    assert sent == {
        local: pytest.approx(float(said), rel=0.1)
        for local, said in re.findall(r"\| `averaging`, `\"(\w+)\"` \| ([\d.]+) MB", guide)
    }


def paths(*folders):
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


@pytest.mark.tail
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
    settings = ("sync.options.local_steps=1", "train.steps=10", "train.max_grad_norm=1e9")
    check_equal(trained(run, 2, *settings, recipe="plain_sgd"), model.state_dict())
