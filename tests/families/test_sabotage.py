"""The gate on meshes that are made by hand, right and sabotaged, with two real processes.

What a mesh computes is written here with torch's own parts and without instep, so that the gate
is held against meshes that it does not know.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from pair import GLOBAL_BATCH, MICRO_BATCHES, SEED
from torch import nn
from twenty_five import PAIRS

import instep
from helpers import run_processes
from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.errors import RecipeError
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.parallel.global_batch.batch_norm import make_global
from instep.parallel.two_blocks import TwoBlocks
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward
from instep.worker.trial import moves
from instep.worker.trial.gate import GradientGate, whole_passes
from instep.worker.trial.two_blocks import on_two_blocks

pytestmark = [pytest.mark.process, pytest.mark.tail]


class Mesh:
    """One rank of a mesh that computes the gradients of a family; the subclasses say how."""

    factor = 1
    still = False
    """Whether parameters stay at their start."""

    def __init__(self, comm, family, *, two=False):
        self.comm, pair = comm, PAIRS[family]
        self.parts = pair.make(torch.float32)
        self.model = self.parts.model.train()
        self.begin()
        train = TrainSpec(global_batch=GLOBAL_BATCH, micro_batches=MICRO_BATCHES, **pair.train)
        job = JobSpec(recipe="none.py:none", seed=SEED, train=train)
        given = {"seed": SEED, "shuffle": True, "processes": 0, "collate": self.parts.collate}
        loader = Loader(self.parts.train, **given)
        self.passes = whole_passes(
            loader, job, Batches(len(self.parts.train), job.train.global_batch)
        )
        recipe = instep.Recipe(**{**self.parts.recipe(), "weight": self.parts.of})
        forward = Forward(recipe, self.model, torch.device("cpu"), "float32")
        self.blocks = TwoBlocks(self.model) if two else None
        with self.alone() if comm.rank else self.reference(forward):
            by, moves._BY = moves._BY, 0.0 if self.still else moves._BY
            self.gate = GradientGate(forward, SEED)
            if comm.rank == 0:
                self.gate.compute(self.passes)
            moves._BY = by

    def begin(self):
        """Change the start of the model."""

    def alone(self):
        """Where two blocks of the model are compared, in this context it has no others."""
        return self.blocks.alone() if self.blocks else nullcontext()

    def reference(self, forward):
        return on_two_blocks(forward, self.blocks, pytest.fail) if self.blocks else nullcontext()

    def verdict(self):
        """None if the gate lets the mesh pass, else what it says."""
        self.shard()
        self.gate.agree(self.comm)
        with self.alone():
            return self.compared()

    def compared(self):
        with self.gate.moved((name, box, held) for name, (box, held, _) in self.held().items()):
            self.compute()
        gradients = {name: (box, gradient) for name, (box, _, gradient) in self.held().items()}
        try:
            assert self.gate.compare(gradients, self.comm, "by hand").tensors > 0
        except RecipeError as error:
            return str(error)
        return None

    def shard(self):
        """Make a mesh of the model."""

    def held(self):
        """Of each parameter here: the box, its values, its gradient."""
        return {
            name: (tuple((0, size) for size in p.shape), p.detach(), p.grad)
            for name, p in self.model.named_parameters()
        }

    def mine(self):
        """The numbers of this rank's micro-batches."""
        return range(self.comm.rank, len(self.passes), self.comm.size)

    def seed(self, number):
        set_generators(self.passes[number].keys[0])

    def compute(self):
        total = sum(self.parts.of(each.batch) for each in self.passes) / self.factor
        for number in self.mine():
            batch = self.passes[number].batch
            self.seed(number)
            (self.parts.mean_loss(batch) * (self.parts.of(batch) / total)).backward()


class Replicas(Mesh):
    """Each rank has the whole model, and its own micro-batches."""

    forgotten = ""

    def compute(self):
        super().compute()
        for name, parameter in self.model.named_parameters():
            if name != self.forgotten:
                dist.all_reduce(parameter.grad)


class Forgetful(Replicas):
    forgotten = "blocks.1.attention.wo.weight"


class BehindZero(Forgetful):
    """The head starts at zero, so that all gradients behind it are zero."""

    def begin(self):
        nn.init.zeros_(self.model.head.weight)


class BehindZeroAndStill(BehindZero):
    still = True


class OneKey(Replicas):
    def seed(self, number):
        set_generators(self.passes[number - number % self.comm.size].keys[0])


class Sharded(Mesh):
    """FSDP2, a unit for each block."""

    def shard(self):
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (self.comm.size,))
        for unit in [*self.model.blocks, self.model]:
            fully_shard(unit, mesh=mesh)
        self.factor = self.comm.size  # by which it divides

    def held(self):
        return {name: of_dtensor(p) for name, p in self.model.named_parameters()}


class Averaged(Sharded):
    """It is forgotten that FSDP2 averages gradients over ranks."""

    def shard(self):
        super().shard()
        self.factor = 1


class TensorParallel(Mesh):
    """Columns, then rows, in attention and in the layers behind it."""

    def plan(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        columns = ("attention.wq", "attention.wk", "attention.wv", "up")
        rows = ("attention.wo", "down")
        return {n: ColwiseParallel() for n in columns} | {n: RowwiseParallel() for n in rows}

    def shard(self):
        from torch.distributed.tensor.parallel import parallelize_module

        mesh = dist.init_device_mesh("cpu", (self.comm.size,))
        for block in self.model.blocks:
            parallelize_module(block, mesh, self.plan())

    def mine(self):
        return range(len(self.passes))

    def held(self):
        plain = super().held()
        return {
            name: of_dtensor(p) if hasattr(p, "placements") else plain[name]
            for name, p in self.model.named_parameters()
        }


class PartialSums(TensorParallel):
    """The sum over ranks behind the last product of a block is left out."""

    def plan(self):
        from torch.distributed.tensor import Partial
        from torch.distributed.tensor.parallel import RowwiseParallel

        return super().plan() | {"down": RowwiseParallel(output_layouts=Partial())}


def of_dtensor(parameter):
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, first = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    box = tuple((begin, begin + size) for begin, size in zip(first, shape, strict=True))
    gradient = None if parameter.grad is None else parameter.grad.to_local()
    return box, parameter.detach().to_local(), gradient


class Stages(Mesh):
    """Two stages; the head's weight, which is that of the embedding, is on both."""

    tied = True

    def shard(self):
        kept = range(2) if self.comm.rank == 0 else range(2, 4)
        self.own = [n for n, _ in self.model.named_parameters() if self.here(n, kept)]

    def here(self, name, kept):
        if name.startswith("blocks."):
            return int(name.split(".")[1]) in kept
        return name == "embed.weight" or (name.startswith("norm")) == (self.comm.rank == 1)

    def held(self):
        return {name: each for name, each in super().held().items() if name in self.own}

    def compute(self):
        model = self.model
        for number in range(len(self.passes)):
            ids, target = self.passes[number].batch
            edge = torch.empty(*ids.shape, 16)
            if self.comm.rank == 0:
                x = model.embed(ids) + model.places(torch.arange(ids.shape[1]))
                for block in model.blocks[:2]:
                    x = block(x)
                dist.send(x.detach(), 1)
                dist.recv(edge, 1)
                x.backward(edge)
            else:
                dist.recv(edge, 0)
                x = edge.requires_grad_()
                for block in model.blocks[2:]:
                    x = block(x)
                out = model.head(model.norm(x)).transpose(1, 2)
                share = len(ids) / sum(each.size for each in self.passes)
                (nn.functional.cross_entropy(out, target) * share).backward()
                dist.send(edge.grad, 0)
        if self.tied:
            dist.all_reduce(model.embed.weight.grad)


class CutApart(Stages):
    tied = False


class SharedNorm(Replicas):
    """Each rank has half of the batch, and asks for the other's statistics."""

    def shard(self):
        self.reads = make_global(self.model)
        self.reads.join(self.comm)

    def half(self):
        (whole,) = self.passes
        inputs, target = whole.batch
        return inputs[self.comm.rank :: 2], target[self.comm.rank :: 2]

    def compute(self):
        with self.reads.one_pass():
            self.reads.backward(self.parts.mean_loss(self.half()), 0.5)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


class NormOfAShard(SharedNorm):
    def compute(self):
        (self.parts.mean_loss(self.half()) / 2).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


RIGHT = {
    "replicas": (Replicas, "GPT"),
    "replicas with dropout": (Replicas, "TransformerEncoder"),
    "sharded": (Sharded, "GPT"),
    "tensor-parallel": (TensorParallel, "GPT"),
    "two stages, tied": (Stages, "GPT, tied"),
    "a norm over both ranks": (SharedNorm, "ResNet"),
}
SABOTAGED = {
    "a forgotten all-reduce of a gradient": (Forgetful, "GPT", Forgetful.forgotten),
    "a forgotten all-reduce in the forward pass": (PartialSums, "GPT", "embed.weight"),
    "the same behind a head that starts at zero": (BehindZero, "GPT", Forgetful.forgotten),
    "an average for a sum": (Averaged, "GPT", "embed.weight"),
    "a tied weight cut apart": (CutApart, "GPT, tied", "embed.weight"),
    "a dropout with one key on two ranks": (OneKey, "TransformerEncoder", "embed.weight"),
    "a norm over a shard": (NormOfAShard, "ResNet", "stem.weight"),
}
MISSED = {
    "a forgotten all-reduce, behind zero, of parameters at their start": (
        BehindZeroAndStill,
        "GPT",
    ),
}
"""What parameters have to be moved for."""

IN_TWO_BLOCKS = {
    "replicas": None,
    "sharded": None,
    "tensor-parallel": None,
    "a forgotten all-reduce of a gradient": Forgetful.forgotten,
    "a forgotten all-reduce in the forward pass": "embed.weight",
    "an average for a sum": "embed.weight",
    "a dropout with one key on two ranks": "embed.weight",
}
"""What is compared in two blocks of the model alone, and the tensor that is named."""


def all_of_them(comm, meeting):
    store = dist.FileStore(str(meeting), comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    try:
        meshes = {**RIGHT, **SABOTAGED, **MISSED}
        return {
            (name, two): mesh(comm, family, two=two).verdict()
            for name, (mesh, family, *_) in meshes.items()
            for two in ([False, True] if name in IN_TWO_BLOCKS else [False])
        }
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """What the gate says of each mesh; the same on both ranks."""
    folder = tmp_path_factory.mktemp("gate")
    one, other = run_processes(2, all_of_them, folder, folder / "mesh")
    assert one == other
    return one


@pytest.mark.parametrize("name", RIGHT)
def test_a_mesh_that_computes_what_one_process_computes_passes(name, verdicts):
    assert verdicts[name, False] is None


@pytest.mark.parametrize("name", SABOTAGED)
def test_a_sabotaged_mesh_is_refused_and_the_first_tensor_is_named(name, verdicts):
    *_, tensor = SABOTAGED[name]
    assert f"gradient of {tensor!r}" in (verdicts[name, False] or "")


@pytest.mark.parametrize("name", MISSED)
def test_without_the_move_a_start_at_zero_would_hide_it(name, verdicts):
    assert verdicts[name, False] is None


@pytest.mark.parametrize("name", IN_TWO_BLOCKS)
def test_two_blocks_of_a_mesh_are_enough_to_tell(name, verdicts):
    tensor, said = IN_TWO_BLOCKS[name], verdicts[name, True]
    assert said is None if tensor is None else f"gradient of {tensor!r}" in said
