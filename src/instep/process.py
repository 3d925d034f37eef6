"""The main program of a worker: connect to the master, train, report how it ended.

What it trains is a recipe (`_Trainer`), or the user's script, which calls `instep.join` and has
its own loop (`Script`). Or it predicts (`predict.py`).
"""

from __future__ import annotations

import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from instep.comm.protocol.endpoint import Endpoint
from instep.comm.protocol.messages import PREDICTOR
from instep.data.cores import cores
from instep.data.reading.process import own_file_offsets
from instep.data.shards.urls.remote import use_cache
from instep.engine.member import Member, ReplicaBroken
from instep.engine.membership import Released
from instep.errors import PeerError, RecipeError, WorkerError
from instep.recipe.build import call
from instep.recipe.source_file import load_function
from instep.server.async_worker import Working
from instep.server.first_server import Serving
from instep.server.other_server import Following
from instep.server.server import place_of
from instep.system import causes
from instep.system.kernels import per_machine, set_kernels, set_threads, share
from instep.system.output import drop_unwritable_output
from instep.system.stacks import write_stack_on_signal
from instep.worker.predict.predictor import Predictor
from instep.worker.training.devices import check_encrypted, choose_device
from instep.worker.training.training import Training


def main(endpoint: Endpoint, number: int, local_rank: int, phases: Mapping[str, float]) -> int:
    """Work until the run is over.

    Args:
        endpoint: where the master is.
        number: this worker's.
        local_rank: its number among the workers of its machine, from 0: that of its GPU.
        phases: seconds that parts of the start took before; `forked` is the Unix time of the fork.

    Returns:
        The exit code of the process.
    """
    own_file_offsets()  # the recipe's file was imported before the fork, and may hold open ones
    drop_unwritable_output()
    write_stack_on_signal()
    try:
        member = Member(endpoint, number, phases)
    except PeerError as error:
        print(f"instep: {error}", file=sys.stderr)
        return error.exit_code
    signal.signal(signal.SIGTERM, lambda *_: member.leave_soon())
    member.show_itself()
    work = _work(member, local_rank)
    try:
        work.run()
    except Released:
        work.released()
    except ReplicaBroken:
        return PeerError.exit_code
    except BaseException as error:
        with suppress(OSError):  # a full disk must not hide the cause
            traceback.print_exc()  # to the log, and first: once it has reported, it is killed
        try:
            member.failed(causes.failed(error, *work.at))
        except PeerError:  # the master is gone, or does not need this process any more
            return PeerError.exit_code
        return 1
    finally:
        member.close()
    return 0


def _work(member: Member, local_rank: int) -> _Trainer | Script | Predictor:
    """What this worker is there for."""
    if member.role == PREDICTOR:
        return Predictor(member, local_rank)
    is_script = member.job.recipe.endswith(":__main__")
    return Script(member, local_rank) if is_script else _Trainer(member, local_rank)


class _Trainer:
    """Trains the recipe of the job.

    Args:
        member: this worker's membership in the run.
        local_rank: its number on this machine.
    """

    def __init__(self, member: Member, local_rank: int) -> None:
        self._member, self._local_rank = member, local_rank
        self._training: Training | None = None

    @property
    def at(self) -> tuple[int, str]:
        """The step that is being computed, and the phase."""
        training = self._training
        return (training.step, training.doing) if training else (0, "recipe")

    def run(self) -> None:
        """Train to the end."""
        self._training = training = prepare(self._member, self._local_rank)
        training.join()
        for _ in training.steps():
            pass

    def released(self) -> None:
        """The run continues without this worker."""
        if self._training is not None:
            self._training.released()


def prepare(member: Member, local_rank: int) -> Training:
    """Build the training of this worker; only the group of workers is still missing."""
    job, lap = member.job, _Laps(member)
    lap("fork")
    hosts = job.launch.count
    set_kernels(job.train, share(cores(), job.workers, hosts))
    device = choose_device(job, local_rank, per_machine(job.workers, hosts))
    check_encrypted(member, device)
    use_cache(job.data.cache, job.data.cache_gb)
    recipe = call(load_function(job.recipe, places=job.python_path), job.arguments, job.seed)
    lap("recipe")
    member.phase = "building"
    made: type[Training] = Training
    if job.sync.leased:
        made = Working
        if member.role == "server":
            made = Following if place_of(member) else Serving
    training = made(member, recipe, device)
    training.sized = lambda size: set_threads(job.train, share(cores(), size, hosts))
    lap("build")
    return training


class _Laps:
    def __init__(self, member: Member) -> None:
        self._phases = member.phases
        self._since = self._phases.pop("forked", time.time())

    def __call__(self, name: str) -> None:
        now = time.time()
        self._phases[name] = now - self._since
        self._since = now


class Script:
    """The user's script, run by this worker from its top, as `python script.py` would.

    Args:
        member: this worker's membership in the run; `instep.join` finds it here.
        local_rank: as of `main`.
    """

    started: ClassVar[Script | None] = None
    """The one that this process runs."""

    def __init__(self, member: Member, local_rank: int) -> None:
        self.member, self.local_rank = member, local_rank
        self.part: Any = None
        """The script's part in the run; None before it calls `instep.join`."""
        self.at = 0, "script"
        """The step and the phase in which it failed."""

    def released(self) -> None:
        """The run continues without this worker; the session has let go of everything."""

    def run(self) -> None:
        """Run the file to its end.

        Raises:
            RecipeError, WorkerError: it ended without a session, or with one that is not closed.
        """
        Script.started = self
        self.member.phases.pop("forked", None)
        job = self.member.job
        file = job.recipe.rpartition(":")[0]
        if not Path(file).is_file():
            raise RecipeError(f"there is no script {file!r}.")
        sys.argv = [file, *map(str, job.arguments.get("argv", ()))]
        sys.path.insert(0, str(Path(file).parent))
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise WorkerError(f"the script ended itself with exit code {end.code}.") from end
        if self.part is None:
            raise RecipeError(f"{file} ended without a call of instep.join.")
        if not self.part.closed:
            raise WorkerError(
                "the script ended without session.close(): use `with instep.join(...) as session:`."
            )
