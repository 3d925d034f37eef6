"""Streams, mixtures and planned classes in runs that are disturbed: is each sample used as planned?

    nice -n 10 python benchmarks/streams.py [--kills 50] [--resizes 10] [--only with_state] [--to X]

Each kind of data is trained on while workers and loader processes are killed, and their number is
changed to 2, 3, 5 or 7, each time after all have trained on since; then the run is stopped, and
resumed with one worker; and another is not disturbed, for as many steps. The SHA-256 of
the parameters is compared, the ledger is audited, and contents of samples are compared with a plain
read. What gives each sample once (a socket, asked by eight parts) has no undisturbed twin: there,
no sample may come twice, and a step that is computed again has the samples that it had.

Then, without a run, a stream is continued after 10^6 samples in a new process: seconds to the
first sample, and bytes that are kept beside the states. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from instep.errors import InstepError
from instep.events import CONTENTS, read_records
from instep.lab.chaos.run_processes import Processes, send
from instep.store.run_folder import RunFolder

RECIPE = '''
import instep, socket, torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data import get_worker_info

class Numbers(IterableDataset):
    """Samples of all numbers, each num_workers-th for a loader."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        info = get_worker_info()
        while True:
            number = info.id + self.at * info.num_workers
            self.at += 1
            yield self.sample(number)

    def sample(self, number):
        return torch.tensor([number % n / n for n in range(2, 10)]), number % 7 / 7

class Told(Numbers):
    """The same, which says where it is."""

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class Whole:
    """Mixed in: samples are whole numbers."""

    def sample(self, number):
        return number

class WholeNumbers(Whole, Numbers): pass
class WholeTold(Whole, Told): pass

class Negative(Told):
    def sample(self, number):
        inputs, target = super().sample(number)
        return -inputs, target

class Asked(Numbers):
    """Asks a server for each number, which it gives once."""

    def __init__(self, address):
        self.address = address

    def __iter__(self):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            while True:
                connection.sendall(b"?")
                body = connection.recv(8, socket.MSG_WAITALL)
                yield torch.tensor(int.from_bytes(body, "little")), 0.0

def classes():
    draw = torch.Generator().manual_seed(3)
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([9000, 800, 150, 50]))
    return TensorDataset(torch.randn(10000, 8, generator=draw), labels)

def data(kind, address):
    if kind == "without_state":
        return Numbers()
    if kind == "mixed":
        return {"web": Told(), "books": Negative()}
    if kind == "once":
        return Asked(address)
    if kind == "sampler":
        given = classes()
        weights = 1 / torch.bincount(given.tensors[1])[given.tensors[1]]
        return DataLoader(given, 64, sampler=WeightedRandomSampler(weights, 10000))
    return classes() if kind in ("resample", "lengths") else Told()

class Small(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.classes, self.layer = classes, torch.nn.Linear(8, 4 if classes else 1)

    def forward(self, inputs):
        if inputs.dim() == 1:
            inputs = inputs[:, None] % torch.arange(2, 10) / torch.arange(2, 10)
        outputs = self.layer(inputs)
        return outputs if self.classes else outputs.flatten()

def recipe(kind: str = "with_state", address: str = ""):
    classes = kind in ("resample", "sampler", "lengths")
    return instep.Recipe(
        model=Small(classes),
        train=data(kind, address),
        labels=(lambda dataset, index: int(dataset.tensors[1][index])) if classes else None,
        length=(lambda dataset, index: 1 + index * 7919 % 389) if kind == "lengths" else None,
        loss=torch.nn.CrossEntropyLoss() if classes else torch.nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
'''

JOB = """
recipe = "recipe.py:recipe"
workers = 2
seed = 5
[train]
determinism = "bits"
{size}
micro_batches = 8
[check]
content = "all"
[data]
"""

DATA = {
    "with_state": 'order = "windowed"\nwindow = 512\nparts = 4',
    "without_state": 'order = "windowed"\nwindow = 512\nparts = 4',
    "mixed": "window = 512\nparts = 2\n[[data.sources]]\nname = 'web'\nweight = 0.7\n"
    "[[data.sources]]\nname = 'books'\nweight = 0.3",
    "once": 'order = "windowed"\nwindow = 512\nparts = 8\nonce = true',
    "resample": 'balance = "resample"',
    "sampler": "",
    "lengths": "window = 512",
}
"""Kinds of data, and what the job says of each."""

COUNT, WINDOW = 1_000_000, 512
SIZES = (3, 5, 2, 7)
WORKERS = 2
MANY = 10**6
"""Steps of a run that is ended when all kills are done."""

AFTER = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, ".")
import recipe
from instep.data.reading.streams.given import GivenStream
from instep.data.reading.streams.stream import Stream
from instep.data.reading.streams.turns import StreamPlan

count, window, state, told = json.loads(sys.argv[1])
plan = StreamPlan(1, window, True, None, count)
folder = Path(told) if told else None
given = GivenStream(recipe.WholeTold() if state else recipe.WholeNumbers())
stream = Stream(given, plan, 5, folder)
if told and not folder.exists():
    for at in range(0, count, 64):
        stream.__getitems__(range(at, at + 64))
    sizes = [len(file.read_bytes()) for file in folder.iterdir()]
    kept = stream._parts[0]._kept._windows.values()
    print(json.dumps([sum(sizes) - sum(len(each.state or b"") for each in kept), len(kept)]))
else:
    began = time.perf_counter()
    stream[count - 1]
    print(json.dumps(time.perf_counter() - began))
"""


class Source(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Gives each number once, to whoever asks first."""

    daemon_threads = True

    def __init__(self, address: Path) -> None:
        super().__init__(str(address), Answers)
        self.numbers = itertools.count()


class Answers(socketserver.BaseRequestHandler):
    """A connection to it."""

    def handle(self) -> None:
        """Answer until the other side ends."""
        with suppress(OSError):
            while self.request.recv(1):
                self.request.sendall(next(self.server.numbers).to_bytes(8, "little"))  # type: ignore[attr-defined]


class Runs:
    """Runs of one kind of data, in a folder.

    Args:
        folder: with the recipe.
        kind: a key of `DATA`.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        size = "tokens_per_batch = 12000" if kind == "lengths" else "global_batch = 64"
        (folder / f"{kind}.toml").write_text(f"{JOB.format(size=size)}{DATA[kind]}\n")

    def start(self, name: str, steps: int, *more: str) -> subprocess.Popen[bytes]:
        """Start a run."""
        address = self.folder / "source"
        own = (f"name={name}", f"arguments.kind={self.kind}", f"arguments.address={address}")
        given = (*own, f"train.steps={steps}", *more)
        words = [word for each in given for word in ("--set", each)]
        return self.instep("run", f"{self.kind}.toml", "--json", *words)

    def instep(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command; its messages go to a file."""
        with open(self.folder / "err.log", "ab") as log:
            command = [sys.executable, "-m", "instep", *words]
            return subprocess.Popen(command, cwd=self.folder, stdout=-1, stderr=log)

    def disturbed(
        self, name: str, run: subprocess.Popen[bytes], most: int, resizes: int
    ) -> tuple[int, int]:
        """Kill workers and loader processes of a run, and change how many there are, until it ends
        or so many were killed. Returns how many were killed, and how often it was resized."""
        path, draw, kills, resized = self.folder / "runs" / name, random.Random(name), 0, 0
        processes, seen, size = Processes(path), (0, 0), WORKERS
        while run.poll() is None and kills < most:
            time.sleep(draw.uniform(0.05, 0.4))
            processes.update()
            now = self._at_work(path, size)
            if not (now[0] > seen[0] and now[1] > seen[1]):  # it has not trained on since
                continue
            if kills * resizes // most >= resized and resized < resizes:
                size, resized = SIZES[resized % len(SIZES)], resized + 1
                ended(self.instep("scale", f"runs/{name}", "--workers", str(size), "--json"))
                seen = now
                continue
            every = [each for role in ("worker", "loader") for each in processes.of(role)]
            known = [each for each in every if each.number < size]  # others are leaving
            if known and send(each := draw.choice(known), signal.SIGKILL):
                kills, seen = kills + 1, (now[0] if each.role == "worker" else 0, now[1])
        return kills, resized

    def _at_work(self, path: Path, size: int) -> tuple[int, int]:
        """Number of the generation if so many workers are in it, and bytes of the ledger."""
        with suppress(OSError, ValueError, InstepError):
            told = RunFolder(path).named("generation_started")
            if told and len(told[-1]["members"]) == size:
                return len(told), (path / "ledger.bin").stat().st_size
        return 0, 0

    def proof(self, name: str, found: dict[str, Any]) -> dict[str, Any]:
        """What a run says of itself, and what an audit with a plain read finds."""
        kept = "steps", "parameters_sha256", "missing_samples", "repeated_samples", "generations"
        told = {key: found[key] for key in kept}
        if self.kind == "once":
            return told | {"contents": _used_once(self.folder / "runs" / name, found["steps"])}
        audit = ended(self.instep("audit", f"runs/{name}", "--content", "--json"))
        contents = {key: audit["content"][key] for key in ("recorded", "compared", "wrong")}
        return told | {"contents": contents}


def _used_once(run: Path, steps: int) -> dict[str, Any]:
    """Places in the stream, and contents: as many, where each place had one content only."""
    files = run.glob("contents-*.bin")
    rows = np.unique(np.concatenate([read_records(file, CONTENTS) for file in files]))
    places, contents = len(np.unique(rows["index"])), len(np.unique(rows["content"]))
    return {"due": steps * 64, "recorded": places, "contents": contents, "pairs": len(rows)}


def ended(command: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The last line of a command, which may have been interrupted."""
    out, _ = command.communicate()
    if command.returncode not in (0, 130):
        raise SystemExit(f"a command ended with {command.returncode}: see err.log")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def disturbed(folder: Path, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compare a run that is disturbed with one that is not."""
    runs, name = Runs(folder, kind), f"{kind}-disturbed"
    run = runs.start(name, MANY)
    kills, resizes = runs.disturbed(name, run, args.kills, args.resizes)
    run.terminate()
    stop = f"train.stop_after_steps={ended(run)['steps'] + 20}"
    resume = ("resume", f"runs/{name}", "--workers", "1", "--json", "--set", stop)
    last = ended(runs.instep(*resume))
    proof = runs.proof(name, last)
    found = {"kills": kills, "resizes": resizes, "resumes": 1, "run": proof}
    if kind == "once":
        each = proof["contents"]
        exact = each["due"] <= each["recorded"] == each["contents"] == each["pairs"]
        return found | {"same": exact}
    calm = ended(runs.start(f"{kind}-calm", last["steps"]))
    same = calm["parameters_sha256"] == proof["parameters_sha256"]
    return found | {"workers": sorted({1, WORKERS, *SIZES[:resizes]}), "same": same}


def continued(folder: Path) -> dict[str, Any]:
    """Seconds to a sample after 10^6 in a new process, and bytes beside the states of a part."""

    def run(state: bool, told: str) -> Any:
        given = json.dumps([COUNT, WINDOW, state, told])
        command = [sys.executable, "-c", AFTER, given]
        return json.loads(subprocess.run(command, cwd=folder, stdout=-1, check=True).stdout)

    beside, windows = run(True, "told")
    return {
        "samples": COUNT,
        "bytes_beside_states": beside,
        "windows_kept": windows,
        "with_state_s": [run(True, "told") for _ in range(3)],
        "without_state_s": run(False, ""),
    }


def main() -> int:
    """Print a line for each kind, and one JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--resizes", type=int, default=10)
    parser.add_argument("--only", choices=[*DATA, "continued"], action="append")
    parser.add_argument("--to", type=Path, help="an empty folder; a temporary one if left out")
    args = parser.parse_args()
    folder = (args.to or Path(tempfile.mkdtemp(prefix="streams-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.py").write_text(RECIPE)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: dict[str, Any] = {}
    with Source(folder / "source") as source:
        threading.Thread(target=source.serve_forever, daemon=True).start()
        for kind in args.only or ("continued", *DATA):
            found = continued(folder) if kind == "continued" else disturbed(folder, kind, args)
            result[kind] = found
            print(json.dumps({kind: found}), flush=True)
        source.shutdown()
    print(json.dumps(result))
    return 0 if all(each.get("same", True) for each in result.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
