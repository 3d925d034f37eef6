"""The fork server of a machine: imports torch once, then forks a worker at each request.

Importing torch takes seconds, a fork takes milliseconds. Whatever a fork
would break must not exist here: no thread, no store, no CUDA context. The
user's recipe file is imported before the fork too, so that its own imports are
paid once; if that leaves threads or CUDA behind, also threads of a library that
does not end them at a fork, the server starts itself again and leaves that
import to the workers.

It may be killed: a spare that it forked first, and that waits until then,
takes its place at once, and watches the workers that are there. The two watch each other:
one that was stopped, or hangs, is killed by the other. Both end, and end all workers, when
the client ends them, or once there can be no master any more.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from instep.comm.codecs import CODECS
from instep.comm.protocol.endpoint import Endpoint
from instep.comm.protocol.messages import (
    Refused,
)
from instep.errors import InstepError, PeerError
from instep.launch.forking import MOST_PAGES, Server, call
from instep.recipe.given import given
from instep.system.causes import Unwanted, as_error
from instep.system.environment import END, SCHEDULERS, places_here, recipe_here, settings
from instep.system.forks import cuda_survives_a_fork, native_threads, threads_after_a_fork
from instep.system.malloc import return_freed_memory
from instep.system.memory_files import MemoryFiles
from instep.system.processes import (
    die_with_parent,
    die_with_pipe,
)

_CLOSED = (
    " The master of a run chooses its port: open all ports between the machines, and look whether "
    "this one reaches that address."
)

_NO_PRELOAD = "INSTEP_NO_PRELOAD"
_ENDPOINT = "INSTEP_ENDPOINT"


def main() -> None:
    """Serve one run; what it needs to know comes from standard input."""
    serve(os.environ.pop(_ENDPOINT, "") or sys.stdin.readline())


def serve(note: str) -> None:
    """Serve one run.

    Args:
        note: the endpoint of its master, and the folder in which the run was started.
    """
    began = time.time()
    die_with_parent(END)
    for number in SCHEDULERS:
        signal.signal(number, signal.SIG_IGN)  # here and in the workers
    seen = json.loads(note)
    if seen.get("lifeline"):
        die_with_pipe(sys.stdin.fileno())
    endpoint = Endpoint.of(seen)
    _settle(seen["folder"])
    memory_files = MemoryFiles(MOST_PAGES, endpoint.token)
    memory_files.adopt_all()  # workers may die during the imports
    try:
        connection = call(endpoint)
    except PeerError as error:
        elsewhere = not endpoint.address.host.startswith("127.")
        sys.exit(f"{error}{_CLOSED if elsewhere else ''}")
    _import_torch()  # while the master gets ready to answer
    if endpoint.credentials is not None:
        import instep.comm.encryption.forwarder  # noqa: F401  each worker has one, which is its fork
    preloading = time.time()
    try:
        welcome = connection.welcome()
    except PeerError as error:
        sys.exit(_failed(error))
    if isinstance(welcome, Refused):
        sys.exit(_failed(as_error(welcome)))
    phases = {"interpreter": began - welcome.started, "import torch": preloading - began}
    job = tomllib.loads(welcome.job)
    if any(job.get("mesh", {}).get(axis, 1) > 1 for axis in ("shard", "tensor", "stages")):
        return_freed_memory()
        _import_meshes()
    if (codec := job.get("sync", {}).get("codec")) in CODECS:
        CODECS[codec]  # with its compiled loops
    if not os.environ.get(_NO_PRELOAD) and not _preload_recipe(job):
        _start_again(note)
    phases["import recipe"] = time.time() - preloading
    launch = job.get("launch", {})
    several = bool(launch.get("hosts") or launch.get("nodes"))
    lifeline = sys.stdin.fileno() if seen.get("lifeline") else -1
    server = Server(
        connection,
        endpoint,
        phases,
        several=several,
        lifeline=lifeline,
        memory_files=memory_files,
    )
    server.serve()


def _preload_recipe(job: dict[str, Any]) -> bool:
    """Import the file of a job's recipe; False if a fork would now be unsafe.

    Nothing is imported of a script, which does more than define functions, or where the function
    itself was given.
    """
    file, _, function = recipe_here(job["recipe"]).rpartition(":")
    if given(job["recipe"]) is not None or function == "__main__":
        return True
    return _preload(Path(file), places_here(job["recipe"], job.get("python_path", ())))


def _failed(error: InstepError) -> int:
    """The exit code of a server that has no master."""
    if isinstance(error, Unwanted):
        return 0  # the run continues without it
    print(f"instep: {error}", file=sys.stderr)
    return error.exit_code


def _settle(folder: str) -> None:
    """Be where the run was started, also if a command such as ssh has begun us elsewhere."""
    os.environ.update(settings())
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _import_torch() -> None:
    gc.disable()  # an import makes no garbage, and looking for it takes a tenth of the time
    import torch

    from instep.recipe.quick_start import spare_dynamo

    spare_dynamo()
    torch.set_num_threads(1)
    import instep.process  # noqa: F401  what a worker needs, imported before the fork

    gc.freeze()  # nor does any process forked from this one look at all this again
    gc.enable()


def _import_meshes() -> None:
    """What a worker of a mesh needs beside; it takes as long as torch."""
    gc.disable()
    import torch._dynamo.eval_frame  # noqa: F401  # DTensors need it

    import instep.parallel.split  # noqa: F401

    gc.freeze()
    gc.enable()


def _preload(recipe: Path, places: Sequence[str]) -> bool:
    """Import the recipe's file; False if a fork would now be unsafe."""
    from instep.recipe.source_file import load_module

    threads = native_threads()
    try:
        load_module(recipe, places=places)
    except (Exception, SystemExit):
        pass  # each worker meets the same error, and reports it
    if threading.active_count() > 1 or not cuda_survives_a_fork():
        return False
    return native_threads() <= threads or threads_after_a_fork() <= threads


def _start_again(note: str) -> NoReturn:
    environment = {**os.environ, _NO_PRELOAD: "1", _ENDPOINT: note}
    command = [sys.executable, "-P", "-m", "instep.launch.fork_server"]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
