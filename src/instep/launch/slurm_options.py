"""Options of a batch job that Slurm takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from instep.errors import SpecError

SIGNALS = ("USR1", "USR2", "HUP", "INT", "QUIT", "ALRM", "XCPU")
"""Those that Slurm may send before the time limit; TERM is what scancel sends."""

SIGNAL = "USR1@60"
"""Which of them, and how many seconds before; `signal` in `launch.options`."""

NEXT = ("requeue", "submit")
"""How a run whose time was over continues: in the same job or in another; `next` in
`launch.options`."""

OURS = frozenset(
    (
        *("chdir", "error", "output", "open-mode", "job-name", "wrap", "requeue"),
        *("nodes", "no-kill", "ntasks", "cpus-per-task", "gpus-per-node"),
    )
)
"""Options of sbatch that the script sets itself, or that it cannot do without."""


def sbatch_options(given: Mapping[str, Any]) -> list[str]:
    """Lines for sbatch from `launch.options`.

    Raises:
        SpecError: an option is no long option of sbatch, or is the script's own.
    """
    lines = []
    for name, value in given.items():
        if name == "signal":
            signal_of(value)
        elif name == "next":
            if value not in NEXT:
                raise SpecError(
                    f"launch.options.next = {value!r}: needs 'requeue', to go on in the same job, "
                    "or 'submit', to go on in another."
                )
        elif name in OURS or not re.fullmatch(r"[a-z][a-z-]+", name):
            raise SpecError(
                f"launch.options.{name}: needs a long option of sbatch that instep does not set "
                "itself, such as partition or time; nodes, cpus and gpus are keys of [launch]."
            )
        elif value is True:
            lines.append(f"--{name}")
        elif type(value) in (str, int) and "\n" not in str(value):
            lines.append(f"--{name}={value}")
        else:
            raise SpecError(
                f"launch.options.{name} = {value!r}: needs text, a whole number, or true."
            )
    return lines


def signal_of(value: object = SIGNAL) -> tuple[str, int]:
    """Which signal Slurm sends before the time limit, and how many seconds before.

    Raises:
        SpecError: it is none.
    """
    found = re.fullmatch(r"([A-Z0-9]+)@(\d+)", value) if isinstance(value, str) else None
    if found is None or found[1] not in SIGNALS or not 1 <= int(found[2]) < 1 << 16:
        raise SpecError(
            f"launch.options.signal = {value!r}: needs a signal and how many seconds before the "
            f"time limit, from 1 to 65535, such as {SIGNAL!r}. Known: {', '.join(SIGNALS)}."
        )
    return found[1], int(found[2])
