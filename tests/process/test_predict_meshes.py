"""`instep predict` on replicas of several processes: the numbers of one process."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import predicts
import predicts_words
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_model
from started import RECIPES, Start, Started, kill
from torch import Tensor, nn

pytestmark = pytest.mark.process

BATCH = 8


def made(source: Any) -> nn.Module:
    """A model whose numbers differ from those that its recipe begins with."""
    torch.manual_seed(4)
    if source is predicts_words:
        return predicts_words.Net()
    model = predicts.model()
    for _ in range(3):
        model(torch.randn(16, 6))  # moves the running statistics
    return model


def command(folder: Path, source: Any = predicts_words, data: str = "data") -> list[object]:
    file = folder / "model.safetensors"
    if not file.exists():
        save_model(made(source), str(file))
    recipe = "plain" if source is predicts else "recipe"
    name = RECIPES / f"{source.__name__}.py"
    asked = ["--recipe", f"{name}:{recipe}", "--data", f"{name}:{data}", "--batch", BATCH]
    return ["-m", "instep", "predict", file, *asked, "--json", "--set", "data.loaders=0"]


def on(workers: int, shard: int) -> list[object]:
    return ["--workers", workers, "--set", f"mesh.shard={shard}"]


def by_hand(source: Any = predicts_words, predict: Callable[..., Tensor] | None = None) -> Tensor:
    """What plain PyTorch computes of the same batches in this process."""
    model, threads = made(source).eval(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            batches = source.inputs().split(BATCH)
            return torch.cat([predict(model, b) if predict else model(b) for b in batches])
    finally:
        torch.set_num_threads(threads)


def predicted(program: Started) -> dict[str, Tensor]:
    return load_file(program.work / "predictions.safetensors")


def told(program: Started) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(program.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While this file is there, samples from 32 on are not predicted."""
    file = tmp_path / "gate"
    file.touch()
    return file


def waiting(gate: Path, program: Started) -> set[int]:
    """Processes that have come to the gate, and are still there."""
    there = {process.pid for process in program.processes()}
    return {int(path.name.rpartition("-")[2]) for path in gate.parent.glob("gate-*")} & there


def worker(program: Started, number: int) -> psutil.Process | None:
    """The process of a worker, which is known by its log."""
    for process in program.processes():
        try:
            log = os.readlink(f"/proc/{process.pid}/fd/1")
        except OSError:
            continue
        if process.name() == "instep-worker" and log.endswith(f"worker-{number}.log"):
            return process
    return None


def kill_at_gate(program: Started, gate: Path, number: int, times: int = 1) -> None:
    """Kill a worker once it and its neighbour are in the middle of a batch, so many times."""

    def both() -> bool:
        pair = [found.pid for n in (number, number ^ 1) if (found := worker(program, n))]
        return len(pair) == 2 and waiting(gate, program) >= set(pair)

    for _ in range(times):
        program.until(both, "both are at the gate")
        found = worker(program, number)
        assert found is not None
        os.kill(found.pid, signal.SIGKILL)
        program.until(lambda pid=found.pid: not psutil.pid_exists(pid), "it is gone")


def check(program: Started, wanted: Tensor) -> None:
    assert torch.equal(predicted(program)["outputs"], wanted)
    program.check_no_process_is_left()
    assert [path.name for path in program.work.iterdir()] == ["predictions.safetensors"]


@pytest.mark.slow
def test_a_replica_that_loses_a_process_starts_again_and_no_prediction_changes(
    start: Start, tmp_path: Path, gate: Path
) -> None:
    words = (*command(tmp_path), "--set", "arguments.predict=waits", *on(2, 2))
    program = start(*words, environment={"PREDICT_GATE": str(gate)})
    kill_at_gate(program, gate, 1)
    gate.unlink()
    assert program.end() == 0, program.stderr
    check(program, by_hand())
    program.check_no_file_is_left()
    assert told(program)["workers_lost"] == 1
    assert told(program)["batches_predicted"] == 8
    assert "worker 1 was lost at batch 5: it was killed by SIGKILL" in program.stderr
    assert "workers 0 to 1, one replica, start again" in program.stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", [predicts, predicts_words])
@pytest.mark.parametrize(("workers", "shard"), [(2, 2), (4, 4), (4, 2), (3, 3)])
def test_every_mesh_gives_the_bits_of_plain_pytorch(
    start: Start, tmp_path: Path, source: Any, workers: int, shard: int
) -> None:
    program = start(*command(tmp_path, source), *on(workers, shard))
    assert program.end() == 0, program.stderr
    check(program, by_hand(source))
    assert told(program)["workers"] == workers


def along(**mesh: int) -> list[str]:
    return [part for axis, size in mesh.items() for part in ("--set", f"mesh.{axis}={size}")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "workers", "mesh"),
    [
        (predicts, 4, {"tensor": 2}),
        (predicts_words, 4, {"tensor": 2}),
        (predicts, 4, {"tensor": 2, "shard": 2}),
        (predicts_words, 4, {"tensor": 2, "shard": 2}),
        (predicts_words, 2, {"stages": 2}),
        (predicts_words, 4, {"stages": 2, "shard": 2, "zero": 2}),
        (predicts_words, 4, {"stages": 2, "tensor": 2}),
    ],
)
def test_tensor_and_pipeline_meshes_give_the_numbers_of_plain_pytorch(
    start: Start, tmp_path: Path, source: Any, workers: int, mesh: dict[str, int]
) -> None:
    program = start(*command(tmp_path, source), "--workers", workers, *along(**mesh))
    assert program.end() == 0, program.stderr
    wanted = by_hand(source)
    torch.testing.assert_close(predicted(program)["outputs"], wanted, rtol=1e-5, atol=1e-5)
    if "tensor" not in mesh:
        check(program, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("predict", "mesh", "says"),
    [
        ("draws", {"stages": 2}, "predict draws random numbers"),
        ("differs", {"tensor": 2}, "the output 'outputs' is off by 1.0e-04 of its norm in float32"),
        ("continued", {"stages": 2}, "was called a second time in one pass"),
        ("draws", {"tensor": 2}, ""),
        ("continued", {"tensor": 2}, ""),
    ],
)
def test_what_a_mesh_would_predict_otherwise_is_refused(
    start: Start, tmp_path: Path, predict: str, mesh: dict[str, int], says: str
) -> None:
    words = (*command(tmp_path), "--set", f"arguments.predict={predict}", "--workers", 2)
    program = start(*words, *along(**mesh))
    assert program.end() == (3 if says else 0), program.stderr
    if says:
        assert says in program.error
        return
    whole = start(*words)
    assert whole.end() == 0, whole.stderr
    found, wanted = predicted(program), predicted(whole)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"stages": 2}])
@pytest.mark.parametrize("predict", ["", "differs in 16 bits"])
def test_a_mesh_predicts_in_16_bits_what_one_process_does_to_their_rounding(
    start: Start, tmp_path: Path, predict: str, mesh: dict[str, int]
) -> None:
    words = (*command(tmp_path), "--workers", 2, "--set", "train.precision=bfloat16")
    program = start(*words, "--set", f"arguments.predict={predict}", *along(**mesh))
    if predict:
        assert program.end() == 3, program.stderr
        assert "of its norm in bfloat16; 0.02 is allowed" in program.error
        return
    assert program.end() == 0, program.stderr
    with torch.autocast("cpu", torch.bfloat16):
        wanted = by_hand()
    off = (predicted(program)["outputs"].double() - wanted.double()).norm() / wanted.double().norm()
    assert off == 0 if "stages" in mesh else 1e-5 < off < 0.01


@pytest.mark.slow
def test_a_model_of_16_bits_is_predicted_where_tensor_cuts_it(start: Start, tmp_path: Path) -> None:
    model = made(predicts_words).bfloat16()
    save_model(model, str(tmp_path / "model.safetensors"))
    words = (*command(tmp_path), "--set", "arguments.dtype=bfloat16", "--workers", 2)
    program = start(*words, *along(tensor=2))
    assert program.end() == 0, program.stderr
    found = predicted(program)["outputs"].double()
    with torch.no_grad():
        wanted = model.eval()(predicts_words.inputs()).double()
    assert 1e-5 < (found - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"stages": 2}])
def test_a_tensor_or_pipeline_replica_that_loses_a_process_starts_again(
    start: Start, tmp_path: Path, gate: Path, mesh: dict[str, int]
) -> None:
    words = (*command(tmp_path), "--set", "arguments.predict=waits", "--workers", 2)
    program = start(*words, *along(**mesh), environment={"PREDICT_GATE": str(gate)})
    kill_at_gate(program, gate, 1, times=2)
    gate.unlink()
    assert program.end() == 0, program.stderr
    torch.testing.assert_close(predicted(program)["outputs"], by_hand(), rtol=1e-5, atol=1e-5)
    assert told(program)["workers_lost"] == 2
    program.check_no_process_is_left()


@pytest.mark.slow
def test_one_process_may_be_killed_again_and_again(
    start: Start, tmp_path: Path, gate: Path
) -> None:
    words = (*command(tmp_path), "--set", "arguments.predict=waits", *on(4, 2))
    program = start(*words, environment={"PREDICT_GATE": str(gate)})
    kill_at_gate(program, gate, 2, times=4)
    gate.unlink()
    assert program.end() == 0, program.stderr
    check(program, by_hand())
    assert told(program)["workers_lost"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "shard"), [(2, 2), (4, 2)])
def test_processes_that_are_killed_at_random_moments_change_no_number(
    start: Start, tmp_path: Path, workers: int, shard: int
) -> None:
    draw, kills = random.Random(workers), 0
    words = (*command(tmp_path), "--set", "arguments.predict=pauses", *on(workers, shard))
    words = (*words, "--batch", 1, "--set", "data.loaders=1")  # a process of its own reads
    program = start(*words)
    while program.process.poll() is None and kills < 8:
        time.sleep(draw.uniform(0.3, 1.5))  # the moment is what is drawn
        found = worker(program, draw.randrange(workers))
        if found is not None:
            kills += kill(found.pid)
    assert program.end() == 0, program.stderr
    model = made(predicts_words).eval()
    with torch.no_grad():
        wanted = torch.cat([model(tokens) for tokens in predicts_words.inputs().split(1)])
    check(program, wanted)
    assert kills == 8


@pytest.mark.slow
def test_a_process_that_hangs_while_others_wait_for_it_in_a_pass_is_replaced(
    start: Start, tmp_path: Path
) -> None:
    mark = f"arguments.mark={tmp_path / 'hung'}"
    words = (*command(tmp_path), "--set", "arguments.predict=hangs", "--set", mark)
    program = start(*words, *on(2, 2))
    assert program.end() == 0, program.stderr
    check(program, by_hand())
    assert "it got nothing done for" in program.stderr
    assert told(program)["workers_lost"] == 1


@pytest.mark.slow
def test_a_stopped_process_of_a_replica_is_replaced(
    start: Start, tmp_path: Path, gate: Path
) -> None:
    words = (*command(tmp_path), "--set", "arguments.predict=waits", *on(2, 2))
    program = start(*words, environment={"PREDICT_GATE": str(gate)})
    program.until(lambda: len(waiting(gate, program)) > 1, "two are at the gate")
    found = worker(program, 0)
    assert found is not None
    os.kill(found.pid, signal.SIGSTOP)
    program.until(lambda: not psutil.pid_exists(found.pid), "it is gone")
    gate.unlink()
    assert program.end() == 0, program.stderr
    check(program, by_hand())


@pytest.mark.slow
@pytest.mark.parametrize("rest", [on(4, 2), on(3, 3), on(2, 1)])
def test_what_was_predicted_is_taken_up_on_another_mesh(
    start: Start, tmp_path: Path, gate: Path, rest: list[object]
) -> None:
    out = tmp_path / "all.safetensors"
    words = (*command(tmp_path), "--set", "arguments.predict=waits", "--out", out)
    begun = start(*words, *on(4, 4), environment={"PREDICT_GATE": str(gate)})
    begun.until(lambda: len(waiting(gate, begun)) > 1, "two are at the gate")
    begun.process.send_signal(signal.SIGINT)
    assert begun.end() == 130
    gate.unlink()
    again = start(*words, *rest)
    assert again.end() == 0, again.stderr
    assert told(again)["batches_taken_up"] == told(again)["batches_predicted"] == 4
    assert torch.equal(load_file(out)["outputs"], by_hand())


@pytest.mark.slow
def test_processes_whose_batches_need_the_model_more_often_are_waited_for(
    start: Start, tmp_path: Path
) -> None:
    words = (*command(tmp_path), "--set", "arguments.predict=continued")
    program = start(*words, *on(4, 2))
    assert program.end() == 0, program.stderr
    check(program, by_hand(predict=predicts_words.continued))
    assert told(program)["workers_lost"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("shard", [2, 4])
def test_samples_that_cannot_be_read_keep_their_place(
    start: Start, tmp_path: Path, shard: int
) -> None:
    """Also where a process has nothing to compute while others of its replica have."""
    words = command(tmp_path, data="unreadable")
    program = start(*words, *on(4, shard), "--set", "data.unreadable=skip")
    assert program.end() == 0, program.stderr
    found, wanted = predicted(program), by_hand()
    assert found["skipped_samples"].tolist() == list(predicts_words.MISSING)
    assert found["outputs"][list(predicts_words.MISSING)].isnan().all()
    whole = [n for n in range(predicts_words.SAMPLES) if not 8 <= n < 16 and not 48 <= n < 56]
    assert torch.equal(found["outputs"][whole], wanted[whole])
    rest = [n for n in range(48, 56) if n != 50]
    assert torch.allclose(found["outputs"][rest], wanted[rest], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_sample_that_kills_who_reads_it_is_skipped(start: Start, tmp_path: Path) -> None:
    words = command(tmp_path, predicts, data="deadly")
    program = start(*words, *on(2, 2), "--set", "data.unreadable=skip")
    assert program.end() == 0, program.stderr
    found, wanted = predicted(program), by_hand(predicts)
    left = [n for n in range(predicts.SAMPLES) if n not in (16, 50)]
    assert found["skipped_samples"].tolist() == [16, 50]
    assert torch.allclose(found["outputs"][left], wanted[left], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_exception_of_one_process_is_the_error_of_the_command(
    start: Start, tmp_path: Path
) -> None:
    program = start(*command(tmp_path), *on(2, 2), "--set", "arguments.predict=raises")
    assert program.end() == 5
    assert "in predicting of batch 5: ValueError: no such word" in program.error
    assert "Traceback" not in program.stderr
    program.check_no_process_is_left()


@pytest.mark.slow
def test_a_run_is_predicted_on_its_own_mesh_unless_another_is_asked_for(
    start: Start, run: Start
) -> None:
    import splits

    trained = run(
        "splits.py:recipe", "workers=4", "mesh.shard=2", "train.steps=3", "train.global_batch=32"
    )
    assert trained.end() == 0, trained.stderr
    model = splits.recipe().model
    model.load_state_dict(load_file(trained.run / "model.safetensors"))
    x, _ = splits.samples(1, splits.SAMPLES).tensors
    with torch.no_grad():
        wanted = torch.cat([model.eval()(batch) for batch in x.split(BATCH)])
    words = ("--data", f"{RECIPES / 'splits.py'}:inputs", "--batch", BATCH)
    for more, workers in ((), "4 in replicas of 2"), (on(3, 3), "3 in replicas of 3"):
        program = start("-m", "instep", "predict", trained.run, *words, *more)
        assert program.end() == 0, program.stderr
        assert f"workers: {workers} ([mesh] shard" in program.stderr
        assert torch.equal(predicted(program)["outputs"], wanted)
