"""A run with LoRA: the result of a plain loop over a model that peft has wrapped.

And what is exported of it is what Hugging Face's peft, or the model without adapters, opens.
"""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import adapts
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from started import RECIPES, Start, kill_members
from torch import Tensor, nn

import instep
from instep.cli import main
from instep.data.order import Order, position
from instep.errors import SpecError, WorkerError
from instep.job.start import LoraSpec
from instep.recipe.lora import initial
from instep.report.figures.proof import prove
from instep.report.terminal.closing import closing_lines
from instep.store.run_folder import RunFolder
from lazily import Lazy

peft = Lazy("peft")

pytestmark = pytest.mark.process

LORA = {"modules": ["*.q_proj", "*.v_proj"], "rank": 4, "alpha": 12, "also_train": ["head.*"]}
TRAIN = {"steps": 12, "global_batch": 10, "threads": 1}  # the last batch of an epoch has 3 samples
SEED = 5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The model to start from."""
    torch.manual_seed(71)
    save_file(adapts.Net().double().state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def base(file: Path) -> adapts.Net:
    model = adapts.Net().double()
    model.load_state_dict(load_file(file))
    return model


def trained(file: Path, folder: Path, workers: int = 2, **changes: Any) -> instep.Run:
    job: dict[str, Any] = {
        "start": {"model": str(file)},
        "lora": LORA,
        "train": TRAIN,
        "seed": SEED,
    }
    return instep.train(
        adapts.recipe, workers=workers, runs=folder / "runs", quiet=True, **{**job, **changes}
    )


def by_peft(file: Path, optimizer: str, steps: int = 12) -> tuple[nn.Module, list[float]]:
    """Whole global batches in one process; of ours, the order and the adapters' first values."""
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], modules_to_save=["head"]
    )
    model = peft.get_peft_model(base(file), config, autocast_adapter_dtype=False)  # type: ignore
    spec = LoraSpec(**{**LORA, "modules": tuple(LORA["modules"]), "also_train": ("head.*",)})
    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.Linear):
            layer = module.get_base_layer()
            first, second = initial(spec, name.removeprefix("base_model.model."), layer, SEED)
            module.lora_A["default"].weight.data = first.clone()
            module.lora_B["default"].weight.data = second.clone()
    moved = adapts.OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    order, losses = Order(adapts.SAMPLES, SEED), []
    for step in range(1, steps + 1):
        where = position(step, adapts.SAMPLES, 10)
        rows = torch.from_numpy(order.indices(*where))
        inputs, targets = (each[rows] for each in adapts.data())
        moved.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        moved.step()
        losses.append(loss.item())
    return model, losses


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(adapts.data()[0])
    return found


@pytest.mark.slow
def test_a_run_ends_as_a_plain_loop_with_peft_does_and_is_exported_for_both(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(file, tmp_path)
    model, _ = by_peft(file, "sgd")
    wanted = outputs(model)
    assert (wanted - outputs(base(file))).abs().max() > 0.1
    mine = load_file(run.path / "model.safetensors")
    given = load_file(file)
    whole = {name for name in given if not name.startswith("head.")}
    assert all(torch.equal(mine[name], given[name]) for name in whole)
    for name, tensor in peft.get_peft_model_state_dict(model).items():
        own = name.removeprefix("base_model.model.").replace("lora_A.weight", "lora_A")
        own = own.replace("lora_B.weight", "lora_B")
        torch.testing.assert_close(mine[own], tensor, rtol=0, atol=1e-10)
    assert len(mine) == len(given) + 8

    assert main(["export", str(run.path), "--to", str(tmp_path / "merged.safetensors")]) == 0
    merged = adapts.Net().double()
    merged.load_state_dict(load_file(tmp_path / "merged.safetensors"), strict=True)
    torch.testing.assert_close(outputs(merged), wanted, rtol=0, atol=1e-10)

    folder = tmp_path / "adapter"
    assert main(["export", str(run.path), "--to", str(folder), "--adapter", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["adapter"] == str(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft warns about what it does not find
        opened = peft.PeftModel.from_pretrained(base(file), str(folder))
    torch.testing.assert_close(outputs(opened), wanted, rtol=0, atol=1e-10)

    (event,) = RunFolder(run.path).named("lora_added")
    assert f"lora    {event['text']}" in closing_lines(run.summary, RunFolder(run.path))
    assert event["layers"] == [f"blocks.{n}.{kind}_proj" for n in (0, 1) for kind in "qv"]
    assert (event["trained"], event["total"]) == (4 * 2 * 4 * 16 + 51, 112 + 7 * 272 + 51)
    with pytest.raises(WorkerError, match="has LoRA adapters beside the model") as refused:
        trained(run.path, tmp_path, workers=1, lora={})
    assert refused.value.exit_code == SpecError.exit_code


@pytest.mark.slow
def test_losses_with_adamw_are_those_of_the_plain_loop_on_3_workers(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(file, tmp_path, workers=3, arguments={"optimizer": "adamw"})
    model, losses = by_peft(file, "adamw")
    found = [event["loss"] for event in RunFolder(run.path).named("epoch_finished")]
    ends = [losses[:6], losses[6:]]
    sizes = [10] * 5 + [3]
    wanted = [np.average(part, weights=sizes) for part in ends]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)
    merged = tmp_path / "merged.safetensors"
    assert main(["export", str(run.path), "--merged", "--to", str(merged)]) == 0
    whole = adapts.Net().double()
    whole.load_state_dict(load_file(merged), strict=True)
    torch.testing.assert_close(outputs(whole), outputs(model), rtol=0, atol=1e-8)

    again = ["export", str(run.path), "--step", "12", "--adapter", "--to", str(tmp_path / "again")]
    assert main(again) == 0
    opened = peft.PeftModel.from_pretrained(base(file), str(tmp_path / "again"))
    torch.testing.assert_close(outputs(opened), outputs(model), rtol=0, atol=1e-8)
    damaged = run.path / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert main(["export", str(run.path), "--adapter", "--to", str(tmp_path / "again")]) == 7
    assert "--step 12 --adapter --to" in capsys.readouterr().err  # its checkpoint is sound


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"stages": 2}, {"shard": 2}, {"tensor": 2}], ids=str)
def test_a_mesh_ends_as_a_plain_loop_with_peft_and_its_checkpoint_is_exported_for_both(
    file: Path, tmp_path: Path, mesh: dict[str, int]
) -> None:
    run = trained(file, tmp_path, mesh=mesh)
    assert not list(run.path.glob("checkpoints/*12/model.safetensors"))  # but parts
    model, _ = by_peft(file, "sgd")
    wanted = outputs(model)
    export = ["export", str(run.path), "--step", "12"]
    assert main([*export, "--merged", "--to", str(tmp_path / "merged.safetensors")]) == 0
    merged = adapts.Net().double()
    merged.load_state_dict(load_file(tmp_path / "merged.safetensors"), strict=True)
    torch.testing.assert_close(outputs(merged), wanted, rtol=0, atol=1e-10)
    assert main([*export, "--adapter", "--to", str(tmp_path / "adapter")]) == 0
    opened = peft.PeftModel.from_pretrained(base(file), str(tmp_path / "adapter"))
    torch.testing.assert_close(outputs(opened), wanted, rtol=0, atol=1e-10)


BITS = {"train": {**TRAIN, "determinism": "bits"}}
DRAWN = {"arguments": {"optimizer": "adamw", "dropout": 0.3}, "lora": {**LORA, "dropout": 0.2}}


def digest(run: instep.Run) -> str:
    return str(run.summary["parameters_sha256"])


@pytest.mark.slow
def test_one_hash_on_1_2_and_3_workers_resumed_and_with_servers(file: Path, tmp_path: Path) -> None:
    job = BITS | DRAWN
    digests = {digest(trained(file, tmp_path, workers=n, **job)) for n in (1, 2, 3)}
    assert len(digests) == 1
    servers = {"name": "server_sync", "servers": 2}
    digests.add(digest(trained(file, tmp_path, **job, sync=servers)))
    stopped = {"train": {**BITS["train"], "stop_after_steps": 5}}
    path = trained(file, tmp_path, **(job | stopped)).path
    with pytest.raises(SpecError, match=r"lora was .* cannot become .*has the adapters"):
        instep.resume(path, quiet=True, lora={"rank": 2})
    file.unlink()  # the checkpoint has the model by now
    digests.add(digest(instep.resume(path, workers=1, quiet=True)))
    assert len(digests) == 1
    assert prove(RunFolder(path)).exact
    assert len(RunFolder(path).named("lora_added")) == 1


@pytest.mark.slow
def test_rounds_of_averaging_move_adapters_alone_and_alike_on_1_and_2_workers(
    file: Path, tmp_path: Path
) -> None:
    sync = {"name": "averaging", "participants": 2, "options": {"local_steps": 3}}
    job = BITS | DRAWN | {"sync": sync}
    runs = [trained(file, tmp_path, workers=n, **job) for n in (1, 2)]
    assert digest(runs[0]) == digest(runs[1])
    given, found = load_file(file), load_file(runs[0].path / "model.safetensors")
    moved = {name for name in given if not torch.equal(given[name], found[name])}
    assert moved == {"head.weight", "head.bias"}
    assert found["blocks.1.v_proj.lora_B"].abs().max() > 0


@pytest.mark.slow
def test_killed_workers_leave_no_trace_in_the_adapters(
    file: Path, tmp_path: Path, start: Start
) -> None:
    steps = {"train": {**BITS["train"], "steps": 150}}
    wanted = trained(file, tmp_path, workers=1, **(BITS | DRAWN | steps))
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "killed"\nrecipe = "{RECIPES / "adapts.py"}:recipe"\nworkers = 3\nseed = {SEED}\n'
        '[train]\nsteps = 150\nglobal_batch = 10\ndeterminism = "bits"\nthreads = 1\n'
        f'[start]\nmodel = "{file}"\n'
        '[lora]\nmodules = ["*.q_proj", "*.v_proj"]\nrank = 4\nalpha = 12\ndropout = 0.2\n'
        'also_train = ["head.*"]\n'
        '[arguments]\noptimizer = "adamw"\ndropout = 0.3\npause_s = 0.006\n'
    )
    program = start("-m", "instep", "run", job)
    program.until(program.is_training, "training")
    assert kill_members(program, 4, random.Random(1)).total() >= 2
    assert program.end() == 0, program.stderr
    assert program.summary["parameters_sha256"] == digest(wanted)
    program.check_nothing_is_left()


@pytest.mark.slow
def test_an_adapter_of_a_layer_that_is_not_called_is_warned_of(file: Path, tmp_path: Path) -> None:
    run = trained(file, tmp_path, lora={**LORA, "modules": ["*.q_proj", "spare"]})
    (warning,) = RunFolder(run.path).named("warning")
    assert "the trial did not call spare: an adapter there has no effect" in warning["text"]


@pytest.mark.slow
def test_what_cannot_be_adapted_ends_the_run_before_it_trains(file: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"lora\.modules has 'q_proj'.*Did you mean '\*\.q_proj'"):
        trained(file, tmp_path, lora={"modules": ["q_proj"]})
    assert not (tmp_path / "runs").exists()
