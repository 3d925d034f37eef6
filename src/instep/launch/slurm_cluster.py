"""What a Slurm cluster says: the allocation that this process is in, and its nodes."""

from __future__ import annotations

import os
import subprocess

from instep.errors import SpecError

ANSWER_S = 20.0
"""How long a command of Slurm may take; it waits for a controller that does not answer."""


def allocation() -> str:
    """The id of the Slurm job that this process is in; empty if it is in none."""
    return os.environ.get("SLURM_JOB_ID", "")


def nodes_of(allocation: str) -> list[str]:
    """The names of the nodes that an allocation has now.

    Raises:
        SpecError: Slurm does not say.
    """
    listed = ask("squeue", "--noheader", f"--jobs={allocation}", "-o", "%N").strip()
    return ask("scontrol", "show", "hostnames", listed).split() if listed else []


def ask(*command: str) -> str:
    """What a command of Slurm prints.

    Raises:
        SpecError: there is no such command, or it fails; with its own last words.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise SpecError(
            f"launch.on = 'slurm', and there is no command {command[0]!r} on this machine. Run "
            "it where Slurm is installed, such as the cluster's login node."
        ) from None
    except subprocess.TimeoutExpired:
        raise SpecError(
            f"{command[0]} has not answered for {ANSWER_S:g} s. Is Slurm's controller up? "
            "`scontrol ping` says so."
        ) from None
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise SpecError(f"{command[0]} failed: {words[-1]}")
    return done.stdout
