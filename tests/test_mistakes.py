"""Mistakes that people make, and the sentence that each is answered with.

Those in a job file or a command are found before any process or run folder
exists. Those in a recipe are found by the same functions that a worker calls,
in the same order; `tests/process/test_failures.py` shows how a worker's error
arrives on the terminal.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy
import torch

from instep.cli import main
from instep.data.loader import Loader, Slice
from instep.errors import InstepError
from instep.recipe.build import build, call
from instep.recipe.forward import Forward
from instep.recipe.source_file import load_function
from instep.system.causes import sentence

# ---- in a job file


class Job(NamedTuple):
    """A job file with a mistake, and the words of the answer."""

    text: str
    words: list[str]
    code: int = 2


IN_A_JOB_FILE = [
    Job(
        '[train]\ndeterminism = "bits"\nmerge = "always"',
        ["merge = 'always' with determinism = 'bits'", "Leave merge out."],
    ),
    Job(
        '[train]\ndeterminism = "bits"\nbatch_norm = "global"',
        ["batch_norm = 'global' with determinism = 'bits'", "Leave one of them out."],
    ),
    Job(
        '[train]\nmerge = "never"\nbatch_norm = "global"',
        ["batch_norm = 'global' with merge = 'never'", "Leave merge out."],
    ),
    Job(
        '[sync]\nname = "averaging"\noptions = { fraction = 0.1 }',
        ["workers = 2 but sync.participants * sync.options.fraction = 1"],
    ),
    Job(
        '[sync]\nname = "averaging"\noptions = { local_steps = 0 }',
        ["[sync] options.local_steps = 0: needs a whole number of at least 1."],
    ),
    Job(
        '[sync]\nname = "bounded_stale"\noptions = { staleness = 1.5 }',
        ["sync.options.staleness = 1.5", "a whole number of 0 or more"],
    ),
    Job(
        '[sync]\nname = "server_async"\noptions = { compensation = "a little" }',
        ["sync.options.compensation = 'a little': it is a factor of 0 or more"],
    ),
    Job(
        '[sync]\nname = "server_async"\noptions = { slow_late = "yes" }',
        ["sync.options.slow_late = 'yes': needs to be true or false"],
    ),
    Job(
        '[sync]\nname = "fedopt"\noptions = { rule = "momentum", tau = 0.01 }',
        ["sync.options.tau = 0.01 does nothing with sync.options.rule = 'momentum'"],
    ),
    Job(
        '[sync]\nname = "fedopt"\noptions = { rule = "adagrad", outer_beta2 = 0.9 }',
        ["sync.options.outer_beta2 = 0.9 does nothing with sync.options.rule = 'adagrad'"],
    ),
    Job(
        '[sync]\nname = "diloco"\noptions = { mixing = 0.2, fragments = 2 }',
        ["sync.options.mixing = 0.2 does nothing with sync.options.delay = 0"],
    ),
    Job(
        '[sync]\nname = "server_sync"\nservers = 400',
        ["sync.servers = 400: with more servers than a job can have workers (8: ", "to at most 8."],
    ),
    Job(
        "[sync]\noptions = { encode_vectors = true }",
        ["does nothing with sync.codec = 'none'. Leave it out, or set sync.codec."],
    ),
    Job(
        '[sync]\nname = "fedopt"\noptions = { rule = "adan" }',
        ["sync.options.rule = 'adan'. Did you mean 'adam'?"],
    ),
    Job(
        '[sync]\nname = "diloco"\noptions = { outer_momentum = 1 }',
        ["sync.options.outer_momentum = 1: needs a number of at least 0 and below 1."],
    ),
    Job(
        '[sync]\nname = "fedprox"\noptions = { mui = 1 }',
        ["fedprox has no option 'mui'. Did you mean 'mu'?"],
    ),
    Job(
        '[sync]\nname = "averaging"\nparticipants = 1',
        [
            "workers = 2 but sync.participants = 1",
            "Set workers to at most 1; or, in a new run, sync.participants to 2 or more.",
        ],
    ),
    Job(
        '[sync]\nname = "averaging"\nparticipants = 65',
        ["sync.participants = 65 but train.global_batch = 64", "to at most 64."],
    ),
    Job(
        '[sync]\nname = "averaging"\nparticipants = 4\n[stop]\ngradient_norm = 0.1',
        ["does not go with stop.gradient_norm", "Leave one of the two out."],
    ),
    Job(
        "[sync.options]\nbucket_md = 1",
        ["all_reduce has no option 'bucket_md'", "Did you mean 'bucket_mb'?"],
    ),
    Job("[sync]\nparticipants = 2", ["sync.participants = 2: all_reduce agrees on every step"]),
    Job("[stop]\nspread = 2.0", ["stop.spread = 2: all_reduce has no participants"]),
    Job("[sync]\nservers = 2", ["servers = 2: all_reduce has no servers", "'server_sync'"]),
    Job(
        '[sync]\nname = "server_sync"\nservers = 0',
        ["sync.servers = 0: needs to be at least 1"],
    ),
    Job(
        '[sync]\nname = "server_sync"\ncodec = "powersgd"',
        [
            "does not go with sync.codec = 'powersgd': servers are sent segments",
            "Leave one of the two",
        ],
    ),
    Job(
        '[sync]\nname = "server_sync"\n[train]\ndevice = "cuda"',
        ["does not go with train.device = 'cuda'", "compute on the CPU"],
    ),
    Job(
        '[sync]\nname = "bounded_stale"\nservers = 0',
        ["sync.servers = 0: needs to be at least 1"],
    ),
    Job(
        '[sync]\nname = "bounded_stale"\noptions = { staleness = -1 }',
        ["staleness = -1: it is how many steps", "use sync.name = 'server_async'"],
    ),
    Job(
        '[sync]\nname = "bounded_stale"\nservers = 2\noptions = { copy = true }',
        [
            "sync.options.copy: with sync.name = 'bounded_stale' no other host has a copy.",
            "exit code 5, and instep resume continues from the newest checkpoint.",
            "use sync.name = 'server_sync'",
        ],
    ),
    Job(
        '[sync]\nname = "server_async"\noptions = { staleness = 2 }',
        ["server_async has no option 'staleness'"],
    ),
    Job(
        '[sync]\nname = "server_async"\noptions = { compensation = -0.1 }',
        ["compensation = -0.1: it is a factor of 0 or more"],
    ),
    Job(
        '[sync]\nname = "server_async"\n[train]\ndeterminism = "bits"',
        ["does not go with train.determinism = 'bits'", "depends on timing"],
    ),
    Job(
        "[sync]\nlocal_steps = 4",
        ["sync.local_steps is now called sync.options.local_steps."],
    ),
    Job("name = ", ["job.toml is not valid TOML", "line 1"]),
    Job('name = "é', ["job.toml is not valid TOML"]),
    Job('name = "x"', ["job.toml: the key 'recipe' is missing", "`file.py:function`"]),
    Job("worker = 3", ["a job has no key 'worker'", "Did you mean 'workers'?"]),
    Job("[train]\nepoch = 3", ["[train] has no key 'epoch'", "Did you mean 'epochs'?"]),
    Job("[training]\nepochs = 3", ["a job has no key 'training'", "Did you mean 'train'?"]),
    Job(
        "[train]\nlr = 0.1", ["[train] has no key 'lr'", "set arguments.lr", "--set arguments.lr="]
    ),
    Job("learning_rate = 0.1", ["a job has no key 'learning_rate'", "set arguments.learning_rate"]),
    Job("[train]\nbatch_size = 9", ["[train] has no key 'batch_size'", "mean 'global_batch'?"]),
    Job("batch_size = 9", ["no key 'batch_size'", "mean 'global_batch'? It belongs into [train]."]),
    Job("[train]\nmax_epochs = 9", ["[train] has no key 'max_epochs'", "Did you mean 'epochs'?"]),
    Job("epochs = 3", ["a job has no key 'epochs'. It belongs into [train]."]),
    Job("device = 'cpu'", ["a job has no key 'device'. It belongs into [train]."]),
    Job("[train]\nworkers = 3", ["[train] has no key 'workers'", "above the first section"]),
    Job("[train]\nloaders = 3", ["[train] has no key 'loaders'. It belongs into [data]."]),
    Job("[train]\nnum_workers = 3", ["no key 'num_workers'", "mean 'loaders'?", "into [data]."]),
    Job("workers = 0", ["workers = 0: needs to be at least 1", "compute gradients"]),
    Job('workers = "two"', ['workers = "two": needs to be a whole number']),
    Job("workers = 2.0", ["workers = 2.0: needs to be a whole number"]),
    Job("workers = true", ["workers = true: needs to be a whole number"]),
    Job(
        "workers = 9", ["workers = 9 but train.micro_batches = 8", "at most 8; or", "to 9 or more"]
    ),
    Job("seed = -1", ["seed = -1: needs to be at least 0"]),
    Job("train = 3", ["train = 3: needs to be a table"]),
    Job("arguments = 3", ["arguments = 3: needs to be a table"]),
    Job('name = "a/b"', ['name = "a/b": has a character that is not allowed', "letters, digits"]),
    Job('name = ""', ['name = "": ', "letters, digits"]),
    Job('recipe = "recipe.py"', ['recipe = "recipe.py": needs the form file.py:function']),
    Job('recipe = "recipe.py:a-b"', ["needs the form file.py:function"]),
    Job('network = "public"', ["network = \"public\": needs to be 'loopback' or 'private'"]),
    Job("[train]\nepochs = 3\nsteps = 9", ["[train] both epochs = 3 and steps = 9", "one length"]),
    Job("[train]\nsteps = 0", ["train.steps = 0: needs to be at least 1"]),
    Job(
        "[train]\nglobal_batch = 4",
        ["micro_batches = 8 but train.global_batch = 4", "Set micro_batches to at most 4."],
    ),
    Job('[train]\ndeterminism = "bit"', ["train.determinism = \"bit\": needs to be 'order' or"]),
    Job(
        '[train]\nmerge = "yes"',
        ['train.merge = "yes": needs to be ', "'auto'", "'always'", "'never'"],
    ),
    Job('[train]\nprecision = "fp16"', ['train.precision = "fp16"', "'bfloat16' or 'float16'"]),
    Job(
        '[train]\ndevice = "gpu"',
        ['train.device = "gpu": needs to be ', "'auto'", "'cpu'", "'cuda'"],
    ),
    Job("[train]\nmax_grad_norm = 0.0", ["train.max_grad_norm = 0.0: needs to be above 0"]),
    Job("[train]\nmax_grad_norm = nan", ["train.max_grad_norm = NaN: needs to be "]),
    Job("[train]\nmax_grad_norm = inf", ["max_grad_norm = inf: needs to be a finite number"]),
    Job("[train]\nthreads = -2", ["train.threads = -2: needs to be at least 0"]),
    Job("[stop]\npatience = -1", ["stop.patience = -1: needs to be at least 0"]),
    Job("[stop]\npatients = 3", ["[stop] has no key 'patients'", "Did you mean 'patience'?"]),
    Job('[stop]\ntarget = "0.9"', ['stop.target = "0.9": needs to be a number']),
    Job("[stop]\ntarget = nan", ["[stop] target = nan: needs to be a finite number"]),
    Job("[stop]\nrise = 1", ["stop.rise = 1: needs to be above 1", "the lowest so far"]),
    Job("[stop]\nrise = inf", ["[stop] rise = inf: needs to be a finite number"]),
    Job("[stop]\nwindow = 0", ["stop.window = 0: needs to be at least 1"]),
    Job("[stop]\nleast_change = -0.1", ["stop.least_change = -0.1: needs to be at least 0"]),
    Job("[stop]\ngradient_norm = 0", ["stop.gradient_norm = 0: needs to be above 0"]),
    Job("[stop]\nnon_finite = 1", ["stop.non_finite = 1: needs to be true or false"]),
    Job('[stop]\nmode = "up"', ['stop.mode = "up": needs to be ', "'auto'", "'min'", "'max'"]),
    Job(
        '[stop]\ntime_limit = "soon"',
        ["[stop] time_limit = 'soon': needs a length of time above 0", "'90s', '30m' or '1h30m'"],
    ),
    Job('[stop]\ntime_limit = "1h1h"', ["time_limit = '1h1h': needs a length of time above 0"]),
    Job('[stop]\ntime_limit = "0s"', ["time_limit = '0s': needs a length of time above 0"]),
    Job("[stop]\ntime_limit = -5", ["stop.time_limit = -5: needs to be above 0", "seconds"]),
    Job("[stop]\ntime_limit = true", ["time_limit = true: needs to be a number or text in quotes"]),
    Job('[data]\nloaders = "many"', ['data.loaders = "many": needs to be', "'auto'"]),
    Job("[data]\nloaders = -1", ["data.loaders = -1: needs to be at least 0"]),
    Job("[checkpoint]\nkeep_last = 0", ["checkpoint.keep_last = 0: needs to be at least 1"]),
    Job('[checkpoint]\nevery = "soon"', ["every = 'soon': needs to be", "'5m'", "or 'never'"]),
    Job('[checkpoint]\nevery = "5"', ["every = '5': needs to be a number of steps, a time above"]),
    Job(
        '[checkpoint]\nevery = "0s"', ["every = '0s': needs to be a number of steps, a time above"]
    ),
    Job("[checkpoint]\nevery = 0", ["checkpoint.every = 0: needs to be at least 1", '"never"']),
    Job(
        "[checkpoint]\nevery_steps = 9", ["checkpoint.every_steps is now called checkpoint.every."]
    ),
    Job("[train]\nclip_norm = 1.0", ["train.clip_norm is now called train.max_grad_norm."]),
    Job(
        '[checkpoint]\nbest_mode = "largest"',
        ['checkpoint.best_mode = "largest": needs to be ', "'auto'", "'min'", "'max'"],
    ),
    Job(
        "[check]\ncorruption = true",
        ["check.corruption = true with train.determinism = 'order'", "determinism to 'bits'"],
    ),
    Job('[check]\ncorruption = "yes"', ['check.corruption = "yes": needs to be true or false']),
    Job('[report]\ngradient_norm = "yes"', ["report.gradient_norm", "needs to be true or false"]),
    Job(
        "[report]\ntensorboard = true",
        ["report.tensorboard is now called report.loggers", "loggers = ['tensorboard']"],
    ),
    Job(
        '[report]\nloggers = ["wandbb"]',
        ["report.loggers: no logger is called 'wandbb'", "'wandb'"],
    ),
    Job(
        '[sync]\nname = "allreduce"',
        ["sync.name: no sync strategy is called 'allreduce'", "Did you mean 'all_reduce'?"],
    ),
    Job(
        '[sync]\ncodec = "topk"',
        ["sync.codec: no codec is called 'topk'. Did you mean 'top_k'? Known: bfloat16, "],
    ),
    Job("[mesh]\nschedule = 'gpipe'", ["mesh.schedule = 'gpipe' is for mesh.stages above 1."]),
    Job(
        "workers = 4\n[mesh]\nstages = 2\nshard = 2",
        ["mesh.zero = 3 with mesh.stages = 2", "Set mesh.zero"],
    ),
    Job('[mesh]\ncheckpointing = "blocks"', ["is for a replica of several processes"]),
    Job('[mesh]\noffload = "optimizer"', ["mesh.offload = 'optimizer'", "mesh.shard = 1"]),
    Job("[mesh]\nzero = 2", ["mesh.zero = 2 is for mesh.shard above 1.", "or set mesh.shard"]),
    Job('[mesh]\nbuild = "parts"', ["mesh.build = 'parts'", "Leave the key out."]),
    Job('[mesh]\ncompile = "blocks"', ["mesh.compile = 'blocks'", "or call compile() on the"]),
    Job("[mesh]\nshard = 3", ["workers = 2: a replica has 3 processes ([mesh] shard = 3)"]),
    Job(
        '[mesh]\nshard = 2\n[sync]\nname = "server_sync"',
        ["mesh.shard = 2 does not go with sync.name = 'server_sync'", "share out whole"],
    ),
    Job('[start]\nfreeze = "body.*"', ['start.freeze = "body.*": needs to be a list']),
    Job("[start]\nlearning_rates = 0.1", ["start.learning_rates = 0.1: needs to be a table"]),
    Job('[start.learning_rates]\n"a.*" = 0', ["each value in it needs to be above 0"]),
    Job("[lora]\nrank = 4", ["[lora] modules is missing or empty", "Give patterns of layers"]),
    Job('[lora]\nmodules = "*.q"', ['lora.modules = "*.q": needs to be a list']),
    Job('[lora]\nmodules = ["*.q"]\nrank = 0', ["lora.rank = 0: needs to be at least 1"]),
    Job('[lora]\nmodules = ["*.q"]\nalpha = 0', ["lora.alpha = 0: needs to be above 0"]),
    Job('[lora]\nmodules = ["*.q"]\ndropout = 1.0', ["dropout = 1.0: needs to be below 1"]),
    Job("[start]\nlora = {rank = 4}", ["[start] has no key 'lora'"]),
    Job("[start]\npartial = true", ["[start] partial = true", "no model is given"]),
    Job(
        '[start]\nmodel = "bdoy.safetensors"',
        ["/bdoy.safetensors': there is no such file", "Did you mean 'body.safetensors'?"],
    ),
    Job('[start]\nmodel = "nowhere/m"', ["nowhere/m': there is no such file", "job file"]),
    Job('[start]\nmodel = "."', ["this folder holds no model.safetensors", "run that has ended"]),
    Job('[start]\nmodel = "recipe.py"', ["recipe.py is no safetensors file"], code=7),
    Job('[start]\nmodel = "old.pt"', ["old.pt is a file of torch.save", "convert it"], code=7),
    Job(
        '[start]\nmodel = "body.safetensors"',
        ["body.safetensors is no safetensors file, or it is truncated or damaged (70 bytes)"],
        code=7,
    ),
    Job('recipe = "recipy.py:recipe"', ["no recipe file", "Did you mean 'recipe.py'?"], code=3),
    Job(
        "[arguments]\nwdith = 3",
        ["[arguments] gives 'wdith', which the recipe function 'recipe' does not take", "'width'"],
        code=3,
    ),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a job and a recipe in it."""
    (tmp_path / "recipe.py").write_text("def recipe(width=2): ...\n")
    (tmp_path / "old.pt").write_bytes(b"PK\x03\x04" + bytes(60))
    whole = safetensors.numpy.save({"a": np.zeros(2, np.float32)})
    (tmp_path / "body.safetensors").write_bytes(whole[:-2])
    (tmp_path / "job.toml").write_text('recipe = "recipe.py:recipe"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("job", IN_A_JOB_FILE, ids=lambda job: job.text.replace("\n", " "))
def test_a_mistake_in_a_job_file(here: Path, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    whole = job.text.startswith(("name =", "recipe =")) and job.text != 'name = "a/b"'
    rest = "" if whole and job.text != 'name = ""' else 'recipe = "recipe.py:recipe"\n'
    (here / "job.toml").write_text(rest + job.text + "\n")
    assert main(["run", "job.toml"]) == job.code
    check_sentence(capsys, job.words)
    assert not (here / "runs").exists()


def check_sentence(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """That one line with all these words was said, on standard error alone."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("instep: ")
    assert err.count("\n") == 1, err
    assert [word for word in words if word not in err] == [], err


# ---- in a command


IN_A_COMMAND: list[tuple[str, int, list[str]]] = [
    ("rnu job.toml", 2, ["there is no command 'rnu'", "Did you mean 'run'?"]),
    ("run", 2, ["the following arguments are required: job", "instep run --help"]),
    (
        "run recipe.py",
        2,
        ["recipe.py did not call instep.join", 'recipe = "recipe.py:recipe"', "TOML"],
    ),
    ("run jbo.toml", 2, ["there is no job file 'jbo.toml'", "Did you mean 'job.toml'?"]),
    ("run nowhere/job.toml", 2, ["there is no job file 'nowhere/job.toml'"]),
    ("run .", 2, [". cannot be read: Is a directory"]),
    ("run job.toml --wrokers 3", 2, ["there is no option --wrokers. Did you mean '--workers'?"]),
    ("run job.toml --epochs 3", 2, ["no option --epochs. Did you mean '--set train.epochs=3'?"]),
    ("run --epochs=3 job.toml", 2, ["Did you mean '--set train.epochs=3'? Known to instep run:"]),
    ("run job.toml --batch-size 9", 2, ["Did you mean '--set train.global_batch=9'?"]),
    ("run job.toml --lr 0.1", 2, ["Did you mean '--set arguments.lr=0.1'?"]),
    ("run job.toml --kills 3", 2, ["no option --kills. Known to instep run: --check-determinism"]),
    ("run job.toml other.toml", 2, ["unrecognized arguments: other.toml. See instep run --help"]),
    ("resume old/taken --epochs", 2, ["Did you mean '--set train.epochs=...'?"]),
    ("audit old/taken --epochs 3", 2, ["there is no option --epochs. Known to instep audit:"]),
    ("run job.toml --workers", 2, ["--workers: expected one argument"]),
    ("run job.toml --workers many", 2, ['workers = "many": needs to be a whole number']),
    ("run job.toml --workers 0", 2, ["workers = 0: needs to be at least 1"]),
    ("run job.toml --name a/b", 2, ['name = "a/b": has a character that is not allowed']),
    ("run job.toml --name taken --runs old", 6, ["already a run at old/taken", "--name"]),
    ("run job.toml --runs job.toml", 6, ["job.toml/run cannot be made: ", "another --runs"]),
    ("run job.toml --set epochs", 2, ["--set 'epochs' is not of the form section.key=value"]),
    ("run job.toml --set workers.x=1", 2, ["--set 'workers.x=1': 'workers' is a value"]),
    ("run job.toml --set train.epoch=3", 2, ["[train] has no key 'epoch'", "'epochs'?"]),
    ("run job.toml --set train.epochs=few", 2, ['train.epochs = "few": needs to be a whole']),
    ("report", 2, ["the following arguments are required: run"]),
    ("report old/takne", 6, ["there is no run at 'old/takne'", "Did you mean 'taken'?"]),
    ("report old", 6, ["'old' is not the folder of a run: it holds no job.toml"]),
    ("audit old/takne", 6, ["there is no run at 'old/takne'", "Did you mean 'taken'?"]),
    ("resume job.toml", 6, ["'job.toml' is a job file, not the folder of a run"]),
    ("audit job.toml", 6, ["'job.toml' is a job file, not the folder of a run"]),
    ("report recipe.py", 6, ["'recipe.py' is a file, not the folder of a run"]),
    ("audit", 2, ["the following arguments are required: run", "instep audit --help"]),
    ("replay old/taken", 2, ["the following arguments are required: --step"]),
    ("replay old/taken --step first", 2, ["--step: invalid int value: 'first'"]),
    ("replay old/taken --step 0", 2, ["--step 0: steps count from 1."]),
    ("replay old/taken --step 1", 6, ["old/taken has no committed step yet"]),
    ("replay old/takne --step 1", 6, ["there is no run at 'old/takne'", "mean 'taken'?"]),
    ("export old/taken --to old/taken/m.safetensors", 2, ["lies in the run folder", "elsewhere"]),
    ("replay old/taken --step 1 --to m.pt", 2, ["--to 'm.pt'", "end in .safetensors"]),
    ("chaos", 2, ["the following arguments are required: target", "instep chaos --help"]),
    ("chaos jbo.toml", 2, ["there is no job file 'jbo.toml'", "Did you mean 'job.toml'?"]),
    ("chaos old", 6, ["'old' is not the folder of a run: it holds no job.toml"]),
    ("chaos job.toml --kills few", 2, ["--kills: invalid int value: 'few'"]),
    ("chaos job.toml --kills -1", 2, ["--kills -1: needs to be at least 0"]),
    (
        "chaos job.toml --partitions 3 --set network=private --set launch.hosts=['ssh']",
        2,
        ["the job has hosts of its own"],
    ),
    ("chaos job.toml --roles wroker", 2, ["no role 'wroker'", "Did you mean 'worker'?"]),
    (
        "chaos job.toml --set train.steps=9",
        2,
        ["9 steps are too few to break something 10 times: at least 20", "--set train.steps=40"],
    ),
    ("chaos old/taken --set train.steps=9", 2, ["the job of the run old/taken cannot change"]),
    ("export old/taken", 2, ["the following arguments are required: --to"]),
    ("export old/taken --to m.pt", 2, ["--to 'm.pt'", "needs to end in .safetensors"]),
    ("export old/taken --to m --adapter", 2, ["--adapter: old/taken was trained without LoRA"]),
    ("export old/taken --to m --merged", 2, ["--merged: old/taken was trained without LoRA"]),
    ("export old/taken --to m --merged --adapter", 2, ["not allowed with argument --merged"]),
    ("export old/taken --to m.safetensors", 6, ["old/taken has no model", "unfinished"]),
]


@pytest.mark.parametrize(("command", "code", "words"), IN_A_COMMAND)
def test_a_mistake_in_a_command(
    here: Path, command: str, code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "job.toml").write_text('recipe = "recipe.py:recipe"\nworkers = 2\n')
    (here / "old" / "taken").mkdir(parents=True)
    (here / "old" / "taken" / "job.toml").write_text('format = 2\nrecipe = "/r.py:recipe"\n')
    assert main(command.split()) == code
    check_sentence(capsys, words)
    assert not (here / "runs").exists()
    assert [path.name for path in (here / "old").iterdir()] == ["taken"]


# ---- in a recipe


class Part(NamedTuple):
    """A recipe with some of its parts replaced, and the words of the answer."""

    parts: dict[str, str]
    words: list[str]
    arguments: Mapping[str, Any] = MappingProxyType({})
    code: int = 3


GOOD = {
    "model": "nn.Linear(3, 2)",
    "loss": "nn.CrossEntropyLoss()",
    "optimizer": "lambda p: torch.optim.SGD(p, lr=0.1)",
    "train": "[(torch.ones(3), 0), (torch.zeros(3), 1)] * 4",
    "metrics": "{}",
}
IN_A_RECIPE = {
    "a class of model, not a model": Part(
        {"model": "nn.Linear(3, 2).weight"}, ["Recipe.model is a Parameter", "an nn.Module is"]
    ),
    "a model function that returns something else": Part(
        {"model": "lambda: 3"}, ["Recipe.model() returned an int, but an nn.Module is wanted"]
    ),
    "a model without parameters": Part(
        {"model": "nn.ReLU()"}, ["the model (ReLU) has no parameters to train"]
    ),
    "a frozen model": Part(
        {"model": "nn.Linear(3, 2).requires_grad_(False)"},
        ["all 2 parameters of the model (Linear) are frozen", "requires_grad"],
    ),
    "a lazy model": Part({"model": "nn.LazyLinear(2)"}, ["'weight' is lazy", "run one batch"]),
    "no loss": Part({"loss": "None"}, ["compute_loss, and embed with batch_loss; none was given"]),
    "two losses": Part({"compute_loss": "len"}, ["loss and compute_loss were given"]),
    "a loss by name": Part({"loss": "'mse'"}, ["Recipe.loss is a str, but a function is wanted"]),
    "an optimizer that is made already": Part(
        {"optimizer": "torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1)"},
        ["Recipe.optimizer is an SGD, but a function is wanted", "Wrap it: optimizer=lambda"],
    ),
    "an optimizer of other parameters": Part(
        {"optimizer": "lambda p: torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1)"},
        ["the optimizer holds none of the model's parameters"],
    ),
    "an optimizer of a part of the parameters": Part(
        {
            "model": "(net := nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))",
            "optimizer": "lambda p: torch.optim.SGD(net[1].parameters(), lr=1)",
        },
        [
            "holds 2 of the model's 4 param",
            "'0.bias', '0.weight' would",
            "requires_grad_",
            "freeze",
        ],
    ),
    "a model that returns a tuple": Part(
        {"model": "Returns(lambda outputs: (outputs, None))"},
        ["the model returns a tuple", "compute_loss=lambda model, batch:", "argument 'input'"],
    ),
    "a model that returns a dict": Part(
        {"model": "Returns(lambda outputs: {'logits': outputs})"},
        ["the model returns a dict ('logits')", "compute_loss=lambda model, batch:"],
    ),
    "an optimizer that refuses its settings": Part(
        {"optimizer": "lambda p: torch.optim.SGD(p, lr=-1)"},
        ["Recipe.optimizer() refused what it was given: Invalid learning rate: -1"],
    ),
    "no optimizer": Part({"optimizer": "lambda p: None"}, ["Recipe.optimizer() returned None"]),
    "an optimizer that calls back": Part(
        {"optimizer": "lambda p: torch.optim.LBFGS(p)"}, ["LBFGS evaluates the loss several"]
    ),
    "an optimizer that wants a closure": Part(
        {"optimizer": "type('Sam', (torch.optim.SGD,), {'step': lambda self, closure: 0})"},
        ["Sam.step() wants 'closure'", "evaluates the loss itself cannot be used", "give that"],
    ),
    "a plateau without a validation": Part(
        {"scheduler": "lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)"},
        [
            "ReduceLROnPlateau, which takes its step with the validation loss",
            "Give Recipe(validate",
        ],
    ),
    "a plateau of something that rises": Part(
        {"scheduler": "lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, mode='max')"},
        ["ReduceLROnPlateau with mode = 'max'", "Leave mode out"],
    ),
    "a scheduler that wants something": Part(
        {"scheduler": "lambda o: type('Own', (), {'step': lambda self, loss: 0})()"},
        ["Own.step() wants 'loss'", "CosineAnnealingLR"],
    ),
    "a scheduler without a step": Part(
        {"scheduler": "lambda o: 0.1"}, ["Recipe.scheduler() returned a float, which has no step"]
    ),
    "a loader of whole batches": Part(
        {"train": "torch.utils.data.DataLoader([(torch.ones(3), 0)], batch_size=None)"},
        ["Recipe.train is a DataLoader that has batch_size = None", "the job needs single samples"],
    ),
    "a stream for a dataset": Part(
        {"train": "iter([1])"}, ["Recipe.train is a list_iterator", "whose __iter__ begins anew"]
    ),
    "an empty dataset": Part({"train": "[]"}, ["Recipe.train has length zero"]),
    "an empty dataset to validate on": Part(
        {"validate": "[]"}, ["Recipe.validate has length zero"]
    ),
    "samples of several shapes": Part(
        {"train": "[(torch.ones(3), 0), (torch.ones(2), 0)] * 2"},
        ["cannot be stacked with sample", "float32 [2]", "float32 [3]"],
        code=4,
    ),
    "a batch of three": Part(
        {"train": "[(torch.ones(3), 0, 0)] * 4"},
        ["a batch is a list of 3, but (inputs, target) is wanted", "compute_loss=lambda"],
    ),
    "a batch of transformers": Part(
        {"train": "[{'input_ids': torch.ones(3), 'labels': 0}] * 4"},
        ["compute_loss=lambda model, batch: model(**batch).loss instead of loss"],
    ),
    "a loss for each sample": Part(
        {"loss": "nn.CrossEntropyLoss(reduction='none')"},
        ["Recipe.loss returned a tensor of shape [4], but a scalar is wanted: the mean"],
    ),
    "a loss that is no tensor": Part(
        {"loss": "lambda o, t: 0.5"}, ["Recipe.loss returned a float, but a scalar tensor is"]
    ),
    "a loss of whole numbers": Part(
        {"loss": "lambda o, t: (o.argmax(1) == t).sum()"},
        ["Recipe.loss returned torch.int64, but a floating-point loss is wanted"],
    ),
    "a detached loss": Part(
        {"loss": "lambda o, t: o.detach().sum()"},
        ["does not depend on the model's parameters", "detached it"],
    ),
    "a metric by name": Part(
        {"metrics": "{'accuracy': 'accuracy'}"}, ["Recipe.metrics['accuracy'] is a str, not a"]
    ),
    "a metric for each sample": Part(
        {"metrics": "{'right': lambda o, t: o.argmax(1) == t}"},
        ["Recipe.metrics['right'] returned a tensor of shape [4], but one number is wanted"],
    ),
    "a metric that is no number": Part(
        {"metrics": "{'right': lambda o, t: 'all'}"}, ["returned a str, but one number is wanted"]
    ),
    "a metric beside compute_loss": Part(
        {"loss": "None", "compute_loss": "len", "metrics": "{'a': len}"},
        ["Recipe.metrics needs (outputs, target), which compute_loss does not give"],
    ),
    "an argument by another name": Part(
        {},
        [
            "[arguments] gives 'witdh', which the recipe function 'recipe' does not take",
            "mean 'width'?",
        ],
        {"witdh": 3},
    ),
}


@pytest.fixture
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The recipe that a test imports is forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("instep_recipe", None)


def answer_to(file: Path, function: str = "recipe", **arguments: Any) -> InstepError:
    """The error that a worker meets in a recipe."""
    with pytest.raises(InstepError) as caught:
        take_a_step(f"{file}:{function}", arguments)
    return caught.value


def take_a_step(reference: str, arguments: Mapping[str, Any]) -> None:
    """What a worker does with a recipe, in its order, up to a loss and the metrics."""
    recipe = call(load_function(reference), arguments, 0)
    built = build(recipe, 0, torch.device("cpu"), 10)
    loader = Loader(recipe.train, seed=0, shuffle=True, collate=recipe.collate, processes=0)
    forward = Forward(recipe, built.model, torch.device("cpu"), "float32")
    (read,) = loader.read([Slice(0, 0, 4)])
    forward.loss(read.batch, 1)
    forward.measure(read.batch, 1)


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("mistake", IN_A_RECIPE)
def test_a_mistake_in_a_recipe(tmp_path: Path, mistake: str) -> None:
    part = IN_A_RECIPE[mistake]
    file = tmp_path / "recipe.py"
    given = ", ".join(f"{name}={value}" for name, value in {**GOOD, **part.parts}.items())
    file.write_text(
        "import torch\nfrom torch import nn\nimport instep\n"
        "class Returns(nn.Linear):\n"
        "    def __init__(self, what):\n        super().__init__(3, 2)\n        self.what = what\n"
        "    def forward(self, inputs):\n        return self.what(super().forward(inputs))\n"
        f"def recipe(width=3):\n    return instep.Recipe({given})\n"
    )
    error = answer_to(file, **part.arguments)
    assert error.exit_code == part.code
    assert [word for word in part.words if word not in str(error)] == [], str(error)
    assert "\n" not in str(error)


IN_A_RECIPE_FILE = [
    ("def recipes(): ...", "has no function 'recipe'. Did you mean 'recipes'?"),
    ("recipe = 3", "'recipe' in {file} is an int, but a function is wanted."),
    ("def recipe(): ...", "'recipe' returned None, but an instep.Recipe is wanted."),
    ("def recipe(width): ...", "needs 'width': give it under [arguments], or with --set arg"),
    ("def recipe(:", "SyntaxError"),
    ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this"),
]


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize(("text", "words"), IN_A_RECIPE_FILE)
def test_a_mistake_in_a_recipe_file(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(text + "\n")
    error = answer_to(file)
    assert error.exit_code == 3
    assert words.format(file=file) in str(error)


def test_a_label_that_the_model_has_no_output_for_is_explained() -> None:
    with pytest.raises(IndexError) as caught:
        torch.nn.CrossEntropyLoss()(torch.zeros(2, 3), torch.tensor([1, 3]))
    assert "Target 3 is out of bounds." in sentence(caught.value)
    assert "The model has too few outputs for the classes" in sentence(caught.value)
