"""How the kernels of this process compute: on how many threads, and whether deterministically.

A sum that is split among threads rounds differently with more threads. So if parameters
must have the same bits at any number of workers, the number of threads does not depend on
the number of workers, and torch refuses kernels that are not deterministic. Otherwise the
workers of a machine share its cores.
"""

from __future__ import annotations

import os

import torch
from torch.utils import deterministic

from instep.job.train import TrainSpec
from instep.system.environment import FORKED, THREADS


def set_kernels(train: TrainSpec, threads: int) -> None:
    """Set up torch for one worker, for as long as the process lives.

    Args:
        train: says how exactly.
        threads: what this worker may use if the job does not say.
    """
    set_threads(train, threads)
    if train.determinism == "order":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may differ by run
    # use_deterministic_algorithms() would import the compiler too, which takes a second
    torch.set_deterministic_debug_mode("error")
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass over all memory
    torch.backends.cudnn.benchmark = False


def set_threads(train: TrainSpec, threads: int) -> None:
    """Set the number of threads that torch uses; may be called again at any time.

    Args:
        train: its `threads`; with `determinism = "bits"` the default is 1.
        threads: what this worker may use if neither the job nor `OMP_NUM_THREADS` says.
    """
    asked = int(os.environ.get(THREADS, 0))
    shared = (asked or threads) if train.determinism == "order" else 1
    torch.set_num_threads(1 if FORKED in os.environ else train.threads or shared)


def share(cores: int, workers: int, hosts: int) -> int:
    """How many of a machine's cores one of its workers may use, at least 1.

    Args:
        cores: of the machine.
        workers: of the run, on all machines.
        hosts: how many machines it has; 0 and 1 are this one.
    """
    return max(1, cores // per_machine(workers, hosts))


def per_machine(workers: int, hosts: int) -> int:
    """The most workers that one of so many machines has; 0 and 1 are this one."""
    return -(-workers // max(1, hosts))
