"""The rival torchrun: DDP over gloo, a checkpoint every so many steps, the group restarted.

`UnderTorchrun` is the contender; `python -m rivals.under_torchrun` is what each of its
workers runs. torchrun on one node with its own store, and as many restarts as it wants.
"""

import os
import subprocess
import sys
from pathlib import Path

from rivals.contender import Recorder, Step, end_tree, newest_pid_of_each_rank, steps_in

BENCHMARKS = Path(__file__).resolve().parent.parent
CHECKPOINT_EVERY = 50
"""Steps; with this model about every half second."""

STORE_FOR_EACH_RESTART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it (torch 2.13) a restarted worker finds the addresses of the killed group in the
store, gloo's connections are refused, and the group is restarted again and again, up to minutes.
"""


class UnderTorchrun:
    """torchrun with its workers, training without end in `folder`."""

    def __init__(self, folder: Path, workers: int, global_batch: int) -> None:
        self.workers, self._records = workers, folder / "records"
        self._records.mkdir()
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        launch += ["--max-restarts", "100000", "--monitor-interval", "0.1"]
        program = ["-m", "rivals.under_torchrun", "--folder", str(folder)]
        program += ["--workers", str(workers), "--global-batch", str(global_batch)]
        variables = {**environment(folder), **STORE_FOR_EACH_RESTART}
        with (folder / "said").open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, *launch, *program], env=variables, stdout=said, stderr=said
            )

    def alive(self) -> bool:
        return self._process.poll() is None

    def pids(self) -> list[int]:
        return newest_pid_of_each_rank(self._records)

    def steps(self, newest: int | None = None) -> list[Step]:
        return steps_in(self._records, newest)

    def end(self) -> None:
        end_tree(self._process.pid)
        self._process.wait()


def environment(folder: Path) -> dict[str, str]:
    """Ours, with one thread for each worker, gloo on loopback, and benchmarks to import from.

    What is killed cannot tidy up: its temporary files go into `folder`.
    """
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **own, "TMPDIR": str(temporary)}


def main() -> None:
    import torch
    import torch.distributed as dist
    from rivals.work import Work, arguments
    from torch.nn.parallel import DistributedDataParallel

    args = arguments(__doc__.splitlines()[0]).parse_args()
    dist.init_process_group("gloo")
    rank, generation = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    work = Work(args.global_batch, args.workers, rank)
    model = DistributedDataParallel(work.model)
    optimizer = work.recipe.optimizer(model.parameters())
    step, checkpoint = 0, args.folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        step = state["step"]
        work.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    recorder = Recorder(args.folder / "records", rank)
    while True:
        step += 1
        inputs, target = work.batch(step)
        optimizer.zero_grad()
        work.loss(model(inputs), target).backward()
        optimizer.step()
        recorder.committed(step, args.workers, generation)
        if step % CHECKPOINT_EVERY == 0 and rank == 0:
            parts = {"model": work.model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step, **parts}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)


if __name__ == "__main__":
    main()
