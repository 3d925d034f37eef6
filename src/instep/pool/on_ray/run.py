"""Runs `instep host` on a node of a Ray cluster: the `start` of a host in the file of a pool.

    start = "python -m instep.pool.on_ray.run 10.0.0.1:6379 --cpus 8 --"

An actor with these resources waits until a node has room for it, which the autoscaler of the
cluster sees, and runs the command there. It outlives this program. Way in: `main`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.comm.protocol.channel import Address
from instep.errors import InstepError, PeerError, RunError, SpecError
from instep.launch.join_token import credentials
from instep.launch.ray.cluster import connect, last_line
from instep.launch.ray.private import draining
from instep.pool.hosts.host_gate import GONE
from instep.pool.on_ray.actor import NodeCommand
from instep.system.processes import interrupt, on_signals
from instep.units import host_and_port

LOOK_S = 0.5
"""Between two looks at the command, and at its node."""

STOP_S = 10.0
"""How long a command may take to end once it was asked to."""

TOKEN = "--token-file"


def main(arguments: Sequence[str]) -> int:
    """Run a command on a node, to its end; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m instep.pool.on_ray.run",
        description="Run a command on a node of a Ray cluster: the `start` of a host in pool.toml.",
    )
    parser.add_argument("address", help="of the cluster, such as 10.0.0.1:6379")
    parser.add_argument("--cpus", type=float, required=True, help="cores that Ray is to give it")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs that Ray is to give it")
    text = "another resource, such as NAME=1; may be given several times"
    parser.add_argument("--resource", action="append", default=[], metavar="NAME=AMOUNT", help=text)
    parser.add_argument("words", nargs="+", help="the command, after --")
    args = parser.parse_args(arguments)
    try:
        each = {"num_cpus": args.cpus, "num_gpus": args.gpus, "resources": _others(args.resource)}
        words, files = _packed(args.words)
        return run(args.address, each, words, files)
    except (InstepError, PeerError, OSError) as error:
        print(f"error {error}", file=sys.stderr)
        if isinstance(error, NodeGoneError) and GONE in os.environ:
            Path(os.environ[GONE]).touch()
        return error.exit_code if isinstance(error, InstepError) else RunError.exit_code


class NodeGoneError(RunError):
    """The node of a command is gone, or what ran it there, and so is all that came of it."""


def _others(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in given:
        name, _, amount = text.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            raise SpecError(f"--resource {text}: needs a name and an amount, as NAME=1.") from None
    return found


def _packed(words: Sequence[str]) -> tuple[list[str], dict[str, bytes]]:
    """A command as it runs on any node, and the files that it needs there.

    The machine of the scheduler buys the certificate of a host: its token works once, and its
    node may be another one the next time.

    Raises:
        PeerError: the scheduler is not there.
        JoinError: the token is refused.
    """
    found, files = [*words], dict[str, bytes]()
    if found[0] == sys.executable:
        found[0] = "{python}"
    if TOKEN in found and "--join" in found:
        place = found.index(TOKEN) + 1
        token_file = Path(found[place])
        credentials(Address(*host_and_port(found[found.index("--join") + 1])), token_file)
        for path in (token_file, token_file.with_name(f"{token_file.name}.certificate")):
            files[path.name] = path.read_bytes()
        found[place] = f"{{files}}/{token_file.name}"
    return found, files


def run(address: str, each: dict[str, Any], words: Sequence[str], files: dict[str, bytes]) -> int:
    """Run a command on a node with these resources, or wait for the one that runs there.

    Args:
        address: of the cluster.
        each: the options of its actor.
        words, files: as of `NodeCommand.run`.

    Returns:
        Its exit code.

    Raises:
        SpecError: there is no cluster.
        NodeGoneError: its node was lost, or killed.
        RunError: the cluster does not answer.
    """
    ray, _ = connect(address, 0)
    name = (
        "instep-host-" + hashlib.sha256(repr((words, sorted(files.items()))).encode()).hexdigest()
    )
    actor = ray.remote(NodeCommand).options(
        name=name,
        namespace="instep",
        get_if_exists=True,
        lifetime="detached",
        max_concurrency=8,
        max_restarts=0,
        scheduling_strategy="SPREAD",
        **each,
    )
    try:
        placed = actor.remote()
        while True:
            with suppress(ray.exceptions.ActorUnavailableError):
                return _followed(ray, placed, words, files)
            time.sleep(LOOK_S)  # until Ray knows whether it lives
    except ray.exceptions.ActorDiedError as error:
        why = str(error).strip().partition(". ")[0].partition("\n")[0]  # the rest are guesses
        raise NodeGoneError(f"what ran on its node of the Ray cluster has ended: {why}") from None
    except ray.exceptions.RayError as error:
        raise RunError(f"its node of the Ray cluster cannot be asked: {last_line(error)}") from None
    finally:
        ray.shutdown()


def _followed(ray: Any, actor: Any, words: Sequence[str], files: dict[str, bytes]) -> int:
    """Wait for the end of a command, tell it if its node will go, and end it if this is ended."""
    node, ended = actor.node.remote(), actor.run.remote(words, files)
    told = False
    try:
        with on_signals(interrupt):
            while not _is_there(ray, ended, LOOK_S):
                if not told and _is_there(ray, node) and ray.get(node) in draining(ray):
                    told = True
                    actor.leave.remote()
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not _is_there(ray, node):
            ray.kill(actor)  # it waits for a node that nobody needs any more
            return 128 + signal.SIGTERM
        actor.stop.remote()
        if not _is_there(ray, ended, STOP_S):
            raise RunError("the command on the node does not end") from None
    return int(ray.get(ended))


def _is_there(ray: Any, reference: Any, wait_s: float = 0.0) -> bool:
    return bool(ray.wait([reference], timeout=wait_s)[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
