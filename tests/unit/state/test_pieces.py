"""A checkpoint in parts: what is damaged, missing or of another run is refused by name."""

import itertools
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from meshes import turn_of
from torch import nn

from instep.engine.state.capture import CommitProgress, capture, read_checkpoint, restore
from instep.errors import CheckpointError, SpecError
from instep.job.start import StartSpec
from instep.recipe.start.file import start_file
from instep.state.boxes import BoxCut
from instep.state.compare import differences, saved
from instep.state.export.export import copy_model
from instep.state.export.whole import extract
from instep.state.files.staging import SAVING, write_tensors
from instep.state.intact import newest_intact
from instep.state.load import load_model
from instep.state.open_pieces import open_pieces
from instep.state.pieces import CUTS
from instep.state.save import CheckpointShard, CheckpointWriter
from instep.state.snapshot import parameters_sha256

NAMES = ("0.weight", "0.bias", "1.weight")


def net(seed=0, width=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, width, bias=False))
    turn = turn_of(model)
    model(torch.randn(3, 4)).square().sum().backward()
    turn.update.optimizer.step()
    return model, turn


def parts_of(model, turn, rows=(3,), names=NAMES):
    """What two ranks hold: the first `rows` rows of each tensor, and the rest."""
    whole = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for kept, value in turn.update.optimizer.state[parameter].items():
            whole[f"optimizer/{name}/{kept}"] = value
    ends = [0, *rows, 5]
    for first, stop in itertools.pairwise(ends):
        tensors, cuts = {}, {}
        for name, tensor in whole.items():
            if not tensor.dim():
                if first == 0:
                    tensors[name] = tensor
                continue
            tensors[name] = tensor[first:stop]
            box = [(0, length) for length in tensor.shape]
            box[0] = min(first, tensor.shape[0]), min(stop, tensor.shape[0])
            cuts[name] = BoxCut(tuple(tensor.shape), tuple(box))
        yield tensors, cuts


def write(folder, model, turn, parts, step=5):
    """As ranks write it: each its part beside the checkpoints, and one publishes them."""
    writer = CheckpointWriter(folder)
    shards = {}
    for number, (tensors, cuts) in enumerate(parts):
        path = folder / f"{SAVING}{step}-part-{number}-1"
        entry = write_tensors(path, tensors, {CUTS: json.dumps(cuts)})
        shards[f"part-{number}"] = CheckpointShard(path, entry)
    snapshot = capture(CommitProgress(step=step), model, [turn])
    for group in ("model", "optimizer"):
        del snapshot.tensors[group]
    optimizer = snapshot.facts["optimizer"]["dict"]
    optimizer["state"] = {"dict": {}}
    writer.save(snapshot, shards=shards)
    writer.finish()
    (outcome,) = writer.poll()
    return outcome.path


def read(path, model, turn):
    restore(read_checkpoint(path, model, [turn]), path, model, [turn])


def test_a_plain_run_puts_parts_together_and_keeps_its_memory(tmp_path):
    model, turn = net()
    path = write(tmp_path / "checkpoints", model, turn, parts_of(model, turn))
    other, its = net(1)
    before = [parameter.data_ptr() for parameter in other.parameters()]
    read(path, other, its)
    assert parameters_sha256(other) == parameters_sha256(model)
    assert [parameter.data_ptr() for parameter in other.parameters()] == before
    mine, theirs = (each.update.optimizer.state_dict()["state"] for each in (turn, its))
    for number, kept in mine.items():
        assert kept.keys() == theirs[number].keys()
        for name, value in kept.items():
            assert torch.equal(value, theirs[number][name])


def test_only_the_files_and_slices_that_are_needed_are_read(tmp_path):
    model, turn = net()
    path = write(tmp_path / "checkpoints", model, turn, parts_of(model, turn))
    flip(path / "part-1.safetensors", -1)
    pieces = open_pieces(path, {}).pieces
    upper = pieces.read("model/0.weight", ((1, 3), (0, 2)))
    assert torch.equal(upper, model[0].weight[1:3, :2])
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors is damaged"):
        pieces.read("model/0.weight", ((1, 4), (0, 2)))


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def remove(path):
    (path / "part-1.safetensors").unlink()


def truncate(path):
    file = path / "part-1.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def exchange(path):
    one, other = (path / f"part-{number}.safetensors" for number in (0, 1))
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (remove, r"part-1\.safetensors is missing"),
        (truncate, r"part-1\.safetensors is .*truncated"),
        (lambda path: flip(path / "part-1.safetensors", -1), r"part-1\.safetensors is damaged"),
        (exchange, r"part-0\.safetensors is (changed|truncated)"),
    ],
)
def test_a_part_that_is_not_the_one_that_was_saved_is_refused_by_name(tmp_path, harm, says):
    model, turn = net()
    folder = tmp_path / "checkpoints"
    first = write(folder, model, turn, parts_of(model, turn), step=4)
    path = write(folder, model, turn, parts_of(model, turn), step=5)
    harm(path)
    with pytest.raises(CheckpointError, match=says):
        read(path, *net(1))
    chosen, refused = newest_intact(folder)
    assert chosen == first
    assert re.search(says, refused[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda parts: parts.pop(), r"a part of model/0.bias \[5\] is in none of its files"),
        (
            lambda parts: parts[1][0].pop("optimizer/0.bias/exp_avg"),
            r"a part of optimizer/0.bias/exp_avg \[5\] is in none .*\(3, 5\)",
        ),
        (
            lambda parts: parts.__setitem__(1, [*parts_of(*net(0, width=3))][1]),
            r"1.weight is torch.float32 \[2, 5\] in one file and torch.float32 \[3, 5\] in another",
        ),
        (
            lambda parts: parts[1][1].update({"model/0.weight": BoxCut((5, 4), ((0, 5), (0, 4)))}),
            r"part-1.safetensors is damaged: model/0.weight has the shape \[2, 4\] and is said",
        ),
        (
            lambda parts: [each[0].pop("model/0.bias") for each in parts],
            r"2 of 3 tensors match; missing: 0.bias",
        ),
    ],
)
def test_parts_that_are_not_a_whole_model_are_refused_and_nothing_is_changed(
    tmp_path, change, says
):
    model, turn = net()
    parts = [*parts_of(model, turn)]
    change(parts)
    path = write(tmp_path / "checkpoints", model, turn, parts)
    other, its = net(1)
    before = parameters_sha256(other)
    with pytest.raises(CheckpointError, match=says):
        read(path, other, its)
    assert parameters_sha256(other) == before


def test_another_model_is_refused(tmp_path):
    model, turn = net()
    path = write(tmp_path / "checkpoints", model, turn, parts_of(model, turn))
    with pytest.raises(CheckpointError, match=r"1.weight \(\[2, 5\] when saved, \[3, 5\] in"):
        read(path, *net(0, width=3))
    tied = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2, bias=False), nn.Linear(5, 2, bias=False))
    tied[2].weight = tied[1].weight
    with pytest.raises(CheckpointError, match=r"missing: 2.weight"):
        read(path, tied, turn_of(tied))


def test_the_export_of_a_checkpoint_in_parts_is_one_ordinary_file(tmp_path):
    model, turn = net()
    path = write(tmp_path / "checkpoints", model, turn, parts_of(model, turn, rows=(1, 3)))
    size = copy_model(path, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size == size
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    other, _ = net(1)
    load_model(tmp_path / "model.safetensors", other)
    assert parameters_sha256(other) == parameters_sha256(model)
    flip(path / "part-2.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"part-2\.safetensors is damaged"):
        copy_model(path, tmp_path / "other.safetensors")
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"checkpoints", "model.safetensors"}


def test_a_run_cannot_start_from_a_checkpoint_in_parts_and_is_told_how(tmp_path):
    model, turn = net()
    path = write(tmp_path / "checkpoints", model, turn, parts_of(model, turn))
    with pytest.raises(SpecError, match=r"instep export .* --step 5 --to FILE.safetensors"):
        start_file(StartSpec(model=str(path)))


def test_checkpoints_of_different_meshes_are_compared_tensor_by_tensor(tmp_path):
    model, turn = net()
    paths = [
        write(tmp_path / f"in-{rows}", model, turn, parts_of(model, turn, rows))
        for rows in [(3,), (1, 4)]
    ]
    writer = CheckpointWriter(tmp_path / "plain")
    writer.save(capture(CommitProgress(step=5), model, [turn]))
    writer.finish()
    paths.append(writer.poll()[0].path)
    for one in paths:
        assert sum(len(kept) for _, kept in saved(one)) >= 3 + 3 * 3
        for other in paths:
            assert not list(differences(one, other))
    with torch.no_grad():
        model[0].weight[4, 1] += 1
        turn.update.optimizer.state[model[0].bias]["exp_avg"][0] += 1
    changed = write(tmp_path / "changed", model, turn, parts_of(model, turn, (2,)))
    for one in paths:
        found = {(group, name) for group, name, _ in differences(one, changed)}
        assert found == {("model", "0.weight"), ("optimizer", "0.bias/exp_avg")}


def test_an_optimizer_that_moves_less_than_it_did_is_refused(tmp_path):
    model, turn = net()
    path = write(tmp_path / "checkpoints", model, turn, parts_of(model, turn))
    other, _ = net(1)
    other[1].weight.requires_grad_(False)
    fewer = turn_of(other, lambda parameters: torch.optim.Adam(parameters[:-1]))
    with pytest.raises(CheckpointError, match=r"it moved 1.weight, and does not now"):
        read(path, other, fewer)
    groups = turn_of(other, lambda p: torch.optim.Adam([{"params": p[:1]}, {"params": p[1:]}]))
    with pytest.raises(
        CheckpointError,
        match=r"number of parameter groups of the optimizer has changed: 2 now, 1 when",
    ):
        read(path, other, groups)


def test_what_servers_saved_in_flat_ranges_is_read_by_the_box(tmp_path):
    model, turn = net()
    snapshot = capture(CommitProgress(step=5), model, [turn])
    state = turn.update.optimizer.state
    shards = {"shard-0": {}, "shard-1": {}}
    for name, parameter in model.named_parameters():
        cut, kept = parameter.numel() // 3, state[parameter]
        for number, (first, stop) in enumerate([(0, cut), (cut, parameter.numel())]):
            of = f"{name}/{{}}/{first}:{stop}"
            shards[f"shard-{number}"] |= {
                of.format("step"): kept["step"],
                of.format("turns:int"): torch.tensor(3),
                of.format("exp_avg"): kept["exp_avg"].reshape(-1)[first:stop],
            }
    snapshot.tensors.update(shards)
    snapshot.tensors["optimizer"] = {}
    snapshot.facts["optimizer"]["dict"]["state"] = {"dict": {}}
    writer = CheckpointWriter(tmp_path / "checkpoints")
    writer.save(snapshot)
    writer.finish()
    path = writer.poll()[0].path
    found = open_pieces(path, {}).pieces
    wanted = state[model[0].weight]["exp_avg"]
    assert torch.equal(found.read("optimizer/0.weight/exp_avg", ((1, 4), (2, 3))), wanted[1:4, 2:3])
    assert found.read("optimizer/0.weight/step") == 1
    other, its = net(1)
    restore(open_pieces(path, {}), path, other, [its])
    kept = its.update.optimizer.state[other[0].weight]
    assert kept["turns"] == 3
    assert type(kept["turns"]) is int
    assert torch.equal(kept["exp_avg"], wanted)


WIDTH, LAYERS = 1 << 20, 8  # 4 MB each


def wide(seed=0):
    torch.manual_seed(seed)
    return nn.ParameterDict({str(n): nn.Parameter(torch.randn(WIDTH)) for n in range(LAYERS)})


def private_bytes():
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def watched(work):
    """The most private memory that `work` held at once, beyond what there was."""
    most, over, before = [0], threading.Event(), private_bytes()

    def watch():
        while not over.is_set():
            most[0] = max(most[0], private_bytes() - before)
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    return most[0]


def reads(path):
    """Half of every tensor, copied into memory that is there: `own`."""
    own = [torch.zeros(WIDTH // 2) for _ in range(LAYERS)]

    def work():
        pieces = open_pieces(Path(path), {}).pieces
        for name, mine in enumerate(own):
            mine.copy_(pieces.read(f"model/{name}", ((0, WIDTH // 2),)))

    return watched(work)


def both(path, target):
    """In a process of its own: what reading holds, and what extracting does."""
    print(reads(path), watched(lambda: extract(Path(path), Path(target))))


@pytest.mark.slow
def test_reading_and_extracting_hold_one_tensor_at_a_time(tmp_path):
    model = wide()
    turn = turn_of(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    half = WIDTH // 2
    parts = [
        (
            {f"model/{name}": value[first : first + half] for name, value in model.items()},
            {f"model/{name}": BoxCut((WIDTH,), ((first, first + half),)) for name in model},
        )
        for first in (0, half)
    ]
    path = write(tmp_path / "checkpoints", model, turn, parts)
    tensor, target = 4 * WIDTH, tmp_path / "all.safetensors"
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
import test_pieces
test_pieces.both({str(path)!r}, {str(target)!r})
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not out.returncode, out.stderr
    read, extracted = map(int, out.stdout.split())
    assert 0 < read < 2 * tensor
    assert 0 < extracted < 3 * tensor
    whole = safetensors.torch.load_file(tmp_path / "all.safetensors")
    assert all(torch.equal(value, whole[name]) for name, value in model.items())
