"""Streaming DiLoCo against the same in plain PyTorch; on any workers, and after kills."""

import copy
import itertools
import random
import time

import averages as recipes
import pytest
import torch
from safetensors.torch import load_file
from started import Start, kill, newest_pids
from torch import nn

import instep
from instep.data.order import Order, micro_batch

pytestmark = pytest.mark.process

BATCH, PARTICIPANTS, FRAGMENTS, LOCAL_STEPS, COMMITS = 20, 4, 4, 8, 10
STEPS = LOCAL_STEPS // FRAGMENTS
SIZE = 6 * 128 + 2 * 128 + 2 * 128 + 2  # elements that are trained


def in_plain_pytorch(delay=0, mixing=0.5, commits=COMMITS):
    """Each participant has a model and an optimizer of its own; of ours the order of the data."""
    recipe, order = recipes.no_bias(), Order(recipes.SAMPLES, 0)
    torch.manual_seed(0)
    shared, data = recipe.model(), recipe.train.tensors
    models = [copy.deepcopy(shared) for _ in range(PARTICIPANTS)]
    optimizers = [recipe.optimizer(model.parameters()) for model in models]
    values, momentum = flat(shared), torch.zeros(SIZE)
    marks = [n * SIZE // FRAGMENTS for n in range(FRAGMENTS + 1)]
    cuts = [slice(*each) for each in itertools.pairwise(marks)]
    left = dict.fromkeys(range(PARTICIPANTS), 0)  # the commit in which each took its last steps
    agreed = [0] * FRAGMENTS  # the commit whose models have agreed
    epoch, first, sent = 0, 0, {}

    def agree(cut, theirs):
        """An outer step of Nesterov's momentum, of the weighted mean."""
        total = sum(weight for weight, _ in theirs.values())
        way = sum(weight / total * (values[cut] - own[cut]) for weight, own in theirs.values())
        momentum[cut] = 0.9 * momentum[cut] + way
        values[cut] -= 0.7 * (way + 0.9 * momentum[cut])

    for commit in range(1, commits + 1):
        stop = min(first + BATCH * STEPS, recipes.SAMPLES)
        parts = -(-(stop - first) * PARTICIPANTS // (BATCH * STEPS))
        late = sent if delay and commit > 1 and commit < commits else {}
        before = flat(shared)  # without what agrees in this commit
        if late:
            agree(cuts[(commit - 2) % FRAGMENTS], late)
        sent, buffers = {}, {name: 0.0 for name, _ in shared.named_buffers()}
        for place in range(parts):
            model, own = models[place], flat(models[place])
            for cut, when in zip(cuts, agreed, strict=True):
                if when >= left[place]:  # it has agreed since, or on what was left then
                    own[cut] = before[cut]
            put(model, own)
            model.load_state_dict(dict(shared.named_buffers()), strict=False)
            low, high = micro_batch(first, stop, place, parts)
            for number in range(STEPS + 1):
                if late and number == delay:
                    cut, own = cuts[(commit - 2) % FRAGMENTS], flat(model)
                    own[cut] = mixing * own[cut] + (1 - mixing) * values[cut]
                    put(model, own)
                if number == STEPS:
                    break
                rows = order.indices(epoch, *micro_batch(low, high, number, STEPS))
                inputs, target = (tensor[torch.from_numpy(rows)] for tensor in data)
                optimizers[place].zero_grad()
                nn.functional.cross_entropy(model(inputs), target).backward()
                optimizers[place].step()
            left[place], sent[place] = commit, (high - low, flat(model))
            for name, buffer in model.named_buffers():
                buffers[name] = buffers[name] + (high - low) / (stop - first) * buffer.double()
        if late:
            agreed[(commit - 2) % FRAGMENTS] = commit - 1
        due = [] if delay else [(commit - 1) % FRAGMENTS]
        for fragment in range(FRAGMENTS) if commit == commits else due:
            agree(cuts[fragment], sent)
            agreed[fragment] = commit
        put(shared, values)
        for name, buffer in shared.named_buffers():
            mean = buffers[name]
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        epoch, first = (epoch + 1, 0) if stop == recipes.SAMPLES else (epoch, stop)
    return shared.state_dict()


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@torch.no_grad()
def put(model, values):
    parts = values.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.copy_(part.view(parameter.shape))


def settings(*more, delay=0, commits=COMMITS):
    return (
        'sync.name="diloco"',
        f"train.steps={commits}",
        f"train.global_batch={BATCH}",
        "train.threads=1",
        f"sync.participants={PARTICIPANTS}",
        f"sync.options.local_steps={LOCAL_STEPS}",
        f"sync.options.fragments={FRAGMENTS}",
        f"sync.options.delay={delay}",
        "data.loaders=0",
        *more,
    )


def trained(run, workers, *more, **named):
    program = run("averages.py:no_bias", *settings(*more, **named), f"workers={workers}")
    assert program.end() == 0, program.stderr
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    return program


BITS = 'train.determinism="bits"'


@pytest.mark.tail
@pytest.mark.parametrize(
    ("workers", "delay", "mixing"),
    [
        (2, 1, 0.5),
        *(
            pytest.param(n, *each, marks=pytest.mark.slow)
            for n in (1, 3)
            for each in [(0, 0.5), (2, 0.25)]
        ),
    ],
)
def test_a_run_equals_streaming_diloco_in_plain_pytorch(run: Start, workers, delay, mixing):
    wanted = in_plain_pytorch(delay, mixing)
    others = [in_plain_pytorch(other) for other in {0, 1, 2} - {delay}]
    program = trained(run, workers, f"sync.options.mixing={mixing}", delay=delay)
    found = load_file(program.run / "model.safetensors")
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5, msg=name)
    verdict = "4 participants after every 2 local steps, one of 4 fragments at a time"
    assert verdict in program.summary["same_as_one_machine"]
    apart = [(other["0.weight"] - wanted["0.weight"]).abs().max() for other in others]
    assert min(apart) > 1e-2  # so that this can fail


INT4 = 'sync.codec="int4"'


def stopped_and_resumed(run, *more, **named):
    stopped = trained(run, 3, *more, "train.stop_after_steps=5", **named)
    return instep.resume(stopped.run, workers=2, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), (INT4,)], ids=["plain", "int4"])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_bits_are_the_same_on_any_workers_and_resumed(run: Start, more, delay):
    hashes = {
        trained(run, workers, BITS, *more, delay=delay).summary["parameters_sha256"]
        for workers in (1, 2, 3)
    }
    resumed = stopped_and_resumed(run, BITS, *more, delay=delay)
    assert hashes == {resumed.summary["parameters_sha256"]}


@pytest.mark.slow
@pytest.mark.parametrize(("more", "delay"), [((), 0), ((), 2), ((INT4,), 1)])
def test_killed_workers_leave_no_trace(run: Start, start: Start, more, delay):
    longer = settings(BITS, *more, delay=delay, commits=80)
    program = run("averages.py:no_bias", *longer, "workers=3", "arguments.pause_s=0.002")
    program.until(program.is_training, "training")
    draw = random.Random(delay)
    for _ in range(3):
        time.sleep(draw.uniform(0.3, 0.9))  # the moment is what is drawn
        kill(draw.choice(list(newest_pids(program).values())))
    asked = start("-m", "instep", "scale", program.run, "--workers", 2)
    assert asked.end() == 0, asked.stderr
    assert program.end() == 0, program.stderr
    assert program.events("worker_lost")
    alone = trained(run, 1, BITS, *more, delay=delay, commits=80)
    assert program.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
