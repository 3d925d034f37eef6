"""The rival torchft: three replica groups, survivors go on, a supervisor restarts the killed one.

`UnderTorchft` is the contender; `python -m rivals.under_torchft` is what each group (one
process) and, with `--lighthouse`, its lighthouse runs, in a virtual environment of
their own (`make_environment`). The settings are those at which survivors pause least:
at least two groups for a quorum, and 100 ms for stragglers to join.
"""

import os
import subprocess
import sys
import sysconfig
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from rivals.contender import Recorder, Step, end_tree, steps_in
from rivals.under_torchrun import environment

VERSION = "0.2.0"
JOIN_TIMEOUT_MS = 100
QUORUM_TICK_MS = 20


def make_environment(folder: Path) -> Path:
    """A virtual environment with torchft that sees this one's packages, torch among them.

    One that is there already is used as it is.

    Returns:
        Its Python.

    Raises:
        subprocess.CalledProcessError: the package cannot be had; `stderr` says why.
    """
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    quiet: Any = {"check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-m", "venv", str(folder)], **quiet)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    wanted = f"torchft=={VERSION}"
    subprocess.run([str(python), "-m", "pip", "install", wanted], **quiet)
    subprocess.run([str(python), "-c", "import torchft"], **quiet)
    (folder / "ready").touch()
    return python


class UnderTorchft:
    """A lighthouse and a process for each group, each started again whenever it ends."""

    def __init__(self, folder: Path, workers: int, global_batch: int, python: Path) -> None:
        self.workers, self._records = workers, folder / "records"
        self._records.mkdir()
        self._said = (folder / "said").open("w")
        self._python, self._ending, self._lock = python, False, threading.Lock()
        self._groups: dict[int, subprocess.Popen[bytes]] = {}
        self._lighthouse = subprocess.Popen(
            [python, "-m", "rivals.under_torchft", "--lighthouse", "--folder", folder],
            env=environment(folder), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
        )  # fmt: skip
        assert self._lighthouse.stdout is not None
        address = self._lighthouse.stdout.readline().strip()
        self._command = [str(python), "-m", "rivals.under_torchft", "--folder", str(folder)]
        self._command += ["--workers", str(workers), "--global-batch", str(global_batch)]
        self._environment = {**environment(folder), "TORCHFT_LIGHTHOUSE": address}
        self._keepers = [threading.Thread(target=self._keep, args=(n,)) for n in range(workers)]
        for keeper in self._keepers:
            keeper.start()

    def _keep(self, number: int) -> None:
        """The supervisor of a group: starts it again the moment it ends."""
        while True:
            with self._lock:
                if self._ending:
                    return
                group = self._groups[number] = subprocess.Popen(
                    [*self._command, "--group", str(number)],
                    env=self._environment, stdout=self._said, stderr=self._said,
                )  # fmt: skip
            group.wait()

    def alive(self) -> bool:
        return self._lighthouse.poll() is None

    def pids(self) -> list[int]:
        with self._lock:
            return [group.pid for group in self._groups.values()]

    def steps(self, newest: int | None = None) -> list[Step]:
        return steps_in(self._records, newest)

    def end(self) -> None:
        with self._lock:
            self._ending = True
        for group in self._groups.values():
            end_tree(group.pid)
        for keeper in self._keepers:
            keeper.join()
        end_tree(self._lighthouse.pid)
        self._lighthouse.communicate()
        self._said.close()


def serve_lighthouse() -> None:
    """Until standard input ends; the address is the one line on standard output."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=2,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=QUORUM_TICK_MS,
    )
    port = lighthouse.address().rpartition(":")[2]
    print(f"http://127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    lighthouse.shutdown()


def average(manager: Any, parameters: list[Any]) -> None:
    """All gradients in one exchange.

    Not torchft's own DistributedDataParallel: in 0.2.0 with gloo its hook asserts after a
    failed exchange, so each survivor ends too and the training begins anew.
    """
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    flat = parameters_to_vector([parameter.grad for parameter in parameters])
    manager.allreduce(flat).wait()
    vector_to_parameters(flat, [parameter.grad for parameter in parameters])


def train(folder: Path, group: int, workers: int, global_batch: int) -> None:
    from rivals.work import Work
    from torch._C._distributed_c10d import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    work = Work(global_batch, workers, group)
    inner = work.recipe.optimizer(work.model.parameters())

    def state() -> dict[str, object]:
        return {"model": work.model.state_dict(), "optimizer": inner.state_dict()}

    def take(state: dict[str, dict[str, object]]) -> None:
        work.model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=take, state_dict=state, min_replica_size=2,
        replica_id=f"group_{group}", rank=0, world_size=1, hostname="127.0.0.1",
        store_addr="127.0.0.1", store_port=store.port,
    )  # fmt: skip
    parameters = list(work.model.parameters())
    optimizer = Optimizer(manager, inner)
    recorder = Recorder(folder / "records", group)
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        inputs, target = work.batch(step + 1)
        work.loss(work.model(inputs), target).backward()
        average(manager, parameters)
        optimizer.step()
        if manager.current_step() > step and manager.errored() is None:
            recorder.committed(
                manager.current_step(), manager.num_participants(), manager._quorum_id
            )


def main() -> None:
    from rivals.work import arguments

    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--lighthouse", action="store_true")
    parser.add_argument("--group", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")
    if args.lighthouse:
        serve_lighthouse()
    else:
        train(args.folder, args.group, args.workers, args.global_batch)


if __name__ == "__main__":
    main()
