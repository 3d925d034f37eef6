"""What a Slurm cluster says: the allocation that this process is in, its nodes, what they lack."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from instep.errors import SpecError
from instep.launch.node import Needs
from instep.store.folder import id_of

SRUN = (
    *("srun", "--ntasks-per-node=1", "--overlap", "--mem=0", "--mpi=none", "--export=ALL"),
    *("--no-kill", "--kill-on-bad-exit=0", "--quiet"),
)
"""A task that has all of its node's part of the allocation, beside other steps."""

_EXITED = re.compile(r"srun: error: \S+: tasks? .*: Exited|\s*$")
"""What `srun` says after the words of its task."""

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


def is_over(allocation: str) -> bool:
    """Whether an allocation has ended, as far as Slurm says."""
    try:
        return not nodes_of(allocation)
    except SpecError as error:
        return "Invalid job id" in str(error)


def address_of_this() -> str:
    """The address by which Slurm knows the node that this process is on; empty if it is on none.

    Raises:
        SpecError: Slurm does not say.
    """
    node = os.environ.get("SLURMD_NODENAME", "")
    found = re.search(r"NodeAddr=(\S+)", ask("scontrol", "show", "node", node)) if node else None
    return found[1] if found else ""


_CHECK = """\
import json, os, sys
from pathlib import Path
from instep.launch.node import Needs, missing_at
needs, run, known = json.load(sys.stdin)
print(os.environ["SLURMD_NODENAME"], missing_at(Needs(**needs), Path(run), known))
"""


def check_nodes(allocation: str, nodes: Sequence[str], needs: Needs, run: Path) -> None:
    """Refuse nodes of an allocation that do not have what a run needs, or its folder.

    Raises:
        SpecError: names the first of them, and what it does not have.
    """
    words = [f"--jobid={allocation}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}"]
    words += [f"--nodelist={','.join(nodes)}", sys.executable, "-P", "-c", _CHECK]
    given = json.dumps([asdict(needs), str(run), id_of(run)])
    for line in sorted(ask(*SRUN, *words, given=given).splitlines()):
        node, _, missing = line.partition(" ")
        if node in nodes and missing:
            raise SpecError(f"the node {node} {missing}")


def ask(*command: str, given: str = "") -> str:
    """What a command of Slurm prints.

    Args:
        command: its words.
        given: its standard input.

    Raises:
        SpecError: there is no such command, or it fails; with its own last words.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, input=given
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
        lines = [line for line in done.stderr.splitlines() if not _EXITED.match(line)]
        words = lines[-1] if lines else f"exit code {done.returncode}"
        hint = (
            ". This machine knows no Slurm cluster: run it on one that does, or name Slurm's "
            "configuration in SLURM_CONF."
        ) * ("configuration source" in words)
        raise SpecError(f"{command[0]} failed: {words}{hint}")
    return done.stdout
