"""How long until the same validation loss, beside plain DDP and other systems, over slow links?

    python benchmarks/worth_it.py steps mlp ddp: instep:sync.codec=int4 --lr 1e-3 2e-3 --json FILE
    python benchmarks/worth_it.py time mlp ddp: ddp:hook='"fp16"' --lr 2e-3 --json FILE
    python benchmarks/worth_it.py show --json FILE

Four workers with one thread each, and one of the two models of `recipes/letters.py`, which learn
from real text. `steps` has no limit on the network and asks how many steps each contender needs at
each learning rate, so all are tuned on the same grid; figures do not depend on the machine's
speed. `time` has an emulated host for each worker (needs root) and asks for the seconds from the
begin of the first step. With `--steps` a contender stops early: `show` then multiplies its time of
a step by the steps that `steps` has found. Each contender is a command of its own and adds to FILE,
so that they can take turns; `--python` is that of a rival's environment. `races.py` runs them.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from races import LOADS, race
from turns import write

PLAIN = "ddp"
"""The rival that all are compared with, without a hook."""


def results_in(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["results"] if file.exists() else []
    return found


def show(results: list[dict[str, Any]]) -> None:
    """For each load: time to the loss, and how many times as fast as the best plain DDP."""
    for load in LOADS:
        mine = [each for each in results if each["load"] == load]
        rows = []
        for name, lr in dict.fromkeys((e["contender"], e["lr"]) for e in mine if e["rate"]):
            own = [e for e in mine if (e["contender"], e["lr"]) == (name, lr)]
            plain = name.startswith(PLAIN) and "hook" not in name
            same = [e for e in mine if plain and e["contender"].startswith(PLAIN)
                    and "hook" not in e["contender"] and e["lr"] == lr]  # fmt: skip
            steps = [e["steps"] for e in (same if plain else own) if e["steps"]]
            timed = [e for e in own if e["rate"]]
            seconds = [e["seconds"] for e in timed if e["seconds"]]
            if not seconds and steps:
                a_step = statistics.median(e["seconds_a_step"] for e in timed)
                seconds = [a_step * statistics.median(steps)]
            sent = statistics.median(e["sent_bytes_a_step"] for e in timed)
            rows.append((statistics.median(seconds or [0]), name, lr, plain, steps, timed, sent))
        base = min((row[0] for row in rows if row[3] and row[0]), default=0.0)
        for took, name, lr, _, steps, timed, sent in sorted(rows, key=lambda row: row[0] or 1e9):
            times = base / took if took else 0.0
            count = statistics.median(steps) if steps else 0
            a_step = statistics.median(e["seconds_a_step"] for e in timed)
            print(
                f"{load} {took:7.1f} s {times:6.2f} times {count:6.0f} steps {a_step:7.3f} s and "
                f"{sent / 1e6:7.3f} MB a step, lr {lr}, {len(timed)} runs: {name}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["steps", "time", "show"])
    parser.add_argument("load", nargs="?", choices=LOADS)
    parser.add_argument("contenders", nargs="*")
    parser.add_argument("--lr", nargs="+", type=float, default=[2e-3])
    parser.add_argument("--rate", default="100mbit", help="of each host's link, as tc writes it")
    parser.add_argument("--steps", type=int, default=0, help="the most; of the load if left out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7])
    parser.add_argument("--python", default=sys.executable, help="of a rival's environment")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.what == "show":
        show(results_in(args.json))
        return
    rate = args.rate if args.what == "time" else None
    more = {"steps": args.steps, "rate": rate, "python": args.python}
    for seed in args.seeds:
        for contender in args.contenders:
            for lr in args.lr:
                found = race(contender, args.load, lr, seed=seed, **more)
                write(args.json, [*results_in(args.json), found])
                short = {key: value for key, value in found.items() if key != "curve"}
                print(json.dumps(short), flush=True)


if __name__ == "__main__":
    main()
