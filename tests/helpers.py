"""What several suites share: ranks as real processes, and the middle of a worker's loop."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
import time
import traceback
from multiprocessing import connection

import torch
from torch import nn

from instep.comm.torch_comm import TorchComm
from instep.data.order import Order, position, steps_in_epoch
from instep.engine.gradients import Gradients
from instep.engine.passes import share_of
from instep.engine.state.buffers import Buffers
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.delayed import Delayed
from instep.sync.generation import Generation

TIMEOUT_S = 600.0


def run_processes(size, body, folder, *arguments, timeout_s=TIMEOUT_S):
    """Call `body(comm, *arguments)` in `size` processes, each a rank of one gloo group.

    Each has `timeout_s` to answer.

    Returns:
        What each rank returned, in rank order; None for one that died.

    Raises:
        AssertionError: a rank raised; the text is its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_one_process, args=(theirs, folder / "meeting", rank, size, body, arguments)
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _results([pipe for _, pipe in ranks], timeout_s)
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


def _one_process(pipe, meeting, rank, size, body, arguments):
    try:
        store = torch.distributed.FileStore(str(meeting), size)
        comm = TorchComm(store, rank, size)
        result = None, body(comm, *arguments)
    except Exception:
        result = traceback.format_exc(), None
    pipe.send_bytes(pickle.dumps(result))
    if pipe.poll(TIMEOUT_S):
        pipe.recv_bytes()  # peers may still read from us; we are killed, or our parent hangs up


def _results(pipes, timeout_s):
    """As they come: one rank that raised may be what the others wait for."""
    found, ends = {}, time.monotonic() + timeout_s
    while missing := [pipe for pipe in pipes if pipe not in found]:
        ready = connection.wait(missing, max(0.0, ends - time.monotonic()))
        assert ready, f"{len(missing)} of {len(pipes)} ranks have neither answered nor ended"
        for pipe in ready:
            failure, found[pipe] = _answer(pipe)
            assert failure is None, failure
    return [found[pipe] for pipe in pipes]


def _answer(pipe):
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, None


class Table:
    """Regression data in memory: `samples` rows, the same at every call."""

    def __init__(self, samples, width=6, dtype=torch.float32):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(samples, width, generator=generator, dtype=torch.float64)
        mixed = self.inputs.sin().cumsum(1)[:, :3] + 0.3
        self.inputs, self.targets = self.inputs.to(dtype), mixed.to(dtype)

    def __len__(self):
        return len(self.inputs)

    def batch(self, order, epoch, first, stop):
        rows = torch.from_numpy(order.indices(epoch, first, stop))
        return self.inputs[rows], self.targets[rows]


def batches(table, global_batch, steps, seed=0):
    """The global batch of each step, whole: what one process would train on."""
    order = Order(len(table), seed)
    for step in range(1, steps + 1):
        where = position(step, len(table), global_batch)
        yield table.batch(order, *where)


def train(
    comm,
    model,
    make_optimizer,
    table,
    *,
    steps,
    global_batch=12,
    micro_batches=8,
    merge=False,
    clip=None,
    schedule=None,
    autocast=False,
    strategy="all_reduce",
    options=None,
    speeds=None,
    exact=False,
):
    """Train a copy of `model` on any Comm, with the parts that a worker uses, in its order.

    Args:
        speeds: of a step to the speeds that it is dealt by; evenly where there are none.
        exact: sum to the bit.

    Returns:
        The state of the model (parameters and buffers by name) and the loss of each step.
    """
    model = copy.deepcopy(model).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters)
    scheduler = schedule(optimizer) if schedule else None
    parts = micro_batches if exact else 0
    buffers, agree = Buffers(model, parts=parts), make_strategy(strategy, options or {})
    agree.start(parameters, comm, Generation(notes=micro_batches + len(buffers), parts=parts))
    gradients = Gradients(parameters, agree.gradient)
    order, losses = Order(len(table), 0), []

    if isinstance(agree, Delayed):
        agree.last = steps

    def passes(step, where, share):
        agree.begin_step(Attempt(0, step, 1))
        notes = torch.zeros(micro_batches + len(buffers), dtype=torch.float64)
        for number, part in enumerate(share.passes):
            inputs, targets = table.batch(order, *part.samples)
            weight = part.size / (where.stop - where.first)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = nn.functional.mse_loss(model(inputs), targets)
            notes[part.number] = weight * float(loss.detach())
            agree.begin_pass(weight, last=number == len(share.passes) - 1)
            loss.backward()
            buffers.after_pass(weight, part.number)
        notes[micro_batches:] = torch.tensor(buffers.marks(), dtype=torch.float64)
        return agree.exchange(notes)

    def update():
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        if scheduler:
            scheduler.step()

    for step in range(1, steps + 1):
        where = position(step, len(table), global_batch)
        dealt = {"merge": merge, "speeds": speeds and speeds(step)}
        share = share_of(where, micro_batches, comm.size, comm.rank, **dealt)
        agreed = passes(step, where, share)
        if agreed is None:  # the gradients did not fit the lattice
            buffers.forget()
            agreed = passes(step, where, share)
        buffers.exchange(agreed[micro_batches:].tolist(), comm)
        buffers.apply()
        agree.prepare(step, 1.0)
        agree.hand_out()
        agree.apply(update)
        losses.append(sum(agreed[:micro_batches].tolist()))
    gradients.close()
    agree.stop()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, losses


def far_apart(one, other):
    """Distance of two states, relative to the length of the second, over all tensors together."""
    assert one.keys() == other.keys()
    gap = sum(float((one[k].double() - other[k].double()).square().sum()) for k in one)
    return (gap / sum(float(other[k].double().square().sum()) for k in other)) ** 0.5


def epochs(table, global_batch, count):
    """Steps in `count` epochs."""
    return count * steps_in_epoch(len(table), global_batch)


def random_bytes(seed, largest=200):
    """A string of bytes that nobody chose."""
    dice = random.Random(seed)
    return dice.randbytes(dice.randint(1, largest))
