"""The part that a process has in a run: what trains there, and how that ends.

It knows nothing of what a user calls. Way in: `session.py:Session`, which has one.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from instep.client.join.hosting import Host
from instep.client.join.placement import Placement
from instep.data.cores import cores
from instep.data.loader import Loader
from instep.data.shards.urls.remote import use_cache
from instep.engine.member import Member
from instep.engine.membership import Released
from instep.errors import InstepError, PeerError
from instep.process import Script
from instep.recipe.build import call, seed_everything
from instep.recipe.recipe import Recipe
from instep.system import causes
from instep.system.kernels import set_kernels, share
from instep.worker.own.loop import OwnLoop
from instep.worker.training.devices import check_encrypted, choose_device
from instep.worker.training.training import Training

_OPEN = set[Path]()
"""Runs of which this is process 0, and whose session is not closed."""


@atexit.register
def _warn_of_open_sessions() -> None:
    failed = hasattr(sys, "last_value")  # an exception nobody caught, which says enough
    for run in _OPEN if not failed else ():
        print(
            "instep: warning: the program ended without session.close(), so the run has no model "
            f"and no report: {run}. Use `with instep.join(...) as session:`.",
            file=sys.stderr,
        )


class Participation:
    """This process's part in a run.

    Args:
        member: its membership.
        place: which of the processes it is.
        host: what process 0 has of the run beside it; None in the others, and in a script.
        script: the one that it runs, if `instep run` has started it.
    """

    def __init__(
        self, member: Member, place: Placement, host: Host | None, script: Script | None = None
    ) -> None:
        self.member, self.place = member, place
        self._host, self._script = host, script
        self.device = torch.device("cpu")
        self.recipe: Recipe | None = None
        self.training: Training | None = None
        """Trains the recipe, if `Session.steps` was called."""
        self.loop: OwnLoop | None = None
        """Has the user's own loop, if `Session.prepare` was called."""
        self.readers: list[Loader] = []
        """Those of the own loop: to train on, then to evaluate on."""
        self.closed = False
        """Whether this process has finished its part in the run."""
        if host is not None:
            _OPEN.add(member.run)

    def begin(self, recipe: Callable[..., Any] | Recipe | None) -> None:
        """Seed everything, choose a device, make the recipe if needed; `join` calls it."""
        job = self.member.job
        seed_everything(job.seed)
        use_cache(job.data.cache, job.data.cache_gb)
        self.device = choose_device(job, self.place.local_rank, self.place.local_size)
        check_encrypted(self.member, self.device)
        chosen = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 0
        if self._script is not None:
            chosen = share(cores(), job.workers, job.launch.count)
        set_kernels(job.train, chosen or max(1, cores() // self.place.local_size))
        if not self.member.complete:
            arguments = dict(job.arguments)
            if self._script is not None:
                arguments.pop("argv", None)  # the script's own
            self.recipe = call(recipe, arguments, job.seed) if callable(recipe) else recipe

    def formed(self) -> None:
        """The processes have met, and train together from now on."""
        if self._host is not None:
            self._host.formed()

    @property
    def work(self) -> Training | OwnLoop | None:
        """The training or the own loop, if there is one."""
        return self.training or self.loop

    def close_readers(self) -> None:
        """Close the loaders of the own loop; a second call does nothing."""
        for reader in self.readers:
            reader.close()
        self.readers = []

    def end(self) -> dict[str, Any] | None:
        """End with the others; on process 0 the summary of the run."""
        self.closed = True
        _OPEN.discard(self.member.run)
        self.close_readers()
        self.member.close()
        return self._host.end() if self._host is not None else None

    def fail(self, error: BaseException) -> None:
        """Report an error, so that the run ends in every process with this as its cause.

        Raises:
            InstepError: the cause, if `error` is only a consequence of another process's error.
        """
        self.closed = True
        _OPEN.discard(self.member.run)
        work, over = self.work, None
        at = (work.in_flight, work.doing) if work else (0, "preparing")
        if self._script is not None:  # which sends the last message
            self._script.at = at
            if work is not None and isinstance(error, Released):
                work.released()
            elif work is not None:
                work.close()
            self.close_readers()
            return
        try:
            self.member.failed(causes.failed(error, *at))
        except PeerError as ended:  # says why, if the master has said so
            over = ended
        self.member.close()
        try:
            if self._host is not None:
                self._host.end()
        except InstepError as cause:
            if isinstance(error, PeerError):
                raise cause from error  # the cause, not its consequence
        else:
            if over is not None and self._host is None and type(error) is PeerError:
                raise over from error
        finally:
            self.close_readers()
            if work is not None:
                work.close()  # last: it waits for collectives that are in flight
