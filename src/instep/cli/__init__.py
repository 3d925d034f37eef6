"""The command line: parse, call, print. `--help` answers without importing torch.

Progress goes to standard error. Standard output gets the result: a few lines,
or with `--json` one JSON object as its last line. Exit codes are those of
`errors.py`.

To add a command: write a function, whose docstring is its help, and beside it one that declares
its options, and add its line to `GROUPS`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from instep.cli import (
    attacking,
    checking,
    folders,
    models,
    networks,
    planning,
    pooling,
    preparing,
    results,
    running,
    searching,
    starting,
)
from instep.cli.parsing import Command, parsed
from instep.cli.saying import say_aside
from instep.errors import INTERRUPTED, InstepError, RunError
from instep.system.output import open_standard_streams

GROUPS = {
    "begin": {
        "init": Command(starting.init, starting.init_options, "init vision"),
        "check": Command(checking.check, checking.check_options, "check job.toml --workers 4"),
        "plan": Command(
            planning.plan, planning.plan_options, "plan job.toml --hosts 4 --rate 1gbit"
        ),
    },
    "train": {
        "run": Command(running.run, running.run_options, "run job.toml --workers 4"),
        "resume": Command(running.resume, running.resume_options, "resume runs/net --workers 3"),
        "scale": Command(running.scale, running.scale_options, "scale runs/net --workers 8"),
        "compare": Command(
            results.compare,
            results.compare_options,
            "compare job.toml --with workers=2 --with sync.codec=int8",
        ),
        "search": Command(
            searching.search, searching.search_options, "search job.toml --trials 40"
        ),
    },
    "look": {
        "list": Command(folders.list_runs, folders.list_runs_options, "list"),
        "status": Command(folders.status, folders.status_options, "status runs/net"),
        "logs": Command(folders.logs, folders.logs_options, "logs runs/net worker-1 --follow"),
        "dashboard": Command(folders.dashboard, folders.dashboard_options, "dashboard runs"),
        "report": Command(results.report, results.report_options, "report runs/net runs/other"),
        "clean": Command(folders.clean, folders.clean_options, "clean --dry-run"),
    },
    "many jobs": {
        "pool": Command(pooling.pool, pooling.pool_options, "pool start pool.toml"),
        "submit": Command(pooling.submit, pooling.submit_options, "submit job.toml --priority 10"),
        "cancel": Command(pooling.cancel, pooling.cancel_options, "cancel net-2"),
        "explain": Command(pooling.explain, pooling.explain_options, "explain net-2"),
    },
    "data and models": {
        "prepare": Command(
            preparing.prepare,
            preparing.prepare_options,
            "prepare 'raw/*.jsonl' --to data/reviews --map clean.py:record",
        ),
        "data": Command(preparing.data, preparing.data_options, "data job.toml --sample 17"),
        "predict": Command(
            models.predict, models.predict_options, "predict runs/net --data data.py:test"
        ),
        "export": Command(
            models.export, models.export_options, "export runs/net --to net.safetensors"
        ),
    },
    "proof": {
        "audit": Command(results.audit, results.audit_options, "audit runs/net"),
        "replay": Command(results.replay, results.replay_options, "replay runs/net --step 100"),
        "chaos": Command(results.chaos, results.chaos_options, "chaos job.toml --kills 10"),
        "lab": Command(
            attacking.lab, attacking.lab_options, "lab privacy job.toml --canaries 1000"
        ),
    },
    "several machines": {
        "host": Command(
            running.host, running.host_options, "host --join node1:2220 --token-file token-1"
        ),
        "certificates": Command(
            running.certificates, running.certificates_options, "certificates keys --hosts 3"
        ),
        "join-run": Command(running.join_run, running.join_run_options, "join-run runs/net"),
        "netlab": Command(
            networks.netlab, networks.netlab_options, "netlab up --hosts 3 --rate 100mbit"
        ),
    },
    "shell": {
        "completion": Command(starting.completion, starting.completion_options, "completion bash"),
    },
}
"""Commands by what they are for, as `--help` shows them."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; our own errors print as one line."""
    try:
        words = sys.argv[1:] if argv is None else argv
        args = parsed(words or ["--help"], GROUPS)
        return int(args.call(args))
    except InstepError as error:
        from instep.words import fit_to_print

        say_aside(f"instep: {fit_to_print(str(error))}")
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has stopped
        return 1
    except OSError as error:
        if _is_of_print(error):
            say_aside(f"instep: the answer cannot be written: {error.strerror}.")
            return 1
        what = error.filename or "a file or connection"
        say_aside(f"instep: {what} cannot be used: {error.strerror or error}.")
        return RunError.exit_code


def _is_of_print(error: OSError) -> bool:
    """Whether printing a result raised it, here, and not what a command did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = Path(trace.tb_frame.f_code.co_filename).parent if trace is not None else None
    return place == Path(__file__).parent and error.filename is None


def run_main() -> NoReturn:
    """The `instep` program; Ctrl-C ends it with one line, at any moment."""
    open_standard_streams()
    try:
        code = main()
    except KeyboardInterrupt:
        say_aside("instep: interrupted.")
        code = INTERRUPTED
    sys.exit(code)
