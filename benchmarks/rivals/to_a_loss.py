"""A rival on its way to a validation loss: what each of its workers runs.

    python -m rivals.to_a_loss KIND --folder F --rank R --workers W --address A --work JSON

`WAYS` has the kinds. Each makes what takes a step; all train the same model on the same batches,
and worker 0 writes a line after each validation. Its clock, which begins with the first step,
stands still while it validates.
"""

import argparse
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rivals.work import Work
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Any]
"""Forward, backward and update with a worker's part of a batch."""


class Progress:
    """The lines that the benchmark reads: seconds, samples and loss."""

    def __init__(self, work: Work, file: Path) -> None:
        self._work, self._file = work, file.open("w", buffering=1)
        self._begin = time.perf_counter()
        self._inputs, self._target = work.recipe.validate.tensors

    @torch.no_grad()
    def validate(self, samples: int) -> None:
        stopped = time.perf_counter()
        self._work.model.eval()
        loss = float(self._work.loss(self._work.model(self._inputs), self._target))
        self._work.model.train()
        print(json.dumps([stopped - self._begin, samples, loss]), file=self._file)
        self._begin += time.perf_counter() - stopped


def plain(work: Work, optimizer: torch.optim.Optimizer, model: nn.Module) -> Step:
    def step(inputs: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        work.loss(model(inputs), target).backward()
        optimizer.step()

    return step


def ddp(work: Work, args: argparse.Namespace) -> Step:
    """DDP, and with `hook` one of its communication hooks."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    meeting = f"file://{args.folder / 'meeting'}"
    dist.init_process_group("gloo", meeting, rank=args.rank, world_size=args.workers)
    given = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "static_graph": True}
    own = {name: value for name, value in args.options.items() if name in given}
    model = nn.parallel.DistributedDataParallel(work.model, **{**given, **own})
    if args.options.get("hook") == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if args.options.get("hook") == "powersgd":
        rank, start = args.options["rank"], args.options["start"]
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=start
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return plain(work, work.recipe.optimizer(model.parameters()), model)


def torchft_diloco(work: Work, args: argparse.Namespace) -> Step:
    """torchft's DiLoCo over gloo, with the outer optimizer of its own example."""
    from torch._C._distributed_c10d import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    store = TCPStore(args.address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)), use_async_quorum=False,
        load_state_dict=lambda state: None, state_dict=dict, min_replica_size=args.workers,
        init_sync=False,
        replica_id=f"group_{args.rank}", rank=0, world_size=1, hostname=args.address,
        store_addr=args.address, store_port=store.port,
        timeout=timedelta(seconds=60), quorum_timeout=timedelta(seconds=60),
    )  # fmt: skip
    inner = work.recipe.optimizer(work.model.parameters())
    outer = torch.optim.SGD(
        work.model.parameters(), lr=args.options["outer_lr"], momentum=0.9, nesterov=True
    )
    diloco = DiLoCo(
        manager, [work.model], inner, outer, sync_every=args.options["local_steps"],
        pin_memory=False, use_bucketization=True,
    )  # fmt: skip
    diloco.__enter__()
    step = plain(work, inner, work.model)
    step.keep = store, diloco  # type: ignore[attr-defined]
    return step


def hivemind(work: Work, args: argparse.Namespace) -> Step:
    """hivemind's Optimizer, which averages gradients once the peers have a global batch."""
    import hivemind as hm
    from hivemind import compression

    first = args.folder / "peer"
    peers = [] if args.rank == 0 else [wait_for(first)]
    dht = hm.DHT(
        initial_peers=peers, start=True, host_maddrs=[f"/ip4/{args.address}/tcp/0"],
        use_ipfs=False, use_relay=False, use_auto_relay=False, ensure_bootstrap_success=False,
    )  # fmt: skip
    if args.rank == 0:
        first.with_suffix(".new").write_text(str(dht.get_visible_maddrs()[0]))
        first.with_suffix(".new").rename(first)
    share = args.work["global_batch"] // args.workers
    codec = {
        "none": compression.NoCompression,
        "int8": compression.Uniform8BitQuantization,
        "fp16": compression.Float16Compression,
    }[args.options.get("codec", "none")]
    options = {"use_local_updates": True} if args.options.get("local") else {}
    optimizer = hm.Optimizer(
        dht=dht, run_id="race", batch_size_per_step=share,
        target_batch_size=args.options["rounds_of"] * args.work["global_batch"],
        optimizer=work.recipe.optimizer(work.model.parameters()),
        grad_compression=codec(),
        state_averaging_compression=codec(),
        matchmaking_time=args.options.get("matchmaking_s", 1.0), averaging_timeout=60.0,
        averager_opts={"min_group_size": args.workers, "target_group_size": args.workers},
        **options,
    )  # fmt: skip
    return plain(work, optimizer, work.model)


def flower(work: Work, args: argparse.Namespace) -> Step:
    """A local step of Flower's FedAvg; `rounds_of_flower` has the rest. Optimizers are kept."""
    return plain(work, work.recipe.optimizer(work.model.parameters()), work.model)


def rounds_of_flower(work: Work, args: argparse.Namespace, steps: Iterator[None]) -> None:
    """Take the steps when Flower's server asks for a round; worker 0 has the server, too."""
    from flwr.client import NumPyClient
    from flwr.compat.client.app import start_client

    held, local_steps = work.model.state_dict(), args.options["local_steps"]
    share = args.work["global_batch"] // args.workers

    class Participant(NumPyClient):  # type: ignore[misc]
        def get_parameters(self, config: Any) -> list[Any]:
            return [tensor.numpy() for tensor in held.values()]

        def fit(self, parameters: Any, config: Any) -> tuple[list[Any], int, dict[str, Any]]:
            with torch.no_grad():
                for tensor, values in zip(held.values(), parameters, strict=True):
                    tensor.copy_(torch.from_numpy(values))
            for _ in range(local_steps):
                next(steps, None)
            return self.get_parameters(config), local_steps * share, {}

    first = args.folder / "port"
    if args.rank == 0:
        with socket.create_server((args.address, 0)) as free:
            address = f"{args.address}:{free.getsockname()[1]}"
        rounds = -(-args.steps // local_steps) + 1
        get_context("spawn").Process(
            target=serve_flower, args=(address, args.workers, rounds)
        ).start()
        host, _, port = address.rpartition(":")
        while True:
            with suppress(ConnectionRefusedError):
                socket.create_connection((host, int(port))).close()
                break
            time.sleep(0.1)
        first.with_suffix(".new").write_text(address)
        first.with_suffix(".new").rename(first)
    start_client(server_address=wait_for(first), client=Participant().to_client(), insecure=True)


def serve_flower(address: str, workers: int, rounds: int) -> None:
    from flwr.server import ServerConfig, start_server
    from flwr.server.strategy import FedAvg

    everyone = {"min_fit_clients": workers, "min_available_clients": workers}
    strategy = FedAvg(fraction_evaluate=0.0, **everyone)
    config = ServerConfig(num_rounds=rounds)
    start_server(server_address=address, config=config, strategy=strategy)


def wait_for(file: Path) -> str:
    while not file.exists():
        time.sleep(0.1)
    return file.read_text()


WAYS: dict[str, Callable[[Work, argparse.Namespace], Step]] = {
    "ddp": ddp,
    "torchft_diloco": torchft_diloco,
    "hivemind": hivemind,
    "flower": flower,
}

DRIVEN = {"flower": rounds_of_flower}
"""Those that say themselves when a step is taken."""


def steps_of(work: Work, step: Step, args: argparse.Namespace) -> Iterator[None]:
    """Take the steps one by one; what follows a step is done when the next is asked for."""
    progress = None
    for number in range(1, args.steps + 1):
        inputs, target = work.batch(number)
        if progress is None and args.rank == 0:
            progress = Progress(work, args.folder / "progress")
        step(inputs, target)
        yield
        if progress is not None and number % args.every == 0:
            progress.validate(number * args.work["global_batch"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=WAYS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--work", type=json.loads, required=True, help="arguments of `Work`")
    parser.add_argument("--options", type=json.loads, default={}, help="of the kind")
    parser.add_argument("--every", type=int, required=True, help="steps between validations")
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")
    work = Work(workers=args.workers, rank=args.rank, **args.work)
    step = WAYS[args.kind](work, args)
    work.model.train()
    steps = steps_of(work, step, args)
    if args.kind in DRIVEN:
        DRIVEN[args.kind](work, args, steps)
    else:
        deque(steps, maxlen=0)
    wait_for(args.folder / "over")


if __name__ == "__main__":
    main()
