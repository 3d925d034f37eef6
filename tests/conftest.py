"""What every test may rely on: one thread, quick processes, nothing left over."""

import gc
import multiprocessing
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

import slurm as real_slurm
from disks import Disk, Ext4
from marks import leave_to_the_tail

os.environ.setdefault("OMP_NUM_THREADS", "1")
# else every program that a test starts compiles all of instep again, which takes 0.2 s each time
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ.setdefault("RAY_raylet_start_wait_time_s", "600")  # Ray itself gives up after 30

# a verdict is not to depend on the machine's speed
hypothesis.settings.register_profile("instep", deadline=None)
hypothesis.settings.load_profile("instep")

LOADED = (
    *("torch", "torch.distributed.fsdp", "torch._dynamo", "numba", "pytest"),
    *("instep.comm.torch_comm", "instep.comm.memory", "instep.comm.codecs.kernels"),
    *("instep.engine.gradients", "instep.engine.passes", "instep.engine.state.buffers"),
    *("instep.sync.base", "instep.sync.all_reduce", "instep.sync.delayed"),
)
"""What ranks in processes of their own import in some test: each is a fork that has it already."""

multiprocessing.set_forkserver_preload(LOADED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-order", metavar="SEED", help="files and tests in a drawn order")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All that is collected stays to the end: no search for garbage looks at it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before those are left out that `-m` does not want
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Most of a grid is left to `make test-tail`; with `--random-order` the order is drawn."""
    leave_to_the_tail(items)
    if seed := config.getoption("--random-order"):
        draw = random.Random(seed)
        files = {item.nodeid.partition("::")[0]: draw.random() for item in items}
        draw.shuffle(items)
        items.sort(key=lambda item: files[item.nodeid.partition("::")[0]])


@pytest.fixture(autouse=True)
def drawn_alike() -> None:
    """Whatever a test draws is the same whichever tests its process ran before."""
    for name in ("torch", "numpy.random"):
        if (module := sys.modules.get(name)) is not None:
            (module.manual_seed if name == "torch" else module.seed)(0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk of 8 MB."""
    disk = Disk(tmp_path / "disk", 8_000_000)
    yield disk
    disk.close()


@pytest.fixture
def frail_disk(tmp_path: Path) -> Iterator[Ext4]:
    """One of 32 MB that can be held up, and give up."""
    disk = Ext4(tmp_path / "disk", 32_000_000)
    yield disk
    disk.close()


@pytest.fixture
def slurm(slurm_cluster: real_slurm.Slurm) -> Iterator[real_slurm.Slurm]:
    """A real Slurm of three nodes, on this machine; a test leaves no job in it."""
    yield slurm_cluster
    slurm_cluster.cancel_all()


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real_slurm.Slurm]:
    """The one for all tests of this process."""
    if reason := real_slurm.why_not():
        pytest.skip(reason)
    cluster = real_slurm.Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()
