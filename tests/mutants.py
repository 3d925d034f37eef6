"""Change one line of the core and see a test fail: `python tests/mutants.py --seed 1 --count 20`.

The rules take turns (a weight, a key, an fsync, a lock, a comparison, a sum), and the line is
drawn from all that the rule fits. It is changed in a copy of the tree, and the suite's tests of its
module run there until one fails: those that have its name, then those that import it, then its
folder's. What none of them notices is printed, and the exit code is the number of such lines.
Whoever finds one adds a test.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CORE = (
    "checksums.py", "comm/codecs", "comm/protocol/connection.py", "comm/buckets.py",
    "comm/protocol/heartbeat_lease.py", "comm/protocol/master_inbox.py",
    "comm/protocol/unacknowledged.py",
    "control/decisions/decide.py", "control/decisions/generations.py",
    "control/decisions/losses.py", "control/decisions/membership.py",
    "control/decisions/replacing.py", "control/keys.py", "control/seen.py", "control/watch.py",
    "data/dealing.py", "data/batches.py", "data/order.py", "data/partition", "data/raw",
    "data/reading", "data/shards",
    "data/splits", "data/windowed.py", "plain_file.py", "prepare",
    "recipe/forward.py", "recipe/weights.py", "state", "store/audit.py", "store/ledger.py",
    "store/step_log.py", "sync", "system/host_memory.py", "system/memory_files.py",
    "system/outbox.py", "system/slots.py", "server", "engine", "worker/own", "worker/trial",
)  # fmt: skip
"""What gives a wrong result if it is wrong; below `src/instep`."""

RULES = {
    "a weight": (r"\* (?:\w+\.)*(?:weight|scale)\b(?!\()", ""),
    "a share": (r" //? (?:\w+\.)*(?:total|samples|size|count)\b(?!\()", ""),
    "a key": (r"\bkey\((\w+(?:\.\w+)*), [^()]+\)", r"key(\1)"),
    "an fsync": (r"\bos\.fsync\(.*\)", "pass"),
    "a lock": (r"^(\s*)with self\.\w*lock\w*:", r"\1if True:"),
    "less": (r" < ", " >= "),
    "more": (r" > ", " <= "),
    "equal": (r" == ", " != "),
    "a sum": (r" \+= ", " -= "),
}


class Mutant(NamedTuple):
    """One line, and what it becomes."""

    rule: str
    file: Path
    """Below the root."""
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.before.strip()}"


def mutants() -> Iterator[Mutant]:
    """Every line of the core that a rule fits, in order; but for docstrings, asserts and raises."""
    package = ROOT / "src" / "instep"
    for place in CORE:
        path = package / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text = file.read_text("utf-8")
            quoted = _quoted(text)
            for number, line in enumerate(text.splitlines(), 1):
                if number in quoted or re.match(r"\s*(assert|raise|#|@|def|class)\b", line):
                    continue
                for rule, (pattern, becomes) in RULES.items():
                    after = re.sub(pattern, becomes, line, count=1)
                    if after != line and _compiles(text, number, after):
                        yield Mutant(rule, file.relative_to(ROOT), number, line, after)


def _compiles(text: str, number: int, after: str) -> bool:
    lines = text.splitlines()
    lines[number - 1] = after
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


def draw(dice: random.Random, count: int) -> list[Mutant]:
    """So many, each rule in its turn; a rule that fits no further line is left out."""
    by_rule: dict[str, list[Mutant]] = {rule: [] for rule in RULES}
    for mutant in mutants():
        by_rule[mutant.rule].append(mutant)
    for each in by_rule.values():
        dice.shuffle(each)
    turns = (each.pop() for _ in range(count) for each in by_rule.values() if each)
    return list(itertools.islice(turns, count))


def _quoted(text: str) -> set[int]:
    """The lines of strings that stand alone or run over several lines."""
    strings = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant))
    spans = ((n.lineno, n.end_lineno or n.lineno) for n in strings if isinstance(n.value, str))
    alone = {n for first, last in spans if last > first for n in range(first, last + 1)}
    return alone | {n for n, line in enumerate(text.splitlines(), 1) if '"""' in line}


def tests_of(file: Path) -> list[Path]:
    """Where a change of this module is to be noticed, the nearest first."""
    module = ".".join(file.with_suffix("").parts[1:]).removesuffix(".__init__")
    parent, _, name = module.rpartition(".")
    imports = re.compile(
        rf"(?:from|import) {re.escape(module)}\b|from {re.escape(parent)} import .*\b{name}\b"
    )
    folder = ROOT / "tests" / "unit" / module.split(".")[1]
    ranks: dict[Path, int] = {}
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        if test.stem == f"test_{name}":
            ranks[test] = 0
        elif test.stem == f"test_{parent.rpartition('.')[2]}" or imports.search(
            test.read_text("utf-8")
        ):
            ranks[test] = 1 if test.parent.name != "process" else 3
        elif test.is_relative_to(folder) or test.parent.name == "contract":
            ranks[test] = 2
    return sorted(ranks, key=lambda test: (ranks[test], test.stat().st_size if ranks[test] else 0))


def survives(mutant: Mutant, copy: Path, limit_s: float) -> str:
    """Nothing if a test fails; else how many files of tests have passed."""
    target = copy / mutant.file
    whole = target.read_text("utf-8")
    lines = whole.splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.after + "\n"
    target.write_text("".join(lines), "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    passed, began = 0, time.monotonic()
    try:
        for test in tests_of(mutant.file):
            if time.monotonic() - began > limit_s:
                break
            words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test.relative_to(ROOT)]
            done = subprocess.run(
                [sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True
            )
            if done.returncode == 1:
                print(f"found by {_name_of_failure(done.stdout)}", flush=True)
                return ""
            passed += 1
    finally:
        target.write_text(whole, "utf-8")
    return f"{passed} files of tests have passed"


def _name_of_failure(said: str) -> str:
    lines = [each for each in said.splitlines() if each.startswith(("FAILED", "ERROR"))]
    return lines[0].split()[1] if lines else "a failure"


def main() -> int:
    """Draw, change, run, say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=900, help="for the tests of one line")
    parser.add_argument("--list", action="store_true", help="print the drawn lines and stop")
    given = parser.parse_args()
    drawn = draw(random.Random(given.seed), given.count)
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        left_out = shutil.ignore_patterns(".git", ".venv", "runs", "build")
        shutil.copytree(ROOT, copy, ignore=left_out)
        for number, mutant in enumerate(drawn, 1):
            print(f"{number:3d} {mutant}", flush=True)
            if not given.list and (passed := survives(mutant, copy, given.limit_s)):
                survivors += 1
                print(f"    SURVIVES: {passed}", flush=True)
    print(f"{survivors} of {given.count} are not noticed" if not given.list else "")
    return survivors


if __name__ == "__main__":
    raise SystemExit(main())
