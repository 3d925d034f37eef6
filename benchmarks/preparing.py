"""`instep prepare` beside Hugging Face datasets' map, and beside cp: seconds, ratios, peak memory.

    python benchmarks/preparing.py --megabytes 500 --to FOLDER [--kinds json parquet] [--alone]

One raw file of each kind is made, and read once, so that it lies in the page cache. Then all
alternatives take turns: JSON lines and CSV to arrays and text to tokens with one worker, with two,
and `datasets.map(num_proc=2)` of the same function; Parquet to Arrow with one and two, and `cp` of
the Arrow files that came of it, as it is and with `sync`, as ours lie on the disk. Needs the
package datasets, but with --alone, where nothing takes turns with it. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

FUNCTIONS = """
import numpy as np

def of_json(raw):
    return {"x": np.asarray(raw["v"], np.float32), "y": raw["y"]}

def of_csv(raw):
    return {"x": np.asarray([raw[f"c{i}"] for i in range(8)], np.float32), "y": raw["y"]}
"""

RIVAL = """
import sys
import datasets, numpy as np
from functions import of_csv, of_json
kind, raw, to = sys.argv[1:]
datasets.disable_progress_bars()
if kind == "tokens":
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file("tok.json")
    def of_text(raw):
        found = tok.encode(raw["text"], add_special_tokens=False).ids
        return {"tokens": np.asarray(found[:512], np.int32)}
    made = datasets.load_dataset("text", data_files=raw, split="train", cache_dir=to + "/cache")
    function = of_text
else:
    name = {"json": "json", "csv": "csv"}[kind]
    made = datasets.load_dataset(name, data_files=raw, split="train", cache_dir=to + "/cache")
    function = {"json": of_json, "csv": of_csv}[kind]
made.map(function, num_proc=2, remove_columns=made.column_names).save_to_disk(to + "/out")
"""


def write_lines(path: Path, line: Callable[[], str], size: int, head: str = "") -> None:
    """Write so many bytes of lines: those of a block of 32 MB, again and again."""
    block = ""
    while len(block) < min(size, 32 << 20):
        block += "".join(f"{line()}\n" for _ in range(10_000))
    with open(path, "w") as file:
        file.write(head)
        for _ in range(max(1, round(size / len(block)))):
            file.write(block)


def make_raw(folder: Path, megabytes: int, kinds: list[str]) -> None:
    """Write the raw files and what prepares them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "rival.py").write_text(RIVAL)
    draw, size = random.Random(1), megabytes << 20
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(5000)]

    def of_json() -> str:
        row = {"v": [round(draw.random(), 4) for _ in range(8)], "y": draw.randrange(10)}
        return json.dumps(row)

    def of_csv() -> str:
        return ",".join(f"{draw.random():.6f}" for _ in range(8)) + f",{draw.randrange(10)}"

    head = ",".join(f"c{i}" for i in range(8)) + ",y\n"
    if "json" in kinds:
        write_lines(folder / "raw.json", of_json, size)
    if "csv" in kinds:
        write_lines(folder / "raw.csv", of_csv, size, head)
    if "tokens" in kinds:
        write_lines(folder / "raw.txt", lambda: " ".join(draw.choices(words, k=40)), size // 4)
        make_tokenizer(folder / "tok.json", words)
    if "parquet" in kinds:
        make_parquet(folder / "raw.parquet", size)


def make_tokenizer(path: Path, words: list[str]) -> None:
    """Write the file of a tokenizer for these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([" ".join(words)], trainers.BpeTrainer(vocab_size=2000))
    tokenizer.save(str(path))


def make_parquet(path: Path, size: int) -> None:
    """Write eight columns of random doubles, and one of classes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, rows = np.random.default_rng(1), size // 72
    table = pa.table(
        {f"c{i}": rng.random(rows) for i in range(8)} | {"y": rng.integers(0, 10, rows)}
    )
    pq.write_table(table, path, row_group_size=200_000)


def took(command: list[str], folder: Path, peak: list[float] | None = None) -> float:
    """Seconds of a command; the largest memory of any of its processes, in MB, is appended."""
    began = time.monotonic()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles all that it imports
    with open(folder / "log.txt", "ab") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
        most = 0.0
        while process.poll() is None:
            if peak is not None:
                try:
                    own = psutil.Process(process.pid)
                    each = [own, *own.children(recursive=True)]
                    most = max([most, *(p.memory_info().rss / 1e6 for p in each)])
                except psutil.NoSuchProcess:
                    pass
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}: see {folder / 'log.txt'}")
    if peak is not None:
        peak.append(most)
    return time.monotonic() - began


def ours(kind: str, workers: int, folder: Path, peak: list[float]) -> float:
    """Seconds of `instep prepare`."""
    shutil.rmtree(folder / "ours", ignore_errors=True)
    options = {
        "json": ["raw.jsonl", "--map", "functions.py:of_json"],
        "csv": ["raw.csv", "--map", "functions.py:of_csv"],
        "tokens": ["raw.txt", "--tokens", "tok.json", "--length", "512"],
        "parquet": ["raw.parquet"],
    }[kind]
    words = ["prepare", *options, "--to", "ours", "--workers", str(workers)]
    return took([sys.executable, "-m", "instep", *words], folder, peak)


def theirs(kind: str, folder: Path) -> float:
    """Seconds of `datasets.map(num_proc=2)`."""
    shutil.rmtree(folder / "theirs", ignore_errors=True)
    raw = {"json": "raw.json", "csv": "raw.csv", "tokens": "raw.txt"}[kind]
    return took([sys.executable, "rival.py", kind, raw, "theirs"], folder)


def copied(folder: Path, then: str = "true") -> float:
    """Seconds of `cp` of the shards that came of Parquet, and of a command."""
    shutil.rmtree(folder / "copy", ignore_errors=True)
    return took(["sh", "-c", f"cp -r ours copy && {then}"], folder)


def measured(
    folder: Path, turns: int, kinds: list[str], alone: bool, workers: list[int]
) -> dict[str, Any]:
    """Medians and ratios of each kind."""
    found: dict[str, Any] = {}
    for kind in kinds:
        peak: list[float] = []
        every: dict[str, Callable[[], float]] = {
            "one": lambda kind=kind, peak=peak: ours(kind, 1, folder, peak),  # type: ignore[misc]
            "two": lambda kind=kind, peak=peak: ours(kind, 2, folder, peak),  # type: ignore[misc]
        }
        runs = {name: run for n, (name, run) in enumerate(every.items(), 1) if n in workers}
        if kind == "parquet":
            runs["cp"] = lambda: copied(folder)
            runs["cp_synced"] = lambda: copied(folder, "sync -f copy")
        elif not alone:
            runs["datasets"] = lambda kind=kind: theirs(kind, folder)  # type: ignore[misc]
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(turns):
            for name, run in runs.items():
                times[name].append(run())
                print(f"{kind} {name} {times[name][-1]:.1f} s", flush=True)
        found[kind] = {name: median(each) for name, each in times.items()}
        for other in set(runs) - {"two"} if 2 in workers else ():
            found[kind][f"{other}_over_two"] = found[kind][other] / found[kind]["two"]
        found[kind]["peak_mb"] = max(peak)
    return found


def main() -> int:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--to", type=Path, required=True)
    kinds = ["json", "csv", "tokens", "parquet"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--alone", action="store_true", help="without datasets")
    parser.add_argument("--workers", type=int, nargs="+", choices=[1, 2], default=[1, 2])
    given = parser.parse_args()
    folder = given.to.resolve()
    make_raw(folder, given.megabytes, given.kinds)
    link = folder / "raw.jsonl"
    link.unlink(missing_ok=True)
    link.symlink_to("raw.json")
    for raw in {path.resolve() for path in folder.glob("raw.*") if path.exists()}:
        with open(raw, "rb") as file:
            while file.read(1 << 24):
                pass
    found = measured(folder, given.turns, given.kinds, given.alone, given.workers)
    print(json.dumps({"megabytes": given.megabytes, **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
