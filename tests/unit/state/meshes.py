"""Models whose tensors are split over real processes, for tests of what is saved and loaded.

What a rank is to have is cut out of the whole tensor with `torch.chunk`, and never with the code
under test. `on_ranks` starts the processes; `Layout` says how a model lies on them.
"""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing import start_processes

from instep.engine.state.capture import CommitProgress, capture, read_checkpoint, restore
from instep.engine.update import Update
from instep.job.mesh import MeshSpec
from instep.state.boxes import MeshRank
from instep.state.files.manifest import FileEntry

PLAIN = MeshSpec()
MESHES = [
    PLAIN,
    MeshSpec(shard=2),
    MeshSpec(shard=3),
    MeshSpec(shard=4),
    MeshSpec(tensor=2),
    MeshSpec(tensor=4),
    MeshSpec(shard=2, tensor=2),
    MeshSpec(stages=2),
    MeshSpec(stages=4),
    MeshSpec(stages=2, shard=2),
    MeshSpec(stages=2, tensor=2),
]
SHAPES = [(), (1,), (2,), (5,), (7, 3), (4, 6), (3, 2, 5), (9, 1), (8, 8), (0, 4), (2, 3, 1, 2)]


def body(rank, work, count, folder, args):
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=count)
    try:
        work(rank, folder, *args)
    finally:
        dist.destroy_process_group()


def on_ranks(count, work, folder, *args):
    """Run `work(rank, folder, *args)` in so many processes of one gloo group."""
    arguments = (work, count, folder, args)
    start_processes(body, arguments, nprocs=count, start_method="forkserver")


class Axes(NamedTuple):
    """By which dim a tensor is split along each axis; None: replicated along it."""

    shard: int | None
    tensor: int | None


@dataclass
class Layout:
    """How a model lies on a mesh."""

    mesh: MeshSpec
    axes: dict[str, Axes] = field(default_factory=dict)

    def drawn(self, shapes, rng):
        """With placements drawn for tensors of these shapes."""
        for name, shape in shapes.items():
            dims = [None, *range(len(shape))]
            self.axes[name] = Axes(
                rng.choice(dims) if self.mesh.shard > 1 else None,
                rng.choice(dims) if self.mesh.tensor > 1 else None,
            )
        return self

    def stage_of(self, name):
        return int(name[1:]) % self.mesh.stages


class Split(nn.Module):
    """What one rank has of a model: named tensors, as DTensors where the mesh splits them."""

    def __init__(self, layout, whole, worker, device_mesh, tied):
        super().__init__()
        place = layout.mesh.coordinate(worker)
        for name, tensor in whole.items():
            if layout.stage_of(name) != place.stage:
                continue
            if name.startswith("b"):
                self.register_buffer(name, tensor.clone())
                continue
            self.register_parameter(
                name, nn.Parameter(split(tensor, layout, name, place, device_mesh))
            )
        for name, first in tied.items():
            if first in self._parameters:
                self._parameters[name] = self._parameters[first]


def split(tensor, layout, name, place, device_mesh):
    """A rank's part of a tensor, by torch.chunk: first along the tensor axis, then along shard."""
    if device_mesh is None:
        return tensor.clone()
    axes = layout.axes[name]
    part = tensor
    for dim, count, number in (
        (axes.tensor, layout.mesh.tensor, place.tensor),
        (axes.shard, layout.mesh.shard, place.shard),
    ):
        if dim is not None and count > 1:
            part = chunk(part, count, number, dim)
    kinds = [Replicate() if dim is None else Shard(dim) for dim in axes]
    if axes.shard is not None and axes.shard == axes.tensor:
        kinds[0] = _StridedShard(axes.shard, split_factor=layout.mesh.tensor)
    return DTensor.from_local(
        part.clone(),
        device_mesh,
        kinds,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def chunk(tensor, count, number, dim):
    parts = torch.chunk(tensor, count, dim)
    return parts[number] if number < len(parts) else tensor.narrow(dim, 0, 0)


def device_mesh_of(mesh, rank):
    """The mesh of this rank's stage; every process makes those of all stages."""
    found = None
    for stage in range(mesh.stages):
        size = mesh.shard * mesh.tensor
        first = stage * size
        if size == 1:
            continue
        ranks = torch.arange(first, first + size).view(mesh.shard, mesh.tensor)
        made = DeviceMesh("cpu", ranks, mesh_dim_names=("shard", "tensor"))
        if first <= rank < first + size:
            found = made
    return found


@dataclass
class Held:
    """A rank's model with its optimizer."""

    model: nn.Module
    turn: object
    rank: MeshRank | None
    layout: Layout
    device_mesh: object
    own: object = None

    @property
    def optimizer(self):
        return self.turn.update.optimizer

    def capture(self, step=3):
        return capture(CommitProgress(step=step), self.model, [self.turn], rank=self.rank)

    def restore(self, snapshot):
        return restore(snapshot, "the test", self.model, [self.turn], rank=self.rank)

    def load(self, path):
        snapshot = read_checkpoint(path, self.model, [self.turn], rank=self.rank)
        self.own = snapshot.tensors.get("own", {})
        return self.restore(snapshot)

    def step(self, gradients):
        place = self.layout.mesh.coordinate(self.rank.worker if self.rank else 0)
        for name, parameter in self.model.named_parameters():
            parameter.grad = split(gradients[name], self.layout, name, place, self.device_mesh)
        self.optimizer.step()


class Memory:
    """A strategy that remembers what it is given."""

    def __init__(self):
        self.remembered = {}

    def state(self):
        return self.remembered

    def load_state(self, state):
        self.remembered = dict(state)


def turn_of(model, make=lambda parameters: torch.optim.Adam(parameters, lr=0.1)):
    optimizer = make(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    update = Update(
        optimizer,
        scheduler,
        list(model.parameters()),
        seed=0,
        max_grad_norm=None,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
    )
    return SimpleNamespace(name="", update=update, strategy=Memory())


def held(layout, whole, worker, device_mesh, tied, make=None):
    model = Split(layout, whole, worker, device_mesh, tied)
    turn = turn_of(model, make) if make else turn_of(model)
    rank = MeshRank(layout.mesh, worker) if layout.mesh.ranks > 1 else None
    return Held(model, turn, rank, layout, device_mesh)


def drawn_tensors(rng, seed):
    """Whole tensors of a model with random shapes; never without one that can be split."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 4), *rng.choices(SHAPES, k=5)]
    named = {f"p{number}": shape for number, shape in enumerate(shapes)} | {"b6": (3,), "b7": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in named.items()}


def entry_of(path):
    import hashlib

    data = path.read_bytes()
    return FileEntry(len(data), hashlib.sha256(data).hexdigest())


def seeded(seed):
    return random.Random(seed)


def local_of(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
